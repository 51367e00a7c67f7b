"""The kernels for many tokens: launches as the backends make them, kept sweeps, and sizes to test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fp4dispatch.backends.own.tiling import launch_model
from fp4dispatch.backends.own.tiling.launch_model import LaunchShape, Prediction, TileSpeed
from fp4dispatch.backends.own.tiling.tiles import speed_of
from fp4dispatch.benchmark.reports import records
from fp4dispatch.jit.catalog.manifest import installed

SWEEPS = {"a8": "many tokens a8", "a16": "many tokens a16"}
"""By the activations of a build of w4_gemm_sm90; w8_gemm_sm90 is with a8, where older builds of a16 are too."""
SAMPLES = "launch-samples-seed-41-h200.json.xz"
"""Of bench/launch_samples.py."""
RESULTS = Path(__file__).parents[1] / "bench" / "results"
Shape = tuple[int, ...]
TOKEN_TILES = 3
ONE_CLUSTER = LaunchShape(1, 1, 1, 1, 0, 1)
"""Covers any tiles."""
FUNCTIONS = {"w4_gemm_sm90": "w4_gemm", "w8_gemm_sm90": "w8_gemm"}
A16_BUILDS, W8_A16_BUILDS = (
    tuple(v for v in installed().kernel(kernel).variants if v.startswith("a16_bf16_")) for kernel in FUNCTIONS
)
"""Of w4_gemm_sm90 and of w8_gemm_sm90, from the narrowest tile to the widest."""


class Gemm:
    """A build of a kernel for many tokens. ``entry`` is its function; ``sms``: of the GPU that it is planned for."""

    def __init__(self, module: Any, kernel: str, build: str, sms: int) -> None:
        self.entry = getattr(module, FUNCTIONS[kernel])
        self.tile, self.gpu = tile_of(kernel, build), launch_model.gpu_with(sms)
        self._k_of = (lambda w: w.shape[-2] * 64) if kernel == "w4_gemm_sm90" else (lambda w: w.shape[-1])

    def plan(self, m: int, n: int, k: int) -> Prediction:
        """Return what the launch model chooses."""
        return launch_model.best(self.tile, m, n, k, self.gpu)

    def planned(self, *operands: Any) -> None:
        """Launch on (x, x_scale, w, alpha, bias, out, enable_pdl) in the shape that the model chooses."""
        w, out = operands[2], operands[5]
        m, n = out.shape
        shape = self.plan(m, n, self._k_of(w)).shape if m else ONE_CLUSTER
        self.entry(*operands[:6], list(shape), operands[6])

    def shaped(self, *operands: Any) -> None:
        """Launch on (x, x_scale, w, alpha, bias, out, shape, enable_pdl).

        ``shape``: multicast, split, raster and, where rows can be shared, sharing. Rounds and clusters follow.
        """
        multicast, split, raster, sharing = (*operands[6], 1)[:4]
        m, n = operands[5].shape
        shape = ONE_CLUSTER
        if m:
            shape = launch_model.laid_out(
                self.tile, m, n, self.gpu, multicast=multicast, split=split, raster=raster, sharing=sharing
            )
        self.entry(*operands[:6], list(shape), operands[7])


def check_covers(tile: TileSpeed, shape: Sequence[int], m: int, n: int) -> None:
    """Each tile is done once, whole or with K split, as a kernel for many tokens requires of its launch shape."""
    given = LaunchShape(*shape)
    count, whole = launch_model.tiles(tile, given, m, n), given.rounds * given.clusters * given.split
    if tile.even:
        assert 1 <= count - whole <= given.clusters
        return
    assert 1 <= given.clusters <= count
    if given.split == 1:
        assert given.rounds == 0  # a CTA goes on until no tile is left
    else:
        assert whole <= count <= whole + given.clusters


def problems(act: str = "a8") -> list[dict[str, Any]]:
    """Return all of one of ``SWEEPS``, as they are kept."""
    found: list[dict[str, Any]] = records.one(RESULTS, "sweep", SWEEPS[act])["problems"]
    return found


def times(build: str) -> Iterator[tuple[tuple[int, int, int], dict[Shape, float]]]:
    """Yield (M, N, K) and the microseconds of each launch shape of "kernel/build", where it was run in its sweep.

    A shape is multicast, split, raster and, where rows can be shared, sharing.
    """
    for problem in problems("a16" if "/a16" in build else "a8"):
        if build in problem["builds"]:
            shapes = {tuple(shape): us for shape, us in problem["builds"][build]}
            yield (problem["m"], problem["n"], problem["k"]), shapes


def samples(name: str = SAMPLES) -> list[dict[str, Any]]:
    """Return problems drawn at random, with the times of every build that is worth a try there; by default, for FP8."""
    found: list[dict[str, Any]] = records.read(RESULTS / name)["problems"]
    return found


def launches(problem: dict[str, Any]) -> dict[str, dict[Shape, float]]:
    """Return the microseconds of each launch shape of the builds of today, by "kernel/build", of one of ``samples``."""
    built = {f"{kernel}/{build}" for kernel in FUNCTIONS for build in installed().kernel(kernel).variants}
    named = ((name.partition(" ")[2], found) for name, found in problem["launches"].items())
    return {build: {tuple(shape): us for shape, us in found} for build, found in named if build in built}


def tile_of(kernel: str, build: str) -> TileSpeed:
    """Return what the tables say of a build."""
    found = speed_of(kernel, build)
    assert found is not None, f"{kernel} {build} is in no table"
    return found


def whole_tiles_first(tile: TileSpeed, shape: Sequence[int], sms: int, rounds: int, parts: str) -> tuple[int, int]:
    """Return M and N, both ragged: each CTA does ``rounds`` tiles, then clusters share out K of ``parts`` more.

    ``parts``: "few", or "many", which is nearly as many as clusters run at once.
    """
    multicast, split = shape[:2]
    clusters = launch_model.slots(tile, LaunchShape(multicast, split, 1, 1, 0, 1), launch_model.gpu_with(sms))
    whole = rounds * clusters * split
    row_tiles = (whole + clusters) // TOKEN_TILES if parts == "many" else whole // TOKEN_TILES + 1
    assert 0 < row_tiles * TOKEN_TILES - whole <= clusters
    return (TOKEN_TILES - 1) * tile.tokens + tile.tokens // 2 + 5, row_tiles * multicast * tile.rows - 40
