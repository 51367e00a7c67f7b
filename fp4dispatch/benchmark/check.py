"""Compares an output with the exact product, per 128x128 tile."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fp4dispatch.trust.tilecheck import ROWS_AT_A_TIME, Worst, worst_tile

__all__ = ["Worst", "relative_error", "worst_tile"]


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return ``|got - want| / |want|`` (Frobenius norms)."""
    off = torch.zeros((), dtype=torch.float64, device=want.device)
    size = torch.zeros_like(off)
    for start in range(0, got.shape[0], ROWS_AT_A_TIME):
        some = slice(start, start + ROWS_AT_A_TIME)
        off += (got[some].float() - want[some]).square().sum(dtype=torch.float64)
        size += want[some].square().sum(dtype=torch.float64)
    return float((off / size).sqrt().nan_to_num(nan=math.inf))
