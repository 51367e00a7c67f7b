"""CUDA graphs over the layers: replay equals eager, pools are shared, and nothing is planned during capture."""

import gc

import pytest
import torch
from torch import nn

from fp4dispatch.errors import CaptureError
from fp4dispatch.models.linear import FP4Linear, FP8Linear
from fp4dispatch.models.replace import warmup

pytestmark = pytest.mark.gpu

K, N = 512, 384
KINDS = ("nvfp4", "tensor", "row", "block128")


def make(kind, seed=0):
    torch.manual_seed(seed)
    linear = nn.Linear(K, N).to("cuda", torch.bfloat16)
    return FP4Linear.from_linear(linear) if kind == "nvfp4" else FP8Linear.from_linear(linear, scaling=kind)


def captured(fn, pool=None):
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, pool=pool):
        out = fn()
    return graph, out


@pytest.mark.parametrize("m", [1, 7, 16, 129])
@pytest.mark.parametrize("kind", KINDS)
def test_replay_equals_eager(kind, m):
    layer = make(kind)
    warmup(layer, tokens=[m])
    x = torch.randn(m, K, device="cuda", dtype=torch.bfloat16)
    graph, out = captured(lambda: layer(x))
    for seed in range(3):
        torch.manual_seed(seed)
        x.copy_(torch.randn_like(x))
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, layer(x))


@pytest.mark.parametrize("kind", KINDS)
def test_two_graphs_share_a_pool_and_survive_eager_calls_between(kind):
    layer = make(kind)
    sizes = (64, 8)
    warmup(layer, tokens=[*sizes, 256])
    xs = [torch.randn(m, K, device="cuda", dtype=torch.bfloat16) for m in sizes]
    pool = torch.cuda.graph_pool_handle()
    graphs = [captured(lambda x=x: layer(x), pool) for x in xs]
    big = torch.randn(256, K, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        for (graph, out), x in zip(graphs, xs, strict=True):
            layer(big)  # eager scratch in between must not be what a replay reads
            graph.replay()
            assert torch.equal(out, layer(x))


def test_a_chain_of_layers_in_one_graph():
    layers = nn.Sequential(make("nvfp4"), nn.Linear(N, K, device="cuda", dtype=torch.bfloat16), make("row", 1))
    warmup(layers, tokens=[16])
    x = torch.randn(16, K, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        layers(x)
    graph, out = captured(lambda: layers(x))
    x.copy_(torch.randn_like(x))
    graph.replay()
    with torch.inference_mode():
        assert torch.equal(out, layers(x))


@pytest.mark.parametrize("kind", KINDS)
def test_a_dtype_that_was_never_bound_is_refused_in_capture(kind):
    layer = make(kind)
    warmup(layer, tokens=[16])
    x = torch.randn(16, K, device="cuda", dtype=torch.float16)
    with pytest.raises(CaptureError, match="warmup"):
        captured(lambda: layer(x))
    torch.cuda.synchronize()
    assert layer(x).dtype == torch.float16


def test_a_missing_plan_in_capture_names_the_call():
    layer = make("row")
    layer.bind()
    layer.bind().spec._launches.clear()
    x = torch.randn(48, K, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(CaptureError, match=r"no plan for M=48.*\n.*warmup\(model, tokens=\[48\]\)"):
        captured(lambda: layer(x))
    torch.cuda.synchronize()
    warmup(layer, tokens=[48])
    graph, out = captured(lambda: layer(x))
    graph.replay()
    assert torch.equal(out, layer(x))


@pytest.mark.parametrize("kind", KINDS)
def test_capture_allocates_nothing_outside_the_pool(kind):
    layer = make(kind)
    warmup(layer, tokens=[16])
    x = torch.randn(16, K, device="cuda", dtype=torch.bfloat16)
    graph, _ = captured(lambda: layer(x))
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before  # less: what the capture's frames held may be freed meanwhile


def test_reduce_overhead_mode_of_compile():
    torch._dynamo.reset()
    model = nn.Sequential(make("nvfp4"), nn.GELU())
    warmup(model, tokens=[8])
    fn = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    x = torch.randn(8, K, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        want = model(x)
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            torch.testing.assert_close(fn(x).clone(), want, rtol=0.02, atol=0.02)
