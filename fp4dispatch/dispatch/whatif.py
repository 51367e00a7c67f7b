"""From the description of a machine to facts, and from facts to an ``explain`` command that runs anywhere. No torch."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace

from fp4dispatch.backends.registry import AUTO
from fp4dispatch.errors import InputError
from fp4dispatch.machine import gpu_models
from fp4dispatch.machine.system import Library, System
from fp4dispatch.policy.capability import check
from fp4dispatch.policy.catalogue import FACTS, catalogue, kernel_ops
from fp4dispatch.problem import Op, Scaling
from fp4dispatch.problem.arch import Arch
from fp4dispatch.problem.decision import Decision

ABSENT = "none"

_COMPANIONS = {"torch": "cuda", "cudnn_frontend": "cudnn", "cutlass": "nvcc"}


def default_scaling(op: Op) -> Scaling:
    """Return the default scaling of ``explain``."""
    return "nvfp4" if op == "nvfp4_gemm" else "tensor"


def what_if(
    op: Op,
    arch: str | None,
    versions: Mapping[str, str | None],
    proven: bool | Iterable[str],
    quarantined: Iterable[str],
) -> System:
    """Return the facts of a described machine; arguments as in :func:`~fp4dispatch.dispatch.explain.explain`.

    Raises
    ------
    InputError
        For a kernel that this op does not use, one without an arch, an invalid version, or an arch that no GPU has.
    """
    known = kernel_ops(op)
    kernels = known if proven is True else tuple(proven or ())
    if unknown := [name for name in kernels if name not in known]:
        raise InputError(f"proven={', '.join(unknown)}: no kernel of {op}; known: {', '.join(known)}")
    if kernels and arch in (None, ABSENT):
        raise InputError(
            f"proven={', '.join(kernels)}: kernels are proven for an arch, and no GPU is described: add arch=, or leave"
            " proven= out"
        )
    given = {name: None if value == ABSENT else value for name, value in versions.items()}
    real = None if arch is None or arch == ABSENT else Arch.real(arch)
    system = System.fake(real, **given)  # type: ignore[arg-type]  # checked names
    for companion, of in _COMPANIONS.items():
        if versions[companion] is None and given[of] is not None:
            system = replace(system, **{companion: Library("")})  # type: ignore[arg-type]
    sm = system.arch.sm if system.arch else ""
    return replace(
        system,
        proven=frozenset((name, sm) for name in kernels),
        quarantined=frozenset((name, op, sm) for name in quarantined),
    )


def reproduce(decision: Decision, system: System, disabled: Iterable[str] = ()) -> str:
    """Return a command that repeats this decision on any machine with this version of fp4dispatch.

    It cannot say which builds are finished: a backend that lacks its own, where nothing can be compiled, is disabled.
    """
    p = decision.problem
    arch = system.arch.capability if system.arch else ABSENT
    words = ["fp4dispatch", "explain", p.op, "-m", str(p.m), "-n", str(p.n), "-k", str(p.k), "--arch", arch]
    for name in FACTS:
        value = getattr(system, name)
        version = value if value is None or isinstance(value, str) else value.version
        if version:
            words += [_flag(name), version]
        elif version is None and name in _COMPANIONS and getattr(system, _COMPANIONS[name]) is not None:
            words += [_flag(name), ABSENT]
    model = gpu_models.listed(system.gpus[0]) if system.gpus else None
    if model is not None:
        words += ["--gpu", model.name]
    sm = system.arch.sm if system.arch else ""
    proven = [name for name in kernel_ops(p.op) if (name, sm) in system.proven]
    disabled = {*disabled, *_short_of_builds(decision, system)}
    everything = len(proven) == len(kernel_ops(p.op))
    if sm:
        words += ["--proven"] if everything else ["--proven", ",".join(proven) or ABSENT]
    shut = sorted(name for name, op, where in system.quarantined if (op, where) == (p.op, sm))
    options = {
        "--quarantined": ",".join(shut),
        "--disable": ",".join(sorted(disabled)),
        "--backend": "" if decision.requested == AUTO else decision.requested,
        "--activation": "" if p.activation == "any" else p.activation,
        "--scaling": "" if p.scaling == default_scaling(p.op) else p.scaling,
        "--out-dtype": "" if p.out_dtype == "bfloat16" else p.out_dtype,
        "--capture": "" if p.capture == "none" else p.capture,
        "--m-min": "" if p.m_min == 1 else str(p.m_min),
        "--sf-layout": p.sf_layout or "",
    }
    words += [word for flag, value in options.items() if value for word in (flag, value)]
    words += ["--raw"] * p.raw + ["--bias"] * p.bias + ["--fp8-copy"] * (system.fp8_copy and p.op == "nvfp4_gemm")
    return shlex.join(words)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _short_of_builds(decision: Decision, system: System) -> set[str]:
    """Return the backends that lack a compiler only because their builds are not among the finished ones."""
    if system.finished is None:
        return set()
    return {
        verdict.backend
        for verdict in decision.verdicts
        if verdict.backend in catalogue().backends
        and any(reason.code == "TOOLCHAIN" for reason in verdict.reasons)
        and not any(reason.code == "TOOLCHAIN" for reason in check(verdict.backend, decision.problem, system))
    }
