"""Checks on operands that the operators share."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fp4dispatch.errors import InputError
from fp4dispatch.formats.checks import check_tensor
from fp4dispatch.run.register import refuse_gradients
from fp4dispatch.run.routes import OUT_DTYPE


def check_types(
    what: str,
    operands: Mapping[str, object],
    bias: object = None,
    out_dtype: object = torch.bfloat16,
    texts: Mapping[str, object] | None = None,
) -> None:
    """Check types with our errors, before torch checks the schema with an error of its own."""
    for name, text in (texts or {}).items():
        if not isinstance(text, str):
            raise InputError(f"{what}: {name}={text!r}; need a str")
    for name, operand in operands.items():
        check_tensor(f"{what}: {name}", operand)
    if bias is not None:
        check_tensor(f"{what}: bias", bias)
    if not isinstance(out_dtype, torch.dtype):
        raise InputError(f"{what}: out_dtype={out_dtype!r}; need torch.bfloat16, torch.float16 or torch.float32")
    if not torch.compiler.is_dynamo_compiling():
        refuse_gradients((*operands.values(), bias))


def check_bias(what: str, bias: Tensor | None, n: int, device: torch.device) -> None:
    """Require None, or a float32, bfloat16 or float16 tensor [N] on ``device``. Reads no values."""
    if bias is not None and (tuple(bias.shape) != (n,) or bias.device != device or bias.dtype not in OUT_DTYPE):
        raise InputError(
            f"{what}: bias is {bias.dtype} {list(bias.shape)} on {bias.device}; need a floating-point [{n}] on {device}"
        )
