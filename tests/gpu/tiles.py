"""Per-tile comparison of a GEMM's output: a global measure accepts dozens of wrong tiles in a large output."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import pytest
import torch
from torch import Tensor

TILE = 128


class Checked(Protocol):
    """A problem with its output, which ``check`` holds to what it should be."""

    out: Tensor

    def check(self) -> None:
        """Raise AssertionError that counts the wrong tiles."""


def wrong_tiles(wrong: Tensor) -> tuple[int, int]:
    """Return (tiles with any True, all tiles) of a boolean [M, N]."""
    rows, columns = (-(-size // TILE) for size in wrong.shape)
    padded = wrong.new_zeros(rows * TILE, columns * TILE)
    padded[: wrong.shape[0], : wrong.shape[1]] = wrong
    return int(padded.view(rows, TILE, columns, TILE).amax(dim=(1, 3)).sum()), rows * columns


def beyond_rounding(d: Tensor, reference: Tensor, magnitude: Tensor) -> Tensor:
    """Where `d` differs from the exact `reference` by more than its type and FP8 accumulation explain.

    One rounding to the output type, and 2^-11 of the sum of magnitudes |a|@|b|: wgmma adds FP8 products with about 14
    bits before every 128 elements of K are promoted to fp32.
    """
    unit = torch.finfo(d.dtype).eps
    error = (d.double() - reference).abs()
    return ~(error <= unit * reference.abs() + 2.0**-11 * magnitude)  # NaN is beyond too


def by_tile(x: Tensor) -> Tensor:
    """Sums of a matrix over its tiles."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % TILE, 0, -x.shape[0] % TILE))
    return padded.unflatten(1, (-1, TILE)).unflatten(0, (-1, TILE)).sum(dim=(1, 3))


def norm_limits(exact: Tensor, dtype: torch.dtype, base: float) -> Tensor:
    """Largest relative error of the norm of each tile of a result that is rounded to ``dtype``.

    Rounding alone gives one value a relative error of up to eps / 2, and a full tile a norm of 0.22 eps. The square of
    a norm over n normal values scatters around that like one over n / 3 equal values: four standard deviations, about
    sqrt(3 / n) each, are allowed. Only below some 40 elements that is more than ``base``.
    """
    count = by_tile(torch.ones_like(exact))
    rounding = 0.22 * torch.finfo(dtype).eps * (1 + 4 * (3 / count).sqrt()).sqrt()
    return rounding.clamp(min=base)


def norm_errors(got: Tensor, exact: Tensor) -> Tensor:
    """Relative error of the norm of each tile; what is not finite is infinitely wrong."""
    off, size = by_tile((got.double() - exact).square()).sqrt(), by_tile(exact.square()).sqrt()
    return torch.where(off == 0, 0.0, off / size).nan_to_num(nan=math.inf, posinf=math.inf)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def sees_one_wrong_element(solved: Checked) -> None:
    """Spoil the last element of an output of three tiles; the check must find that tile."""
    solved.check()
    solved.out[-1, -1] += solved.out.abs().max()
    with pytest.raises(AssertionError, match="1 of 3 tiles wrong"):
        solved.check()


def check_replays(layers: Callable[[bool], None], buffers: list[Tensor], start: Tensor, times: int) -> None:
    """``layers(pdl)`` go from buffers[0] over buffers[1] back to it: a graph of them with PDL, against none."""
    buffers[0].copy_(start)
    layers(False)
    expected = buffers[0].clone()
    assert expected.isfinite().all()
    assert expected.any()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers(True)
    for _ in range(times):
        buffers[0].copy_(start)
        buffers[1].fill_(torch.nan)
        graph.replay()
        assert torch.equal(bits(buffers[0]), bits(expected))
