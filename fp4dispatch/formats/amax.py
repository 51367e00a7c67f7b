"""Scales from the largest magnitude (amax) of a tensor or of its blocks."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0


E4M3_MIN = 2.0**-9
"""Smallest positive e4m3 value, a subnormal."""


MIN_SCALE = 2.0**-116
"""Smallest f32 scale. Its product with the smallest e4m3 and e2m1 values is a normal f32, so flushing denormals changes
nothing. Its reciprocal is finite."""


def finite_amax(x: Tensor, dim: tuple[int, ...] = ()) -> Tensor:
    """Return the largest finite magnitude over ``dim`` (empty: over all) as f32. 0 where there are no elements."""
    magnitude = x.abs().nan_to_num(nan=0.0, posinf=0.0)
    if x.numel() == 0:
        shape = [size for axis, size in enumerate(x.shape) if axis not in dim] if dim else []
        return x.new_zeros(shape, dtype=torch.float32)
    return magnitude.amax(dim=dim).float()


def largest(x: Tensor) -> Tensor:
    """Return the largest magnitude as f32 []: NaN or Inf if there is one, 0 if ``x`` is empty. Needs no memory."""
    if x.numel() == 0:
        return x.new_zeros((), dtype=torch.float32)
    low, high = torch.aminmax(x.detach())
    return torch.maximum(-low, high).float()


def amax_scale(amax: Tensor, target: float) -> Tensor:
    """Return the f32 scale ``amax / target``: at least ``MIN_SCALE``, and 1.0 where ``amax`` is 0."""
    scale = (amax / torch.full_like(amax, target)).clamp(min=MIN_SCALE)
    return scale.masked_fill(amax == 0, 1.0)
