"""Predicted times of our builds and of cuBLASLt, in one unit: what choices compare. No torch."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fp4dispatch.backends.own.tiling import corrections, few_tokens_model, launch_model
from fp4dispatch.backends.own.tiling.corrections import Correction
from fp4dispatch.backends.own.tiling.few_tokens import KERNELS, FewTokensShape, candidates, whole
from fp4dispatch.backends.own.tiling.few_tokens_model import FewTokensPrediction, FewTokensSpeed
from fp4dispatch.backends.own.tiling.launch_model import LaunchShape, Prediction, TileSpeed
from fp4dispatch.backends.own.tiling.speeds import BLOCKS, Speeds
from fp4dispatch.problem import Problem

UNFOLD = "w4_to_e4m3"
"""The kernel that writes NVFP4 weights out for cuBLASLt."""
BLOCK_N, BLOCK_K = 16, 128
"""N and K of multiples of these are not padded for cuBLASLt under block scales."""
LEAST_TILE, TILES_ABOVE = 32, 4
"""Tiles of over four times the tokens (of which a few count as 32) are never near the fastest."""
FEW_CORRECTED, MANY_CORRECTED, EVEN_CORRECTED = 16, 8, 3
"""Launches of a build that are corrected: those that the formulas put first. With three times as many choices were as
good. Even builds have few, which differ in the number of CTAs alone."""


class ManyTokensPrediction(NamedTuple):
    """A launch shape of a kernel for many tokens, and its predicted microseconds."""

    shape: LaunchShape
    us: float


def gemm(kernel: str, build: str, tile: TileSpeed | None, problem: Problem, speeds: Speeds) -> float | None:
    """Return the microseconds of a GEMM in its best launch shape; None where the models do not cover it.

    Parameters
    ----------
    kernel, build, tile
        The kernel, its build for bfloat16 (that for float16 is as fast), and the tile, if it is one for many tokens.
    problem
        What to multiply.
    speeds
        The constants of the GPU.
    """
    return launch(kernel, build, tile, None, problem, speeds)


def launch(
    kernel: str, build: str, tile: TileSpeed | None, shape: Sequence[int] | None, problem: Problem, speeds: Speeds
) -> float | None:
    """Return the microseconds of a GEMM in one launch shape; None where the models do not cover it.

    Parameters
    ----------
    kernel, build, tile, problem, speeds
        As of :func:`gemm`.
    shape
        Numbers of the launch shape; None for the best one.
    """
    if tile is not None:
        if shape is None:
            found = many_tokens(kernel, build, tile, problem, speeds)
            return None if found is None else found.us
        if _too_wide(tile, problem) or _unmeasured(kernel, build, tile, speeds):
            return None
        many = LaunchShape(*shape)
        clocks = launch_model.clocks(tile, many, problem.m, problem.n, problem.k, speeds.many_tokens)
        return _many_tokens_us(kernel, build, tile, Prediction(many, clocks), problem, speeds)
    if kernel == UNFOLD:
        return float(speeds.unfold.microseconds(problem.n, problem.k)) + cublaslt(problem, speeds)
    if shape is None:
        best = few_tokens(kernel, problem, speeds)
        return None if best is None else best.us
    return _few_tokens_shape_us(kernel, FewTokensShape(*shape), problem, speeds)


def many_tokens(
    kernel: str, build: str, tile: TileSpeed, problem: Problem, speeds: Speeds
) -> ManyTokensPrediction | None:
    """Return the best launch shape of a build for many tokens; None for a tile that is far too wide.

    Of the :data:`MANY_CORRECTED` or :data:`EVEN_CORRECTED` that the formulas put first. None, too, for an even build
    that finds nothing to share out or that nobody has measured on the GPU.
    """
    if _too_wide(tile, problem) or _unmeasured(kernel, build, tile, speeds):
        return None
    count = EVEN_CORRECTED if tile.even else MANY_CORRECTED
    found = [
        ManyTokensPrediction(each.shape, _many_tokens_us(kernel, build, tile, each, problem, speeds))
        for each in launch_model.first(tile, problem.m, problem.n, problem.k, speeds.many_tokens, count)
    ]
    return min(found, key=lambda each: each.us) if found else None


def _unmeasured(kernel: str, build: str, tile: TileSpeed, speeds: Speeds) -> bool:
    return tile.even and f"{kernel}/{build}" not in speeds.builds


def _too_wide(tile: TileSpeed, problem: Problem) -> bool:
    return tile.tokens > TILES_ABOVE * max(problem.m, LEAST_TILE)


def _many_tokens_us(
    kernel: str, build: str, tile: TileSpeed, said: Prediction, problem: Problem, speeds: Speeds
) -> float:
    gpu = speeds.many_tokens
    us = said.microseconds(gpu) * speeds.builds.get(f"{kernel}/{build}", 1.0)
    found = speeds.corrections.get(corrections.group(kernel, build, blocks=problem.scaling == BLOCKS))
    if found is None:
        return us
    return us * found.factor(corrections.of_many_tokens(tile, said.shape, problem.m, problem.n, problem.k, gpu))


def _few_tokens_shape_us(kernel: str, shape: FewTokensShape, problem: Problem, speeds: Speeds) -> float | None:
    speed = _few_tokens_speed(kernel, problem, speeds)
    if speed is None or shape[:4] not in speed.of_tile:
        return None
    m, n, k, gpu, blocks = problem.m, problem.n, problem.k, speeds.many_tokens, problem.scaling == BLOCKS
    us = few_tokens_model.microseconds(kernel, speed, shape, whole(m), n, k, gpu.usable, blocks)
    found = _correction_of_few(kernel, problem, speeds)
    if found is None:
        return us
    return us * found.factor(corrections.of_few_tokens(kernel, shape, m, n, k, gpu, blocks=blocks))


def _correction_of_few(kernel: str, problem: Problem, speeds: Speeds) -> Correction | None:
    return speeds.corrections.get(corrections.group(kernel, "", blocks=problem.scaling == BLOCKS))


def few_tokens_shapes(kernel: str, problem: Problem, speeds: Speeds) -> Iterator[FewTokensShape]:
    """Yield the launch shapes of a kernel for few tokens that are worth timing.

    With every ring: times tell rings apart where the model does not (bench/notes/tuning.md).
    """
    speed = _few_tokens_speed(kernel, problem, speeds)
    if speed is None or problem.m > KERNELS[kernel].most_tokens():
        return
    blocks, sms = problem.scaling == BLOCKS, speeds.many_tokens.usable[0]
    for shape in candidates(kernel, whole(problem.m), problem.n, problem.k, sms, block_scales=blocks):
        if shape[:4] in speed.of_tile:
            yield shape


def _few_tokens_speed(kernel: str, problem: Problem, speeds: Speeds) -> FewTokensSpeed | None:
    if kernel not in KERNELS:
        return None
    return speeds.few_tokens.get(f"{kernel} {BLOCKS}" if problem.scaling == BLOCKS else kernel)


def few_tokens(kernel: str, problem: Problem, speeds: Speeds) -> FewTokensPrediction | None:
    """Return the best launch shape of a kernel for few tokens; None where the model does not cover it."""
    speed = _few_tokens_speed(kernel, problem, speeds)
    if speed is None:
        return None
    m, n, k, gpu, blocks = problem.m, problem.n, problem.k, speeds.many_tokens, problem.scaling == BLOCKS
    correction = _correction_of_few(kernel, problem, speeds)
    if correction is None:
        return few_tokens_model.best(kernel, speed, whole(m), n, k, gpu.usable, blocks)
    return _best_of_few(kernel, speed, correction, m, n, k, gpu, blocks)


@functools.lru_cache(maxsize=4096)
def _best_of_few(
    kernel: str,
    speed: FewTokensSpeed,
    correction: Correction,
    m: int,
    n: int,
    k: int,
    gpu: launch_model.Gpu,
    blocks: bool,
) -> FewTokensPrediction | None:
    """Return the best of the launch shapes that the formulas put first."""
    if m > KERNELS[kernel].most_tokens():
        return None
    found = [
        FewTokensPrediction(
            each.shape,
            each.us * correction.factor(corrections.of_few_tokens(kernel, each.shape, m, n, k, gpu, blocks=blocks)),
        )
        for each in few_tokens_model.first(kernel, speed, whole(m), n, k, gpu.usable, blocks, FEW_CORRECTED)
    ]
    return min(found, key=lambda each: each.us, default=None)


def few_tokens_shape(kernel: str, problem: Problem, speeds: Speeds) -> FewTokensShape | None:
    """Return the launch shape that a kernel for few tokens is given; None: it chooses itself."""
    found = few_tokens(kernel, problem, speeds)
    return None if found is None else found.shape


def quantiser(problem: Problem, speeds: Speeds, *, packed: bool = True) -> float:
    """Return the microseconds that quantising activations adds to a GEMM of ours, or to cuBLASLt's (not ``packed``)."""
    if problem.activation != "fp8":
        return 0.0
    if not packed:
        return float(speeds.before_cublaslt.microseconds(problem.m, problem.k))
    kind = "w4_row" if problem.op == "nvfp4_gemm" else "w8_block" if problem.scaling == BLOCKS else "w8_row"
    return float(speeds.quantisers[kind].microseconds(problem.m, problem.k))


def cublaslt(problem: Problem, speeds: Speeds) -> float:
    """Return the microseconds of cuBLASLt's FP8 GEMM with scales by row and column."""
    m, n, k, gpu = problem.m, problem.n, problem.k, speeds.many_tokens
    us = speeds.cublaslt.microseconds(m, n, k, gpu.sms)
    found = speeds.corrections.get(corrections.CUBLASLT)
    return us if found is None else us * found.factor(corrections.of_cublaslt(m, n, k, gpu))


def cublaslt_block(problem: Problem, speeds: Speeds) -> float | None:
    """Return the microseconds of cuBLASLt's FP8 GEMM with block scales, its quantiser included.

    None where operands do not fit it as they are: what is padded or rounded after the GEMM costs more.
    """
    m, n, k = problem.m, problem.n, problem.k
    if problem.bias or problem.out_dtype != "bfloat16" or k % BLOCK_K or n % BLOCK_N:
        return None
    return float(speeds.cublaslt_block.microseconds(m, n, k, speeds.many_tokens.sms))
