"""The launch shapes of the kernels for few tokens (``csrc/few_tokens/launch.h``): what is built and fits. No torch.

A kernel chooses a shape itself where it is given none. This module lists the shapes that are worth a prediction
(:mod:`~fp4dispatch.backends.own.tiling.few_tokens_model`) or a measurement.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fp4dispatch.problem.integers import ceil_div, round_up

Instance = tuple[int, int, int, int]
"""Tokens, row blocks, groups of warps and units of a tile."""

CLUSTERS = (1, 2, 3, 4, 5, 6, 7, 8)
ROWS, STAGE_K = 64, 128
"""Rows of a row block, k of a stage."""
FEWEST_CTAS, MOST_CTAS = 0.45, 3
"""Of the SMs. Fewer CTAs leave memory bandwidth unused unless a cluster has its largest size, or as many CTAs as there
are stages for all groups of warps; sharing K out to more only adds starts."""
RESERVED = 1024
"""Bytes of shared memory that a CTA costs beside its own."""
QUANTISER = 4096
"""Bytes of shared memory that a CTA with FP8 activations leaves on its SM, so that the next quantiser can start beside
it. If that finds no room, the next launch takes up to 1.2 times as long. FP8 weights by row have deeper rings as well,
which the models compare (``fills``; bench/notes/few-tokens.md)."""
FEW_STAGES = (2, 4)
UNIT_ROWS = 16
SM_REGISTERS, SM_THREADS, SM_PARTS = 65536, 2048, 4
"""An SM is four parts, each with a quarter of the registers. So a multiple of four warps fits."""
MOST_TILES, MOST_TOKENS = 16, 2048
"""Tiles of tokens, each of which reads all weights, and tokens: with more of them another kernel is faster
(bench/notes/few-tokens.md)."""
TOKENS_APART = 8
"""Tiles hold a multiple of so many tokens: between two multiples all M have the same launch shapes."""
FEW_TILES = 2
"""Tiles of the largest size, for any weights."""
WIDE_TOKENS, WIDE_CLUSTER = 64, 4
"""Tiles of more tokens share K out to at most so many CTAs: their sums take longer than what that saves."""
SMALL_CTAS = 2
"""Of the SMs. Weights are small where all tiles of tokens, with K in one part, have at most so many CTAs: then several
tiles give more SMs work, without sums to be added."""


class FewTokensShape(NamedTuple):
    """The seven numbers of ``Plan`` in ``csrc/few_tokens/launch.h``, in its order.

    ``tokens``, ``row_blocks``, ``groups``, ``units``: the tile. ``cluster``: CTAs that share out K. ``stages``: of a
    ring. ``trigger``: how many stages before its end a CTA lets the next grid start, but not before the previous grid
    has ended.
    """

    tokens: int
    row_blocks: int
    groups: int
    units: int
    cluster: int
    stages: int
    trigger: int

    def ctas(self, m: int, n: int) -> int:
        """Return how many CTAs the grid has."""
        return ceil_div(n, ROWS * self.row_blocks) * self.cluster * ceil_div(m, self.tokens)


@dataclass(frozen=True, eq=False)
class FewTokensKernel:
    """What a kernel builds, and what its tile takes of shared memory.

    Parameters
    ----------
    instances
        The tiles that a build for SM90 has, and the registers of a thread of each, as nvcc 13.0 compiles it.
    weight_bytes
        Of a stage of a row block.
    x_bytes
        Of an activation.
    align
        Of activations in a stage.
    reuse
        From this many tokens on, sums take the place of the ring.
    table
        Bytes of tables.
    trigger_part
        A CTA lets the next grid start this part of a ring's stages before its end.
    most
        The most tokens for which a launch is worth a look. Few, where a plan chooses a launch for every M.
    fills
        Whether a ring that fills an SM is worth a look too, where scales are by row: the next quantiser starts later,
        but the ring is deeper (bench/notes/few-tokens.md).
    """

    instances: Mapping[Instance, int]
    weight_bytes: int
    x_bytes: int
    align: int
    reuse: int = 32
    table: int = 0
    trigger_part: int = 1
    most: int = MOST_TOKENS
    fills: bool = False

    def most_tokens(self) -> int:
        """Return the most tokens for which shapes are worth a look."""
        return min(MOST_TILES * max(instance[0] for instance in self.instances), self.most)

    def threads(self, shape: FewTokensShape) -> int:
        """Return the threads of a CTA: in each group warps that multiply, and one that loads."""
        return 32 * shape.groups * (shape.row_blocks * ROWS // UNIT_ROWS // shape.units + 1)

    def resident(self, shape: FewTokensShape, memory: SharedMemory, *, block_scales: bool = False) -> int:
        """Return how many CTAs run on an SM at once, by shared memory, registers and threads; at least 1."""
        return _resident(self, shape, memory, block_scales)

    def spares(self, *, block_scales: bool = False) -> tuple[int, ...]:
        """Bytes that a CTA alone on its SM leaves free: what it has to, then what is worth a look too."""
        if self.x_bytes > 1:
            return (0,)
        return (0, QUANTISER) if self.fills and not block_scales else (QUANTISER,)

    def leaves_room(self, shape: FewTokensShape, memory: SharedMemory, *, block_scales: bool = False) -> bool:
        """Return whether a CTA leaves free what it has to (:meth:`spares`)."""
        free = memory.sm - self.shared_bytes(shape, block_scales=block_scales) - RESERVED
        return free >= self.spares(block_scales=block_scales)[0]

    def registers_of(self, shape: FewTokensShape) -> int:
        """Return the registers of a thread, in the steps in which they are given out."""
        return round_up(self.instances[shape[:4]], 8)

    def tokens(self, m: int) -> int:
        """Return the tokens of the smallest tile that holds m, or of the largest."""
        sizes = sorted({instance[0] for instance in self.instances})
        return next((size for size in sizes if size >= m), sizes[-1])

    def tiles(self, m: int) -> dict[int, int]:
        """Return tokens of tiles that are worth a look, each the smallest for its number of tiles, and that number."""
        found: dict[int, int] = {}
        for size in sorted({instance[0] for instance in self.instances}):
            count = ceil_div(m, size)
            if count <= MOST_TILES and count not in found.values():
                found[size] = count
        return found

    def shared_bytes(self, shape: FewTokensShape, *, block_scales: bool = False) -> int:
        """Return the shared memory of a CTA, as ``Tile`` in ``csrc/few_tokens/tile.h`` counts it."""
        first, stage, sums = self._parts(shape, block_scales)
        ring = shape.groups * shape.stages * stage
        return first + (max(ring, sums) if shape.tokens >= self.reuse else ring + sums)

    def most_stages(self, shape: FewTokensShape, room: int, *, block_scales: bool = False) -> int:
        """Return the most stages of a ring with which a CTA takes at most ``room`` bytes; 0 where nothing fits."""
        first, stage, sums = self._parts(shape, block_scales)
        reused = shape.tokens >= self.reuse
        if first + sums > room:
            return 0
        return (room - first - (0 if reused else sums)) // (shape.groups * stage)

    def _parts(self, shape: FewTokensShape, block_scales: bool) -> tuple[int, int, int]:
        """Return the bytes of barriers and tables, of a stage of a group, and of the sums."""
        wgmma = shape.units == 1
        pitch = STAGE_K * self.x_bytes + (4 * block_scales if wgmma else 16)
        align = 1024 if wgmma else self.align
        tokens = round_up(shape.tokens * pitch, self.align)
        stage = round_up(shape.row_blocks * self.weight_bytes + tokens, align)
        rows = shape.row_blocks * ROWS
        sums = 8 * rows + shape.groups * 4 * shape.tokens * (rows + 4)  # alpha and bias, sums of groups
        if shape.cluster > 1:  # what the CTAs of a cluster send: four rows a slot, a power of two of them for each
            sums += shape.cluster * shape.tokens * 16 * _power_of_two(-(-rows // 4 // shape.cluster))
        return (1024 if align == 1024 else 512) + self.table, stage, sums


KERNELS = {
    "w4a16_small": FewTokensKernel(
        {
            (8, 1, 4, 2): 64,
            (8, 2, 2, 4): 109,
            (8, 2, 4, 4): 80,
            (16, 1, 4, 2): 79,
            (16, 2, 2, 4): 110,
            (16, 2, 4, 4): 110,
            (32, 1, 2, 1): 74,
            (48, 1, 2, 1): 82,
            (48, 1, 4, 1): 82,
            (48, 2, 1, 1): 82,
            (64, 1, 2, 1): 90,
            (64, 1, 4, 1): 90,
            (64, 2, 2, 1): 90,
            (96, 1, 2, 1): 106,
            (96, 2, 1, 1): 106,
        },
        weight_bytes=4608,
        x_bytes=2,
        align=16,
    ),
    "w8a16_small": FewTokensKernel(
        {
            (8, 1, 4, 2): 63,
            (8, 2, 2, 4): 88,
            (8, 2, 4, 4): 88,
            (16, 1, 4, 2): 80,
            (16, 2, 2, 4): 116,
            (16, 2, 4, 4): 115,
            (16, 4, 2, 4): 116,
            (32, 1, 2, 2): 93,
            (32, 1, 4, 2): 92,
            (32, 2, 2, 4): 150,
            (32, 2, 4, 4): 148,
            (32, 4, 2, 4): 148,
        },
        weight_bytes=8192,
        x_bytes=2,
        align=1024,
        reuse=16,
        trigger_part=2,
        most=256,
    ),
    "w4a8_small": FewTokensKernel(
        {
            (16, 1, 2, 1): 64,
            (16, 1, 4, 1): 64,
            (16, 2, 1, 1): 71,
            (24, 1, 2, 1): 71,
            (24, 1, 4, 1): 64,
            (32, 1, 2, 1): 71,
            (32, 1, 4, 1): 64,
            (48, 1, 2, 1): 80,
            (48, 1, 4, 1): 80,
            (48, 2, 2, 1): 80,
            (64, 1, 2, 1): 96,
            (64, 1, 4, 1): 95,
            (64, 2, 2, 1): 95,
            (80, 1, 2, 1): 113,
            (96, 1, 2, 1): 128,
            (96, 2, 1, 1): 131,
            (112, 1, 2, 1): 145,
            (128, 1, 2, 1): 159,
        },
        weight_bytes=4608,
        x_bytes=1,
        align=1024,
        table=16384,
    ),
    "w8a8_small": FewTokensKernel(
        {
            (16, 1, 2, 1): 64,
            (16, 1, 4, 1): 64,
            (16, 2, 1, 1): 72,
            (24, 1, 2, 1): 72,
            (32, 1, 2, 1): 72,
            (32, 1, 4, 1): 64,
            (48, 1, 2, 1): 72,
            (64, 1, 2, 1): 78,
            (64, 2, 1, 1): 88,
            (80, 1, 2, 1): 97,
            (96, 1, 2, 1): 110,
            (96, 2, 1, 1): 131,
            (112, 1, 2, 1): 120,
            (128, 1, 2, 1): 140,
        },
        weight_bytes=8192,
        x_bytes=1,
        align=1024,
        fills=True,
    ),
}

WITHOUT_WGMMA: Mapping[str, tuple[Instance, ...]] = {"w4a16_small": ((32, 1, 4, 2), (32, 2, 2, 4))}
"""Tiles that builds for other architectures than SM90 have in place of those of one unit."""


@dataclass(frozen=True)
class SharedMemory:
    """Bytes of shared memory of an SM, and of one CTA at most."""

    sm: int = 233472
    cta: int = 232448


SM90 = SharedMemory()


def candidates(
    kernel: str, m: int, n: int, k: int, sms: int, memory: SharedMemory = SM90, *, block_scales: bool = False
) -> Iterator[FewTokensShape]:
    """Yield the launch shapes of a kernel that are worth a measurement for [m, k] by [n, k], with clusters.

    Of small weights tiles of all sizes that hold m in up to :data:`MOST_TILES`, else those of the size that the kernel
    would take; K shared out by 1 to 8 CTAs; few stages, and as many as let one to four CTAs run on an SM.
    """
    about = KERNELS[kernel]
    tiles, usual = about.tiles(m), about.tokens(m)
    for instance in about.instances:
        tokens, row_blocks = instance[:2]
        count = tiles.get(tokens)
        if count is None:
            continue
        small = ceil_div(n, ROWS * row_blocks) * count <= SMALL_CTAS * sms
        if not small and (tokens != usual or count > FEW_TILES):
            continue
        useful = ceil_div(k, STAGE_K * instance[2])  # CTAs with a stage for each group of warps
        for cluster in CLUSTERS:
            first = FewTokensShape(*instance, cluster, FEW_STAGES[0], FEW_STAGES[0])
            if tokens > WIDE_TOKENS and cluster > WIDE_CLUSTER:
                continue
            ctas, full = first.ctas(m, n), cluster in (useful, CLUSTERS[-1])
            if ctas > MOST_CTAS * sms * count and cluster > 1:
                continue
            if ctas < FEWEST_CTAS * sms and not full:
                continue
            for stages in sorted(_stages(about, first, k, memory, block_scales)):
                yield first._replace(stages=stages, trigger=max(stages // about.trigger_part, 1))


def _stages(
    about: FewTokensKernel, shape: FewTokensShape, k: int, memory: SharedMemory, block_scales: bool
) -> set[int]:
    needed = max(FEW_STAGES[0], ceil_div(k, STAGE_K * shape.cluster * shape.groups))
    deepest, *others = (min(needed, most) for most in _most_stages(about, shape, memory, block_scales))
    found = {deepest, *others, *(min(few, deepest) for few in FEW_STAGES)}
    return {stages for stages in found if stages >= FEW_STAGES[0]}


@functools.lru_cache(maxsize=1024)
def _most_stages(
    about: FewTokensKernel, shape: FewTokensShape, memory: SharedMemory, block_scales: bool
) -> tuple[int, ...]:
    """Return the most stages of a ring with which one to four CTAs run on an SM; of all, the first is the most."""
    slots = 63 if shape.units == 1 or about.align == 1024 else 31
    rooms = [min(memory.cta, memory.sm - spare - RESERVED) for spare in about.spares(block_scales=block_scales)]
    rooms += [memory.sm // resident - RESERVED for resident in (2, 3, 4)]
    return tuple(
        min(slots // shape.groups, about.most_stages(shape, room, block_scales=block_scales)) for room in rooms
    )


@functools.lru_cache(maxsize=4096)
def _resident(about: FewTokensKernel, shape: FewTokensShape, memory: SharedMemory, block_scales: bool) -> int:
    threads = about.threads(shape)
    by_memory = memory.sm // (about.shared_bytes(shape, block_scales=block_scales) + RESERVED)
    warps = SM_REGISTERS // (32 * about.registers_of(shape)) // SM_PARTS * SM_PARTS
    return max(1, min(by_memory, 32 * warps // threads, SM_THREADS // threads))


def whole(m: int) -> int:
    """Return the largest number of tokens that has the same launch shapes."""
    return round_up(m, TOKENS_APART)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
