"""Run GPU tests under compute-sanitizer and keep what it found.

    python -m bench.sanitize --commit HASH --json bench/results/sanitizer-CARD.json

memcheck looks for accesses out of bounds, with torch's caching allocator off, because the tool sees only what
cudaMalloc returned; racecheck looks for hazards in shared memory. Each tool is first shown a program that has the fault
it looks for. Exits with 1 if it misses that, if it reports an error in ours, if no test ran, or if it cannot run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.shared import commandline
from bench.shared.commandline import ROOT

SUMMARY = {
    "memcheck": re.compile(r"ERROR SUMMARY: (\d+) error"),
    "racecheck": re.compile(r"RACECHECK SUMMARY: (\d+) hazard"),
}
PASSED = re.compile(r"(\d+) passed")
CONTROL = """
__global__ void faulty(int* out) {
  __shared__ int shared[64];
  shared[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = shared[63 - threadIdx.x];
}
int main() {
  int* out;
  cudaMalloc(&out, 63 * sizeof(int));
  faulty<<<1, 64>>>(out);
  return cudaDeviceSynchronize() == cudaErrorInvalidDevice;
}
"""
"""One access past the end of an allocation, and shared memory that two warps exchange without a barrier."""


def sees_a_fault(tool: str) -> bool:
    """Show ``tool`` a program with both faults; whether it reported one."""
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "faulty.cu", Path(folder) / "faulty"
        source.write_text(CONTROL)
        subprocess.run(["nvcc", "-o", str(program), str(source)], check=True)
        done = subprocess.run(
            ["compute-sanitizer", "--tool", tool, str(program)], capture_output=True, text=True, check=False
        )
    found = SUMMARY[tool].search(done.stdout + done.stderr)
    return found is not None and int(found[1]) > 0


def check(tool: str, tests: list[str], limit_s: float) -> dict[str, Any]:
    """Run pytest on ``tests`` below one tool; what it printed last decides, and a missing summary is an error."""
    command = ["compute-sanitizer", "--tool", tool, "--target-processes", "application-only", sys.executable]
    command += ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    start = time.perf_counter()
    env = dict(os.environ, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    try:
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit_s, check=False)
        text = done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        text = ""
    found, passed = SUMMARY[tool].search(text), PASSED.search(text)
    row = {
        "tool": tool,
        "tests": tests,
        "passed": int(passed[1]) if passed else 0,
        "found": int(found[1]) if found else None,
        "seconds": round(time.perf_counter() - start, 1),
    }
    if not (row["found"] == 0 and row["passed"]):
        print(text[-6000:])
    return row


def main(words: Sequence[str] | None = None) -> int:
    """Run both tools and write the record."""
    parser = commandline.parser(__doc__)
    commandline.takes_record(parser, needed=True)
    parser.add_argument("--memcheck", action="append", default=[], help="pytest arguments of one run, space separated")
    parser.add_argument("--racecheck", action="append", default=[])
    parser.add_argument("--limit-s", type=float, default=200)
    arguments = commandline.parse(parser, words)
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
    from fp4dispatch.benchmark import machine
    from fp4dispatch.benchmark.reports import records

    controls = {tool: sees_a_fault(tool) for tool in SUMMARY if getattr(arguments, tool)}
    rows = [check(tool, tests.split(), arguments.limit_s) for tool in SUMMARY for tests in getattr(arguments, tool)]
    record = {"controls": controls, "sanitizer": [{"commit": arguments.commit, **row} for row in rows]}
    records.write(arguments.json, "sanitizer", machine.facts(machine.card("cuda"), arguments.commit), record)
    for row in rows:
        outcome = f"{row['passed']:>4} passed  found {row['found']}  {row['seconds']} s"
        print(f"{row['tool']:<10} {outcome}  {' '.join(row['tests'])}")
    print("control with the fault reported:", controls)
    clean = all(row["found"] == 0 and row["passed"] for row in rows)
    return 0 if rows and clean and all(controls.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
