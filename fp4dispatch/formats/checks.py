"""Checks on arguments that are shared."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fp4dispatch.errors import FormatError, InputError


def check_tensor(what: str, x: object) -> None:
    """Require a ``torch.Tensor`` with strided layout. Reads no values."""
    if not isinstance(x, Tensor):
        raise InputError(f"{what} is {'None' if x is None else f'a {type(x).__name__}'}; need a torch.Tensor")
    if x.layout is not torch.strided:
        raise InputError(f"{what} is {x.layout}; need torch.strided: call .to_dense()")


def check_module(what: str, model: object) -> None:
    """Require a ``torch.nn.Module``."""
    if not isinstance(model, nn.Module):
        raise InputError(f"{what} is a {type(model).__name__}; need a torch.nn.Module")


def check_float(what: str, x: Tensor) -> None:
    """Require a tensor of float32, bfloat16 or float16. Reads no values."""
    check_tensor(f"{what}: x", x)
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise InputError(
            f"{what}: x is {x.dtype}; need torch.float32, torch.bfloat16 or torch.float16: convert it first"
        )


def check_matrix(what: str, x: Tensor) -> None:
    """Require a float32, bfloat16 or float16 tensor [M, K] with K > 0. Reads no values."""
    check_float(what, x)
    if x.ndim != 2 or x.shape[1] == 0:
        raise InputError(f"{what}: x has shape {list(x.shape)}; need [M, K] with K > 0: flatten the leading dimensions")


def check_contiguous(what: str, x: Tensor) -> None:
    """Require a contiguous tensor. Reads no values."""
    check_tensor(what, x)
    if not x.is_contiguous():
        raise InputError(
            f"{what} has strides {list(x.stride())} for shape {list(x.shape)}; need row-major without gaps: "
            "call .contiguous()"
        )


def check_content(what: str, x: Tensor, *, signed: bool = False) -> None:
    """Refuse e4m3 tensors with NaN or, unless ``signed``, with a sign bit. Synchronises."""
    code = x.reshape(-1).view(torch.uint8)
    nan = int(((code & 127) == 127).sum())
    negative = 0 if signed else int((code > 127).sum())
    if nan or negative:
        raise FormatError(
            f"{what} hold {nan} NaN and {negative} negative values of {code.numel()}; need finite"
            f"{'' if signed else ', non-negative'} e4m3: the tensor was quantised from NaN or Inf, is not e4m3, or is "
            "damaged: re-export it"
        )


def check_out_dtype(what: str, dtype: torch.dtype) -> None:
    """Require float32, bfloat16 or float16."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise InputError(f"{what}: dtype={dtype}; need torch.float32, torch.bfloat16 or torch.float16")
