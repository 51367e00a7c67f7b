"""What came of the classes of Transformers that bench/architectures.py drew, for docs/transformers.md."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from fp4dispatch.benchmark.reports import records

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"


def drawn() -> str:
    """Return the block of the record that is kept."""
    return block(records.one(RESULTS, "architectures"))


def block(record: dict[str, Any]) -> str:
    """Return what a record says, and a table of what was refused and why."""
    rows, versions = record["rows"], record["versions"]
    counts = Counter(row["outcome"] for row in rows)
    compared = [row for row in rows if row["errors"] and row["outcome"] != "wrong"]
    worst = max((error for row in compared for error in row["errors"].values()), default=0.0)
    ends = [f"{counts[name]} {text}" for name, text in ENDS.items() if counts[name] or name in ALWAYS]
    lines = [
        f"Transformers {versions['transformers']}, torch {versions['torch']}, commit {record['facts']['commit']}, on a "
        f"CPU. {len(rows)} classes, drawn with seed {record['seed']} of {record['of']}; {len(compared)} were compared, "
        f"and the largest relative error is {worst:.0e}. {'; '.join(ends)}."
    ]
    refused = Counter(_why(row) for row in rows if row["outcome"] == "refused")
    if refused:
        lines += ["", "| refused by | why | classes |", "|---|---|---:|"]
        lines += [f"| {check} | {why} | {count} |" for (check, why), count in refused.most_common()]
    return "\n".join(lines)


ENDS = {
    "ok": "passed everything",
    "refused": "were refused somewhere with a typed error",
    "no forward": "got no inputs by the rules and were checked without a forward",
    "not built": "could not be built tiny",
    "stopped": "took too long",
    "wrong": "were wrong",
}
"""Outcome -> how it is said."""
ALWAYS = ("ok", "refused", "not built", "wrong")


def _why(row: dict[str, Any]) -> tuple[str, str]:
    """Return the check and the error, without the names of temporary folders, and numbers of layers as ``*``."""
    check, _, error = row["why"].partition(": ")
    error = re.sub(r"/\S*/", "", error)
    return check, re.sub(r"\.\d+\.", ".*.", error).replace("|", "\\|")
