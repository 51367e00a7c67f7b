"""Problems for the kernel that multiplies packed e4m3 activations by FP8 weights in rows, and its PDL chain."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fp4dispatch import jit
from tests.gpu import w4_packed
from tests.gpu.sm90 import SM90
from tests.gpu.tiles import check_replays
from tests.gpu.w4_packed import empty_packed, packer, quantised

E4M3 = torch.float8_e4m3fn


@functools.cache
def kernel(variant: str = "bf16") -> Any:
    return jit.load("w8a8_small", variant, SM90).module


def activations(x: Tensor, static: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(packed, scale, what they stand for in float64); ``static``: one scale for all tokens."""
    return quantised(x, static, packer().w8_quantize_row, packer().w8_quantize_tensor)


@functools.cache
def weight(n: int, k: int, seed: int = 0) -> Tensor:
    """Every code but NaN, in no order, on the GPU."""
    draw = torch.Generator().manual_seed(n * k + seed)
    codes = torch.randint(256, (n, k), generator=draw, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0x01
    return codes.cuda().view(E4M3)


class Problem(w4_packed.Problem):
    """As that of W4P weights, with a weight in rows; ``missing``: so many of its last rows are not there."""

    def __init__(
        self,
        dtype: torch.dtype,
        mnk: tuple[int, int, int],
        *,
        static: float | None = None,
        alpha: float = 2.0**-9,
        missing: int = 0,
    ) -> None:
        m, n, k = self.mnk = mnk
        self.fp8, self.dtype = True, dtype
        draw = torch.Generator("cuda").manual_seed(m)
        x = torch.randn(m, k, generator=draw, device="cuda").to(dtype)
        self.x, self.x_scale, self.exact_x = activations(x, static)
        self.w = weight(n, k)
        self.dense = self.w.double()
        if missing:
            self.dense[n - missing :] = 0
            after = self.w.view(torch.uint8).clone()
            after[n - missing :] = 0x7F  # NaN, in memory after the shorter weight
            self.w = after.view(E4M3)[: n - missing]
        self.complete(draw, alpha)


def check_pdl_chain(m: int, static: float | None = None) -> None:
    """12 square layers, each quantises and reads what the one before wrote: a graph with PDL against none."""
    size = 2048
    weights = [weight(size, size, seed) for seed in range(3)]
    alpha = size**0.5 / weights[0].double().norm().float().view(1)
    buffers = [torch.zeros(m, size, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    packed = [empty_packed(m, size) for _ in buffers]
    scales = [torch.full((m if static is None else 1,), static or torch.nan, device="cuda") for _ in buffers]
    start = torch.randn(m, size, device="cuda").bfloat16()
    quantize = packer().w8_quantize_row if static is None else packer().w8_quantize_tensor

    def layers(pdl: bool) -> None:
        for i in range(12):
            x, q, scale = buffers[i % 2], packed[i % 2], scales[i % 2]
            quantize(x, q, scale, pdl)
            kernel().w8a8_small(q, scale, weights[i % 3], alpha, None, buffers[(i + 1) % 2], pdl)

    check_replays(layers, buffers, start, 30)
