"""Layers on our own backends for 16-bit activations: how they are made, their exact results, and what all must keep.

What layers on any library's backend must survive is in backend_cases.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp4dispatch.backends.base import LinearWeights, Plan
from fp4dispatch.models.linear import FP4Linear, FP8Linear
from fp4dispatch.models.replace import warmup
from fp4dispatch.run import routes
from tests import contract

K, N = 1040, 520
SHARDS = (256, 72, 40)
ERROR = {"bf16": 0.002, "fp8": 0.045}
"""Relative, root mean square, against the exact product with activations that are not rounded."""


def dense(k: int = K, n: int = N, dtype: torch.dtype = torch.bfloat16, bias: bool = True, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(k, n, bias).to("cuda", dtype)


def nvfp4_layer(
    k: int = K, n: int = N, dtype: torch.dtype = torch.bfloat16, bias: bool = True, seed: int = 0, **options: Any
) -> FP4Linear:
    return FP4Linear.from_linear(dense(k, n, dtype, bias, seed), **options)


def fused_shards(**options: Any) -> FP4Linear:
    """Three layers in one, whose global scales are far apart."""
    parts = [nvfp4_layer(n=n, seed=n, bias=False) for n in SHARDS]
    with torch.no_grad():
        parts[1].weight_scale_2.mul_(1000)
        parts[2].weight_scale_2.mul_(0.001)
    weights = LinearWeights(
        "nvfp4_gemm",
        "nvfp4",
        sum(SHARDS),
        K,
        torch.cat([p.weight for p in parts]),
        torch.cat([p.weight_scale.view(torch.uint8) for p in parts]).view(torch.float8_e4m3fn),
        torch.stack([p.weight_scale_2 for p in parts]),
        SHARDS,
    )
    return FP4Linear.from_weights(weights, **options)


def tokens(m: int, k: int = K, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(m, k, device="cuda", dtype=dtype)


def exact(layer: FP4Linear | FP8Linear, x: Tensor, activation: str = "bf16") -> Tensor:
    """In float64, of the quantised weights."""
    w = contract.dequantised(layer.weights(), activation)
    return x.double() @ w.t() + (0 if layer.bias is None else layer.bias.double())


def error(y: Tensor, want: Tensor) -> float:
    return float((y.double() - want).norm() / want.norm())


def shards_keep_their_own_global_scales(fused: FP4Linear, most: Callable[[int], float]) -> None:
    """``most(m)``: the error that each shard may have."""
    for m in (1, 33, 300):
        x, start = tokens(m), 0
        y, want = fused(x), exact(fused, x)
        for rows in SHARDS:
            part = slice(start, start + rows)
            assert error(y[:, part], want[:, part]) < most(m)
            start += rows


def the_same_bits_every_time(layer: nn.Module, sizes: Sequence[int], k: int = 4096) -> None:
    for m in sizes:
        x = tokens(m, k)
        first = layer(x)
        for _ in range(20):
            assert torch.equal(layer(x), first)


def graphs_of_every_m_replay_what_eager_computes(layer_of: Callable[..., nn.Module], sizes: Sequence[int]) -> None:
    """``layer_of(k, n, seed=)``. One after the other: layers share scratch memory."""
    model = nn.Sequential(layer_of(K, 528, seed=1), nn.GELU(), layer_of(528, N, seed=2))
    warmup(model, tokens=sizes)
    graphs = []
    for m in sizes:
        x = tokens(m)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            y = model(x)
        graphs.append((graph, x, y))
    for seed in range(3):
        for graph, x, y in graphs:
            x.copy_(tokens(x.shape[0], seed=seed))
            y.fill_(float("nan"))
            graph.replay()
            with torch.no_grad():
                assert torch.equal(y, model(x))


def a_chain_under_pdl_gives_the_bits_of_one_without(
    monkeypatch: pytest.MonkeyPatch,
    layer_of: Callable[..., nn.Module],
    m: int,
    uses_pdl: Callable[[Plan], bool | None] | None = None,
    expected: bool = True,
) -> None:
    """Each layer reads what the one before wrote, and writes where an earlier one read; weights come ahead of waits.

    ``uses_pdl(plan)``: what a plan has decided, None for plans that are not asked; ``expected``: where PDL is not off.
    """

    def chain(pdl: bool) -> list[nn.Module]:
        routes.LayerSpec.parse.cache_clear()
        monkeypatch.setattr(routes, "_plans", {})
        made = [layer_of(K, K, seed=i, bias=False) for i in range(6)]
        warmup(nn.ModuleList(made), tokens=[m])
        if uses_pdl is not None:
            assert {uses_pdl(plan) for plan in routes._plans.values()} - {None} == {pdl}
        return made

    def run(made: list[nn.Module], x: Tensor) -> Tensor:
        for _ in range(5):
            for layer in made:
                x = layer(x)
        return x

    x = tokens(m, seed=3)
    with torch.no_grad():
        monkeypatch.setenv("FP4DISPATCH_PDL", "off")
        want = run(chain(pdl=False), x)
        monkeypatch.delenv("FP4DISPATCH_PDL")
        made = chain(pdl=expected)
        run(made, x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run(made, x)
        for _ in range(20):
            y.fill_(float("nan"))
            graph.replay()
            assert torch.equal(y, want)
            assert torch.equal(run(made, x), want)
