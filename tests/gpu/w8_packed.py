"""Problems for the kernel that multiplies packed e4m3 activations by FP8 weights in rows, and its PDL chain."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fp4dispatch import formats, jit
from tests.gpu import w4_packed
from tests.gpu.sm90 import SM90
from tests.gpu.tiles import bits

E4M3 = torch.float8_e4m3fn


@functools.cache
def quantizers() -> Any:
    return jit.load("w4_activations", "any", SM90).module


@functools.cache
def kernel(variant: str = "bf16") -> Any:
    return jit.load("w8a8_small", variant, SM90).module


def empty_packed(m: int, k: int) -> Tensor:
    """Poisoned bytes for a packed activation."""
    return torch.full((-(-k // 128), -(-m // 8), 1024), 0xFF, device="cuda", dtype=torch.uint8)


def activations(x: Tensor, static: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(packed, scale, what they stand for in float64); ``static``: one scale for all tokens."""
    m, k = x.shape
    packed = empty_packed(m, k)
    if static is not None:
        one = torch.full((1,), static, device="cuda")
        quantizers().w8_quantize_tensor(x, packed, one, False)
        return packed, one, formats.fp8_quantize(x, "tensor", one[0]).data.double() * one.double()
    scale = torch.full((m,), torch.nan, device="cuda")
    quantizers().w8_quantize_row(x, packed, scale, False)
    q = formats.fp8_quantize(x, "row")
    return packed, scale, q.data.double() * q.scale.double().view(-1, 1)


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
        self.alpha = (torch.rand(n if m % 2 else 1, generator=draw, device="cuda") + 0.5) * alpha
        self.bias = torch.randn(n, generator=draw, device="cuda").to(dtype) if m % 3 else None
        guarded = torch.full((m + 2, n), torch.nan, device="cuda", dtype=dtype)
        self.guard, self.out = guarded[:: m + 1], guarded[1:-1]


def check_pdl_chain(m: int, static: float | None = None) -> None:
    """12 square layers, each quantises and reads what the one before wrote: a graph with PDL against none."""
    size = 2048
    weights = [weight(size, size, seed) for seed in range(3)]
    alpha = size**0.5 / weights[0].double().norm().float().view(1)
    buffers = [torch.zeros(m, size, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    packed = [empty_packed(m, size) for _ in buffers]
    scales = [torch.full((m if static is None else 1,), static or torch.nan, device="cuda") for _ in buffers]
    start = torch.randn(m, size, device="cuda").bfloat16()
    quantize = quantizers().w8_quantize_row if static is None else quantizers().w8_quantize_tensor

    def layers(pdl: bool) -> None:
        for i in range(12):
            x, q, scale = buffers[i % 2], packed[i % 2], scales[i % 2]
            quantize(x, q, scale, pdl)
            kernel().w8a8_small(q, scale, weights[i % 3], alpha, None, buffers[(i + 1) % 2], pdl)

    buffers[0].copy_(start)
    layers(False)
    expected = buffers[0].clone()
    assert expected.isfinite().all()
    assert expected.any()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers(True)
    for _ in range(30):
        buffers[0].copy_(start)
        buffers[1].fill_(torch.nan)
        graph.replay()
        assert torch.equal(bits(buffers[0]), bits(expected))
