"""Launch configurations of our kernels: which are worth timing, and which timed one serves an M. No torch.

The launch models choose what ``tune`` times. A measurement is taken at some M and serves smaller ones too, down to the
next measurement. There a launch is laid out anew, and each measured time is scaled by what the models say of the two M,
so that tiles that a ragged M leaves empty count. A tile that fits the smaller M may not have been worth timing at the
larger one, so the launch that the models put first counts too.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from fp4dispatch.backends.own.tiling import launch_model, predict, search
from fp4dispatch.backends.own.tiling.few_tokens import KERNELS, MOST_TILES
from fp4dispatch.backends.own.tiling.launch_model import LaunchShape, TileSpeed
from fp4dispatch.backends.own.tiling.speeds import Speeds
from fp4dispatch.backends.own.tiling.tiles import speed_of
from fp4dispatch.problem import Problem
from fp4dispatch.problem.measurement import LaunchConfig

MOST = 8
"""Launches of a candidate that are timed. The fastest of so many is within 0.4 % of the fastest of all in the mean
(bench/notes/tuning.md)."""

UNTIMED = 0.05
"""A launch that was not timed runs where it is predicted to be faster by over this share than the timed ones. Without
it, what was timed at 192 tokens took 1.34 times as long as the best launch at 151 (bench/notes/tuning.md)."""


@dataclass(frozen=True, eq=False)
class Tuned:
    """The timed launches of one of our backends, in microseconds at ``m`` tokens, quantiser included; fastest first."""

    m: int
    times: tuple[tuple[LaunchConfig, float], ...]


class Source(Protocol):
    """Where timed launches are kept. The package that stores them comes after this one."""

    def find(self, backend: str, problem: Problem, gpu: int) -> Tuned | None:
        """Return those that serve a problem on a GPU of this machine; the same object until they change."""


_sources: list[Source] = []


def provide(source: Source) -> None:
    """Say where timed launches are kept."""
    _sources[:] = [source]


def tuned(backend: str, problem: Problem, gpu: int) -> Tuned | None:
    """Return the timed launches that serve a problem, activation resolved, on a GPU; None where there are none."""
    return _sources[0].find(backend, problem, gpu) if _sources else None


def has_shapes(kernel: str, build: str) -> bool:
    """Whether a build is launched in a shape that can be chosen."""
    return kernel in KERNELS or speed_of(kernel, build) is not None


def worth_timing(gemms: Iterable[tuple[str, str]], problem: Problem, speeds: Speeds) -> list[LaunchConfig]:
    """Return the launches of these builds that the models say are fastest, fastest first.

    Parameters
    ----------
    gemms
        Kernel and build of every GEMM that runs the problem.
    problem
        N and K padded as the kernels take them; the activation is resolved.
    speeds
        The constants of the GPU.
    """
    timed = [
        (us, i, launch)
        for i, gemm in enumerate(gemms)
        for launch in _launches(*gemm, problem, speeds)
        if (us := microseconds(launch, problem, speeds)) is not None
    ]
    return [launch for *_, launch in sorted(timed, key=lambda each: each[:2])[:MOST]]


def _launches(kernel: str, build: str, problem: Problem, speeds: Speeds) -> Iterable[LaunchConfig]:
    m, n, k = problem.m, problem.n, problem.k
    tile = speed_of(kernel, build)
    if tile is not None:
        for shape, _ in launch_model.every(tile, m, n, k, speeds.many_tokens):
            yield LaunchConfig(kernel, build, tuple(shape))
        return
    yield LaunchConfig(kernel, build)
    if kernel in KERNELS:
        for small in search.few_tokens_shapes(kernel, problem, speeds):
            yield LaunchConfig(kernel, build, tuple(small))


@functools.lru_cache(maxsize=search.KEPT)
def microseconds(launch: LaunchConfig, problem: Problem, speeds: Speeds) -> float | None:
    """Return the predicted time of a launch with its quantiser; None where the models do not cover it.

    A kernel for few tokens that chooses its own shape counts like its best one.
    """
    kernel, build = launch.kernel, launch.build.replace("fp16", "bf16")
    tile = speed_of(kernel, launch.build)
    if launch.shape is None:
        us = search.gemm(kernel, build, tile, problem, speeds)
    else:
        us = predict.launch(kernel, build, tile, launch.shape, problem, speeds)
    return None if us is None else us + predict.quantiser(problem, speeds, packed=launch.kernel != predict.UNFOLD)


def laid_out(launch: LaunchConfig, problem: Problem, gpu: launch_model.Gpu) -> LaunchConfig | None:
    """Return a launch that was measured at another M, for this one; None where it does not fit."""
    tile = speed_of(*launch.gemm)
    if tile is not None:
        return _many_tokens(launch, tile, problem, gpu)
    about = KERNELS.get(launch.kernel)
    if about is None or launch.shape is None:
        return launch if launch.shape is None else None
    most = min(MOST_TILES * launch.shape[0], about.most_tokens())
    fits = launch.shape[:4] in about.instances and problem.m <= most
    return launch if fits else None


def _many_tokens(launch: LaunchConfig, tile: TileSpeed, problem: Problem, gpu: launch_model.Gpu) -> LaunchConfig | None:
    if launch.shape is None or len(launch.shape) != len(LaunchShape._fields):
        return None
    m, n, k = problem.m, problem.n, problem.k
    old = LaunchShape(*launch.shape)
    alike = (
        shape
        for shape, _ in launch_model.every(tile, m, n, k, gpu)
        if (shape.multicast, shape.split, shape.sharing) == (old.multicast, old.split, old.sharing)
    )
    # An even build has several, on more or fewer CTAs.
    found = min(alike, key=lambda shape: abs(shape.clusters - old.clusters), default=None)
    return None if found is None else launch._replace(shape=tuple(found))


@functools.lru_cache(maxsize=search.KEPT)
def fastest(
    timed: Tuned, problem: Problem, gemms: tuple[tuple[str, str], ...], speeds: Speeds | None, gpu: launch_model.Gpu
) -> LaunchConfig | None:
    """Return the launch that is fastest for a problem by measured times; None where no timed launch fits it.

    At another M than theirs an untimed launch may be the fastest (:data:`UNTIMED`). Its time is predicted, times what
    the model is off by on this weight: the median of the timed launches.

    Parameters
    ----------
    timed
        As :func:`tuned` returns it. Times of bfloat16 serve float16 too.
    problem, gemms
        As of :func:`worth_timing`.
    speeds
        The constants of the GPU; without them the times at ``timed.m`` decide.
    gpu
        The facts with which launches are laid out.
    """
    found: list[tuple[float, int, LaunchConfig]] = []
    off: list[float] = []
    for i, (measured, us) in enumerate(timed.times):
        launch = laid_out(_for_dtype(measured, gemms), problem, gpu)
        if launch is None or launch.gemm not in gemms:
            continue
        then = now = None
        if speeds is not None and problem.m != timed.m:
            then = microseconds(measured, replace(problem, m=timed.m), speeds)
            now = microseconds(launch, problem, speeds)
        if then:
            off.append(us / then)
        found.append((us * now / then if now and then else us, i, launch))
    if not found:
        return None
    us, _, launch = min(found)
    first = None if speeds is None or not off else put_first(gemms, problem, speeds)
    if first is not None and first[0] * statistics.median(off) < (1 - UNTIMED) * us:
        return first[1]
    return launch


def best_shape(kernel: str, build: str, problem: Problem, speeds: Speeds) -> tuple[int, ...] | None:
    """Return the launch shape that the models say is fastest; None for a build that is given none, or has none."""
    if (tile := speed_of(kernel, build)) is not None:
        found = search.many_tokens(kernel, build.replace("fp16", "bf16"), tile, problem, speeds)
        if found is None:
            first = launch_model.first(tile, problem.m, problem.n, problem.k, speeds.many_tokens, 1)
            return tuple(first[0].shape) if first else None
        return tuple(found.shape)
    return search.few_tokens_shape(kernel, problem, speeds)


def put_first(gemms: Sequence[tuple[str, str]], problem: Problem, speeds: Speeds) -> tuple[float, LaunchConfig] | None:
    """Return the time and the launch that the models put first; None where they cover none."""
    asked = tuple((kernel, build.replace("fp16", "bf16"), speed_of(kernel, build)) for kernel, build in gemms)
    found = search.fastest(asked, problem, speeds)
    if found is None:
        return None
    kernel, build = gemms[found.at]
    launch = LaunchConfig(kernel, build, None if found.shape is None else tuple(found.shape))
    return found.us, launch


def _for_dtype(launch: LaunchConfig, gemms: Sequence[tuple[str, str]]) -> LaunchConfig:
    """Return a launch with the build of these, if the one that was measured is for the other 16-bit dtype."""
    if launch.gemm in gemms:
        return launch
    for old, new in (("bf16", "fp16"), ("fp16", "bf16")):
        build = launch.build.replace(old, new)
        if build != launch.build and (launch.kernel, build) in gemms:
            return launch._replace(build=build)
    return launch
