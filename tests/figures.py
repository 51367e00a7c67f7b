"""Times out of the records of bench/results, whatever script wrote them."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path

from fp4dispatch.benchmark.reports import records
from fp4dispatch.policy.measured import Speedup

RESULTS = Path(__file__).resolve().parent.parent / "bench" / "results"
Times = Mapping[tuple[int, int, int], Mapping[str, float]]
"""(N, K, M) -> method -> us."""


@functools.cache
def times(record: str) -> Times:
    """Every time of a record: of `fp4dispatch bench` by method, of the scripts in bench/ by the name in ``us``."""
    doc = records.read(RESULTS / f"{record}.json")
    found: dict[tuple[int, int, int], dict[str, float]] = {}
    for row in doc.get("measured", ()):
        if row["status"] == "ok":
            found.setdefault((row["n"], row["k"], row["m"]), {})[row["method"]] = row["us"]
    for row in doc.get("problems", ()):
        if "us" in row and "n" in row:
            found.setdefault((row["n"], row["k"], row["m"]), {}).update(row["us"])
    return found


def ran(record: str, method: str) -> set[tuple[int, int, int, str]]:
    """(M, N, K, backend) of every problem that a method of `fp4dispatch bench` ran; nothing for another record."""
    doc = records.read(RESULTS / f"{record}.json")
    rows = (row for row in doc.get("measured", ()) if row["method"] == method and row["status"] == "ok")
    return {(row["m"], row["n"], row["k"], row["backend"].partition(" ")[0]) for row in rows}


def recomputed(figures: Speedup) -> list[float | None]:
    """The figures as the record has them, with two decimals; None where it has none."""
    found: list[float | None] = []
    for m in figures.m:
        logs = [
            math.log(us[figures.over] / us[figures.method])
            for (n, k, tokens), us in times(figures.record).items()
            if tokens == m and figures.nk in (None, (n, k)) and figures.over in us and figures.method in us
        ]
        found.append(round(math.exp(sum(logs) / len(logs)), 2) if logs else None)
    return found
