"""The e2m1 element: encode, decode, pack. Re-exported by :mod:`fp4dispatch.formats`.

Codes 0..7 are 0 .5 1 1.5 2 3 4 6 and bit 3 is the sign (OCP Microscaling Formats v1.0, section 5.3.3:
https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf).

The code uses arithmetic on whole tensors, not a lookup table. A table must be copied to the device. That copy
synchronises, and CUDA refuses it during graph capture.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4dispatch.errors import InputError

E2M1_VALUES: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes by code; codes 8..15 are the same with a minus sign."""

E2M1_MAX = 6.0


def encode_e2m1(x: Tensor) -> Tensor:
    """Round to the nearest e2m1 value, ties to the even code, saturating at 6.

    Parameters
    ----------
    x
        Floating point, any shape and strides.

    Returns
    -------
    Tensor
        uint8 codes 0..15, shape of ``x``. Infinities saturate; NaN becomes +6, as ``cvt.rn.satfinite.e2m1x2`` does.
        -0.0 becomes code 0, but a negative number that rounds to zero becomes code 8.

    Notes
    -----
    Rounding and signs equal those of ModelOpt and compressed-tensors on the CPU, for every input. torchao and the
    hardware instruction differ for -0.0 only: they return code 8. FlashInfer's Python reference (0.7.2) rounds the
    ties .75, 1.75 and 3.5 towards zero, which neither its own kernels nor the other libraries do.

    No sync; safe to capture and to compile.
    """
    magnitude = x.float().abs().nan_to_num_(nan=E2M1_MAX).clamp_(max=E2M1_MAX)
    # The code is a concave function of the value, made of three lines: steps of .5 up to 2, of 1 up to 4, of 2 up to 6.
    # So the code is the minimum of the three. torch.round rounds ties to even, and the offsets are even.
    # In-place operations save memory traffic on the CPU.
    code = (magnitude * 2).round_()
    code = torch.minimum(code, magnitude.round().add_(2))
    code = torch.minimum(code, magnitude.mul_(0.5).round_().add_(4))
    return code.to(torch.uint8).bitwise_or_((x < 0).to(torch.uint8).bitwise_left_shift_(3))


def decode_e2m1(codes: Tensor) -> Tensor:
    """Return the float32 values of uint8 codes 0..15 (the high nibble is ignored), any shape; code 8 is -0.0.

    No sync; safe to capture and to compile.
    """
    code = (codes & 7).float()
    magnitude = torch.maximum(torch.maximum(code * 0.5, code - 2), code * 2 - 8)  # the three lines, inverted
    return torch.where(codes & 8 != 0, -magnitude, magnitude)


def pack_e2m1(codes: Tensor) -> Tensor:
    """Pack uint8 codes [..., K] into uint8 [..., K/2], even element in the low nibble.

    Raises
    ------
    InputError
        If the codes are not uint8 or K is odd.
    """
    if codes.dtype != torch.uint8 or codes.ndim == 0 or codes.shape[-1] % 2:
        raise InputError(
            f"pack_e2m1: codes are {codes.dtype} {list(codes.shape)}; need torch.uint8 with an even last dimension: "
            "pad K with zero_pad before quantising"
        )
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Unpack uint8 [..., K/2] into uint8 codes [..., K]; the inverse of :func:`pack_e2m1`.

    Raises
    ------
    InputError
        If ``packed`` is not uint8.
    """
    if packed.dtype != torch.uint8 or packed.ndim == 0:
        raise InputError(
            f"unpack_e2m1: packed data is {packed.dtype} {list(packed.shape)}; need torch.uint8 [..., K/2]: "
            "view other one-byte types with .view(torch.uint8)"
        )
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
