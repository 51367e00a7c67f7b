"""From the policy to the caller: this machine's facts, the environment, one log line per choice, errors, a cache."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace

from fp4dispatch import capture as _capture
from fp4dispatch import policy, quarantine, registry, tuned
from fp4dispatch import system as _system
from fp4dispatch.arch import Arch
from fp4dispatch.backends.base import Backend
from fp4dispatch.backends.catalogue import FACTS, Alias
from fp4dispatch.decision import Decision, Reason
from fp4dispatch.errors import BackendUnsupportedError, InputError, NoBackendError, SettingsError, UnknownBackendError
from fp4dispatch.locks import ForkSafeLock
from fp4dispatch.problem import (
    Activation,
    CaptureMode,
    Op,
    OutDtype,
    Problem,
    Scaling,
    SfLayout,
)
from fp4dispatch.registry import instance
from fp4dispatch.rules import m_bucket
from fp4dispatch.settings import SETTINGS, settings
from fp4dispatch.system import System
from fp4dispatch.whatif import default_scaling, reproduce, what_if

__all__ = ["decide_anew", "exclude", "explain", "instance", "reset", "select"]

logger = logging.getLogger("fp4dispatch")
logger.addHandler(logging.NullHandler())
logger.addFilter(_capture.may_log)

ARGUMENT = "argument"

_SETTING = {"nvfp4_gemm": "fp4_gemm_backend", "fp8_gemm": "fp8_backend"}

_Request = tuple[str, str, tuple[str, ...]]

_lock = ForkSafeLock()
_decided: dict[tuple[Problem, _Request, int | None, str, bool], tuple[System, Decision]] = {}
_elsewhere: dict[tuple[str, Scaling], dict[str, Reason]] = {}
_said: set[object] = set()


def select(problem: Problem, *, backend: str | None = None, layer: str = "", gpu: int | None = 0) -> Decision:
    """Choose the backend for a problem on this machine; the choice is made once per bucket of M, then looked up.

    A backend asked for by name is honoured or refused, never replaced. Precedence: ``backend`` >
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

    Notes
    -----
    Thread-safe, and safe during capture: only facts are read, and nothing is logged then. A backend that ``auto``
    chooses for the first time on a GPU model is self-checked (:mod:`fp4dispatch.selfcheck`); if it fails, the next one
    is chosen.
    """
    request = _request(problem.op, backend)
    machine = _system.current()
    bucket = replace(problem, m=m_bucket(problem.m, problem.op, _arch(machine, gpu)))
    key = (bucket, request, gpu, settings.tuned, settings.fp8_copy)
    cached = _decided.get(key)
    if cached is None or cached[0] is not machine:
        cached = _decided[key] = _decide(bucket, request, gpu)
    decision = replace(cached[1], problem=problem)
    if decision.backend is None:
        raise _refusal(decision, layer, _on(cached[0], gpu), request[2])
    _report(decision)
    return decision


def m_ranges(op: Op, gpu: int | None, last: int) -> Iterator[int]:
    """Yield the end of each range of M that is decided apart, ascending, up to ``last`` (included).

    Parameters
    ----------
    op
        As in :class:`~fp4dispatch.problem.Problem`.
    gpu
        As in :func:`select`.
    last
        A power of two.
    """
    arch, m = _arch(_system.current(), gpu), 0
    while m < last:
        m = m_bucket(m + 1, op, arch)
        yield m


def explain(
    op: Op,
    m: int,
    n: int,
    k: int,
    *,
    arch: str | None = None,
    cuda: str | None = None,
    torch: str | None = None,
    cudnn: str | None = None,
    cudnn_frontend: str | None = None,
    flashinfer: str | None = None,
    cutlass: str | None = None,
    nvcc: str | None = None,
    proven: bool | Iterable[str] = False,
    quarantined: Iterable[str] = (),
    backend: str | None = None,
    activation: Activation = "any",
    scaling: Scaling | None = None,
    out_dtype: OutDtype = "bfloat16",
    bias: bool = False,
    capture: CaptureMode = "none",
    m_min: int = 1,
    sf_layout: SfLayout | None = None,
    raw: bool = False,
    disabled: Iterable[str] | None = None,
    fp8_copy: bool | None = None,
    system: System | None = None,
) -> Decision:
    """Return the whole trace of a choice, for this machine or for any other; no GPU is needed.

    Parameters
    ----------
    op, m, n, k, activation, scaling, out_dtype, bias, capture, m_min, sf_layout, raw
        As in :class:`~fp4dispatch.problem.Problem`; ``scaling`` is ``nvfp4`` or ``tensor`` by default, by op.
    arch
        Capability (``12.0``) or arch (``sm_120``) of the GPU, or ``none`` for a machine without one.
    cuda, torch, cudnn, cudnn_frontend, flashinfer, cutlass, nvcc
        Versions. If ``arch`` or any of these is given, the question is about another machine, and what is not given is
        not there. Three are taken to be there with what they accompany, unless given, or given as ``none``: ``torch``
        with ``cuda``, ``cudnn_frontend`` with ``cudnn``, and the ``cutlass`` headers with ``nvcc``. If none is given,
        the question is about this machine.
    proven
        Whether the built kernels for this op and arch are proven: all, or those of these names (``nvfp4_gemm`` is
        cutlass's, ``w4_gemm`` that of w4a16 and w4a8, ``w8_gemm`` that of w8a16 and w8a8).
    quarantined
        Backends that failed the self-check there.
    backend
        As in :func:`select`. The environment is read only for a question about this machine.
    disabled
        Backends that are never used; ``FP4DISPATCH_DISABLE`` for this machine, nothing otherwise.
    fp8_copy
        Whether NVFP4 layers may hold an FP8 copy of their weights; ``FP4DISPATCH_FP8_COPY`` for this machine, not
        otherwise.
    system
        Facts that are there already; then none of the others may be given.

    Returns
    -------
    Decision
        ``backend`` is None where nothing can run the problem; that is an answer here, not an error.

    Raises
    ------
    InputError
        For a size, format or version that is none.
    UnknownBackendError, SettingsError
        As in :func:`select`.
    """
    scaling = scaling or default_scaling(op)
    problem = Problem(op, m, n, k, activation, scaling, out_dtype, bias, capture, m_min, sf_layout, raw)
    versions = dict(zip(FACTS, (cuda, torch, cudnn, cudnn_frontend, flashinfer, cutlass, nvcc), strict=True))
    proven = proven if isinstance(proven, bool) else tuple(proven)
    stated = arch is not None or bool(proven) or any(versions.values()) or bool(quarantined := tuple(quarantined))
    if system is not None and stated:
        raise InputError("pass either system= or single facts (arch=, cuda=, ...), not both")
    here = system is None and not stated
    if system is None:
        system = what_if(op, arch, versions, proven, quarantined) if stated else _allowed(_here())
    if fp8_copy is not None:
        system = replace(system, fp8_copy=fp8_copy)
    if here or backend:
        requested, requested_by, environment = _request(op, backend)
    else:
        requested, requested_by, environment = registry.AUTO, registry.AUTO, ()
    off = tuple(_canonical_all(disabled)) if disabled is not None else environment if here else ()
    measured = None
    if here and requested == registry.AUTO:
        bucket = replace(problem, m=m_bucket(problem.m, op, system.arch))
        measured = tuned.find(bucket, system, registry.backends())
    return policy.resolve(
        problem,
        system,
        registry.backends(),
        requested=requested,
        requested_by=requested_by,
        disabled=off,
        elsewhere=_elsewhere.get((op, problem.scaling)) if here else None,
        measured=measured,
    )


def decide_anew() -> None:
    """Forget decisions, not what has been reported: what they were made from has changed (tuned times, other ranks)."""
    with _lock:
        _decided.clear()


def exclude(backend: str, op: Op, scaling: Scaling, reason: Reason) -> None:
    """Take a backend away from ``auto`` in this process, because another rank cannot use it."""
    with _lock:
        _elsewhere.setdefault((op, scaling), {})[backend] = reason
        _decided.clear()


def facts(gpu: int | None = 0) -> System:
    """Return the facts that decisions for a device are made from: its GPU first, and the quarantine."""
    return _on(_here(), gpu)


def bucket(m: int, op: Op, gpu: int | None = 0) -> int:
    """Return the largest M that is decided like ``m`` on a device."""
    return m_bucket(m, op, _arch(_system.current(), gpu))


def _decide(problem: Problem, request: _Request, gpu: int | None) -> tuple[System, Decision]:
    """Ask the policy until what it chooses has passed its self-check; each failure is a new fact of the machine."""
    while True:
        machine = _here()
        system = _on(machine, gpu)
        decision = _resolve(problem, system, request)
        if not _must_check(decision, gpu) or _passes(decision, system, gpu):
            return machine, decision


def _resolve(problem: Problem, system: System, request: _Request) -> Decision:
    auto = request[0] == registry.AUTO
    with _lock:
        return policy.resolve(
            problem,
            system,
            registry.backends(),
            requested=request[0],
            requested_by=request[1],
            disabled=request[2],
            elsewhere=_elsewhere.get((problem.op, problem.scaling)),
            measured=tuned.find(problem, system, registry.backends()) if auto else None,
        )


def prospect(problem: Problem, *, backend: str | None = None, gpu: int | None = 0) -> tuple[Decision, bool]:
    """Return what :func:`select` will choose unless a self-check fails, and whether it would self-check that.

    Arguments as there. Runs nothing, reports nothing, keeps nothing.

    Raises
    ------
    UnknownBackendError, SettingsError
        As :func:`select`.
    """
    system = _on(_here(), gpu)
    bucket = replace(problem, m=m_bucket(problem.m, problem.op, system.arch))
    decision = _resolve(bucket, system, _request(problem.op, backend))
    return replace(decision, problem=problem), _must_check(decision, gpu)


def _here() -> System:
    """Return the facts of this machine, with what failed the self-check in earlier processes."""
    quarantine.recall(_system.current(), registry.backends())
    return _system.current()


def _must_check(decision: Decision, gpu: int | None) -> bool:
    """Whether ``auto`` chose a backend for a GPU that this process uses already: nothing here initialises CUDA."""
    torch = sys.modules.get("torch")
    return (
        decision.requested == registry.AUTO
        and decision.backend not in (None, policy.REFERENCE)
        and gpu is not None
        and isinstance(registry.backends()[str(decision.backend)], Backend)
        and torch is not None
        and torch.cuda.is_initialized()
    )


def _passes(decision: Decision, system: System, gpu: int | None) -> bool:
    from fp4dispatch import selfcheck  # needs torch, which deciding does not

    problem = replace(decision.problem, activation=decision.activation)
    return selfcheck.trusted(str(decision.backend), problem, system, f"cuda:{gpu}").usable


def reset() -> None:
    """Forget decisions, what other ranks lack, and what has been reported; the next :func:`select` starts anew."""
    with _lock:
        _decided.clear()
        _elsewhere.clear()
        _said.clear()


# ------------------------------------------------------------------------------------------------------------- request


def _request(op: Op, backend: str | None) -> _Request:
    """Return who was asked for, by whom, and what is disabled."""
    disabled = tuple(_canonical_all(settings.disable or (), SETTINGS["disable"].name))
    if backend:
        name, alias = registry.canonical(backend)
        requested_by = ARGUMENT
    else:
        requested_by = SETTINGS[_SETTING[op]].name
        name, alias = _named_by(requested_by, getattr(settings, _SETTING[op]))
    if alias is not None:
        _once(("alias", alias.name), logging.INFO, f"{alias.name} means {alias.backend} here: {alias.note}")
    return (name, requested_by if name != registry.AUTO else registry.AUTO, disabled)


def _named_by(variable: str, value: str) -> tuple[str, Alias | None]:
    try:
        return registry.canonical(value)
    except UnknownBackendError as error:
        raise SettingsError(f"{variable}={error}") from None


def _canonical_all(names: Iterable[str], variable: str = "") -> list[str]:
    found = [_named_by(variable, name)[0] if variable else registry.canonical(name)[0] for name in names]
    if registry.AUTO in found:
        raise SettingsError(f"{variable or 'disabled'}: auto is no backend and cannot be disabled")
    return found


def _arch(machine: System, gpu: int | None) -> Arch | None:
    """Return the arch of one device, None for the CPU or a device that is not there (:func:`_on` refuses that)."""
    return machine.gpus[gpu].arch if gpu is not None and gpu < len(machine.gpus) else None


def _on(machine: System, gpu: int | None) -> System:
    """Return the facts as seen from one device, with what the user allows."""
    return _allowed(machine).seen_from(gpu)


def _allowed(machine: System) -> System:
    """Return the facts with what the user allows."""
    return machine if machine.fp8_copy == settings.fp8_copy else replace(machine, fp8_copy=settings.fp8_copy)


# ------------------------------------------------------------------------------------------------------------ messages


def _refusal(decision: Decision, layer: str, system: System, disabled: Iterable[str]) -> Exception:
    command = f"  reproduce anywhere: {reproduce(decision, system, disabled)}"
    if decision.requested != registry.AUTO:
        asked = decision.verdicts[0]
        who = "" if decision.requested_by == ARGUMENT else f" by {decision.requested_by}"
        where = f' for layer "{layer}"' if layer else ""
        why = "; ".join(f"{r.code} {r.text}" + (f" (fix: {r.fix})" if r.fix else "") for r in asked.reasons)
        others = ", ".join(v.backend for v in decision.verdicts[1:] if v.accepted) or "nothing"
        text = (
            f'backend="{asked.backend}" was requested{who}{where} and cannot run {decision.problem} on '
            f"{decision.machine}: {why}. Could run it: {others}\n{command}"
        )
        return BackendUnsupportedError(text, decision)
    head = f"nothing can run {decision.problem} on {decision.machine}" + (f', layer "{layer}"' if layer else "")
    return NoBackendError("\n".join([head, *decision.text().splitlines()[1:], command]), decision)


def _report(decision: Decision) -> None:
    p = decision.problem
    m = m_bucket(p.m, p.op, decision.arch)
    key = (p.op, decision.arch, p.n, p.k, m, p.scaling, p.capture, decision.backend, decision.requested_by)
    if key in _said:
        return
    _once(key, logging.INFO, decision.line())
    for warning in decision.warnings:
        _once(("warning", warning), logging.WARNING, warning)
    for sentence in settings.unknown():
        _once(("unknown", sentence), logging.WARNING, sentence)


def _once(key: object, level: int, text: str) -> None:
    with _lock:
        if key in _said or _capture.is_capturing():  # what is not said during a capture is said after it
            return
        if not _said:
            _set_up_logging()
        _said.add(key)
    logger.log(level, "%s", text)


def _proven() -> frozenset[tuple[str, str]]:
    from fp4dispatch.jit.proven import proven  # reads the kernel cache: not at import

    return proven()


_system.provide(proven=_proven, quarantined=quarantine.quarantined)


def _set_up_logging() -> None:
    """Honour FP4DISPATCH_LOG; without it logging stays the application's."""
    level = settings.log
    if level is None:
        return
    if level == "off":
        logger.setLevel(logging.CRITICAL + 1)
        return
    logger.setLevel(level.upper())
    if all(isinstance(handler, logging.NullHandler) for handler in logger.handlers):
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("fp4dispatch %(levelname)s: %(message)s"))
        logger.addHandler(handler)
