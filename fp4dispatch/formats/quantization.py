"""NVFP4 and FP8 in plain, vectorised torch: quantise, dequantise, validate. The oracle that every kernel is held to.

NVFP4: ``value = e2m1 * block_scale * global_scale``, one e4m3 block scale per 16 elements along K. The global scale
multiplies (it is ``amax / 2688``, ModelOpt's ``weight_scale_2``); compressed-tensors stores its reciprocal. FP8:
``value = q * scale``.

Everything but the two ``check_*`` functions is free of host synchronisation and safe in CUDA graph capture and under
``torch.compile(fullgraph=True)``. In eager mode the bits are the same on CPU and CUDA (tested on an H200): divisors are
tensors, because CUDA multiplies by a rounded reciprocal where the divisor is a Python number. A compiler rounds
divisions its own way: Inductor on the H200 (torch 2.11) changed 0.13 % of the bytes of a random bfloat16 matrix.

Where public implementations differ, this one follows ModelOpt's weight export (0.47, ``NVFP4QTensor.quantize``),
byte for byte on the CPU:

* Block scale: ``amax_block / (6 * global_scale)``, clamped to [2^-9, 448], then rounded to e4m3. compressed-tensors
  (0.20) computes ``(2688 / amax) * (amax_block / 6)``, torchao (0.18) ``(amax_block / 6) / global_scale``: an ulp
  apart, which changes the e4m3 byte only where the quotient is within an ulp or two of a rounding boundary, and never
  where the global scale is a power of two. Given bfloat16 weights compressed-tensors rounds ``amax_block / 6`` to
  bfloat16 first and so differs more often. torchao's least block scale is 2^-6, compressed-tensors stores 0.125 where
  the scale rounds to zero, FlashInfer's Python reference (0.7.2) stores zero.
* All-zero block: scale 1.0 (compressed-tensors .125, torchao 2^-6, FlashInfer 0); it decodes to zero either way.
* Elements: ``x / (block_scale * global_scale)``, then round half to even, as compressed-tensors does; torchao and the
  FlashInfer kernels multiply by a reciprocal and may differ at a tie.

Non-finite input is loud and stays local. A block with a NaN or an Inf gets the scale NaN and decodes to 16 NaN; an
automatic global scale looks at finite elements only, so no other block changes. In FP8 the element alone becomes NaN.
A global scale or FP8 scale that is NaN, negative, zero or under 2^-116 gives NaN everywhere it is used.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fp4dispatch.errors import FormatError, InputError
from fp4dispatch.formats.checks import check_content, check_contiguous, check_float, check_matrix, check_tensor
from fp4dispatch.formats.e2m1 import E2M1_MAX, E2M1_VALUES, decode_e2m1, encode_e2m1, pack_e2m1, unpack_e2m1
from fp4dispatch.formats.sf_layout import expand_shards, from_128x4, round_up, to_128x4, zero_pad
from fp4dispatch.problem import NVFP4_BLOCK as NVFP4_BLOCK
from fp4dispatch.problem import SF_LAYOUTS, SfLayout

__all__ = [
    "E2M1_MAX",
    "E2M1_VALUES",
    "E4M3_MAX",
    "FP8_BLOCK",
    "FP8_SCALINGS",
    "NVFP4_BLOCK",
    "NVFP4_MAX",
    "FP8Scaling",
    "FP8Tensor",
    "NVFP4Tensor",
    "check_fp8",
    "check_fp8_meta",
    "check_nvfp4",
    "check_nvfp4_meta",
    "decode_e2m1",
    "encode_e2m1",
    "expand_shards",
    "fp8_dequantize",
    "fp8_quantize",
    "from_128x4",
    "nvfp4_dequantize",
    "nvfp4_global_scale",
    "nvfp4_quantize",
    "pack_e2m1",
    "round_up",
    "to_128x4",
    "unpack_e2m1",
    "zero_pad",
]

E4M3_MAX = 448.0
E4M3_MIN = 2.0**-9
"""Least positive e4m3 value, a subnormal."""
NVFP4_MAX = E2M1_MAX * E4M3_MAX
FP8_BLOCK = 128

_MIN_SCALE = 2.0**-116
"""Least f32 scale: times the least e4m3 and e2m1 values it is a normal f32, so flushing of denormals changes nothing,
and its reciprocal is finite."""

FP8Scaling = Literal["tensor", "row", "block128", "1x128"]
FP8_SCALINGS: tuple[FP8Scaling, ...] = get_args(FP8Scaling)


class NVFP4Tensor(NamedTuple):
    """A quantised matrix, logically [M, K].

    data: uint8 [M, K/2], contiguous, even element in the low nibble. sf: float8_e4m3fn, [M, K/16] (``linear``) or
    [pad128(M), pad4(K/16)] in 128x4 byte order. global_scale: f32 [].
    """

    data: Tensor
    sf: Tensor
    global_scale: Tensor


class FP8Tensor(NamedTuple):
    """A quantised matrix, logically [M, K].

    data: float8_e4m3fn [M, K], contiguous. scale: f32; ``tensor`` [], ``row`` [M], ``block128``
    [ceil(M/128), ceil(K/128)], ``1x128`` [M, ceil(K/128)].
    """

    data: Tensor
    scale: Tensor


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
    return _amax_scale(_finite_amax(x), NVFP4_MAX)


def nvfp4_quantize(x: Tensor, global_scale: Tensor | None = None, *, sf_layout: SfLayout = "linear") -> NVFP4Tensor:
    """Quantise a matrix to NVFP4. The module docstring defines the rounding and what becomes of NaN, Inf and zeros.

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
    check_matrix("nvfp4_quantize", x)
    _check_layout("nvfp4_quantize", sf_layout)
    if x.shape[1] % NVFP4_BLOCK:
        raise InputError(
            f"nvfp4_quantize: K={x.shape[1]} is not a multiple of {NVFP4_BLOCK}, so the last block is not full: "
            "pad x with zero_pad first"
        )
    if global_scale is None:
        global_scale = nvfp4_global_scale(x)
    check_tensor("nvfp4_quantize: global_scale", global_scale)
    if global_scale.dtype != torch.float32 or global_scale.numel() != 1 or global_scale.device != x.device:
        raise InputError(
            f"nvfp4_quantize: global_scale is {global_scale.dtype} {list(global_scale.shape)} on "
            f"{global_scale.device}; need torch.float32 with one element on {x.device}"
        )
    global_scale = global_scale.reshape(())
    blocks = x.float().reshape(x.shape[0], x.shape[1] // NVFP4_BLOCK, NVFP4_BLOCK)
    amax = blocks.abs().amax(dim=-1)
    raw = amax / (global_scale * E2M1_MAX)
    scale = raw.clamp(E4M3_MIN, E4M3_MAX).masked_fill(raw == 0, 1.0)
    usable = (amax < torch.inf) & (global_scale >= _MIN_SCALE)
    sf = scale.masked_fill(~usable, torch.nan).to(torch.float8_e4m3fn)
    codes = encode_e2m1(blocks / (sf.float() * global_scale).unsqueeze(-1))
    return NVFP4Tensor(pack_e2m1(codes.flatten(1)), to_128x4(sf) if sf_layout == "128x4" else sf, global_scale)


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
    _check_out_dtype("nvfp4_dequantize", dtype)
    rows, groups = check_nvfp4_meta("nvfp4_dequantize", data, sf, global_scale, sf_layout)
    linear = from_128x4(sf, rows, groups) if sf_layout == "128x4" else sf
    # All 256 bytes are decoded once and looked up: one gather in place of a dozen passes over [M, K].
    every_byte = torch.arange(256, device=data.device, dtype=torch.int32).to(torch.uint8)
    pairs = decode_e2m1(unpack_e2m1(every_byte.unsqueeze(-1)))
    values = pairs.index_select(0, data.reshape(-1).int()).view(rows, groups, NVFP4_BLOCK)
    values.mul_(linear.float().unsqueeze(-1)).mul_(global_scale.reshape(-1, 1, 1))
    return values.view(rows, groups * NVFP4_BLOCK).to(dtype)


def fp8_quantize(x: Tensor, scaling: FP8Scaling, scale: Tensor | None = None) -> FP8Tensor:
    """Quantise a matrix to e4m3: ``x / scale``, saturating at 448, round half to even.

    Parameters
    ----------
    x
        float32, bfloat16 or float16 [M, K]; any strides; ragged tails of a block are fine; M may be 0.
    scaling
        ``tensor``, ``row``, ``block128`` (weights) or ``1x128`` (activations that go with ``block128`` weights).
    scale
        f32, shaped as in :class:`FP8Tensor`, on the device of ``x``. None computes ``amax / 448`` over the finite
        elements of each scaled part: at least 2^-116, and 1.0 where all are zero.

    Raises
    ------
    InputError
        For another dtype, shape, device or scaling. No sync; safe to capture and to compile.

    Notes
    -----
    The same bytes as compressed-tensors in float32. Kernels that multiply by ``1 / scale`` may differ at ties.
    """
    check_matrix("fp8_quantize", x)
    parts = _Parts("fp8_quantize", x, scaling)
    if scale is not None:
        parts.check_scale(scale, x)
    tiled = parts.split(x.float())
    if scale is None:
        scale = _amax_scale(_finite_amax(tiled, dim=(1, 3)), E4M3_MAX).reshape(parts.scale_shape)
    divisor = scale.masked_fill(~(scale >= _MIN_SCALE), torch.nan)
    quotient = (tiled / parts.grid(divisor)).clamp(-E4M3_MAX, E4M3_MAX)
    quotient = quotient.masked_fill(~(tiled.abs() < torch.inf), torch.nan)
    return FP8Tensor(parts.join(quotient).to(torch.float8_e4m3fn), scale)


def fp8_dequantize(data: Tensor, scale: Tensor, scaling: FP8Scaling, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return ``data * scale`` [M, K] in ``dtype``, computed in f32; other arguments as in :class:`FP8Tensor`.

    ``dtype``: float32, bfloat16 or float16. ``scale`` multiplies, also the tensor that HF and DeepSeek checkpoints call
    ``weight_scale_inv``.

    Raises
    ------
    InputError
        For wrong dtypes or shapes, or tensors on several devices. No sync; safe to capture and to compile.
    """
    _check_out_dtype("fp8_dequantize", dtype)
    parts = check_fp8_meta("fp8_dequantize", data, scale, scaling)
    return parts.join(parts.split(data.float()) * parts.grid(scale)).to(dtype)


def check_nvfp4(
    data: Tensor, sf: Tensor, global_scale: Tensor, *, sf_layout: SfLayout = "linear", name: str = "tensor"
) -> None:
    """Validate stored NVFP4 data (weights, not activations): it synchronises, so call it outside capture.

    Parameters
    ----------
    data, sf, global_scale, sf_layout
        As in :func:`nvfp4_dequantize`; ``data`` and 128x4 scales contiguous.
    name
        What the message calls it, e.g. the tensor's name in its file.

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


def check_fp8(data: Tensor, scale: Tensor, scaling: FP8Scaling, *, name: str = "tensor") -> None:
    """Validate stored FP8 data (weights, not activations): it synchronises, so call it outside capture.

    Raises
    ------
    InputError
        For a wrong dtype, shape, device or stride; arguments as in :class:`FP8Tensor`.
    FormatError
        For NaN elements, or scales that are NaN, infinite or negative. Zero is allowed (a pruned row), but not as
        the only scale of a tensor.
    """
    check_fp8_meta(name, data, scale, scaling)
    check_contiguous(f"{name}: data", data)
    check_content(f"{name}: data", data, signed=True)
    least = scale > 0 if scaling == "tensor" else scale >= 0
    bad = int((~(least & (scale < torch.inf))).sum())
    if bad:
        need = "positive" if scaling == "tensor" else "at least 0"
        raise FormatError(
            f"{name}: {bad} of {scale.numel()} scales are not finite and {need} (range {scale.min().item()} to "
            f"{scale.max().item()}); need amax / 448 of what each scales: re-export the checkpoint"
        )


class _Parts:
    """How a scaling cuts [M, K] into parts with one scale each, as a [rows, bm, cols, bk] view of the padded matrix."""

    def __init__(self, what: str, x: Tensor, scaling: FP8Scaling) -> None:
        if scaling not in FP8_SCALINGS:
            raise InputError(
                f"{what}: scaling={scaling!r} is not known; use one of {', '.join(map(repr, FP8_SCALINGS))}"
            )
        self.what, self.scaling = what, scaling
        self.m, self.k = x.shape
        self.bm = {"tensor": self.m, "block128": FP8_BLOCK}.get(scaling, 1)
        self.bk = FP8_BLOCK if scaling in ("block128", "1x128") else self.k
        self.rows = 1 if scaling == "tensor" else -(-self.m // self.bm)
        self.cols = -(-self.k // self.bk)
        shapes = {"tensor": (), "row": (self.m,)}
        self.scale_shape: tuple[int, ...] = shapes.get(scaling, (self.rows, self.cols))

    def split(self, x: Tensor) -> Tensor:
        padded = zero_pad(x, self.rows * self.bm, self.cols * self.bk)
        return padded.reshape(self.rows, self.bm, self.cols, self.bk)

    def join(self, tiled: Tensor) -> Tensor:
        padded = tiled.reshape(self.rows * self.bm, self.cols * self.bk)
        return padded[: self.m, : self.k].contiguous()

    def grid(self, scale: Tensor) -> Tensor:
        return scale.reshape(self.rows, 1, self.cols, 1)

    def check_scale(self, scale: Tensor, x: Tensor) -> None:
        check_tensor(f"{self.what}: scale", scale)
        if scale.dtype != torch.float32 or tuple(scale.shape) != self.scale_shape or scale.device != x.device:
            raise InputError(
                f"{self.what}: scale is {scale.dtype} {list(scale.shape)} on {scale.device}; {self.scaling!r} scaling "
                f"of [{self.m}, {self.k}] needs torch.float32 {list(self.scale_shape)} on {x.device}: reshape or "
                "convert it, or name the scaling that the data really has"
            )


def _finite_amax(x: Tensor, dim: tuple[int, ...] = ()) -> Tensor:
    """Return the largest finite magnitude as f32; over everything where ``dim`` is empty. 0 for no elements."""
    magnitude = x.abs().nan_to_num(nan=0.0, posinf=0.0)
    if x.numel() == 0:
        shape = [size for axis, size in enumerate(x.shape) if axis not in dim] if dim else []
        return x.new_zeros(shape, dtype=torch.float32)
    return magnitude.amax(dim=dim).float()


def _amax_scale(amax: Tensor, target: float) -> Tensor:
    scale = (amax / torch.full_like(amax, target)).clamp(min=_MIN_SCALE)
    return scale.masked_fill(amax == 0, 1.0)


def _check_layout(what: str, sf_layout: str) -> None:
    if sf_layout not in SF_LAYOUTS:
        raise InputError(f"{what}: sf_layout={sf_layout!r} is not known; use one of {', '.join(map(repr, SF_LAYOUTS))}")


def _check_out_dtype(what: str, dtype: torch.dtype) -> None:
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise InputError(f"{what}: dtype={dtype}; need torch.float32, torch.bfloat16 or torch.float16")


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


def check_fp8_meta(what: str, data: Tensor, scale: Tensor, scaling: FP8Scaling) -> _Parts:
    """Check dtypes, shapes and devices without reading values; raise InputError, with ``what`` in front."""
    check_tensor(f"{what}: data", data)
    if data.dtype != torch.float8_e4m3fn or data.ndim != 2 or data.shape[1] == 0:
        raise InputError(f"{what}: data is {data.dtype} {list(data.shape)}; need torch.float8_e4m3fn [M, K] with K > 0")
    parts = _Parts(what, data, scaling)
    parts.check_scale(scale, data)
    return parts
