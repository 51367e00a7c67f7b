"""Layers that hold their weights once, on a GPU: memory, graphs, states."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fp4dispatch import compact, refresh, warmup
from fp4dispatch.errors import CaptureError
from fp4dispatch.models.linear import FP4Linear
from tests.gpu.backend_cases import captured
from tests.gpu.sm90 import needs_sm90

pytestmark = [pytest.mark.gpu, needs_sm90]

K, N = 2048, 4096
SIZES = (1, 33, 200, 1000)


def layers(count=3, *, keep_stored=True):
    torch.manual_seed(0)
    return nn.ModuleList(
        FP4Linear.from_linear(nn.Linear(K, N).to("cuda", torch.bfloat16), name=f"layer{i}", keep_stored=keep_stored)
        for i in range(count)
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


def test_layers_drop_their_weights_themselves():
    kept, net = layers(), layers(keep_stored=False)
    state = {name: tensor.cpu() for name, tensor in kept.state_dict().items()}
    xs = {m: torch.randn(m, K, device="cuda", dtype=torch.bfloat16) for m in SIZES}
    assert all("weight" not in layer._buffers for layer in net)
    assert compact(net) == 0
    with torch.inference_mode():
        for one, other in zip(kept, net, strict=True):
            assert all(torch.equal(one(x), other(x)) for x in xs.values())
    assert same({name: tensor.cpu() for name, tensor in net.state_dict().items()}, state)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    moved = copy.deepcopy(net)
    with torch.inference_mode():
        for one, other in zip(moved, net, strict=True):
            assert torch.equal(one(xs[33]), other(xs[33]))
    assert all("weight" not in layer._buffers for layer in moved)
    assert torch.cuda.memory_allocated() - before < 1.1 * sum(layer.nbytes() for layer in net)
    assert same(dict(net.cpu().state_dict()), state)
    net.cuda()
    assert all("weight" not in layer._buffers for layer in net)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_layers_stay_small_and_see_writes(mode):
    torch._dynamo.reset()
    layer, new = layers(1, keep_stored=False)[0], layers(2, keep_stored=False)[1]
    new.name = layer.name
    x = torch.randn(33, K, device="cuda", dtype=torch.bfloat16)
    warmup(nn.ModuleList([layer, new]), tokens=[33])
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    with torch.inference_mode():
        for _ in range(4):
            assert torch.equal(compiled(x), layer(x))
        assert "weight" not in layer._buffers
        for name in ("weight", "weight_scale", "weight_scale_2"):
            getattr(layer, name).copy_(getattr(new, name))
        layer.bias.copy_(new.bias)
        if mode == "reduce-overhead":  # replays run no host code
            refresh(layer)
        for _ in range(4):
            assert torch.equal(compiled(x), new(x))


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
    weight = net[0].weight
    with torch.inference_mode():
        graphs[1][0].replay()
        assert torch.equal(graphs[1][1], want)
    assert weight is net[0].weight
