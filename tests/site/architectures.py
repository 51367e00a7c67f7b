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
    """Return what a record says, and a table of what was refused and why; what is wrong is named."""
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
    wrong = [f"- Wrong: `{row['cls']}`, {row['why']}." for row in rows if row["outcome"] == "wrong"]
    return "\n".join([*lines, *(["", *wrong] if wrong else [])])


ENDS = {
    "ok": "passed everything",
    "refused": "refused somewhere with a typed error",
    "no forward": "checked without a forward, as the rules gave no inputs",
    "not built": "not built tiny, by the rules",
    "stopped": "stopped, as they took too long",
    "wrong": "wrong",
}
"""Outcome -> how it is said."""
ALWAYS = ("ok", "refused", "not built", "wrong")


def _why(row: dict[str, Any]) -> tuple[str, str]:
    """Return the check and the error up to what it lists; names that differ from class to class are ``...``."""
    check, _, error = row["why"].partition(": ")
    for name in (row["cls"], r"/\S*/\S*", r"'[^']*'"):
        error = re.sub(name, "...", error)
    return check, re.split(r" \(|: save with", error)[0].replace("|", "\\|")
