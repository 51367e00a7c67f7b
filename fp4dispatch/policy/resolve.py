"""The policy: which backend runs a problem on a machine, and why. Pure: facts in, :class:`Decision` out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from fp4dispatch.machine.system import System
from fp4dispatch.policy import rules as _rules
from fp4dispatch.policy.capability import REFERENCE as REFERENCE
from fp4dispatch.policy.capability import activation_of, offered, quarantined, reasons_of
from fp4dispatch.policy.rules import Rule
from fp4dispatch.problem import Activation, Problem
from fp4dispatch.problem.decision import Decision, Reason, RuleHit, Verdict
from fp4dispatch.problem.measurement import EXACTNESS, Measurement, Timing, Worth
from fp4dispatch.problem.prediction import PredictedTime, Predictions

TUNED, PREDICTED = "tuned", "predicted"
"""Ids of the rules that a measurement and a prediction are."""
PREDICTED_SOURCE = "bench/notes/random-problems.md"


class SupportsProblem(Protocol):
    """What the policy needs of a backend; :class:`~fp4dispatch.backends.base.Backend` has it."""

    def supports(self, problem: Problem, system: System) -> tuple[Reason, ...]:
        """Collect every reason against; empty means that the backend can run the problem."""

    def activation_for(self, problem: Problem) -> Activation | None:
        """Return the activation format that the backend would use, or None where it has none."""


def resolve(
    problem: Problem,
    system: System,
    backends: Mapping[str, SupportsProblem],
    *,
    requested: str = "auto",
    requested_by: str = "auto",
    disabled: Sequence[str] = (),
    elsewhere: Mapping[str, Reason] | None = None,
    measured: Measurement | None = None,
    predicted: Predictions | None = None,
    rules: Sequence[Rule] | None = None,
) -> Decision:
    """Choose a backend, judging every candidate.

    The order is:

    1. A backend that is requested by name is honoured or refused, never replaced. Refused means ``backend`` None.
    2. Otherwise the candidates are, in order: those of the ``prefer`` rules that hold, rule by rule; then every other
       backend that is offered to ``auto``, in the order of ``backends``.
    3. The first with no reason against it (capability) and no ``deny`` rule that holds (safety) is chosen.
    4. Where there is none, ``reference`` is, if it can run the problem, with a warning that says what to install.
    5. Where that cannot either, ``backend`` is None.
    6. Predicted times may replace the choice of step 3 by a faster candidate that was acceptable as well, of the same
       or a finer activation format (:meth:`~fp4dispatch.problem.prediction.Predictions.faster`), or of a coarser one
       where the rule says what its format is worth. The rule is then called ``predicted``. Where the choice of step 3
       has a measured time, predictions are not asked.
    7. Measured times may replace the choice so far by a faster candidate that was acceptable as well
       (:meth:`~fp4dispatch.problem.measurement.Measurement.faster`). The rule is then called ``tuned``. A candidate
       with a reason or a deny rule against it stays out, however fast it is.

    Every candidate gets a verdict with all reasons and all deny rules, also those behind the chosen one. A backend that
    a matching rule names and that is not in ``backends`` is ``UNAVAILABLE``, and never chosen.

    Parameters
    ----------
    problem, system
        What to run, and the facts of the machine.
    backends
        Name to backend, in registry order.
    requested, requested_by
        ``auto`` or the canonical name of one backend, and who asked: ``argument`` or the name of a variable.
    disabled
        Names that are never used, not even by name.
    elsewhere
        Backends that other ranks cannot use, and why. ``auto`` does not choose them.
    measured
        Times of the candidates on this machine, if there are any.
    predicted
        Predicted times of the candidates on this GPU, if there are any.
    rules
        The rules; those of ``policy/rules.toml`` by default.

    Returns
    -------
    Decision
        With at most one warning.
    """
    held = [rule for rule in (_rules.rules() if rules is None else rules) if rule.when.holds(problem, system)]
    placed = _order(held, problem, system, backends)
    if requested != "auto":
        first: dict[str, RuleHit | None] = {requested: None}
        placed = first | placed
    apart = elsewhere if elsewhere and requested == "auto" else {}
    verdicts = tuple(
        _timed(_judge(name, problem, system, backends, held, disabled, apart.get(name)), measured, predicted)
        for name in placed
    )
    if requested != "auto":
        asked = verdicts[0]
        chosen = asked if asked.can_run else None
        rule, warning = None, _named_anyway(asked, requested_by) if chosen else ""
    else:
        chosen = next((v for v in verdicts if v.accepted and _offered(v.backend, backends)), None)
        rule = placed[chosen.backend] if chosen else None
        default = chosen
        if chosen is not None:
            candidates = [v for v in verdicts if _offered(v.backend, backends)]
            known = measured is not None and measured.of(chosen.backend, chosen.activation) is not None
            worth = _worth(chosen, held, candidates)
            if predicted is not None and not known:
                chosen, rule = _predicted(predicted, chosen, rule, candidates, worth)
            if measured is not None:
                chosen, rule = _tuned(measured, chosen, rule, candidates, worth)
        warning = _fallback(problem, system, verdicts, default, chosen, backends)
        if chosen is None:
            chosen = next((v for v in verdicts if v.backend == REFERENCE and v.accepted), None)
            warning = _last_resort(problem, system, verdicts) if chosen else ""
    return Decision(
        problem=problem,
        arch=system.arch,
        machine=str(system),
        backend=chosen.backend if chosen else None,
        activation=chosen.activation if chosen else problem.activation,
        requested=requested,
        requested_by=requested_by,
        rule=rule,
        verdicts=verdicts,
        warnings=(warning,) if warning else (),
    )


def denials(name: str, problem: Problem, system: System) -> tuple[RuleHit, ...]:
    """Return the deny rules that hold against one backend, as :func:`resolve` finds them."""
    return tuple(
        rule.hit(name)
        for rule in _rules.rules()
        if rule.verb == "deny" and rule.names(name, problem, system) and rule.when.holds(problem, system)
    )


def _offered(name: str, backends: Mapping[str, SupportsProblem]) -> bool:
    return name in backends and offered(name, backends[name])


def _order(
    held: Sequence[Rule], problem: Problem, system: System, backends: Mapping[str, SupportsProblem]
) -> dict[str, RuleHit | None]:
    """Return the candidates in order, each with the prefer rule that placed it; ``reference`` is last."""
    placed: dict[str, RuleHit | None] = {}
    for rule in held:
        if rule.verb == "prefer":
            for name in rule.backends:
                placed.setdefault(name, rule.hit(name))
    for name in backends:
        if name != REFERENCE:
            placed.setdefault(name, None)
    for rule in held:
        if rule.verb == "deny":
            for name in rule.backends:
                if rule.names(name, problem, system):
                    placed.setdefault(name, None)
    placed.setdefault(REFERENCE, None)
    return placed


def _judge(
    name: str,
    problem: Problem,
    system: System,
    backends: Mapping[str, SupportsProblem],
    held: Sequence[Rule],
    disabled: Sequence[str],
    elsewhere: Reason | None,
) -> Verdict:
    denied = tuple(rule.hit(name) for rule in held if rule.verb == "deny" and rule.names(name, problem, system))
    backend = backends.get(name)
    if backend is None:
        return Verdict(name, problem.activation, (Reason("UNAVAILABLE", "not part of this fp4dispatch"),), denied)
    try:
        reasons = reasons_of(backend, problem, system)
        activation = activation_of(backend, problem) or problem.activation
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plug-in may raise anything, also SystemExit: only the plug-in is rejected
        text = f"it failed when asked what it supports: {type(error).__name__}: {error}"
        return Verdict(name, problem.activation, (Reason("UNAVAILABLE", text, f"repair {name}"),), denied)
    if not any(reason.code == "QUARANTINED" for reason in reasons):  # a plug-in need not ask for verdicts itself
        reasons = (*quarantined(name, problem, system), *reasons)
    if name in disabled:
        reasons = (Reason("DENIED", "disabled", f"take {name} out of FP4DISPATCH_DISABLE"), *reasons)
    if elsewhere is not None:
        reasons = (elsewhere, *reasons)
    return Verdict(name, activation, reasons, denied)


def _timed(verdict: Verdict, measured: Measurement | None, predicted: Predictions | None) -> Verdict:
    timing = measured.of(verdict.backend, verdict.activation) if measured is not None else None
    if timing is not None and measured is not None:
        verdict = replace(verdict, measured=f"{timing}, on {measured.date}{_table(measured)}")
    time = predicted.of(verdict.backend, verdict.activation) if predicted is not None and verdict.can_run else None
    if time is None or predicted is None:
        return verdict
    return replace(verdict, predicted=f"{time.us:.1f} us, {predicted.source}")


def _table(measured: Measurement) -> str:
    return f", {measured.table}" if measured.table else ""


def _worth(default: Verdict, held: Sequence[Rule], offered: Sequence[Verdict]) -> Worth | None:
    """Return what the rule that placed a choice says of its activations; None where they are worth any time.

    Or where no coarser ones would run without that rule.
    """
    prefer = [rule for rule in held if rule.verb == "prefer"]
    placed_by = next((rule for rule in prefer if default.backend in rule.backends), None)
    if placed_by is None or placed_by.worth is None:
        return None
    accepted = {v.backend: v for v in offered if v.accepted}
    others = (name for rule in prefer if rule is not placed_by for name in rule.backends)
    without = next((accepted[name] for name in others if name in accepted), default)
    if EXACTNESS[without.activation] >= EXACTNESS[default.activation]:
        return None
    return Worth(without.activation, placed_by.worth)


def _preferred(
    old: PredictedTime | Timing, new: PredictedTime | Timing, rule: RuleHit | None, worth: Worth | None
) -> str:
    """Name a choice that times have replaced, and the rule behind it."""
    by = f" by {rule.id}" if rule is not None else ""
    coarser = worth is not None and EXACTNESS[new.activation] < EXACTNESS[old.activation]
    return f"{old.backend} ({old.activation}), preferred{by}{f' {worth}' if coarser else ''}"


def _predicted(
    predicted: Predictions, default: Verdict, rule: RuleHit | None, offered: Sequence[Verdict], worth: Worth | None
) -> tuple[Verdict, RuleHit | None]:
    """Return the choice after predicted times have been looked at, and the rule to cite for it."""
    accepted = {(v.backend, v.activation): v for v in offered if v.accepted}
    found = predicted.faster((default.backend, default.activation), accepted, worth)
    if found is None:
        return default, rule
    new, old = found
    instead = f"{_preferred(old, new, rule, worth)}, {old.us:.1f} us"
    because = f"predicted {new.us:.1f} us; {instead}; {predicted.source}"
    return accepted[new.backend, new.activation], RuleHit(PREDICTED, "prefer", because, PREDICTED_SOURCE, "")


def _tuned(
    measured: Measurement, default: Verdict, rule: RuleHit | None, offered: Sequence[Verdict], worth: Worth | None
) -> tuple[Verdict, RuleHit | None]:
    """Return the choice after measured times have been looked at, and the rule to cite for it."""
    accepted = {(v.backend, v.activation): v for v in offered if v.accepted}
    found = measured.faster((default.backend, default.activation), accepted, worth)
    if found is None:
        return default, rule
    new, old = found
    where = measured.table or "measured here"
    because = f"{where}: {new}; {_preferred(old, new, rule, worth)}, {old}"
    ranks = f", {measured.ranks} ranks" if measured.ranks > 1 else ""
    source = measured.table or f"fp4dispatch tune, {measured.name[:12]}{ranks}"
    hit = RuleHit(TUNED, "prefer", because, source, measured.date)
    return accepted[new.backend, new.activation], hit


# ------------------------------------------------------------------------------------------------------------ warnings


def _named_anyway(asked: Verdict, requested_by: str) -> str:
    if not asked.denied:
        return ""
    why = "; ".join(hit.sentence() for hit in asked.denied)
    return f"{asked.backend} was named by {requested_by} and runs, though auto would not choose it here: {why}"


def _fallback(
    problem: Problem,
    system: System,
    verdicts: Sequence[Verdict],
    default: Verdict | None,
    chosen: Verdict | None,
    backends: Mapping[str, SupportsProblem],
) -> str:
    """Say why no backend that the rules prefer runs; empty where the user can do nothing about it."""
    if default is None or chosen is None:
        return ""
    before = verdicts[: verdicts.index(default)]
    ahead = [v for v in before if not _missing(v) and not _not_asked(v, problem, backends)]
    if not ahead:
        return ""
    why = "; ".join(f"{v.backend}: {_why(v)}" for v in ahead)
    return (
        f"{_what(problem)} on {system.arch or 'no GPU'} runs on {chosen.backend}, not on what is preferred there: {why}"
    )


def _last_resort(problem: Problem, system: System, verdicts: Sequence[Verdict]) -> str:
    """Say that the slow reference runs, and what to do about it."""
    if system.arch is None:
        advice = "the tensors are on the CPU, or no NVIDIA GPU is visible (fp4dispatch doctor says why)"
    else:
        fixes = [
            f"for {v.backend}: {' and '.join(fixes)}" for v in verdicts if not _hopeless(v) and (fixes := _fixes(v))
        ]
        advice = "; or ".join(fixes[:3]) or f"no other backend of this fp4dispatch runs it on {system.arch}"
    return f"{_what(problem)} runs on the slow reference backend: {advice}"


def _what(problem: Problem) -> str:
    """Name a problem without its M: one warning then serves every M."""
    return f"{problem.op} N={problem.n} K={problem.k} ({problem.scaling})"


def _missing(verdict: Verdict) -> bool:
    return any(r.code == "UNAVAILABLE" and not r.fix for r in verdict.reasons)


def _not_asked(verdict: Verdict, problem: Problem, backends: Mapping[str, SupportsProblem]) -> bool:
    """Whether the caller pinned an activation format that this backend does not have. That is no fallback."""
    if problem.activation == "any" or not any(r.code == "DTYPE" for r in verdict.reasons):
        return False
    return backends[verdict.backend].activation_for(problem) is None


def _hopeless(verdict: Verdict) -> bool:
    return verdict.backend == REFERENCE or any(
        r.code in ("ARCH", "UNAVAILABLE", "DTYPE") and not r.fix for r in verdict.reasons
    )


def _fixes(verdict: Verdict) -> list[str]:
    return list(dict.fromkeys(each.fix for each in _against(verdict) if each.fix))


def _why(verdict: Verdict) -> str:
    return ", ".join(each.sentence() for each in _against(verdict))


def _against(verdict: Verdict) -> tuple[Reason | RuleHit, ...]:
    return *verdict.reasons, *verdict.denied
