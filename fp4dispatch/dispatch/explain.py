"""Explain a choice: every candidate and every reason, for this machine or for one that is described. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fp4dispatch.backends import registry
from fp4dispatch.backends.own.tiling import speeds
from fp4dispatch.backends.predictions import predictions
from fp4dispatch.dispatch import here, launches, predicted, shipped, tuned
from fp4dispatch.dispatch.choose import left_out
from fp4dispatch.dispatch.request import SETTING, canonical_all, requested
from fp4dispatch.dispatch.whatif import ABSENT, default_scaling, what_if
from fp4dispatch.errors import InputError
from fp4dispatch.machine import gpu_models
from fp4dispatch.machine.gpu_models import GpuModel
from fp4dispatch.machine.system import System
from fp4dispatch.policy import resolve
from fp4dispatch.policy.catalogue import FACTS, kernel_ops
from fp4dispatch.policy.rules import m_bucket
from fp4dispatch.problem import Activation, CaptureMode, Op, OutDtype, Problem, Scaling, SfLayout
from fp4dispatch.problem.arch import Arch
from fp4dispatch.problem.decision import Decision
from fp4dispatch.settings import SETTINGS, did_you_mean, settings

_NO_MODEL = "no time models for this GPU: the rules decide alone"
_NO_GPU = "no GPU model is named (--gpu): the rules decide alone, without predicted times"


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
    gpu: str | None = None,
) -> Decision:
    """Return a choice with every candidate and reason, for this machine or another one. Needs no GPU.

    Parameters
    ----------
    op, m, n, k, activation, scaling, out_dtype, bias, capture, m_min, sf_layout, raw
        As in :class:`~fp4dispatch.problem.Problem`; ``scaling`` is ``nvfp4`` or ``tensor`` by default, by op.
    arch
        Capability (``12.0``) or arch (``sm_120``) of the GPU, or ``none`` for a machine without one. By default that of
        ``FP4DISPATCH_ARCH`` (this machine with another GPU), else this machine's.
    cuda, torch, cudnn, cudnn_frontend, flashinfer, cutlass, nvcc
        Versions. If ``arch`` or any of these is given, the question is about another machine, and what is not given is
        absent. Three come with another one unless they are given, also as ``none``: ``torch`` with ``cuda``,
        ``cudnn_frontend`` with ``cudnn``, the ``cutlass`` headers with ``nvcc``. If none is given, the question is
        about this machine.
    proven
        Whether the built kernels for this op and arch are proven: all (True), none (False), or those of these names
        (``nvfp4_gemm`` is cutlass's, ``w4_gemm`` that of w4a16 and w4a8, ``w8_gemm`` that of w8a16 and w8a8). By
        default those that are built and proven on this machine, for whatever arch ``fp4dispatch build`` made them.
    quarantined
        Backends that failed the self-check there.
    backend
        As in :func:`~fp4dispatch.dispatch.choose.select`. For another machine, what the environment asks for is not
        applied; a note of the decision says so.
    disabled
        Backends that are never used; ``FP4DISPATCH_DISABLE`` for this machine, nothing otherwise.
    fp8_copy
        Whether NVFP4 layers may hold an FP8 copy of their weights; ``FP4DISPATCH_FP8_COPY`` for this machine, not
        otherwise.
    system
        All facts of the machine; then no single fact may be given. Its GPU is known where ``gpu`` could name it.
    gpu
        GPU model of another machine, as NVML or ``gpu_models.toml`` names it, e.g. ``H100 SXM``. It says the arch, and
        what launch models need for their predictions. By default this machine's GPU.

    Returns
    -------
    Decision
        ``backend`` is None where nothing can run the problem. That is no error here. Each verdict has the predicted
        time of a call, where the GPU is known and its backend has a time model, and the time of the shipped table of
        its model, if that has one. These times decide as on that GPU.

    Raises
    ------
    InputError
        For an invalid size, format or version, a K that no layer takes, or an arch that no GPU has.
    UnknownBackendError, SettingsError
        As in :func:`~fp4dispatch.dispatch.choose.select`.
    """
    model = _named(gpu, arch)
    arch = arch if model is None else model.arch.capability
    scaling = scaling or default_scaling(op)
    problem = Problem(op, m, n, k, activation, scaling, out_dtype, bias, capture, m_min, sf_layout, raw)
    versions = dict(zip(FACTS, (cuda, torch, cudnn, cudnn_frontend, flashinfer, cutlass, nvcc), strict=True))
    asked = requested(op, None)[0]  # refuses what the environment misspells, for any machine
    if system is not None and system.gpus:
        model = gpu_models.listed(system.gpus[0])
    system, this, measurable, notes = _machine(op, arch, versions, proven, tuple(quarantined), system)
    if fp8_copy is not None:
        system = replace(system, fp8_copy=fp8_copy)
    backends = registry.backends()
    request = requested(op, backend) if this or backend else (registry.AUTO, registry.AUTO, ())
    if not this:
        notes += _not_applied(op, asked if not backend else registry.AUTO, disabled, fp8_copy)
    bucket = replace(problem, m=m_bucket(problem.m, op, system.arch))
    decide = request[0] == registry.AUTO
    if model is not None:
        times = predictions(bucket, model, backends)
        measured = shipped.find(bucket, model) if settings.tuned != "off" else None
    else:
        times = predicted.find(bucket, system, backends) if measurable else None
        measured = tuned.find(bucket, system, backends) if measurable else None
    if times is None and decide and not raw and system.arch is not None and speeds.known(system.arch):
        notes.append(_NO_MODEL if model is not None or measurable else _NO_GPU)
    decision = resolve.resolve(
        problem,
        system,
        backends,
        requested=request[0],
        requested_by=request[1],
        disabled=tuple(canonical_all(disabled)) if disabled is not None else request[2] if this else (),
        elsewhere=left_out(op, problem.scaling) if this else None,
        measured=measured if decide else None,
        predicted=times,
    )
    if measurable and not raw and settings.tuned != "off":
        notes += _of_times(decision, system, bucket)
    return replace(decision, notes=tuple(notes))


def _of_times(decision: Decision, system: System, bucket: Problem) -> list[str]:
    """Return notes on timed launches: which measurement serves this very M, and which ones are not used."""
    notes = []
    problem = replace(decision.problem, activation=decision.activation)
    found = launches.measured(problem, system, decision.backend or "") if system.gpus else None
    if found is not None and not any(v.measured for v in decision.verdicts if v.backend == decision.backend):
        fastest = found.launches(str(decision.backend), decision.activation)[0]
        notes.append(f"launches for M={problem.m} are tuned at M={found.problem.m}: {fastest}, on {found.date}")
    void = tuned.void(bucket, system, registry.backends())
    if void is not None:
        old, facts = void
        notes.append(
            f"times and launch shapes of {old.date} are not used, as these facts were others: {', '.join(facts)}. "
            "fp4dispatch tune measures again"
        )
    if why := shipped.why_not(system):
        notes.append(why)
    return notes


def _named(gpu: str | None, arch: str | None) -> GpuModel | None:
    """Return the GPU model that was named; InputError for an unknown one, or one of another arch than was given."""
    if gpu is None:
        return None
    model = gpu_models.named(gpu)
    if model is None:
        names = [each.name for each in gpu_models.models()]
        raise InputError(f"gpu={gpu!r} is not known.{did_you_mean(gpu, names)} Known: {', '.join(names)}")
    if arch is not None and Arch.real(arch) != model.arch:
        raise InputError(f"gpu={gpu!r} is {model.arch.sm}, and arch={arch!r} was given: leave one of them out")
    return model


def _machine(
    op: Op,
    arch: str | None,
    versions: dict[str, str | None],
    proven: bool | Iterable[str] | None,
    quarantined: tuple[str, ...],
    system: System | None,
) -> tuple[System, bool, bool, list[str]]:
    """Return the facts of the machine, whether it is this one, whether tuned times hold for it, and notes.

    Raises
    ------
    InputError
        If it is described in two ways.
    """
    proven = proven if proven is None or isinstance(proven, bool) else tuple(proven)
    stated = arch is not None or bool(proven) or any(v is not None for v in versions.values()) or bool(quarantined)
    if system is not None and stated:
        raise InputError("pass either system= or single facts (arch=, cuda=, ...), not both")
    if system is not None:
        return system, False, False, []
    found, measurable, notes = _facts(op, arch, versions, proven, quarantined, not stated)
    return found, not stated, measurable, notes


def _facts(
    op: Op,
    arch: str | None,
    versions: dict[str, str | None],
    proven: bool | tuple[str, ...] | None,
    quarantined: tuple[str, ...],
    this: bool,
) -> tuple[System, bool, list[str]]:
    """Return the facts of the machine that the question is about, whether all are this machine's own, and notes."""
    notes = []
    pretend = settings.arch if arch is None else None
    if pretend:
        arch = Arch.real(pretend).capability
        notes.append(f"{SETTINGS['arch'].name}={pretend}: as if the GPU were {Arch.real(pretend)}")
    if not this:
        proven, said = _proofs(op, arch, proven)
        return what_if(op, arch, versions, proven, quarantined), False, notes + said
    system = here.allowed(here.machine())
    if pretend:
        system = replace(system, gpus=System.fake(arch).gpus)
        notes.append("everything else is as on this machine")
    if proven is not None:
        system = replace(system, proven=frozenset())
    return system, not pretend, notes


def _proofs(
    op: Op, arch: str | None, proven: bool | tuple[str, ...] | None
) -> tuple[bool | tuple[str, ...], list[str]]:
    """Return the kernels that count as proven on a described machine, with a note where they are this machine's."""
    if proven is not None:
        return proven, []
    if arch in (None, ABSENT):
        return (), []
    sm = Arch.real(str(arch)).sm
    built = here.proven()
    found = tuple(name for name in kernel_ops(op) if (name, sm) in built)
    if not found:
        return (), []
    return found, [f"built and proven for {sm} on this machine, and taken to be there: {', '.join(found)}"]


def _not_applied(op: Op, asked: str, disabled: Iterable[str] | None, fp8_copy: bool | None) -> list[str]:
    """Return notes on the variables that are set here and not applied to another machine."""
    found = [(SETTINGS[SETTING[op]].name, f"--backend {asked}")] if asked != registry.AUTO else []
    if settings.disable and disabled is None:
        found.append((SETTINGS["disable"].name, f"--disable {','.join(settings.disable)}"))
    if settings.fp8_copy and fp8_copy is None and op == "nvfp4_gemm":
        found.append((SETTINGS["fp8_copy"].name, "--fp8-copy"))
    return [
        f"{name} is set here and not applied: the question is about another machine ({option} does)"
        for name, option in found
    ]
