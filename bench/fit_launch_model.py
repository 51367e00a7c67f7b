"""Fit the launch model of the kernels for many tokens to samples of a GPU, and judge it on others. Needs scipy, no GPU.

Samples come from bench/launch_samples.py. Three models are judged, all on samples that none was fitted to: the one that
is in use, that one with clock, bandwidth and starts fitted to this GPU, and one whose builds are fitted too. For each:
the time of the launch that it chooses over the best one's, within a build and within a family, and its predictions over
the measured times.

    python -m bench.fit_launch_model --fit samples/launch-samples-seed-11-h100.json --judge samples/...seed-12-h100.json
"""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares

from bench.shared import commandline
from fp4dispatch.backends.own.tiling import launch_model
from fp4dispatch.backends.own.tiling.launch_model import Gpu, LaunchShape, TileSpeed
from fp4dispatch.backends.own.tiling.speeds import GPU_CONSTANTS
from fp4dispatch.backends.own.tiling.tiles import speed_of
from fp4dispatch.benchmark.reports import records
from fp4dispatch.benchmark.reports.standing import quantile

NEAR = 1.3
"""Launches that take longer than this many times their build's best weigh less: nobody will choose them."""
FAR_WEIGHT = 0.2
FIRST = {"token_clocks": 8.0, "part_clocks": 200.0, "late_clocks": 1000.0}
FIRST |= {"slowing": 0.05, "slowing_fp4": 0.05, "slowing_moved": 0.0005}
"""From where constants are fitted that are not known."""
FACTOR_PRIOR = 3.0
"""Weight of a factor of 1 for each build: else the clock and all factors would be free together."""
TILE_KEYS = ("alone", "stage", "pair", "share", "cluster")


class Point(NamedTuple):
    """One timed launch of a build with a launch model."""

    problem: tuple[int, int, int]
    family: str
    build: tuple[str, str]
    shape: LaunchShape
    us: float

    def predicted(self, model: Model) -> float:
        """Return the microseconds that a model predicts."""
        n, k, m = self.problem
        return launch_model.clocks(model.tiles[self.build], self.shape, m, n, k, model.gpu) / model.gpu.clock_mhz


def modelled(point: Point) -> bool:
    """Whether the model may choose a launch."""
    tile = speed_of(*point.build)
    assert tile is not None
    n, k, m = point.problem
    return point.shape in _candidates(tile, m, n, k)


@functools.lru_cache(maxsize=1 << 14)
def _candidates(tile: TileSpeed, m: int, n: int, k: int) -> frozenset[LaunchShape]:
    return frozenset(launch_model.candidates(tile, m, n, k, launch_model.H200))


@dataclass(frozen=True)
class Model:
    """The constants: of a GPU, and of each build."""

    gpu: Gpu
    tiles: dict[tuple[str, str], TileSpeed]


def points(records: Iterable[dict[str, Any]]) -> list[Point]:
    """Return the launches of samples that have a model."""
    found = []
    for record in records:
        for p in record["problems"]:
            for name, launches in p["launches"].items():
                family, _, build = name.partition(" ")
                kernel, _, variant = build.partition("/")
                if speed_of(kernel, variant) is None:
                    continue
                problem = p["n"], p["k"], p["m"]
                found += [Point(problem, family, (kernel, variant), LaunchShape(*s), us) for s, us in launches]
    return found


def in_use(gpu: Gpu, some: Sequence[Point]) -> Model:
    """Return the model that backends use, with the facts of a GPU."""
    tiles = {point.build: speed_of(*point.build) for point in some}
    return Model(gpu, {build: tile for build, tile in tiles.items() if tile is not None})


def fitted(start: Model, some: Sequence[Point], *, builds: bool) -> Model:
    """Return a model with the GPU's constants fitted, and with ``builds`` those of each build; positive ones only.

    Least squares of the logarithms, in which outliers count less. With builds, the clock stays: only its products with
    clocks of builds show. Without, each build may be slower or faster than it says by a factor, which is not returned:
    else the GPU's constants would make up for builds.
    """
    unknown = {key: value for key, value in FIRST.items() if not getattr(start.gpu, key)}
    start = replace(start, gpu=replace(start.gpu, **unknown))
    free: list[tuple[Any, str, float]] = [
        ("gpu", key, getattr(start.gpu, key)) for key in GPU_CONSTANTS if not (builds and key == "clock_mhz")
    ]
    if builds:
        for build, tile in start.tiles.items():
            free += [(build, key, getattr(tile, key)) for key in TILE_KEYS if getattr(tile, key) > 0]

    def at(x: np.ndarray) -> Model:
        changes: dict[Any, dict[str, float]] = {}
        for (where, key, first), change in zip(free, x, strict=True):
            changes.setdefault(where, {})[key] = first * math.exp(change)
        tiles = {build: replace(tile, **changes.get(build, {})) for build, tile in start.tiles.items()}
        return Model(replace(start.gpu, **changes.get("gpu", {})), tiles)

    some = [point for point in some if modelled(point)]
    weights = np.array(weights_of(some))
    names = [] if builds else sorted(start.tiles)
    factors = np.array([[point.build == name for name in names] for point in some], float)

    def residuals(x: np.ndarray) -> np.ndarray:
        model, own = at(x[: len(free)]), x[len(free) :]
        logs = np.array([math.log(point.predicted(model) / point.us) for point in some])
        return np.concatenate([weights * (logs + factors @ own), FACTOR_PRIOR * own])

    found = least_squares(residuals, np.zeros(len(free) + len(names)), loss="soft_l1", f_scale=0.05, max_nfev=60)
    return at(found.x[: len(free)])


def weights_of(some: Sequence[Point]) -> list[float]:
    """Return the weight of each point: less for those far from the best of their build and problem."""
    best: dict[Any, float] = {}
    for point in some:
        key = point.problem, point.build
        best[key] = min(point.us, best.get(key, math.inf))
    return [1.0 if point.us <= NEAR * best[point.problem, point.build] else FAR_WEIGHT for point in some]


def regrets(model: Model, some: Sequence[Point], *, within: str) -> list[float]:
    """Return the time of the launch that a model chooses over that of the best, which it may not be allowed to choose.

    One for each problem and build or family.
    """
    groups: dict[Any, list[Point]] = {}
    for point in some:
        groups.setdefault((point.problem, getattr(point, within), blocks(point)), []).append(point)
    found = []
    for group in groups.values():
        if allowed := [point for point in group if modelled(point)]:
            chosen = min(allowed, key=lambda point: point.predicted(model))
            found.append(chosen.us / min(point.us for point in group))
    return found


def blocks(point: Point) -> bool:
    """Whether a build is one for block scales, which no other build can replace."""
    return point.build[1].startswith("block_")


def verdict(name: str, model: Model, some: Sequence[Point]) -> str:
    """Return how good a model is, as text."""
    near = [point for point, w in zip(some, weights_of(some), strict=True) if w == 1 and modelled(point)]
    bias = [point.predicted(model) / point.us for point in near]
    low, mid, high = (quantile(bias, share) for share in (0.05, 0.5, 0.95))
    parts = [f"{name}: predicted / measured {mid:.3f}, 5 to 95 % {low:.3f} to {high:.3f}"]
    for within in ("build", "family"):
        found = regrets(model, some, within=within)
        parts.append(
            f"regret within a {within} mean {statistics.fmean(found):.4f}, 95 % {quantile(found, 0.95):.3f}, "
            f"worst {max(found):.3f} ({len(found)})"
        )
    return "; ".join(parts)


def constants(model: Model) -> str:
    """Return the constants as text, for the code and the tile tables."""
    gpu = ", ".join(f"{key} = {getattr(model.gpu, key):.4g}" for key in GPU_CONSTANTS)
    lines = [f"gpu: {gpu}"]
    for build, tile in sorted(model.tiles.items()):
        speed = ", ".join(f"{key} = {getattr(tile, key):.0f}" for key in TILE_KEYS if getattr(tile, key) > 0)
        lines.append(f"{'/'.join(build)}: {speed}")
    return "\n".join(lines)


def gpu_of(record: dict[str, Any]) -> Gpu:
    """Return the facts of the GPU of a record: of its SMs, as backends use them."""
    return launch_model.gpu_with(record["gpu"]["sms"])


def main(words: Sequence[str] | None = None) -> None:
    """Fit and judge; print everything."""
    parser = commandline.parser(__doc__)
    parser.add_argument("--fit", type=Path, nargs="+", required=True)
    parser.add_argument("--judge", type=Path, nargs="+", required=True)
    args = commandline.parse(parser, words)
    fit, judge = ([json.loads(records.unpacked(path)) for path in paths] for paths in (args.fit, args.judge))
    seeds = [{(record["facts"]["device"], record["seed"]) for record in some} for some in (fit, judge)]
    if seeds[0] & seeds[1] or len({device for device, _ in seeds[0] | seeds[1]}) != 1:
        parser.error(f"fit on {seeds[0]}, judge on {seeds[1]}: need other seeds of one GPU model")
    some, others = points(fit), points(judge)
    overlap = {point.problem for point in some}
    others = [point for point in others if point.problem not in overlap]
    start = in_use(gpu_of(fit[0]), [*some, *others])
    models = {"in use": start, "GPU fitted": fitted(start, some, builds=False)}
    models["builds fitted"] = fitted(models["GPU fitted"], some, builds=True)
    print(f"fitted to {len(some)} launches, judged on {len(others)} of {len({p.problem for p in others})} problems")
    for name, model in models.items():
        print(verdict(name, model, others))
    for name in ("GPU fitted", "builds fitted"):
        print(f"\n{name}\n{constants(models[name])}")


if __name__ == "__main__":
    main()
