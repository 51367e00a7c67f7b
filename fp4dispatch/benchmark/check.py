"""Correct before fast: one output against the exact product, 128x128 tile by tile."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 128
_ROWS = 8 * TILE
"""Rows that are compared at a time: bounds the memory beside a large output."""


@dataclass(frozen=True)
class Worst:
    """The tile that is farthest off: its relative error (Frobenius norm; NaN counts as infinite) and its place."""

    error: float
    tile: tuple[int, int]


def worst_tile(got: Tensor, want: Tensor) -> Worst:
    """Compare an output [M, N] with the exact f32 [M, N]; synchronises.

    A tile that should be all zero has no scale of its own: anything else in it is an infinite error.
    """
    if got.shape != want.shape or got.numel() == 0:
        raise ValueError(f"need two equal, non-empty shapes, found {list(got.shape)} and {list(want.shape)}")
    worst = Worst(-1.0, (0, 0))
    for start in range(0, got.shape[0], _ROWS):
        some = slice(start, start + _ROWS)
        true = want[some].float()
        off, size = (_norms(x) for x in (got[some].float() - true, true))
        error = torch.where(size > 0, off / size, torch.where(off == 0, 0.0, math.inf))
        error = error.nan_to_num(nan=math.inf, posinf=math.inf)
        place = int(error.flatten().argmax())
        value = float(error.flatten()[place])
        if value > worst.error:
            i, j = divmod(place, error.shape[1])
            worst = Worst(value, (start // TILE + i, j))
    return worst


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return ``|got - want| / |want|`` over everything."""
    off = torch.zeros((), dtype=torch.float64, device=want.device)
    size = torch.zeros_like(off)
    for start in range(0, got.shape[0], _ROWS):
        some = slice(start, start + _ROWS)
        off += (got[some].float() - want[some]).square().sum(dtype=torch.float64)
        size += want[some].square().sum(dtype=torch.float64)
    return float((off / size).sqrt().nan_to_num(nan=math.inf))


def _norms(x: Tensor) -> Tensor:
    """Return the norm of each tile, f32 [ceil(M / 128), ceil(N / 128)]."""
    pad = (0, -x.shape[1] % TILE, 0, -x.shape[0] % TILE)
    padded = torch.nn.functional.pad(x, pad)
    tiles = padded.view(padded.shape[0] // TILE, TILE, padded.shape[1] // TILE, TILE)
    return tiles.square().sum(dim=(1, 3)).sqrt()
