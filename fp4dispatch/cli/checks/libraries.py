"""cuDNN, FlashInfer, nvcc and what else kernels are built with."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from packaging.version import Version

from fp4dispatch.cli.checks.facts import Check, Facts, Status
from fp4dispatch.machine import installing
from fp4dispatch.machine.system import System
from fp4dispatch.policy.capability import version_of
from fp4dispatch.policy.catalogue import catalogue
from fp4dispatch.policy.rules import in_range, rules
from fp4dispatch.problem.arch import SM100, SM103, SM120, SM121


def check_cudnn(facts: Facts) -> Iterable[Check]:
    """Which cuDNN is loaded, and whether the cudnn backend takes it."""
    system = facts.system
    family = (system.cuda or "13").split(".")[0]
    install = f"pip install -U nvidia-cudnn-cu{family}"
    wanted = bool({gpu.arch for gpu in system.gpus} & {SM100, SM103, SM120, SM121})
    if system.cudnn is None:
        status: Status = "warn" if wanted else "skip"
        yield Check("cudnn", status, "not found", install if wanted else "")
    elif not system.cudnn.version:
        yield Check("cudnn", "warn", f"{system.cudnn.path} does not tell its version", install)
    else:
        text = f"{system.cudnn.version} from {system.cudnn.path or 'unknown'}"
        need = _cudnn_floor(system)
        if need is not None and Version(system.cudnn.version) < Version(need):
            yield Check("cudnn", "warn", f"{text} (the cudnn backend needs {need} here)", install)
        else:
            yield Check("cudnn", "ok", text)
    shadows = [
        str(file)
        for folder in facts.library_path.split(":")
        if folder
        for file in sorted(Path(folder).glob("libcudnn.so.[0-9]*"))
        if system.cudnn is None or Path(system.cudnn.path).resolve() != file.resolve()
    ]
    if shadows:
        yield Check("cudnn", "warn", f"LD_LIBRARY_PATH offers another cuDNN: {shadows[0]}", "unset LD_LIBRARY_PATH")
    if system.cudnn and system.cudnn_frontend is None:
        status = "warn" if system.gpus else "skip"
        fix = "pip install nvidia-cudnn-frontend" if system.gpus else ""
        yield Check("cudnn frontend", status, "not installed, so the cudnn backend cannot run", fix)
    elif system.cudnn_frontend:
        yield Check("cudnn frontend", "ok", system.cudnn_frontend.version)


def check_flashinfer(facts: Facts) -> Iterable[Check]:
    """Whether a known incident concerns this FlashInfer on these GPUs."""
    found = facts.system.flashinfer
    if found is None:
        yield Check("flashinfer", "skip", "not installed (optional)")
        return
    archs = {gpu.arch.sm for gpu in facts.system.gpus}
    hits = [
        rule
        for rule in rules()
        if rule.verb == "deny"
        and any(what == "flashinfer" and "<" in bounds for what, bounds in rule.when.versions)
        and all(in_range(version_of(facts.system, what), bounds) for what, bounds in rule.when.versions)
        and (not rule.when.archs or archs & set(rule.when.archs))
    ]
    for rule in hits:
        text = f"{found.version}, {', '.join(rule.backends)}: {rule.because} ({rule.source})"
        yield Check("flashinfer", "warn", text, rule.fix or "pip install -U flashinfer-python")
    if not hits:
        yield Check("flashinfer", "ok", f"{found.version}, no known incident for the GPUs here")


def check_nvcc(facts: Facts) -> Iterable[Check]:
    """Whether there is an nvcc that can build for these GPUs."""
    found, notes = facts.system.nvcc, [note for note in facts.system.notes if note.startswith("nvcc")]
    install = installing.nvcc(f"{(facts.system.cuda or '13').split('.')[0]}.0")
    for note in notes:
        yield Check("nvcc", "fail", note.removeprefix("nvcc: "), "correct the variable, or unset it")
    if found is None:
        if not notes:
            yield Check("nvcc", "warn", "not found: only kernels that are built already can run", install)
        return
    archs = list(dict.fromkeys(gpu.arch for gpu in facts.system.gpus))
    for arch in archs:
        toolkit = catalogue().toolkits.get(arch.sm)
        need = toolkit.nvcc if toolkit else None
        if need is not None and Version(found.version) < Version(need):
            text = f"{found.version} ({found.path}) cannot build for {arch} (needs {need})"
            yield Check("nvcc", "fail", text, installing.nvcc(need))
            return
    yield Check("nvcc", "ok", f"{found.version} from {found.path}" + (f", builds for {archs[0]}" if archs else ""))


def check_jit_extra(facts: Facts) -> Iterable[Check]:
    """Whether the packages that building needs are installed."""
    missing = [name for name in ("apache-tvm-ffi", "ninja") if name not in facts.distributions]
    if missing:
        text = f"{' and '.join(missing)} not installed: kernels cannot be built"
        yield Check("jit packages", "warn" if facts.system.gpus else "skip", text, installing.of_extras("jit"))
    else:
        yield Check("jit packages", "ok", "installed")


def check_cutlass(facts: Facts) -> Iterable[Check]:
    """Whether the CUTLASS headers are there."""
    found = facts.system.cutlass
    if found is None:
        fix = "pip install -U --no-deps flashinfer-python (it ships them), or set CUTLASS_PATH to a CUTLASS checkout"
        yield Check("cutlass headers", "warn", "not found: CUTLASS kernels cannot be built", fix)
    else:
        yield Check("cutlass headers", "ok", f"{found.version} in {found.path}")


def _cudnn_floor(system: System) -> str | None:
    """Return the lowest cuDNN that the cudnn backend takes on the GPUs here, None where it runs on none of them."""
    archs = {gpu.arch.sm for gpu in system.gpus}
    floors = [
        need.min
        for record in catalogue().capabilities
        if record.backend == "cudnn" and archs & set(record.archs)
        for need in record.requires
        if need.what == "cudnn"
    ]
    return max(floors, key=Version, default=None)
