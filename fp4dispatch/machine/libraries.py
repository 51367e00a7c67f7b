"""Which libraries are installed, and where. None of them is imported or loaded.

Used by :mod:`fp4dispatch.machine.system`. Package versions come from metadata. torch's CUDA version comes from the text
of ``torch/version.py``, so it is known even if importing torch fails. cuDNN is the one in the process's memory map,
else the one that torch would load.
"""

from __future__ import annotations

import ast
import ctypes
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from fp4dispatch.settings import settings

_CUDNN = re.compile(r"/\S.*/libcudnn\.so\.\d+(?:\.\d+)*$")
_NVCC_RELEASE = re.compile(r"release \d+\.\d+, V(\d+\.\d+\.\d+)")
_VERSION = re.compile(r"\d+(\.\d+)+")
_WHEEL_NVCC = ("cu13/bin/nvcc", "cu12/bin/nvcc", "cuda_nvcc/bin/nvcc")
_SYSTEM_LIBRARIES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/local/cuda/lib64")


@dataclass(frozen=True)
class Library:
    """A library: its version as text, and the path it is (or would be) loaded from."""

    version: str
    path: str = ""


def distribution(name: str, package: str) -> Library | None:
    """Return version and folder of an installed distribution, from metadata alone.

    None if the package's folder has no ``__init__.py``, e.g. because only a wheel's headers were unpacked there.
    """
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    folder = package_folder(package)
    return None if folder and not (folder / "__init__.py").is_file() else Library(version, str(folder or ""))


def package_folder(package: str) -> Path | None:
    """Return the folder of a top-level package without importing it."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # ValueError: a half-imported module without a spec
        return None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return Path(folders[0]) if folders else None


def torch_version() -> tuple[Library | None, str | None]:
    """Return torch and the CUDA version it was built for (None for a CPU build), without importing it."""
    folder = package_folder("torch")
    if folder is None:
        return None, None
    values = _assignments(folder / "version.py")
    version = values.get("__version__") or _metadata_version("torch")
    return Library(version, str(folder)) if version else None, values.get("cuda")


def cudnn(cuda: str | None) -> tuple[Library | None, tuple[str, ...]]:
    """Return the cuDNN loaded in this process, else the one that torch would load; and notes for the user.

    Parameters
    ----------
    cuda
        CUDA version of torch, which decides between ``nvidia-cudnn-cu12`` and ``nvidia-cudnn-cu13``.
    """
    loaded = loaded_cudnn(_memory_map())
    if loaded:
        notes = (f"several cuDNN libraries are loaded: {', '.join(loaded)}",) if len(loaded) > 1 else ()
        return Library(_loaded_version(loaded[0]) or "", loaded[0]), notes
    wheels = {name: _metadata_version(name) for name in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")}
    names = sorted((name for name, version in wheels.items() if version), key=lambda n: n[-2:] != (cuda or "")[:2])
    notes = (f"{' and '.join(names)} are both installed and overwrite each other's files",) if len(names) > 1 else ()
    nvidia = package_folder("nvidia")
    libraries = sorted((nvidia / "cudnn" / "lib").glob("libcudnn.so.*")) if nvidia else []
    if names and libraries:
        version = ".".join((wheels[names[0]] or "").split(".")[:3])
        return Library(version, str(libraries[0])), notes
    return _system_cudnn(), notes


def loaded_cudnn(memory_map: str) -> list[str]:
    """Return paths of the cuDNN libraries in the text of ``/proc/self/maps``, in order, each once. Pure."""
    found = (_CUDNN.search(line) for line in memory_map.splitlines())
    return list(dict.fromkeys(match[0] for match in found if match))


def cudnn_number(number: int) -> str:
    """Spell ``cudnnGetVersion()``: 91002 is 9.10.2 (cuDNN 9 and later), 8907 is 8.9.7. Pure."""
    major, rest = divmod(number, 10000) if number >= 90000 else divmod(number, 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def cutlass() -> Library | None:
    """Return version and root of the CUTLASS headers: ``CUTLASS_PATH``, else those in flashinfer-python."""
    root = settings.cutlass_path
    if root is None:
        flashinfer = package_folder("flashinfer")
        if flashinfer is None:
            return None
        root = flashinfer / "data" / "cutlass"
    text = _read(root / "include" / "cutlass" / "version.h")
    parts = [re.search(rf"#define\s+CUTLASS_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
    if not all(parts):
        return None
    return Library(".".join(match[1] for match in parts if match), str(root))


def nvcc() -> tuple[Library | None, tuple[str, ...]]:
    """Return the nvcc that builds would use, and notes for the user.

    Search order: ``FP4DISPATCH_NVCC``, ``CUDA_HOME``, ``PATH``, pip wheels. If a variable names a place without nvcc,
    the result is a note and no nvcc; the search does not go on. The version is the compiler's own answer, because a
    wrong guess builds for the wrong arch (flashinfer#2577).
    """
    for name, path in (
        ("FP4DISPATCH_NVCC", settings.nvcc),
        ("CUDA_HOME", settings.cuda_home and settings.cuda_home / "bin" / "nvcc"),
    ):
        if path is not None:
            return _nvcc_at(path, f"{name} leads to {path}, ")
    on_path = shutil.which("nvcc")
    if on_path:
        return _nvcc_at(Path(on_path).absolute(), f"{on_path} on PATH ")
    nvidia = package_folder("nvidia")
    for place in _WHEEL_NVCC if nvidia else ():
        if (nvidia / place).is_file():  # type: ignore[operator]
            return _nvcc_at(nvidia / place, f"{nvidia / place} ")  # type: ignore[operator]
    return None, ()


def _nvcc_at(path: Path, label: str) -> tuple[Library | None, tuple[str, ...]]:
    if not path.is_file() or not os.access(path, os.X_OK):
        return None, (f"nvcc: {label}which is not an executable file",)
    version = _toolkit_version(path.resolve().parent.parent / "version.json") or _nvcc_says(path)
    if version is None:
        return None, (f"nvcc: {label}does not tell its version",)
    return Library(version, str(path)), ()


def _toolkit_version(file: Path) -> str | None:
    """Version of the compiler in a toolkit's own inventory; None where that is not there, or says no version."""
    try:
        version = json.loads(file.read_text())["cuda_nvcc"]["version"]
        return version if _VERSION.fullmatch(version) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _nvcc_says(path: Path) -> str | None:
    try:
        answer = subprocess.run(
            [str(path), "--version"], capture_output=True, text=True, errors="replace", timeout=20, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    match = _NVCC_RELEASE.search(answer.stdout)
    return match[1] if match else None


def _system_cudnn() -> Library | None:
    """Find the distribution's cuDNN: the real file's name carries the version, ``libcudnn.so.9.10.2``."""
    for folder in map(Path, _SYSTEM_LIBRARIES):
        for file in sorted(folder.glob("libcudnn.so.[0-9]*")):
            version = file.resolve().name.removeprefix("libcudnn.so.")
            if version.count(".") >= 2:
                return Library(version, str(file))
    return None


def _loaded_version(path: str) -> str | None:
    """Ask a cuDNN that is loaded already; never loads one."""
    try:
        library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        library.cudnnGetVersion.restype = ctypes.c_size_t
        return cudnn_number(int(library.cudnnGetVersion()))
    except (OSError, AttributeError):
        return None


def _memory_map() -> str:
    return _read(Path("/proc/self/maps"))


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _metadata_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _assignments(file: Path) -> dict[str, str]:
    """Top-level string assignments of a Python file, read without running it."""
    try:
        tree = ast.parse(_read(file))
    except (SyntaxError, ValueError):
        return {}
    values: dict[str, str] = {}
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        value = getattr(node, "value", None)
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            values |= {target.id: value.value for target in targets if isinstance(target, ast.Name)}
    return values
