"""Writes to stored weights on a GPU: late writers under PDL, graphs, compiled calls."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp4dispatch import refresh, warmup
from fp4dispatch.errors import CaptureError
from fp4dispatch.models.linear import FP4Linear, FP8Linear
from fp4dispatch.run import ops
from tests.gpu.backend_cases import captured
from tests.gpu.sm90 import needs_sm90

pytestmark = [pytest.mark.gpu, needs_sm90]

K, N = 2048, 1024
LATE = 200_000
"""Clock cycles that a writer is late: a tenth of a millisecond, many times what a launch takes."""
CASES = [
    ("w4a16", "nvfp4", 1),
    ("w4a16", "nvfp4", 200),
    ("w4a8", "nvfp4", 16),
    ("w4a8", "nvfp4", 1000),
    ("w8a16", "row", 1),
    ("w8a16", "tensor", 8),
    ("w8a8", "row", 16),
    ("w8a8", "tensor", 200),
    ("w8a8", "block128", 16),
    ("w8a8", "block128", 200),
]
case = pytest.mark.parametrize(("backend", "scaling", "m"), CASES)


def make(backend, scaling, seed=0):
    torch.manual_seed(seed)
    linear = nn.Linear(K, N, bias=False).to("cuda", torch.bfloat16).requires_grad_(False)
    linear.weight.mul_(1 + seed / 10)
    if scaling == "nvfp4":
        return FP4Linear.from_linear(linear, backend=backend)
    return FP8Linear.from_linear(linear, scaling=scaling, backend=backend)


def tokens(m):
    torch.manual_seed(5)
    return torch.randn(m, K, device="cuda", dtype=torch.bfloat16)


def stored(layer):
    return {name: tensor for name, tensor in layer.named_buffers() if not name.startswith("layout")}


def write(layer, new, late=0):
    if late:
        torch.cuda._sleep(late)
    for name, tensor in stored(new).items():
        getattr(layer, name).copy_(tensor)


@case
def test_a_late_write_is_multiplied_by_the_very_next_launch(backend, scaling, m):
    layer, news = make(backend, scaling), [make(backend, scaling, seed=s) for s in (1, 2)]
    x = tokens(m)
    with torch.inference_mode():
        wants = [new(x) for new in news]
        layer(x)
        torch.cuda.synchronize()
        assert not torch.equal(*wants)
        wrong = 0
        for i in range(500):
            write(layer, news[i % 2], LATE)
            first, second = layer(x), layer(x)
            wrong += not (torch.equal(first, wants[i % 2]) and torch.equal(second, wants[i % 2]))
    assert wrong == 0


@case
def test_the_operator_waits_for_late_writes_to_packed_weights(backend, scaling, m):
    layer, news = make(backend, scaling), [make(backend, scaling, seed=s) for s in (1, 2)]
    x = tokens(m)
    bound, packed = layer.bind(), [new.bind().tensors for new in news]
    with torch.no_grad():
        wants = [new(x) for new in news]
        torch.cuda.synchronize()
        wrong = 0
        for i in range(500):
            torch.cuda._sleep(LATE)
            for mine, theirs in zip(bound.tensors, packed[i % 2], strict=True):
                mine.copy_(theirs)
            wrong += not torch.equal(ops.linear(x, bound.tensors, None, bound.spec.text), wants[i % 2])
    assert wrong == 0


@case
def test_graphs_see_what_refresh_prepared(backend, scaling, m):
    layer, new = make(backend, scaling), make(backend, scaling, seed=1)
    x = tokens(m)
    warmup(layer, tokens=[m])
    graph, out = captured(lambda: layer(x))
    with torch.inference_mode():
        old, want = layer(x), new(x)
        graph.replay()
        assert torch.equal(out, old)
        write(layer, new)
        assert refresh(layer) == 1
        for _ in range(3):
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, want)
        for name, tensor in stored(make(backend, scaling)).items():
            getattr(layer, name).data.copy_(tensor)  # torch counts no version
        refresh(layer)
        graph.replay()
        assert torch.equal(out, old)
        assert torch.equal(layer(x), old)


@case
def test_a_write_is_refused_during_capture(backend, scaling, m):
    layer, new = make(backend, scaling), make(backend, scaling, seed=1)
    x = tokens(m)
    warmup(layer, tokens=[m])
    write(layer, new)
    torch.cuda.synchronize()
    with pytest.raises(CaptureError, match="were written or replaced"):
        captured(lambda: layer(x))
    with torch.inference_mode():
        assert torch.equal(layer(x), new(x))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize(("backend", "scaling", "m"), [CASES[0], CASES[4], CASES[8]])
def test_compiled_calls_multiply_what_was_written(backend, scaling, m, mode):
    torch._dynamo.reset()
    layer, new = make(backend, scaling), make(backend, scaling, seed=1)
    x = tokens(m)
    fn = torch.compile(layer, fullgraph=True, mode=mode)
    with torch.inference_mode():
        old = layer(x)
        for _ in range(4):
            assert torch.equal(fn(x), old)
        write(layer, new, LATE)
        if mode == "reduce-overhead":  # replays run no host code
            refresh(layer)
        for _ in range(4):
            assert torch.equal(fn(x), new(x))
