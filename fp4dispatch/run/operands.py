"""Checks on operands that the operators share."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fp4dispatch.errors import InputError
from fp4dispatch.formats.checks import check_tensor


def check_types(
    what: str,
    operands: Mapping[str, object],
    bias: object = None,
    out_dtype: object = torch.bfloat16,
) -> None:
    """Check types with our errors, before torch checks the schema with an error of its own."""
    for name, operand in operands.items():
        check_tensor(f"{what}: {name}", operand)
    if bias is not None:
        check_tensor(f"{what}: bias", bias)
    if not isinstance(out_dtype, torch.dtype):
        raise InputError(f"{what}: out_dtype={out_dtype!r}; need torch.bfloat16, torch.float16 or torch.float32")
