"""Builds, finds and loads kernels: the face of :mod:`fp4dispatch.jit`.

A kernel is looked up in the user's cache, then in the folder of finished kernels that a wheel may carry, and compiled
only where neither has it. What comes back carries its proof; ``pdl_allowed`` is the only thing that lets a caller
launch with PDL. All of this is host work: never do it while a CUDA graph is being captured.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import shutil
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from fp4dispatch import capture, libraries
from fp4dispatch.arch import Arch
from fp4dispatch.errors import CacheError, CompileError, FlagsError, ProofError, ToolchainError
from fp4dispatch.jit import private, prove
from fp4dispatch.jit.cache import LOG, OWN, PROOF, SYSTEM, Cache, Entry, default_folder, digest
from fp4dispatch.jit.compile import Job, Outcome, compile_jobs, files_read
from fp4dispatch.jit.limits import limits
from fp4dispatch.jit.manifest import Catalog, installed
from fp4dispatch.jit.prove import Proof
from fp4dispatch.jit.toolchain import Toolchain, disassembler, locate
from fp4dispatch.settings import settings

_log = logging.getLogger("fp4dispatch")
_SMALL = 1 << 20
_loaded: dict[tuple[object, ...], LoadedKernel] = {}
_compiled: list[tuple[str, float]] = []
_asked: set[tuple[object, ...]] = set()


@dataclass(frozen=True)
class Built:
    """A finished kernel: its cache entry, its proof (None: not proven) and whether it came from the cache."""

    entry: Entry
    proof: Proof | None
    cached: bool

    @property
    def proven(self) -> bool:
        """Whether the disassembler has seen everything in this very binary that its flags promise."""
        return self.proof is not None and not self.proof.faults(self.entry.request)

    @property
    def pdl_allowed(self) -> bool:
        """Whether this very binary may be launched with PDL."""
        return self.proof is not None and self.proof.pdl_allowed(self.entry.request)


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel in this process: ``module`` holds the exported functions, ``pdl_allowed`` is from its proof."""

    module: Any
    built: Built
    pdl_allowed: bool


def request(job: Job) -> dict[str, Any]:
    """Return what identifies a build before any file is read: names, flags, promises and package version."""
    # Left out where it says nothing, so that kernels without it keep their entries.
    before_wait = {"before_wait": list(job.kernel.before_wait)} if job.kernel.before_wait else {}
    return {
        "package": _package_version(),
        "kernel": job.kernel.name,
        "op": job.kernel.op,
        "variant": job.variant.id,
        "target": job.record.target,
        "recipe": list(job.recipe()),
        "pdl": job.kernel.pdl and job.record.gdc,
        "mma": job.kernel.mma,
        "expect_sass": dict(job.record.expect_sass),
        **before_wait,
    }


def find(kernel: str, variant: str, target: str, *, catalog: Catalog | None = None) -> Built | None:
    """Return a finished kernel from the user's cache or the installed folder; None where it must be compiled.

    Needs neither nvcc nor ninja nor any header. Parameters as in :func:`build`.
    """
    catalog = catalog or installed()
    wanted = job(catalog, kernel, variant, target)
    return _find(wanted, catalog, caches(), _toolchain_or_none(wanted))


def build(
    kernel: str, variant: str, target: str, *, catalog: Catalog | None = None, cache: Cache | None = None
) -> Built:
    """Return a kernel, compiled and proved if it is not finished yet.

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
        Each with what to do.
    """
    catalog = catalog or installed()
    return build_all([job(catalog, kernel, variant, target)], catalog, cache=cache)[0]


def load(kernel: str, variant: str, arch: Arch, *, catalog: Catalog | None = None) -> LoadedKernel:
    """Return a kernel that runs on ``arch``, ready to be called; compiled first where needed, loaded once a process.

    Once loaded, asking again costs a dictionary look-up. A finished entry loads without any toolchain. The library's
    hash is checked right before it is opened.

    Raises
    ------
    FlagsError
        Where the kernel has no target for this arch. Otherwise as :func:`build`.
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


def _load(catalog: Catalog, kernel: str, variant: str, arch: Arch) -> LoadedKernel:
    known = catalog.kernel(kernel)
    targets = [target for target in known.targets if arch in catalog.record(target).archs]
    if not targets:
        archs = dict.fromkeys(a.sm for target in known.targets for a in catalog.record(target).archs)
        raise FlagsError(f"{kernel} has no compile target that runs on {arch}; it is for {', '.join(archs)}")
    built = next((found for target in targets if (found := find(kernel, variant, target, catalog=catalog))), None)
    if built is None:
        built = build(kernel, variant, _buildable(targets, catalog), catalog=catalog)
    return LoadedKernel(_module(str(built.entry.library), built.entry.library_sha256), built, built.pdl_allowed)


def build_all(
    jobs: Iterable[Job],
    catalog: Catalog,
    *,
    cache: Cache | None = None,
    pinned: bool = False,
    quiet: bool = False,
) -> list[Built]:
    """Build several kernels at once; those that are finished are not touched.

    Parameters
    ----------
    jobs
        What to build.
    catalog
        Where their sources are.
    cache
        Where to look and publish; by default the user's cache, after which the installed folder is searched too.
    pinned
        Mark the entries as made ahead of time: they stay current whatever toolchain they meet later.
    quiet
        Show no progress.

    Raises
    ------
    CompileError, ProofError
        After everything that could be built was published.
    ToolchainError, CacheError
        Before anything is compiled, or where the cache cannot be written.
    """
    wanted = list(jobs)
    searched = [cache] if cache is not None else caches()
    tools = {(job.record.target, job.kernel.cutlass): job for job in wanted}
    found = {key: _toolchain_or_none(job) for key, job in tools.items()}
    results: list[Built | None] = [
        _find(job, catalog, searched, found[job.record.target, job.kernel.cutlass]) for job in wanted
    ]
    if any(result is None for result in results):
        _build_missing(wanted, results, catalog, searched[0], pinned=pinned, quiet=quiet)
    return [result for result in results if result is not None]


def build_together(names: Iterable[tuple[str, str]], arch: Arch, *, catalog: Catalog | None = None) -> None:
    """Compile at once what of these (kernel, variant) is not finished, so that no :func:`load` to come compiles alone.

    What cannot be built is left to those loads, which say so. Asked again, nothing is looked at again.
    """
    catalog = catalog or installed()
    folder = default_folder()
    jobs = []
    for name, variant in dict.fromkeys(names):
        key = (name, variant, arch, catalog.csrc, folder)
        if key in _asked:
            continue
        _asked.add(key)
        targets = [t for t in catalog.kernel(name).targets if arch in catalog.record(t).archs]
        if targets and not any(find(name, variant, target, catalog=catalog) for target in targets):
            wanted = job(catalog, name, variant, _buildable(targets, catalog))
            jobs += [wanted] if _toolchain_or_none(wanted) else []
    if not jobs:
        return
    try:
        build_all(jobs, catalog)
    except (CacheError, CompileError, FlagsError, ProofError, ToolchainError) as error:
        _log.debug("not everything could be compiled ahead: %s", error)


def finished(jobs: Iterable[Job], catalog: Catalog, cache: Cache) -> list[Built | None]:
    """Return which jobs are finished in a cache, without compiling any."""
    return [_find(job, catalog, [cache], _toolchain_or_none(job)) for job in jobs]


def builds_done() -> int:
    """Return how many kernels this process has published, so that what was read from the cache can be kept."""
    return len(_compiled)


def compiled() -> tuple[tuple[str, float], ...]:
    """Return name and compile seconds of each kernel that this process has published, in that order."""
    return tuple(_compiled)


def caches() -> list[Cache]:
    """Return the user's cache, then the folder of finished kernels that this installation carries, if any."""
    found = [Cache(default_folder())]
    spec = importlib.util.find_spec("fp4dispatch")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        bundled = Path(location) / "prebuilt"
        if bundled.is_dir():
            found.append(Cache(bundled, installed=True))
    return found


def job(catalog: Catalog, kernel: str, variant: str, target: str) -> Job:
    """Return the job for names from the catalog; FlagsError for a name that it does not hold."""
    known = catalog.kernel(kernel)
    return Job(known, known.variant(variant), catalog.record(target), catalog.common)


def _build_missing(
    jobs: list[Job], results: list[Built | None], catalog: Catalog, cache: Cache, *, pinned: bool, quiet: bool
) -> None:
    missing = [job for job, result in zip(jobs, results, strict=True) if result is None]
    capture.forbid_in_capture(
        f"compiling {', '.join(job.name for job in missing)}", "fp4dispatch build, or fp4dispatch.warmup(model, [...])"
    )
    if settings.jit is False and not pinned:
        raise ToolchainError(
            f"{', '.join(job.name for job in missing)} must be compiled, and FP4DISPATCH_JIT=0 forbids it\n"
            "  fix: compile ahead of time with `fp4dispatch build`, or unset FP4DISPATCH_JIT"
        )
    toolchains = [locate(job.record, job.common, needs_cutlass=job.kernel.cutlass) for job in missing]
    with cache.locked([job.name for job in missing]):
        todo: list[tuple[int, Job, Toolchain]] = []
        for job, toolchain in zip(missing, toolchains, strict=True):
            index = jobs.index(job)
            results[index] = _find(job, catalog, [cache], toolchain)  # another process may have built it meanwhile
            if results[index] is None:
                todo.append((index, job, toolchain))
        failures = _compile(todo, results, catalog, cache, pinned=pinned, quiet=quiet) if todo else []
    if failures:
        raise failures[0]


def _compile(
    todo: list[tuple[int, Job, Toolchain]],
    results: list[Built | None],
    catalog: Catalog,
    cache: Cache,
    *,
    pinned: bool,
    quiet: bool,
) -> list[Exception]:
    """Compile all at once, and prove and publish what can be; return what went wrong."""
    started = time.time()
    failures: list[Exception] = []
    with cache.building() as folder, private.explained(cache.root):
        jobs, toolchains = [job for _, job, _ in todo], [toolchain for _, _, toolchain in todo]
        outcomes = compile_jobs(jobs, folder, catalog.csrc, toolchains, quiet=quiet)
        failed = [outcome for outcome in outcomes if outcome.errors]
        if failed:
            failures.append(_compile_error(failed, len(outcomes), time.time() - started, cache))
        # Most of a proof is spent in the disassembler, a process of its own.
        with ThreadPoolExecutor(limits().cores) as pool:
            proofs = list(pool.map(_proof_or_error, outcomes))
        for (index, _, toolchain), outcome, proof in zip(todo, outcomes, proofs, strict=True):
            if outcome.errors:
                continue
            try:
                if isinstance(proof, Exception):
                    raise proof
                results[index] = _publish(outcome, proof, catalog, cache, toolchain, started, pinned=pinned)
            except (ProofError, CompileError) as error:
                failures.append(error)
    return failures


def _proof_or_error(outcome: Outcome) -> Proof | Exception | None:
    try:
        return None if outcome.errors else _prove(outcome, request(outcome.job))
    except Exception as error:
        return error


def _publish(
    outcome: Outcome,
    proof: Proof | None,
    catalog: Catalog,
    cache: Cache,
    toolchain: Toolchain,
    started: float,
    *,
    pinned: bool,
) -> Built:
    roots = _roots(catalog, toolchain)
    files: dict[tuple[str, str], str] = {}
    for root, path in files_read(outcome.folder, toolchain):
        file = roots[root] / path
        if started < file.stat().st_mtime <= time.time():  # a clock that runs ahead is no change
            raise CompileError(f"{file} changed while {outcome.job.name} was being compiled from it; build again")
        files[root, path] = digest(file)
    wanted = request(outcome.job)
    ours = (LOG, "kernel.so", PROOF)
    for path_ in outcome.folder.iterdir():
        if path_.name not in ours:
            path_.unlink()
    entry = cache.publish(outcome.folder, wanted, files, toolchain.versions(), pinned=pinned)
    _compiled.append((outcome.job.name, outcome.seconds))
    return Built(entry, prove.read(entry) if proof else None, cached=False)


def _prove(outcome: Outcome, wanted: Mapping[str, Any]) -> Proof | None:
    """Prove a fresh library; without a disassembler it stays unproven, a broken promise is an error."""
    library = outcome.folder / "kernel.so"
    try:
        tools = disassembler(outcome.job.common.minimum["disassembler"])
        proof = prove.prove(library, wanted, tools)
    except ToolchainError as error:
        _log.warning("%s is not proven, so it will run without PDL: %s", outcome.job.name, error)
        return None
    if faults := proof.faults(wanted):
        rows = "\n".join(f"  {fault}" for fault in faults)
        raise ProofError(
            f"{outcome.job.name} was compiled but its machine code breaks its promises, so it is not used:\n{rows}\n"
            f"  fix: check jit_flags/sm{outcome.job.record.target}.toml against the CUTLASS version, and the source"
        )
    (outcome.folder / PROOF).write_bytes(proof.to_json())
    return proof


def _compile_error(failed: list[Outcome], total: int, seconds: float, cache: Cache) -> Exception:
    first = failed[0]
    text = (first.folder / LOG).read_text(errors="replace")
    if "No space left on device" in text or "file too large" in text.lower() or _is_full(cache.root):
        return private.full(cache.root)
    log = cache.keep_log(first.job.name, text)
    for other in failed[1:]:
        cache.keep_log(other.job.name, (other.folder / LOG).read_text(errors="replace"))
    job = first.job
    rows = [f"{job.name} failed after {seconds:.0f} s ({len(failed)} of {total} files)"]
    rows += [f"  {line[:300]}" for line in first.errors or ("the compiler ended without a message",)]
    if any("illed" in line for line in first.errors):
        rows.append("  it was killed, most likely for want of memory: try MAX_JOBS=1")
    rows.append(f"  full log: {log}")
    rows.append(f"  rerun: fp4dispatch build --arch {job.record.archs[0].capability} --ops {job.kernel.op} --verbose")
    return CompileError("\n".join(rows), log)


def _is_full(folder: Path) -> bool:
    return shutil.disk_usage(folder).free < _SMALL


def _find(job: Job, catalog: Catalog, searched: list[Cache], toolchain: Toolchain | None) -> Built | None:
    roots = _roots(catalog, toolchain)
    wanted = request(job)
    for cache in searched:
        entry = cache.find(wanted, roots, toolchain.versions() if toolchain else None)
        if entry is not None:
            return Built(entry, prove.read(entry), cached=True)
    return None


def _roots(catalog: Catalog, toolchain: Toolchain | None) -> dict[str, Path]:
    headers = toolchain.roots() if toolchain else {}
    return {OWN: catalog.csrc, SYSTEM: Path(SYSTEM), **headers}


def _toolchain_or_none(job: Job) -> Toolchain | None:
    """The toolchain that could rebuild a kernel. None where there is none, or where compiling is switched off."""
    if settings.jit is False:
        return None
    try:
        return locate(job.record, job.common, needs_cutlass=job.kernel.cutlass)
    except ToolchainError:
        return None


def _buildable(targets: list[str], catalog: Catalog) -> str:
    """The first target that the nvcc found can build, else the first, whose error then says what is missing."""
    nvcc, _ = libraries.nvcc()
    for target in targets:
        if nvcc is not None and Version(nvcc.version) >= Version(catalog.record(target).min_cuda):
            return target
    return targets[0]


@functools.cache
def _module(library: str, sha256: str) -> Any:
    if digest(Path(library)) != sha256:
        raise CacheError(f"{library} changed between lookup and loading; it is not loaded\n  fix: run again")
    import tvm_ffi

    return tvm_ffi.load_module(library)


def _package_version() -> str:
    from fp4dispatch import __version__

    return __version__
