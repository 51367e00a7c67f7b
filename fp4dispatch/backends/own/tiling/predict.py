"""Predicted times of launches of our kernels, of quantisers and of cuBLASLt, in one unit: what choices compare.

No torch. :mod:`~fp4dispatch.backends.own.tiling.search` looks for the best launch.
"""

from __future__ import annotations

from collections.abc import Sequence

from fp4dispatch.backends.own.tiling import corrections, few_tokens_model, launch_model
from fp4dispatch.backends.own.tiling.few_tokens import KERNELS, FewTokensShape, whole
from fp4dispatch.backends.own.tiling.few_tokens_model import FewTokensSpeed
from fp4dispatch.backends.own.tiling.launch_model import LaunchShape, TileSpeed
from fp4dispatch.backends.own.tiling.speeds import BLOCKS, Speeds
from fp4dispatch.problem import Problem

UNFOLD = "w4_to_e4m3"
"""The kernel that writes NVFP4 weights out for cuBLASLt."""
BLOCK_N, BLOCK_K = 16, 128
"""N and K of multiples of these are not padded for cuBLASLt under block scales."""
LEAST_TILE, TILES_ABOVE = 32, 4
"""Tiles of over four times the tokens (of which a few count as 32) are never near the fastest."""


def launch(
    kernel: str, build: str, tile: TileSpeed | None, shape: Sequence[int], problem: Problem, speeds: Speeds
) -> float | None:
    """Return the microseconds of a GEMM in one launch shape; None where the models do not cover it.

    Parameters
    ----------
    kernel, build, tile
        The kernel, its build for bfloat16 (that for float16 is as fast), and the tile, if it is one for many tokens.
    shape
        Numbers of the launch shape. :func:`~fp4dispatch.backends.own.tiling.search.gemm` looks for the best one.
    problem
        What to multiply.
    speeds
        The constants of the GPU.
    """
    m, n, k, gpu, blocks = problem.m, problem.n, problem.k, speeds.many_tokens, problem.scaling == BLOCKS
    if tile is not None:
        if not covers(kernel, build, tile, problem, speeds):
            return None
        many = LaunchShape(*shape)
        us = launch_model.clocks(tile, many, m, n, k, gpu) / gpu.clock_mhz * factor_of(kernel, build, speeds)
        return us * correction(kernel, build, tile, many, problem, speeds)
    speed, few = few_tokens_speed(kernel, problem, speeds), FewTokensShape(*shape)
    if speed is None or few[:4] not in speed.of_tile:
        return None
    us = few_tokens_model.microseconds(kernel, speed, few, whole(m), n, k, gpu.usable, blocks)
    return us * correction(kernel, "", None, few, problem, speeds)


def covers(kernel: str, build: str, tile: TileSpeed | None, problem: Problem, speeds: Speeds) -> bool:
    """Whether the models may say something of a build; an even one may still find nothing to share out."""
    if tile is not None:
        return not _too_wide(tile, problem) and not _unmeasured(kernel, build, tile, speeds)
    if kernel in KERNELS:
        measured = few_tokens_speed(kernel, problem, speeds) is not None
        return measured and problem.m <= KERNELS[kernel].most_tokens()
    return kernel == UNFOLD


def _too_wide(tile: TileSpeed, problem: Problem) -> bool:
    return tile.tokens > TILES_ABOVE * max(problem.m, LEAST_TILE)


def _unmeasured(kernel: str, build: str, tile: TileSpeed, speeds: Speeds) -> bool:
    return tile.even and f"{kernel}/{build}" not in speeds.builds


def factor_of(kernel: str, build: str, speeds: Speeds) -> float:
    """Return how many times as long as the formulas say a build for many tokens takes."""
    return speeds.builds.get(f"{kernel}/{build}", 1.0)


def correction(
    kernel: str,
    build: str,
    tile: TileSpeed | None,
    shape: LaunchShape | FewTokensShape | None,
    problem: Problem,
    speeds: Speeds,
    *,
    early: bool = False,
) -> float:
    """Return the correction of a launch; ``early``: by the first trees alone."""
    m, n, k, gpu, blocks = problem.m, problem.n, problem.k, speeds.many_tokens, problem.scaling == BLOCKS
    found = speeds.corrections.get(corrections.group(kernel, build, blocks=blocks))
    if found is None:
        return 1.0
    found = found.early if early else found
    if isinstance(shape, LaunchShape) and tile is not None:
        return found.factor(corrections.of_many_tokens(tile, shape, m, n, k, gpu))
    assert isinstance(shape, FewTokensShape)
    return found.factor(corrections.of_few_tokens(kernel, shape, m, n, k, gpu, blocks=blocks))


def few_tokens_speed(kernel: str, problem: Problem, speeds: Speeds) -> FewTokensSpeed | None:
    """Return the constants of a kernel for few tokens; None for another one, and where it was not measured."""
    if kernel not in KERNELS:
        return None
    return speeds.few_tokens.get(f"{kernel} {BLOCKS}" if problem.scaling == BLOCKS else kernel)


def unfolded(problem: Problem, speeds: Speeds) -> float:
    """Return the microseconds of cuBLASLt's GEMM on NVFP4 weights, and of writing these out for it."""
    return float(speeds.unfold.microseconds(problem.n, problem.k)) + cublaslt(problem, speeds)


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
