"""The launch model of the kernels for many tokens: which launch shape to use, and how long it should take. No torch.

``csrc/many_tokens/kernel.h`` runs with any launch shape that covers its tiles. :func:`best` predicts the clocks of each
shape that is worth considering and returns the fastest. A backend asks once per plan and passes the shape to the
kernel, which only checks that it covers all tiles.

The model has two inputs beside M, N and K. :class:`TileSpeed` describes a build; the ``*_tiles.toml`` files hold one
for each build. :class:`Gpu` describes a GPU: those of ``speeds.toml`` are fitted to random problems, the others to
older sweeps on an H200 (bench/notes/many-tokens.md).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from fp4dispatch.machine.gpu_models import GpuModel
from fp4dispatch.problem.integers import ceil_div

TILE_CLOCKS = 7800.0
"""Before the first stage and after the last; a second time only after a tile whose K is split."""
SPLIT_CLOCKS = 3100.0
"""Two barriers of a cluster, where K is split."""
SPLIT_BYTES = 32.0
"""Sums that a CTA reads from the other parts of K, in bytes per clock."""
SUM_BYTES, MARK_BYTES = 4, 64
"""Of a sum, and of the marks of a CTA, in the memory of an even launch."""
RASTER = 8
SPLITS = (1, 2, 3, 4, 8)
LARGEST_CLUSTER = 8
"""CTAs. Every GPU with clusters has this many."""
FEWEST_STAGES = 2
"""Of a part of K. A shorter part is mostly start and end."""
EVEN_SHARES = (1.0, 0.9, 0.8, 0.7)
"""Of the clusters that run at once, how many an even launch may have."""
FEWEST_EVEN_STAGES, MOST_EVEN_PARTS = 5, 8
"""Of a cluster's share, at least; of a tile, at most."""
EVEN_CLOCKS, EVEN_BYTES = 3200.0, 44.0
"""What an even launch costs beside its stages; bytes per clock at which a CTA reads sums of others (H200, fitted)."""
MOST_WAVES = 2
"""Of clusters that split a tile each. Where more are needed, whole tiles come first, or nothing is split."""
AGAIN = 0.5
"""Of :attr:`Gpu.tile_clocks`, what each wave of split tiles after the first costs."""
LONG_US = 64.0
"""Longer launches slow down (:attr:`Gpu.slowing`): microseconds."""


@dataclass(frozen=True)
class Gpu:
    """Facts of a GPU model.

    Parameters
    ----------
    sms
        Number of SMs.
    clock_mhz
        Clock under load; it turns clocks into microseconds.
    memory_bytes
        Bytes per clock from memory.
    l2_bytes
        Size of the L2 cache.
    usable
        CTAs that run at once in clusters of 1 to 8 CTAs, one per SM (``cudaOccupancyMaxActiveClusters``). A cluster
        stays within a group of 16 or 18 SMs, which not every size fills.
    tile_clocks, split_clocks
        What a launch and a split cost beside their stages (:data:`TILE_CLOCKS`, :data:`SPLIT_CLOCKS`).
    part_clocks
        What each part of a split beyond the second costs.
    late_clocks
        What a launch with FP8 activations costs, in proportion to its CTAs that find no room beside the launch before:
        they start when that and the quantiser have ended.
    token_clocks
        Clocks at the end of each tile, for each of its tokens.
    slowing, slowing_fp4
        Above :data:`LONG_US`, time grows by so much as a power: under load the clock sinks. With NVFP4 weights, which
        are dequantised, more.
    slowing_moved
        With FP8 weights, what that power grows by for each byte per clock that L2 sends to an SM: moving bytes takes
        power too, and CTAs that share activations or rows move fewer.
    """

    sms: int
    clock_mhz: float
    memory_bytes: float
    l2_bytes: int
    usable: tuple[int, ...]
    tile_clocks: float = TILE_CLOCKS
    split_clocks: float = SPLIT_CLOCKS
    token_clocks: float = 0.0
    part_clocks: float = 0.0
    late_clocks: float = 0.0
    slowing: float = 0.0
    slowing_fp4: float = 0.0
    slowing_moved: float = 0.0


H200 = Gpu(132, 1755.0, 2350.0, 60 << 20, (132, 132, 117, 120, 110, 102, 105, 120))


@functools.cache
def gpu_with(sms: int) -> Gpu:
    """Return the facts of a GPU with ``sms`` SMs: those of an H200, in proportion."""
    return replace(H200, sms=sms, usable=tuple(sms * ctas // H200.sms for ctas in H200.usable))


LOADED = 1755.0 / 1980.0
"""Clock under load over the highest clock, on an H200."""
REACHED = 2350.0 * 1755e6 / 4800e9
"""Memory bandwidth that weights reach over the published one, on an H200."""


@functools.cache
def gpu_of(model: GpuModel) -> Gpu:
    """Return the facts of a GPU model for predictions: bandwidth and clock reach the same share as on an H200."""
    clock = model.clock_mhz * LOADED
    memory = model.memory_gbs * 1e3 * REACHED / clock
    return replace(gpu_with(model.sms), clock_mhz=clock, memory_bytes=memory, l2_bytes=int(model.l2_mib * 2**20))


@dataclass(frozen=True)
class TileSpeed:
    """Tile of a build, and its speed.

    Parameters
    ----------
    tokens, rows
        The tile: tokens x rows of the weight.
    stage_k, weight_bytes
        k and weight bytes of a pipeline stage.
    ctas
        CTAs per SM.
    most_split
        Most parts of K.
    alone
        Clocks of a stage, at least, however few CTAs run.
    stage, pair, share
        Clocks of a stage on a full SM: of a CTA that shares nothing; if two CTAs of a cluster share activations; if
        they share rows of the weight. ``share`` is 0 where the kernel cannot share rows.
    cluster
        Clocks before CTAs that share activations or rows have started.
    x_bytes
        Of an activation.
    even
        Whether CTAs share out by stages what whole tiles leave: Stream-K (csrc/many_tokens/even.h). Builds, kernels and
        records name it ``even``.
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
    share: float = 0.0
    cluster: float = 0.0
    x_bytes: int = 1
    even: bool = False

    @property
    def fp4(self) -> bool:
        """Whether a weight takes less than a byte."""
        return self.weight_bytes < self.rows * self.stage_k


class LaunchShape(NamedTuple):
    """What a kernel for many tokens is launched with, in the order of its ``shape`` argument.

    ``multicast``: CTAs of a cluster that share activations (1, 2, 4). ``split``: parts of K (:data:`SPLITS`).
    ``raster``: token tiles that are done before the next rows. ``sharing``: CTAs of a cluster that share rows of the
    weight (1, 2). ``rounds``: whole tiles of each CTA before its cluster splits the K of one tile, or beside its share
    of what is left. ``clusters``: of the grid.
    """

    multicast: int
    split: int
    raster: int
    sharing: int
    rounds: int
    clusters: int

    @property
    def ctas(self) -> int:
        """CTAs of a cluster."""
        return self.multicast * self.sharing * self.split


class Prediction(NamedTuple):
    """A launch shape and the clocks that the model predicts for it."""

    shape: LaunchShape
    clocks: float

    def microseconds(self, gpu: Gpu) -> float:
        """Return the predicted time."""
        return self.clocks / gpu.clock_mhz


@functools.lru_cache(maxsize=4096)
def best(tile: TileSpeed, m: int, n: int, k: int, gpu: Gpu) -> Prediction:
    """Return the fastest launch shape for [m, k] activations by [n, k] weights.

    Raises
    ------
    ValueError
        If a size is below 1, and of an even build if nothing is left to share out.
    """
    if min(m, n, k) < 1:
        raise ValueError(f"M, N and K are {m}, {n} and {k}, needed at least 1 each")
    found = first(tile, m, n, k, gpu, 1)
    if not found:
        raise ValueError(f"[{m}, {k}] by [{n}, {k}]: an even launch finds nothing to share out; use another build")
    return found[0]


def first(tile: TileSpeed, m: int, n: int, k: int, gpu: Gpu, count: int) -> tuple[Prediction, ...]:
    """Return so many launch shapes, fastest first; as :func:`best`."""
    return every(tile, m, n, k, gpu)[:count]


def every(tile: TileSpeed, m: int, n: int, k: int, gpu: Gpu) -> tuple[Prediction, ...]:
    """Return all launch shapes that are worth considering, fastest first. Kept for each number of tiles of tokens."""
    return _every(tile, ceil_div(m, tile.tokens) * tile.tokens, n, k, gpu)


@functools.lru_cache(maxsize=1 << 14)
def _every(tile: TileSpeed, m: int, n: int, k: int, gpu: Gpu) -> tuple[Prediction, ...]:
    found = (Prediction(shape, clocks(tile, shape, m, n, k, gpu)) for shape in candidates(tile, m, n, k, gpu))
    return tuple(sorted(found, key=operator.attrgetter("clocks")))


def least_clocks(tile: TileSpeed, m: int, n: int, k: int, gpu: Gpu) -> float:
    """Return clocks that no launch of a build is predicted to stay below: as if stages filled all SMs evenly."""
    token_tiles = ceil_div(m, tile.tokens)
    stages = token_tiles * ceil_div(n, tile.rows) * ceil_div(k, tile.stage_k)
    on_sms = min(tile.stage, tile.pair, tile.share or tile.stage) / gpu.sms
    from_memory = tile.weight_bytes / min(token_tiles, RASTER) / gpu.memory_bytes
    return gpu.tile_clocks + stages * max(on_sms, from_memory)


def candidates(tile: TileSpeed, m: int, n: int, k: int, gpu: Gpu) -> Iterator[LaunchShape]:
    """Yield the shapes that :func:`best` compares, and that are worth a measurement.

    CTAs share activations or rows, never both: clusters of four do not fill the GPU. Split tiles come after whole ones,
    or in up to two waves.
    """
    together = [(1, 1)]
    if n > tile.rows:
        together.append((2, 1))
    if m > tile.tokens and tile.share > 0:
        together.append((1, 2))
    stages = ceil_div(k, tile.stage_k)
    for multicast, sharing in together:
        if tile.even:
            yield from _evenly(tile, LaunchShape(multicast, 1, RASTER, sharing, 0, 1), m, n, stages, gpu)
            continue
        for split in SPLITS:
            if split > 1 and (split > tile.most_split or stages < split * FEWEST_STAGES):
                break
            if multicast * sharing * split > LARGEST_CLUSTER:
                break
            shape = laid_out(tile, m, n, gpu, multicast=multicast, split=split, sharing=sharing)
            at_once = _slots(tile, multicast * sharing * split, gpu)
            if split == 1 or shape.rounds > 0 or shape.clusters <= MOST_WAVES * at_once:
                yield shape


def laid_out(
    tile: TileSpeed,
    m: int,
    n: int,
    gpu: Gpu,
    *,
    multicast: int = 1,
    split: int = 1,
    raster: int = RASTER,
    sharing: int = 1,
) -> LaunchShape:
    """Return a launch shape with the rounds and clusters that cover all tiles.

    If K is split, whole tiles come first where the clusters that run at once can do all the others in one wave. Else
    each cluster does one tile: the sums of a split tile use the shared memory of the pipeline.
    """
    count = _tiles(tile, multicast, sharing, m, n)
    at_once = _slots(tile, multicast * split * sharing, gpu)
    if split == 1:
        return LaunchShape(multicast, 1, raster, sharing, 0, min(count, at_once))
    rounds = count // (at_once * split)
    if rounds > 0 and count - rounds * at_once * split <= at_once:
        return LaunchShape(multicast, split, raster, sharing, rounds, at_once)
    return LaunchShape(multicast, split, raster, sharing, 0, count)


def _evenly(tile: TileSpeed, shape: LaunchShape, m: int, n: int, stages: int, gpu: Gpu) -> Iterator[LaunchShape]:
    """Yield the shapes that share out what whole tiles leave: on all clusters that run at once, and on fewer.

    Of a small problem on as many as find enough to do.
    """
    count, at_once = tiles(tile, shape, m, n), slots(tile, shape, gpu)
    busy = min(MOST_EVEN_PARTS * count, count * stages // FEWEST_EVEN_STAGES)
    for clusters in dict.fromkeys(min(max(round(at_once * share), 1), busy) for share in EVEN_SHARES):
        rounds, left = divmod(count, clusters) if clusters > 0 else (0, 0)
        shares_enough = left * stages >= FEWEST_EVEN_STAGES * clusters
        if left > 0 and shares_enough and clusters <= MOST_EVEN_PARTS * left:
            yield shape._replace(rounds=rounds, clusters=clusters)


def room_bytes(tile: TileSpeed, shape: LaunchShape) -> int:
    """Return the bytes of memory that a launch of an even build needs, for the sums and marks of its CTAs; else 0."""
    of_cta = tile.rows * tile.tokens * SUM_BYTES + MARK_BYTES
    return shape.clusters * shape.ctas * of_cta if tile.even else 0


def tiles(tile: TileSpeed, shape: LaunchShape, m: int, n: int) -> int:
    """Return how many tiles there are. CTAs that share activations or rows do one together."""
    return _tiles(tile, shape.multicast, shape.sharing, m, n)


def _tiles(tile: TileSpeed, multicast: int, sharing: int, m: int, n: int) -> int:
    return ceil_div(n, tile.rows * multicast) * ceil_div(m, tile.tokens * sharing)


def slots(tile: TileSpeed, shape: LaunchShape, gpu: Gpu) -> int:
    """Return how many clusters run at once."""
    return _slots(tile, shape.ctas, gpu)


def _slots(tile: TileSpeed, ctas: int, gpu: Gpu) -> int:
    return gpu.usable[ctas - 1] * tile.ctas // ctas or 1


def clocks(tile: TileSpeed, shape: LaunchShape, m: int, n: int, k: int, gpu: Gpu) -> float:
    """Return the predicted clocks of one launch shape."""
    found = _unslowed(tile, shape, m, n, k, gpu)
    if found <= LONG_US * gpu.clock_mhz:
        return found
    slowing = gpu.slowing_fp4 if tile.fp4 else gpu.slowing + gpu.slowing_moved * _moved(tile, shape)
    return found * float((found / (LONG_US * gpu.clock_mhz)) ** slowing)


def _moved(tile: TileSpeed, shape: LaunchShape) -> float:
    """Return the bytes per clock that an SM reads from L2."""
    x_bytes = tile.tokens * tile.stage_k * tile.x_bytes
    return (tile.weight_bytes / shape.sharing + x_bytes / shape.multicast) / tile.stage


def no_room(last: int, count: int, at_once: int) -> float:
    """Return the share of the first wave of a launch that finds no room beside the last wave of one like it.

    ``last``, ``count``: CTAs or clusters of the last wave and of all. ``at_once``: how many run at once.
    """
    return 1 - min((at_once - last) / min(count, at_once), 1.0)


def _unslowed(tile: TileSpeed, shape: LaunchShape, m: int, n: int, k: int, gpu: Gpu) -> float:
    multicast, split, raster, sharing, rounds, clusters = shape
    ctas = multicast * sharing * split
    count, at_once = _tiles(tile, multicast, sharing, m, n), _slots(tile, ctas, gpu)
    started = clusters if tile.even else count
    running = min(started, at_once) * ctas
    in_an_sm = min(max(running / gpu.sms, 1.0), float(tile.ctas))  # CTAs of one SM share all that it has
    own = tile.pair if multicast > 1 else tile.share if sharing > 1 else tile.stage
    readers = min(ceil_div(m, tile.tokens), raster)  # token tiles that read the same weights from L2
    stage = max(own * in_an_sm, tile.alone, running * tile.weight_bytes / readers / gpu.memory_bytes)
    start = gpu.tile_clocks + (tile.cluster if multicast * sharing > 1 else 0.0)
    if tile.x_bytes == 1:
        last = at_once if rounds and not tile.even else started % at_once or at_once
        start += gpu.late_clocks * no_room(last, started, at_once)
    stages = ceil_div(k, tile.stage_k)
    end = gpu.token_clocks * tile.tokens * in_an_sm
    whole = stages * stage + end  # a tile
    if tile.even:
        left = count - rounds * clusters
        share = ceil_div(left * stages, clusters)
        parts = min(clusters / left, stages / share)
        sums = EVEN_CLOCKS + parts * tile.rows * tile.tokens * SUM_BYTES / EVEN_BYTES
        return start + rounds * whole + share * stage + end + sums
    if split == 1:
        return start + ceil_div(count, at_once) * whole
    sums = gpu.split_clocks + gpu.part_clocks * (split - 2) + tile.rows * tile.tokens * SUM_BYTES / SPLIT_BYTES
    part = ceil_div(stages, split) * stage + sums
    waves = 1 if rounds else ceil_div(count, at_once)
    return start + rounds * whole + waves * part + (waves - 1) * AGAIN * gpu.tile_clocks
