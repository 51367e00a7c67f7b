"""The checks of ``fp4dispatch doctor``. A check is a function from :class:`Facts` to outcomes; tests make the facts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from packaging.version import Version

from fp4dispatch.cli.doctor_settings import wrong_values
from fp4dispatch.jit.store import guard
from fp4dispatch.jit.store.cache import BUILDING, KERNELS, LOCKS, LOGS
from fp4dispatch.jit.store.records import FOLDERS
from fp4dispatch.machine import installing
from fp4dispatch.machine.system import System
from fp4dispatch.policy.capability import version_of
from fp4dispatch.policy.catalogue import catalogue
from fp4dispatch.policy.rules import in_range, rules
from fp4dispatch.problem.arch import KNOWN_ARCHS, SM100, SM103, SM120, SM121, Arch

_STORES = (KERNELS, BUILDING, LOCKS, LOGS, *FOLDERS)
_SMALL = 1 << 20
Status = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Check:
    """Outcome of one check; ``fix`` is empty only where the status is ok or skip."""

    name: str
    status: Status
    text: str
    fix: str = ""


@dataclass(frozen=True)
class Kept:
    """One verdict of the self-check that holds on this machine."""

    backend: str
    status: str
    text: str
    findings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Child:
    """What the child process saw: ``error`` is why torch could not be imported, else None."""

    error: str | None = None
    cuda: str | None = None
    archs: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    cuda_error: str = ""
    plugins: dict[str, str | None] = field(default_factory=dict)
    verdicts: tuple[Kept, ...] = ()
    verdicts_error: str = ""


@dataclass(frozen=True)
class Facts:
    """Everything the checks look at."""

    system: System
    child: Child
    python: tuple[int, int, int]
    settings_errors: tuple[str, ...]
    cache_dir: Path
    distributions: frozenset[str]
    library_path: str = ""
    selfcheck_folder: Path = Path("selfcheck")
    selfcheck_off: bool = False
    values: Mapping[str, Any] = field(default_factory=dict)
    """The settings that could be parsed, by key."""

    @property
    def fp8_copy(self) -> bool:
        """Whether NVFP4 layers may hold an FP8 copy of their weights."""
        return bool(self.values.get("fp8_copy"))


def _check_python(facts: Facts) -> Iterable[Check]:
    text = ".".join(map(str, facts.python))
    if facts.python < (3, 10):
        yield Check("python", "fail", f"Python {text} (needs 3.10 or later)", "use a newer Python")
    else:
        yield Check("python", "ok", text)


def _check_torch(facts: Facts) -> Iterable[Check]:
    torch, error = facts.system.torch, facts.child.error
    if torch is None:
        yield Check("torch", "fail", "not installed", "install it as https://pytorch.org/get-started says")
    elif error is not None:
        yield Check("torch", "fail", f"{torch.version} cannot be imported: {error}", "reinstall torch in this Python")
    else:
        yield Check("torch", "ok", f"{torch.version}, CUDA {facts.child.cuda or 'none (CPU build)'}")
        yield from _torch_for_gpus(facts)


def _torch_for_gpus(facts: Facts) -> Iterable[Check]:
    system, child = facts.system, facts.child
    if not system.gpus and not child.gpus:
        return
    install = "install a CUDA build of torch: https://pytorch.org/get-started"
    if child.cuda is None:
        yield Check("torch CUDA", "fail", f"torch is a CPU build but {system.arch} is here", install)
    elif child.cuda_error:
        yield Check("torch CUDA", "fail", child.cuda_error, "see https://docs.nvidia.com/deploy/cuda-compatibility")
    elif system.gpus and child.gpus != tuple(gpu.arch.capability for gpu in system.gpus):
        text = f"CUDA sees {', '.join(child.gpus) or 'no GPU'}, NVML led to expect {_archs(system)}"
        yield Check("torch CUDA", "warn", text, "set CUDA_DEVICE_ORDER=PCI_BUS_ID")
    else:
        yield Check("torch CUDA", "ok", f"runs on {', '.join(child.gpus)}")
    for arch in dict.fromkeys(gpu.arch for gpu in system.gpus):
        if child.archs and not any(_runs_on(built, arch) for built in child.archs):
            text = f"torch holds no code for {arch} (it has {', '.join(child.archs)})"
            yield Check("torch archs", "fail", text, "install a build of torch for a newer CUDA")


def _check_driver(facts: Facts) -> Iterable[Check]:
    system = facts.system
    if system.driver is None:
        yield Check("driver", "skip", _first_note(system, "NVML") or "no NVIDIA driver")
        return
    text = f"{system.driver}, runs CUDA up to {system.driver_cuda or 'unknown'}"
    if system.cuda and system.driver_cuda and Version(system.cuda) > Version(system.driver_cuda):
        # Minor version compatibility: within one CUDA major, an older driver runs newer binaries, but not newer PTX.
        same_major = system.cuda.split(".")[0] == system.driver_cuda.split(".")[0]
        status: Status = "warn" if same_major else "fail"
        yield Check(
            "driver", status, f"{text}; torch was built for {system.cuda}", "update the driver, or use an older torch"
        )
    else:
        yield Check("driver", "ok", text)


def _check_gpu(facts: Facts) -> Iterable[Check]:
    system = facts.system
    if not system.gpus:
        text = "; ".join(system.notes) or "none visible"
        if facts.child.gpus:
            fix = "install nvidia-ml-py and make libnvidia-ml.so.1 visible, so that GPUs are known before CUDA starts"
            yield Check("gpu", "warn", f"CUDA sees {', '.join(facts.child.gpus)} but NVML does not: {text}", fix)
        else:
            yield Check("gpu", "skip", f"no GPU, everything runs on the CPU reference ({text})")
    for gpu in system.gpus:
        if gpu.arch in KNOWN_ARCHS:
            yield Check("gpu", "ok", f"{gpu.index}: {gpu.name}, {gpu.arch}")
        else:
            text = f"{gpu.index}: {gpu.name}, {gpu.arch}, is not known to this release"
            yield Check("gpu", "warn", text, "update fp4dispatch; until then expect the reference backend")


def _check_visible_devices(facts: Facts) -> Iterable[Check]:
    odd = [note for note in facts.system.notes if note.startswith("CUDA_") or "MIG" in note]
    for note in odd:
        yield Check(
            "visible devices", "warn", note, "list each GPU once, by index or UUID as `nvidia-smi -L` prints them"
        )
    mixed = _first_note(facts.system, "different GPUs")
    if mixed and not odd:
        yield Check("visible devices", "warn", mixed, "set CUDA_DEVICE_ORDER=PCI_BUS_ID")
    if not odd and not mixed:
        yield Check("visible devices", "ok", "nothing odd")


def _check_cudnn(facts: Facts) -> Iterable[Check]:
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


def _check_flashinfer(facts: Facts) -> Iterable[Check]:
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


def _check_nvcc(facts: Facts) -> Iterable[Check]:
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


def _check_jit_extra(facts: Facts) -> Iterable[Check]:
    missing = [name for name in ("apache-tvm-ffi", "ninja") if name not in facts.distributions]
    if missing:
        text = f"{' and '.join(missing)} not installed: kernels cannot be built"
        yield Check("jit packages", "warn" if facts.system.gpus else "skip", text, installing.of_extras("jit"))
    else:
        yield Check("jit packages", "ok", "installed")


def _check_cutlass(facts: Facts) -> Iterable[Check]:
    found = facts.system.cutlass
    if found is None:
        fix = "pip install -U --no-deps flashinfer-python (it ships them), or set CUTLASS_PATH to a CUTLASS checkout"
        yield Check("cutlass headers", "warn", "not found: CUTLASS kernels cannot be built", fix)
    else:
        yield Check("cutlass headers", "ok", f"{found.version} in {found.path}")


def _check_cache(facts: Facts) -> Iterable[Check]:
    folder = facts.cache_dir
    if folder == guard.made():
        text = "no home folder is known for this user: each process builds its kernels anew"
        yield Check("cache", "warn", text, "set FP4DISPATCH_CACHE_DIR to a folder that you can write")
        return
    if faults := guard.faults(folder, _STORES):
        text, _, fix = faults[0].partition("\n  fix: ")
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        yield Check("cache", "fail", f"{text}{more}: it is not used, and work is done anew in each process", fix)
        return
    place = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if shutil.disk_usage(place).free < _SMALL:
        text = f"no space is left at {place}: finished kernels load, others are built for each process anew"
        yield Check("cache", "warn", text, "fp4dispatch cache prune --max-size 1GB, or free some space")
    elif not os.access(place, os.W_OK | os.X_OK):
        text = f"{place} is read-only: finished kernels load, others are built for each process anew"
        yield Check("cache", "warn", text, "set FP4DISPATCH_CACHE_DIR to a folder that you can write")
    else:
        yield Check("cache", "ok", f"{folder}" + ("" if place == folder else " (made when needed)"))


def _check_settings(facts: Facts) -> Iterable[Check]:
    found = [*facts.settings_errors, *wrong_values(facts.values, facts.child.plugins)]
    for error in found:
        status: Status = "warn" if "is not a setting" in error else "fail"
        yield Check("settings", status, error, "correct the variable, or unset it")
    if not found:
        yield Check("settings", "ok", "all understood")
    arch = facts.system.arch
    if arch and any(c.backend == "w4a8_expanded" and arch.sm in c.archs for c in catalogue().capabilities):
        what = "FP8 copy of NVFP4 weights, 8 bits each, for many tokens"
        if facts.fp8_copy:
            yield Check("settings", "ok", f"{what}: allowed, w4a8_expanded may be chosen")
        else:
            fix = "FP4DISPATCH_FP8_COPY=1 allows it, where the memory is there"
            yield Check("settings", "ok", f"{what}: not allowed, w4a8_expanded runs only where it is named", fix)


def _check_nvml_package(facts: Facts) -> Iterable[Check]:
    if "pynvml" in facts.distributions:
        text = "the deprecated distribution `pynvml` is installed: torch warns, and it may hide nvidia-ml-py"
        fix = "pip uninstall -y pynvml && pip install --force-reinstall nvidia-ml-py"
        yield Check("nvidia-ml-py", "warn", text, fix)
    elif "nvidia-ml-py" not in facts.distributions:
        yield Check(
            "nvidia-ml-py", "warn", "not installed: GPUs are not known before CUDA starts", "pip install nvidia-ml-py"
        )
    else:
        yield Check("nvidia-ml-py", "ok", "installed")


def _check_plugins(facts: Facts) -> Iterable[Check]:
    if facts.child.error is not None:
        yield Check("plug-ins", "skip", "not tried: they need torch")
    elif not facts.child.plugins:
        yield Check("plug-ins", "skip", "none installed")
    for name, error in facts.child.plugins.items():
        if error:
            yield Check("plug-ins", "fail", f"{name} cannot be imported: {error}", f"update or uninstall {name}")
        else:
            yield Check("plug-ins", "ok", name)


def _check_selfcheck(facts: Facts) -> Iterable[Check]:
    if facts.child.error is not None:
        yield Check("self-check", "skip", "verdicts not read: they need torch")
    elif facts.child.verdicts_error:
        text = f"its verdicts cannot be read: {facts.child.verdicts_error}"
        yield Check("self-check", "fail", text, f"remove {facts.selfcheck_folder}: backends are then checked again")
    elif not facts.child.verdicts:
        yield Check("self-check", "skip", "no verdict yet: a backend is checked when `auto` first chooses it")
    for kept in facts.child.verdicts:
        if kept.status != "failed":
            yield Check("self-check", "ok", kept.text)
        elif facts.selfcheck_off:
            text = f"{kept.text} Yet FP4DISPATCH_SELFCHECK=off lets it run"
            yield Check("self-check", "warn", text, "unset FP4DISPATCH_SELFCHECK")
        else:
            more = "".join(f" Also: {finding}." for finding in kept.findings[1:])
            fix = (
                f"other backends run instead. Report it with this text; {kept.backend} is checked again after an "
                f"update of the driver or a library, or once {facts.selfcheck_folder} is removed"
            )
            yield Check("self-check", "fail", f"{kept.text}{more}", fix)


def _runs_on(built: str, arch: Arch) -> bool:
    """Whether code for ``sm_90`` (or a, f variants) or PTX (``compute_90``) of torch's list runs on a GPU.

    Binary code runs on later minors of its major; PTX is compiled by the driver for any later GPU; an ``a`` target runs
    on its own arch alone (https://docs.nvidia.com/cuda/cuda-programming-guide, binary and PTX compatibility).
    """
    kind, _, number = built.partition("_")
    digits = number.rstrip("af")
    major, minor = int(digits[:-1]), int(digits[-1])
    if number.endswith("a"):
        return (major, minor) == (arch.major, arch.minor)
    if kind == "compute" and digits == number:
        return (major, minor) <= (arch.major, arch.minor)
    return major == arch.major and minor <= arch.minor


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


def _first_note(system: System, start: str) -> str | None:
    return next((note for note in system.notes if note.startswith(start)), None)


def _archs(system: System) -> str:
    return ", ".join(gpu.arch.capability for gpu in system.gpus) or "no GPU"


CHECKS: tuple[Callable[[Facts], Iterable[Check]], ...] = (
    _check_python,
    _check_torch,
    _check_driver,
    _check_gpu,
    _check_visible_devices,
    _check_nvml_package,
    _check_cudnn,
    _check_flashinfer,
    _check_nvcc,
    _check_jit_extra,
    _check_cutlass,
    _check_cache,
    _check_settings,
    _check_plugins,
    _check_selfcheck,
)
