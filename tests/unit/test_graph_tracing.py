"""Models with graphs under torch.compile, torch.export and counters of operations."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CompileConfig

from tests import breakable
from tests.graph_fake import FakeTape


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def ids(*shape, seed=1):
    return torch.randint(1, 128, shape, generator=torch.Generator().manual_seed(seed))


def small(**options):
    return breakable.model(num_hidden_layers=2, **options)


def captured(model, **options):
    return breakable.captured(model, [8, 16], tapes=FakeTape, **options)


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x, use_cache=False).logits


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_model_that_is_compiled_after_the_capture_replays(dynamic):
    model = small()
    calls = [ids(1, 8), ids(2, 7), ids(3, 5)]
    wants = [Logits(model)(x) for x in calls]
    graphs = captured(model)
    compiled = torch.compile(Logits(model), backend="eager", dynamic=dynamic)
    for x, want in zip(calls, wants, strict=True):
        torch.testing.assert_close(compiled(x), want, rtol=1e-4, atol=1e-5)
    assert not graphs.disabled
    assert breakable.replays(graphs) == {"8": 1, "16": 2}


def test_one_graph_for_everything_is_refused_with_the_reason():
    model = small()
    captured(model)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="CUDA graphs of fp4dispatch are replayed here"):
        torch.compile(Logits(model), backend="eager", fullgraph=True)(ids(1, 8))


def test_generate_that_compiles_by_itself_replays_decode_steps():
    model = small()
    options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static"}
    want = model.generate(ids(1, 8), disable_compile=True, **options)
    graphs = captured(model, decode_batches=[1])
    config = CompileConfig(backend="eager")
    config._compile_all_devices = True  # as on a GPU
    assert torch.equal(model.generate(ids(1, 8), compile_config=config, **options), want)
    assert breakable.steps(graphs) == (1, 6)
    assert not graphs.disabled


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_model_holds_its_layers_and_no_replay(strict):
    model, x = small(), ids(1, 8)
    graphs = captured(model)
    program = torch.export.export(Logits(model), (x,), strict=strict)
    torch.testing.assert_close(program.module()(x.flip(1)), Logits(small())(x.flip(1)), rtol=1e-4, atol=1e-5)
    Logits(model)(x)
    assert not graphs.disabled
    assert breakable.replays(graphs) == {"8": 1}


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        return op(*args, **(kwargs or {}))


def test_a_mode_that_looks_at_operations_sees_those_of_the_layers():
    model = small()
    want = Logits(model)(ids(1, 8))
    graphs = captured(model)
    with Seen():
        assert torch.equal(Logits(model)(ids(1, 8)), want)
    assert not breakable.replays(graphs)
    assert breakable.rejects(graphs) == {"recorded": 1}
