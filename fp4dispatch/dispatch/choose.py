"""From the policy to the caller: this machine's facts, the environment, one log line per choice, errors, a cache."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from fp4dispatch.backends import registry
from fp4dispatch.backends.base import Backend
from fp4dispatch.backends.registry import instance
from fp4dispatch.dispatch import tuned
from fp4dispatch.dispatch.whatif import ABSENT, default_scaling, reproduce, what_if
from fp4dispatch.errors import BackendUnsupportedError, InputError, NoBackendError, SettingsError, UnknownBackendError
from fp4dispatch.machine import capture as _capture
from fp4dispatch.machine import system as _system
from fp4dispatch.machine.locks import ForkSafeLock
from fp4dispatch.machine.system import System
from fp4dispatch.policy import resolve
from fp4dispatch.policy.catalogue import FACTS, Alias, kernel_ops
from fp4dispatch.policy.rules import m_bucket
from fp4dispatch.problem import (
    OPS,
    Activation,
    CaptureMode,
    Op,
    OutDtype,
    Problem,
    Scaling,
    SfLayout,
)
from fp4dispatch.problem.arch import Arch
from fp4dispatch.problem.decision import Decision, Reason
from fp4dispatch.settings import SETTINGS, settings
from fp4dispatch.trust import quarantine
from fp4dispatch.trust.verdict import CheckResult

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


def select(
    problem: Problem, *, backend: str | None = None, layer: str = "", gpu: int | None = 0, say: bool = True
) -> Decision:
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
    say
        Whether to log the choice; who asks for all M of a shape reports them together (:func:`report_ranges`).

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
    chooses for the first time on a GPU model, and a plug-in on a CPU too, is self-checked
    (:mod:`fp4dispatch.trust.selfcheck`); if it fails, the next one is chosen. So it is where it cannot be checked: see
    :meth:`fp4dispatch.trust.verdict.CheckResult.vouches_for`.
    """
    request = _request(problem.op, backend)
    machine = _system.current()
    bucket = replace(problem, m=m_bucket(problem.m, problem.op, _arch(machine, gpu)))
    key = (bucket, request, gpu, settings.tuned, settings.fp8_copy)
    cached = _decided.get(key)
    if cached is None or cached[0] is not machine:
        machine, decided, lasting = _decide(bucket, request, gpu)
        cached = machine, decided
        if lasting:
            _decided[key] = cached
    decision = replace(cached[1], problem=problem)
    if decision.backend is None:
        raise _refusal(decision, layer, _on(cached[0], gpu), request[2])
    if say:
        report(decision)
    return decision


def check_request(op: Op, backend: object) -> None:
    """Refuse what :func:`select` would refuse of any problem of an op, before a model is changed.

    That is: a backend's name, from the argument or from the environment, that nothing has, or whose backend never runs
    the op; and a variable of ours whose value cannot be understood.

    Raises
    ------
    UnknownBackendError, SettingsError
        If the name, or the value, is none.
    BackendUnsupportedError
        If the backend runs other ops alone.
    """
    settings.check()
    name, requested_by, disabled = _request(op, backend)
    by = "" if requested_by == ARGUMENT else f" by {requested_by}"
    if name in disabled:
        raise BackendUnsupportedError(
            f'backend="{name}" was requested{by}, and {SETTINGS["disable"].name} forbids it: change one of both'
        )
    found = registry.backends().get(name)
    if found is not None and not isinstance(found, registry.BrokenBackend) and not _runs(found, op):
        runs = ", ".join(other for other in OPS if _runs(found, other)) or "nothing"
        others = ", ".join(n for n, candidate in registry.backends().items() if _runs(candidate, op))
        raise BackendUnsupportedError(
            f'backend="{name}" was requested{by} and never runs {op}; it runs {runs}. For {op}: {others}'
        )


def _runs(backend: resolve.SupportsProblem, op: Op) -> bool:
    """Whether a backend has any activation format for an op; one that fails when asked is left to the decision."""
    try:
        return backend.activation_for(Problem(op, 1, 16, 16, scaling=default_scaling(op))) is not None
    except Exception:
        return True


def not_for_capture(decision: Decision, gpu: int | None) -> str:
    """Return what the rules say against capturing, in a CUDA graph, what was chosen without one; mostly nothing.

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
    system = _on(_here(), gpu)
    bucket = m_bucket(problem.m, problem.op, system.arch)
    hits = resolve.denials(decision.backend, replace(problem, m=bucket, capture="full"), system)
    known = {hit.id for verdict in decision.verdicts if verdict.backend == decision.backend for hit in verdict.denied}
    return "; ".join(
        f"{hit.code} {hit.because} [{hit.id}; {hit.source}]" + (f" (fix: {hit.fix})" if hit.fix else "")
        for hit in hits
        if hit.id not in known
    )


def warn_of_capture(decision: Decision, why: str) -> None:
    """Say once that a backend that was named runs, also while a CUDA graph is captured, though ``auto`` would not."""
    text = (
        f"{decision.backend} was named by {decision.requested_by} and runs, though auto would not choose it "
        f"in a CUDA graph: {why}"
    )
    _once(("warning", text), logging.WARNING, text)


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
    proven: bool | Iterable[str] | None = None,
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
        Capability (``12.0``) or arch (``sm_120``) of the GPU, or ``none`` for a machine without one. By default that of
        ``FP4DISPATCH_ARCH``, and this machine's where that is not set: alone it is this machine with another GPU.
    cuda, torch, cudnn, cudnn_frontend, flashinfer, cutlass, nvcc
        Versions. If ``arch`` or any of these is given, the question is about another machine, and what is not given is
        not there. Three are taken to be there with what they accompany, unless given, or given as ``none``: ``torch``
        with ``cuda``, ``cudnn_frontend`` with ``cudnn``, and the ``cutlass`` headers with ``nvcc``. If none is given,
        the question is about this machine.
    proven
        Whether the built kernels for this op and arch are proven: all (True), none (False), or those of these names
        (``nvfp4_gemm`` is cutlass's, ``w4_gemm`` that of w4a16 and w4a8, ``w8_gemm`` that of w8a16 and w8a8). By
        default those that are built and proven on this machine, for whatever arch ``fp4dispatch build`` made them.
    quarantined
        Backends that failed the self-check there.
    backend
        As in :func:`select`. What the environment asks for holds for a question about this machine; for another one it
        is not applied, which a note of the decision says.
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
        For a size, format or version that is none, a K that no layer takes, or the arch of a GPU that does not exist.
    UnknownBackendError, SettingsError
        As in :func:`select`.
    """
    scaling = scaling or default_scaling(op)
    problem = Problem(op, m, n, k, activation, scaling, out_dtype, bias, capture, m_min, sf_layout, raw)
    versions = dict(zip(FACTS, (cuda, torch, cudnn, cudnn_frontend, flashinfer, cutlass, nvcc), strict=True))
    quarantined = tuple(quarantined)
    proven = proven if proven is None or isinstance(proven, bool) else tuple(proven)
    stated = arch is not None or bool(proven) or any(v is not None for v in versions.values()) or bool(quarantined)
    if system is not None and stated:
        raise InputError("pass either system= or single facts (arch=, cuda=, ...), not both")
    here = system is None and not stated
    asked = _request(op, None)[0]  # refuses what the environment misspells, for any machine
    notes: list[str] = []
    if system is None:
        pretend = settings.arch if arch is None else None
        if pretend:
            arch = Arch.real(pretend).capability
            notes.append(f"{SETTINGS['arch'].name}={pretend}: as if the GPU were {Arch.real(pretend)}")
        if not here:
            proven, said = _proofs(op, arch, proven)
            notes += said
            system = what_if(op, arch, versions, proven, quarantined)
        else:
            system = _allowed(_here())
            if pretend:
                system = replace(system, gpus=System.fake(arch).gpus)
                notes.append("everything else is as on this machine")
            if proven is not None:
                system = replace(system, proven=frozenset())
        measurable = here and not pretend
    else:
        measurable = False
    if fp8_copy is not None:
        system = replace(system, fp8_copy=fp8_copy)
    request = _request(op, backend) if here or backend else (registry.AUTO, registry.AUTO, ())
    if not here:
        notes += _not_applied(op, asked if not backend else registry.AUTO, disabled, fp8_copy)
    off = tuple(_canonical_all(disabled)) if disabled is not None else request[2] if here else ()
    measured = None
    if measurable and request[0] == registry.AUTO:
        bucket = replace(problem, m=m_bucket(problem.m, op, system.arch))
        measured = tuned.find(bucket, system, registry.backends())
    decision = resolve.resolve(
        problem,
        system,
        registry.backends(),
        requested=request[0],
        requested_by=request[1],
        disabled=off,
        elsewhere=_elsewhere.get((op, problem.scaling)) if here else None,
        measured=measured,
    )
    return replace(decision, notes=tuple(notes))


def _proofs(
    op: Op, arch: str | None, proven: bool | tuple[str, ...] | None
) -> tuple[bool | tuple[str, ...], list[str]]:
    """Return which kernels count as proven on a machine that is described, and a note where this machine's do."""
    if proven is not None:
        return proven, []
    if arch in (None, ABSENT):
        return (), []
    sm = Arch.real(str(arch)).sm
    built = _proven()
    here = tuple(name for name in kernel_ops(op) if (name, sm) in built)
    if not here:
        return (), []
    return here, [f"built and proven for {sm} on this machine, and taken to be there: {', '.join(here)}"]


def _not_applied(op: Op, asked: str, disabled: Iterable[str] | None, fp8_copy: bool | None) -> list[str]:
    """Say which variables are set here and do not count for another machine."""
    found = [(SETTINGS[_SETTING[op]].name, f"--backend {asked}")] if asked != registry.AUTO else []
    if settings.disable and disabled is None:
        found.append((SETTINGS["disable"].name, f"--disable {','.join(settings.disable)}"))
    if settings.fp8_copy and fp8_copy is None and op == "nvfp4_gemm":
        found.append((SETTINGS["fp8_copy"].name, "--fp8-copy"))
    return [
        f"{name} is set here and not applied: the question is about another machine ({option} does)"
        for name, option in found
    ]


def decide_anew() -> None:
    """Forget decisions, not what has been reported: what they were made from has changed (tuned times, other ranks)."""
    with _lock:
        _decided.clear()


def exclude(backend: str, op: Op, scaling: Scaling, reason: Reason) -> None:
    """Take a backend away from ``auto`` in this process: another rank cannot use it, or it could not be checked."""
    with _lock:
        _elsewhere.setdefault((op, scaling), {})[backend] = reason
        _decided.clear()


def facts(gpu: int | None = 0) -> System:
    """Return the facts that decisions for a device are made from: its GPU first, and the quarantine."""
    return _on(_here(), gpu)


def bucket(m: int, op: Op, gpu: int | None = 0) -> int:
    """Return the largest M that is decided like ``m`` on a device."""
    return m_bucket(m, op, _arch(_system.current(), gpu))


def _decide(problem: Problem, request: _Request, gpu: int | None) -> tuple[System, Decision, bool]:
    """Ask the policy until what it chooses has passed its self-check; each failure is a new fact of the machine.

    What could not be checked is left out of this decision. The flag is False where another try may end otherwise.
    """
    unchecked: dict[str, Reason] = {}
    lasting = True
    while True:
        machine = _here()
        system = _on(machine, gpu)
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


def not_checked(verdict: CheckResult) -> Reason:
    """Return why ``auto`` leaves alone what could not be checked."""
    fix = "bind the layers before memory is full" if not verdict.lasting else "name it to use it all the same"
    return Reason("UNPROVEN", f"not in use by auto before it has passed the self-check: {verdict.text()}", fix)


def _resolve(
    problem: Problem, system: System, request: _Request, unchecked: Mapping[str, Reason] | None = None
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
            elsewhere=_elsewhere.get((problem.op, problem.scaling), {}) | dict(unchecked or {}),
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
    """Whether ``auto`` chose a backend for a GPU that this process uses already, or a plug-in for the CPU.

    Nothing here initialises CUDA; the decision is made anew once it is. The one built-in that runs on a CPU is the
    reference, which the others are checked against.
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


def reset() -> None:
    """Forget decisions, what other ranks lack, and what has been reported; the next :func:`select` starts anew."""
    with _lock:
        _decided.clear()
        _elsewhere.clear()
        _said.clear()


# ------------------------------------------------------------------------------------------------------------- request


def _request(op: Op, backend: object) -> _Request:
    """Return who was asked for, by whom, and what is disabled."""
    disabled = tuple(_canonical_all(settings.disable or (), SETTINGS["disable"].name))
    if backend is not None and not isinstance(backend, str):
        raise UnknownBackendError(
            f"backend={backend!r} is a {type(backend).__name__}, not a name. Known: {', '.join(registry.known())}"
        )
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


def report(decision: Decision, tokens: str = "") -> None:
    """Log a choice once: one line for all M of one shape that are decided alike.

    Parameters
    ----------
    decision
        What was chosen.
    tokens
        For which M, in words; where they are not known, the first M that is met stands for all.
    """
    p = decision.problem
    rule = decision.rule.id if decision.rule else ""
    chosen = (decision.backend, decision.activation, rule, decision.requested_by)
    key = (p.op, decision.arch, p.n, p.k, p.scaling, p.capture, p.raw, *chosen)
    if (*key, tokens) not in _said:
        _once((*key, tokens), logging.INFO, decision.line(tokens))
        if tokens and (*key, tokens) in _said:
            _said.add((*key, ""))  # an M of that range is nothing new
        for sentence in settings.unknown():
            _once(("unknown", sentence), logging.WARNING, sentence)
    for warning in decision.warnings:
        if ("warning", warning) not in _said:
            _once(("warning", warning), logging.WARNING, warning)


def report_ranges(decided: Iterable[tuple[int, Decision]]) -> None:
    """Log the choices for all M of one shape, one line for each range that has one choice and one rule.

    Parameters
    ----------
    decided
        The largest M and the Decision of each range that is decided apart, ascending; the last holds beyond its M.
    """
    spans: list[tuple[int, Decision]] = []
    for m, decision in decided:
        for warning in decision.warnings:
            _once(("warning", warning), logging.WARNING, warning)
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
