"""Layers that hold their weights once, on a GPU: memory, graphs, states."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fp4dispatch import compact, warmup
from fp4dispatch.errors import CaptureError
from fp4dispatch.models.linear import FP4Linear
from tests.gpu.backend_cases import captured
from tests.gpu.sm90 import needs_sm90

pytestmark = [pytest.mark.gpu, needs_sm90]

K, N = 2048, 4096
SIZES = (1, 33, 200, 1000)


def layers(count=3):
    torch.manual_seed(0)
    return nn.ModuleList(
        FP4Linear.from_linear(nn.Linear(K, N).to("cuda", torch.bfloat16), name=f"layer{i}") for i in range(count)
    )


def same(a, b):
    return list(a) == list(b) and all(torch.equal(raw(a[name]), raw(b[name])) for name in a)


def raw(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def test_memory_is_freed_and_nothing_is_lost():
    net = layers()
    warmup(net, tokens=SIZES)
    xs = {m: torch.randn(m, K, device="cuda", dtype=torch.bfloat16) for m in SIZES}
    with torch.inference_mode():
        want = {(i, m): layer(x) for i, layer in enumerate(net) for m, x in xs.items()}
    state = {name: tensor.cpu() for name, tensor in net.state_dict().items()}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    freed = compact(net)
    torch.cuda.synchronize()
    assert freed == 3 * (N * K // 2 + N * K // 16)
    assert before - torch.cuda.memory_allocated() >= freed
    with torch.inference_mode():
        for (i, m), out in want.items():
            assert torch.equal(net[i](xs[m]), out)
    assert same({name: tensor.cpu() for name, tensor in net.state_dict().items()}, state)
    moved = copy.deepcopy(net).cpu()
    assert same(dict(moved.state_dict()), state)
    with torch.inference_mode():
        for (i, m), out in want.items():
            assert torch.equal(net[i](xs[m]), out)


def test_graphs_captured_before_and_after_replay_the_same():
    net = layers(1)
    warmup(net, tokens=SIZES)
    x = torch.randn(33, K, device="cuda", dtype=torch.bfloat16)
    graphs = [captured(lambda: net[0](x))]
    assert compact(net) > 0
    graphs.append(captured(lambda: net[0](x)))
    junk = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(8)]  # into what was freed
    with torch.inference_mode():
        want = net[0](x)
        for graph, out in graphs:
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, want)
    del junk
    with pytest.raises(CaptureError, match="unpacking weights"):
        captured(lambda: net[0].weight)
    assert "weight" not in net[0]._buffers
    weight = net[0].weight  # for good
    with torch.inference_mode():
        graphs[1][0].replay()
        assert torch.equal(graphs[1][1], want)
    assert weight is net[0].weight
