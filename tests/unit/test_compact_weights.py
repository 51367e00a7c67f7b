"""Layers that hold their weights once: nothing is lost, whatever is done with them. W4 kernels in torch, on the CPU."""

from __future__ import annotations

import copy
import io
import pickle
import sys
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
from fp4dispatch.graphs.watch import Watch
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
    whole = layer(keep_stored=True, **options)
    whole(x)
    assert not is_dropped(whole)
    assert whole.nbytes() - made.nbytes() == FREED == made.dropped_nbytes()
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


@pytest.mark.parametrize("keep_stored", [False, True])
def test_what_nobody_else_holds_is_freed_at_once(keep_stored):
    made = layer(keep_stored=keep_stored)
    held = [weakref.ref(made.weight), weakref.ref(made.weight_scale)]
    made(torch.randn(1, K).bfloat16())
    assert is_dropped(made) is not keep_stored
    assert made.compact() == (FREED if keep_stored else 0)
    assert [found() for found in held] == [None, None]


def test_layers_made_of_linears_never_hold_their_weights_twice():
    made = FP4Linear.from_linear(nn.Linear(K, N).bfloat16())
    assert is_dropped(made)  # bound, and not called yet
    assert not is_dropped(FP4Linear.from_linear(nn.Linear(K, N).bfloat16(), keep_stored=True))


def test_what_other_code_holds_is_dropped_when_it_lets_go():
    weights = w4_fake.weights(N, K)
    made = FP4Linear.from_weights(weights)
    x = torch.randn(3, K).bfloat16()
    want = made(x)
    assert not is_dropped(made)
    view = weights.weight.view(-1)[3:]
    del weights
    made(torch.randn(4, K).bfloat16())
    assert not is_dropped(made), "a view shares the memory"
    assert made._state.unchanged(made._buffers), "calls take the fast path meanwhile"
    view.fill_(0x11)
    assert not torch.equal(made(x), want)
    del view
    made(torch.randn(5, K).bfloat16())
    assert is_dropped(made)


@pytest.mark.parametrize("options", [{}, {"shards": (40, 32, 24)}, {"static": True}])
def test_the_state_is_the_same_to_the_byte_and_in_the_same_order(options):
    made, state, x, wants = dropped(**options)
    assert same_state(made.state_dict(), state)
    assert same_state(made.state_dict(keep_vars=True), state)
    assert is_dropped(made)  # only for a moment
    assert answers(made, x, wants)
    made.check()
    assert is_dropped(made)


def test_what_is_read_comes_back_until_the_next_call():
    for name in ("weight", "weight_scale"):
        made, state, x, wants = dropped()
        assert same(getattr(made, name), state[name])
        assert not is_dropped(made)
        assert getattr(made, name) is getattr(made, name)
        assert same_state(made.state_dict(), state)
        held = getattr(made, name)
        assert answers(made, x, wants)
        assert not is_dropped(made)
        assert getattr(made, name) is held
        del held
        made(x[:2])
        assert is_dropped(made)
        kept = layer(keep_stored=True)
        kept(x)
        assert kept.compact() == FREED
        assert same(getattr(kept, name), state[name])
        kept(x)
        assert not is_dropped(kept)
    with pytest.raises(AttributeError):
        made.no_such_thing  # noqa: B018


def test_what_is_set_is_kept():
    made, state, *_ = dropped()
    other = state["weight"] ^ 1
    made.weight = other
    assert made.weight is other
    assert same(made.state_dict()["weight"], other)
    made._refresh()
    assert not is_dropped(made)
    want = other.clone()
    del other
    made(torch.randn(1, K).bfloat16())
    assert is_dropped(made)
    assert same(made.state_dict()["weight"], want)


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
    assert same_state(other.state_dict(), state)
    other.weight.zero_()
    other(x)
    assert is_dropped(other)
    assert not other.weight.any()
    assert answers(made, x, wants)
    assert same_state(made.state_dict(), state)


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
    assert is_dropped(made)
    third, *_ = dropped(seed=7)
    third.load_state_dict({name: tensor.clone() for name, tensor in made.state_dict().items()}, assign=True)
    assert torch.equal(third(x), other(x))
    assert is_dropped(third)


def test_moves_and_casts_lose_nothing():
    made, state, x, wants = dropped()
    made.to("cpu")
    assert same_state(made.state_dict(), state)
    assert is_dropped(made)  # bound again
    assert answers(made, x, wants)
    made.to(torch.float16)
    assert is_dropped(made)
    assert same(made.weight, state["weight"])
    assert made.bias.dtype == torch.float16
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
    both = layer(keep_stored=True)
    x = torch.randn(2, K)
    both(x.bfloat16())
    want = both(x)  # float32 is the reference's, on the tensors themselves: dropping them would free nothing
    assert both.compact() == 0
    assert not is_dropped(both)
    assert torch.equal(both(x), want)
    fresh = FP4Linear(64, 32)
    fresh._forget()
    assert fresh.compact() == 0  # nothing is bound


@pytest.mark.parametrize("keep_stored", [False, True])
def test_a_layout_that_is_not_exact_is_not_trusted(monkeypatch, caplog, keep_stored):
    made = layer(keep_stored=keep_stored)
    real = w4.unpack_w4p

    def off(packed, n, k):
        codes, scale = real(packed, n, k)
        codes[-1, -1] ^= 1
        return codes, scale

    monkeypatch.setattr(w4, "unpack_w4p", off)
    if keep_stored:
        assert made.compact() == 0
    x = torch.randn(3, K).bfloat16()
    assert torch.equal(made(x), layer(keep_stored=True)(x))
    assert not is_dropped(made)
    assert caplog.text.count("both are kept") == 1
    made(x[:2])
    assert caplog.text.count("both are kept") == 1


def test_a_write_that_torch_does_not_count_is_not_lost():
    made, _, x, _ = dropped()
    new = layer(seed=9)
    made.weight.data.copy_(new.weight)
    made.weight_scale.data.copy_(new.weight_scale)
    new.weight_scale_2 = made.weight_scale_2.clone()
    new.bias = made.bias
    assert torch.equal(made(x), new(x))
    assert is_dropped(made)
    made.weights().weight.zero_()
    assert torch.equal(made(x), made.bias.expand(70, N))


def test_a_watch_sees_what_happens_to_a_layer_that_was_read_since():
    made, *_ = dropped()
    watch = Watch([nn.Sequential(made)])
    assert watch.moved() == ""
    assert not made.weight.is_meta
    assert watch.moved() == ""
    assert is_dropped(made)
    new = layer(seed=9)
    made.weight.copy_(new.weight)
    assert watch.moved() == ""  # packed again, in place
    assert torch.equal(made.weights().weight, new.weight)
    made.weight = new.weight.clone()
    assert watch.moved().startswith("layout")


def test_what_is_put_into_the_buffers_is_not_lost():
    made, _, x, wants = dropped()
    new = layer(seed=9)
    made._buffers["weight"] = new.weight
    got = made(x)
    assert not torch.equal(got, wants[70])
    del made.weight
    with pytest.raises(AttributeError):
        made.weight  # noqa: B018


def test_nothing_is_dropped_or_unpacked_during_capture(monkeypatch):
    made, _, x, wants = dropped()
    whole = layer(seed=3)
    whole(x)
    read = layer(seed=3)
    read(x)
    assert not read.weight.is_meta
    with monkeypatch.context() as patch:
        patch.setattr(capture, "is_capturing", lambda: True)
        assert answers(made, x, wants)
        for what in (lambda: made.weight, made.state_dict, made.weights, lambda: made.to("cpu"), made.check):
            with pytest.raises(CaptureError, match="unpacking weights"):
                what()
        with pytest.raises(CaptureError, match=r"choosing backends for a layer .*\n.*warmup\(model"):
            made(x[:1].half())  # never bound for float16: what helps is to bind it, not to read the weights
        with pytest.raises(CaptureError, match="dropping canonical weights"):
            whole.compact()
        assert torch.equal(read(x), whole(x))
        assert not is_dropped(read)  # it waits
    read(x)
    assert is_dropped(read)
    assert is_dropped(made)
    assert answers(made, x, wants)


def test_a_checkpoint_of_a_compact_model_is_the_same_file(tmp_path):
    files = []
    for small in (False, True):
        torch.manual_seed(0)
        layers = {name: layer(seed=seed, keep_stored=True) for name, seed in (("one", 1), ("two", 2))}
        model = nn.ModuleDict({**layers, "norm": nn.LayerNorm(8)})
        if small:
            assert compact(model) == 2 * FREED
            assert all(map(is_dropped, layers.values()))
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


def test_a_state_is_whole_while_other_threads_call_the_layer(monkeypatch):
    made, state, x, _ = dropped()
    assert made.weight is not None  # restored: the next call drops it
    save = torch.nn.Module._save_to_state_dict
    callers = []

    def between(*arguments):
        callers.append(threading.Thread(target=made, args=(x,)))
        callers[-1].start()
        callers[-1].join(0.2)  # it waits for the end of this save
        save(*arguments)

    monkeypatch.setattr(torch.nn.Module, "_save_to_state_dict", between)
    assert same_state(made.state_dict(), state)
    callers[-1].join()
    made.bind()
    assert is_dropped(made)
    assert same_state(made.state_dict(), state)
    callers[-1].join()


def test_threads_that_save_at_once_all_get_a_whole_state():
    made, state, x, _ = dropped()
    wrong, interval = [], sys.getswitchinterval()

    def work(save):
        for _ in range(300):
            try:
                if not save:
                    made(x[:1])
                elif not {"weight", "weight_scale"} <= made.state_dict().keys():
                    wrong.append("missing")
            except KeyError as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(save,)) for save in (True, True, True, False)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []
    assert same_state(made.state_dict(), state)


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
