"""Python, torch, the driver and the GPUs."""

from __future__ import annotations

from collections.abc import Iterable

from packaging.version import Version

from fp4dispatch.cli.checks.facts import Check, Facts, Status
from fp4dispatch.machine.system import System
from fp4dispatch.problem.arch import KNOWN_ARCHS, Arch


def check_python(facts: Facts) -> Iterable[Check]:
    """Whether this Python is new enough."""
    text = ".".join(map(str, facts.python))
    if facts.python < (3, 10):
        yield Check("python", "fail", f"Python {text} (needs 3.10 or later)", "use a newer Python")
    else:
        yield Check("python", "ok", text)


def check_torch(facts: Facts) -> Iterable[Check]:
    """Whether torch can be imported, and has code for the GPUs."""
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
        if child.archs and not any(runs_on(built, arch) for built in child.archs):
            text = f"torch holds no code for {arch} (it has {', '.join(child.archs)})"
            yield Check("torch archs", "fail", text, "install a build of torch for a newer CUDA")


def check_driver(facts: Facts) -> Iterable[Check]:
    """Whether the driver runs the CUDA version of torch."""
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


def check_gpu(facts: Facts) -> Iterable[Check]:
    """Which GPUs are visible, and whether this release knows them."""
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


def check_visible_devices(facts: Facts) -> Iterable[Check]:
    """What is unusual about the list of visible GPUs."""
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


def check_nvml_package(facts: Facts) -> Iterable[Check]:
    """Whether nvidia-ml-py is installed, and not hidden by ``pynvml``."""
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


def runs_on(built: str, arch: Arch) -> bool:
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


def _first_note(system: System, start: str) -> str | None:
    return next((note for note in system.notes if note.startswith(start)), None)


def _archs(system: System) -> str:
    return ", ".join(gpu.arch.capability for gpu in system.gpus) or "no GPU"
