"""The public functions around breakable graphs: what they refuse, and that nothing is left behind."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from fp4dispatch import graphs
from fp4dispatch.errors import CaptureError, InnerNotFoundError, InputError
from fp4dispatch.graphs import enabling
from fp4dispatch.graphs.finder import Inner, find_inner
from fp4dispatch.graphs.model import Graphs
from tests import breakable
from tests.graph_fake import FakeTape


class Mix(nn.Module):
    """Stands for attention: a token sees those before it."""

    def forward(self, x):
        return x.cumsum(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.mix, self.second = nn.Linear(16, 16), Mix(), nn.Linear(16, 16)

    def forward(self, x, angles=None):
        x = x + self.mix(self.first(x))
        return x + torch.tanh(self.second(x)) * angles


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.register_buffer("table", torch.randn(64, 16))

    def forward(self, x):
        angles = self.table[: x.shape[1]].unsqueeze(0)
        for block in self.blocks:
            x = block(x, angles=angles)
        return x


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = Stack(), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.body(x))


def found(model: Own) -> Inner:
    return find_inner(model, inner="body", layers=[f"blocks.{i}" for i in range(3)], breaks=[Mix])


@torch.no_grad()
def test_any_module_is_captured_with_marked_breaks():
    model = Own().eval()
    calls = [torch.randn(1, 8, 16), torch.randn(3, 5, 16), torch.randn(2, 2, 16)]
    wants = [model(x) for x in calls]
    spec = enabling.spec_of(found(model), ["angles"], lambda n: model.body(torch.zeros(1, n, 16)))
    held = Graphs(spec, [4, 8, 16], tapes=FakeTape)
    held.capture()
    assert not held.disabled
    for x, want in zip(calls, wants, strict=True):
        torch.testing.assert_close(model(x), want)
    assert breakable.replays(held) == {"4": 1, "8": 1, "16": 1}
    held.release()


@torch.no_grad()
def test_an_argument_that_changes_and_is_not_declared_stops_the_capture():
    model = Own().eval()
    spec = enabling.spec_of(found(model), [], lambda n: model.body(torch.zeros(1, n, 16)))
    held = Graphs(spec, [4], tapes=FakeTape)
    held.capture()
    assert "reads angles, which changes from call to call" in held.disabled
    assert "per_token" in held.disabled


class Scaled(nn.Module):
    """Adds an argument with one row for each token, and scales by the largest value of all tokens."""

    class Layer(nn.Module):
        def forward(self, x, extra=None):
            x = x + extra
            return x / x.abs().amax()

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.Layer(), self.Layer()])
        self.one = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x, extra):
        for layer in self.layers:
            x = layer(x, extra=extra)
        return x


@torch.no_grad()
def test_arguments_of_an_earlier_call_leave_nothing_in_the_padding():
    model, zeros = Scaled().eval(), torch.zeros(1, 16, 4)
    inner = find_inner(model, inner=model, layers=list(model.layers), breaks=())
    spec = enabling.spec_of(inner, ["extra"], lambda n: model(zeros[:, :n], torch.full((1, n, 4), 9.0)))
    x, extra = torch.randn(1, 5, 4), torch.randn(1, 5, 4)
    want = model(x, extra)
    held = Graphs(spec, [8, 16], tapes=FakeTape)
    held.capture()
    torch.testing.assert_close(model(x, extra), want)
    for n in (8, 16, 9):
        model(torch.randn(1, n, 4), torch.full((1, n, 4), 1e3))
        torch.testing.assert_close(model(x, extra), want)
    assert breakable.replays(held) == {"8": 5, "16": 2}


class Between(Own):
    """Does something with hidden states between two blocks, always or only where it is told to."""

    def __init__(self, change):
        super().__init__()
        self.change, self.on = change, True

    def forward(self, x):
        angles = self.body.table[: x.shape[1]].unsqueeze(0)
        for i, block in enumerate(self.body.blocks):
            x = block(x, angles=angles)
            x = self.change(x) if self.on and i == 1 else x
        return x


@pytest.mark.parametrize("change", [lambda x: x * 0.5, lambda x: x.mul_(0.5)])
@torch.no_grad()
def test_what_happens_between_layers_is_refused_and_never_left_out(change):
    model = Between(change).eval()
    x = torch.randn(2, 4, 16)
    inner = find_inner(model, inner=model, layers=list(model.body.blocks), breaks=[Mix])
    spec = enabling.spec_of(inner, ["angles"], lambda n: model(torch.zeros(1, n, 16)))
    held = Graphs(spec, [8], tapes=FakeTape)
    held.capture()
    assert "hidden states change between layer 1 and layer 2" in held.disabled
    model.on = False
    want = model(x.clone())
    held = Graphs(spec, [8], tapes=FakeTape)
    held.capture()
    torch.testing.assert_close(model(x.clone()), want)
    model.on = True
    with pytest.raises(CaptureError, match="between layer 1 and layer 2"):
        model(x.clone())
    model.on = False
    torch.testing.assert_close(model(x.clone()), want)
    assert breakable.replays(held) == {"8": 3}


@torch.no_grad()
def test_hidden_states_that_become_no_tensor_are_refused_by_name():
    model, _ = between(lambda x: x)
    model.change = lambda x: (x,)
    with pytest.raises(CaptureError, match="between layer 1 and layer 2"):
        model(torch.randn(1, 8, 16))


def between(change):
    model = Between(change).eval()
    inner = find_inner(model, inner=model, layers=list(model.body.blocks), breaks=[Mix])
    spec = enabling.spec_of(inner, ["angles"], lambda n: model(torch.zeros(1, n, 16)))
    held = Graphs(spec, [8], tapes=FakeTape)
    held.capture()
    return model, held


@torch.inference_mode()
def test_a_write_between_layers_is_refused_in_inference_mode_too():
    _, held = between(lambda x: x.mul_(0.5))
    assert "hidden states change between layer 1 and layer 2" in held.disabled


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.view(x.shape),
        lambda x: x[...],
        lambda x: x.detach(),
        lambda x: torch.utils.checkpoint.checkpoint(lambda y: y, x, use_reentrant=True),
    ],
    ids=["view", "index", "detach", "checkpoint"],
)
@torch.no_grad()
def test_views_between_layers_are_the_same_hidden_states(change):
    x = torch.randn(2, 4, 16)
    want = Between(change).eval()
    model, held = between(change)
    want.load_state_dict(model.state_dict())
    for _ in range(2):
        torch.testing.assert_close(model(x.clone()), want(x.clone()))
    assert breakable.replays(held) == {"8": 2}


class Extra(Own):
    """Gives its last block another argument where it is told to."""

    def __init__(self):
        super().__init__()
        self.options = {}

    def forward(self, x):
        angles = self.body.table[: x.shape[1]].unsqueeze(0)
        for i, block in enumerate(self.body.blocks):
            x = block(x, **({"angles": angles} | self.options if i == 2 else {"angles": angles}))
        return x


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"boost": torch.ones(1)}, "layer 2: the layers get boost, which was not captured"),
        ({"angles": torch.ones(1, 4, 1)}, r"layer 2: angles is \[1, 4, 1\]"),
        ({"angles": None}, "layer 2: angles is NoneType"),
    ],
)
@torch.no_grad()
def test_a_later_layer_with_other_arguments_is_refused(options, says):
    model = Extra().eval()
    x = torch.randn(2, 4, 16)
    inner = find_inner(model, inner=model, layers=list(model.body.blocks), breaks=[Mix])
    spec = enabling.spec_of(inner, ["angles"], lambda n: model(torch.zeros(1, n, 16)))
    want = model(x)
    held = Graphs(spec, [8], tapes=FakeTape)
    held.capture()
    model.options = options
    with pytest.raises(CaptureError, match=says):
        model(x)
    model.options = {}
    torch.testing.assert_close(model(x), want)


def test_an_example_is_asked_for_where_none_is_known():
    with pytest.raises(InputError, match=r"does not take inputs_embeds: pass example="):
        enabling.spec_of(found(Own()))


@pytest.mark.parametrize(
    ("tokens", "options", "says"),
    [
        ([], {}, "whole numbers of at least 1"),
        ([0], {}, "whole numbers of at least 1"),
        ([4.0], {}, "whole numbers of at least 1"),
        ([4], {"decode": [True]}, "decode="),
        ([4], {"verify_replays": -1}, "verify_replays=-1"),
        ([4], {}, "is on cpu: CUDA graphs need it on a GPU"),
    ],
)
def test_wrong_requests_are_refused_and_change_nothing(tokens, options, says):
    model = breakable.model()
    with pytest.raises(InputError, match=says):
        graphs.enable(model, tokens, **options)
    assert "forward" not in model.model.__dict__


def test_the_room_is_there_without_an_import_of_its_own():
    code = "import fp4dispatch, sys; assert 'fp4dispatch.graphs' not in sys.modules; print(fp4dispatch.graphs.enable)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "function enable" in done.stdout


def test_what_is_not_known_is_not_guessed():
    with pytest.raises(InnerNotFoundError, match="register_finder"):
        graphs.enable(Own(), [4])


def test_a_model_without_graphs_has_none_to_ask():
    model = breakable.model()
    graphs.disable(model)  # nothing happens
    for ask in (lambda: graphs.stats(model), lambda: graphs.can_run(model, 4)):
        with pytest.raises(InputError, match="has no graphs: call"):
            ask()


@torch.no_grad()
def test_can_run_says_what_a_call_would_be_told():
    held = breakable.captured(breakable.model(), [8, 16], tapes=FakeTape)
    assert held.why_not(8, {}) == ()
    assert [r.condition for r in held.why_not(17, {"idle_ranks": (1,)})] == ["too-many-tokens", "idle-ranks"]
    with pytest.raises(InputError, match="'colour' is no fact of a batch"):
        held.why_not(8, {"colour": 1})
    for name in ("num_tokens", "buckets", "pays_from"):
        with pytest.raises(InputError, match=f"'{name}' comes from the call and its graphs"), held.declare({name: 1}):
            pass


@torch.no_grad()
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_with_graphs_runs_its_own_weights(copier):
    model = breakable.model()
    x = torch.randint(1, 128, (2, 8))
    held = breakable.captured(model, [16], tapes=FakeTape)
    want = model(x, use_cache=False).logits
    twin = copier(model)
    for layer in twin.model.layers:
        layer.mlp.up_proj.weight.mul_(2)
    assert not torch.allclose(twin(x, use_cache=False).logits, want)
    assert torch.equal(model(x, use_cache=False).logits, want)
    assert breakable.replays(held) == {"16": 2}


def test_the_signature_of_a_captured_module_stays():
    model = breakable.model()
    before = inspect.signature(model.model.forward)
    held = breakable.captured(model, [16], tapes=FakeTape)
    assert inspect.signature(model.model.forward) == before
    held.release()


def test_a_model_with_graphs_is_freed_with_its_last_reference():
    model = breakable.model()
    held = breakable.captured(model, [16], tapes=FakeTape)
    model.__dict__[enabling._ATTRIBUTE] = enabling._Held(held)
    gone = weakref.ref(model)
    del model, held
    gc.collect()
    assert gone() is None


def test_hooks_inside_a_layer_are_found_before_a_capture():
    model = breakable.model()
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    held = Graphs(breakable.spec(model), [8], tapes=FakeTape)
    held.capture()
    assert "hooks of mlp would not run at replay" in held.disabled


@torch.no_grad()
def test_hooks_inside_of_a_break_run():
    class Inside(Mix):
        def __init__(self):
            super().__init__()
            self.gain = nn.Identity()

        def forward(self, x):
            return self.gain(super().forward(x))

    model = Own().eval()
    for block in model.body.blocks:
        block.mix = Inside()
        block.mix.gain.register_forward_hook(lambda _, __, out: out * 2)
    x = torch.randn(2, 4, 16)
    want = model(x)
    inner = find_inner(model, inner="body", layers=[f"blocks.{i}" for i in range(3)], breaks=[Inside])
    spec = enabling.spec_of(inner, ["angles"], lambda n: model.body(torch.zeros(1, n, 16)))
    held = Graphs(spec, [8], tapes=FakeTape)
    held.capture()
    torch.testing.assert_close(model(x), want)
    assert breakable.replays(held) == {"8": 1}
    model.body.blocks[0].mix.register_forward_hook(lambda *_: None)
    assert [r.condition for r in held.why_not(8, {})] == ["hooks"]


@torch.no_grad()
def test_a_break_of_another_form_is_refused_at_capture():
    class Two(Mix):
        def forward(self, x):
            return x, x

    model = Own().eval()
    model.body.blocks[1].mix = Two()
    spec = enabling.spec_of(
        find_inner(model, inner="body", breaks=[Mix]), [], lambda n: model.body(torch.zeros(1, n, 16))
    )
    held = Graphs(spec, [4], tapes=FakeTape)
    held.capture()
    assert "the break Two returns tuple; need one tensor" in held.disabled
