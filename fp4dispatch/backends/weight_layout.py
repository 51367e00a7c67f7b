"""What backends share to lay out canonical weights: padded scales, block scales in 128x4, aligned memory."""

from __future__ import annotations

from torch import Tensor

from fp4dispatch import formats
from fp4dispatch.backends.base import LinearWeights
from fp4dispatch.formats import NVFP4_BLOCK, zero_pad


def block_scales_128x4(w: LinearWeights, np: int, kp: int) -> Tensor:
    """Return NVFP4 block scales of [np, kp] in 128x4, added ones zero; those of the layer itself where they fit."""
    sf = w.scale
    if w.sf_layout == "128x4":
        if (np, kp) == (w.n, w.k):
            return sf
        sf = formats.from_128x4(sf, w.n, w.k // NVFP4_BLOCK)
    return formats.to_128x4(zero_pad(sf, np, kp // NVFP4_BLOCK))


def global_scales(w: LinearWeights, np: int) -> Tensor:
    """Return the global scale of each output column, f32 [np], zero-padded, for fused shards; else f32 [1]."""
    assert w.global_scale is not None
    if len(w.shard_rows) <= 1:
        return w.global_scale.reshape(1)
    return row_scales(formats.expand_shards(w.global_scale, w.shard_rows), np)


def row_scales(scale: Tensor, np: int) -> Tensor:
    """Return the scales of rows, [N], as contiguous [np], added ones zero."""
    return zero_pad(scale.reshape(1, -1), 1, np).reshape(np).contiguous()


def on_bytes(x: Tensor, alignment: int) -> Tensor:
    """Return x contiguous, from an address that is a multiple of ``alignment`` bytes: itself, or a copy."""
    x = x.contiguous()
    return x if x.data_ptr() % alignment == 0 else x.clone()
