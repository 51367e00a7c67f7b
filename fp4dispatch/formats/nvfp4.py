"""NVFP4 in plain, vectorised torch: quantise, dequantise, validate. The tests compare every kernel with it.

``value = e2m1 * block_scale * global_scale``. There is one e4m3 block scale per 16 elements along K. The global scale
multiplies: it is ``amax / 2688``, ModelOpt's ``weight_scale_2``. compressed-tensors stores its reciprocal.

:func:`check_nvfp4` synchronises. All other functions do not synchronise. They are safe in CUDA graph capture and under
``torch.compile(fullgraph=True)``. In eager mode CPU and CUDA give the same bits. For this, divisors are tensors: CUDA
multiplies by a rounded reciprocal where the divisor is a Python number. Inductor may round divisions differently.

Where public implementations differ, this one gives the bytes of ModelOpt's weight export on the CPU (0.47,
``NVFP4QTensor.quantize``):

* Block scale: ``amax_block / (6 * global_scale)``, clamped to [2^-9, 448], then rounded to e4m3. compressed-tensors
  (0.20) computes ``(2688 / amax) * (amax_block / 6)``, torchao (0.18) ``(amax_block / 6) / global_scale``. These
  differ by an f32 ulp, so the e4m3 byte differs only near a rounding boundary, and never where the global scale is a
  power of two. For bfloat16 weights compressed-tensors rounds ``amax_block / 6`` to bfloat16 first, so it differs more
  often. The smallest block scale of torchao is 2^-6. Where a scale rounds to zero, compressed-tensors stores 0.125 and
  FlashInfer's Python reference (0.7.2) stores zero.
* All-zero block: scale 1.0 (compressed-tensors .125, torchao 2^-6, FlashInfer 0). It decodes to zero in each case.
* Elements: ``x / (block_scale * global_scale)``, then round half to even, as compressed-tensors does. torchao and the
  FlashInfer kernels multiply by a reciprocal and may differ at a tie.

Non-finite input never becomes a finite number. A block with NaN or Inf gets the scale NaN and decodes to 16 NaN. An
automatic global scale uses finite elements only, so other blocks do not change. A global scale that is NaN, negative,
zero or below 2^-116 gives NaN in every element.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fp4dispatch.errors import FormatError, InputError
from fp4dispatch.formats.amax import E4M3_MAX, E4M3_MIN, MIN_SCALE, amax_scale, finite_amax
from fp4dispatch.formats.checks import (
    check_content,
    check_contiguous,
    check_float,
    check_matrix,
    check_out_dtype,
    check_tensor,
)
from fp4dispatch.formats.e2m1 import E2M1_MAX, decode_e2m1, encode_e2m1, pack_e2m1, unpack_e2m1
from fp4dispatch.formats.sf_layout import from_128x4, to_128x4
from fp4dispatch.problem import NVFP4_BLOCK, SF_LAYOUTS, SfLayout, one_of
from fp4dispatch.problem.integers import round_up

NVFP4_MAX = E2M1_MAX * E4M3_MAX


class NVFP4Tensor(NamedTuple):
    """A quantised matrix, logically [M, K].

    data: uint8 [M, K/2], contiguous, even element in the low nibble. sf: float8_e4m3fn, [M, K/16] (``linear``) or
    [pad128(M), pad4(K/16)] in 128x4 byte order. global_scale: f32 [].
    """

    data: Tensor
    sf: Tensor
    global_scale: Tensor


def nvfp4_global_scale(x: Tensor) -> Tensor:
    """Return the global scale ``amax / 2688`` of the finite elements of ``x``.

    Parameters
    ----------
    x
        float32, bfloat16 or float16, any shape.

    Returns
    -------
    Tensor
        Always f32 [] (flashinfer#3398: a bfloat16 global scale read as f32 makes all-zero outputs). At least 2^-116;
        1.0 where there is no finite non-zero element, as compressed-tensors has it (ModelOpt's would be 0, and
        dividing by it NaN).

    Raises
    ------
    InputError
        For any other dtype. No sync; safe to capture and to compile.
    """
    check_float("nvfp4_global_scale", x)
    return amax_scale(finite_amax(x), NVFP4_MAX)


def nvfp4_quantize(x: Tensor, global_scale: Tensor | None = None, *, sf_layout: SfLayout = "linear") -> NVFP4Tensor:
    """Quantise a matrix to NVFP4. The module docstring defines rounding, and the treatment of NaN, Inf and zeros.

    Parameters
    ----------
    x
        float32, bfloat16 or float16 [M, K], K a multiple of 16; any strides; M may be 0.
    global_scale
        f32 with one element, on the device of ``x``; None computes :func:`nvfp4_global_scale`. Elements beyond
        ``2688 * global_scale`` saturate.
    sf_layout
        ``linear`` or ``128x4`` (padding zero).

    Raises
    ------
    InputError
        For another dtype, shape or device. No sync; safe to capture and to compile.
    """
    check_nvfp4_input(x, global_scale, sf_layout)
    global_scale = nvfp4_global_scale(x) if global_scale is None else global_scale.reshape(())
    blocks = x.float().reshape(x.shape[0], x.shape[1] // NVFP4_BLOCK, NVFP4_BLOCK)
    amax = blocks.abs().amax(dim=-1)
    raw = amax / (global_scale * E2M1_MAX)
    scale = raw.clamp(E4M3_MIN, E4M3_MAX).masked_fill(raw == 0, 1.0)
    usable = (amax < torch.inf) & (global_scale >= MIN_SCALE)
    sf = scale.masked_fill(~usable, torch.nan).to(torch.float8_e4m3fn)
    codes = encode_e2m1(blocks / (sf.float() * global_scale).unsqueeze(-1))
    return NVFP4Tensor(pack_e2m1(codes.flatten(1)), to_128x4(sf) if sf_layout == "128x4" else sf, global_scale)


def check_nvfp4_input(x: Tensor, global_scale: Tensor | None, sf_layout: str) -> None:
    """Check the arguments of :func:`nvfp4_quantize`, which has the errors. Reads no values, and asks nothing of M."""
    check_matrix("nvfp4_quantize", x)
    _check_layout("nvfp4_quantize", sf_layout)
    if x.shape[1] % NVFP4_BLOCK:
        raise InputError(
            f"nvfp4_quantize: K={x.shape[1]} is not a multiple of {NVFP4_BLOCK}, so the last block is not full: "
            "pad x with zero_pad first"
        )
    if global_scale is None:
        return
    check_tensor("nvfp4_quantize: global_scale", global_scale)
    if global_scale.dtype != torch.float32 or global_scale.numel() != 1 or global_scale.device != x.device:
        raise InputError(
            f"nvfp4_quantize: global_scale is {global_scale.dtype} {list(global_scale.shape)} on "
            f"{global_scale.device}; need torch.float32 with one element on {x.device}"
        )


def nvfp4_dequantize(
    data: Tensor,
    sf: Tensor,
    global_scale: Tensor,
    *,
    sf_layout: SfLayout = "linear",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return ``(e2m1 * sf) * global_scale``, computed in f32: one rounding, then one to ``dtype``.

    ModelOpt and compressed-tensors round ``sf * global_scale`` first and so may be one f32 ulp off.

    Parameters
    ----------
    data, sf
        As in :class:`NVFP4Tensor`.
    global_scale
        f32, one element, or [M]: one per row, for shards fused into one layer (see :func:`expand_shards`).
    dtype
        float32, bfloat16 or float16.

    Returns
    -------
    Tensor
        [M, K], contiguous.

    Raises
    ------
    InputError
        For wrong dtypes or shapes, or tensors on several devices. No sync; safe to capture and to compile.
    """
    check_out_dtype("nvfp4_dequantize", dtype)
    rows, groups = check_nvfp4_meta("nvfp4_dequantize", data, sf, global_scale, sf_layout)
    linear = from_128x4(sf, rows, groups) if sf_layout == "128x4" else sf
    # Decode all 256 byte values once, then gather: one pass over [M, K] in place of a dozen.
    every_byte = torch.arange(256, device=data.device, dtype=torch.int32).to(torch.uint8)
    pairs = decode_e2m1(unpack_e2m1(every_byte.unsqueeze(-1)))
    values = pairs.index_select(0, data.reshape(-1).int()).view(rows, groups, NVFP4_BLOCK)
    values.mul_(linear.float().unsqueeze(-1)).mul_(global_scale.reshape(-1, 1, 1))
    return values.view(rows, groups * NVFP4_BLOCK).to(dtype)


def check_nvfp4(
    data: Tensor, sf: Tensor, global_scale: Tensor, *, sf_layout: SfLayout = "linear", name: str = "tensor"
) -> None:
    """Validate stored NVFP4 weights, not activations. Synchronises: call it outside of CUDA graph capture.

    Parameters
    ----------
    data, sf, global_scale, sf_layout
        As in :func:`nvfp4_dequantize`; ``data`` and 128x4 scales contiguous.
    name
        Name of the tensor for error messages, e.g. its name in the file.

    Raises
    ------
    InputError
        For a wrong dtype, shape, device or stride.
    FormatError
        For block scales that are NaN or carry a sign, a global scale that is not finite and positive, or 128x4
        padding that is not zero (kernels read it: vllm#48898).
    """
    rows, groups = check_nvfp4_meta(name, data, sf, global_scale, sf_layout)
    check_contiguous(f"{name}: data", data)
    check_content(f"{name}: block scales", sf)
    bad = int((~((global_scale > 0) & (global_scale < torch.inf))).sum())
    if bad:
        raise FormatError(
            f"{name}: {bad} of {global_scale.numel()} global scales are not finite and positive (range "
            f"{global_scale.min().item()} to {global_scale.max().item()}); need amax / 2688: re-export the checkpoint"
        )
    if sf_layout == "128x4":
        again = to_128x4(from_128x4(sf, rows, groups))
        stray = int((again.view(torch.uint8) != sf.view(torch.uint8).view(again.shape)).sum())
        if stray:
            raise FormatError(
                f"{name}: {stray} padding bytes of the 128x4 block scales are not zero; kernels read them, so they "
                f"must be: rebuild with to_128x4(from_128x4(sf, {rows}, {groups}))"
            )


def check_nvfp4_meta(what: str, data: Tensor, sf: Tensor, global_scale: Tensor, sf_layout: str) -> tuple[int, int]:
    """Check dtypes, shapes and devices without reading values, or raise InputError; return M and K/16."""
    _check_layout(what, sf_layout)
    for name, tensor in (("data", data), ("block scales", sf), ("global_scale", global_scale)):
        check_tensor(f"{what}: {name}", tensor)
    if data.dtype != torch.uint8 or data.ndim != 2 or data.shape[1] == 0 or data.shape[1] % (NVFP4_BLOCK // 2):
        raise InputError(
            f"{what}: data is {data.dtype} {list(data.shape)}; need torch.uint8 [M, K/2], two e2m1 codes a byte, "
            f"K a multiple of {NVFP4_BLOCK}: view other one-byte types with .view(torch.uint8)"
        )
    rows, groups = data.shape[0], data.shape[1] // (NVFP4_BLOCK // 2)
    need = (round_up(rows, 128), round_up(groups, 4)) if sf_layout == "128x4" else (rows, groups)
    if sf.dtype != torch.float8_e4m3fn or tuple(sf.shape) != need:
        raise InputError(
            f"{what}: block scales are {sf.dtype} {list(sf.shape)}; data [{rows}, {data.shape[1]}] needs "
            f"torch.float8_e4m3fn {list(need)} in the {sf_layout} layout: view uint8 scales with "
            ".view(torch.float8_e4m3fn), or name the layout that they really have"
        )
    if sf_layout == "128x4":
        check_contiguous(f"{what}: 128x4 block scales", sf)
    if global_scale.dtype != torch.float32 or (global_scale.numel() != 1 and tuple(global_scale.shape) != (rows,)):
        raise InputError(
            f"{what}: global_scale is {global_scale.dtype} {list(global_scale.shape)}; need torch.float32 with one "
            f"element, or [{rows}], one per row: expand_shards makes the latter from one per fused shard"
        )
    if not data.device == sf.device == global_scale.device:
        raise InputError(
            f"{what}: data is on {data.device}, block scales on {sf.device}, global_scale on {global_scale.device}; "
            "need one device: move them with .to(device)"
        )
    return rows, groups


def _check_layout(what: str, sf_layout: str) -> None:
    one_of(f"{what}: sf_layout", sf_layout, SF_LAYOUTS)
