"""A load takes all of a layer's state, or leaves the layer as it was: tensors, results, bindings, compactness."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp4dispatch.errors import CaptureError, FormatError, InputError
from fp4dispatch.machine import capture
from fp4dispatch.models.linear import FP4Linear, FP8Linear
from tests import w4_fake
from tests.hopper import seems_to_be_here

K, N = 128, 96
KINDS = ("nvfp4", "tensor", "row", "block128")
SCALES = {"nvfp4": "weight_scale", "tensor": "weight_scale", "row": "weight_scale", "block128": "weight_scale_inv"}


def make(kind, seed=0, bias=True):
    torch.manual_seed(seed)
    linear = nn.Linear(K, N, bias, dtype=torch.bfloat16).requires_grad_(False)
    linear.weight.mul_(1 + seed / 10)
    if kind == "nvfp4":
        return FP4Linear.from_linear(linear)
    return FP8Linear.from_linear(linear, scaling=kind)


def tokens():
    torch.manual_seed(1)
    return torch.randn(5, K, dtype=torch.bfloat16)


def bytes_of(tensor):
    return tensor.reshape(-1).view(torch.uint8).clone()


def nan_in(tensor):
    found = tensor.clone()
    if tensor.dtype == torch.float8_e4m3fn:
        found.view(torch.uint8).view(-1)[3] = 0x7F
    else:
        found.view(-1)[-1] = float("nan")
    return found


def change(name, how):
    """Return what changes a state: (state, name of the scale) -> None."""
    return lambda state, scale: state.__setitem__(
        scale if name == "scale" else name, how(state[scale if name == "scale" else name])
    )


FAULTS = {
    "weight of another shape": change("weight", lambda t: t[:-1].clone()),
    "weight of another K": change("weight", lambda t: t[:, :-16].clone()),
    "weight of another dtype": change("weight", lambda t: t.to(torch.int8)),
    "weight in bfloat16": change("weight", lambda t: t.to(torch.bfloat16)),
    "weight that is no tensor": change("weight", lambda t: "weight"),
    "scale of another shape": change("scale", lambda t: torch.ones(3, 5, dtype=t.dtype)),
    "scale of another dtype": change("scale", lambda t: t.to(torch.float64)),
    "scale with NaN": change("scale", nan_in),
    "bias of another shape": change("bias", lambda t: t[1:].clone()),
    "bias of integers": change("bias", lambda t: t.to(torch.int32)),
    "input_scale of another dtype": lambda state, _: state.update(input_scale=torch.tensor(1.0, dtype=torch.float64)),
    "input_scale of another shape": lambda state, _: state.update(input_scale=torch.ones(3)),
    "input_scale that is NaN": lambda state, _: state.update(input_scale=torch.tensor(float("nan"))),
    "input_scale that is negative": lambda state, _: state.update(input_scale=torch.tensor(-1.0)),
    "weight missing": lambda state, _: state.pop("weight"),
    "scale missing": lambda state, scale: state.pop(scale),
    "bias missing": lambda state, _: state.pop("bias"),
    "a key too many": lambda state, _: state.update(weight_scale_3=torch.ones(())),
    "a key below": lambda state, _: state.update({"weight.qdata": torch.ones(())}),
}
ONLY_STRICT = {"bias missing", "a key too many", "a key below"}
"""Not faults with ``strict=False``: the rest is whole."""


def snapshot(layer, x):
    """What a refused load must leave: names, objects, bytes, results, and what runs them."""
    with torch.no_grad():
        y = layer(x)
    state = layer._buffers | layer._parameters
    return {
        "objects": {name: id(tensor) for name, tensor in state.items()},
        "bytes": {name: bytes_of(t).tolist() for name, t in state.items() if t is not None},
        "bound": {dtype: id(bound) for dtype, bound in layer._state.bound.items()},
        "y": y.tolist(),
        "names": list(layer.state_dict()),
    }


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "lenient"])
@pytest.mark.parametrize("assign", [True, False], ids=["assign", "copy"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_refused_load_leaves_the_layer_as_it_was(kind, fault, assign, strict):
    layer, x = make(kind), tokens()
    layer(x)
    state = {name: tensor.clone() for name, tensor in make(kind, seed=7).state_dict().items()}
    FAULTS[fault](state, SCALES[kind])
    before = snapshot(layer, x)
    if fault in ONLY_STRICT and not strict:
        layer.load_state_dict(state, assign=assign, strict=False)
        assert torch.equal(bytes_of(layer.weight), bytes_of(make(kind, seed=7).weight))
        return
    with pytest.raises((RuntimeError, InputError)):
        layer.load_state_dict(state, assign=assign, strict=strict)
    assert snapshot(layer, x) == before


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize(
    ("kind", "other"), [("tensor", "row"), ("row", "tensor"), ("row", "block128"), ("nvfp4", "row")]
)
def test_scalings_do_not_mix(kind, other, assign):
    layer, x = make(kind), tokens()
    before = snapshot(layer, x)
    for strict in (True, False):
        with pytest.raises(RuntimeError):
            layer.load_state_dict(make(other, seed=7).state_dict(), assign=assign, strict=strict)
        assert snapshot(layer, x) == before


@pytest.mark.parametrize("kind", KINDS)
def test_other_layers_of_a_model_do_not_matter(kind):
    """A model is loaded layer by layer: one that is refused stays, the others are loaded (as torch does)."""
    model = nn.Sequential(make(kind), nn.Linear(N, K, dtype=torch.bfloat16), make(kind, seed=1))
    x = tokens()
    before = snapshot(model[0], x)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, tensor in make(kind, seed=7).state_dict().items():
        state[f"0.{name}"] = state[f"2.{name}"] = tensor.clone()
    state["0.weight"] = state["0.weight"][1:].clone()
    with pytest.raises(RuntimeError, match=r"0\.weight"):
        model.load_state_dict(state)
    assert snapshot(model[0], x) == before
    assert torch.equal(model[2](x), make(kind, seed=7)(x))


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_state_is_loaded(kind, assign):
    layer, new, x = make(kind), make(kind, seed=7), tokens()
    layer(x)
    objects = {name: id(tensor) for name, tensor in layer.state_dict(keep_vars=True).items()}
    result = layer.load_state_dict({name: t.clone() for name, t in new.state_dict().items()}, assign=assign)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert torch.equal(layer(x), new(x))
    same = {name: id(tensor) for name, tensor in layer.state_dict(keep_vars=True).items()} == objects
    assert same is not assign
    again = layer.load_state_dict({}, strict=False)
    assert "weight" in again.missing_keys or not again.missing_keys
    assert torch.equal(layer(x), new(x))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("fault", sorted(set(FAULTS) - ONLY_STRICT - {"weight missing"}))
def test_nested_layers_are_whole_too(fault, strict):
    """Torch does not tell a nested layer whether the load is strict."""
    model, x = nn.Sequential(make("tensor")), tokens()
    state = {name: tensor.clone() for name, tensor in make("tensor", seed=7).state_dict().items()}
    FAULTS[fault](state, "weight_scale")
    before = snapshot(model[0], x)
    with pytest.raises((RuntimeError, InputError)):
        model.load_state_dict({f"0.{name}": tensor for name, tensor in state.items()}, strict=strict)
    assert snapshot(model[0], x) == before


def test_a_new_input_scale_is_a_copy():
    layer = make("tensor")
    scale = torch.tensor([0.5])
    layer.load_state_dict(layer.state_dict() | {"input_scale": scale})
    scale.fill_(3)
    assert layer.input_scale.shape == ()
    assert float(layer.input_scale) == 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_swapping_tensors_on_load_is_all_or_nothing_too(kind):
    """``torch.__future__.set_swap_module_params_on_conversion``: engines set it."""
    layer, new, x = make(kind), make(kind, seed=7), tokens()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        before = snapshot(layer, x)
        with pytest.raises(RuntimeError):
            layer.load_state_dict(new.state_dict() | {"weight": new.weight[1:]})
        assert snapshot(layer, x) == before
        layer.load_state_dict({name: t.clone() for name, t in new.state_dict().items()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert torch.equal(layer(x), new(x))


def test_a_hook_that_renames_keys_is_heard():
    layer, new, x = make("row"), make("row", seed=7), tokens()
    layer.register_load_state_dict_pre_hook(
        lambda module, state, prefix, *_: state.__setitem__(prefix + "weight_scale", state.pop(prefix + "scale"))
    )
    state = new.state_dict()
    state["scale"] = state.pop("weight_scale")
    layer.load_state_dict(state)
    assert torch.equal(layer(x), new(x))


def test_under_inference_mode():
    with torch.inference_mode():
        layer = make("nvfp4")
        new = make("nvfp4", seed=7)
        x = tokens()
        want = new(x)
    layer.load_state_dict(new.state_dict())
    assert torch.equal(layer(x), want)


@pytest.mark.parametrize("assign", [True, False])
def test_a_refused_load_keeps_a_compact_layer_compact(monkeypatch, assign):
    w4_fake.install(monkeypatch)
    with seems_to_be_here(monkeypatch):
        layer, new, x = make("nvfp4"), make("nvfp4", seed=7), tokens()
        layer.backend = new.backend = "w4a16"
        layer.rebind(), new.rebind()
        old = layer(x)
        assert "weight" not in layer._buffers
        with pytest.raises(RuntimeError):
            layer.load_state_dict(new.state_dict() | {"weight_scale_2": torch.ones(2)}, assign=assign)
        with pytest.raises(FormatError):
            layer.load_state_dict(new.state_dict() | {"weight_scale": nan_in(new.weight_scale)}, assign=assign)
        assert "weight" not in layer._buffers
        assert torch.equal(layer(x), old)
        layer.load_state_dict({name: t.clone() for name, t in new.state_dict().items()}, assign=assign)
        assert torch.equal(layer(x), new(x))
        assert "weight" not in layer._buffers
        assert torch.equal(layer(x), new(x))


def test_nothing_is_loaded_during_capture(monkeypatch):
    layer, new, x = make("row"), make("row", seed=7), tokens()
    before = snapshot(layer, x)
    with monkeypatch.context() as patch:
        patch.setattr(capture, "is_capturing", lambda: True)
        with pytest.raises(CaptureError, match="loading weights"):
            layer.load_state_dict(new.state_dict())
    assert snapshot(layer, x) == before
