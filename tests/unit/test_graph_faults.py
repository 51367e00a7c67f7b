"""What keeps a model out of CUDA graphs: faults on a rank, LoRA, offload, torch.compile, threads."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fp4dispatch.errors import CaptureDeniedError, CaptureError
from fp4dispatch.graphs import model as graphs_model
from fp4dispatch.graphs.model import Graphs
from tests import breakable
from tests.graph_fake import FakeClock, FakeTape
from tests.unit.test_ranks import together


@pytest.fixture(autouse=True)
def without_grad():
    with torch.no_grad():
        yield


def made(model, **options):
    held = Graphs(breakable.spec(model), [8, 16], tapes=FakeTape, **options)
    held.capture()
    return held


def call(model, *shape):
    return model(torch.ones(*shape, dtype=torch.long), use_cache=False).logits


def on_a_rank(fails):
    def work(rank):
        torch.set_num_threads(1)
        model = breakable.model(num_hidden_layers=1)
        tape = lambda: FakeTape(0 if rank == fails else None)  # noqa: E731
        held = Graphs(breakable.spec(model), [8], tapes=tape)
        with torch.no_grad():
            held.capture()
            call(model, 1, 8)
        return held.disabled or f"replays {breakable.replays(held)}"

    return work


def test_a_capture_that_fails_on_one_rank_leaves_all_eager():
    for answer in together(on_a_rank(1)):
        assert "the capture failed on ranks [1]: RuntimeError: planted" in answer


def test_ranks_that_all_capture_all_replay():
    assert together(on_a_rank(None)) == ["replays {'8': 1}"] * 2


class Lora(nn.Module):
    """A layer with adapters, as peft has them."""

    def __init__(self, base):
        super().__init__()
        self.base, self.active_adapters, self.disable_adapters = base, ["a"], False
        self.scaling, self.merged_adapters = {"a": 1.0, "b": 1.0}, []

    def forward(self, x):
        if self.merged_adapters:
            return self.base(x)
        return self.base(x) + self.scaling["a"] * x.mean(-1, keepdim=True)

    def merge(self):
        self.merged_adapters.append("a")
        self.base.weight += self.scaling["a"] / self.base.in_features


def test_another_adapter_runs_eagerly_until_the_captured_one_is_back():
    model = breakable.model()
    mlp = model.model.layers[1].mlp
    mlp.up_proj = Lora(mlp.up_proj)
    held = made(model)
    call(model, 1, 8)
    mlp.up_proj.active_adapters = ["b"]
    call(model, 1, 8)
    mlp.up_proj.disable_adapters = True
    call(model, 1, 8)
    assert breakable.rejects(held) == {"lora-swap": 2}
    mlp.up_proj.active_adapters, mlp.up_proj.disable_adapters = ["a"], False
    call(model, 1, 8)
    assert breakable.replays(held) == {"8": 2}


def test_an_adapter_that_is_scaled_or_merged_after_the_capture_runs_eagerly():
    model = breakable.model()
    mlp = model.model.layers[1].mlp
    mlp.up_proj = Lora(mlp.up_proj)
    want, held = call(model, 1, 8), made(model)
    torch.testing.assert_close(call(model, 1, 8), want, rtol=1e-4, atol=1e-5)
    mlp.up_proj.scaling["a"] = 3.0
    assert not torch.allclose(call(model, 1, 8), want, rtol=1e-2)
    mlp.up_proj.scaling["a"] = 1.0
    mlp.up_proj.merge()
    torch.testing.assert_close(call(model, 1, 8), want, rtol=1e-4, atol=1e-5)
    assert breakable.rejects(held) == {"lora-swap": 2}
    assert "adapters, scales or merges are not those of the capture: active are a, then a" in str(held.why_not(8, {}))


def test_one_module_whose_scale_is_another_runs_eagerly():
    model = breakable.model()
    for layer, scale in zip(model.model.layers, (1.0, 2.0), strict=False):
        layer.mlp.up_proj = Lora(layer.mlp.up_proj)
        layer.mlp.up_proj.scaling["a"] = scale
    held = made(model)
    assert held.why_not(8, {"adapters": ("a",)}) == ()
    assert [reason.condition for reason in held.why_not(8, {"adapters": ("b",)})] == ["lora-swap"]
    model.model.layers[0].mlp.up_proj.scaling["a"] = 2.0
    call(model, 1, 8)
    assert breakable.rejects(held) == {"lora-swap": 1}


def test_attention_in_training_mode_is_not_captured():
    model = breakable.model()
    model.model.layers[1].self_attn.train()
    assert "training" in made(model).disabled


def test_a_layer_that_is_wrapped_after_the_capture_ends_the_graphs():
    model = breakable.model()
    held = made(model)
    mlp = model.model.layers[1].mlp
    mlp.up_proj = Lora(mlp.up_proj)
    call(model, 1, 8)
    assert held.disabled == "up_proj moved or was replaced after the capture"


@pytest.mark.parametrize("place", ["model.layers.1.mlp", ""])
def test_hooks_before_a_forward_run_too(place):
    model = breakable.model()
    held = made(model)
    seen = []
    on = model.get_submodule(place).register_forward_pre_hook if place else register_module_forward_pre_hook
    with on(lambda module, args: seen.append(module)):
        call(model, 1, 8)
    assert seen
    assert breakable.rejects(held) == {"hooks": 1}


@pytest.mark.parametrize("place", ["model.layers.1", "model.layers.1.mlp", "model.layers.0.self_attn.q_proj", ""])
def test_hooks_run_also_where_they_come_after_the_capture(place):
    model = breakable.model()
    held = made(model)
    want = call(model, 1, 8)
    seen = []

    def hook(module, args, out):
        if not isinstance(out, torch.Tensor):
            return None
        seen.append(out.clone())
        return out * 2

    on = model.get_submodule(place).register_forward_hook if place else register_module_forward_hook
    with on(hook):
        got = call(model, 1, 8)
    assert breakable.rejects(held) == {"hooks": 1}
    plain, steps = breakable.model(), seen.copy()
    on = plain.get_submodule(place).register_forward_hook if place else register_module_forward_hook
    with on(hook):
        assert torch.equal(call(plain, 1, 8), got)
    assert all(map(torch.equal, steps, seen[len(steps) :]))
    torch.testing.assert_close(call(model, 1, 8), want)
    assert breakable.replays(held) == {"8": 2}


def test_hooks_of_transformers_that_record_nothing_keep_no_call_from_its_graphs():
    model = breakable.model()
    want = model(torch.ones(1, 8, dtype=torch.long), use_cache=False, output_hidden_states=True).logits
    held = made(model)
    torch.testing.assert_close(call(model, 1, 8), want, rtol=1e-4, atol=1e-5)
    assert breakable.replays(held) == {"8": 1}


@pytest.mark.parametrize(
    "change", [lambda mlp: setattr(mlp, "forward", torch.zeros_like), lambda mlp: mlp.compile(backend="eager")]
)
def test_a_module_that_is_called_otherwise_after_the_capture_ends_the_graphs(change):
    model = breakable.model()
    held = made(model)
    change(model.model.layers[1].mlp)
    call(model, 1, 8)
    assert held.disabled == "forward of LlamaMLP moved or was replaced after the capture"


@pytest.mark.parametrize("place", ["layers.1", ""])
def test_a_wrapper_that_came_after_the_capture_stays(place):
    model = breakable.model()
    want, held = call(model, 1, 8), made(model)
    module = model.model.get_submodule(place)
    wrapped = module.forward

    @functools.wraps(wrapped)
    def wrapper(*args, **kwargs):
        return wrapped(*args, **kwargs)

    module.forward = wrapper
    torch.testing.assert_close(call(model, 1, 8), want, rtol=1e-4, atol=1e-5)
    held.release()
    assert module.forward is wrapper
    assert torch.equal(call(model, 1, 8), want)
    again = made(model)
    torch.testing.assert_close(call(model, 1, 8), want, rtol=1e-4, atol=1e-5)
    assert not again.disabled
    assert breakable.replays(again) == {"8": 1}
    again.release()
    assert module.forward is wrapper


def test_weights_elsewhere_and_compiled_modules_are_not_captured():
    model = breakable.model()
    norm = model.model.layers[0].input_layernorm
    norm.weight = nn.Parameter(norm.weight.to("meta"), requires_grad=False)
    assert "weights on the CPU, or moved by a hook: input_layernorm.weight" in made(model).disabled
    model = breakable.model()
    model.model.layers[0].mlp.compile()
    assert "wrapped by torch.compile" in made(model).disabled


def test_dropout_is_never_captured():
    model = breakable.model("Phi3", resid_pdrop=0.5)
    want = call(model, 1, 8)
    model.train()
    held = made(model)
    assert "training mode is True" in held.disabled
    assert "model.eval()" in held.disabled
    model.eval()
    model.model.layers[1].resid_mlp_dropout.train()
    assert "training mode is True" in made(model).disabled
    model.eval()
    held = made(model)
    torch.testing.assert_close(call(model, 1, 8), want, rtol=1e-4, atol=1e-5)
    assert breakable.replays(held) == {"8": 1}


def test_autocast_around_the_capture_is_not_captured():
    model = breakable.model()
    want = call(model, 1, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        casted = call(model, 1, 8)
        held = made(model, clock=FakeClock())
        assert torch.equal(call(model, 1, 8), casted)
    assert held.measured
    assert breakable.rejects(held) == {"autocast": 1}
    torch.testing.assert_close(call(model, 1, 8), want, rtol=1e-4, atol=1e-5)
    assert breakable.replays(held) == {"8": 1}


def test_a_named_backend_that_must_not_be_captured_is_the_reason(monkeypatch):
    def denied(*_):
        raise CaptureDeniedError("cudnn must not be captured")

    monkeypatch.setattr(graphs_model.CapturedLayers, "capture", denied)
    held = made(breakable.model())
    assert held.vetoes == ("cudnn must not be captured",)
    assert [r.condition for r in held.why_not(8, {})] == ["backend-veto", "disabled"]


def test_declared_facts_end_with_their_block_in_whatever_order_blocks_end():
    model = breakable.model()
    held = made(model)
    first, second = held.declare({"decode_verify": True}), held.declare({"idle_ranks": (1,)})
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert [r.condition for r in held.why_not(8, {})] == ["idle-ranks"]
    second.__exit__(None, None, None)
    assert not held.why_not(8, {})


def test_a_second_thread_runs_eagerly_and_right():
    model = breakable.model()
    x = torch.ones(1, 8, dtype=torch.long)
    want = model(x, use_cache=False).logits
    held = made(model)
    inside, go, answers = threading.Event(), threading.Event(), []
    norm = model.model.norm.forward

    def waits(hidden):
        if threading.current_thread() is first:
            inside.set()
            assert go.wait(20)
        return norm(hidden)

    model.model.norm.forward = waits

    def run():
        with torch.no_grad():
            answers.append(model(x, use_cache=False).logits)

    first = threading.Thread(target=run)
    first.start()
    assert inside.wait(20)
    second = threading.Thread(target=run)
    second.start()
    second.join(20)
    go.set()
    first.join(20)
    for answer in answers:
        torch.testing.assert_close(answer, want, rtol=1e-4, atol=1e-5)
    assert len(answers) == 2
    assert breakable.rejects(held) == {"busy": 1}
    assert breakable.replays(held) == {"8": 1}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["Llama", "Gemma3Text"])
def test_padded_requests_of_a_second_thread_are_right_during_a_capture(family, attention):
    model = breakable.model(family, attn_implementation=attention, num_hidden_layers=2)
    mask = torch.ones(3, 8, dtype=torch.long)
    mask[1, :5] = 0
    x = torch.arange(1, 25).view(3, 8)

    @torch.no_grad()
    def run():
        return model(x, attention_mask=mask, use_cache=False).logits[mask.bool()]

    want, found = run(), []

    class Tape(FakeTape):
        def begin(self):
            thread = threading.Thread(target=lambda: found.append(run()))
            thread.start()
            thread.join(20)
            super().begin()

    Graphs(breakable.spec(model), [8], tapes=Tape).capture()
    assert len(found) == 3
    for each in found:
        torch.testing.assert_close(each, want, rtol=1e-4, atol=1e-5)


def test_a_question_during_a_call_frees_nothing_that_it_replays():
    model = breakable.model()
    want = call(model, 1, 8)
    held = made(model)
    weight = model.model.layers[2].mlp.up_proj.weight
    asked = []

    def asks(*_):
        if not asked:
            weight.data = weight.data.clone()
            thread = threading.Thread(target=lambda: asked.append(held.why_not(8, {})))
            thread.start()
            thread.join(20)

    function = model.model.layers[1].self_attn.config._attn_implementation
    before = ALL_ATTENTION_FUNCTIONS[function]
    ALL_ATTENTION_FUNCTIONS[function] = lambda *args, **options: (asks(), before(*args, **options))[1]
    try:
        torch.testing.assert_close(call(model, 1, 8), want, rtol=1e-4, atol=1e-5)
    finally:
        ALL_ATTENTION_FUNCTIONS[function] = before
    assert asked == [()]
    assert "moved" in str(held.why_not(8, {}))


def test_graphs_cannot_be_freed_inside_a_call_that_they_run():
    model = breakable.model()
    held = made(model)
    norm = model.model.norm.forward

    def frees(hidden):
        held.release()
        return norm(hidden)

    model.model.norm.forward = frees
    with pytest.raises(CaptureError, match="inside a call that they run"):
        call(model, 1, 8)
    del model.model.norm.forward
    call(model, 1, 8)
    held.release()
