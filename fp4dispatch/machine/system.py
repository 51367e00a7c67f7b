"""Facts about the machine, collected once and frozen in a :class:`System`, which all other code takes.

GPUs come from NVML (:mod:`fp4dispatch.machine.nvml`), versions from metadata and text
(:mod:`fp4dispatch.machine.libraries`). Nothing here imports torch, creates a CUDA context or writes a file. The only
process started is ``nvcc --version``, by :func:`current`, never at import.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fp4dispatch.errors import InputError
from fp4dispatch.machine import libraries, nvml
from fp4dispatch.machine.libraries import Library
from fp4dispatch.machine.locks import ForkSafeLock
from fp4dispatch.machine.nvml import Gpu
from fp4dispatch.problem.arch import Arch

__all__ = ["Gpu", "Library", "System", "current", "provide", "refresh"]

Proven = frozenset[tuple[str, str]]
Finished = frozenset[tuple[str, str, str]]
Quarantined = frozenset[tuple[str, str, str]]

_VERSION = re.compile(r"\d+(\.\d+)*([.+-]?[0-9A-Za-z]+)*")


@dataclass(frozen=True)
class System:
    """The facts that decisions use. An unknown fact is None, never a guess.

    ``cuda`` is the CUDA version of torch (None for a CPU build), ``driver_cuda`` the newest one that the driver runs.
    ``proven`` holds ``(kernel op, arch)`` pairs such as ``("nvfp4_gemm", "sm_120")`` whose built kernels have proven
    barriers. ``finished`` holds ``(kernel, build, arch)`` of those that need no compiler; None where that is not known,
    as of a machine that is only described. ``quarantined`` holds triples that :mod:`fp4dispatch.trust.selfcheck` found
    to give wrong results. ``fp8_copy``: the user allows a second copy of NVFP4 weights, in FP8.
    """

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    driver_cuda: str | None = None
    cuda: str | None = None
    torch: Library | None = None
    cudnn: Library | None = None
    cudnn_frontend: Library | None = None
    flashinfer: Library | None = None
    cutlass: Library | None = None
    nvcc: Library | None = None
    proven: Proven = frozenset()
    finished: Finished | None = None
    quarantined: Quarantined = frozenset()
    notes: tuple[str, ...] = ()
    fp8_copy: bool = False

    @property
    def arch(self) -> Arch | None:
        """Arch of the first visible GPU; None without one."""
        return self.gpus[0].arch if self.gpus else None

    def seen_from(self, gpu: int | None) -> System:
        """Return the facts as seen from one device: its GPU first, or none for the CPU.

        Raises
        ------
        InputError
            If there is no such GPU.
        """
        if gpu == 0:
            return self
        if gpu is None:
            return replace(self, gpus=())
        if gpu >= len(self.gpus):
            raise InputError(
                f"gpu={gpu} is not visible: {len(self.gpus)} GPUs are, counted from 0; see CUDA_VISIBLE_DEVICES"
            )
        return replace(self, gpus=(self.gpus[gpu], *self.gpus[:gpu], *self.gpus[gpu + 1 :]))

    def __str__(self) -> str:
        known = [f"{label} {text}" for label, text in self._versions().items() if text]
        known += ["FP8 copy allowed"] * self.fp8_copy
        return f"{self.arch or 'no GPU'}" + (f" ({', '.join(known)})" if known else "")

    def _versions(self) -> dict[str, str | None]:
        def version(library: Library | None) -> str | None:
            return library.version if library else None

        return {
            "CUDA": self.cuda,
            "cuDNN": version(self.cudnn),
            "FlashInfer": version(self.flashinfer),
            "CUTLASS": version(self.cutlass),
            "nvcc": version(self.nvcc),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for ``--json``; archs are spelt as capabilities (``12.0``)."""
        data = asdict(self)
        for gpu, plain in zip(self.gpus, data["gpus"], strict=True):
            plain["arch"] = gpu.arch.capability
        data["gpus"] = list(data["gpus"])
        data["arch"] = self.arch.capability if self.arch else None
        data["proven"] = sorted(map(list, self.proven))
        data["quarantined"] = sorted(map(list, self.quarantined))
        data["notes"] = list(self.notes)
        del data["fp8_copy"]  # a setting, not a fact of the machine
        del data["finished"]  # `fp4dispatch cache` lists them
        return data

    @classmethod
    def fake(
        cls,
        arch: str | Arch | None = None,
        *,
        gpus: int | Sequence[str | Arch] | None = None,
        driver: str | None = None,
        driver_cuda: str | None = None,
        cuda: str | None = None,
        torch: str | None = None,
        cudnn: str | None = None,
        cudnn_path: str = "",
        cudnn_frontend: str | None = None,
        flashinfer: str | None = None,
        cutlass: str | None = None,
        nvcc: str | None = None,
        proven: Iterable[tuple[str, str]] = (),
        finished: Iterable[tuple[str, str, str]] | None = None,
        quarantined: Iterable[tuple[str, str, str]] = (),
        notes: Iterable[str] = (),
        fp8_copy: bool = False,
    ) -> System:
        """Make the facts of another machine. What is not given does not exist on it.

        Parameters
        ----------
        arch
            Capability (``12.0``) or arch (``sm_120``) of its GPU; None for a machine without one.
        gpus
            How many GPUs of that arch (1 by default), or the arch of each one.
        driver, driver_cuda, cuda, torch, cudnn, cudnn_frontend, flashinfer, cutlass, nvcc
            Versions, e.g. ``"9.10.2"``; ``""`` for a library: installed, version unknown.
        cudnn_path
            Where cuDNN is loaded from.
        proven, finished, quarantined, notes, fp8_copy
            As the fields of the same name.

        Raises
        ------
        InputError
            If a version is not a version or an arch is not an arch.
        TypeError
            For an unknown keyword.
        """

        def library(name: str, version: str | None, path: str = "") -> Library | None:
            text = _checked(name, version)
            return Library(text, path) if text is not None else None

        archs = [a if isinstance(a, Arch) else Arch.parse(a) for a in _fake_archs(arch, gpus)]
        return cls(
            gpus=tuple(Gpu(i, f"fake {a}", f"GPU-fake-{i}", a) for i, a in enumerate(archs)),
            driver=_checked("driver", driver),
            driver_cuda=_checked("driver_cuda", driver_cuda),
            cuda=_checked("cuda", cuda),
            torch=library("torch", torch),
            cudnn=library("cudnn", cudnn, cudnn_path),
            cudnn_frontend=library("cudnn_frontend", cudnn_frontend),
            flashinfer=library("flashinfer", flashinfer),
            cutlass=library("cutlass", cutlass),
            nvcc=library("nvcc", nvcc),
            proven=frozenset(proven),
            finished=None if finished is None else frozenset(finished),
            quarantined=frozenset(quarantined),
            notes=tuple(notes),
            fp8_copy=fp8_copy,
        )


def _fake_archs(arch: str | Arch | None, gpus: int | Sequence[str | Arch] | None) -> Sequence[str | Arch]:
    if isinstance(gpus, int):
        if arch is None or gpus < 0:
            raise InputError(f"gpus={gpus} needs arch= and must not be negative; or pass the arch of each GPU")
        return [arch] * gpus
    if gpus is not None:
        if arch is not None or isinstance(gpus, str):
            raise InputError("gpus= lists the arch of each GPU, e.g. ['12.0', '9.0'], and then arch= is left out")
        return gpus
    return [] if arch is None else [arch]


def _checked(name: str, version: str | None) -> str | None:
    if version is not None and not isinstance(version, str):
        raise InputError(
            f"{name}={version!r} is a {type(version).__name__}; need a text such as '12.9' (as a number, 12.1 and "
            "12.10 would be one)"
        )
    if version and not _VERSION.fullmatch(version):
        raise InputError(f"{name}={version!r} is not a version: write it like 12.9 or 9.10.2")
    return version


_lock = ForkSafeLock()
_detected: nvml.Found | None = None
_probed: dict[bool, System] = {}
_latest: tuple[System, System] | None = None  # what was probed, and the same with proofs and quarantine
_proven: Callable[[], Proven] = frozenset
_finished: Callable[[], Finished | None] = frozenset
_quarantined: Callable[[], Quarantined] = frozenset


def detected() -> nvml.Found:
    """Return NVML's answer for this process; asked once, by ``import fp4dispatch``."""
    global _detected
    if _detected is None:
        with _lock:
            if _detected is None:
                _detected = nvml.probe()
    return _detected


def current() -> System:
    """Return the facts of this machine. Probed once, then cheap; thread-safe.

    Probed a second time after CUDA is initialised: the driver's own list of GPUs then replaces the one derived from
    NVML, and the cuDNN that is loaded replaces the one that was expected.
    """
    global _latest
    cuda_up = _cuda_initialised()
    system = _probed.get(cuda_up)
    if system is None:
        found = detected()
        with _lock:
            system = _probed.get(cuda_up)
            if system is None:
                system = _probed[cuda_up] = _probe(found, cuda_up)
    proven, finished, quarantined = _proven(), _finished(), _quarantined()
    latest = _latest
    if latest is None or latest[0] is not system or _learned(latest[1]) != (proven, finished, quarantined):
        latest = _latest = (system, replace(system, proven=proven, finished=finished, quarantined=quarantined))
    return latest[1]


def _learned(system: System) -> tuple[Proven, Finished | None, Quarantined]:
    return system.proven, system.finished, system.quarantined


def provide(
    *,
    proven: Callable[[], Proven] | None = None,
    finished: Callable[[], Finished | None] | None = None,
    quarantined: Callable[[], Quarantined] | None = None,
) -> None:
    """Register the functions that return proven and finished kernels and quarantined backends.

    They are called at each :func:`current`.

    A hook, because these facts come from the kernel cache and the self-check, which import this module.
    """
    global _proven, _finished, _quarantined
    _proven = proven or _proven
    _finished = finished or _finished
    _quarantined = quarantined or _quarantined


def refresh() -> None:
    """Forget all facts; the next :func:`current` probes again."""
    global _detected, _latest
    with _lock:
        _detected, _latest = None, None
        _probed.clear()


def _cuda_initialised() -> bool:
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda is not None and bool(cuda.is_initialized())


def _probe(found: nvml.Found, cuda_up: bool) -> System:
    torch, cuda = libraries.torch_version()
    cudnn, cudnn_notes = libraries.cudnn(cuda)
    nvcc, nvcc_notes = libraries.nvcc()
    gpus, gpu_notes = _confirmed(found.gpus) if cuda_up else (found.gpus, ())
    return System(
        gpus=gpus,
        driver=found.driver,
        driver_cuda=found.driver_cuda,
        cuda=cuda,
        torch=torch,
        cudnn=cudnn,
        cudnn_frontend=libraries.distribution("nvidia-cudnn-frontend", "cudnn"),
        flashinfer=libraries.distribution("flashinfer-python", "flashinfer"),
        cutlass=libraries.cutlass(),
        nvcc=nvcc,
        notes=(*found.notes, *gpu_notes, *cudnn_notes, *nvcc_notes),
    )


def _confirmed(expected: tuple[Gpu, ...]) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """Return CUDA's own list of GPUs, and a note if NVML's list differs."""
    cuda = sys.modules["torch"].cuda
    gpus = []
    for i in range(cuda.device_count()):
        p = cuda.get_device_properties(i)
        mig_or_gpu = expected[i].uuid[:4] if i < len(expected) else "GPU-"
        gpus.append(Gpu(i, p.name, f"{mig_or_gpu}{getattr(p, 'uuid', i)}", Arch(p.major, p.minor), p.total_memory))
    if [g.arch for g in gpus] == [g.arch for g in expected]:
        return tuple(gpus), ()
    was, now = (", ".join(f"{g.index}: {g.name} {g.arch}" for g in some) or "none" for some in (expected, gpus))
    return tuple(gpus), (f"CUDA numbers the GPUs otherwise than NVML led to expect: {now} (expected {was})",)
