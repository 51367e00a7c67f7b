"""The launch model of the kernels for few tokens: which launch shape to use, and how long it should take. No torch.

A launch is waves of CTAs. In a wave each CTA does its stages of K, and a stage takes as long as the slowest of five
things, in about: one CTA alone, all CTAs of an SM together, latency and transfer of one stage over the stages of a
ring, memory bandwidth, L2 bandwidth. :class:`FewTokensSpeed` has the constants, fitted by bench/fit_speeds.py.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fp4dispatch.backends.own.tiling.few_tokens import (
    FEW_STAGES,
    KERNELS,
    ROWS,
    SM90,
    STAGE_K,
    FewTokensKernel,
    FewTokensShape,
    candidates,
)
from fp4dispatch.backends.own.tiling.launch_model import no_room
from fp4dispatch.problem.integers import ceil_div

NORM = 4
"""Exponent of the norm that takes the place of the largest of several times: times near each other add up a little."""
LATE = 0.25
"""Exponent of the share that finds no room: a launch ends with its last CTA, so a few that are late cost nearly as much
as many (0.25 chose better than 0.5, 1 and a step, on sizes that were not fitted to)."""
GATHERING, GATHER_FROM = (3, 5), 0.5
"""Sizes of clusters whose CTAs gather where an SM has room for two, and from how many CTAs for each SM on. Measured on
an H100 and an H200: up to 1.4 times as long as without, most where all SMs that such clusters can fill have one.
Clusters of 6 and 7 do not (bench/notes/few-tokens.md)."""
FIRST_TOKENS = 2
"""Stages of a group: the tokens of so many are waited for before anything is multiplied at full speed."""

TileSpeeds = tuple[tuple[tuple[int, ...], float, float], ...]


@dataclass(frozen=True)
class FewTokensSpeed:
    """Constants of a kernel on a GPU, in microseconds and bytes per microsecond.

    Parameters
    ----------
    start
        Before the first wave.
    wave, crowd, cluster, doubling
        Start and end of a wave: of any CTA; more for each CTA of an SM, of all waves; more where CTAs share out K; more
        for each doubling of their number.
    sums, sent
        Bytes of sums per microsecond that a CTA adds up at its end, and that it sends to others where K is shared out.
    latency, latency_sync
        Of a stage from memory; that of tiles that multiply by ``mma.sync``.
    memory, l2
        Bandwidth.
    overlap
        Share of a wave's start and end that shows where an SM has several CTAs.
    late, late_stage
        What shows of the first loads, in all and of a stage, where the CTAs of the next launch find no room beside
        those of this one.
    early
        Share of latency and transfer that shows in the stages of the first ring: their weights are loaded while the
        launch before still runs.
    gather
        Share by which stages take longer where two CTAs come to lie on an SM while others are empty
        (:data:`GATHERING`).
    tokens
        Bytes per microsecond at which the tokens of a group's first stages arrive. They come when the launch before has
        ended.
    beside
        For FP8 activations: more where all CTAs find room beside the launch before, while the quantiser still runs.
    tiles
        For each tile (tokens, row blocks, groups, units): microseconds of a stage of a CTA alone, and of a stage of one
        group on a full SM.
    shallow
        Tokens of tiles for which only the shallowest ring is considered: on problems that were not fitted to, that was
        better than to compare rings by prediction.
    """

    start: float
    wave: float
    crowd: float
    cluster: float
    doubling: float
    sums: float
    sent: float
    latency: float
    latency_sync: float
    memory: float
    l2: float
    overlap: float
    late: float
    late_stage: float
    early: float
    gather: float
    tokens: float
    beside: float
    tiles: TileSpeeds
    shallow: tuple[int, ...] = ()

    def scaled(self, clock: float, memory: float) -> FewTokensSpeed:
        """Return the constants of a GPU whose clock and memory bandwidth are so many times as high."""
        ends = "start", "wave", "crowd", "cluster", "doubling"
        slower = *ends, "latency", "latency_sync", "late", "late_stage", "beside"
        return replace(
            self,
            **{name: getattr(self, name) / clock for name in slower},
            sums=self.sums * clock,
            sent=self.sent * clock,
            memory=self.memory * memory,
            l2=self.l2 * clock,
            tokens=self.tokens * clock,
            tiles=tuple((tile, alone / clock, full / clock) for tile, alone, full in self.tiles),
        )

    def covers(self, shape: FewTokensShape) -> bool:
        """Whether a launch shape is considered."""
        return shape[:4] in self.of_tile and (shape.tokens not in self.shallow or shape.stages == FEW_STAGES[0])

    @functools.cached_property
    def of_tile(self) -> dict[tuple[int, ...], tuple[float, float]]:
        """The two constants of each tile."""
        return {tile: (alone, full) for tile, alone, full in self.tiles}


class Wave(NamedTuple):
    """CTAs that run at once: how many, and how many of them lie on one SM."""

    ctas: float
    of_sm: float


class Work(NamedTuple):
    """What a launch does, in numbers. Fields may be arrays over launches.

    ``stages`` of the group that has most; ``even``: what groups have in the mean, over that; ``ring``: stages of a
    ring; ``groups`` of warps; ``waves`` that are full, each like ``full``, and ``rest`` (0 or 1), a last one like
    ``last``; ``of_sm``: CTAs of an SM in all waves; ``weight_bytes`` and ``read_bytes`` of a stage of a CTA;
    ``readers`` of the same weights, CTAs of all tiles of tokens, which follow each other: one reads them from memory;
    ``shared`` (0 or 1): K is shared out, by ``doublings`` binary digits; ``sum_bytes`` and ``sent_bytes`` of a CTA;
    ``several`` (0 or 1): an SM runs several CTAs; ``first`` stages that a group loads before it waits; ``token_bytes``
    of a group that are waited for first; ``no_room``: share of the first wave of the next launch that finds no room
    beside the last wave of this one; 1 for FP8 activations, where a quantiser runs in between; ``beside``: for these,
    the share that finds room; ``sync`` (0 or 1): multiplies by ``mma.sync``; ``gathers``: how much of
    :attr:`FewTokensSpeed.gather` applies, 0 to 1.
    """

    stages: float
    even: float
    ring: float
    groups: float
    waves: float
    full: Wave
    rest: float
    last: Wave
    of_sm: float
    weight_bytes: float
    readers: float
    read_bytes: float
    shared: float
    doublings: float
    sum_bytes: float
    sent_bytes: float
    several: float
    first: float
    token_bytes: float
    no_room: float
    beside: float
    sync: float
    gathers: float


class FewTokensPrediction(NamedTuple):
    """A launch shape and the microseconds that the model predicts for it."""

    shape: FewTokensShape
    us: float


@functools.lru_cache(maxsize=4096)
def best(
    kernel: str,
    speed: FewTokensSpeed,
    m: int,
    n: int,
    k: int,
    usable: tuple[int, ...],
    block_scales: bool = False,
) -> FewTokensPrediction | None:
    """Return the fastest launch shape of a kernel for [m, k] by [n, k]; None for more tokens than it is for.

    ``usable``: CTAs that run at once in clusters of 1 to 8, one per SM.
    """
    if m > KERNELS[kernel].most_tokens():
        return None
    found = _predictions(kernel, speed, m, n, k, usable, block_scales)
    return min((each for each in found if speed.covers(each.shape)), key=lambda each: each.us, default=None)


@functools.lru_cache(maxsize=4096)
def first(
    kernel: str,
    speed: FewTokensSpeed,
    m: int,
    n: int,
    k: int,
    usable: tuple[int, ...],
    block_scales: bool,
    count: int,
) -> tuple[FewTokensPrediction, ...]:
    """Return so many launch shapes, with every ring, fastest first; as :func:`best`."""
    found = _predictions(kernel, speed, m, n, k, usable, block_scales)
    return tuple(sorted(found, key=operator.attrgetter("us"))[:count])


def least(kernel: str, speed: FewTokensSpeed, m: int, n: int, k: int, usable: tuple[int, ...]) -> float:
    """Return microseconds that no launch of a kernel is predicted to stay below: as if stages filled all SMs evenly.

    Infinite where it has no tile for so many tokens.
    """
    about = KERNELS[kernel]
    counts = about.tiles(m)
    on_sms = (
        full / usable[0] * counts[tokens] * ceil_div(n, ROWS * row_blocks)
        for (tokens, row_blocks, *_), (_, full) in speed.of_tile.items()
        if tokens in counts
    )
    from_memory = about.weight_bytes / speed.memory * ceil_div(n, ROWS)
    return speed.start + max(min(on_sms, default=math.inf), from_memory) * ceil_div(k, STAGE_K)


def _predictions(
    kernel: str, speed: FewTokensSpeed, m: int, n: int, k: int, usable: tuple[int, ...], block_scales: bool
) -> Iterator[FewTokensPrediction]:
    for shape in candidates(kernel, m, n, k, usable[0], block_scales=block_scales):
        if shape[:4] in speed.of_tile:
            yield FewTokensPrediction(shape, microseconds(kernel, speed, shape, m, n, k, usable, block_scales))


def microseconds(
    kernel: str,
    speed: FewTokensSpeed,
    shape: FewTokensShape,
    m: int,
    n: int,
    k: int,
    usable: tuple[int, ...],
    block_scales: bool = False,
) -> float:
    """Return the predicted time of one launch shape."""
    alone, full = speed.of_tile[shape[:4]]
    found: float = time_of(speed, alone, full, work(KERNELS[kernel], shape, m, n, k, usable, block_scales))
    return found


def work(
    about: FewTokensKernel,
    shape: FewTokensShape,
    m: int,
    n: int,
    k: int,
    usable: tuple[int, ...],
    block_scales: bool = False,
) -> Work:
    """Return what a launch does."""
    sms = usable[shape.cluster - 1]
    resident = about.resident(shape, SM90, block_scales=block_scales)
    quantised = about.x_bytes == 1
    token_tiles, ctas, at_once = ceil_div(m, shape.tokens), shape.ctas(m, n), sms * resident

    def wave(count: int) -> Wave:
        """Return a wave of so many CTAs, spread over all SMs."""
        return Wave(count, ceil_div(count, sms))

    waves, rest = divmod(ctas, at_once)
    stages = ceil_div(ceil_div(k, STAGE_K), shape.cluster * shape.groups)
    weight_bytes = shape.groups * shape.row_blocks * about.weight_bytes
    tokens = min(shape.tokens, m) * STAGE_K * about.x_bytes
    crowded = no_room(rest or at_once, ctas, at_once)
    return Work(
        stages=stages,
        even=ceil_div(k, STAGE_K) / (shape.cluster * shape.groups * stages),
        ring=shape.stages,
        groups=shape.groups,
        waves=waves,
        full=wave(at_once),
        rest=float(rest > 0),
        last=wave(max(rest, 1)),
        of_sm=ctas / usable[0],
        weight_bytes=weight_bytes,
        readers=token_tiles,
        read_bytes=weight_bytes + shape.groups * tokens,
        shared=float(shape.cluster > 1),
        doublings=math.log2(shape.cluster),
        sum_bytes=4 * shape.groups * shape.tokens * shape.row_blocks * ROWS,
        sent_bytes=4 * min(shape.tokens, m) * shape.row_blocks * ROWS * (shape.cluster > 1),
        several=float(resident > 1),
        first=min(stages, shape.stages),
        token_bytes=min(stages, FIRST_TOKENS) * tokens,
        no_room=1.0 if quantised else crowded,
        beside=1 - crowded if quantised else 0.0,
        sync=float(shape.units > 1),
        gathers=_gathers(shape.cluster, ctas, usable) if resident > 1 else 0.0,
    )


def _gathers(cluster: int, ctas: int, usable: tuple[int, ...]) -> float:
    least, most = GATHER_FROM * usable[0], usable[cluster - 1]
    return (ctas - least) / (most - least) if cluster in GATHERING and least < ctas <= most else 0.0


def time_of(speed: Any, alone: Any, full: Any, w: Work) -> Any:
    """Return the microseconds of some work; numbers may be arrays, so that a fit is fast."""
    shares = speed.cluster * w.shared + speed.doubling * w.doublings + w.sent_bytes / speed.sent
    ends = speed.wave + speed.crowd * w.of_sm + w.sum_bytes / speed.sums + shares
    more = (w.waves + w.rest - 1) * (1 - w.several * (1 - speed.overlap))
    latency = speed.latency + (speed.latency_sync - speed.latency) * w.sync

    def stage(wave: Wave) -> Any:
        """Return what a stage takes, and one of the first ring."""
        memory = w.even * wave.ctas * w.weight_bytes / w.readers / speed.memory
        of_sm, l2 = w.even * full * w.groups * wave.of_sm, w.even * wave.ctas * w.read_bytes / speed.l2
        ring, rest = (latency + memory) / w.ring, alone**NORM + of_sm**NORM + memory**NORM + l2**NORM
        return (rest + ring**NORM) ** (1 / NORM), (rest + (speed.early * ring) ** NORM) ** (1 / NORM)

    in_full, in_last = stage(w.full), stage(w.last)
    full_first = w.waves > 0
    saved = full_first * (in_full[0] - in_full[1]) + (1 - full_first) * (in_last[0] - in_last[1])
    stages = w.stages * (w.waves * in_full[0] + w.rest * in_last[0]) - w.first * saved
    stages = stages * (1 + speed.gather * w.gathers)
    late = (speed.late + speed.late_stage * w.first) * w.no_room**LATE
    first = late + speed.beside * w.beside + w.token_bytes / speed.tokens
    return speed.start + ends * (1 + more) + stages + first
