"""Which compiled kernel serves a problem: `*_tiles.toml`, checked against `csrc/kernels.toml`. No torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp4dispatch import strict_toml
from fp4dispatch.backends.own.tiling import launch_model, predict, search
from fp4dispatch.backends.own.tiling.launch_model import TileSpeed
from fp4dispatch.backends.own.tiling.search import Fastest
from fp4dispatch.backends.own.tiling.speeds import Speeds
from fp4dispatch.errors import FlagsError
from fp4dispatch.jit.catalog.manifest import Catalog, installed
from fp4dispatch.problem import ACTIVATIONS, OUT_DTYPES, SCALINGS, Problem
from fp4dispatch.problem.arch import Arch
from fp4dispatch.problem.integers import ceil_div

_REQUIRED = {"kernel": str, "scalings": list, "builds": dict}
_OPTIONAL = {"activations": list, "m_min": int, "m_max": int, "weights_max": int, "fill": dict, "speed": dict}
_OPTIONAL |= {"predicted": bool}
_SPEED, _SPEED_OPTIONAL = strict_toml.keys_of(TileSpeed)
_TABLES = ("cutlass", "w4", "w8")
_SERVES = {"w4_gemm": "nvfp4_gemm", "w4_weights": "nvfp4_gemm", "w8_gemm": "fp8_gemm"}
"""Op of the problems that a kernel is for, where the kernel's own op has another name."""


@dataclass(frozen=True)
class Tile:
    """One row: the builds of a kernel by output dtype, and the problems that they serve.

    ``activations``: formats that the kernel multiplies; empty if its op has only one. ``weights_max``: largest N * K.
    ``fill``: (tile_m, tile_n, SMs per tile, share of all SMs that must get work); None if any number of tiles will do.
    ``speed``: constants of the launch model, for kernels that are given their launch shape. ``predicted``: the row is
    chosen by its predicted time (:func:`tile_for`).
    """

    kernel: str
    op: str
    archs: frozenset[Arch]
    scalings: tuple[str, ...]
    activations: tuple[str, ...]
    builds: dict[str, str]
    m_min: int
    m_max: int | None
    weights_max: int | None
    fill: tuple[int, int, int, float] | None
    speed: TileSpeed | None = None
    predicted: bool = False

    @property
    def even(self) -> bool:
        """Whether its builds are even: they do not run every problem, and only times choose them."""
        return self.speed is not None and self.speed.even

    def runs(self, problem: Problem, arch: Arch | None) -> bool:
        """Whether the row's builds run a problem, fast or not."""
        if problem.op != self.op or arch not in self.archs or problem.scaling not in self.scalings:
            return False
        if self.activations and problem.activation not in self.activations:
            return False
        return problem.out_dtype in self.builds

    @functools.cached_property
    def gemm(self) -> search.Gemm:
        """What its times are predicted by."""
        return self.kernel, self.builds["bfloat16"], self.speed

    def fits(self, problem: Problem, arch: Arch | None, sms: int) -> bool:
        """Whether the row serves a problem on a GPU with ``sms`` SMs."""
        if not self.runs(problem, arch) or problem.m < self.m_min:
            return False
        if self.m_max is not None and problem.m > self.m_max:
            return False
        if self.weights_max is not None and problem.n * problem.k > self.weights_max:
            return False
        if self.fill is None:
            return True
        tile_m, tile_n, width, share = self.fill
        return ceil_div(problem.m, tile_m) * ceil_div(problem.n, tile_n) * width >= share * sms


@functools.cache
def tiles(table: str = "cutlass") -> tuple[Tile, ...]:
    """Return the packaged rows of ``<table>_tiles.toml``, in order."""
    return load(strict_toml.load(Path(__file__).with_name(f"{table}_tiles.toml")), installed(), table)


def load(data: dict[str, Any], catalog: Catalog, table: str = "cutlass") -> tuple[Tile, ...]:
    """Check the parsed file and return it typed.

    Raises
    ------
    FlagsError
        For a key that is missing, unknown or of the wrong type, for an unknown kernel, build, scaling, activation
        format or dtype, and for a row that is ``predicted`` and has no ``speed``.
    """
    strict_toml.check(f"{table}_tiles.toml", data, {"tile": list})
    return tuple(_tile(row, catalog, f"{table}_tiles.toml, {row.get('kernel')}") for row in data["tile"])


def _tile(row: dict[str, Any], catalog: Catalog, where: str) -> Tile:
    strict_toml.check(where, row, _REQUIRED, _OPTIONAL)
    strict_toml.check(f"{where} builds", row["builds"], {}, dict.fromkeys(OUT_DTYPES, str))
    if "speed" in row:
        strict_toml.check(f"{where} speed", row["speed"], _SPEED, _SPEED_OPTIONAL)
    elif row.get("predicted"):
        raise FlagsError(f"{where}: predicted = true needs a speed")
    if "fill" in row:
        required = {"tile_m": int, "tile_n": int, "sms": int}
        strict_toml.check(f"{where} fill", row["fill"], required, {"share": float})
    scalings = strict_toml.names(f"{where} scalings", row["scalings"], SCALINGS)
    activations: tuple[str, ...] = ()
    if "activations" in row:
        activations = strict_toml.names(f"{where} activations", row["activations"], ACTIVATIONS[1:])
    kernel = catalog.kernel(row["kernel"])
    for build in row["builds"].values():
        kernel.variant(build)
    archs = frozenset(arch for target in kernel.targets for arch in catalog.record(target).archs)
    fill = row.get("fill")
    size = (fill["tile_m"], fill["tile_n"], fill["sms"], fill.get("share", 1.0)) if fill else None
    return Tile(
        kernel.name,
        _SERVES.get(kernel.op, kernel.op),
        archs,
        scalings,
        activations,
        dict(row["builds"]),
        row.get("m_min", 0),
        row.get("m_max"),
        row.get("weights_max"),
        size,
        TileSpeed(**row["speed"]) if "speed" in row else None,
        row.get("predicted", False),
    )


def tile_for(
    problem: Problem,
    arch: Arch | None,
    sms: int,
    table: str = "cutlass",
    takes: Callable[[Tile], bool] = lambda _: True,
    speeds: Speeds | None = None,
) -> Tile | None:
    """Return the row of a table that serves a problem and that ``takes`` accepts; None if there is none.

    With the constants of the GPU: the row with the lowest predicted time, whatever the bounds of rows say. Without
    them, or where the models do not cover the row that comes first by the bounds: that row; if it is ``predicted``, the
    fastest of all fitting rows that are.
    """
    fitting = _fitting(problem, arch, sms, table, takes)
    if not fitting:
        return None
    found = None if speeds is None else _fastest(fitting[0], problem, arch, table, takes, speeds)
    return _by_bounds(fitting, problem, sms) if found is None else found[0]


def fastest_for(
    problem: Problem, arch: Arch | None, sms: int, table: str, takes: Callable[[Tile], bool], speeds: Speeds
) -> tuple[Tile, Fastest] | None:
    """Return the row that :func:`tile_for` chooses by predicted times, and its launch; None where bounds choose."""
    fitting = _fitting(problem, arch, sms, table, takes)
    return _fastest(fitting[0], problem, arch, table, takes, speeds) if fitting else None


def _fitting(problem: Problem, arch: Arch | None, sms: int, table: str, takes: Callable[[Tile], bool]) -> list[Tile]:
    return [tile for tile in tiles(table) if not tile.even and tile.fits(problem, arch, sms) and takes(tile)]


def _fastest(
    first: Tile, problem: Problem, arch: Arch | None, table: str, takes: Callable[[Tile], bool], speeds: Speeds
) -> tuple[Tile, Fastest] | None:
    if not predict.covers(*first.gemm, problem, speeds):
        return None
    running = [tile for tile in tiles(table) if tile.runs(problem, arch) and takes(tile)]
    found = search.fastest(tuple(tile.gemm for tile in running), problem, speeds)
    return None if found is None else (running[found.at], found)


def _by_bounds(fitting: Sequence[Tile], problem: Problem, sms: int) -> Tile:
    """Return the first row; if it is ``predicted``, the fastest of all that are, on an H200."""
    if not fitting[0].predicted:
        return fitting[0]
    m, n, k = problem.m, problem.n, problem.k

    def clocks(tile: Tile) -> int:
        assert tile.speed is not None
        return int(launch_model.best(tile.speed, m, n, k, launch_model.gpu_with(sms)).clocks)

    return min((tile for tile in fitting if tile.predicted), key=clocks)


def builds_for(problem: Problem, arch: Arch | None, table: str) -> tuple[tuple[str, str], ...]:
    """Return (kernel, build) of each row of a table that can run a problem, in order, whatever its M and N K.

    Every build is right for every M. The bounds of a row, which affect speed only, are not applied.
    """
    fitting = [tile for tile in tiles(table) if tile.runs(problem, arch)]
    return tuple(dict.fromkeys((tile.kernel, tile.builds[problem.out_dtype]) for tile in fitting))


@functools.cache
def speed_of(kernel: str, build: str) -> TileSpeed | None:
    """Return the constants of the launch model for a build; None if its kernel is not given a launch shape.

    Raises
    ------
    FlagsError
        If two rows disagree.
    """
    rows = [tile for table in _TABLES for tile in tiles(table) if tile.kernel == kernel]
    speeds = {tile.speed for tile in rows if build in tile.builds.values()}
    if len(speeds) > 1:
        raise FlagsError(f"{kernel} {build}: rows of the tile tables disagree about its speed")
    return next(iter(speeds), None)


def runs_all(kernel: str, build: str) -> bool:
    """Whether a build runs every problem of its rows: an even one needs something to share out."""
    speed = speed_of(kernel, build)
    return speed is None or not speed.even
