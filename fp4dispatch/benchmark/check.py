"""Compares an output with the exact product, per 128x128 tile."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fp4dispatch.trust.tilecheck import ROWS_AT_A_TIME, Worst, worst_tile

__all__ = ["QUANTISED_TILE_ERROR", "Worst", "relative_error", "worst_tile"]

QUANTISED_TILE_ERROR = {"fp8": 0.08, "nvfp4": 0.25}
"""Largest relative error of a 128x128 tile, by the format of the weights: what quantising random numbers costs."""


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return ``|got - want| / |want|`` (Frobenius norms)."""
    off = torch.zeros((), dtype=torch.float64, device=want.device)
    size = torch.zeros_like(off)
    for start in range(0, got.shape[0], ROWS_AT_A_TIME):
        some = slice(start, start + ROWS_AT_A_TIME)
        off += (got[some].float() - want[some]).square().sum(dtype=torch.float64)
        size += want[some].square().sum(dtype=torch.float64)
    return float((off / size).sqrt().nan_to_num(nan=math.inf))
