"""Quantisers of activations that take much of L2: they read them by loads of their own, and write the same bytes."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from fp4dispatch import jit
from fp4dispatch.backends.own import swiglu
from tests.gpu.sm90 import OUT_DTYPES, SM90, needs_sm90
from tests.gpu.test_swiglu import kernels_of
from tests.gpu.w4_packed import empty_packed, packer
from tests.gpu.w8_packed import block_scales

pytestmark = [pytest.mark.gpu, needs_sm90]

K = 4096
PACKERS = ("w4_quantize_row", "w4_quantize_tensor", "w8_quantize_row", "w8_quantize_tensor", "w8_quantize_block")
GATED = ("w4_swiglu_row", "w8_swiglu_row", "w8_swiglu_tensor", "w8_swiglu_block")
functions = pytest.mark.parametrize("function", [*PACKERS, *GATED])
ONCE = re.compile(r"(true|false)>\(")
"""The last argument of the template, in the name of a kernel."""


@functools.cache
def entry(function: str) -> Any:
    module = jit.load(swiglu.PACKED, "any", SM90).module if function in GATED else packer()
    return getattr(module, function)


def most_tokens(width: int) -> int:
    """The most tokens of so many elements that are read as any others: two fifths of L2."""
    return torch.cuda.get_device_properties(0).L2_cache_size * 2 // 5 // (2 * width)


def quantised(function: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a function writes, poisoned before."""
    m = x.shape[0]
    scale = block_scales(m, K) if "block" in function else torch.full((m,), torch.nan, device="cuda")
    if "tensor" in function:
        scale = torch.tensor([0.013], device="cuda")
    packed = empty_packed(m, K)
    entry(function)(x, packed, scale, False)
    return packed, scale


@functions
@pytest.mark.parametrize("dtype", OUT_DTYPES.values(), ids=str)
def test_many_tokens_are_quantised_as_few(function: str, dtype: torch.dtype) -> None:
    width = 2 * K if function in GATED else K
    m = most_tokens(width) // 8 * 8 + 13  # ragged
    x = torch.randn(m, width, dtype=dtype, device="cuda")
    x[5, 7], x[m - 1, width - 1] = torch.inf, torch.nan
    packed, scale = quantised(function, x)
    for first in range(0, m, 1024):
        some = slice(first, min(first + 1024, m))
        want, want_scale = quantised(function, x[some])
        assert torch.equal(packed[:, first // 8 : first // 8 + want.shape[1]], want)
        if "row" in function:
            assert torch.equal(scale[some], want_scale)
        if "block" in function:
            assert torch.equal(scale[:, first : first + want_scale.shape[1]], want_scale)


@functions
def test_only_from_two_fifths_of_l2_on(function: str) -> None:
    """By what the profiler saw: the bytes are the same."""
    width = 2 * K if function in GATED else K
    for m, once in ((most_tokens(width), "false"), (most_tokens(width) + 1, "true")):
        x = torch.randn(m, width, dtype=torch.bfloat16, device="cuda")
        (name,) = (name for name in kernels_of(lambda x=x: quantised(function, x)) if "quantize" in name)
        found = ONCE.search(name)
        assert found is not None, name
        assert found[1] == once
