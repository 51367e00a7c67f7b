"""Breakable graphs of real decoders of transformers, on the CPU with recorded segments: what is replayed, and when."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from transformers import StaticCache

import fp4dispatch
from fp4dispatch.errors import CaptureError
from fp4dispatch.graphs.enabling import spec_of
from fp4dispatch.graphs.finder import find_inner
from fp4dispatch.graphs.model import Graphs
from fp4dispatch.graphs.segments import program
from tests import breakable
from tests.graph_fake import FakeTape

BUCKETS = [4, 8, 16, 32]


@pytest.fixture(autouse=True)
def without_grad():
    with torch.no_grad():
        yield


def captured(model, tokens=BUCKETS, **options):
    return breakable.captured(model, tokens, tapes=FakeTape, **options)


def ids(*shape, seed=1):
    return torch.randint(1, 128, shape, generator=torch.Generator().manual_seed(seed))


def logits(model, x, **options):
    return model(x, use_cache=False, **options).logits


@pytest.mark.parametrize("family", breakable.FAMILIES)
def test_every_family_replays_any_batch_that_fits(family):
    model = breakable.model(family)
    calls = [ids(1, 32), ids(1, 19), ids(4, 8), ids(3, 7), ids(8, 2), ids(1, 3)]
    wants = [logits(model, x) for x in calls]
    graphs = captured(model)
    for x, want in zip(calls, wants, strict=True):
        torch.testing.assert_close(logits(model, x), want, rtol=1e-4, atol=1e-5)
    assert breakable.replays(graphs) == {"32": 4, "16": 1, "4": 1}
    assert not breakable.rejects(graphs)
    segments = list(graphs.layers.buckets[32].program.segments())
    breaks = len(graphs.spec.attention) + len(graphs.spec.breaks)
    assert len(segments) == breaks + 1
    assert all(segment.replays == 4 for segment in segments)
    graphs.release()
    assert torch.equal(logits(model, calls[0]), wants[0])


def test_left_padded_requests_and_caches_are_those_of_eager():
    model = breakable.model()
    prompts, mask = ids(3, 8), torch.ones(3, 8, dtype=torch.long)
    mask[1, :5] = 0
    options = {"attention_mask": mask, "max_new_tokens": 7, "do_sample": False}
    static = {"cache_implementation": "static", "disable_compile": True}
    wants = [model.generate(prompts, **options), model.generate(prompts, **options, **static)]
    graphs = captured(model, decode_batches=[3])
    for _ in range(2):
        assert torch.equal(model.generate(prompts, **options), wants[0])
        assert torch.equal(model.generate(prompts, **options, **static), wants[1])
    captures, replays = breakable.steps(graphs)
    assert captures >= 1
    assert replays >= 5
    assert not breakable.rejects(graphs)


def test_graphs_of_one_grad_mode_serve_the_other():
    model = breakable.model()
    x, cache = ids(2, 8), StaticCache(config=model.config, max_cache_len=16)
    want = logits(model, x)
    with torch.inference_mode():
        graphs = captured(model, decode_batches=[2])
        logits(model, x)
    torch.testing.assert_close(logits(model, x), want, rtol=1e-4, atol=1e-5)
    model(x, past_key_values=cache, use_cache=True)
    found = []
    for mode in (torch.inference_mode, torch.no_grad) * 2:
        with mode():
            found.append(model(x[:, :1], past_key_values=cache, use_cache=True).logits.clone())
    assert breakable.steps(graphs) == (1, 3)
    eager = StaticCache(config=model.config, max_cache_len=16)
    with graphs.declare({"decode_verify": True}):
        model(x, past_key_values=eager, use_cache=True)
        for step in found:
            torch.testing.assert_close(
                model(x[:, :1], past_key_values=eager, use_cache=True).logits, step, rtol=1e-4, atol=1e-5
            )


def test_a_decode_step_does_not_keep_its_cache_alive():
    model = breakable.model()
    graphs = captured(model, decode_batches=[2])
    cache = StaticCache(config=model.config, max_cache_len=16)
    for x in (ids(2, 8), *[ids(2, 1)] * 3):
        model(x, past_key_values=cache, use_cache=True)
    assert breakable.steps(graphs) == (1, 2)
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None
    cache = StaticCache(config=model.config, max_cache_len=16)
    for x in (ids(2, 8), *[ids(2, 1)] * 3):
        model(x, past_key_values=cache, use_cache=True)
    assert breakable.steps(graphs) == (2, 4)


def test_a_call_that_does_not_fit_runs_eagerly_and_is_counted():
    model = breakable.model()
    graphs = captured(model)
    for x, options, reason in (
        (ids(1, 33), {}, "too-many-tokens"),
        (ids(1, 1), {}, "padding"),
        (ids(1, 8), {"output_hidden_states": True}, "intermediates"),
    ):
        with graphs.declare({"decode_verify": True}):
            want = logits(model, x, **options)
        assert torch.equal(logits(model, x, **options), want)
        assert breakable.rejects(graphs)[reason] == 2 if reason != "padding" else 1
    assert breakable.rejects(graphs)["decode-verify"] == 3
    with torch.enable_grad():
        logits(model, ids(1, 8))
    assert breakable.rejects(graphs)["training"] == 1
    model.train()
    logits(model, ids(1, 8))
    assert breakable.rejects(graphs)["training"] == 2
    model.eval()
    torch.use_deterministic_algorithms(True)
    try:
        logits(model, ids(1, 8))
    finally:
        torch.use_deterministic_algorithms(False)
    assert breakable.rejects(graphs)["deterministic"] == 1
    assert not breakable.replays(graphs)


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_outputs_that_the_config_asks_for_are_those_of_eager(name):
    model = breakable.model(attn_implementation="eager")
    x, key = ids(1, 8), name.removeprefix("output_")
    setattr(model.config, name, True)
    want = model(x, use_cache=False)[key]
    model = breakable.model(attn_implementation="eager")
    graphs = captured(model)
    setattr(model.config, name, True)
    for mine, other in zip(model(x, use_cache=False)[key], want, strict=True):
        assert torch.equal(mine, other)
    assert breakable.rejects(graphs) == {"intermediates": 1}
    logits(model, x, **{name: False})
    assert breakable.replays(graphs) == {"8": 1}


class Stack(torch.nn.Module):
    """Layers that get nothing but hidden states and a cache, and take any dtype and width."""

    class Layer(torch.nn.Module):
        def forward(self, hidden, past_key_values=None, boost=None):
            return hidden * 1.5 + 1 / 3

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([self.Layer(), self.Layer()])
        self.head = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
        self.late = {}

    def forward(self, hidden, cache=None):
        hidden = self.layers[0](hidden, past_key_values=cache)
        return self.layers[1](hidden, **({"past_key_values": cache} | self.late))


def captured_stack(**options):
    model = Stack().eval()
    found = find_inner(model, inner=model, layers=list(model.layers), breaks=())
    example = torch.zeros(1, 8, 64, dtype=torch.bfloat16)
    graphs = Graphs(spec_of(found, (), lambda n: model(example[:, :n])), [2, 8], tapes=FakeTape, **options)
    graphs.capture()
    assert not graphs.disabled
    return model, graphs


def test_hidden_states_of_another_dtype_or_width_run_eagerly(caplog):
    model, graphs = captured_stack()
    calls = [torch.randn(1, 8, 64), torch.randn(1, 8, 1).bfloat16(), torch.randn(2, 4, 128).bfloat16()]
    for number, x in enumerate(calls, 1):
        got, want = model(x), Stack()(x)
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert torch.equal(got, want)
        assert breakable.rejects(graphs) == {"other-arguments": number}
    assert "hidden states are [1, 8, 64] of torch.float32, need [1, 8, 64] of torch.bfloat16" in caplog.text
    assert not breakable.replays(graphs)
    model(calls[0].bfloat16())
    assert breakable.replays(graphs) == {"8": 1}


def test_a_decode_step_of_another_dtype_or_width_runs_eagerly():
    llama = breakable.model()
    cache = StaticCache(config=llama.config, max_cache_len=16)
    llama(ids(2, 8), past_key_values=cache, use_cache=True)
    model, graphs = captured_stack(decode_batches=[2])
    for _ in range(2):
        model(torch.randn(2, 1, 64).bfloat16(), cache)
    assert breakable.steps(graphs) == (1, 1)
    for number, x in enumerate([torch.randn(2, 1, 64), torch.randn(2, 1, 1).bfloat16()], 1):
        got, want = model(x, cache), Stack()(x)
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
        assert breakable.rejects(graphs) == {"other-arguments": number}
    assert breakable.steps(graphs) == (1, 1)
    assert not breakable.replays(graphs)


def test_a_decode_step_whose_later_layers_get_other_arguments_is_refused():
    llama = breakable.model()
    cache = StaticCache(config=llama.config, max_cache_len=16)
    llama(ids(2, 8), past_key_values=cache, use_cache=True)
    model, graphs = captured_stack(decode_batches=[2])
    x = torch.randn(2, 1, 64).bfloat16()
    model(x, cache)
    for late in ({"past_key_values": None}, {"boost": 1}):
        model.late = late
        with pytest.raises(CaptureError, match=f"decode step, layer 1: .*{next(iter(late))}"):
            model(x, cache)
    model.late = {}
    assert torch.equal(model(x, cache), Stack()(x))
    assert breakable.steps(graphs) == (1, 3)


@pytest.mark.parametrize("fail_at", [0, 2, 5])
def test_a_capture_that_fails_half_way_leaves_an_eager_model(fail_at, caplog):
    model = breakable.model()
    x = ids(2, 8)
    want = logits(model, x)
    tapes = []

    def tape():
        tapes.append(FakeTape(fail_at))
        return tapes[-1]

    graphs = breakable.Graphs(breakable.spec(model), BUCKETS, tapes=tape)
    graphs.capture()
    assert "planted" in graphs.disabled
    assert tapes[0].abandoned == 1
    assert all(segment.was_reset for segment in tapes[0].segments[:-1])
    assert [r.levelname for r in caplog.records if "planted" in r.message] == ["WARNING"]
    assert "forward" not in model.model.__dict__
    assert torch.equal(logits(model, x), want)


def test_an_error_in_a_break_reaches_the_caller_and_the_next_call_is_right(monkeypatch):
    model = breakable.model()
    x = ids(2, 8)
    want = logits(model, x)
    graphs = captured(model)
    function = torch.nn.functional.scaled_dot_product_attention
    calls = []

    def fails(*args, **kwargs):
        calls.append(0)
        if len(calls) == 2:
            raise ValueError("planted")
        return function(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", fails)
        with pytest.raises(ValueError, match="planted"):
            logits(model, x)
    torch.testing.assert_close(logits(model, x), want, rtol=1e-4, atol=1e-5)
    assert breakable.replays(graphs) == {"16": 2}


def test_what_changes_from_call_to_call_cannot_be_captured():
    later = program.Later("attention_mask")
    uses = [bool, len, lambda x: x.shape, lambda x: x[0], lambda x: torch.relu(x), lambda x: x + 1]
    uses += [lambda x: x == "causal", lambda x: x != 0, lambda x: x in ("a", "b"), lambda x: {"a": 1}.get(x)]
    for use in uses:
        with pytest.raises(CaptureError, match="reads attention_mask"):
            use(later)


def test_a_shorter_batch_leaves_nothing_of_a_longer_one():
    model = breakable.model()
    graphs = captured(model, [32])
    logits(model, ids(1, 32))
    logits(model, ids(1, 17))
    for buffer in graphs.layers.bridges._buffers.values():
        if buffer is graphs.layers.bridges.take("hidden", 32, (256,), torch.float32)._base:
            assert not buffer[17:].any()


@pytest.mark.parametrize("fmt", ["nvfp4", "fp8_row"])
def test_quantised_layers_are_replayed_and_written_weights_are_seen(fmt):
    model, other = breakable.model(), breakable.model(seed=7)
    for each in (model, other):
        fp4dispatch.replace_linears(each.model.layers, fmt)
    x = ids(2, 8)
    want, changed = logits(model, x), logits(other, x)
    graphs = captured(model)
    torch.testing.assert_close(logits(model, x), want, rtol=1e-3, atol=1e-4)
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(logits(model, x), changed, rtol=1e-3, atol=1e-4)
    assert graphs.disabled or breakable.replays(graphs) == {"16": 2}


def test_replays_read_other_memory_at_the_address_of_the_old():
    model = breakable.model()
    weight = model.model.layers[1].input_layernorm.weight
    memory = weight.numpy().copy()
    weight.data = torch.from_numpy(memory)
    x = ids(2, 8)
    graphs = captured(model)
    before = logits(model, x)
    memory *= 2
    weight.data = torch.from_numpy(memory)
    got = logits(model, x)
    assert breakable.replays(graphs) == {"16": 2}
    graphs.release()
    torch.testing.assert_close(got, logits(model, x), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(got, before, rtol=1e-2)


def test_a_moved_weight_ends_the_graphs(caplog):
    model = breakable.model()
    x = ids(2, 8)
    graphs = captured(model)
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data.clone() * 2
    want = breakable.model()
    want.model.layers[1].mlp.up_proj.weight.mul_(2)
    assert torch.equal(logits(model, x), logits(want, x))
    assert "moved" in graphs.disabled
    assert breakable.rejects(graphs) == {"disabled": 1}


def test_verified_replays_return_eager_and_a_planted_fault_is_found(caplog):
    model = breakable.model()
    x = ids(2, 8)
    want = logits(model, x)
    graphs = captured(model, verify_replays=2)
    for _ in range(3):
        torch.testing.assert_close(logits(model, x), want, rtol=1e-4, atol=1e-5)
    assert not graphs.disabled
    graphs.release()
    graphs = captured(model, verify_replays=2)
    steps = graphs.layers.buckets[16].program.steps
    steps[1][0] = steps[0][0]  # a segment of another layer
    torch.testing.assert_close(logits(model, x), want, rtol=1e-4, atol=1e-5)
    assert "replays of 16 tokens differ from eager" in graphs.disabled
    assert "attention of layer 1" in graphs.disabled
    torch.testing.assert_close(logits(model, x), want, rtol=1e-4, atol=1e-5)


def test_buckets_and_their_bytes_add_up():
    graphs = captured(breakable.model(), (4, 16, 32))
    layers = graphs.layers
    assert layers.buckets[32].nbytes > 0
    assert sum(bucket.nbytes for bucket in layers.buckets.values()) == layers.nbytes()
    assert layers.nbytes() > layers.bridges.nbytes() > 0
