"""What samples say beyond the formulas of the time models: a factor for each launch, and for cuBLASLt. No torch.

The formulas are right in the mean, and off by 5 to 6 % between launches of one problem: how a tile, a ring, a cluster
and the number of CTAs act together. Boosted trees (https://doi.org/10.1214/aos/1013203451) that ask the same question
of all launches at each level (https://arxiv.org/abs/1706.09516) are fitted to what is left, of all GPUs together.
bench/fit_corrections.py makes corrections.json; bench/notes/corrections.md says what it gains on other problems.
"""

from __future__ import annotations

import functools
import json
import math
import operator
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from fp4dispatch.backends.own.tiling import launch_model
from fp4dispatch.backends.own.tiling.few_tokens import KERNELS, ROWS, SM90, STAGE_K, FewTokensShape, whole
from fp4dispatch.backends.own.tiling.launch_model import LaunchShape, TileSpeed
from fp4dispatch.backends.own.tiling.other_models import LT_TILES
from fp4dispatch.errors import FlagsError
from fp4dispatch.problem.integers import ceil_div

FILE = Path(__file__).with_name("corrections.json")
DEPTH = 6
"""Questions of a tree."""
UNIT = 1e-4
"""Of a leaf, which is a natural logarithm."""
EARLY = 150
"""The first trees, which say most."""
MOST = 1.5
"""Times by which a correction may change a prediction, at most: problems may be unlike all samples."""

SIZES = ("m", "n", "k", "weights", "memory")
FEW = (
    *("tokens", "row_blocks", "groups", "units", "cluster", "stages", "resident"),
    *("ctas_by_sms", "ctas_by_slots", "last_by_slots", "stages_of_k", "rings", "even"),
    *("token_tiles", "tokens_filled", "rows_filled"),
    *SIZES,
)
"""What trees may ask of a launch for few tokens: its shape; CTAs of an SM; CTAs over SMs, CTAs and those of the last
wave over what runs at once; stages of a group, those over the ring's, and how even they are; tiles of tokens, how full
they are, how full the rows are; the problem, and bytes per clock of the GPU's memory."""
MANY = (
    *("tokens", "rows", "multicast", "split", "sharing", "rounds", "clusters"),
    *("token_tiles", "row_tiles", "waves", "last_wave", "parts_by_slots", "stages_of_k", "stages_of_part"),
    *("tokens_filled", "rows_filled"),
    *SIZES,
)
"""The same of a launch for many tokens."""
CUBLASLT = "cublaslt"
"""The group of cuBLASLt's FP8 GEMM, which says nothing of its launch."""
LT = (
    *(f"{what}_{t}x{n}" for t, n in LT_TILES for what in ("waves", "wave_filled", "tokens_filled", "rows_filled")),
    "stages_of_k",
    *SIZES,
)
"""What trees may ask of it: for each tile that it may take waves, and how full these, its tokens and its rows are; the
problem, as above."""


class Tree(NamedTuple):
    """At each level: is this feature of the launch above the bound? A leaf for each of the 2^DEPTH answers, in UNITs.

    The first answer is the highest bit of a leaf's number.
    """

    features: list[int]
    bounds: list[float]
    leaves: list[int]


class Correction:
    """The trees of one group of builds.

    All trees are asked at once: an integer holds a byte for each, the number of its leaf. A feature's value sets the
    same bits whatever the others are, so these are kept for each interval between its bounds. They are made when a
    factor is first asked for: a process uses a few of the groups.
    """

    def __init__(self, trees: Sequence[Tree]) -> None:
        self._trees = trees
        self._leaves = [tree.leaves for tree in trees]

    @functools.cached_property
    def _intervals(self) -> list[tuple[int, list[float], list[int]]]:
        """Features that trees ask for: the bounds of each, and the bits that its value sets between them."""
        asked: dict[int, dict[float, int]] = {}
        for at, tree in enumerate(self._trees):
            for level, (feature, bound) in enumerate(zip(tree.features, tree.bounds, strict=True)):
                bits = asked.setdefault(feature, {})
                bits[bound] = bits.get(bound, 0) | 1 << (8 * at + DEPTH - 1 - level)
        found = []
        for feature, bits in asked.items():
            bounds = sorted(bits)
            found.append((feature, bounds, list(accumulate((bits[each] for each in bounds), operator.or_, initial=0))))
        return found

    @functools.cached_property
    def early(self) -> Correction:
        """The :data:`EARLY` trees alone: a rough answer, in a fraction of the time."""
        return Correction(self._trees[:EARLY])

    def factor(self, row: Sequence[float]) -> float:
        """Return the factor for the predicted time of a launch with these features."""
        bits = 0
        for feature, bounds, set_bits in self._intervals:
            bits |= set_bits[bisect_left(bounds, row[feature])]
        numbers = bits.to_bytes(len(self._leaves), "little")
        total = sum(map(operator.getitem, self._leaves, numbers))
        return min(max(math.exp(UNIT * total), 1 / MOST), MOST)


def group(kernel: str, build: str, *, blocks: bool) -> str:
    """Return the name of the group of a build: those of a kernel, apart by activations and block scales."""
    if kernel in KERNELS:
        return f"{kernel} block128" if blocks else kernel
    return f"{kernel} {build.partition('bf16')[0].strip('_')}".strip()


def of_few_tokens(
    kernel: str, shape: FewTokensShape, m: int, n: int, k: int, gpu: launch_model.Gpu, *, blocks: bool
) -> tuple[float, ...]:
    """Return :data:`FEW` of a launch: ``m`` as it is, CTAs and tiles of tokens for the next multiple of 8.

    The formulas count them for that multiple, too.
    """
    tokens = whole(m)
    resident = KERNELS[kernel].resident(shape, SM90, block_scales=blocks)
    ctas, token_tiles = shape.ctas(tokens, n), ceil_div(tokens, shape.tokens)
    slots = gpu.usable[shape.cluster - 1] * resident
    all_stages, rows = ceil_div(k, STAGE_K), ROWS * shape.row_blocks
    stages = ceil_div(all_stages, shape.cluster * shape.groups)
    return (
        *(*shape[:6], resident),
        *(ctas / gpu.usable[0], ctas / slots, (ctas % slots or min(ctas, slots)) / slots),
        *(stages, stages / shape.stages, all_stages / (shape.cluster * shape.groups * stages)),
        *(token_tiles, tokens / (token_tiles * shape.tokens), n / (ceil_div(n, rows) * rows)),
        *(m, n, k, n * k, gpu.memory_bytes),
    )


def of_many_tokens(
    tile: TileSpeed, shape: LaunchShape, m: int, n: int, k: int, gpu: launch_model.Gpu
) -> tuple[float, ...]:
    """Return :data:`MANY` of a launch."""
    token_tiles, row_tiles, stages = ceil_div(m, tile.tokens), ceil_div(n, tile.rows), ceil_div(k, tile.stage_k)
    waves = token_tiles * row_tiles / (gpu.sms * tile.ctas)
    parts, part = waves * shape.split, stages / shape.split
    if tile.even:
        left = launch_model.tiles(tile, shape, m, n) - shape.rounds * shape.clusters
        parts, part = shape.clusters * shape.ctas / (gpu.sms * tile.ctas), left * stages / shape.clusters
    return (
        *(tile.tokens, tile.rows, shape.multicast, shape.split, shape.sharing, shape.rounds, shape.clusters),
        *(token_tiles, row_tiles, waves, waves % 1, parts, stages, part),
        *(m / (token_tiles * tile.tokens), n / (row_tiles * tile.rows)),
        *(m, n, k, n * k, gpu.memory_bytes),
    )


def of_cublaslt(m: int, n: int, k: int, gpu: launch_model.Gpu) -> tuple[float, ...]:
    """Return :data:`LT` of a problem."""
    found: list[float] = []
    for tokens, rows in LT_TILES:
        token_tiles, row_tiles = ceil_div(m, tokens), ceil_div(n, rows)
        waves = ceil_div(token_tiles * row_tiles, gpu.sms)
        found += (
            waves,
            token_tiles * row_tiles / (waves * gpu.sms),
            m / (token_tiles * tokens),
            n / (row_tiles * rows),
        )
    return (*found, ceil_div(k, STAGE_K), *(m, n, k, n * k, gpu.memory_bytes))


@functools.cache
def packaged() -> Mapping[str, Correction]:
    """Return the packaged corrections, by group."""
    return load(json.loads(FILE.read_text("utf-8")))


def load(data: Any) -> dict[str, Correction]:
    """Check the parsed file and return it typed.

    Raises
    ------
    FlagsError
        Where it was made for other features or another depth, and for a tree that is not whole.
    """
    made_for = (tuple(data["few"]), tuple(data["many"]), tuple(data[CUBLASLT]))
    if data["depth"] != DEPTH or made_for != (FEW, MANY, LT):
        raise FlagsError(f"{FILE.name} was made for other features than this code has: run bench/fit_corrections.py")
    return {name: Correction([_tree(name, each) for each in trees]) for name, trees in data["trees"].items()}


def _tree(name: str, row: Any) -> Tree:
    features, bounds, leaves = row
    names = FEW if name.partition(" ")[0] in KERNELS else LT if name == CUBLASLT else MANY
    if (len(features), len(bounds), len(leaves)) != (DEPTH, DEPTH, 1 << DEPTH):
        raise FlagsError(f"{FILE.name}, {name}: a tree needs {DEPTH} questions and {1 << DEPTH} leaves")
    if min(features) < 0 or max(features) >= len(names):
        raise FlagsError(f"{FILE.name}, {name}: a tree asks for a feature that is not there: {features}")
    return Tree(features, bounds, leaves)
