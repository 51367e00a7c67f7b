"""Which kernels are finished, and which (op, arch) pairs have proven barriers. The policy asks for this."""

from __future__ import annotations

import functools

from fp4dispatch.errors import CacheError
from fp4dispatch.jit import building, kernels
from fp4dispatch.jit.catalog.manifest import Catalog, installed
from fp4dispatch.jit.compiler.compile import Job
from fp4dispatch.jit.prove import Proof
from fp4dispatch.jit.store import guard
from fp4dispatch.jit.store.cache import Cache
from fp4dispatch.jit.store.entries import Entry, stale, verify


def proven() -> frozenset[tuple[str, str]]:
    """Return ``(op, arch)`` pairs, e.g. ``("nvfp4_gemm", "sm_120")``, of the finished kernels of this installation.

    A pair is listed if at least one of its kernels is finished and every finished one is proven. For a target without
    grid barriers and PDL (sm_80, sm_89) the other promises must hold. The caches are read once: the next call sees a
    build of this process; a build of another process is seen after :func:`forget`.
    """
    return _found(kernels.builds_done())[0]


def finished() -> frozenset[tuple[str, str, str]]:
    """Return ``(kernel, build, arch)``, e.g. ``("w4a8_small", "bf16", "sm_90")``, of what can be loaded uncompiled.

    The kernels of this installation that are finished and current: GEMMs and what runs before them. The caches are read
    as by :func:`proven`.
    """
    return _found(kernels.builds_done())[1]


def forget() -> None:
    """Read the caches again at the next call."""
    _found.cache_clear()


@functools.lru_cache(maxsize=1)
def _found(_builds: int) -> tuple[frozenset[tuple[str, str]], frozenset[tuple[str, str, str]]]:
    """Return what :func:`proven` and :func:`finished` return."""
    catalog = installed()
    wanted = {job.name: job for job in _every(catalog)}
    good: set[tuple[str, str]] = set()
    bad: set[tuple[str, str]] = set()
    ready: set[tuple[str, str, str]] = set()
    for cache in kernels.caches():
        entries: list[Entry] = []
        with guard.optional(f"the kernels in {cache.root}"):
            entries = list(cache.entries())
        for entry in entries:
            job = wanted.get(entry.name)
            if job is None or not _current(entry, job, catalog):
                continue
            ready.update((job.kernel.name, job.variant.id, arch.sm) for arch in job.record.archs)
            if not _is_gemm(job):
                continue
            pairs = {(job.kernel.op, arch.sm) for arch in job.record.archs}
            proof = _proof(entry, cache, job)
            (good if proof is not None and not proof.faults(entry.request) else bad).update(pairs)
    return frozenset(good - bad), frozenset(ready)


def jobs(catalog: Catalog) -> list[Job]:
    """Return every GEMM build that the manifest allows."""
    return [job for job in _every(catalog) if _is_gemm(job)]


def _is_gemm(job: Job) -> bool:
    return job.kernel.op.endswith("_gemm")


def _every(catalog: Catalog) -> list[Job]:
    return [
        Job(kernel, variant, catalog.record(target), catalog.common)
        for kernel in catalog.kernels.values()
        for variant in kernel.variants.values()
        for target in kernel.targets
    ]


def _proof(entry: Entry, cache: Cache, job: Job) -> Proof | None:
    found: Proof | None = None
    with guard.optional(f"the proof of {entry.name}"):
        found = building.proof_of(entry, cache, job.common.minimum["disassembler"])
    return found  # noqa: RET504 - the body above may be left


def _current(entry: Entry, job: Job, catalog: Catalog) -> bool:
    if entry.request != kernels.request(job) or stale(entry, {"src": catalog.csrc}, None):
        return False
    try:
        verify(entry)
    except CacheError:
        return False
    return True
