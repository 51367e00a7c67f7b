"""The kernels for many tokens: what bench/results keeps of sweeps, and sizes that end in tiles with K shared out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fp4dispatch.backends.many_tokens import USABLE, USABLE_OF

SWEEPS = ("sweep", "16bit-sweep")
RESULTS = Path(__file__).parents[1] / "bench" / "results"
Shape = tuple[int, ...]
TOKEN_TILES = 3


def problems(sweep: str = "sweep") -> list[dict[str, Any]]:
    """Return all of one of ``SWEEPS``, as they are kept."""
    path = RESULTS / f"2026-11-21-h200-many-tokens-{sweep}.json"
    found: list[dict[str, Any]] = json.loads(path.read_text())["problems"]
    return found


def times(build: str) -> Iterator[tuple[tuple[int, int, int], dict[Shape, float]]]:
    """Yield (M, N, K) and the microseconds of each launch shape of "kernel/build", where it was run, in every sweep."""
    for problem in (problem for sweep in SWEEPS for problem in problems(sweep)):
        if build in problem["builds"]:
            shapes = {tuple(shape): us for shape, us in problem["builds"][build]}
            yield (problem["m"], problem["n"], problem["k"]), shapes


def tile_of(variant: str) -> tuple[int, int, int]:
    """Return tokens and rows of the tile of a build of w4_gemm_sm90, and its CTAs of a multiprocessor."""
    act, _, tile = variant.split("_")
    tokens, _, rows = tile.partition("x")
    narrow = act == "a8" or tokens == "256"
    return int(tokens), int(rows or (128 if narrow else 256)), 2 if act == "a8" and int(tokens) <= 64 else 1


def whole_tiles_first(variant: str, shape: Sequence[int], sms: int, rounds: int, parts: str) -> tuple[int, int]:
    """Return M and N, both ragged: each CTA does ``rounds`` tiles, then clusters share out K of ``parts`` more.

    ``parts``: "few", or "many", which is nearly as many as clusters run at once.
    """
    (tokens, rows, ctas), (multicast, split) = tile_of(variant), shape[:2]
    clusters = sms * USABLE[multicast * split - 1] // USABLE_OF * ctas // (multicast * split)
    whole = rounds * clusters * split
    row_tiles = (whole + clusters) // TOKEN_TILES if parts == "many" else whole // TOKEN_TILES + 1
    assert 0 < row_tiles * TOKEN_TILES - whole <= clusters
    return (TOKEN_TILES - 1) * tokens + tokens // 2 + 5, row_tiles * multicast * rows - 40
