"""Builds, finds and loads kernels: the public functions of :mod:`fp4dispatch.jit`.

A kernel is looked up in the user's cache, then among the finished kernels that installed wheels carry
(:mod:`fp4dispatch.jit.packages`). It is compiled only if neither has it. The result carries its proof; a caller may use
PDL only if ``pdl_allowed`` is true. All of this is host work: never do it while a CUDA graph is being captured.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from fp4dispatch.errors import CacheError, CompileError, FlagsError, ProofError, ToolchainError
from fp4dispatch.jit import packages
from fp4dispatch.jit.building import Built, build_missing, builds_done, compiled, find_built, request
from fp4dispatch.jit.catalog.manifest import Catalog, installed
from fp4dispatch.jit.compiler.compile import Job
from fp4dispatch.jit.compiler.toolchain import Toolchain, locate
from fp4dispatch.jit.store import guard
from fp4dispatch.jit.store.cache import Cache, default_folder
from fp4dispatch.jit.store.loading import module
from fp4dispatch.machine import capture, libraries
from fp4dispatch.machine import log as _log
from fp4dispatch.problem.arch import Arch
from fp4dispatch.settings import settings

__all__ = [
    "Built",
    "LoadedKernel",
    "build",
    "build_all",
    "build_together",
    "builds_done",
    "caches",
    "compiled",
    "find",
    "finished",
    "job",
    "load",
    "loaded",
    "request",
]

CHAIN = ("race_chain", "any")
"""Kernel and variant that PDL trials launch before and after the kernel under test."""

_loaded: dict[tuple[object, ...], LoadedKernel] = {}
_asked: set[tuple[object, ...]] = set()


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel in this process: ``module`` holds the exported functions, ``pdl_allowed`` is from its proof."""

    module: Any
    built: Built
    pdl_allowed: bool


def find(kernel: str, variant: str, target: str, *, catalog: Catalog | None = None) -> Built | None:
    """Return a finished kernel from the user's cache or the installed folder; None if it must be compiled.

    Needs neither nvcc nor ninja nor any header. Parameters as in :func:`build`.
    """
    catalog = catalog or installed()
    wanted = job(catalog, kernel, variant, target)
    return find_built(wanted, catalog, caches(), _toolchain_or_none(wanted))


def build(
    kernel: str, variant: str, target: str, *, catalog: Catalog | None = None, cache: Cache | None = None
) -> Built:
    """Return a kernel; compile and prove it first if it is not in a cache.

    Parameters
    ----------
    kernel, variant
        Names from ``csrc/kernels.toml``.
    target
        A compile target such as ``120f``.
    catalog, cache
        Sources and cache; those of this installation by default.

    Raises
    ------
    FlagsError, ToolchainError, CompileError, ProofError, CacheError
        Each says what to do.
    """
    catalog = catalog or installed()
    return build_all([job(catalog, kernel, variant, target)], catalog, cache=cache)[0]


def load(kernel: str, variant: str, arch: Arch, *, catalog: Catalog | None = None) -> LoadedKernel:
    """Return a kernel that runs on ``arch``, ready to call. Compiled if needed, loaded once per process.

    A second call costs a dictionary look-up. A finished entry loads without any toolchain. The loaded file is the one
    that was checked and hashed (:mod:`fp4dispatch.jit.store.loading`).

    Raises
    ------
    FlagsError
        If the kernel has no target for this arch. Other errors as in :func:`build`.
    """
    catalog = catalog or installed()
    known = catalog.kernel(kernel)
    # The flags are part of the key: the race test's control is the same kernel built without its barriers.
    recipes = tuple(tuple(job(catalog, kernel, variant, target).recipe()) for target in known.targets)
    key = (kernel, variant, arch, catalog.csrc, default_folder(), known.pdl, recipes)
    if key not in _loaded:
        capture.forbid_in_capture(f"loading the kernel {kernel}/{variant}", "fp4dispatch.warmup(model, tokens=[...])")
        _loaded[key] = _load(catalog, kernel, variant, arch)
    return _loaded[key]


def loaded() -> tuple[Built, ...]:
    """Return every kernel that this process has loaded, in order, with where it was found."""
    return tuple(kernel.built for kernel in _loaded.values())


def _load(catalog: Catalog, kernel: str, variant: str, arch: Arch) -> LoadedKernel:
    known = catalog.kernel(kernel)
    targets = [target for target in known.targets if arch in catalog.record(target).archs]
    if not targets:
        archs = dict.fromkeys(a.sm for target in known.targets for a in catalog.record(target).archs)
        raise FlagsError(f"{kernel} has no compile target that runs on {arch}; it is for {', '.join(archs)}")
    built = next((found for target in targets if (found := find(kernel, variant, target, catalog=catalog))), None)
    if built is None:
        built = build(kernel, variant, _buildable(targets, catalog), catalog=catalog)
    if built.entry.installed:
        ready = _packaged(built)
        # Refused entries are not found again, so the next call finds another one, or compiles.
        return LoadedKernel(ready, built, built.pdl_allowed) if ready else _load(catalog, kernel, variant, arch)
    ready = None
    with guard.optional(str(built.entry.library)):
        ready = module(built.entry)
    if ready is None:
        built = build(kernel, variant, _buildable(targets, catalog), catalog=catalog, cache=Cache(guard.temporary()))
        ready = module(built.entry)
    return LoadedKernel(ready, built, built.pdl_allowed)


def _packaged(built: Built) -> Any:
    """Load a kernel of an installed wheel; None, with a warning, where it cannot be loaded here."""
    try:
        return module(built.entry)
    except (CacheError, CompileError, OSError) as error:  # damaged, or linked for a newer C++ runtime
        packages.refuse(built.entry, error)
        return None


def build_all(
    jobs: Iterable[Job],
    catalog: Catalog,
    *,
    cache: Cache | None = None,
    pinned: bool = False,
    quiet: bool = False,
) -> list[Built]:
    """Build several kernels in parallel; finished ones are returned as they are.

    Parameters
    ----------
    jobs
        What to build.
    catalog
        Where their sources are.
    cache
        Where to look and publish. Default: the user's cache, and the installed folder for look-ups. If the user's cache
        cannot be used, kernels are built in a temporary folder of this process, with one warning.
    pinned
        Mark the entries as made ahead of time: they stay current with any toolchain.
    quiet
        Show no progress.

    Raises
    ------
    CompileError, ProofError
        After all other kernels were published.
    ToolchainError, CacheError
        Before anything is compiled, or if the given ``cache`` cannot be written.
    """
    wanted = list(jobs)
    searched = [cache] if cache is not None else caches()
    tools = {(job.record.target, job.kernel.cutlass): job for job in wanted}
    found = {key: _toolchain_or_none(job) for key, job in tools.items()}
    results: list[Built | None] = [
        find_built(job, catalog, searched, found[job.record.target, job.kernel.cutlass]) for job in wanted
    ]
    with guard.optional(f"the kernel cache at {searched[0].root}") if cache is None else nullcontext():
        if any(result is None for result in results):
            build_missing(wanted, results, catalog, searched[0], pinned=pinned, quiet=quiet)
    if any(result is None for result in results):
        build_missing(wanted, results, catalog, Cache(guard.temporary()), pinned=pinned, quiet=quiet)
    return [result for result in results if result is not None]


def build_together(names: Iterable[tuple[str, str]], arch: Arch, *, catalog: Catalog | None = None) -> None:
    """Compile the missing ones of these (kernel, variant) pairs in parallel, before :func:`load` needs them one by one.

    Kernels of installed wheels are loaded here already. Build errors are not raised here; :func:`load` raises them.
    Each pair is looked up once per process.
    """
    catalog = catalog or installed()
    folder = default_folder()
    jobs = []
    for name, variant in _with_chain(dict.fromkeys(names), catalog):
        key = (name, variant, arch, catalog.csrc, folder)
        if key in _asked:
            continue
        _asked.add(key)
        targets = [t for t in catalog.kernel(name).targets if arch in catalog.record(t).archs]
        if targets and not any(_finished(name, variant, target, catalog) for target in targets):
            wanted = job(catalog, name, variant, _buildable(targets, catalog))
            jobs += [wanted] if _toolchain_or_none(wanted) else []
    if not jobs:
        return
    try:
        build_all(jobs, catalog)
    except (CacheError, CompileError, FlagsError, ProofError, ToolchainError) as error:
        _log.debug("not everything could be compiled ahead: %s", error)


def _finished(kernel: str, variant: str, target: str, catalog: Catalog) -> bool:
    """Whether a kernel need not be compiled. One of an installed wheel is loaded, to know that it can be."""
    found = find(kernel, variant, target, catalog=catalog)
    if found is None or not found.entry.installed or _packaged(found) is not None:
        return found is not None
    return _finished(kernel, variant, target, catalog)  # a refused entry is not found again


def _with_chain(names: Iterable[tuple[str, str]], catalog: Catalog) -> list[tuple[str, str]]:
    """Add the kernel of PDL trials (``backends/own/pdl_trial``) where one may be launched with PDL."""
    wanted = list(names)
    tried = settings.pdl != "off" and settings.selfcheck != "off" and CHAIN[0] in catalog.kernels
    return [*wanted, CHAIN] if tried and any(catalog.kernel(name).pdl for name, _ in wanted) else wanted


def finished(jobs: Iterable[Job], catalog: Catalog, cache: Cache) -> list[Built | None]:
    """Return the finished kernel of each job in a cache, or None. Compiles nothing."""
    return [find_built(job, catalog, [cache], _toolchain_or_none(job)) for job in jobs]


def caches() -> list[Cache]:
    """Return the caches to search: the user's, those of installed wheels, and the temporary one if it exists."""
    found = [Cache(default_folder()), *packages.caches()]
    own = guard.made()
    return [*found, Cache(own)] if own is not None and own != found[0].root else found


def job(catalog: Catalog, kernel: str, variant: str, target: str) -> Job:
    """Return the job for names from the catalog; FlagsError for an unknown name."""
    known = catalog.kernel(kernel)
    return Job(known, known.variant(variant), catalog.record(target), catalog.common)


def _toolchain_or_none(job: Job) -> Toolchain | None:
    """The toolchain that could rebuild a kernel; None if there is none or compiling is switched off."""
    if settings.jit is False:
        return None
    try:
        return locate(job.record, job.common, needs_cutlass=job.kernel.cutlass)
    except ToolchainError:
        return None


def _buildable(targets: list[str], catalog: Catalog) -> str:
    """The first target that the installed nvcc can build; else the first one, whose error says what is missing."""
    nvcc, _ = libraries.nvcc()
    for target in targets:
        if nvcc is not None and Version(nvcc.version) >= Version(catalog.record(target).min_cuda):
            return target
    return targets[0]
