"""Which launch is predicted to be the fastest: of one build, and of many. No torch.

Formulas put launches in order (:mod:`~fp4dispatch.backends.own.tiling.launch_model`,
:mod:`~fp4dispatch.backends.own.tiling.few_tokens_model`). The first of them are corrected
(:mod:`~fp4dispatch.backends.own.tiling.corrections`), and of these the fastest is taken.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from fp4dispatch.backends.own.tiling import corrections, few_tokens_model, launch_model, predict
from fp4dispatch.backends.own.tiling.few_tokens import KERNELS, TOKENS_APART, FewTokensShape, candidates, whole
from fp4dispatch.backends.own.tiling.few_tokens_model import FewTokensPrediction
from fp4dispatch.backends.own.tiling.launch_model import LaunchShape, TileSpeed
from fp4dispatch.backends.own.tiling.speeds import BLOCKS, Speeds
from fp4dispatch.problem import Problem
from fp4dispatch.problem.integers import round_up

FEW_CORRECTED, MANY_CORRECTED, EVEN_CORRECTED = 16, 8, 3
"""Launches of a build that are corrected: those that the formulas put first. With three times as many choices were as
good. Even builds have few, which differ in the number of CTAs alone."""
MOST_EVEN_ROUNDS = 4
"""Whole tiles of each CTA before an even share, where nothing was timed: after more of them little is left to share,
and predictions that see a gain cost more than they save (bench/notes/many-tokens.md)."""
FULLY_CORRECTED, OF_ALL_CORRECTED = 8, 32
"""Where the fastest of many builds is looked for: launches that are corrected by all trees, and of all builds those
that are corrected by the first trees. On 1,000 random problems choices cost 1.00001 times what they cost with every
launch corrected, at most 1.007; with 6 and 24 of them 1.00011, at most 1.06."""
APART_FROM, WIDE_APART_FROM, WIDE_APART = 16, 256, 16
"""Numbers of tokens that get the same launch lie less than 8 apart above the first, less than 16 above the second
(:func:`alike`): that costs 0.01 to 0.03 % in the mean of 800 problems, and a choice is waited for."""
KEPT = 8192
"""Answers that are kept: of five weights and two activation formats, all that differ (:func:`alike`)."""

Gemm = tuple[str, str, TileSpeed | None]
"""Kernel, its build for bfloat16 (that for float16 is as fast), and the tile, if it is one for many tokens."""


class ManyTokensPrediction(NamedTuple):
    """A launch shape of a kernel for many tokens, and its predicted microseconds."""

    shape: LaunchShape
    us: float


class Fastest(NamedTuple):
    """The fastest of some builds: predicted microseconds with its quantiser, its position, its launch shape, if any."""

    us: float
    at: int
    shape: LaunchShape | FewTokensShape | None


@functools.lru_cache(maxsize=KEPT)
def fastest(gemms: tuple[Gemm, ...], problem: Problem, speeds: Speeds) -> Fastest | None:
    """Return the fastest launch of some builds; None where the models cover none.

    As the best of :func:`gemm`, in a fraction of the time: what runs a new number of tokens waits for it. Of all
    launches, the :data:`OF_ALL_CORRECTED` that the formulas put first are corrected. A build is looked at if it could
    have one of these.
    """
    final: list[Fastest] = []
    waiting: list[tuple[float, int]] = []
    for i, (kernel, build, tile) in enumerate(gemms):
        if tile is None and kernel not in KERNELS:
            us = gemm(kernel, build, tile, problem, speeds)
            final += [] if us is None else [Fastest(us + predict.quantiser(problem, speeds, packed=False), i, None)]
        elif predict.covers(kernel, build, tile, problem, speeds):
            waiting.append((_least_us(kernel, build, tile, problem, speeds), i))
    first: list[Fastest] = []
    for least, i in sorted(waiting):
        if len(first) == OF_ALL_CORRECTED and least >= first[-1].us:
            break
        of_build = (Fastest(us, i, shape) for us, shape in _put_first(*gemms[i], problem, speeds))
        first = sorted((*first, *of_build), key=_time)[:OF_ALL_CORRECTED]
    best = _best(first, gemms, problem, speeds)
    final += [] if best is None else [best._replace(us=best.us + predict.quantiser(problem, speeds))]
    return min(final, key=_time, default=None)


def _best(first: Sequence[Fastest], gemms: Sequence[Gemm], problem: Problem, speeds: Speeds) -> Fastest | None:
    """Return the fastest of some launches after correction; None of none.

    Only those that early trees put first are asked for all trees: all of them take several times as long.
    """

    def corrected(each: Fastest, *, early: bool) -> Fastest:
        kernel, build, tile = gemms[each.at]
        return each._replace(
            us=each.us * predict.correction(kernel, build, tile, each.shape, problem, speeds, early=early)
        )

    if len(first) > FULLY_CORRECTED:
        nearly = [(corrected(each, early=True).us, i) for i, each in enumerate(first)]
        first = [first[i] for _, i in sorted(nearly)[:FULLY_CORRECTED]]
    return min((corrected(each, early=False) for each in first), key=_time, default=None)


def alike(m: int) -> int:
    """Return the largest number of tokens for which the same launch is chosen.

    Tiles of kernels for many tokens hold a multiple of 16, those for few a multiple of 8, so there are as many of them.
    """
    apart = 1 if m <= APART_FROM else TOKENS_APART if m <= WIDE_APART_FROM else WIDE_APART
    return round_up(m, apart)


def representative(problem: Problem) -> Problem:
    """Return a problem with the largest number of tokens for which the same launch is chosen (:func:`alike`)."""
    return replace(problem, m=alike(problem.m))


def _time(each: Fastest) -> tuple[float, int]:
    return each.us, each.at


def _least_us(kernel: str, build: str, tile: TileSpeed | None, problem: Problem, speeds: Speeds) -> float:
    """Return microseconds that the formulas do not stay below for any launch of a build that they cover."""
    m, n, k, gpu = problem.m, problem.n, problem.k, speeds.many_tokens
    if tile is not None:
        least = launch_model.least_clocks(tile, m, n, k, gpu) / gpu.clock_mhz
        return least * predict.factor_of(kernel, build, speeds)
    speed = predict.few_tokens_speed(kernel, problem, speeds)
    return math.inf if speed is None else few_tokens_model.least(kernel, speed, whole(m), n, k, gpu.usable)


def _put_first(
    kernel: str, build: str, tile: TileSpeed | None, problem: Problem, speeds: Speeds
) -> list[tuple[float, LaunchShape | FewTokensShape]]:
    """Return the launches of a build that the formulas put first, with their microseconds, before correction."""
    m, n, k, gpu, blocks = problem.m, problem.n, problem.k, speeds.many_tokens, problem.scaling == BLOCKS
    if tile is not None:
        if tile.even:
            every = launch_model.every(tile, m, n, k, gpu)
            many = tuple([each for each in every if each.shape.rounds <= MOST_EVEN_ROUNDS][:EVEN_CORRECTED])
        else:
            many = launch_model.first(tile, m, n, k, gpu, MANY_CORRECTED)
        by = predict.factor_of(kernel, build, speeds)
        return [(each.microseconds(gpu) * by, each.shape) for each in many]
    speed = predict.few_tokens_speed(kernel, problem, speeds)
    if speed is None:
        return []
    if corrections.group(kernel, "", blocks=blocks) not in speeds.corrections:
        best = few_tokens_model.best(kernel, speed, whole(m), n, k, gpu.usable, blocks)
        return [] if best is None else [(best.us, best.shape)]
    few = few_tokens_model.first(kernel, speed, whole(m), n, k, gpu.usable, blocks, FEW_CORRECTED)
    return [(each.us, each.shape) for each in few]


def gemm(kernel: str, build: str, tile: TileSpeed | None, problem: Problem, speeds: Speeds) -> float | None:
    """Return the microseconds of a GEMM in its best launch shape; None where the models do not cover it.

    Arguments as of :func:`~fp4dispatch.backends.own.tiling.predict.launch`.
    """
    if tile is not None:
        many = many_tokens(kernel, build, tile, problem, speeds)
        return None if many is None else many.us
    if kernel == predict.UNFOLD:
        return predict.unfolded(problem, speeds)
    few = few_tokens(kernel, problem, speeds)
    return None if few is None else few.us


@functools.lru_cache(maxsize=KEPT)
def many_tokens(
    kernel: str, build: str, tile: TileSpeed, problem: Problem, speeds: Speeds
) -> ManyTokensPrediction | None:
    """Return the best launch shape of a build for many tokens; None for a tile that is far too wide.

    Of the :data:`MANY_CORRECTED` or :data:`EVEN_CORRECTED` that the formulas put first. None, too, for an even build
    that finds nothing to share out or that nobody has measured on the GPU.
    """
    if not predict.covers(kernel, build, tile, problem, speeds):
        return None
    first = [Fastest(us, 0, shape) for us, shape in _put_first(kernel, build, tile, problem, speeds)]
    best = _best(first, [(kernel, build, tile)], problem, speeds)
    if best is None or not isinstance(best.shape, LaunchShape):
        return None
    return ManyTokensPrediction(best.shape, best.us)


@functools.lru_cache(maxsize=KEPT)
def few_tokens(kernel: str, problem: Problem, speeds: Speeds) -> FewTokensPrediction | None:
    """Return the best launch shape of a kernel for few tokens; None where the model does not cover it."""
    if not predict.covers(kernel, "", None, problem, speeds):
        return None
    first = [Fastest(us, 0, shape) for us, shape in _put_first(kernel, "", None, problem, speeds)]
    best = _best(first, [(kernel, "", None)], problem, speeds)
    if best is None or not isinstance(best.shape, FewTokensShape):
        return None
    return FewTokensPrediction(best.shape, best.us)


def few_tokens_shape(kernel: str, problem: Problem, speeds: Speeds) -> FewTokensShape | None:
    """Return the launch shape that a kernel for few tokens is given; None: it chooses itself."""
    found = few_tokens(kernel, problem, speeds)
    return None if found is None else found.shape


def few_tokens_shapes(kernel: str, problem: Problem, speeds: Speeds) -> Iterator[FewTokensShape]:
    """Yield the launch shapes of a kernel for few tokens that are worth timing.

    With every ring: times tell rings apart where the model does not (bench/notes/tuning.md).
    """
    speed = predict.few_tokens_speed(kernel, problem, speeds)
    if speed is None or problem.m > KERNELS[kernel].most_tokens():
        return
    blocks, sms = problem.scaling == BLOCKS, speeds.many_tokens.usable[0]
    for shape in candidates(kernel, whole(problem.m), problem.n, problem.k, sms, block_scales=blocks):
        if shape[:4] in speed.of_tile:
            yield shape
