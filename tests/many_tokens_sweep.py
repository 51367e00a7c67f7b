"""What bench/results keeps of a run of the kernels for many tokens: every build and launch shape, beside each other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PATH = Path(__file__).parents[1] / "bench" / "results" / "2026-11-21-h200-many-tokens-sweep.json"
Shape = tuple[int, ...]


def problems() -> list[dict[str, Any]]:
    """All of them, as they are kept."""
    found: list[dict[str, Any]] = json.loads(PATH.read_text())["problems"]
    return found


def times(build: str) -> Iterator[tuple[tuple[int, int, int], dict[Shape, float]]]:
    """Yield (M, N, K) and the microseconds of each launch shape of "kernel/build", where it was run."""
    for problem in problems():
        if build in problem["builds"]:
            shapes = {tuple(shape): us for shape, us in problem["builds"][build]}
            yield (problem["m"], problem["n"], problem["k"]), shapes
