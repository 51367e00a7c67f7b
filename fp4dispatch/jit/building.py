"""Compiles missing kernels, proves their machine code and publishes them in a cache.

:mod:`fp4dispatch.jit.kernels` decides which kernels are needed and which caches are searched.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp4dispatch.errors import CompileError, ProofError, ToolchainError
from fp4dispatch.jit import prove
from fp4dispatch.jit.catalog.manifest import Catalog
from fp4dispatch.jit.compiler.compile import Job, Outcome, compile_jobs, files_read
from fp4dispatch.jit.compiler.limits import limits
from fp4dispatch.jit.compiler.toolchain import Toolchain, disassembler, locate
from fp4dispatch.jit.prove import Proof
from fp4dispatch.jit.store import guard, private
from fp4dispatch.jit.store.cache import Cache
from fp4dispatch.jit.store.digests import Identity, digest, identity, snapshot
from fp4dispatch.jit.store.entries import LOG, OWN, PROOF, SYSTEM, Entry
from fp4dispatch.machine import capture
from fp4dispatch.machine import log as _log
from fp4dispatch.machine.progress import Progress
from fp4dispatch.settings import settings

_SMALL = 1 << 20
_compiled: list[tuple[str, float]] = []


@dataclass(frozen=True)
class _Inputs:
    """State of sources and headers before a build, to detect a change during it.

    ``before`` covers the folders that we name. The folders of CUDA and the system are too large to scan; for their
    files the inode's change time (ctime) is compared with the start of the build. It cannot be set back, unlike mtime.
    """

    started: float
    before: Mapping[tuple[str, str], Identity]

    @classmethod
    def now(cls, catalog: Catalog, toolchains: Iterable[Toolchain]) -> _Inputs:
        named = {name: folder for toolchain in toolchains for name, folder in toolchain.includes.items()}
        return cls(time.time(), snapshot({OWN: catalog.csrc, **named}))

    def digests(self, outcome: Outcome, roots: Mapping[str, Path], toolchain: Toolchain) -> dict[tuple[str, str], str]:
        """Return the hash of every file that a compilation read; CompileError if one has changed since the start."""
        found: dict[tuple[str, str], str] = {}
        for root, path in files_read(outcome.folder, toolchain):
            file = roots[root] / path
            now = identity(file)
            before = self.before.get((root, path))
            late = self.started < now[2] / 1e9 <= time.time()  # a time in the future comes from another clock
            if late if before is None else before != now:
                raise CompileError(f"{file} changed while {outcome.job.name} was being compiled from it; build again")
            found[root, path] = digest(file)
        return found


@dataclass(frozen=True)
class Built:
    """A finished kernel: its cache entry, its proof (None: not proven) and whether it came from the cache."""

    entry: Entry
    proof: Proof | None
    cached: bool

    @property
    def proven(self) -> bool:
        """Whether the proof of this binary shows everything that its flags promise."""
        return self.proof is not None and not self.proof.faults(self.entry.request)

    @property
    def pdl_allowed(self) -> bool:
        """Whether this binary may be launched with PDL."""
        return self.proof is not None and self.proof.pdl_allowed(self.entry.request)


def request(job: Job) -> dict[str, Any]:
    """Return what identifies a build before any file is read: names, flags, promises and package version."""
    # Absent if empty, so that the keys of other kernels do not depend on it.
    before_wait = {"before_wait": job.kernel.before_wait.to_plain()} if job.kernel.before_wait else {}
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


def builds_done() -> int:
    """Return how many kernels this process has published. Callers use it to invalidate what they read from a cache."""
    return len(_compiled)


def compiled() -> tuple[tuple[str, float], ...]:
    """Return name and compile time in seconds of each kernel that this process has published, in order."""
    return tuple(_compiled)


def find_built(job: Job, catalog: Catalog, searched: Iterable[Cache], toolchain: Toolchain | None) -> Built | None:
    """Return the first current entry for a job, or None. With ``toolchain``, its headers and versions must match.

    A cache that cannot be used is skipped with one warning.
    """
    roots = _roots(catalog, toolchain)
    wanted = request(job)
    for cache in searched:
        with guard.optional(f"the kernels in {cache.root}"):
            entry = cache.find(wanted, roots, toolchain.versions() if toolchain else None)
            if entry is not None:
                return Built(entry, proof_of(entry, cache, job.common.minimum["disassembler"]), cached=True)
    return None


def proof_of(entry: Entry, cache: Cache, disassembler_needed: str) -> Proof | None:
    """Return an entry's proof. If this version of the prover has made none yet, make and store it.

    None if there is no disassembler, or it cannot read the machine code. A proof with faults is stored too: the library
    then runs without PDL.
    """
    proof = prove.read(entry)
    if proof is not None:
        return proof
    try:
        proof = prove.prove(entry.library, entry.request, disassembler(disassembler_needed))
    except (ToolchainError, ProofError) as error:
        _log.warning("%s is not proven, so it runs without PDL: %s", entry.name, error)
        return None
    if faults := proof.faults(entry.request):
        _log.warning("%s breaks its promises, so it runs without PDL: %s", entry.name, "; ".join(faults))
    if not entry.installed:
        with guard.optional("keeping proofs beyond this process"):
            cache.add_proof(entry, proof.to_json())
    return proof


def build_missing(
    jobs: list[Job], results: list[Built | None], catalog: Catalog, cache: Cache, *, pinned: bool, quiet: bool
) -> None:
    """Fill in the jobs that have no result yet. Raises as :func:`fp4dispatch.jit.kernels.build_all`."""
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
    for needed in {job.common.minimum["disassembler"] for job in missing}:
        disassembler(needed)  # checked first: without it no kernel could be proved
    with cache.locked([job.name for job in missing]):
        todo: list[tuple[int, Job, Toolchain]] = []
        for job, toolchain in zip(missing, toolchains, strict=True):
            index = jobs.index(job)
            results[index] = find_built(job, catalog, [cache], toolchain)  # another process may have built it by now
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
    """Compile all jobs, prove and publish each that succeeds; return the errors of the others."""
    inputs = _Inputs.now(catalog, [toolchain for _, _, toolchain in todo])
    failures: list[Exception] = []
    with cache.building() as folder, private.explained(cache.root):
        jobs, toolchains = [job for _, job, _ in todo], [toolchain for _, _, toolchain in todo]
        outcomes = compile_jobs(jobs, folder, catalog.csrc, toolchains, quiet=quiet)
        failed = [outcome for outcome in outcomes if outcome.errors]
        if failed:
            failures.append(_compile_error(failed, len(outcomes), time.time() - inputs.started, cache))
        # Threads suffice: most of the time is spent in the disassembler, a separate process.
        proofs: list[Proof | Exception] = []
        with (
            ThreadPoolExecutor(limits().cores) as pool,
            Progress("proving the machine code", len(outcomes), unit="files", quiet=quiet) as progress,
        ):
            for proof in pool.map(_proof_or_error, outcomes):
                proofs.append(proof)
                progress.step()
        for (index, _, toolchain), outcome, proof in zip(todo, outcomes, proofs, strict=True):
            if outcome.errors:
                continue
            try:
                if isinstance(proof, Exception):
                    raise proof
                files = inputs.digests(outcome, _roots(catalog, toolchain), toolchain)
                results[index] = _publish(outcome, proof, files, cache, toolchain, pinned=pinned)
            except (ProofError, CompileError, ToolchainError) as error:
                failures.append(error)
    return failures


def _proof_or_error(outcome: Outcome) -> Proof | Exception:
    try:
        return _prove(outcome, request(outcome.job)) if not outcome.errors else CompileError("it did not compile")
    except Exception as error:
        return error


def _publish(
    outcome: Outcome,
    proof: Proof,
    files: Mapping[tuple[str, str], str],
    cache: Cache,
    toolchain: Toolchain,
    *,
    pinned: bool,
) -> Built:
    wanted = request(outcome.job)
    ours = (LOG, "kernel.so", PROOF)
    for path_ in outcome.folder.iterdir():
        if path_.name not in ours:
            path_.unlink()
    entry = cache.publish(outcome.folder, wanted, files, toolchain.versions(), pinned=pinned)
    _compiled.append((outcome.job.name, outcome.seconds))
    return Built(entry, proof_of(entry, cache, outcome.job.common.minimum["disassembler"]), cached=False)


def _prove(outcome: Outcome, wanted: Mapping[str, Any]) -> Proof:
    """Prove a fresh library; raise if it breaks a promise or cannot be disassembled."""
    library = outcome.folder / "kernel.so"
    tools = disassembler(outcome.job.common.minimum["disassembler"])
    proof = prove.prove(library, wanted, tools)
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
    log: Path | None = None
    with guard.optional("logs of failed builds"):
        for outcome in reversed(failed):
            log = cache.keep_log(outcome.job.name, (outcome.folder / LOG).read_text(errors="replace"))
    job = first.job
    rows = [f"{job.name} failed after {seconds:.0f} s ({len(failed)} of {total} files)"]
    rows += [f"  {line[:300]}" for line in first.errors or ("the compiler ended without a message",)]
    if any("illed" in line for line in first.errors):
        rows.append("  it was killed, most likely because memory ran out: try MAX_JOBS=1")
    rows += [f"  full log: {log}"] if log else []
    rows.append(f"  rerun: fp4dispatch build --arch {job.record.archs[0].capability} --ops {job.kernel.op} --verbose")
    return CompileError("\n".join(rows), log)


def _is_full(folder: Path) -> bool:
    return shutil.disk_usage(folder).free < _SMALL


def _roots(catalog: Catalog, toolchain: Toolchain | None) -> dict[str, Path]:
    headers = toolchain.roots() if toolchain else {}
    return {OWN: catalog.csrc, SYSTEM: Path(SYSTEM), **headers}


def _package_version() -> str:
    from fp4dispatch import __version__

    return __version__
