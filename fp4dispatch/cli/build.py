"""``fp4dispatch build``: compile and prove kernels ahead of time, for any GPU. No GPU is needed."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from fp4dispatch.cli.answers import answer
from fp4dispatch.errors import CompileError, FlagsError, Fp4DispatchError, ToolchainError
from fp4dispatch.jit import kernels, packing
from fp4dispatch.jit.catalog.manifest import CHECK_OPS, OPS, Catalog, installed
from fp4dispatch.jit.compiler.compile import Job
from fp4dispatch.jit.compiler.toolchain import disassembler, locate
from fp4dispatch.jit.store.cache import Cache, default_folder
from fp4dispatch.machine import log as _log
from fp4dispatch.machine import system as machine
from fp4dispatch.problem.arch import Arch
from fp4dispatch.settings import settings

if TYPE_CHECKING:
    from fp4dispatch.cli import Subparsers

_ALL_OPS = (*OPS, *CHECK_OPS)
_ABOUT = """Compile kernels ahead of time and prove their barriers in the machine code. No GPU is needed.
Without --out the kernels go into the user's cache. A folder made by --out needs neither nvcc nor CUTLASS where it is
used: set FP4DISPATCH_CACHE_DIR to it, or install the wheel that --wheel makes of it."""


def add_parser(subparsers: Subparsers) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser("build", help="compile kernels ahead of time", description=_ABOUT)
    parser.add_argument(
        "--arch", type=_archs, metavar="9.0,12.0", help="capabilities to build for (default: of the GPUs here)"
    )
    parser.add_argument("--ops", type=_ops, default=_ALL_OPS, metavar="OP,...", help=f"default: {','.join(_ALL_OPS)}")
    parser.add_argument("--variant", action="append", metavar="ID", help="only variants of this id; may be repeated")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the finished kernels (default: the cache)")
    parser.add_argument(
        "--wheel",
        type=Path,
        metavar="DIST",
        help="also put the finished kernels into a wheel in this folder, e.g. fp4dispatch-kernels-sm90; needs --out",
    )
    parser.add_argument("--verbose", action="store_true", help="print the whole log of a file that fails")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Build and print one row per kernel; 0 if all are finished and proven, else 1."""
    catalog = installed()
    archs = args.arch or _default_archs()
    if not archs:
        print("no GPU is visible here; say what to build for, e.g. fp4dispatch build --arch 9.0,12.0", file=sys.stderr)
        return 2
    if args.wheel and not args.out:
        print("--wheel needs --out DIR: a wheel is made of kernels that hold for any machine", file=sys.stderr)
        return 2
    jobs = _jobs(catalog, archs, args.ops, args.variant)
    cache = Cache(args.out, portable=True) if args.out else Cache(default_folder())
    started = time.monotonic()
    failure: Fp4DispatchError | None = None
    try:
        _check_tools(jobs, catalog, cache)
        kernels.build_all(jobs, catalog, cache=cache, pinned=args.out is not None, quiet=args.json)
    except Fp4DispatchError as error:
        failure = error
    done = kernels.finished(jobs, catalog, cache)
    rows = [
        {
            "name": job.name,
            "op": job.kernel.op,
            "built": built is not None,
            "proven": built is not None and built.proven,
        }
        | ({"pdl": built.pdl_allowed, "folder": str(built.entry.folder)} if built else {})
        for job, built in zip(jobs, done, strict=True)
    ]
    ok = failure is None and all(row["built"] and row["proven"] for row in rows)
    wheel: Path | None = None
    if ok and args.wheel:
        try:
            wheel = packing.pack([built for built in done if built], archs, args.wheel)
        except Fp4DispatchError as error:
            failure, ok = error, False
    if args.json:
        error_text = str(failure) if failure else None
        made = {"wheel": str(wheel)} if wheel else {}
        data = {"ok": ok, "error": error_text, "folder": str(cache.root), **made, "kernels": rows}
        answer(json.dumps(data, indent=2))
    else:
        _print(rows, cache.root, time.monotonic() - started, failure)
        if wheel is not None:
            _print_wheel(wheel)
    if args.verbose and isinstance(failure, CompileError) and failure.log is not None:
        print(failure.log.read_text(errors="replace"), file=sys.stderr)
    return 0 if ok else 1


def _check_tools(jobs: list[Job], catalog: Catalog, cache: Cache) -> None:
    """Raise ToolchainError with all that is missing, for every target of a kernel that is not finished."""
    done = kernels.finished(jobs, catalog, cache)
    todo = [job for job, built in zip(jobs, done, strict=True) if built is None]
    found: dict[str, None] = {}
    for job in {(job.record.target, job.kernel.cutlass): job for job in todo}.values():
        try:
            locate(job.record, job.common, needs_cutlass=job.kernel.cutlass)
        except ToolchainError as error:
            found[str(error)] = None
        try:
            disassembler(job.common.minimum["disassembler"])
        except ToolchainError as error:
            found[str(error)] = None
    if found:
        raise ToolchainError("\n".join([*found, f"nothing was compiled; {len(todo)} kernels are missing"]))


def _print_wheel(wheel: Path) -> None:
    size = wheel.stat().st_size / 1e6
    print(
        f"{wheel}  {size:.1f} MB"
        + (f", more than the {packing.LARGEST_MB:.0f} aimed for" * (size > packing.LARGEST_MB))
    )


def _print(rows: list[dict[str, object]], folder: Path, seconds: float, failure: Fp4DispatchError | None) -> None:
    width = max(len(str(row["name"])) for row in rows)
    for row in rows:
        state = "proven" if row["proven"] else "NOT PROVEN" if row["built"] else "NOT BUILT"
        print(f"{row['name']:<{width}}  {state}{', PDL allowed' if row.get('pdl') else ''}")
    built = sum(bool(row["built"]) for row in rows)
    print(f"{built} of {len(rows)} kernels in {folder} after {seconds:.0f} s")
    if failure is not None:
        sys.stdout.flush()
        print(f"{type(failure).__name__}: {failure}", file=sys.stderr)


def _jobs(catalog: Catalog, archs: tuple[Arch, ...], ops: tuple[str, ...], variants: list[str] | None) -> list[Job]:
    jobs = [
        Job(kernel, variant, catalog.record(target), catalog.common)
        for kernel, variant, target in catalog.jobs(archs, ops)
        if not variants or variant.id in variants
    ]
    if not jobs:
        asked = f"arch {', '.join(arch.capability for arch in archs)}, ops {', '.join(ops)}"
        asked += f", variants {', '.join(variants)}" if variants else ""
        raise FlagsError(f"no kernel matches {asked}. {_there_are(catalog, ops)}")
    lost = [f"--variant {name}" for name in variants or () if not any(name == job.variant.id for job in jobs)]
    lost += [f"--ops {name}" for name in ops if ops != _ALL_OPS and not any(name == job.kernel.op for job in jobs)]
    if lost:
        raise FlagsError(
            f"no kernel matches {', '.join(lost)} beside the rest: leave it out. {_there_are(catalog, ops)}"
        )
    for arch in archs:
        if not any(arch in job.record.archs for job in jobs):
            _log.warning("no kernel of these ops is for %s", arch)
    return jobs


def _there_are(catalog: Catalog, ops: tuple[str, ...]) -> str:
    built = [kernel for kernel in catalog.kernels.values() if kernel.op in ops]
    archs = {arch for kernel in built for target in kernel.targets for arch in catalog.record(target).archs}
    variants = dict.fromkeys(name for kernel in built for name in kernel.variants)
    of = ", ".join(arch.capability for arch in sorted(archs, key=lambda arch: (arch.major, arch.minor)))
    return f"Kernels of these ops are for {of}; their variants: {', '.join(variants)}"


def _default_archs() -> tuple[Arch, ...]:
    if settings.arch:
        return (Arch.real(settings.arch),)
    return tuple(dict.fromkeys(gpu.arch for gpu in machine.detected().gpus))


def _archs(text: str) -> tuple[Arch, ...]:
    try:
        return tuple(dict.fromkeys(Arch.real(part) for part in text.split(",")))
    except Fp4DispatchError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _ops(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if unknown := [name for name in names if name not in _ALL_OPS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not an op; known: {', '.join(_ALL_OPS)}")
    return names
