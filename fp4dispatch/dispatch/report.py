"""Log lines, warnings and errors of a choice, each at most once per process. No torch."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from fp4dispatch.backends import registry
from fp4dispatch.dispatch.whatif import reproduce
from fp4dispatch.errors import BackendUnsupportedError, CaptureDeniedError, NoBackendError
from fp4dispatch.machine import log
from fp4dispatch.machine.system import System
from fp4dispatch.problem.decision import Decision, RuleHit
from fp4dispatch.settings import settings

ARGUMENT = "argument"
"""``Decision.requested_by`` where the caller named the backend."""


def report(decision: Decision, tokens: str = "") -> None:
    """Log a choice once: one line for all M of a shape that have the same choice.

    Parameters
    ----------
    decision
        What was chosen.
    tokens
        For which M, in words. Empty where the range is not known: then the first M stands for all.
    """
    p = decision.problem
    rule = decision.rule.id if decision.rule else ""
    chosen = (decision.backend, decision.activation, rule, decision.requested_by)
    key = (p.op, decision.arch, p.n, p.k, p.scaling, p.capture, p.raw, *chosen)
    if not log.said((*key, tokens)):
        log.once((*key, tokens), logging.INFO, decision.line(tokens))
        if tokens and log.said((*key, tokens)):
            log.count((*key, ""))  # a single M of that range is not logged again
        for sentence in settings.unknown():
            log.once(("unknown", sentence), logging.WARNING, sentence)
    for warning in decision.warnings:
        if not log.said(("warning", warning)):
            log.once(("warning", warning), logging.WARNING, warning)


def report_ranges(decided: Iterable[tuple[int, Decision]]) -> None:
    """Log the choices for all M of a shape: one line for each range with one choice and one rule.

    Parameters
    ----------
    decided
        The largest M and the Decision of each range, ascending. The last also holds for every larger M.
    """
    spans: list[tuple[int, Decision]] = []
    for m, decision in decided:
        for warning in decision.warnings:
            log.once(("warning", warning), logging.WARNING, warning)
        if spans and _alike(spans[-1][1], decision):
            spans.pop()
        spans.append((m, decision))
    first = 1
    for m, decision in spans:
        if m == spans[-1][0]:
            tokens = "any M" if first == 1 else f"M>={first}"
        else:
            tokens = f"M={first}" if first == m else f"M={first}..{m}"
        report(replace(decision, warnings=()), tokens)
        first = m + 1


def _alike(a: Decision, b: Decision) -> bool:
    return (a.backend, a.activation, a.rule) == (b.backend, b.activation, b.rule)


def warn_of_capture(decision: Decision, why: str) -> None:
    """Warn once that a named backend runs in a CUDA graph, where ``auto`` would not choose it."""
    text = (
        f"{decision.backend} was named by {decision.requested_by} and runs, though auto would not choose it "
        f"in a CUDA graph: {why}"
    )
    log.once(("warning", text), logging.WARNING, text)


def refusal(decision: Decision, layer: str, system: System, disabled: Iterable[str]) -> Exception:
    """Return the error for a problem that the named backend, or every backend, cannot run."""
    command = f"  reproduce anywhere: {reproduce(decision, system, disabled)}"
    if decision.requested != registry.AUTO:
        asked = decision.verdicts[0]
        who = "" if decision.requested_by == ARGUMENT else f" by {decision.requested_by}"
        where = f' for layer "{layer}"' if layer else ""
        why = "; ".join(reason.sentence(fix=True) for reason in asked.reasons)
        others = ", ".join(v.backend for v in decision.verdicts[1:] if v.accepted) or "nothing"
        text = (
            f'backend="{asked.backend}" was requested{who}{where} and cannot run {decision.problem} on '
            f"{decision.machine}: {why}. Could run it: {others}\n{command}"
        )
        return BackendUnsupportedError(text, decision)
    head = f"nothing can run {decision.problem} on {decision.machine}" + (f', layer "{layer}"' if layer else "")
    return NoBackendError("\n".join([head, *decision.text().splitlines()[1:], command]), decision)


def capture_refusal(decision: Decision, hits: Iterable[RuleHit], layer: str) -> CaptureDeniedError:
    """Return the error for a named backend that must not run in a CUDA graph, with the rules that say so."""
    who = "" if decision.requested_by == ARGUMENT else f" by {decision.requested_by}"
    where = f' for layer "{layer}"' if layer else ""
    why = "; ".join(hit.sentence(fix=True) for hit in hits)
    others = ", ".join(v.backend for v in decision.verdicts if v.accepted) or "nothing"
    return CaptureDeniedError(
        f'backend="{decision.backend}" was requested{who}{where} and must not run {decision.problem} in a CUDA graph: '
        f"{why}.\n  Run it without graphs, or name another backend for them. Could run it there: {others}",
        decision,
    )
