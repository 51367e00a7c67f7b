"""What the first command of the README takes and prints on a fresh machine, out of bench/results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fp4dispatch.benchmark.reports import records

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"


def sentence() -> str:
    """Return what the first kept run takes, and where to read on."""
    record = next(iter(records.kept(RESULTS, "first command")))
    total, peak, disk = _takes(record)
    return (
        f"With torch for CPUs, on {record['cores']} cores, this took {total:.0f} s, downloads included, "
        f"{peak:.1f} GB of memory and {disk:.1f} GB on disk: [what it prints, and what that means](docs/demo.md)."
    )


def _takes(record: dict[str, Any]) -> tuple[float, float, float]:
    """Return seconds, and GB of memory and on disk."""
    found = record["first_command"]
    total, peak = sum(step["wall_s"] for step in found["steps"]), max(step["peak_mb"] for step in found["steps"])
    return total, peak / 1e3, found["environment_mb"] / 1e3


def first() -> str:
    """Return each kept run: the machine, time and memory of each part, the output."""
    parts = []
    for record in records.kept(RESULTS, "first command"):
        facts, found = record["facts"], record["first_command"]
        total, peak, disk = _takes(record)
        lines = [
            f"{facts['device']}, {record['cores']} cores, {record['memory_gb']} GB of memory, Python "
            f"{facts['python']}, torch {facts['torch']}, commit {facts['commit']}: **{total:.0f} s**, downloads "
            f"included; at most **{peak:.1f} GB** of memory; {disk:.1f} GB on disk.",
            "",
            "| part | seconds | peak memory |",
            "|---|---|---|",
        ]
        lines += [f"| `{step['command']}` | {step['wall_s']:.0f} | {step['peak_mb']} MB |" for step in found["steps"]]
        parts.append("\n".join([*lines, "", "It prints:", "", "```text", *found["output"], "```"]))
    return "\n\n".join(parts)
