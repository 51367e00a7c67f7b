"""A model is in memory once: while it is replaced, loaded and warmed up, it and one layer. W4 kernels in torch."""

from __future__ import annotations

import gc
import logging

import pytest
import torch
from torch import nn

from fp4dispatch import report, warmup
from fp4dispatch.backends.own.tensors import w4_layout
from fp4dispatch.checkpoints import load_quantized, save_quantized
from fp4dispatch.errors import FormatError, NoBackendError
from fp4dispatch.models import linear, replace
from fp4dispatch.models.replace import replace_linears
from tests import w4_fake
from tests.hopper import seems_to_be_here
from tests.memory import Alive

LAYERS, SIZE = 6, 512
DENSE = 2 * SIZE * SIZE
STORED = SIZE * SIZE // 2 + SIZE * SIZE // 16
ROOM = 1.25 * DENSE
"""A layer, and what it takes to pack it."""
CHUNK = 1 << 14
"""Elements and bytes that are quantised and packed at a time here: a few per cent of a layer."""


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    w4_fake.install(monkeypatch)
    monkeypatch.setattr(linear, "_AT_A_TIME", CHUNK)
    monkeypatch.setattr(w4_layout, "STEP_BYTES", CHUNK)
    with seems_to_be_here(monkeypatch):
        yield


def dense(device="cpu", count=LAYERS):
    torch.manual_seed(0)
    layers = {str(i): nn.Linear(SIZE, SIZE, bias=False, device=device, dtype=torch.bfloat16) for i in range(count)}
    return nn.ModuleDict({"model": nn.ModuleDict(layers)})


def measured(model, do, beside=()):
    """What ``do`` returns, and bytes: before, at the peak, after."""
    gc.collect()
    with Alive(model, *beside) as alive:
        made = do()
        gc.collect()
        return made, alive.before, alive.peak, alive.now()


def test_replacing_needs_the_model_and_one_layer():
    model = dense()
    found, before, peak, after = measured(model, lambda: replace_linears(model))
    assert before == LAYERS * DENSE
    assert peak < before + ROOM, f"{(peak - before) / DENSE:.2f} layers more than the model"
    assert LAYERS * STORED <= after < 1.03 * LAYERS * STORED
    assert len(found.layers) == LAYERS


def test_keep_stored_holds_both():
    model = dense()
    found, _, _, after = measured(model, lambda: replace_linears(model, keep_stored=True))
    assert 2 * LAYERS * STORED <= after < 2.06 * LAYERS * STORED
    assert found.bytes_dropped == 0
    assert all(layer.keep_stored for layer in model["model"].values())


def test_loading_needs_the_model_and_one_layer(tmp_path):
    model = dense()
    replace_linears(model)
    save_quantized(model, tmp_path / "out", format="modelopt")
    del model
    empty = dense("meta")
    _, before, peak, after = measured(empty, lambda: load_quantized(empty, tmp_path / "out"))
    assert before == 0
    assert LAYERS * STORED <= after < 1.03 * LAYERS * STORED
    assert peak < after + ROOM
    again, _, peak, after = measured(empty, lambda: load_quantized(empty, tmp_path / "out"))
    assert peak < 2 * after + ROOM, "all or nothing: the old model and the new one"
    assert after < 1.03 * LAYERS * STORED
    assert again.layers[0].nbytes == STORED + 4


def test_loading_in_place_needs_one_layer():
    model, other = dense(), dense()
    replace_linears(model)
    replace_linears(other)
    state = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    _, before, peak, after = measured(model, lambda: model.load_state_dict(state), state.values())
    assert after < before + STORED // 8
    assert peak < before + ROOM


def test_warming_up_needs_one_layer():
    more = {}
    for count in (2, LAYERS):
        model = dense(count=count)
        replace_linears(model)
        _, before, peak, after = measured(model, lambda model=model: warmup(model, tokens=[1, 64]))
        more[count] = peak - before, after - before  # with scratch that all layers share
    assert more[LAYERS][0] < more[2][0] + STORED // 8
    assert more[LAYERS][1] < more[2][1] + STORED // 8


def test_saving_leaves_the_model_as_small_as_it_was(tmp_path):
    model = dense()
    replace_linears(model)
    _, before, _, after = measured(model, lambda: save_quantized(model, tmp_path / "out", format="modelopt"))
    assert after < before + STORED // 8


def test_the_reports_count_each_byte_once():
    model = dense()
    found = replace_linears(model)
    packed = sum(layer.nbytes() for layer in model["model"].values())
    assert found.model_bytes_before == LAYERS * DENSE
    assert found.model_bytes_after == found.bytes_after == packed < 1.03 * LAYERS * STORED
    assert found.bytes_dropped == LAYERS * STORED
    assert f"held once: {LAYERS * STORED / 1e6:.2f} MB" in str(found)
    assert found.to_dict()["bytes_dropped"] == LAYERS * STORED
    whole = report(model)
    assert whole.model_bytes == packed
    assert whole.dropped_bytes == LAYERS * STORED == sum(group.dropped_bytes for group in whole.groups)
    assert f"held once: {LAYERS * STORED / 1e6:.2f} MB" in str(whole)
    assert whole.to_dict()["dropped_bytes"] == LAYERS * STORED
    kept = dense()
    twice = replace_linears(kept, keep_stored=True)
    assert twice.model_bytes_after == packed + LAYERS * STORED
    assert "held once" not in str(twice)
    assert report(kept).model_bytes == packed + LAYERS * STORED
    assert report(kept).dropped_bytes == 0


@pytest.mark.parametrize("last", [False, True])
def test_an_error_that_is_found_first_leaves_the_model_unchanged(last):
    model = dense()
    with torch.no_grad():
        model["model"][str(LAYERS - 1 if last else 0)].weight[0, 0] = float("nan")
    with pytest.raises(FormatError, match=f"model.{LAYERS - 1 if last else 0}"):
        replace_linears(model)
    assert all(type(layer) is nn.Linear for layer in model["model"].values())


def test_what_interrupts_leaves_whole_layers_and_can_be_continued(monkeypatch, caplog):
    model, want = dense(), dense()
    replace_linears(want)
    real, calls = replace._quantise, []

    def quantise(name, *rest):
        calls.append(name)
        if len(calls) == 5:
            raise NoBackendError("planted")
        return real(name, *rest)

    monkeypatch.setattr(replace, "_quantise", quantise)
    with caplog.at_level(logging.WARNING, "fp4dispatch"), pytest.raises(NoBackendError):
        replace_linears(model)
    assert "stopped before model.4: 4 layers are replaced, 2 are not" in caplog.text
    assert [type(layer) is nn.Linear for layer in model["model"].values()] == 4 * [False] + 2 * [True]
    replace_linears(model)
    x = torch.randn(3, SIZE).bfloat16()
    for one, other in zip(model["model"].values(), want["model"].values(), strict=True):
        assert torch.equal(one(x), other(x))


def test_on_a_cpu_without_such_a_gpu_nothing_is_held_twice(monkeypatch):
    from fp4dispatch.dispatch import choose, here

    monkeypatch.undo()
    choose.reset()
    assert here is not None
    model = dense()
    _, _, _, after = measured(model, lambda: replace_linears(model))
    assert after < 1.01 * LAYERS * STORED
    assert all("weight" in layer._buffers for layer in model["model"].values())
