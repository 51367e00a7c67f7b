"""One choice on every rank, for ``warmup`` and ``tune`` with several ranks.

A rank with another backend gives other bits and other times. A rank that stops while the others wait in a collective
hangs them all (sglang#32021, vllm#52291, vllm#54618). So ranks share outcomes and errors: where one fails, all stop and
name it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fp4dispatch.backends import registry
from fp4dispatch.backends.base import Backend
from fp4dispatch.dispatch import choose, launches, predicted, tuned
from fp4dispatch.errors import RankError
from fp4dispatch.machine import log as _log
from fp4dispatch.machine.ranks import Group as Group
from fp4dispatch.machine.ranks import Ranks as Ranks
from fp4dispatch.policy.resolve import PREDICTED, TUNED
from fp4dispatch.problem import Activation, Op, Problem, Scaling
from fp4dispatch.problem.decision import Decision, Reason, ReasonCode
from fp4dispatch.trust import facts, quarantine, selfcheck
from fp4dispatch.trust.verdict import CheckResult

Decisions = tuple[tuple[int, Decision], ...]
"""The largest M and the Decision of each range of M, as :attr:`fp4dispatch.run.routes.Bound.decisions`."""

Subject = tuple[str, Op, Scaling, Activation]
"""Backend, op, scaling and activation format of a self-check."""


def settle(ranks: Ranks, decide: Callable[[], Mapping[str, Decisions]]) -> Mapping[str, Decisions]:
    """Decide until all ranks with the same problem run the same backends for it. A collective call.

    Each round shares three things. A backend that failed its self-check goes into quarantine on every rank. A backend
    that one rank cannot run is excluded from ``auto`` on all. Tuned times and launches that some rank lacks are not
    used.
    Ranks with different GPUs may still differ in the end, with a warning.

    Parameters
    ----------
    ranks
        The ranks that have to agree.
    decide
        Returns the decisions of this rank by name of the problem, and decides again at each call. Ranks may have
        different problems, as pipeline stages do.

    Returns
    -------
    Mapping
        The decisions of this rank in the last round.

    Raises
    ------
    RankError
        If a rank could not decide, or the ranks do not agree in the end.
    """
    for _ in range(2 * len(registry.backends()) + 3):
        mine = ranks.attempt("choosing backends", decide)
        if ranks.size == 1:
            return mine
        everyone = ranks.gather(_summary(mine))
        if not _take_over(ranks, mine, everyone):
            return mine
        choose.decide_anew()
    raise RankError("the ranks do not come to one choice of backends: report this as a bug")


def agree_on(ranks: Ranks, subjects: Mapping[Subject, CheckResult]) -> set[Subject]:
    """Share verdicts and return what failed on any rank; that is in quarantine on all. A collective call.

    Parameters
    ----------
    ranks
        The ranks that have to agree.
    subjects
        Verdicts of this rank. A subject that only another rank has checked counts as unchecked here.
    """
    failed = set()
    for subject in sorted({s for one in ranks.gather(list(subjects)) for s in one}):
        mine = subjects.get(subject) or _unchecked(subject)
        agreed = selfcheck.agree(mine, ranks.group) if ranks.size > 1 else mine
        if agreed.status == "failed":
            failed.add(subject)
    return failed


def _unchecked(subject: Subject) -> CheckResult:
    """Return the verdict of a rank that has not checked a subject, or lacks the backend."""
    system = choose.facts()
    backend = registry.backends().get(subject[0])
    held = facts.of_backend(system, backend) if isinstance(backend, Backend) else {}
    return CheckResult(*subject, system.arch.sm if system.arch else "", "unchecked", facts=held)


def _summary(decisions: Mapping[str, Decisions]) -> dict[str, Any]:
    """Return what the other ranks need, as plain data."""
    refused: dict[str, dict[str, tuple[str, str]]] = {}
    for name, ranges in decisions.items():
        verdicts = [v for _, decision in ranges for v in decision.verdicts if not v.accepted]
        hits = {v.backend: (v.reasons or v.denied)[0] for v in verdicts}
        refused[name] = {
            backend: (hit.code, hit.text if isinstance(hit, Reason) else hit.because) for backend, hit in hits.items()
        }
    return {
        "chosen": {name: tuple((m, d.backend, d.activation) for m, d in ranges) for name, ranges in decisions.items()},
        "refused": refused,
        "judged": {name: {v.backend for _, d in ranges for v in d.verdicts} for name, ranges in decisions.items()},
        "launches": {name: _launches(ranges) for name, ranges in decisions.items()},
        **{rule: sorted(n for n, r in decisions.items() if _by(rule, r)) for rule in (TUNED, PREDICTED)},
        "failed": sorted(_failed()),
    }


def _launches(ranges: Decisions) -> str:
    """Return a hash of the timed launches of a problem; empty where it has none."""
    backends = [(m, str(d.backend), replace(d.problem, activation=d.activation)) for m, d in ranges]
    return launches.digest(backends, choose.facts())


def _by(rule: str, ranges: Decisions) -> bool:
    """Whether measured or predicted times made one of the decisions."""
    return any(d.rule is not None and d.rule.id == rule for _, d in ranges)


def _failed() -> set[Subject]:
    return {(r.backend, r.op, r.scaling, r.activation) for r in quarantine.known() if r.status == "failed"}


def _take_over(ranks: Ranks, mine: Mapping[str, Decisions], everyone: list[dict[str, Any]]) -> bool:
    """Apply what the other ranks shared; return whether that may change a choice on any rank.

    Depends on shared data only, so that every rank makes the same collective calls.
    """
    changed = False
    failed: list[set[Subject]] = [set(one["failed"]) for one in everyone]
    new = set().union(*failed).difference(set(failed[0]).intersection(*failed))
    if new:
        known = {(r.backend, r.op, r.scaling, r.activation): r for r in quarantine.known()}
        agree_on(ranks, {subject: known[subject] for subject in sorted(new) if subject in known})
        changed = True
    differ = [
        name
        for name in sorted({name for one in everyone for name in one["chosen"]})
        if len({(one["chosen"][name], one["launches"][name]) for one in everyone if name in one["chosen"]}) > 1
    ]
    for name in differ:
        changed |= (
            _exclude(name, mine, everyone)
            or _drop_times(name, mine, everyone)
            or _drop_predictions(name, mine, everyone)
        )
    if differ and not changed:
        _tell(differ, everyone)
    return changed


def _exclude(name: str, mine: Mapping[str, Decisions], everyone: list[dict[str, Any]]) -> bool:
    """Exclude a backend that one rank has chosen and another cannot choose."""
    chosen = {backend for one in everyone for _, backend, _ in one["chosen"].get(name, ())}
    found = False
    for backend in sorted(chosen):
        against: list[tuple[int, tuple[ReasonCode, str]]] = [
            (rank, one["refused"][name].get(backend) or ("UNAVAILABLE", "not installed"))
            for rank, one in enumerate(everyone)
            if name in one["chosen"] and (backend in one["refused"][name] or backend not in one["judged"][name])
        ]
        if not against:
            continue
        found = True
        if name in mine:
            rank, (code, text) = against[0]
            problem = mine[name][0][1].problem
            choose.exclude(backend, problem.op, problem.scaling, Reason(code, f"{text} (on rank {rank})"))
    return found


def _drop_times(name: str, mine: Mapping[str, Decisions], everyone: list[dict[str, Any]]) -> bool:
    """Ignore tuned times of a problem for which they make ranks differ, in the backend or in its launch."""
    holders = [rank for rank, one in enumerate(everyone) if name in one[TUNED] or one["launches"].get(name)]
    if not holders:
        return False
    if name in mine:
        tuned.ignore(mine[name][0][1].problem)
        _log.warning(
            "tuned times of %s are there on rank %s only, or differ, and are not used: "
            "call warmup(..., tune=True) on all ranks",
            name,
            ", ".join(map(str, holders)),
        )
    return True


def _drop_predictions(name: str, mine: Mapping[str, Decisions], everyone: list[dict[str, Any]]) -> bool:
    """Ignore predicted times of a problem for which they make ranks differ: those of ranks with other GPUs."""
    holders = [rank for rank, one in enumerate(everyone) if name in one[PREDICTED]]
    if not holders:
        return False
    if name in mine:
        predicted.ignore(mine[name][0][1].problem)
        _log.info("%s: ranks have different GPUs, so predicted times do not decide", name)
    return True


def _tell(names: list[str], everyone: list[dict[str, Any]]) -> None:
    """Warn about a difference that remains, such as GPUs of two models."""
    for name in names:
        by_rank = [
            f"rank {rank}: {', '.join(dict.fromkeys(b for _, b, _ in one['chosen'][name]))}"
            for rank, one in enumerate(everyone)
            if name in one["chosen"]
        ]
        _log.warning("ranks run different backends for %s: %s", name, "; ".join(by_rank))


def problem_name(problem: Problem) -> str:
    """Return the name of a problem among ranks: everything but M."""
    bias = " + bias" if problem.bias else ""
    bias += "" if problem.capture == "none" else f", {problem.capture} capture from M={problem.m_min}"
    return (
        f"{problem.op} N={problem.n} K={problem.k} ({problem.scaling}, {problem.activation}) "
        f"-> {problem.out_dtype}{bias}"
    )
