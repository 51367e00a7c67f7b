"""Layers that hold their weights once: nothing is lost, whatever is done with them. W4 kernels in torch, on the CPU."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn

import fp4dispatch
from fp4dispatch import compact, warmup
from fp4dispatch.backends.own import w4
from fp4dispatch.checkpoints import load_quantized, save_quantized
from fp4dispatch.errors import CaptureError
from fp4dispatch.machine import capture
from fp4dispatch.models.linear import FP4Linear, FP8Linear
from tests import w4_fake
from tests.hopper import seems_to_be_here

N, K = 96, 208
FREED = N * K // 2 + N * K // 16


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    kernels = w4_fake.install(monkeypatch)
    with seems_to_be_here(monkeypatch):
        yield kernels


def layer(shards=(), static=False, seed=0, **options):
    weights = w4_fake.weights(N, K, shards, seed=seed, static=torch.tensor(0.01) if static else None)
    return FP4Linear.from_weights(weights, torch.randn(N).bfloat16(), **options)


def dropped(**options):
    """A layer without its canonical weights, its state before, and x with what the layer made of it then."""
    made = layer(**options)
    state = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    x = torch.randn(70, K).bfloat16()
    wants = {m: made(x[:m]) for m in (1, 70)}
    before = made.nbytes()
    assert made.compact() == FREED
    assert before - made.nbytes() == FREED
    assert is_dropped(made)
    return made, state, x, wants


def is_dropped(made):
    return "weight" not in made._buffers and "weight_scale" not in made._buffers


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))


def raw(tensor):
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def same_state(a, b):
    return list(a) == list(b) and all(same(a[name], b[name]) for name in a)


def answers(made, x, wants):
    return all(torch.equal(made(x[:m]), want) for m, want in wants.items())


def test_a_layer_holds_its_packed_copy_alone_and_computes_the_same():
    made, _, x, wants = dropped()
    held = sum(t.numel() * t.element_size() for t in made.buffers())
    packed = 2 * 4 * 2304
    assert held == packed + 4 + 4 + 4 * N  # global scale, and what is made of it
    assert answers(made, x, wants)
    assert made.compact() == 0
    assert is_dropped(made)


def test_what_nobody_else_holds_is_freed_at_once():
    made = layer()
    made(torch.randn(1, K).bfloat16())
    held = [weakref.ref(made.weight), weakref.ref(made.weight_scale)]
    assert made.compact() == FREED
    assert [found() for found in held] == [None, None]


@pytest.mark.parametrize("options", [{}, {"shards": (40, 32, 24)}, {"static": True}])
def test_the_state_is_the_same_to_the_byte_and_in_the_same_order(options):
    made, state, x, wants = dropped(**options)
    assert same_state(made.state_dict(), state)
    assert same_state(made.state_dict(keep_vars=True), state)
    assert is_dropped(made)  # only for a moment
    assert answers(made, x, wants)
    made.check()
    assert is_dropped(made)


def test_what_is_read_comes_back_to_stay():
    for name in ("weight", "weight_scale"):
        made, state, x, wants = dropped()
        assert same(getattr(made, name), state[name])
        assert not is_dropped(made)
        assert getattr(made, name) is getattr(made, name)
        assert same_state(made.state_dict(), state)
        assert answers(made, x, wants)
        assert made.compact() == FREED
    with pytest.raises(AttributeError):
        made.no_such_thing  # noqa: B018


def test_what_is_set_is_kept():
    made, state, *_ = dropped()
    other = state["weight"] ^ 1
    made.weight = other
    assert made.weight is other
    assert same(made.state_dict()["weight"], other)
    made._refresh()
    assert made.compact() == FREED
    assert same(made.state_dict()["weight"], other)


def test_weights_for_backends_and_saving_are_there_for_a_moment():
    made, state, *_ = dropped()
    w = made.weights()
    assert same(w.weight, state["weight"])
    assert same(w.scale, state["weight_scale"])
    assert is_dropped(made)
    problem = made.problem(5)
    assert (problem.op, problem.scaling, problem.n, problem.k, problem.m) == ("nvfp4_gemm", "nvfp4", N, K, 5)


def test_asking_about_a_layer_unpacks_nothing(monkeypatch):
    made, _, x, _ = dropped()
    monkeypatch.setattr(w4, "unpack_w4p", lambda *a: pytest.fail("unpacked"))
    assert made.device == torch.device("cpu")
    repr(made)
    made.nbytes()
    made.problem(3)
    made.bind()
    made.decisions()
    made(x)
    warmup(nn.Sequential(made), tokens=[2])
    assert is_dropped(made)


@pytest.mark.parametrize(
    "copier",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), lambda m: _torch_save(m)],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_copies_are_whole_and_their_own(copier):
    made, state, x, wants = dropped()
    other = copier(made)
    assert is_dropped(made)
    assert not is_dropped(other)
    assert same_state(other.state_dict(), state)
    other.weight.zero_()
    other._refresh()
    assert answers(made, x, wants)
    assert same_state(made.state_dict(), state)
    assert other.compact() == FREED


def _torch_save(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_loading_another_state_loads_it():
    made, *_ = dropped()
    other = layer(seed=9)
    x = torch.randn(3, K).bfloat16()
    made.load_state_dict(other.state_dict())
    assert same_state(made.state_dict(), other.state_dict())
    assert torch.equal(made(x), other(x))
    made.compact()
    third, *_ = dropped(seed=7)
    third.load_state_dict(made.state_dict(), assign=True)
    assert torch.equal(third(x), other(x))
    assert third.compact() == FREED


def test_moves_and_casts_lose_nothing():
    made, state, x, wants = dropped()
    made.to("cpu")
    assert same_state(made.state_dict(), state)
    assert answers(made, x, wants)
    made.compact()
    made.to(torch.float16)
    assert same(made.weight, state["weight"])
    assert made.bias.dtype == torch.float16
    made.compact()
    assert made.to("meta").weight.is_meta


def test_another_dtype_and_another_backend_get_the_weights():
    made, state, x, wants = dropped()
    want = layer()(x.half())
    assert torch.equal(made(x.half()), want)  # the same layout
    assert is_dropped(made)
    single = made(x.float())  # the reference, which reads canonical tensors
    assert torch.equal(single, layer()(x.float()))
    assert answers(made, x, wants)
    assert same_state(made.state_dict(), state)
    made.backend = "reference"
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        made.rebind(dtype)
    assert not is_dropped(made)  # nobody holds the packed copy any more
    assert same_state(made.state_dict(), state)
    assert made.compact() == 0
    assert torch.equal(made(x), layer(backend="reference")(x))


def test_weights_that_a_backend_reads_are_kept():
    for made in (
        layer(backend="reference"),
        FP8Linear.from_linear(nn.Linear(64, 32).bfloat16(), scaling="row", backend="reference"),
    ):
        made(torch.randn(2, made.in_features).bfloat16())
        before = made.nbytes()
        assert made.compact() == 0
        assert made.nbytes() == before
    both = layer()
    x = torch.randn(2, K)
    both(x.bfloat16())
    want = both(x)  # float32 is the reference's, on the tensors themselves: dropping them would free nothing
    assert both.compact() == 0
    assert not is_dropped(both)
    assert torch.equal(both(x), want)
    fresh = FP4Linear(64, 32)
    fresh._forget()
    assert fresh.compact() == 0  # nothing is bound


def test_a_layout_that_is_not_exact_is_not_trusted(monkeypatch, caplog):
    made = layer()
    real = w4.unpack_w4p

    def off(packed, n, k):
        codes, scale = real(packed, n, k)
        codes[-1, -1] ^= 1
        return codes, scale

    monkeypatch.setattr(w4, "unpack_w4p", off)
    assert made.compact() == 0
    assert not is_dropped(made)
    assert "both are kept" in caplog.text


def test_nothing_is_dropped_or_unpacked_during_capture(monkeypatch):
    made, _, x, wants = dropped()
    whole = layer(seed=3)
    with monkeypatch.context() as patch:
        patch.setattr(capture, "is_capturing", lambda: True)
        assert answers(made, x, wants)
        for what in (lambda: made.weight, made.state_dict, made.weights, lambda: made.to("cpu"), made.check):
            with pytest.raises(CaptureError, match="unpacking weights"):
                what()
        with pytest.raises(CaptureError, match="dropping canonical weights"):
            whole.compact()
    assert is_dropped(made)
    assert answers(made, x, wants)


def test_a_checkpoint_of_a_compact_model_is_the_same_file(tmp_path):
    files = []
    for small in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleDict({"one": layer(seed=1), "two": layer(seed=2), "norm": nn.LayerNorm(8)})
        if small:
            assert compact(model) == 2 * FREED
        save_quantized(model, tmp_path / str(small), format="modelopt")
        files.append({p.name: p.read_bytes() for p in sorted((tmp_path / str(small)).iterdir())})
    assert files[0] == files[1]
    target = nn.ModuleDict({"one": nn.Linear(K, N), "two": nn.Linear(K, N), "norm": nn.LayerNorm(8)}).bfloat16()
    load_quantized(target, tmp_path / "True")
    assert same(target["one"].weight, layer(seed=1).weight)


def test_threads_that_read_at_once_get_the_same_weights():
    made, state, x, wants = dropped()
    wrong = []

    def work():
        for _ in range(20):
            if not (same(made.weight, state["weight"]) and answers(made, x, {1: wants[1]})):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert list(made.state_dict()) == list(state)


def test_it_is_public():
    assert fp4dispatch.compact is compact
    assert compact(nn.Linear(2, 2)) == 0


def test_a_compiled_layer_stays_compact():
    made, state, x, wants = dropped()
    compiled = torch.compile(made, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x), wants[70])
    assert is_dropped(made)
    assert same_state(made.state_dict(), state)
    with torch.no_grad():
        assert torch.equal(compiled(x), wants[70])
    assert is_dropped(made)
