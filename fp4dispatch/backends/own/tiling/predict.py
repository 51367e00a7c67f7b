"""Predicted times of our builds and of cuBLASLt, in one unit: what choices compare. No torch."""

from __future__ import annotations

from fp4dispatch.backends.own.tiling import few_tokens_model, launch_model
from fp4dispatch.backends.own.tiling.few_tokens import KERNELS, FewTokensShape
from fp4dispatch.backends.own.tiling.few_tokens_model import FewTokensPrediction
from fp4dispatch.backends.own.tiling.launch_model import TileSpeed
from fp4dispatch.backends.own.tiling.speeds import BLOCKS, Speeds
from fp4dispatch.problem import Problem

TOKENS_APART = 8
"""Tiles of kernels for few tokens hold a multiple of so many: within it, M changes no launch shape."""
UNFOLD = "w4_to_e4m3"
"""The kernel that writes NVFP4 weights out for cuBLASLt."""
LEAST_TILE, TILES_ABOVE = 32, 4
"""Tiles of over four times the tokens (of which a few count as 32) are never near the fastest."""


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
    m, n, k = problem.m, problem.n, problem.k
    if tile is not None:
        if tile.tokens > TILES_ABOVE * max(m, LEAST_TILE):
            return None
        gpu = speeds.many_tokens
        return launch_model.best(tile, m, n, k, gpu).microseconds(gpu) * speeds.builds.get(f"{kernel}/{build}", 1.0)
    if kernel == UNFOLD:
        return float(speeds.unfold.microseconds(n, k)) + cublaslt(problem, speeds)
    found = few_tokens(kernel, problem, speeds)
    return None if found is None else found.us


def few_tokens(kernel: str, problem: Problem, speeds: Speeds) -> FewTokensPrediction | None:
    """Return the best launch shape of a kernel for few tokens; None where the model does not cover it."""
    blocks = problem.scaling == "block128"
    speed = speeds.few_tokens.get(f"{kernel} {BLOCKS}" if blocks else kernel)
    if kernel not in KERNELS or speed is None:
        return None
    m = TOKENS_APART * -(-problem.m // TOKENS_APART)
    return few_tokens_model.best(kernel, speed, m, problem.n, problem.k, speeds.many_tokens.usable, blocks)


def few_tokens_shape(kernel: str, problem: Problem, speeds: Speeds) -> FewTokensShape | None:
    """Return the launch shape that a kernel for few tokens is given; None: it chooses itself."""
    found = few_tokens(kernel, problem, speeds)
    if found is None:
        return None
    own = speeds.few_tokens[f"{kernel} {BLOCKS}" if problem.scaling == "block128" else kernel].own
    return None if found.shape.tokens in own else found.shape


def quantiser(problem: Problem, speeds: Speeds, *, packed: bool = True) -> float:
    """Return the microseconds of quantising the activations of a problem, as our GEMMs or as cuBLASLt read them."""
    if problem.activation != "fp8":
        return 0.0
    kind = "plain_row" if not packed else "packed_block" if problem.scaling == "block128" else "packed_row"
    return float(speeds.quantisers[kind].microseconds(problem.m, problem.k))


def cublaslt(problem: Problem, speeds: Speeds) -> float:
    """Return the microseconds of cuBLASLt's FP8 GEMM with scales by row and column."""
    return speeds.cublaslt.microseconds(problem.m, problem.n, problem.k, speeds.many_tokens.sms)
