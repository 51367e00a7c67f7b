"""What each backend is able to run: the check that collects every reason against, from ``capabilities.toml``.

Capability is "can", never "should": safety lives in deny rules, preference in prefer rules
(:mod:`fp4dispatch.policy.resolve`). Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from fp4dispatch.machine import installing
from fp4dispatch.policy.catalogue import ANY_ARCH, TOOLKIT, Capability, Requirement, Toolkit, catalogue, parse_version
from fp4dispatch.problem import ACTIVATIONS, Activation, Problem
from fp4dispatch.problem.decision import REASON_CODES, Reason, ReasonCode

if TYPE_CHECKING:
    from fp4dispatch.machine.system import Library, System

_LABEL = {
    "cuda": "CUDA",
    "torch": "torch",
    "cudnn": "cuDNN",
    "cudnn_frontend": "cudnn-frontend",
    "flashinfer": "FlashInfer",
    "cutlass": "CUTLASS headers",
    "nvcc": "nvcc",
}
_FIX = {
    "cuda": "install a torch built for CUDA {need} or later",
    "torch": 'pip install -U "torch>={need}"',
    "cudnn": "pip install -U nvidia-cudnn-cu{major}",
    "cudnn_frontend": "pip install -U nvidia-cudnn-frontend",
    "flashinfer": 'pip install -U "flashinfer-python>={need}"',
    "cutlass": "pip install -U --no-deps flashinfer-python (it carries the headers), or set CUTLASS_PATH",
}
_TOOLCHAIN = ("nvcc", "cutlass")

REFERENCE = "reference"
"""The last resort: ``auto`` chooses it only if it may choose no other backend."""


def offered(name: str, backend: object) -> bool:
    """Whether ``auto`` may choose a backend where it can run the problem. This is decided here alone.

    A built-in (a backend of ``capabilities.toml``) is offered, unless its records say ``auto = false``, as those of the
    reference do. A plug-in is offered only where its class says ``auto = True``; it then still has to pass the
    self-check on the device.
    """
    if name in catalogue().backends:
        return name not in catalogue().named_only
    return getattr(backend, "auto", False) is True


def reasons_of(backend: Any, problem: Problem, system: System) -> tuple[Reason, ...]:
    """Ask a backend what it supports, and check the answer: a plug-in may return anything.

    Raises
    ------
    TypeError
        If the answer is not a tuple of :class:`~fp4dispatch.problem.decision.Reason`. What ``supports`` raises goes
        through.
    """
    found = backend.supports(problem, system)
    if isinstance(found, tuple) and all(_is_reason(each) for each in found):
        return found
    raise TypeError(
        f"supports() returned {repr(found)[:80]}; need a tuple of Reason, which is empty where it can run the problem"
    )


def activation_of(backend: Any, problem: Problem) -> Activation | None:
    """Ask a backend for its activation format, and check the answer.

    Raises
    ------
    TypeError
        If the answer is neither None nor an activation format. What ``activation_for`` raises goes through.
    """
    found: Activation | None = backend.activation_for(problem)
    if found is None or (isinstance(found, str) and found in ACTIVATIONS):
        return found
    raise TypeError(f"activation_for() returned {repr(found)[:80]}; need None or one of {', '.join(ACTIVATIONS)}")


def _is_reason(value: object) -> bool:
    if not isinstance(value, Reason):
        return False
    return value.code in REASON_CODES and isinstance(value.text, str) and isinstance(value.fix, str)


def fact(system: System, what: str) -> Library | str | None:
    """Return one fact of the system by its name in the data files."""
    value: Library | str | None = getattr(system, what)
    return value


def version_of(system: System, what: str) -> str | None:
    """Return the version text of one fact, None where it is absent."""
    value = fact(system, what)
    return value if value is None or isinstance(value, str) else value.version


def check(name: str, problem: Problem, system: System) -> tuple[Reason, ...]:
    """Collect every reason why a backend cannot run a problem, from data alone.

    Parameters
    ----------
    name
        A backend of ``capabilities.toml``.
    problem, system
        What to run, and the facts of the machine.

    Returns
    -------
    tuple of Reason
        All of them, most fundamental first; empty means that the backend can run the problem.

    Raises
    ------
    KeyError
        If the backend is not declared.
    """
    records = [c for c in catalogue().capabilities if c.backend == name]
    if not records:
        raise KeyError(name)
    reasons = quarantined(name, problem, system)
    mine = [c for c in records if c.op == problem.op]
    if not mine:
        ops = ", ".join(dict.fromkeys(c.op for c in records))
        return (*reasons, Reason("DTYPE", f"op is {problem.op}, {name} runs {ops}"))
    scaled = [c for c in mine if problem.scaling in c.scalings] or mine[:1]
    record = next((c for c in scaled if _knows(c, system)), scaled[0])
    reasons += _formats(record, tuple(dict.fromkeys(s for c in mine for s in c.scalings)), problem)
    reasons += _operands(record, problem)
    arch = _arch(scaled, system)
    if arch:
        return (*reasons, *arch)  # versions are stated per arch: none can be asked for here
    return (*reasons, *_versions(record, problem, system))


def quarantined(name: str, problem: Problem, system: System) -> tuple[Reason, ...]:
    """Return the reason against a backend that failed the self-check of this op on this arch."""
    arch = system.arch.sm if system.arch else ""
    if (name, problem.op, arch) not in system.quarantined:
        return ()
    return (
        Reason(
            "QUARANTINED",
            f"{name} gave wrong numbers in the self-check of {problem.op} on {arch or 'this machine'}",
            "FP4DISPATCH_SELFCHECK=force checks it again, e.g. after an update; =off uses it all the same",
        ),
    )


def _knows(record: Capability, system: System) -> bool:
    return ANY_ARCH in record.archs or (system.arch is not None and system.arch.sm in record.archs)


def _arch(records: Sequence[Capability], system: System) -> tuple[Reason, ...]:
    if any(_knows(record, system) for record in records):
        return ()
    needs = " or ".join(dict.fromkeys(arch for record in records for arch in record.archs))
    if system.arch is None:
        return (Reason("ARCH", f"no NVIDIA GPU is used, needs {needs}", "fp4dispatch doctor"),)
    return (Reason("ARCH", f"GPU is {system.arch.sm}, needs {needs}"),)


def _formats(record: Capability, scalings: tuple[str, ...], problem: Problem) -> tuple[Reason, ...]:
    found = []
    if problem.scaling not in scalings:
        found.append(Reason("DTYPE", f"scaling is {problem.scaling}, needs {' or '.join(scalings)}"))
    if problem.activation not in ("any", *record.activations):
        found.append(
            Reason(
                "DTYPE",
                f"activation is {problem.activation}, needs {' or '.join(record.activations)}",
                f"activation={record.activations[0]!r}, or leave it to the policy",
            )
        )
    if problem.out_dtype not in record.out_dtypes:
        found.append(
            Reason(
                "DTYPE",
                f"output is {problem.out_dtype}, needs {' or '.join(record.out_dtypes)}",
                f"out_dtype={record.out_dtypes[0]!r}",
            )
        )
    return tuple(found)


def _operands(record: Capability, problem: Problem) -> tuple[Reason, ...]:
    """Check what binds raw operands only: layers pad exactly, own their layout, and leave quantising to a backend."""
    found = []
    if not record.raw and (problem.raw or problem.sf_layout is not None):
        found.append(_quantised_already(problem))
    if problem.sf_layout is None:
        return tuple(found)
    for size, value, multiple in (("N", problem.n, record.n_multiple), ("K", problem.k, record.k_multiple)):
        if value % multiple:
            found.append(
                Reason(
                    "SHAPE",
                    f"{size}={value} is not a multiple of {multiple}",
                    "FP4Linear pads; raw op callers must pad, with zeros, values and scales",
                )
            )
    if problem.sf_layout not in record.sf_layouts:
        found.append(
            Reason(
                "LAYOUT",
                f"b_sf is {problem.sf_layout}, needs {' or '.join(record.sf_layouts)}",
                "convert the block scales once, when the weights are loaded; FP4Linear does",
            )
        )
    return tuple(found)


def _quantised_already(problem: Problem) -> Reason:
    scales = f", b_sf {problem.sf_layout}" if problem.sf_layout else ""
    fp4 = problem.op == "nvfp4_gemm"
    return Reason(
        "LAYOUT",
        f"operands are quantised already (raw operator{scales}), needs 16-bit activations",
        "FP4Linear, or a backend that multiplies NVFP4 by NVFP4" if fp4 else "FP8Linear, or another backend",
    )


def _versions(record: Capability, problem: Problem, system: System) -> tuple[Reason, ...]:
    toolkit = catalogue().toolkits.get(system.arch.sm) if system.arch else None
    needs = list(record.requires)
    if record.compiles:
        needs.insert(0, Requirement("nvcc", TOOLKIT))
    if record.proof and system.arch is not None and (record.proven_by, system.arch.sm) in system.proven:
        needs = [need for need in needs if need.what not in _TOOLCHAIN]  # the binary is there, and proven
    found = (_version(need, toolkit, system) for need in needs)
    return tuple(reason for reason in found if reason)


def toolchain(name: str, problem: Problem, system: System) -> tuple[Reason, ...]:
    """Collect what a machine lacks to compile the kernels of a backend, whether or not some are finished."""
    anew = replace(system, proven=frozenset())
    return tuple(reason for reason in check(name, problem, anew) if reason.code == "TOOLCHAIN")


def _version(need: Requirement, toolkit: Toolkit | None, system: System) -> Reason | None:
    lowest = need.min
    suffix = ""
    if lowest == TOOLKIT:
        if toolkit is None:
            return None
        lowest = toolkit.nvcc if need.what == "nvcc" else toolkit.cuda
        suffix = f" for {system.arch}"
    label = _LABEL[need.what]
    code: ReasonCode = "TOOLCHAIN" if need.what in _TOOLCHAIN else "LIBRARY"
    major = int((system.cuda or "13").split(".")[0])
    if need.what == "nvcc":  # of the major release that torch has: a driver need not run code of a later one
        fix = installing.nvcc(lowest if Version(lowest).major >= major else f"{major}.0")
    else:
        fix = _FIX[need.what].format(need=lowest, major=major)
    value = fact(system, need.what)
    if value is None:
        return Reason(code, f"{label} not found (needs {lowest}{suffix})", fix)
    text, path = (value, "") if isinstance(value, str) else (value.version, value.path)
    if not text:
        return None  # present, version not stated: only in a what-if question
    have, want = parse_version(text), Version(lowest)
    if have is not None and have >= want:
        return None
    where = f" loaded from {path}" if path else ""
    return Reason(code, f"{label} {text}{where} (needs {lowest}{suffix})", fix)
