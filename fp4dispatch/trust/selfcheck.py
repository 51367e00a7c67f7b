"""Run a backend on problems with known answers before ``auto`` uses it on a machine for the first time.

A kernel can be supported, compiled, and still wrong: a race loses tiles, padding is read, a row gets the scale of
another. :mod:`fp4dispatch.trust.trial` runs and judges the canaries. This module makes a verdict of it, and
:mod:`fp4dispatch.trust.quarantine` keeps the verdict. A backend that failed is rejected with the reason
``QUARANTINED``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from fp4dispatch.backends import registry
from fp4dispatch.backends.base import Backend
from fp4dispatch.errors import InputError
from fp4dispatch.jit.store import guard
from fp4dispatch.machine import capture
from fp4dispatch.machine import log as _log
from fp4dispatch.machine.locks import ForkSafeLock
from fp4dispatch.machine.ranks import Group, Ranks
from fp4dispatch.machine.system import System
from fp4dispatch.policy.catalogue import catalogue
from fp4dispatch.problem import Activation, Op, OutDtype, Problem, Scaling
from fp4dispatch.settings import settings
from fp4dispatch.trust import facts, layercheck, quarantine, trial
from fp4dispatch.trust.layercheck import Subject
from fp4dispatch.trust.tilecheck import Finding
from fp4dispatch.trust.verdict import CheckResult

__all__ = ["CheckResult", "Subject", "agree", "check", "condemn", "results", "trusted", "trusted_layer"]

_lock = ForkSafeLock()

_GRAVITY = (
    "never written",
    "NaN",
    "stale",
    "zero",
    "outside",
    "wrong values",
    "row gain",
    "column gain",
    "not repeatable",
    "raised",
)


def check(
    backend: Backend,
    op: Op,
    scaling: Scaling,
    activation: Activation,
    system: System,
    device: torch.device | str,
    *,
    seed: int = 0,
    half: OutDtype | None = None,
) -> CheckResult:
    """Run every canary that a backend supports, and judge it. Does not read or change stored verdicts.

    Parameters
    ----------
    backend
        What to check.
    op, scaling
        As in :class:`~fp4dispatch.problem.Problem`.
    activation
        ``nvfp4``, ``fp8`` or ``bf16``: one that the backend runs.
    system
        The machine, as seen from ``device``: its GPU is the first.
    device
        Where to run.
    seed
        Of the operands.
    half
        ``bfloat16`` or ``float16``: run the 16-bit canaries in this dtype only; None uses both.

    Returns
    -------
    CheckResult
        ``failed`` also where the backend raised. ``unchecked`` where it supports none of the canaries, or memory ran
        out. Synchronises the device.

    Raises
    ------
    CaptureError
        During CUDA graph capture.
    """
    capture.forbid_in_capture(
        f"the self-check of {backend.name} ({op}, {scaling})", "run one such layer eagerly, or fp4dispatch verify"
    )
    started = time.perf_counter()
    blank = replace(_blank(backend, op, scaling, activation, system), half=half or "")
    plain = replace(system, quarantined=frozenset())
    found = trial.run(backend, op, scaling, activation, plain, torch.device(device), seed, half)
    return _judged(blank, found, time.perf_counter() - started)


def _judged(blank: CheckResult, found: trial.Outcome, seconds: float) -> CheckResult:
    """Make a verdict of the outcome of a run."""
    findings = sorted(found.findings, key=lambda finding: _GRAVITY.index(finding.kind))
    return replace(
        blank,
        status="failed" if findings else "passed" if found.ran and not found.stopped else "unchecked",
        ran=tuple(found.ran),
        kind=findings[0].kind if findings else "",
        findings=tuple(map(str, findings)),
        evidence=tuple(finding.to_dict() for finding in findings),
        seconds=seconds,
        build_ms=found.build_seconds * 1e3,
        check_ms=(seconds - found.build_seconds) * 1e3,
        lasting=found.lasting or any(finding.kind != "raised" for finding in findings),
        notes=tuple(found.notes),
    )


def half_of(problem: Problem) -> OutDtype | None:
    """Return the 16-bit dtype to check in for a problem; None uses both."""
    return None if problem.out_dtype == "float32" else problem.out_dtype


def known(backend: Backend, problem: Problem, system: System) -> CheckResult | None:
    """Return the verdict on a backend for a kind of problem, of this process or from disk; None if there is none.

    Runs nothing.

    Parameters
    ----------
    backend, system
        As in :func:`check`.
    problem
        As in :func:`trusted`, with the activation format resolved.
    """
    mode = settings.selfcheck
    blank = _blank(backend, problem.op, problem.scaling, problem.activation, system)
    blank = replace(blank, half=half_of(problem) or "")
    if mode == "off":
        return replace(blank, status="off")
    name = blank.name
    return quarantine.recalled(name) or (quarantine.store.find(name) if mode == "auto" else None)


def trusted(backend_name: str, problem: Problem, system: System, device: torch.device | str) -> CheckResult:
    """Return the verdict on a backend for a kind of problem: of this process, from disk, or made now.

    With ``FP4DISPATCH_SELFCHECK=force`` each process makes its own. With ``off`` none is made or used.

    Parameters
    ----------
    backend_name
        A registered backend.
    problem
        Its op, scaling, activation format and output dtype count; its sizes do not.
    system, device
        As in :func:`check`.

    Raises
    ------
    CaptureError
        If it would have to be made during CUDA graph capture.
    """
    backend = registry.instance(backend_name)
    activation = backend.activation_for(problem)
    if activation is None:
        raise InputError(f"{backend_name} does not run {problem}: there is nothing to check")
    half = half_of(problem)
    blank = replace(_blank(backend, problem.op, problem.scaling, activation, system), half=half or "")
    return _settled(blank, lambda: check(backend, problem.op, problem.scaling, activation, system, device, half=half))


def trusted_layer(subject: Subject, system: System) -> CheckResult:
    """Return the verdict on a backend for the layer that is bound: of this process, from disk, or made now.

    Parameters
    ----------
    subject
        The layer, its backend and the weights in both layouts. Layers of one shape share a verdict.
    system
        The machine, as seen from the device of the weights.

    Returns
    -------
    CheckResult
        As of :func:`check`, with ``layer`` set. ``FP4DISPATCH_SELFCHECK`` works as in :func:`trusted`.

    Raises
    ------
    CaptureError
        If it would have to be made during CUDA graph capture.
    """
    problem = subject.problem
    blank = _blank(subject.backend, problem.op, problem.scaling, problem.activation, system)
    blank = replace(blank, half=half_of(problem) or "", layer=str(subject))

    def make() -> CheckResult:
        capture.forbid_in_capture(f"the self-check of {subject.backend.name} ({subject})", "bind or warm up the layer")
        started = time.perf_counter()
        found = layercheck.run(subject, replace(system, quarantined=frozenset()))
        return _judged(blank, found, time.perf_counter() - started)

    return _settled(blank, make)


def _settled(blank: CheckResult, make: Callable[[], CheckResult]) -> CheckResult:
    """Return the verdict on a subject. Makes it once; stores it if it may last."""
    mode = settings.selfcheck
    if mode == "off":
        return replace(blank, status="off")
    name = blank.name
    found = quarantine.recalled(name)
    if found is not None:
        return found
    with _lock:
        found = quarantine.recalled(name) or (quarantine.store.find(name) if mode == "auto" else None)
        if found is None:
            found = make()
            if found.lasting and found.status != "unchecked":
                quarantine.store.save(found)
        if found.lasting or found.status == "failed":
            quarantine.remember(found)
    if found.status == "passed":
        _log.debug("self-check: %s", found.text())
    else:
        guard.warn(f"self-check: {found.text()}")
    return found


def condemn(backend: Backend, problem: Problem, system: System, finding: Finding) -> CheckResult:
    """Put a backend into quarantine for numbers that were wrong outside of the canaries; return the verdict.

    Parameters
    ----------
    backend, problem
        What ran, with the activation format resolved.
    system
        As in :func:`check`.
    finding
        What was wrong.
    """
    blank = _blank(backend, problem.op, problem.scaling, problem.activation, system)
    found = replace(
        blank,
        status="failed",
        ran=(finding.canary,),
        kind=finding.kind,
        findings=(str(finding),),
        evidence=(finding.to_dict(),),
    )
    quarantine.store.save(found)
    quarantine.remember(found)
    _log.warning("self-check: %s", found.text())
    return found


def results(system: System) -> tuple[CheckResult, ...]:
    """Return every verdict that holds on a machine: first those of this process, then those on disk. Runs nothing."""
    found = {result.name: result for result in quarantine.known()}
    for result in quarantine.holding(system, registry.backends()):
        found.setdefault(result.name, result)
    return tuple(found.values())


def agree(result: CheckResult, group: Group = None) -> CheckResult:
    """Share a verdict with all ranks: a backend that failed on one rank is quarantined on all.

    A collective call: every rank of the group calls it with its own verdict on the same subject. Without
    ``torch.distributed`` it returns the verdict unchanged.

    Parameters
    ----------
    result
        This rank's verdict.
    group
        The ranks; all of them by default.

    Returns
    -------
    CheckResult
        This rank's verdict where it failed or where all passed. Else a failed one with the evidence of the rank that
        failed: it holds in this process, and is not stored, because this GPU did not fail.

    Raises
    ------
    InputError
        On every rank, if the ranks ask about different subjects.
    RankError
        If a rank is gone, see :class:`fp4dispatch.machine.ranks.Ranks`.
    """
    everyone = Ranks(group).gather(result.to_dict() | {"status": result.status})
    subjects = {tuple(str(other[name]) for name in ("backend", "op", "scaling", "activation")) for other in everyone}
    if len(subjects) > 1:
        listed = "; ".join(" ".join(subject) for subject in sorted(subjects))
        raise InputError(f"ranks ask about different self-checks: {listed}. Call agree in the same order on every rank")
    failed = next(((rank, other) for rank, other in enumerate(everyone) if other["status"] == "failed"), None)
    if failed is None or result.status in ("failed", "off"):
        return result
    rank, other = failed
    theirs = CheckResult.from_dict(other)
    agreed = replace(
        result,
        status="failed",
        kind=theirs.kind,
        findings=tuple(f"{finding} (on rank {rank})" for finding in theirs.findings),
        evidence=theirs.evidence,
        lasting=False,
        notes=(*result.notes, f"{result.status} here, failed on rank {rank}"),
    )
    quarantine.remember(agreed)
    return agreed


def _blank(backend: Backend, op: Op, scaling: Scaling, activation: Activation, system: System) -> CheckResult:
    """Return an unchecked verdict: the subject, and the facts under which a verdict will hold."""
    arch = system.arch.sm if system.arch else ""
    ours = {c.proven_by for c in catalogue().capabilities if c.backend == backend.name and c.op == op and c.proof}
    gdc = "not known" if not ours else "yes" if all((name, arch) in system.proven for name in ours) else "no"
    held = facts.of_backend(system, backend)
    return CheckResult(backend.name, op, scaling, activation, arch, "unchecked", gdc=gdc, facts=held)
