"""Choose the backend for a problem on this machine: the policy, the self-check, and a cache of decisions. No torch."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace

from fp4dispatch.backends import registry
from fp4dispatch.backends.base import Backend
from fp4dispatch.backends.registry import instance
from fp4dispatch.dispatch import here, launches, predicted, tuned
from fp4dispatch.dispatch.report import capture_refusal, refusal, report
from fp4dispatch.dispatch.request import Request, requested
from fp4dispatch.machine import capture as _capture
from fp4dispatch.machine import log
from fp4dispatch.machine import system as _system
from fp4dispatch.machine.locks import ForkSafeLock
from fp4dispatch.machine.system import System
from fp4dispatch.policy import resolve
from fp4dispatch.policy.rules import m_bucket
from fp4dispatch.problem import Op, Problem, Scaling
from fp4dispatch.problem.decision import Decision, Reason, RuleHit
from fp4dispatch.settings import settings
from fp4dispatch.trust.verdict import CheckResult

__all__ = ["decide_anew", "exclude", "instance", "reset", "select"]

_lock = ForkSafeLock()
_decided: dict[tuple[Problem, Request, int | None, Hashable], tuple[System, Decision]] = {}
_DECIDING = ("tuned", "fp8_copy", "jit", "selfcheck", "pdl")
"""Settings that a choice depends on, beside those of the request: a change is a new choice."""
_elsewhere: dict[tuple[str, Scaling], dict[str, Reason]] = {}

launches.serve()


def select(
    problem: Problem, *, backend: str | None = None, layer: str = "", gpu: int | None = 0, say: bool = True
) -> Decision:
    """Choose the backend for a problem on this machine: once a bucket of M, then from a cache.

    A backend that was named is used or refused, never replaced. Precedence: ``backend`` >
    ``FP4_GEMM_BACKEND`` (``FP4DISPATCH_FP8_BACKEND`` for ``fp8_gemm``) > the policy.

    Parameters
    ----------
    problem
        What to run.
    backend
        A backend name, ``auto``, or None to leave it to the environment.
    layer
        Name of the layer, for messages.
    gpu
        Index of the CUDA device that the tensors are on, as this process counts; None for the CPU.
    say
        Whether to log the choice. False for a caller that asks for all M of a shape and reports them together
        (:func:`~fp4dispatch.dispatch.report.report_ranges`).

    Returns
    -------
    Decision
        ``backend`` is never None.

    Raises
    ------
    BackendUnsupportedError
        If the named backend cannot run the problem.
    NoBackendError
        If nothing can.
    UnknownBackendError, SettingsError
        If the name, from the argument or from the environment, is not a backend.
    CaptureError
        If a backend would have to be self-checked while a CUDA graph is being captured.
    CaptureDeniedError
        Inside :func:`fp4dispatch.machine.capture.mode`, if a rule about capture forbids the named backend.

    Notes
    -----
    Thread-safe, and safe during capture: then it only reads facts, and logs nothing. The first time that ``auto``
    chooses a backend on a GPU model (a plug-in: on a CPU too), the self-check runs
    (:mod:`fp4dispatch.trust.selfcheck`). If it fails, the next backend is chosen. For a backend that cannot be
    checked, see :meth:`fp4dispatch.trust.verdict.CheckResult.vouches_for`.
    """
    request = requested(problem.op, backend)
    machine = _system.current()
    bucket = replace(problem, m=m_bucket(problem.m, problem.op, here.arch_on(machine, gpu)))
    key = (bucket, request, gpu, settings.texts(_DECIDING))
    cached = _decided.get(key)
    if cached is None or cached[0] is not machine:
        for each in _DECIDING:
            getattr(settings, each)  # raises for a wrong one
        machine, decided, lasting = _decide(bucket, request, gpu)
        cached = machine, decided
        if lasting:
            _decided[key] = cached
    decision = replace(cached[1], problem=problem)
    if decision.backend is None:
        raise refusal(decision, layer, here.seen_from(cached[0], gpu), request[2])
    if _capture.declared() is not None and (hits := denied_in_graph(decision, here.seen_from(cached[0], gpu))):
        raise capture_refusal(decision, hits, layer)
    if say:
        report(decision)
    return decision


def prospect(problem: Problem, *, backend: str | None = None, gpu: int | None = 0) -> tuple[Decision, bool]:
    """Return what :func:`select` will choose unless a self-check fails, and whether it would run one.

    Arguments as there. Runs, logs and keeps nothing.

    Raises
    ------
    UnknownBackendError, SettingsError
        As :func:`select`.
    """
    system = here.seen_from(here.machine(), gpu)
    bucket = replace(problem, m=m_bucket(problem.m, problem.op, system.arch))
    decision = _resolve(bucket, system, requested(problem.op, backend))
    return replace(decision, problem=problem), _must_check(decision, gpu)


def facts(gpu: int | None = 0) -> System:
    """Return the facts that decisions for a device are made from. Its GPU is the first."""
    return here.seen_from(here.machine(), gpu)


def bucket(m: int, op: Op, gpu: int | None = 0) -> int:
    """Return the largest M that shares its decision with ``m`` on a device."""
    return m_bucket(m, op, here.arch_on(_system.current(), gpu))


def m_ranges(op: Op, gpu: int | None, last: int) -> Iterator[int]:
    """Yield the largest M of each range of M with a decision of its own, ascending, up to and including ``last``.

    Parameters
    ----------
    op
        As in :class:`~fp4dispatch.problem.Problem`.
    gpu
        As in :func:`select`.
    last
        A power of two.
    """
    arch, m = here.arch_on(_system.current(), gpu), 0
    while m < last:
        m = m_bucket(m + 1, op, arch)
        yield m


def not_for_capture(decision: Decision, gpu: int | None) -> str:
    """Return why a backend that was chosen outside of CUDA graphs must not run in one; empty if no rule says so.

    Parameters
    ----------
    decision
        Of :func:`select`, for ``capture="none"``.
    gpu
        As there.
    """
    problem = decision.problem
    if problem.capture != "none" or decision.backend is None:
        return ""
    system = here.seen_from(here.machine(), gpu)
    bucket = m_bucket(problem.m, problem.op, system.arch)
    hits = resolve.denials(decision.backend, replace(problem, m=bucket, capture="full"), system)
    known = {hit.id for verdict in decision.verdicts if verdict.backend == decision.backend for hit in verdict.denied}
    return "; ".join(hit.sentence(fix=True) for hit in hits if hit.id not in known)


def denied_in_graph(decision: Decision, system: System) -> tuple[RuleHit, ...]:
    """Return the rules against a named backend that hold in the graph of this decision, and not outside of graphs."""
    problem = decision.problem
    if problem.capture == "none" or decision.backend is None or decision.requested == registry.AUTO:
        return ()
    bucket = m_bucket(problem.m, problem.op, system.arch)
    eager = replace(problem.eager(), m=bucket)
    known = {hit.id for hit in resolve.denials(decision.backend, eager, system)}
    return tuple(hit for hit in decision.verdict(decision.backend).denied if hit.id not in known)


def decide_anew() -> None:
    """Forget all decisions, because tuned times or other ranks have changed. Reports are not repeated."""
    with _lock:
        _decided.clear()


def exclude(backend: str, op: Op, scaling: Scaling, reason: Reason) -> None:
    """Take a backend from ``auto`` in this process: another rank cannot use it, or it could not be checked."""
    with _lock:
        _elsewhere.setdefault((op, scaling), {})[backend] = reason
        _decided.clear()


def left_out(op: Op, scaling: Scaling) -> dict[str, Reason]:
    """Return the backends that :func:`exclude` took away, with the reasons."""
    return _elsewhere.get((op, scaling), {})


def reset() -> None:
    """Forget decisions, excluded backends and reports."""
    with _lock:
        _decided.clear()
        _elsewhere.clear()
    predicted.reset()
    log.reset()


def _decide(problem: Problem, request: Request, gpu: int | None) -> tuple[System, Decision, bool]:
    """Ask the policy until its choice has passed the self-check. A failure puts the backend into quarantine.

    A backend that could not be checked is left out of this decision. The flag is False where a later check may end
    otherwise.
    """
    unchecked: dict[str, Reason] = {}
    lasting = True
    while True:
        machine = here.machine()
        system = here.seen_from(machine, gpu)
        decision = _resolve(problem, system, request, unchecked)
        if not _must_check(decision, gpu):
            return machine, decision, lasting
        name = str(decision.backend)
        verdict = _checked(decision, system, gpu)
        if verdict.vouches_for(plugin=registry.is_plugin(name)):
            return machine, decision, lasting
        if verdict.status != "failed":
            unchecked[name] = not_checked(verdict)
            lasting &= verdict.lasting


def _resolve(
    problem: Problem, system: System, request: Request, unchecked: Mapping[str, Reason] | None = None
) -> Decision:
    auto = request[0] == registry.AUTO
    with _lock:
        return resolve.resolve(
            problem,
            system,
            registry.backends(),
            requested=request[0],
            requested_by=request[1],
            disabled=request[2],
            elsewhere=left_out(problem.op, problem.scaling) | dict(unchecked or {}),
            measured=tuned.find(problem, system, registry.backends()) if auto else None,
            predicted=predicted.find(problem, system, registry.backends()) if auto else None,
        )


def _must_check(decision: Decision, gpu: int | None) -> bool:
    """Whether ``auto`` chose a backend on a GPU that this process already uses, or a plug-in on the CPU.

    This never initialises CUDA; once CUDA is up, the decision is made again. The reference, the only built-in on a
    CPU, needs no check: the others are checked against it.
    """
    torch = sys.modules.get("torch")
    name = str(decision.backend)
    if decision.requested != registry.AUTO or decision.backend in (None, resolve.REFERENCE) or torch is None:
        return False
    if not isinstance(registry.backends()[name], Backend):
        return False
    return registry.is_plugin(name) if gpu is None else bool(torch.cuda.is_initialized())


def _checked(decision: Decision, system: System, gpu: int | None) -> CheckResult:
    from fp4dispatch.trust import selfcheck  # needs torch, which deciding does not

    problem = replace(decision.problem, activation=decision.activation)
    device = "cpu" if gpu is None else f"cuda:{gpu}"
    return selfcheck.trusted(str(decision.backend), problem, system, device)


def not_checked(verdict: CheckResult) -> Reason:
    """Return the reason against a backend that could not be checked."""
    fix = "bind the layers before memory is full" if not verdict.lasting else "name it to use it all the same"
    return Reason("UNPROVEN", f"not in use by auto before it has passed the self-check: {verdict.text()}", fix)
