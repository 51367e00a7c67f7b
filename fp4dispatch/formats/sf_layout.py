"""Padding, the 128x4 block-scale layout, and per-shard scales. Re-exported by :mod:`fp4dispatch.formats`.

The layout is the one of cuBLAS and of the Blackwell block-scaled MMA:
https://docs.nvidia.com/cuda/cublas/index.html#d-block-scaling-factors-layout
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4dispatch.errors import InputError
from fp4dispatch.problem.integers import round_up


def zero_pad(x: Tensor, rows: int, cols: int) -> Tensor:
    """Return ``x`` [m, k] as [rows, cols] with every added element zero; ``x`` itself if it already has that shape.

    Kernels read the padding. Uninitialised padding corrupts valid rows (vllm#48898), so this package always pads with
    this function. Any dtype; no sync; safe to capture.

    Raises
    ------
    InputError
        If ``x`` is not 2-D or is larger than the target.
    """
    if x.ndim != 2 or x.shape[0] > rows or x.shape[1] > cols:
        raise InputError(
            f"zero_pad: cannot pad {list(x.shape)} to [{rows}, {cols}]: need a 2-D tensor that is no larger than that"
        )
    if tuple(x.shape) == (rows, cols):
        return x
    if x.dtype.is_floating_point and x.element_size() == 1:  # few float8 operators exist; the zero byte is 0.0
        return zero_pad(x.view(torch.uint8), rows, cols).view(x.dtype)
    return F.pad(x, (0, cols - x.shape[1], 0, rows - x.shape[0]))


def to_128x4(sf: Tensor) -> Tensor:
    """Convert block scales from row-major to the 128x4 layout.

    Parameters
    ----------
    sf
        One-byte elements (float8_e4m3fn or uint8), [rows, cols], cols = K/16; any strides.

    Returns
    -------
    Tensor
        Same dtype, contiguous, [pad128(rows), pad4(cols)]. The shape gives the size only. The bytes are stored by
        tile, 512 bytes a tile, row blocks outermost: the scale of (r, c) is byte
        ``(r % 32) * 16 + (r % 128 // 32) * 4 + c % 4`` of tile ``(r // 128, c // 4)``. All padding is zero.

    Raises
    ------
    InputError
        If ``sf`` is not 2-D or its elements are wider than a byte. No sync; safe to capture and to compile.
    """
    _one_byte_2d("to_128x4", sf)
    rows, cols = round_up(sf.shape[0], 128), round_up(sf.shape[1], 4)
    padded = zero_pad(sf.view(torch.uint8), rows, cols).contiguous()
    tiles = padded.view(rows // 128, 4, 32, cols // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(rows, cols).view(sf.dtype)


def from_128x4(sf: Tensor, rows: int, cols: int) -> Tensor:
    """Convert block scales from the 128x4 layout to row-major [rows, cols]. Drops the padding.

    Parameters
    ----------
    sf
        As :func:`to_128x4` returns it, contiguous; [pad128(rows), pad4(cols)] or the same bytes flat.
    rows, cols
        Logical size; cols = K/16.

    Raises
    ------
    InputError
        If the byte count does not fit rows and cols. No sync; safe to capture and to compile.
    """
    _one_byte_2d("from_128x4", sf, flat=True)
    padded_rows, padded_cols = round_up(rows, 128), round_up(cols, 4)
    if tuple(sf.shape) not in ((padded_rows, padded_cols), (padded_rows * padded_cols,)) or not sf.is_contiguous():
        raise InputError(
            f"from_128x4: scales are {list(sf.shape)} with strides {list(sf.stride())}; {rows} rows of {cols} scales "
            f"need [{padded_rows}, {padded_cols}] (or the same bytes flat), contiguous: check that they really are "
            "in the 128x4 layout"
        )
    tiles = sf.view(torch.uint8).view(padded_rows // 128, padded_cols // 4, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(padded_rows, padded_cols)[:rows, :cols].contiguous().view(sf.dtype)


def expand_shards(values: Tensor, shard_rows: Sequence[int]) -> Tensor:
    """Give every row of a fused layer the scale of its own shard.

    Parameters
    ----------
    values
        f32 [S], one global scale (or alpha) per fused shard. ``[]`` counts as S = 1.
    shard_rows
        Rows of each shard.

    Returns
    -------
    Tensor
        f32 [N], N = sum(shard_rows): exact copies, never a maximum. No sync; safe to capture and to compile.

    Raises
    ------
    InputError
        If ``values`` is not float32, S differs from ``len(shard_rows)``, or a row count is negative.
    """
    values = values.reshape(1) if values.ndim == 0 else values
    if values.dtype != torch.float32 or tuple(values.shape) != (len(shard_rows),) or min(shard_rows, default=-1) < 0:
        raise InputError(
            f"expand_shards: {values.dtype} {list(values.shape)} for shard_rows={list(shard_rows)}; "
            f"need torch.float32 [{len(shard_rows)}], one value per shard, and at least one shard of 0 or more rows"
        )
    return torch.cat([values[i : i + 1].expand(rows) for i, rows in enumerate(shard_rows)])


def _one_byte_2d(what: str, sf: Tensor, *, flat: bool = False) -> None:
    if sf.element_size() != 1 or (sf.ndim != 2 and not (flat and sf.ndim == 1)):
        raise InputError(
            f"{what}: scales are {sf.dtype} {list(sf.shape)}; need float8_e4m3fn (or uint8) [rows, K/16]"
            + (" or flat" if flat else "")
        )
