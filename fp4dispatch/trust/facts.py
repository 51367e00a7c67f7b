"""The facts under which a verdict or a tuned time holds: GPU model, libraries, and the code itself. No torch."""

from __future__ import annotations

import functools
import secrets
import sys
from pathlib import Path

from fp4dispatch.backends.base import Backend
from fp4dispatch.jit.catalog import manifest
from fp4dispatch.jit.store.digests import sources_sha256
from fp4dispatch.machine import libraries
from fp4dispatch.machine.system import System
from fp4dispatch.settings import settings

_OWN_CODE = (
    *("formats", "backends", "jit", "strict_toml.py"),
    *(f"trust/{name}.py" for name in ("canary", "trial", "tilecheck", "layer_operands", "layercheck")),
)
"""Files and folders of the package that decide what a built-in computes, and how it is checked. All must be there."""
_THIS_PROCESS = secrets.token_hex(8)


def of_backend(system: System, backend: Backend) -> dict[str, str]:
    """Return the facts of a verdict on one backend: those of the machine, its code, and which kernels are proven."""
    arch = system.arch
    proven = ",".join(sorted(op for op, where in system.proven if arch and where == arch.sm))
    return {**of_machine(system), "backend": code_of(type(backend)), "proven": proven or "none"}


def of_machine(system: System) -> dict[str, str]:
    """Return the facts that all backends share: GPU model (not which card), libraries, our kernels and code, PDL."""
    from fp4dispatch import __version__

    gpu = system.gpus[0] if system.gpus else None
    versions = {
        name: library.version if library else "none"
        for name, library in (
            ("torch", system.torch),
            ("cudnn", system.cudnn),
            ("cudnn_frontend", system.cudnn_frontend),
            ("flashinfer", system.flashinfer),
            ("cutlass", system.cutlass),
            ("nvcc", system.nvcc),
        )
    }
    return {
        "gpu": gpu.name if gpu else "none",
        "arch": gpu.arch.sm if gpu else "",
        "driver": system.driver or "none",
        "cuda": system.cuda or "none",
        **versions,
        "cublas": _cublas(),
        "fp4dispatch": __version__,
        "kernels": _own_code(),
        "pdl": settings.pdl,
    }


@functools.cache
def _cublas() -> str:
    """Return the versions of cuBLASLt. It is a wheel of its own, which can change without torch."""
    found = [libraries.distribution(name, "nvidia") for name in ("nvidia-cublas", "nvidia-cublas-cu12")]
    return ",".join(library.version for library in found if library) or "none"


@functools.cache
def kernel_sources() -> str:
    """Identify the sources of our kernels and their compiler flags: a shipped table of times holds for these alone."""
    return kernel_sources_in(manifest.installed().csrc.parent)


def kernel_sources_in(root: Path) -> str:
    """Return the same of a folder with csrc/ and jit_flags/, such as another checkout."""
    return sources_sha256([root / "csrc", root / "jit_flags"])[:32]


@functools.cache
def _own_code() -> str:
    return hash_of_sources(Path(__file__).parents[1], manifest.installed().csrc)


def hash_of_sources(package: Path, csrc: Path) -> str:
    """Hash the sources that decide what a built-in backend computes: kernels, flags, backends, formats, the checks.

    Parameters
    ----------
    package
        The folder of ``fp4dispatch``.
    csrc
        The folder of the CUDA sources; ``jit_flags`` lies beside it.

    Raises
    ------
    CacheError
        If one of them is missing. A hash without it would keep verdicts valid for other code.
    """
    return sources_sha256([csrc, csrc.parent / "jit_flags", *(package / name for name in _OWN_CODE)])[:32]


@functools.cache
def code_of(kind: type[Backend]) -> str:
    """Identify the code of a backend: its class, the content of its module and the version of its package.

    For a plug-in in a package, every file in the module's folder and below counts. Code without a file (typed into an
    interpreter, or in a zip archive) is valid for this process only.
    """
    module = sys.modules.get(kind.__module__)
    found = getattr(module, "__file__", None)
    path = Path(found) if found else None
    if path is None or not path.is_file():
        content = f"process {_THIS_PROCESS}"
    elif getattr(module, "__package__", None) and kind.__module__.partition(".")[0] != "fp4dispatch":
        content = sources_sha256([path.parent])[:16]
    else:
        content = sources_sha256([path])[:16]
    version = getattr(sys.modules.get(kind.__module__.partition(".")[0]), "__version__", "")
    return f"{kind.__module__}:{kind.__qualname__} {version} {content}".replace("  ", " ")
