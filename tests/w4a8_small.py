"""What w4a8_small.cu builds and the shared memory that takes, written down once more for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

NAME = "w4a8_small"
INSTANCES = (
    *((16, 1, 2, 1), (16, 1, 4, 1), (16, 2, 1, 1), (24, 1, 2, 1), (24, 1, 4, 1), (32, 1, 2, 1), (32, 1, 4, 1)),
    *((48, 1, 2, 1), (48, 1, 4, 1), (48, 2, 2, 1), (64, 1, 2, 1), (64, 1, 4, 1), (64, 2, 2, 1)),
    *((80, 1, 2, 1), (96, 1, 2, 1), (96, 2, 1, 1), (112, 1, 2, 1), (128, 1, 2, 1)),
)
"""Tokens, row blocks, groups, units."""
TILES = ((1, 16), (17, 24), (25, 32), (33, 48), (49, 64), (65, 80), (81, 96), (97, 112), (113, 500))
"""The fewest and the most tokens for which plan() takes a tile, in order; the last one takes more in several tiles."""
CLUSTERS = (1, 2, 3, 4, 5, 6, 7, 8)
H200 = (132, 233472, 232448, True)
"""Multiprocessors, shared memory of one and of a CTA, clusters: what plan() asks of a machine."""
MOST_SLOTS = 63  # stages of all rings together


def tile_of(m: int) -> int:
    """Tokens of the tile that plan() takes."""
    return min((tokens for tokens, *_ in INSTANCES if tokens >= m), default=128)


def shared_bytes(shape: Sequence[int]) -> int:
    """Shared memory of a CTA: barriers, the table of scales, the rings, and what its end needs."""
    tokens, row_blocks, groups, _, cluster, stages = shape[:6]
    stage = -(-(row_blocks * 2 * 2304 + tokens * 128) // 1024) * 1024
    ring, end = groups * stages * stage, end_bytes(tokens, row_blocks, groups, cluster)
    return 1024 + 128 * 16 * 8 + (max(ring, end) if tokens >= 32 else ring + end)


def end_bytes(tokens: int, row_blocks: int, groups: int, cluster: int) -> int:
    """Shared memory of the end of a CTA: alpha and bias of its rows, sums of its groups, what each CTA sends to it."""
    rows = 64 * row_blocks
    slots = next(count for count in (1, 2, 4, 8, 16, 32) if 4 * count * cluster >= rows)  # of four rows
    received = cluster * tokens * slots * 16 if cluster > 1 else 0
    return 2 * 4 * rows + groups * 4 * tokens * (rows + 4) + received


def threads(instance: Sequence[int]) -> int:
    """Threads of a CTA: four warps a row block and a producer, for each group."""
    return 32 * instance[2] * (4 * instance[1] + 1)


def launch_shapes(stages: Sequence[int] = (2, 3, 4)) -> Iterator[tuple[int, ...]]:
    """Every launch shape of every instance that an SM90 multiprocessor takes; the trigger is as plan() sets it."""
    for instance in INSTANCES:
        for cluster in CLUSTERS:
            for count in stages:
                shape = (*instance, cluster, count, count)
                if shared_bytes(shape) <= H200[2] and instance[2] * count <= MOST_SLOTS:
                    yield shape
