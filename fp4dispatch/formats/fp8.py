"""FP8 (e4m3) in plain, vectorised torch: quantise, dequantise, validate. The tests compare every kernel with it.

``value = q * scale``. :func:`check_fp8` synchronises. All other functions do not synchronise. They are safe in CUDA
graph capture and under ``torch.compile(fullgraph=True)``. In eager mode CPU and CUDA give the same bits.

An element that is NaN or Inf becomes NaN. Other elements do not change: an automatic scale uses finite elements only. A
scale that is NaN, negative, zero or below 2^-116 gives NaN in every element that it scales.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fp4dispatch.errors import FormatError, InputError
from fp4dispatch.formats.amax import E4M3_MAX, MIN_SCALE, amax_scale, finite_amax
from fp4dispatch.formats.checks import (
    check_content,
    check_contiguous,
    check_matrix,
    check_out_dtype,
    check_tensor,
)
from fp4dispatch.formats.sf_layout import zero_pad
from fp4dispatch.problem import one_of

FP8_BLOCK = 128


FP8Scaling = Literal["tensor", "row", "block128", "1x128"]


FP8_SCALINGS: tuple[FP8Scaling, ...] = get_args(FP8Scaling)


class FP8Tensor(NamedTuple):
    """A quantised matrix, logically [M, K].

    data: float8_e4m3fn [M, K], contiguous. scale: f32; ``tensor`` [], ``row`` [M], ``block128``
    [ceil(M/128), ceil(K/128)], ``1x128`` [M, ceil(K/128)].
    """

    data: Tensor
    scale: Tensor


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
    check_fp8_input(x, scaling, scale)
    parts = _Parts("fp8_quantize", x, scaling)
    tiled = parts.split(x.float())
    if scale is None:
        scale = amax_scale(finite_amax(tiled, dim=(1, 3)), E4M3_MAX).reshape(parts.scale_shape)
    divisor = scale.masked_fill(~(scale >= MIN_SCALE), torch.nan)
    quotient = (tiled / parts.grid(divisor)).clamp(-E4M3_MAX, E4M3_MAX)
    quotient = quotient.masked_fill(~(tiled.abs() < torch.inf), torch.nan)
    return FP8Tensor(parts.join(quotient).to(torch.float8_e4m3fn), scale)


def check_fp8_input(x: Tensor, scaling: FP8Scaling, scale: Tensor | None = None) -> None:
    """Check what :func:`fp8_quantize` gets. Reads no values; without a scale it asks nothing of M."""
    check_matrix("fp8_quantize", x)
    _check_scaling("fp8_quantize", scaling)
    if scale is not None:
        _Parts("fp8_quantize", x, scaling).check_scale(scale, x)


def fp8_dequantize(data: Tensor, scale: Tensor, scaling: FP8Scaling, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return ``data * scale`` [M, K] in ``dtype``, computed in f32; other arguments as in :class:`FP8Tensor`.

    ``dtype``: float32, bfloat16 or float16. ``scale`` multiplies, also the tensor that HF and DeepSeek checkpoints call
    ``weight_scale_inv``.

    Raises
    ------
    InputError
        For wrong dtypes or shapes, or tensors on several devices. No sync; safe to capture and to compile.
    """
    check_out_dtype("fp8_dequantize", dtype)
    parts = check_fp8_meta("fp8_dequantize", data, scale, scaling)
    return parts.join(parts.split(data.float()) * parts.grid(scale)).to(dtype)


def check_fp8(data: Tensor, scale: Tensor, scaling: FP8Scaling, *, name: str = "tensor") -> None:
    """Validate stored FP8 weights, not activations. Synchronises: call it outside of CUDA graph capture.

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


def check_fp8_meta(what: str, data: Tensor, scale: Tensor, scaling: FP8Scaling) -> _Parts:
    """Check dtypes, shapes and devices without reading values, or raise InputError; return the parts."""
    check_tensor(f"{what}: data", data)
    if data.dtype != torch.float8_e4m3fn or data.ndim != 2 or data.shape[1] == 0:
        raise InputError(f"{what}: data is {data.dtype} {list(data.shape)}; need torch.float8_e4m3fn [M, K] with K > 0")
    parts = _Parts(what, data, scaling)
    parts.check_scale(scale, data)
    return parts


def _check_scaling(what: str, scaling: str) -> None:
    one_of(f"{what}: scaling", scaling, FP8_SCALINGS)


class _Parts:
    """The parts of [M, K] that have one scale each, as a view [rows, bm, cols, bk] of the zero-padded matrix."""

    def __init__(self, what: str, x: Tensor, scaling: FP8Scaling) -> None:
        _check_scaling(what, scaling)
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
