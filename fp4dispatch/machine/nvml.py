"""The GPUs that this process will see, from NVML. Creates no CUDA context, process or file.

Used by :mod:`fp4dispatch.machine.system`. NVML lists all GPUs of the machine in PCI bus order and ignores
``CUDA_VISIBLE_DEVICES``; :func:`select` applies that variable as the driver does.

Sources: the CUDA guide on environment variables
(https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/environment-variables.html), the MIG guide on device
enumeration (https://docs.nvidia.com/datacenter/tesla/mig-user-guide/). For cases that the guides leave open
(duplicates, overflow, stray characters, wrong orders) the code does what driver 580.159.04 did on an H200:
tests/unit/test_system_visible.py holds these answers, tests/gpu/test_system_gpu.py checks them again. MIG has not been
tested on hardware.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fp4dispatch.problem.arch import Arch
from fp4dispatch.settings import settings

_ORDINAL = re.compile(r"\s*([+-]?[0-9]+)")
_OLD_MIG = re.compile(r"MIG-(GPU-[^/]+)/(\d+)/(\d+)")


@dataclass(frozen=True)
class Gpu:
    """One visible GPU: index as CUDA numbers it in this process, name, UUID, arch and memory in bytes (0: unknown)."""

    index: int
    name: str
    uuid: str
    arch: Arch
    memory: int = 0


@dataclass(frozen=True)
class MigDevice:
    """One MIG compute instance: UUID, name, memory in bytes, GPU instance and compute instance ids."""

    uuid: str
    name: str
    memory: int
    gi: int
    ci: int


@dataclass(frozen=True)
class Board:
    """One physical GPU. ``mig`` is None where MIG mode is off; ``speed`` is cores x MHz (0: unknown)."""

    uuid: str
    name: str
    arch: Arch
    memory: int = 0
    speed: int = 0
    mig: tuple[MigDevice, ...] | None = None


@dataclass(frozen=True)
class Found:
    """NVML's answer: visible GPUs, driver version, newest CUDA version that the driver runs, notes for the user."""

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    driver_cuda: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Speed:
    """What NVML knows of a GPU's speed: FP32 cores, highest clocks of SMs and memory in MHz, bits of the memory bus."""

    cores: int
    clock_mhz: int
    memory_mhz: int
    bus_bits: int


def speed(uuid: str) -> Speed | None:
    """Return the speed of the GPU with this UUID; None if NVML cannot tell all of it. Creates no CUDA context."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver, or a broken one: `probe` says which
        return None
    try:
        handle = _try(pynvml.nvmlDeviceGetHandleByUUID, uuid)
        asked = (
            _try(pynvml.nvmlDeviceGetNumGpuCores, handle),
            _try(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM),
            _try(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_MEM),
            _try(pynvml.nvmlDeviceGetMemoryBusWidth, handle),
        )
    finally:
        _try(pynvml.nvmlShutdown)
    return Speed(*map(int, asked)) if all(asked) else None


def probe() -> Found:
    """Ask NVML for the GPUs visible to this process. Never raises; ``notes`` say what is missing."""
    try:
        import pynvml
    except ImportError as error:
        return Found(notes=(f"NVML: the Python package nvidia-ml-py cannot be imported ({error})",))
    except Exception as error:  # a broken third-party module must not break `import fp4dispatch`
        return Found(notes=(f"NVML: importing pynvml failed with {type(error).__name__}: {error}",))
    try:
        pynvml.nvmlInit()
    except Exception as error:
        return Found(notes=(f"NVML: {_init_failure(pynvml, error)}",))
    try:
        driver = _try(pynvml.nvmlSystemGetDriverVersion)
        number = _try(pynvml.nvmlSystemGetCudaDriverVersion_v2)
        boards, notes = _boards(pynvml)
    finally:
        _try(pynvml.nvmlShutdown)
    gpus, more = select(boards, settings.cuda_visible_devices, settings.cuda_device_order)
    return Found(
        gpus=gpus,
        driver=None if driver is None else _text(driver),
        driver_cuda=None if number is None else f"{number // 1000}.{number % 1000 // 10}",
        notes=(*notes, *more),
    )


def select(boards: Iterable[Board], visible: str | None, order: str) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """Apply ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER`` to NVML's list. Pure.

    Parameters
    ----------
    boards
        Physical GPUs in PCI bus order.
    visible
        Value of ``CUDA_VISIBLE_DEVICES``, None where unset (which differs from empty: empty hides every GPU).
    order
        Value of ``CUDA_DEVICE_ORDER``: ``FASTEST_FIRST`` or ``PCI_BUS_ID``; anything else hides every GPU.

    Returns
    -------
    gpus, notes
        GPUs as CUDA will number them, and notes for the user.
    """
    ordered, notes = _in_cuda_order(tuple(boards), order)
    picks: list[_Pick] = [(board, None) for board in ordered]
    why = ""
    if visible is not None and ordered:
        picks, why = _listed(ordered, visible)
    if why:
        notes.append(f"CUDA_VISIBLE_DEVICES={visible!r}: {why}")
    devices, more = _expand_mig(picks)
    gpus = tuple(
        Gpu(i, mig.name or board.name, mig.uuid, board.arch, mig.memory)
        if mig
        else Gpu(i, board.name, board.uuid, board.arch, board.memory)
        for i, (board, mig) in enumerate(devices)
    )
    return gpus, (*notes, *more)


_Pick = tuple[Board, "MigDevice | None"]


def _in_cuda_order(boards: tuple[Board, ...], order: str) -> tuple[list[Board], list[str]]:
    """Sort as CUDA does. FASTEST_FIRST is undocumented; its result is certain only if all GPUs are equal."""
    if order not in ("FASTEST_FIRST", "PCI_BUS_ID"):
        return [], [f"CUDA_DEVICE_ORDER={order!r} is neither FASTEST_FIRST nor PCI_BUS_ID, so CUDA shows no GPU at all"]
    if order == "PCI_BUS_ID" or len({(b.name, b.arch) for b in boards}) <= 1:
        return list(boards), []
    note = (
        "different GPUs in one machine: CUDA's FASTEST_FIRST order is approximated by cores x clock until CUDA is "
        "initialised; set CUDA_DEVICE_ORDER=PCI_BUS_ID to make the numbering certain"
    )
    return sorted(boards, key=lambda board: -board.speed), [note]


def _listed(boards: list[Board], visible: str) -> tuple[list[_Pick], str]:
    """Parse the list. The first entry that names no device ends it; a device named twice makes it empty."""
    by_uuid = visible.startswith(("GPU-", "MIG-"))  # the first entry decides whether ordinals or UUIDs are understood
    picks: list[_Pick] = []
    for word in visible.split(","):
        matches = _by_uuid(boards, word) if by_uuid else _by_ordinal(boards, word)
        if len(matches) != 1:
            expected = word.strip() in ("", "-1") and not by_uuid
            rest = "it and everything after it is ignored" if picks else "no GPU is visible"
            return picks, "" if expected else f"{word!r} names {len(matches)} of the {len(boards)} GPUs, so {rest}"
        if matches[0] in picks:
            return [], f"{word!r} names a GPU that is listed already, so CUDA shows no GPU at all"
        picks += matches
    return picks, ""


def _by_ordinal(boards: list[Board], word: str) -> list[_Pick]:
    """``2``, read as ``(int)strtoul(word)``: leading digits count, 4294967296 wraps to 0, overflow gives -1."""
    match = _ORDINAL.match(word)
    if match is None:
        return []
    number = int(match[1]) if len(match[1]) < 25 else 2**64
    ordinal = -1 if abs(number) >= 2**64 else (number + 2**31) % 2**32 - 2**31
    return [(boards[ordinal], None)] if 0 <= ordinal < len(boards) else []


def _by_uuid(boards: list[Board], word: str) -> list[_Pick]:
    """``GPU-8932f937``, ``MIG-8932f937``, or the form of drivers before R470, ``MIG-GPU-<uuid>/<gi>/<ci>``."""
    old = _OLD_MIG.fullmatch(word)
    if old:
        named = (old[1], int(old[2]), int(old[3]))
        return [(b, mig) for b in boards for mig in b.mig or () if (b.uuid, mig.gi, mig.ci) == named]
    digits = _hex_digits(word[4:])
    if not digits or not word.startswith(("GPU-", "MIG-")):
        return []
    devices: list[_Pick] = []
    if word.startswith("MIG-"):
        devices = [(board, mig) for board in boards for mig in board.mig or ()]
        boards = [board for board in boards if board.mig is None]
    devices += [(board, None) for board in boards]
    return [(b, mig) for b, mig in devices if _hex_digits((mig or b).uuid[4:]).startswith(digits)]


def _hex_digits(text: str) -> str:
    """Hexadecimal digits of a UUID or UUID prefix, without dashes; empty if it is not one.

    The driver ignores case, dashes and anything after a complete UUID. It rejects stray characters in a prefix.
    """
    digits = ""
    for character in text.lower():
        if character in "0123456789abcdef":
            digits += character
        elif character != "-":
            return ""
        if len(digits) == 32:
            break
    return digits


def _expand_mig(picks: list[_Pick]) -> tuple[list[_Pick], list[str]]:
    """Apply the MIG guide: CUDA enumerates one compute instance, and then no other GPU."""
    named = [pick for pick in picks if pick[1]]
    if named:
        return named[:1], []
    for board, _ in picks:
        if board.mig:
            note = (
                f"{board.name} is in MIG mode: CUDA shows one MIG device only, taken to be the first; "
                "name another in CUDA_VISIBLE_DEVICES"
            )
            return [(board, board.mig[0])], [note]
    notes = [
        f"{b.name} ({b.uuid}) is in MIG mode without an instance: CUDA cannot use it" for b, _ in picks if b.mig == ()
    ]
    return [(board, None) for board, _ in picks if board.mig is None], notes


def _boards(nvml: Any) -> tuple[list[Board], list[str]]:
    """Read every GPU that NVML can open; a GPU that cannot be opened becomes a note."""
    boards, notes = [], []
    for i in range(_try(nvml.nvmlDeviceGetCount) or 0):
        try:
            boards.append(_board(nvml, nvml.nvmlDeviceGetHandleByIndex(i)))
        except Exception as error:
            notes.append(f"NVML: GPU {i} cannot be read ({error})")
    if not boards:
        notes.append("NVML: there is a driver but no GPU that this process may use")
    return boards, notes


def _board(nvml: Any, handle: Any) -> Board:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    cores = _try(nvml.nvmlDeviceGetNumGpuCores, handle) or 0
    clock = _try(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM) or 0
    mode = _try(nvml.nvmlDeviceGetMigMode, handle)  # NOT_SUPPORTED on most GPUs
    return Board(
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        arch=Arch(major, minor),
        memory=_memory(nvml, handle),
        speed=cores * clock,
        mig=_mig_devices(nvml, handle) if mode and mode[0] == nvml.NVML_DEVICE_MIG_ENABLE else None,
    )


def _mig_devices(nvml: Any, handle: Any) -> tuple[MigDevice, ...]:
    devices = []
    for i in range(_try(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        mig = _try(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, i)
        uuid = _try(nvml.nvmlDeviceGetUUID, mig) if mig is not None else None
        if uuid is None:  # slots are numbered with gaps: NOT_FOUND is normal
            continue
        gi, ci = _try(nvml.nvmlDeviceGetGpuInstanceId, mig), _try(nvml.nvmlDeviceGetComputeInstanceId, mig)
        devices.append(
            MigDevice(
                uuid=_text(uuid),
                name=_text(_try(nvml.nvmlDeviceGetName, mig) or ""),
                memory=_memory(nvml, mig),
                gi=-1 if gi is None else gi,
                ci=-1 if ci is None else ci,
            )
        )
    return tuple(devices)


def _memory(nvml: Any, handle: Any) -> int:
    info = _try(nvml.nvmlDeviceGetMemoryInfo, handle)  # NOT_SUPPORTED where memory is shared with the CPU (GB10, Thor)
    return 0 if info is None else int(info.total)


def _try(function: Any, *args: Any) -> Any:
    """Call NVML; None if this driver or GPU does not support the call."""
    try:
        return function(*args)
    except Exception:
        return None


def _text(value: str | bytes) -> str:
    """Old releases of nvidia-ml-py return bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _init_failure(nvml: Any, error: Exception) -> str:
    """Say in words why ``nvmlInit`` failed."""
    known = {
        "NVML_ERROR_LIBRARY_NOT_FOUND": "libnvidia-ml.so.1 is not installed: no NVIDIA driver here",
        "NVML_ERROR_DRIVER_NOT_LOADED": "the NVIDIA driver is installed but not loaded",
        "NVML_ERROR_LIB_RM_VERSION_MISMATCH": "the driver was updated while in use (library and kernel module "
        "differ): reboot, or reload the kernel module",
        "NVML_ERROR_NO_PERMISSION": "no permission to talk to the driver",
    }
    code = getattr(error, "value", None)
    return next(
        (text for name, text in known.items() if code is not None and getattr(nvml, name, None) == code), f"{error}"
    )
