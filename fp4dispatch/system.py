"""Facts about the machine, collected once and frozen. The only prober; everything else takes a :class:`System`.

Nothing here imports torch, creates a CUDA context, starts a process or writes a file.
"""

from __future__ import annotations

from dataclasses import dataclass

from fp4dispatch.arch import Arch


@dataclass(frozen=True)
class Gpu:
    """One visible GPU: index as CUDA numbers it in this process, name, UUID, arch and memory in bytes."""

    index: int
    name: str
    uuid: str
    arch: Arch
    memory: int = 0


@dataclass(frozen=True)
class Library:
    """A library that was found: its version as text and where it was (or would be) loaded from."""

    version: str
    path: str = ""


@dataclass(frozen=True)
class System:
    """Frozen facts that decisions are made from. A fact that is not known is None, never a guess.

    ``proven`` holds ``(kernel op, arch)`` pairs such as ``("nvfp4_gemm", "sm_120")`` whose built kernels
    have proven barriers.
    """

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    cuda: str | None = None
    torch: Library | None = None
    cudnn: Library | None = None
    cudnn_frontend: Library | None = None
    flashinfer: Library | None = None
    cutlass: Library | None = None
    nvcc: Library | None = None
    proven: frozenset[tuple[str, str]] = frozenset()
    quarantined: frozenset[tuple[str, str, str]] = frozenset()
    notes: tuple[str, ...] = ()

    @property
    def arch(self) -> Arch | None:
        """Arch of the first visible GPU; None without one."""
        return self.gpus[0].arch if self.gpus else None
