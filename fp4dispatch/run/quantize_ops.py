"""The operators ``nvfp4_quantize`` and ``fp8_quantize``."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from fp4dispatch import formats
from fp4dispatch.problem import SfLayout
from fp4dispatch.run.operands import check_types
from fp4dispatch.run.register import define


@overload
def nvfp4_quantize(x: Tensor, global_scale: None = None, sf_layout: SfLayout | None = None) -> formats.NVFP4Tensor: ...


@overload
def nvfp4_quantize(x: Tensor, global_scale: Tensor, sf_layout: SfLayout | None = None) -> tuple[Tensor, Tensor]: ...


def nvfp4_quantize(
    x: Tensor, global_scale: Tensor | None = None, sf_layout: SfLayout | None = None
) -> formats.NVFP4Tensor | tuple[Tensor, Tensor]:
    """Quantise ``x`` [M, K] with :func:`fp4dispatch.formats.nvfp4_quantize`, as one operator. Safe to capture.

    ``nvfp4_dequantize(*nvfp4_quantize(x))`` is ``x``, rounded to NVFP4.

    Parameters
    ----------
    x
        float32, bfloat16 or float16 [M, K], K a multiple of 16.
    global_scale
        f32 with one element. None: :func:`~fp4dispatch.nvfp4_global_scale` of ``x``, which is then returned too.
    sf_layout
        ``linear`` or ``128x4``. None: ``128x4``, which kernels read, with ``global_scale``; ``linear``, which
        :func:`~fp4dispatch.nvfp4_dequantize` reads, without.

    Returns
    -------
    tuple of Tensor
        Data uint8 [M, K/2], contiguous, even element in the low nibble; block scales float8_e4m3fn, [M, K/16] in
        ``linear`` or [pad128(M), pad4(K/16)] in ``128x4`` layout with zero padding. Without ``global_scale``: an
        :class:`~fp4dispatch.formats.NVFP4Tensor` of these and of the global scale, f32 [].

    Raises
    ------
    InputError
        For wrong operands.
    """
    operands = {"x": x} if global_scale is None else {"x": x, "global_scale": global_scale}
    check_types("nvfp4_quantize", operands, texts={} if sf_layout is None else {"sf_layout": sf_layout})
    if global_scale is None:
        found = formats.nvfp4_global_scale(x)
        data, sf = torch.ops.fp4dispatch.nvfp4_quantize.default(x, found, sf_layout or "linear")
        return formats.NVFP4Tensor(data, sf, found)
    data, sf = torch.ops.fp4dispatch.nvfp4_quantize.default(x, global_scale, sf_layout or "128x4")
    return data, sf


def _nvfp4_quantize_impl(x: Tensor, global_scale: Tensor, sf_layout: SfLayout) -> tuple[Tensor, Tensor]:
    q = formats.nvfp4_quantize(x, global_scale, sf_layout=sf_layout)
    return q.data, q.sf


def _nvfp4_quantize_fake(x: Tensor, global_scale: Tensor, sf_layout: SfLayout) -> tuple[Tensor, Tensor]:
    """Return empty outputs. The real function on fake tensors would add guards on M."""
    formats.check_nvfp4_input(x, global_scale, sf_layout)
    m, k = x.shape
    swizzled = sf_layout == "128x4"
    sf = ((m + 127) // 128 * 128, (k // 16 + 3) // 4 * 4) if swizzled else (m, k // 16)
    return x.new_empty(m, k // 2, dtype=torch.uint8), x.new_empty(sf, dtype=torch.float8_e4m3fn)


def fp8_quantize(x: Tensor, scaling: formats.FP8Scaling, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantise ``x`` [M, K] with :func:`fp4dispatch.formats.fp8_quantize`, as one operator. Safe to capture.

    Returns
    -------
    tuple of Tensor
        Data float8_e4m3fn [M, K], contiguous, and the f32 scale, shaped as in
        :class:`~fp4dispatch.formats.FP8Tensor`; a copy of ``scale`` if it was given.

    Raises
    ------
    InputError
        For wrong operands.
    """
    operands = {"x": x} if scale is None else {"x": x, "scale": scale}
    check_types("fp8_quantize", operands, texts={"scaling": scaling})
    data, out_scale = torch.ops.fp4dispatch.fp8_quantize.default(x, scaling, scale)
    return data, out_scale


def _fp8_quantize_impl(x: Tensor, scaling: formats.FP8Scaling, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    q = formats.fp8_quantize(x, scaling, scale)
    return q.data, q.scale if scale is None else scale.clone()


def _fp8_quantize_fake(x: Tensor, scaling: formats.FP8Scaling, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    formats.check_fp8_input(x, scaling, scale)
    m, k = x.shape
    blocks = ((m + 127) // 128, (k + 127) // 128)
    shape = {"tensor": (), "row": (m,), "block128": blocks, "1x128": (m, blocks[1])}[scaling]
    return x.new_empty(m, k, dtype=torch.float8_e4m3fn), x.new_empty(shape, dtype=torch.float32)


define(
    "nvfp4_quantize(Tensor x, Tensor global_scale, str sf_layout) -> (Tensor, Tensor)",
    _nvfp4_quantize_impl,
    _nvfp4_quantize_fake,
)

define(
    "fp8_quantize(Tensor x, str scaling, Tensor? scale) -> (Tensor, Tensor)",
    _fp8_quantize_impl,
    _fp8_quantize_fake,
)
