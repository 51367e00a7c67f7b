"""Activations by torch's operations: quantised, and SwiGLU. Shared by the backends."""

from __future__ import annotations

import torch

from fp4dispatch import formats
from fp4dispatch.backends.base import QuantizedActivation
from fp4dispatch.errors import InputError
from fp4dispatch.problem import Activation, Scaling, SfLayout


def quantize_activation(
    x: torch.Tensor,
    activation: Activation,
    scaling: Scaling,
    input_scale: torch.Tensor | None = None,
    sf_layout: SfLayout = "linear",
) -> QuantizedActivation:
    """Quantise ``x`` [M, K] as a layer with weights of that scaling multiplies it.

    Parameters
    ----------
    x
        float32, bfloat16 or float16 [M, K]; K a multiple of 16 for ``nvfp4``.
    activation
        ``nvfp4``: block scales under the global scale ``input_scale``, or under one from the amax of ``x``.
        ``fp8``: one scale per token (f32 [M]), or the static ``input_scale`` (f32 []); under ``block128`` weights one
        scale per token and 128 elements. Under NVFP4 weights ``input_scale`` belongs to 4-bit activations
        (amax / 2688) and FP8 activations are always scaled per token.
    scaling
        Scaling of the weights.
    input_scale
        Static activation scale, f32 [], or None.
    sf_layout
        Layout of the NVFP4 block scales.

    Raises
    ------
    InputError
        For any other activation format. No sync; safe to capture.
    """
    if activation == "nvfp4":
        return QuantizedActivation(*formats.nvfp4_quantize(x, input_scale, sf_layout=sf_layout))
    if activation != "fp8":
        raise InputError(f"activation={activation!r} is not a quantised format; use 'nvfp4' or 'fp8'")
    if scaling == "block128":
        return QuantizedActivation(*formats.fp8_quantize(x, "1x128"))
    if input_scale is None or scaling == "nvfp4":
        return QuantizedActivation(*formats.fp8_quantize(x, "row"))
    return QuantizedActivation(*formats.fp8_quantize(x, "tensor", input_scale.reshape(())))


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up`` of ``gate_up`` [..., 2K], the gate first: [..., K], contiguous, in its dtype.

    Two operations, each rounded. No sync; safe to capture.
    """
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up
