"""The toolchain: nvcc, a host compiler, headers and NVIDIA's disassembler.

nvcc and the CUTLASS headers come from :mod:`fp4dispatch.machine.libraries`, so ``doctor``, ``explain`` and the builder
all mean the same ones. An error lists everything that is missing or too old, each with its fix.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

from fp4dispatch.errors import ToolchainError
from fp4dispatch.jit.catalog.flags import CommonFlags, FlagRecord
from fp4dispatch.machine import installing, libraries
from fp4dispatch.machine.libraries import Library
from fp4dispatch.settings import settings

_RELEASE = re.compile(r"release \d+\.\d+, V(\d+\.\d+\.\d+)")
# nvcc starts its passes through a shell without quoting, so its own path must not hold special characters.
_SAFE_PATH = re.compile(r"[A-Za-z0-9_./+@~=,:-]+")


CUDA = "cuda"


class Missing(NamedTuple):
    """One reason why compiling is not possible: value found, value needed, and the fix."""

    text: str
    fix: str


@dataclass(frozen=True)
class Disassembler:
    """``cuobjdump`` and ``nvdisasm`` and their version."""

    cuobjdump: Path
    nvdisasm: Path
    version: str


@dataclass(frozen=True)
class Toolchain:
    """A complete toolchain for one target.

    ``includes`` maps short names to header folders. Builds and cache entries use the short names.
    """

    nvcc: Path
    nvcc_version: str
    host: Path
    host_version: str
    ninja: Path
    includes: dict[str, Path]
    header_versions: dict[str, str]

    def roots(self) -> dict[str, Path]:
        """Return the folder of every root name that a cache entry uses for headers."""
        return {**self.includes, CUDA: self.nvcc.resolve().parent.parent}

    def versions(self) -> dict[str, str]:
        """Return the versions that are part of a cache key. The headers themselves are hashed."""
        return {"nvcc": self.nvcc_version, "host": self.host_version}


def toolchain_reasons(
    record: FlagRecord,
    common: CommonFlags,
    *,
    nvcc: Library | None,
    cutlass: Library | None,
    needs_cutlass: bool = True,
) -> tuple[Missing, ...]:
    """Return all reasons why this nvcc and these headers cannot build a target. Pure.

    Parameters
    ----------
    record, common
        The compile target and the shared flags.
    nvcc, cutlass
        As in :class:`fp4dispatch.machine.system.System`; None if not found.
    needs_cutlass
        Whether the kernel includes CUTLASS.

    Returns
    -------
    tuple of Missing
        (text, fix) pairs; empty if the target can be built.
    """
    install = (
        f"{installing.of_extras('jit', 'cu13')} for a driver of CUDA 13, or install a CUDA toolkit "
        f"{record.min_cuda} or newer and set CUDA_HOME"
    )
    found: list[Missing] = []
    if nvcc is None:
        found.append(Missing(f"no nvcc was found to build target {record.target}", install))
    elif _older(nvcc.version, record.min_cuda):
        found.append(
            Missing(
                f"nvcc {nvcc.version} at {nvcc.path} cannot build target {record.target} (needs {record.min_cuda})",
                install,
            )
        )
    if nvcc is not None and nvcc.path and not _SAFE_PATH.fullmatch(nvcc.path):
        found.append(
            Missing(
                f"the path of nvcc, {nvcc.path!r}, holds characters that its own shell commands cannot carry",
                "install CUDA under a path of letters, digits and _./+@~=,:- only",
            )
        )
    if needs_cutlass:
        found += _cutlass_reasons(cutlass, common.minimum["cutlass"])
    return tuple(found)


def locate(record: FlagRecord, common: CommonFlags, *, needs_cutlass: bool) -> Toolchain:
    """Find everything that building a target needs.

    Raises
    ------
    ToolchainError
        Lists every missing or outdated part with its fix, not only the first.
    """
    nvcc, notes = libraries.nvcc()
    cutlass = libraries.cutlass() if needs_cutlass else None
    reasons = [*toolchain_reasons(record, common, nvcc=nvcc, cutlass=cutlass, needs_cutlass=needs_cutlass)]
    host, ninja = _host_compiler(), _ninja()
    tvm_ffi = _tvm_ffi(common.minimum["tvm_ffi"])
    reasons += [part for part in (host, ninja, tvm_ffi) if isinstance(part, Missing)]
    if nvcc is None or isinstance(host, Missing) or isinstance(ninja, Missing) or isinstance(tvm_ffi, Missing):
        raise _error(record, reasons, notes)
    includes, versions = {"tvm_ffi": Path(tvm_ffi.path)}, {"tvm_ffi": tvm_ffi.version}
    if cutlass is not None:
        root = Path(cutlass.path)
        includes |= {"cutlass": root / "include", "cutlass_util": root / "tools" / "util" / "include"}
        versions["cutlass"] = cutlass.version
    if reasons:
        raise _error(record, reasons, notes)
    return Toolchain(
        nvcc=Path(nvcc.path),
        nvcc_version=nvcc.version,
        host=Path(host.path),
        host_version=host.version,
        ninja=Path(ninja.path),
        includes=includes,
        header_versions=versions,
    )


def disassembler(minimum: str) -> Disassembler:
    """Find ``cuobjdump`` and ``nvdisasm``: beside FP4DISPATCH_NVCC, pip wheels, conda, CUDA_HOME, ``PATH``, Triton.

    Raises
    ------
    ToolchainError
        If there is none or it is older than ``minimum``; with the fix.
    """
    tools = {name: _utility(name) for name in ("cuobjdump", "nvdisasm")}
    fix = "pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
    if absent := [name for name, path in tools.items() if path is None]:
        raise ToolchainError(f"no {' and no '.join(absent)} was found; kernels stay unproven\n  fix: {fix}")
    cuobjdump, nvdisasm = tools["cuobjdump"], tools["nvdisasm"]
    assert cuobjdump is not None
    assert nvdisasm is not None
    versions = [_says(tool, "--version") for tool in (cuobjdump, nvdisasm)]
    oldest = min((match[1] for match in map(_RELEASE.search, versions) if match), key=Version, default="0")
    if _older(oldest, minimum):
        raise ToolchainError(
            f"the disassembler {cuobjdump} is {oldest} (needs {minimum}); kernels stay unproven\n  fix: {fix}"
        )
    return Disassembler(cuobjdump, nvdisasm, oldest)


def _error(record: FlagRecord, reasons: list[Missing], notes: tuple[str, ...]) -> ToolchainError:
    rows = [f"cannot compile for target {record.target}:"]
    rows += [f"  {reason.text}\n    fix: {reason.fix}" for reason in reasons]
    rows += [f"  note: {note}" for note in notes]
    return ToolchainError("\n".join(rows))


def _cutlass_reasons(cutlass: Library | None, minimum: str) -> list[Missing]:
    fix = "pip install -U --no-deps flashinfer-python, or set CUTLASS_PATH to a CUTLASS checkout"
    if cutlass is None:
        return [Missing("the CUTLASS headers were not found", fix)]
    if _older(cutlass.version, minimum):
        return [Missing(f"CUTLASS {cutlass.version} at {cutlass.path} is too old (needs {minimum})", fix)]
    if cutlass.path and not (Path(cutlass.path) / "tools" / "util" / "include").is_dir():
        return [Missing(f"{cutlass.path} lacks tools/util/include, so it is not a whole CUTLASS checkout", fix)]
    return []


def _host_compiler() -> Library | Missing:
    path = shutil.which("g++")
    says = _says(Path(path), "--version").partition("\n")[0] if path else ""
    if path is None or not says:
        return Missing("no host compiler (g++) on PATH; nvcc needs one", "apt install g++ (or your system's package)")
    path = os.path.abspath(path)  # noqa: PTH100  (do not resolve links: ccache's decide by their name)
    if not _SAFE_PATH.fullmatch(path):
        return Missing(
            f"the path of g++, {path!r}, holds characters that nvcc's own shell commands cannot carry",
            "put a g++ whose path has letters, digits and _./+@~=,:- only ahead on PATH",
        )
    return Library(says, path)


def _ninja() -> Library | Missing:
    path = shutil.which("ninja")
    if path is None:
        try:
            import ninja
        except ImportError:
            return Missing("ninja was not found", "pip install ninja")
        path = str(Path(ninja.BIN_DIR) / "ninja")
    path = str(Path(path).absolute())
    return Library(_says(Path(path), "--version").strip(), path)


def _tvm_ffi(minimum: str) -> Library | Missing:
    fix = "pip install -U apache-tvm-ffi"
    folder = libraries.package_folder("tvm_ffi")
    if folder is None or not (folder / "include" / "tvm" / "ffi" / "tvm_ffi.h").is_file():
        return Missing("the headers of apache-tvm-ffi were not found", fix)
    version = importlib.metadata.version("apache-tvm-ffi")
    if _older(version, minimum):
        return Missing(f"apache-tvm-ffi {version} is too old (needs {minimum})", fix)
    return Library(version, str(folder / "include"))


def _utility(name: str) -> Path | None:
    if settings.nvcc and (beside := Path(settings.nvcc).with_name(name)).is_file():
        return beside  # from the same toolkit
    try:
        from cuda.pathfinder import find_nvidia_binary_utility
    except ImportError:
        found = None
    else:
        found = find_nvidia_binary_utility(name)
    found = found or shutil.which(name)
    if found:
        return Path(found).absolute()
    triton = libraries.package_folder("triton")
    bundled = triton / "backends" / "nvidia" / "bin" / name if triton else None
    return bundled if bundled and bundled.is_file() else None


@functools.lru_cache(maxsize=64)
def _says(tool: Path, argument: str) -> str:
    """Return the output of a tool, run once per process; empty if it cannot be run."""
    try:
        answer = subprocess.run(
            [str(tool), argument],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=30,
            check=False,
            env=settings.environment(),
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout


def _older(found: str, needed: str) -> bool:
    """Whether a version is below the one needed; an unreadable version counts as older."""
    try:
        return Version(found) < Version(needed)
    except InvalidVersion:
        return True
