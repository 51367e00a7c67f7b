"""Predicted clocks of the kernels for many tokens, to choose between tiles: csrc/many_tokens/plan.h again. No torch.

The compiled kernel chooses its launch shape by that file. The build to compile and load must be known earlier, so the
model is here too; ``tests/compile/test_kernels_w4_large.py`` compares the two. The constants are an H200's, fitted to
the sweep in bench/NOTES.md ("many tokens").
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

MEMORY_BYTES = 2350.0  # a clock
TILE_CLOCKS, SPLIT_CLOCKS, SPLIT_BYTES = 7800.0, 3100.0, 32.0
RASTER, FEWEST_STAGES, LARGEST_CLUSTER = 8, 4, 8
SPLITS = (1, 2, 3, 4, 8)
USABLE, USABLE_OF = (132, 132, 117, 120, 110, 102, 105, 120), 132
"""CTAs that can run at once in clusters of 1 to 8, on a GPU with ``USABLE_OF`` SMs."""


@dataclass(frozen=True)
class TileSpeed:
    """Tile of a build, and its speed.

    ``tokens`` x ``rows`` of the weight: the tile. ``stage_k``, ``weight_bytes``: k and weight bytes of a pipeline
    stage. ``ctas``: CTAs per SM. ``most_split``: most parts of K. Clocks of a stage: ``alone``, at least; ``stage``, on
    a full SM; ``pair``, on a full SM if two CTAs share activations.
    """

    tokens: int
    rows: int
    stage_k: int
    weight_bytes: int
    ctas: int
    most_split: int
    alone: float
    stage: float
    pair: float


@functools.lru_cache(maxsize=4096)
def clocks(tile: TileSpeed, m: int, n: int, k: int, sms: int) -> int:
    """Return the clocks of the best launch shape, as ``w4_gemm_plan`` computes them."""
    best = 0.0
    for multicast in (1, 2) if n > tile.rows else (1,):
        for split in SPLITS:
            found = _clocks_of(tile, multicast, split, (m, n, k), sms)
            if found is not None and (best == 0 or found < best):
                best = found
    return int(best)


def _clocks_of(tile: TileSpeed, multicast: int, split: int, mnk: tuple[int, int, int], sms: int) -> float | None:
    """Return the clocks of one launch shape; None if the kernel does not consider it."""
    m, n, k = mnk
    stages, cluster = _divide_up(k, tile.stage_k), multicast * split
    if split > tile.most_split or cluster > LARGEST_CLUSTER or (split > 1 and stages < split * FEWEST_STAGES):
        return None
    token_tiles = _divide_up(m, tile.tokens)
    tiles = _divide_up(_divide_up(n, tile.rows), multicast) * token_tiles
    slots = max(sms * USABLE[cluster - 1] // USABLE_OF * tile.ctas // cluster, 1)
    whole = tiles // (slots * split)
    whole = whole if split > 1 and tiles - whole * slots * split <= slots else 0
    if split > 1 and (multicast > 1 if whole else tiles > slots):
        return None
    running = min(tiles, slots) * cluster
    shared = min(max(running / sms, 1.0), float(tile.ctas))
    memory = running * tile.weight_bytes / min(token_tiles, RASTER) / MEMORY_BYTES
    stage = max((tile.stage if multicast == 1 else tile.pair) * shared, tile.alone, memory)
    if split == 1:
        return TILE_CLOCKS + _divide_up(tiles, slots) * stages * stage
    end = SPLIT_CLOCKS + tile.rows * tile.tokens * 4 / SPLIT_BYTES
    return TILE_CLOCKS + (whole * stages + _divide_up(stages, split)) * stage + end


def _divide_up(a: int, b: int) -> int:
    return -(-a // b)
