"""Operands as our kernels read them. Shared by the backends on :mod:`fp4dispatch.jit`."""

from __future__ import annotations

import torch
from torch import Tensor

from fp4dispatch import formats
from fp4dispatch.backends.base import LinearWeights
from fp4dispatch.formats import zero_pad


def aligned(x: Tensor, k: int) -> Tensor:
    """Return x [M, K] padded with zeros to ``k`` columns, rows contiguous and on 16 bytes; ``x`` where it is so."""
    x = zero_pad(x, x.shape[0], k)
    ok = x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and (x.stride(0) * x.element_size()) % 16 == 0
    return x if ok else x.clone(memory_format=torch.contiguous_format)


def per_column(w: LinearWeights, np: int) -> Tensor:
    """Return the global scale of each output column: f32 [np], padded with zeros, where shards differ; else f32 [1]."""
    assert w.global_scale is not None
    if len(w.shard_rows) <= 1:
        return w.global_scale.reshape(1)
    return zero_pad(formats.expand_shards(w.global_scale, w.shard_rows).reshape(1, -1), 1, np).reshape(np).contiguous()


def bias_row(bias: Tensor | None, dtype: torch.dtype, np: int) -> Tensor | None:
    """Return the bias [np] in the output's dtype, contiguous, padded with zeros; None for none."""
    if bias is None:
        return None
    return zero_pad(bias.to(dtype).reshape(1, -1), 1, np).reshape(-1).contiguous()


def direct(out: Tensor, np: int) -> bool:
    """Whether a kernel that stores ``np`` columns, 16 bytes at a time, may write into ``out`` [M, N] itself."""
    return out.shape[1] == np and out.is_contiguous() and out.data_ptr() % 16 == 0
