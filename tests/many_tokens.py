"""The kernels for many tokens: what bench/results keeps of sweeps, and sizes that end in tiles with K shared out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fp4dispatch.backends.own.launch_model import USABLE, USABLE_OF
from fp4dispatch.benchmark import records

SWEEPS = {"a8": "many tokens a8", "a16": "many tokens a16"}
"""By the activations of a build of w4_gemm_sm90; w8_gemm_sm90 is with a8, where older builds of a16 are too."""
RESULTS = Path(__file__).parents[1] / "bench" / "results"
Shape = tuple[int, ...]
TOKEN_TILES = 3


def problems(act: str = "a8") -> list[dict[str, Any]]:
    """Return all of one of ``SWEEPS``, as they are kept."""
    found: list[dict[str, Any]] = records.one(RESULTS, "sweep", SWEEPS[act])["problems"]
    return found


def times(build: str) -> Iterator[tuple[tuple[int, int, int], dict[Shape, float]]]:
    """Yield (M, N, K) and the microseconds of each launch shape of "kernel/build", where it was run in its sweep."""
    for problem in problems("a16" if "/a16" in build else "a8"):
        if build in problem["builds"]:
            shapes = {tuple(shape): us for shape, us in problem["builds"][build]}
            yield (problem["m"], problem["n"], problem["k"]), shapes


def tile_of(variant: str) -> tuple[int, int, int]:
    """Return tokens and rows of the tile of a build of w4_gemm_sm90, and its CTAs of a multiprocessor."""
    act, _, tile = variant.split("_")
    tokens, _, rows = tile.partition("x")
    narrow = act == "a8" or tokens in ("192", "256")
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
