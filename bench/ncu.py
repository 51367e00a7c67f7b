"""What Nsight Compute sees of the final kernels: memory, tensor pipe and issue, and the bytes each can have in flight.

    python -m bench.ncu --commit HASH --json bench/results/ncu-CARD.json

One process runs below ncu. For each case it makes a layer on one backend, compares an output tile by tile with the
exact product, and lets ncu see one more call: cold caches, clocks as they are, no other grid beside it (so nothing is
prefetched before the previous one ends). A case that fails, or for which no time is left, is named, and the others are
kept. Needs ncu and the right to read the GPU's counters. Exits with 1 if a case has no profile.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.shared import commandline
from bench.shared.commandline import ROOT

FIELDS = {
    "us": "gpu__time_duration.sum",
    "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_bytes": "dram__bytes_read.sum",
    "l2_percent": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "tensor_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "issue_percent": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "alu_percent": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "warps_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
    "ctas": "launch__grid_size",
    "threads": "launch__block_size",
    "shared_bytes": "launch__shared_mem_per_block_dynamic",
}
"""Ours -> ncu's, as ncu 2025 names them on sm_90. The tensor pipe counts wgmma and mma.sync alike."""
LIMITS = tuple(f"launch__occupancy_limit_{what}" for what in ("blocks", "registers", "shared_mem", "warps"))
SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "ComputeWorkloadAnalysis", "LaunchStats", "Occupancy")
SECTIONS += ("SchedulerStats", "WarpStateStats")
KERNELS = "few_tokens_kernel|many_tokens_kernel|device_kernel"
"""Names of our kernels, and CUTLASS's; the quantisers and packers beside them are not among them."""
PERCENTS = ("dram_percent", "l2_percent", "tensor_percent", "issue_percent", "alu_percent")
UNITS = {"second": 1e6, "msecond": 1e3, "ms": 1e3, "usecond": 1.0, "us": 1.0, "nsecond": 1e-3, "ns": 1e-3}
UNITS |= {"Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Kbyte/block": 1e3}


class Case(NamedTuple):
    """A backend on one problem. ``format`` is that of the weights, as the benchmark names it."""

    backend: str
    format: str
    m: int
    n: int
    k: int


CASES = (
    Case("w4a16", "nvfp4", 1, 57344, 8192),
    Case("w4a16", "nvfp4", 16, 8192, 8192),
    Case("w4a8", "nvfp4", 32, 8192, 8192),
    Case("w4a8", "nvfp4", 64, 57344, 8192),
    Case("w4a8", "nvfp4", 128, 28672, 4096),
    Case("w4a8", "nvfp4", 512, 28672, 4096),
    Case("w4a16", "nvfp4", 4096, 28672, 4096),
    Case("w8a16", "row", 1, 57344, 8192),
    Case("w8a8", "row", 64, 28672, 4096),
    Case("w8a8", "row", 256, 28672, 4096),
    Case("w8a8", "block128", 2048, 28672, 4096),
    Case("cutlass", "row", 64, 28672, 4096),
)


# ------------------------------------------------------------------------------------------------ in the process below


def launch(case: Case, card: Any) -> dict[str, Any]:
    """Check a case, then call it once more between ncu's start and stop; return what ran and how far it was off.

    Raises
    ------
    ValueError
        For a wrong tile: nothing is profiled then.
    """
    import torch

    from fp4dispatch.benchmark import check
    from fp4dispatch.benchmark.methods import base as methods
    from fp4dispatch.benchmark.methods import ours
    from fp4dispatch.benchmark.problems.operands import Operands, Truth

    operands = Operands(case.n, case.k, card.device)
    truth = Truth(operands, case.m)
    fmt: Any = case.format
    ready = ours.Layer(fmt, None, case.backend).prepare(operands, 1, card)(truth.x)
    worst = check.worst_tile(ready.call(0), truth.want(fmt, ready.entering))
    limit = methods.tolerance(fmt, ready.entering, case.k)
    if not worst.error <= limit:
        raise ValueError(f"WRONG: tile {worst.tile} is off by {worst.error:.2g}, allowed {limit:.2g}")
    torch.cuda.synchronize()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    ready.call(0)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
    return {"ran": ready.backend, "off": worst.error, "sms": card.sms}


def launch_all(numbers: Iterable[int], log: Path, limit_s: float) -> None:
    """Launch cases one after the other; write a line of JSON for each as soon as it is done."""
    from fp4dispatch.benchmark import machine

    began, card = time.monotonic(), machine.card("cuda")
    with log.open("w") as file:
        for i in numbers:
            line: dict[str, Any] = {"case": i}
            if time.monotonic() - began > limit_s:
                line["failed"] = f"no time was left of {limit_s:.0f} s"
            else:
                try:
                    line |= launch(CASES[i], card)
                except Exception as error:  # the others are still to be seen
                    line["failed"] = " ".join(f"{type(error).__name__}: {error}".split())[:400]
            print(json.dumps(line), file=file, flush=True)


# ------------------------------------------------------------------------------------------------------------- outside


def command(numbers: Sequence[int], log: Path, limit_s: float, *, full: bool = False) -> list[str]:
    """Return the command line of ncu; ``full`` asks for all that it has by no name, should it not know one of ours."""
    words = ["ncu", "--profile-from-start", "off", "--clock-control", "none", "--cache-control", "all"]
    words += ["--kernel-name", f"regex:{KERNELS}", "--page", "raw", "--csv", "--print-units", "base"]
    if full:
        words += ["--set", "full", "--import-source", "no"]
    else:
        words += [word for section in SECTIONS for word in ("--section", section)]
        words += ["--metrics", ",".join((*FIELDS.values(), *LIMITS))]
    words += [sys.executable, "-m", "bench.ncu", "--log", str(log), "--limit-s", str(limit_s)]
    return [*words, "--cases", *map(str, numbers)]


def number(value: str, unit: str) -> float:
    """Return a value of ncu's in us, bytes or its own unit."""
    return float(value.replace(",", "")) * UNITS.get(unit, 1.0)


def parse(text: str) -> list[dict[str, Any]]:
    """Return what FIELDS names from ``ncu --page raw --csv``, one dictionary a kernel, in the order of the launches.

    The table is a row of names, one of units, one a kernel; what stands before it is not ncu's.

    Raises
    ------
    ValueError
        Where there is no profile, or no duration in it.
    """
    start = text.find('"ID"')
    rows = list(csv.reader(io.StringIO(text[start:]))) if start >= 0 else []
    if len(rows) < 3:
        raise ValueError(f"no profile in ncu's output: {text[-1500:]}")
    return [_kernel(rows[0], rows[1], row) for row in rows[2:] if len(row) == len(rows[0])]


def _kernel(names: list[str], units: list[str], row: list[str]) -> dict[str, Any]:
    values = {name: (value, unit) for name, unit, value in zip(names, units, row, strict=True) if value}
    found: dict[str, Any] = {ours: number(*values[name]) for ours, name in FIELDS.items() if name in values}
    if "us" not in found:
        raise ValueError(f"ncu reports no {FIELDS['us']}, but {', '.join(list(values)[:20])}")
    limits = [number(*values[name]) for name in LIMITS if name in values]
    if len(limits) == len(LIMITS):
        found["ctas_per_sm"] = min(limits)
    found["kernel"] = values.get("Kernel Name", ("", ""))[0]
    pipe = {n: number(*pair) for n, pair in values.items() if "pipe_tensor" in n and ".avg.pct_of_peak" in n}
    return found | {"tensor_metrics": {name: value for name, value in pipe.items() if value}}


def derived(row: dict[str, Any], sms: int) -> dict[str, Any]:
    """Return bytes a microsecond from memory, and the most bytes that the kernel's shared memory can have under way."""
    found = {}
    if "dram_bytes" in row:
        found["dram_tb_s"] = row["dram_bytes"] / row["us"] / 1e6
    if {"ctas_per_sm", "ctas", "shared_bytes"} <= set(row):
        at_once = min(row["ctas"], sms * row["ctas_per_sm"])
        found["ring_bytes"] = row["shared_bytes"] * at_once
        found["ring_kb_per_sm"] = found["ring_bytes"] / sms / 1e3
    return found


def joined(lines: Sequence[dict[str, Any]], kernels: Sequence[dict[str, Any]], asked: int) -> list[dict[str, Any]]:
    """Return one profile a case that was launched, from the child's lines and ncu's kernels, both in order.

    Where there are fewer lines than cases were asked for, the child was ended, and ncu may have seen one call more.

    Raises
    ------
    ValueError
        If ncu saw fewer kernels than calls, or more: whose is whose is not known then.
    """
    launched = [line for line in lines if "failed" not in line]
    if not len(launched) <= len(kernels) <= len(launched) + (len(lines) < asked):
        names = ", ".join(kernel["kernel"] for kernel in kernels)
        raise ValueError(f"{len(launched)} calls, but ncu saw {len(kernels)} kernels named {KERNELS}: {names}")
    return [
        CASES[line["case"]]._asdict()
        | {key: line[key] for key in ("ran", "off")}
        | kernel
        | derived(kernel, line["sms"])
        for line, kernel in zip(launched, kernels, strict=False)
    ]


def run(numbers: Sequence[int], limit_s: float) -> tuple[list[dict[str, Any]], list[str]]:
    """Profile the cases; return profiles, and a sentence for each case that has none."""
    said = ""
    for full in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            text = _output(command(numbers, log, limit_s, full=full), limit_s + 60)
            lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        failed = [f"{CASES[line['case']]}: {line['failed']}" for line in lines if "failed" in line]
        failed += [f"{CASES[i]}: never begun" for i in numbers if i not in {line["case"] for line in lines}]
        try:
            return joined(lines, parse(text), len(numbers)), failed
        except ValueError as error:
            said = str(error)
            if lines and not any(
                "failed" not in line for line in lines
            ):  # nothing was launched: not for want of a name
                break
    return [], [*failed, said]


def _output(words: Sequence[str], limit_s: float) -> str:
    """Run a command; after the limit end it and all that it started, and return what it printed."""
    with subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            return process.communicate(timeout=limit_s)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return process.communicate()[0] + f"\nended after {limit_s:.0f} s"


def table(record: dict[str, Any]) -> str:
    """Return a record as Markdown."""
    head = ["backend", "kernel", "M x N x K", "us", "TB/s", "memory, %", "L2, %", "tensor pipe, %", "issue, %"]
    head += ["ALU pipe, %", "registers", "CTAs", "an SM", "shared, KB", "ring, KB an SM"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in record["profiles"]:
        name = re.search(KERNELS, row["kernel"])
        cells = [
            row["ran"],
            name[0] if name else row["kernel"],
            f"{row['m']}x{row['n']}x{row['k']}",
            f"{row['us']:.1f}",
        ]
        cells += [f"{row['dram_tb_s']:.2f}" if "dram_tb_s" in row else "-"]
        cells += [
            f"{row[name]:.0f}" if name in row else "-" for name in (*PERCENTS, "registers", "ctas", "ctas_per_sm")
        ]
        cells += [f"{row['shared_bytes'] / 1e3:.0f}" if "shared_bytes" in row else "-"]
        cells += [f"{row['ring_kb_per_sm']:.0f}" if "ring_kb_per_sm" in row else "-"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """Profile the cases and write the record."""
    parser = commandline.parser(__doc__)
    commandline.takes_record(parser)
    parser.add_argument("--limit-s", type=float, default=80, help="seconds after which no further case is begun")
    parser.add_argument("--cases", type=int, nargs="+", default=list(range(len(CASES))), choices=range(len(CASES)))
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)
    arguments = commandline.parse(parser, words)
    if arguments.log is not None:
        launch_all(arguments.cases, arguments.log, arguments.limit_s)
        return 0
    if arguments.json is None:
        parser.error("--json is needed")
    if shutil.which("ncu") is None:
        parser.error("ncu is not on the PATH; it comes with the CUDA toolkit")
    from fp4dispatch.benchmark import machine
    from fp4dispatch.benchmark.reports import records

    rows, failed = run(arguments.cases, arguments.limit_s)
    record = {"failed": failed, "profiles": rows}
    records.write(arguments.json, "ncu", machine.facts(machine.card(), arguments.commit), record)
    print(table(record))
    print("\n".join(failed), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
