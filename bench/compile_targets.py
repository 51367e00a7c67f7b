"""Compile every Blackwell GEMM for every target and record what its binary proves.

There is no Blackwell GPU behind these numbers: they say that a kernel compiles for the target, what it costs to
compile, and which instructions its machine code holds. Speed and results on the hardware are not among them.

    python -m bench.compile_targets                                  # all that the JSON does not hold yet
    python -m bench.compile_targets --only nvfp4_gemm_sm120/bf16     # ids that start with this, again
    python -m bench.compile_targets --table                          # docs/compiled-targets.md from the JSON

Needs what `pip install fp4dispatch[jit,cu13]` brings and the CUTLASS headers of flashinfer-python.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.shared import commandline
from bench.shared.commandline import ROOT
from fp4dispatch.benchmark import machine
from fp4dispatch.benchmark.reports import records
from fp4dispatch.jit import Built, kernels
from fp4dispatch.jit.catalog.manifest import installed
from fp4dispatch.jit.store.cache import Cache
from fp4dispatch.machine import libraries

RESULTS = ROOT / "bench" / "results" / "compiled-targets-x86_64.json"
TABLE = ROOT / "docs" / "compiled-targets.md"


@dataclass(frozen=True)
class Build:
    """One shared library: a kernel of the manifest, one of its variants, one of its targets."""

    kernel: str
    variant: str
    target: str

    @property
    def id(self) -> str:
        """``kernel/variant/target``."""
        return f"{self.kernel}/{self.variant}/{self.target}"

    def built(self, cache: Cache | None = None) -> Built:
        """Compile and prove it, or take it from the cache."""
        return kernels.build(self.kernel, self.variant, self.target, cache=cache)


def blackwell_builds() -> list[Build]:
    """List every CUTLASS GEMM build of the manifest for the 10x, 11x and 12x targets."""
    return [
        Build(kernel.name, variant, target)
        for kernel in installed().kernels.values()
        if kernel.cutlass and kernel.op.endswith("_gemm")
        for variant in kernel.variants
        for target in kernel.targets
        if target.startswith(("10", "11", "12"))
    ]


def facts(build: Build, cache: Path) -> dict[str, Any]:
    """Build into an empty cache and read the row of the table from the binary and its proof."""
    import tvm_ffi

    built = build.built(Cache(cache))
    if built.cached or built.proof is None:
        raise SystemExit(f"{build.id}: a row needs a cold build and its proof")
    (kernel,) = built.proof.kernels
    module = tvm_ffi.load_module(str(built.entry.library))
    return {
        "library_bytes": built.entry.library.stat().st_size,
        "shared_memory_bytes": int(module.shared_memory_bytes()),
        "registers": kernel.registers,
        "stack_bytes": kernel.stack,
        "spills": kernel.spills,
        "acqbulk": kernel.wait,
        "preexit": kernel.signal,
        "unguarded": len(kernel.unguarded),
        "mma": dict(kernel.mma),
    }


def measure(build: Build, folder: Path) -> dict[str, Any]:
    """Run :func:`facts` in a process of its own; add its seconds and the largest resident set of all its processes."""
    answer = folder.resolve() / (build.id.replace("/", "-") + ".json")
    cache = answer.with_suffix("")
    started = time.perf_counter()
    words = [sys.executable, "-m", "bench.compile_targets", "--facts", build.id, str(cache), str(answer)]
    process = subprocess.Popen(words, cwd=ROOT)
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        raise SystemExit(f"{build.id} did not build")
    return {
        "id": build.id,
        "kernel": build.kernel,
        "variant": build.variant,
        "target": build.target,
        "wall_s": round(time.perf_counter() - started, 1),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_gb": round(usage.ru_maxrss / 1e6, 2),
        **json.loads(answer.read_text()),
    }


def run(only: str | None, folder: Path, commit: str) -> None:
    """Measure the chosen builds and write the JSON after each, so that a long run can be stopped."""
    known = {build.id: build for build in blackwell_builds()}
    rows = {row["id"]: row for row in records.read(RESULTS)["rows"]} if RESULTS.exists() else {}
    nvcc, cutlass = libraries.nvcc()[0], libraries.cutlass()
    if nvcc is None or cutlass is None:
        raise SystemExit("needs nvcc and the CUTLASS headers; `fp4dispatch doctor` says what is missing")
    for key, build in sorted(known.items(), key=lambda item: "fp16" in item[0]):  # one dtype of all kernels first
        if (only is not None and not key.startswith(only)) or (only is None and key in rows):
            continue
        rows[key] = measure(build, folder)
        print(json.dumps(rows[key]), flush=True)
        ordered = [rows[known_key] for known_key in known if known_key in rows]
        records.write(RESULTS, "compiled targets", machine.facts(machine.card("cpu"), commit), {"rows": ordered})
        write_table()


_INTRO = """\
# Blackwell kernels: what was compiled and what the binaries prove

Generated by `python -m bench.compile_targets --table` from `bench/results/{name}`; do not edit.
nvcc {nvcc}, CUTLASS {cutlass}, each built cold and alone by `fp4dispatch.jit`, disassembly and proof included, on a
2-core machine that had other work: CPU seconds are what a build costs, and about its wall time on a quiet machine.

**None of these kernels has run on Blackwell hardware for this table.** It says that they compile for the target, that
the barriers of programmatic dependent launch are in the machine code and precede every access to global memory on every
path, and which tensor-core instruction a kernel uses. Argument checks and the scale layout are tested on the host
(`tests/compile/test_kernels_blackwell.py`).

ACQBULK waits for the previous kernel; PREEXIT lets the next one start early (CUTLASS leaves it out on SM120 by design).
Unguarded: accesses to global memory that some path reaches without ACQBULK. Spills: local-memory loads and stores.
"""


def cells(row: dict[str, Any]) -> dict[str, object]:
    """One line of the table, by column."""
    return {
        "kernel / variant": f"{row['kernel']} / {row['variant']}",
        "target": row["target"],
        "CPU s": f"{row['cpu_s']:.0f}",
        "wall s": f"{row['wall_s']:.0f}",
        "peak GB": f"{row['peak_gb']:.1f}",
        "library KB": f"{row['library_bytes'] / 1024:.0f}",
        "registers": row["registers"],
        "spills": row["spills"],
        "shared KB": f"{row['shared_memory_bytes'] / 1024:.1f}",
        "ACQBULK": row["acqbulk"],
        "PREEXIT": row["preexit"],
        "unguarded": row["unguarded"],
        "MMA": ", ".join(f"{count} `{opcode}`" for opcode, count in row["mma"].items()),
    }


def table(document: dict[str, Any]) -> Iterator[str]:
    """Lines of docs/compiled-targets.md."""
    yield _INTRO.format(name=RESULTS.name, **{name: document["facts"][name] for name in ("nvcc", "cutlass")})
    lines = [cells(row) for row in document["rows"]]
    yield f"| {' | '.join(lines[0])} |"
    yield "|---" * len(lines[0]) + "|"
    for line in lines:
        yield f"| {' | '.join(map(str, line.values()))} |"
    measured = {row["id"] for row in document["rows"]}
    if absent := [build.id for build in blackwell_builds() if build.id not in measured]:
        yield ""
        yield "In the manifest but not measured for this table: " + ", ".join(f"`{key}`" for key in absent) + "."


def write_table() -> None:
    """Write docs/compiled-targets.md from the JSON."""
    TABLE.write_text("\n".join(table(records.read(RESULTS))) + "\n")


def main(words: Sequence[str] | None = None) -> None:
    """Parse the command line."""
    parser = commandline.parser(__doc__)
    commandline.takes_commit(parser)
    parser.add_argument("--only", help="build ids that start with this, measured again")
    parser.add_argument("--keep", type=Path, help="folder for the caches, one a build (default: a temporary one)")
    parser.add_argument("--table", action="store_true", help="write docs/compiled-targets.md and stop")
    parser.add_argument("--facts", nargs=3, metavar=("ID", "CACHE", "JSON"), help=argparse.SUPPRESS)
    arguments = commandline.parse(parser, words)
    if arguments.facts:
        build_id, cache, answer = arguments.facts
        Path(answer).write_text(json.dumps(facts(Build(*build_id.split("/")), Path(cache))))
        return
    if arguments.table:
        write_table()
    else:
        commandline.needs_commit(parser, arguments)
        with tempfile.TemporaryDirectory() as folder:
            run(arguments.only, arguments.keep or Path(folder), arguments.commit)


if __name__ == "__main__":
    main()
