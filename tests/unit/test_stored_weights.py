"""What is multiplied is what is stored, whoever wrote it and however: eager, compiled, compact, captured."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn

import fp4dispatch
from fp4dispatch import jit, refresh, warmup
from fp4dispatch.dispatch import choose
from fp4dispatch.errors import CaptureError, FormatError, InputError
from fp4dispatch.graphs.watch import Watch
from fp4dispatch.machine import capture
from fp4dispatch.models.linear import FP4Linear, FP8Linear
from fp4dispatch.models.seen_tensors import CANONICAL
from fp4dispatch.run import owners
from tests import w4_fake, w8_fake
from tests.hopper import seems_to_be_here

K, N = 208, 96
KINDS = {
    "w4a16": ("nvfp4", "w4a16"),
    "w4a8": ("nvfp4", "w4a8"),
    "w8a16 row": ("row", "w8a16"),
    "w8a16 tensor": ("tensor", "w8a16"),
    "w8a8 row": ("row", "w8a8"),
    "w8a8 tensor": ("tensor", "w8a8"),
    "w8a8 block128": ("block128", "w8a8"),
    "reference nvfp4": ("nvfp4", "reference"),
    "reference row": ("row", "reference"),
    "reference block128": ("block128", "reference"),
}
"""Layouts that are packed, that are in part the stored tensors themselves, and that are nothing else."""
FEW = ("w4a16", "w8a16 row", "w8a8 block128", "reference nvfp4")
"""One of each sort."""


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """A seeming H200 with the emulated kernels of all four backends; ``[0]``: which quantiser is loaded, that of w8."""
    of_w8 = [False]
    w4_fake.install(monkeypatch)
    w4_load = jit.load
    w8_fake.install(monkeypatch)
    w8_load = jit.load

    def load(kernel, *rest):
        w8 = kernel.startswith("w8") or (kernel == "w4_activations" and of_w8[0])
        return (w8_load if w8 else w4_load)(kernel, *rest)

    monkeypatch.setattr(jit, "load", load)
    with seems_to_be_here(monkeypatch):
        yield of_w8


def make(kind, seed=0, **options):
    torch.manual_seed(seed)
    linear = nn.Linear(K, N, dtype=torch.bfloat16).requires_grad_(False)
    linear.weight.mul_(1 + seed / 10)  # so that every scale differs
    scaling, backend = KINDS[kind]
    options.setdefault("backend", backend)
    if scaling == "nvfp4":
        return FP4Linear.from_linear(linear, **options)
    return FP8Linear.from_linear(linear, scaling=scaling, **options)


@pytest.fixture(params=KINDS)
def kind(request, hopper):
    hopper[0] = request.param.startswith("w8")
    return request.param


@pytest.fixture(params=FEW)
def few(request, hopper):
    hopper[0] = request.param.startswith("w8")
    return request.param


def tokens(m=5):
    torch.manual_seed(1)
    return torch.randn(m, K, dtype=torch.bfloat16)


# ------------------------------------------------------------------------------------------------------- ways to write


def bytes_of(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def stored(layer):
    dropped = CANONICAL if layer._state.dropped else ()
    return [name for name in layer.quantized if name in dropped or layer._buffers.get(name) is not None]


def copy_in_place(layer, new):
    for name in stored(new):
        getattr(layer, name).copy_(getattr(new, name))


def write_views(layer, new):
    for name in stored(new):
        getattr(layer, name).detach().reshape(-1).view(torch.uint8).copy_(bytes_of(getattr(new, name)))


def write_in_inference_mode(layer, new):
    with torch.inference_mode():
        copy_in_place(layer, new)


def set_in_place(layer, new):
    for name in stored(new):
        getattr(layer, name).set_(getattr(new, name).clone())


def assign(layer, new):
    for name in stored(new):
        setattr(layer, name, getattr(new, name).clone())


def assign_parameters(layer, new):
    for name in stored(new):
        setattr(layer, name, nn.Parameter(getattr(new, name).clone(), requires_grad=False))


def swap_data(layer, new):
    for name in stored(new):
        getattr(layer, name).data = getattr(new, name).clone()


def exchange_buffers(layer, new):
    for name in stored(new):
        layer._buffers[name] = getattr(new, name).clone()


def load(layer, new):
    layer.load_state_dict(new.state_dict())


def load_assigning(layer, new):
    layer.load_state_dict({name: t.clone() for name, t in new.state_dict().items()}, assign=True)


def write_state(layer, new):
    for name, tensor in layer.state_dict().items():
        tensor.copy_(new.state_dict()[name])


WAYS = (
    *(copy_in_place, write_views, write_in_inference_mode, set_in_place, assign, assign_parameters, swap_data),
    *(exchange_buffers, load, load_assigning, write_state),
)
way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


def take_over(way, layer, new):
    way(layer, new)
    with torch.no_grad():
        layer.bias.copy_(new.bias)


# --------------------------------------------------------------------------------------------------------------- eager


@way
def test_an_eager_call_multiplies_what_was_written(kind, way):
    layer, new, x = make(kind), make(kind, seed=7), tokens()
    old = layer(x)
    assert torch.equal(layer(x), old)
    take_over(way, layer, new)
    want = new(x)
    assert not torch.equal(want, old)
    assert torch.equal(layer(x), want)
    assert torch.equal(layer(x), want)
    for name, tensor in layer.state_dict().items():
        assert torch.equal(bytes_of(tensor), bytes_of(new.state_dict()[name]))
    assert torch.equal(layer(x.half()), new(x.half()))


@pytest.mark.parametrize("name", ["weight", "weight_scale", "weight_scale_2", "weight_scale_inv"])
def test_each_stored_tensor_alone_is_noticed(kind, name):
    layer, new, x = make(kind), make(kind, seed=7), tokens()
    if name not in stored(layer):
        pytest.skip(f"{kind} has no {name}")
    old = layer(x), layer(x.half())
    getattr(layer, name).copy_(getattr(new, name))
    mixed = copy.deepcopy(layer)
    got = layer(x), layer(x.half())
    assert not torch.equal(got[0], old[0])
    assert torch.equal(got[0], mixed(x))
    assert torch.equal(got[1], mixed(x.half()))


@way
def test_the_very_next_call_takes_the_fast_path_again(few, way, monkeypatch):
    layer, x = make(few), tokens()
    layer(x)
    take_over(way, layer, make(few, seed=7))
    layer(x)
    layer(x)
    monkeypatch.setattr(type(layer), "_call", lambda *_: pytest.fail("the long way"))
    layer(x)


def at_one_address(layer, name):
    """Move a stored tensor, and return a call that frees its memory and puts other values at the same address."""
    tensor = getattr(layer, name)
    memory = bytes_of(tensor).numpy().copy()

    def place():
        tensor.data = torch.from_numpy(memory).view(tensor.dtype).view(tensor.shape)

    def exchange(values):
        before = tensor.data_ptr(), tensor._version
        memory[:] = bytes_of(values).numpy()
        place()
        assert (tensor.data_ptr(), tensor._version) == before

    place()
    return exchange


@pytest.mark.parametrize("compiled", [False, True])
def test_other_memory_at_the_same_address_is_noticed(kind, compiled):
    """As where the allocator hands out again what a stored tensor had."""
    new, x = make(kind, seed=7), tokens()
    for name in stored(new):
        layer = make(kind, keep_stored=True)
        exchange = at_one_address(layer, name)
        torch._dynamo.reset()
        call = torch.compile(layer, backend="eager", fullgraph=True) if compiled else layer
        old = call(x)
        assert torch.equal(call(x), old)
        assert layer._state.unchanged(layer._buffers)
        exchange(getattr(new, name))
        got = call(x)
        assert torch.equal(got, copy.deepcopy(layer)(x))
        assert not torch.equal(got, old), name
        assert layer._state.unchanged(layer._buffers), "calls take the fast path again"


def test_graphs_get_other_memory_at_the_same_address(few):
    layer, new = make(few, keep_stored=True), make(few, seed=7)
    exchange = at_one_address(layer, "weight")
    layer(tokens())
    watch, held = Watch([layer]), layer._state.bound[torch.bfloat16].tensors
    assert not watch.moved()
    exchange(new.weight)
    assert not watch.moved()  # replays read what was packed again into the same memory
    fresh = copy.deepcopy(layer)
    fresh(tokens())
    for mine, want in zip(held, fresh._state.bound[torch.bfloat16].tensors, strict=True):
        assert torch.equal(bytes_of(mine), bytes_of(want))


def test_memory_at_the_same_address_of_a_dropped_tensor_is_noticed(hopper):
    layer, new, x = make("w4a16", keep_stored=True), make("w4a16", seed=7), tokens()
    exchange = at_one_address(layer, "weight")
    old, held = layer(x), layer.weight
    assert layer.compact()
    assert layer._state.lent
    assert torch.equal(layer(x), old)
    exchange(new.weight)
    got = layer(x)
    assert not torch.equal(got, old)
    assert torch.equal(layer.weight, held)
    assert torch.equal(got, copy.deepcopy(layer)(x))


def test_a_recorded_tensor_keeps_no_memory(few):
    layer = make(few, keep_stored=True)
    layer(tokens())
    storage = weakref.ref(layer.weight.untyped_storage())
    gc.collect()
    assert storage() is not None
    assert layer._state.unchanged(layer._buffers)
    layer.weight.data = torch.empty(0, dtype=layer.weight.dtype)
    assert storage() is None
    assert not layer._state.unchanged(layer._buffers)


def test_a_static_input_scale_is_noticed_too(hopper):
    hopper[0] = True
    layer, x = make("w8a8 tensor", activation="fp8"), tokens()
    layer(x)
    layer.input_scale = torch.tensor(0.5)
    want = copy.deepcopy(layer)(x)
    assert torch.equal(layer(x), want)
    layer.input_scale.fill_(0.001)
    assert not torch.equal(layer(x), want)
    assert torch.equal(layer(x), copy.deepcopy(layer)(x))
    layer.input_scale = None
    assert torch.equal(layer(x), make("w8a8 tensor", activation="fp8")(x))


def test_functional_call_uses_what_it_is_given_and_leaves_the_layer(kind):
    layer, new, x = make(kind), make(kind, seed=7), tokens()
    old = layer(x)
    theirs = {**dict(new.named_parameters()), **{name: getattr(new, name) for name in stored(new)}}
    with torch.no_grad():
        assert torch.equal(torch.func.functional_call(layer, theirs, (x,)), new(x))
        assert torch.equal(layer(x), old)
        everything = {name: tensor.clone() for name, tensor in layer.named_buffers()}
        everything |= {name: tensor.clone() for name, tensor in theirs.items()}
        assert torch.equal(torch.func.functional_call(layer, everything, (x,)), new(x))
        assert torch.equal(layer(x), old)
        assert torch.equal(torch.func.functional_call(layer, dict(layer.named_buffers()), (x,)), old)


def test_swapped_tensors_are_noticed(kind):
    layer, new, x = make(kind), make(kind, seed=7), tokens()
    layer(x)
    want = new(x)
    del new.bias
    try:
        for name in stored(layer):
            torch.utils.swap_tensors(getattr(layer, name), getattr(new, name))
    except RuntimeError:
        pytest.skip("torch refuses to swap tensors that something else holds")
    new.bias, layer.bias = layer.bias, make(kind, seed=7).bias
    assert torch.equal(layer(x), want)


def test_what_breaks_the_format_is_refused_until_it_is_mended(kind):
    layer, x = make(kind), tokens()
    want = layer(x)
    name = next(name for name in stored(layer) if "scale" in name)
    kept = getattr(layer, name).clone()
    getattr(layer, name).copy_(torch.full_like(kept.float(), float("nan")))
    for _ in range(2):
        with pytest.raises(FormatError, match=r"NaN|not finite"):
            layer(x)
    getattr(layer, name).copy_(kept)
    assert torch.equal(layer(x), want)
    layer.weight = layer.weight[:-1].clone()
    for _ in range(2):
        with pytest.raises(InputError, match="weight is"):
            layer(x)


@pytest.mark.parametrize("how", ["vmap", "subclass"])
def test_weights_without_memory_of_their_own_are_refused(kind, how):
    layer, x = make(kind), tokens()
    layer(x)
    if how == "subclass":
        layer._buffers["weight"] = layer.weight.as_subclass(type("Other", (torch.Tensor,), {}))
        with pytest.raises(InputError, match=r"plain torch\.Tensor"):
            layer(x)
        return
    both = torch.stack([layer.weight.view(torch.uint8)] * 2).view(layer.weight.dtype)
    with pytest.raises(InputError, match=r"plain torch\.Tensor"):
        torch.func.vmap(lambda w: torch.func.functional_call(layer, {"weight": w}, (x,)))(both)


# --------------------------------------------------------------------------------------------------- in place, captured


def test_a_write_in_place_keeps_addresses_so_that_graphs_see_it(kind):
    layer, new, x = make(kind), make(kind, seed=7), tokens()
    layer(x)
    layer(x.half())
    bound = layer.bind()
    tensors, ready = bound.tensors, bound.ready[5]
    copy_in_place(layer, new)
    layer(x)
    assert layer.bind() is bound
    assert bound.tensors is tensors
    assert bound.ready[5] is ready
    out = torch.empty(5, N, dtype=torch.bfloat16)
    ready[0](x, out, new.bias)  # as a graph that was captured would
    assert torch.equal(out, new(x))


@pytest.mark.parametrize("way", [assign, swap_data, load_assigning], ids=lambda way: way.__name__)
def test_a_graph_that_was_captured_keeps_the_tensors_it_reads(kind, way):
    layer, new, x = make(kind), make(kind, seed=7), tokens()
    old = layer(x)
    bound = layer.bind()
    bound.captured = True
    if way is swap_data and kind.startswith(("w8", "reference")):
        pytest.skip(".data exchanges the memory of the very tensor that the layout is")
    way(layer, new)
    layer(x)
    assert layer._state.captured == [bound]
    out = torch.empty(5, N, dtype=torch.bfloat16)
    bound.ready[5][0](x, out, make(kind).bias)
    assert torch.equal(out, old)


def test_a_replaced_layout_that_a_graph_reads_is_written_too(hopper):
    layer, new, x = make("w4a16"), make("w4a16", seed=7), tokens()
    layer(x)
    old = layer.bind()
    old.captured = True
    layer.backend = "reference"
    layer.rebind()
    assert layer._state.captured == [old]
    copy_in_place(layer, new)
    layer(x)
    out = torch.empty(5, N, dtype=torch.bfloat16)
    old.ready[5][0](x, out, new.bias)
    new.backend = "w4a16"
    assert torch.equal(out, new(x))


@way
def test_during_capture_a_write_is_an_error_that_names_the_call(few, way, monkeypatch):
    layer, new, x = make(few), make(few, seed=7), tokens()
    layer(x)
    if way in (load, load_assigning):
        pytest.skip("loading prepares at once")
    take_over(way, layer, new)
    with monkeypatch.context() as patch:
        patch.setattr(capture, "is_capturing", lambda: True)
        with pytest.raises(CaptureError, match=r"were written or replaced.*\n.*refresh\(model\)"):
            layer(x)
    assert torch.equal(layer(x), new(x))


def test_warming_up_settles_every_layer_of_a_shape(hopper):
    net = nn.ModuleList([make("w4a16"), make("w4a16", seed=1)])
    news = [make("w4a16", seed=8), make("w4a16", seed=9)]
    warmup(net, tokens=[5])
    for layer, new in zip(net, news, strict=True):
        copy_in_place(layer, new)
    warmup(net, tokens=[5])
    assert all(layer._state.unchanged(layer._buffers) for layer in net)


# ------------------------------------------------------------------------------------------------ what torch cannot see


def unseen(layer, new):
    for name in stored(new):
        getattr(layer, name).data.copy_(getattr(new, name))


def test_refresh_prepares_what_torch_did_not_count(kind):
    layer, new, x = make(kind), make(kind, seed=7), tokens()
    layer(x)
    bound = layer.bind()
    unseen(layer, new)
    with torch.no_grad():
        layer.bias.copy_(new.bias)
    assert refresh(nn.Sequential(nn.Linear(2, 2), layer, FP4Linear(16, 16, device="meta"))) == 1
    assert layer.bind() is bound
    assert torch.equal(layer(x), new(x))
    assert fp4dispatch.refresh is refresh


def test_a_write_that_is_announced_is_noticed(kind):
    layer, new, x = make(kind, keep_stored=True), make(kind, seed=7), tokens()
    layer(x)
    unseen(layer, new)
    with torch.no_grad():
        layer.bias.copy_(new.bias)
    assert kind.startswith("w4") <= (not torch.equal(layer(x), new(x)))  # other layouts are in part the stored tensors
    for name in stored(layer):
        torch.autograd.graph.increment_version(layer.get_buffer(name))
    assert torch.equal(layer(x), new(x))


def test_refresh_is_refused_in_capture(monkeypatch, hopper):
    layer = make("w4a16")
    layer(tokens())
    monkeypatch.setattr(capture, "is_capturing", lambda: True)
    with pytest.raises(CaptureError, match="preparing them anew"):
        refresh(layer)


@way
def test_inference_tensors_count_once_a_layer_has_them(few, way):
    with torch.inference_mode():
        layer = make(few)
        given = layer.weight
        old = layer(x := tokens())
    assert not any(t.is_inference() for t in layer._stored())
    assert layer.weight.data_ptr() == given.data_ptr() or given.is_inference() is False
    new = make(few, seed=7)
    if way is write_views:
        pytest.skip("torch does not count what is written in inference mode through a view of another dtype")
    with torch.inference_mode():
        take_over(way, layer, new)
    got = layer(x)
    assert not torch.equal(got, old)
    assert torch.equal(got, new(x))


# ------------------------------------------------------------------------------------------------------------- compiled


def compiled(layer, backend):
    torch._dynamo.reset()
    return torch.compile(layer, backend=backend, fullgraph=True)


@pytest.mark.parametrize(
    "way", [copy_in_place, set_in_place, assign, swap_data, load, write_state], ids=lambda way: way.__name__
)
def test_a_compiled_call_multiplies_what_was_written(few, way):
    layer, new, x = make(few), make(few, seed=7), tokens()
    fn = compiled(layer, "aot_eager")
    with torch.no_grad():
        old = fn(x)
        take_over(way, layer, new)
        got = fn(x)
        assert not torch.equal(got, old)
        assert torch.equal(got, new(x))
        assert torch.equal(fn(x), new(x))
        assert torch.equal(layer(x), new(x))


def test_a_write_before_the_first_compiled_call_is_noticed(few):
    layer, new, x = make(few), make(few, seed=7), tokens()
    copy_in_place(layer, new)
    with torch.no_grad():
        got = compiled(layer, "aot_eager")(x)
        layer.bias.copy_(new.bias)
        assert not torch.equal(got, make(few)(x))
        assert torch.equal(compiled(layer, "aot_eager")(x), new(x))


def test_a_compiled_functional_call_uses_equal_weights_and_refuses_others(few):
    layer, x = make(few), tokens()
    old = layer(x)

    def call(weights, x):
        return torch.func.functional_call(layer, weights, (x,))

    torch._dynamo.reset()
    fn = torch.compile(call, backend="aot_eager", fullgraph=True)
    other = {name: tensor.clone() for name, tensor in make(few, seed=11).named_buffers() if name in stored(layer)}
    gc.collect()
    with torch.no_grad():
        assert torch.equal(fn({name: getattr(layer, name) for name in stored(layer)}, x), old)
        assert torch.equal(fn({name: getattr(layer, name).clone() for name in stored(layer)}, x), old)
        with pytest.raises(InputError, match="functional_call with other weights"):
            fn(other, x)
        another = make(few, seed=12)  # whose weights are packed
        another.bias.copy_(layer.bias)
        assert torch.equal(fn({name: getattr(another, name) for name in stored(layer)}, x), another(x))
        assert torch.equal(layer(x), old)
        assert torch.equal(compiled(layer, "aot_eager")(x), old)


@pytest.mark.parametrize(("keep_stored", "graphs"), [(True, 1), (False, 2)])
def test_writes_cost_at_most_one_graph_for_weights_that_were_read(hopper, keep_stored, graphs):
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    layer, x = make("w4a16", keep_stored=keep_stored), tokens()
    fn = compiled(layer, counter)
    with torch.no_grad():
        layer(x)
        fn(x)
        for seed in range(3):
            new = make("w4a16", seed=seed)
            take_over(copy_in_place, layer, new)
            assert torch.equal(fn(x), new(x))
            layer(x)
    assert counter.frame_count == graphs


@pytest.mark.parametrize("names", [("weight", "weight_scale", "weight_scale_2"), ("weight",)], ids=len)
@pytest.mark.parametrize("read", [True, False], ids=["read", "dropped"])
@pytest.mark.parametrize("fullgraph", [True, False], ids=["fullgraph", "breaks"])
def test_a_functional_call_of_a_compact_layer_uses_other_weights_or_refuses(hopper, names, read, fullgraph):
    layer, x = compact_layer(), tokens()
    old = layer(x)
    other = {name: getattr(make("w4a16", seed=11), name).clone() for name in names}
    torch._dynamo.reset()
    fn = torch.compile(
        lambda weights, x: torch.func.functional_call(layer, weights, (x,)), backend="aot_eager", fullgraph=fullgraph
    )
    with torch.no_grad():
        want = torch.func.functional_call(layer, other, (x,))
        assert not torch.equal(want, old)
        assert torch.equal(layer(x), old)
        assert layer._state.dropped
        if read:
            assert layer.weight.numel()
        try:
            got = fn(other, x)
        except (InputError, torch._dynamo.exc.Unsupported):
            got = want
        assert torch.equal(got, want)
        assert torch.equal(layer(x), old)


def test_layers_that_share_all_tensors_are_told_apart_or_are_equal(hopper):
    one = make("reference row")
    two = FP8Linear.from_weights(one.weights(), one.bias, backend="reference")
    new, x = make("reference row", seed=7), tokens()
    f, g = torch.compile(one, backend="eager", fullgraph=True), torch.compile(two, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(f(x), g(x))
        copy_in_place(one, new)
        one.bias.copy_(new.bias)
        assert torch.equal(f(x), new(x))
        assert torch.equal(g(x), new(x))
        two.weight = make("reference row", seed=3).weight
        assert torch.equal(f(x), new(x))
        del two, g
        gc.collect()
        assert torch.equal(f(x), new(x))


@pytest.mark.parametrize("call", ["compiled", "requires grad"])
def test_layers_that_share_their_weights_keep_the_activation_that_each_asks_for(call):
    weights = FP8Linear.from_linear(nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)).weights()
    pinned = ("bf16", "fp8")
    layers = [FP8Linear.from_weights(weights, activation=one, backend="reference") for one in pinned]
    x = torch.randn(4, 64).bfloat16()
    with torch.no_grad():
        wants = [layer(x) for layer in layers]
    assert not torch.equal(*wants)
    calls = [torch.compile(layer, backend="eager", fullgraph=True) if call == "compiled" else layer for layer in layers]
    asked = x.clone().requires_grad_(call == "requires grad")
    for _ in range(2):
        assert all(torch.equal(layer(asked), want) for layer, want in zip(calls, wants, strict=True))


@pytest.mark.parametrize(("kind", "name", "wrong", "says"), [
    ("reference row", "weight", torch.full((N, K), 1.5).to(torch.float8_e5m2), "float8_e5m2"),
    ("reference row", "weight_scale", torch.ones(N + 1), "scale"),
    ("w4a16", "weight", torch.zeros(N // 2, K // 2, dtype=torch.uint8), "weight is"),
    ("w4a16", "weight_scale", torch.full((N, K // 16), float("nan")).to(torch.float8_e4m3fn), "NaN"),
])  # fmt: skip
def test_what_is_set_before_the_first_call_is_checked(kind, name, wrong, says):
    scaling, backend = KINDS[kind]
    options = {"backend": backend}
    fresh = (
        FP4Linear(K, N, False, **options) if scaling == "nvfp4" else FP8Linear(K, N, False, scaling=scaling, **options)
    )
    setattr(fresh, name, wrong)
    with pytest.raises((InputError, FormatError), match=says):
        fresh(tokens())
    fresh = copy.deepcopy(fresh)
    with pytest.raises((InputError, FormatError), match=says):
        fresh(tokens())


def test_one_check_is_enough_for_a_load_and_its_first_call(monkeypatch):
    made, checks = make("w8a16 row"), []
    check = FP8Linear.check
    monkeypatch.setattr(FP8Linear, "check", lambda layer: (checks.append(1), check(layer)))
    empty = FP8Linear(K, N, scaling="row", backend="w8a16")
    empty.load_state_dict(made.state_dict())
    empty(tokens())
    assert len(checks) == 1
    empty(tokens().half())
    assert len(checks) == 1


def test_nothing_is_kept_of_layers_that_are_gone(hopper):
    gc.collect()
    before = len(owners._owners)
    layer = make("w4a16")
    layer(tokens())
    layer.half()
    layer(tokens().half())
    refs = [weakref.ref(t) for t in layer.buffers()]
    assert len(owners._owners) > before
    del layer
    gc.collect()
    assert len(owners._owners) == before
    assert all(ref() is None for ref in refs)


# -------------------------------------------------------------------------------------------------------------- compact


def compact_layer(**options):
    layer = make("w4a16", **options)
    layer(tokens())
    assert layer._state.dropped
    return layer


@pytest.mark.parametrize(
    ("way", "call"), [(way, "eager") for way in WAYS] + [(copy_in_place, "compiled"), (write_state, "compiled")]
)
def test_a_compact_layer_multiplies_what_was_written(hopper, way, call):
    layer, new, x = compact_layer(), make("w4a16", seed=7), tokens()
    fn = compiled(layer, "aot_eager") if call == "compiled" else layer
    with torch.no_grad():
        fn(x)
        if way is exchange_buffers:
            _ = layer.weight
        take_over(way, layer, new)
        assert torch.equal(fn(x), new(x))
        assert torch.equal(fn(x), new(x))
        if way is write_state:  # only what the layer still holds has been written so far
            assert torch.equal(layer.weight, new.weight)
        gc.collect()
        layer(x)
        assert layer._state.dropped or call == "compiled"  # Dynamo holds what it compiled with
        assert torch.equal(fn(x), new(x))
        if way is write_state:
            assert torch.equal(layer.weight, new.weight)


def test_a_compact_layer_looks_after_weights_that_others_hold(hopper):
    layer, new, x = compact_layer(), make("w4a16", seed=7), tokens()
    state = layer.state_dict()
    layer(x)
    layer(x)
    assert "weight" not in layer._buffers
    again = layer.state_dict()
    assert again["weight"].data_ptr() == state["weight"].data_ptr()
    del again
    for name, tensor in state.items():
        tensor.copy_(new.state_dict()[name])
    assert torch.equal(layer(x), new(x))
    assert layer.weight.data_ptr() == state["weight"].data_ptr()  # as of a layer that dropped nothing


def test_a_compact_layer_lets_go_when_others_do(hopper):
    layer, x = compact_layer(), tokens()
    state = layer.state_dict()
    layer(x)
    assert layer._state.lent
    held = weakref.ref(layer._state.lent["weight"].tensor)
    del state
    layer(x)
    assert not layer._state.lent
    assert held() is None
    assert layer._state.unchanged(layer._buffers)


def test_a_replica_of_a_compact_layer_leaves_it_alone(hopper):
    """As ``nn.DataParallel`` makes them: the replica gets buffers of its own, so it restores and binds again."""
    layer, x = compact_layer(), tokens()
    layer.bias = None
    want, bound = layer(x), layer.bind()
    replica = layer._replicate_for_data_parallel()
    replica._parameters["bias"] = None
    replica._buffers = {name: None if each is None else each.clone() for name, each in layer._buffers.items()}
    assert torch.equal(replica(x), want)
    assert layer._state.dropped
    assert torch.equal(layer(x), want)
    assert layer.bind() is bound
    assert torch.equal(layer.weight, replica.weight)


def test_weights_held_while_they_are_dropped_are_looked_after(hopper):
    layer, new, x = make("w4a16", keep_stored=True), make("w4a16", seed=7), tokens()
    layer(x)
    weight, scale = layer.weight, layer.weight_scale
    assert layer.compact()
    assert layer._state.lent
    layer(x)
    layer._state.unchanged(layer._buffers)
    weight.copy_(new.weight)
    scale.copy_(new.weight_scale)
    layer.weight_scale_2.copy_(new.weight_scale_2)
    layer.bias.data = new.bias.data
    assert torch.equal(layer(x), new(x))
    assert layer.weight is weight


def test_memory_that_is_exchanged_in_a_dropped_tensor_is_noticed(hopper):
    layer, new, x = make("w4a16", keep_stored=True), make("w4a16", seed=7), tokens()
    old = layer(x)
    weight = layer.weight
    assert layer.compact()
    weight.data = new.weight.clone()
    got = layer(x)
    assert not torch.equal(got, old)
    assert torch.equal(layer.weight, new.weight)
    layer.weight = new.weight.clone()
    assert torch.equal(layer(x), got)


def test_what_is_written_and_not_packed_yet_is_not_dropped(hopper):
    layer, new, x = make("w4a16", keep_stored=True), make("w4a16", seed=7), tokens()
    layer(x)
    take_over(copy_in_place, layer, new)
    assert layer.compact()  # packed first
    assert torch.equal(layer(x), new(x))
    assert torch.equal(layer.weight, new.weight)


# -------------------------------------------------------------------------------------------------------------- threads


def test_threads_that_call_after_a_write_see_it(kind):
    layer, new, x = make(kind), make(kind, seed=7), tokens()
    layer(x)
    want = new(x)
    take_over(copy_in_place, layer, new)
    got = []
    threads = [threading.Thread(target=lambda: got.append(layer(x))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 4
    assert all(torch.equal(y, want) for y in got)


def test_a_copy_has_its_own_weights(kind):
    layer, x = make(kind), tokens()
    old = layer(x)
    other = copy.deepcopy(layer)
    copy_in_place(other, make(kind, seed=7))
    other(x)
    assert torch.equal(layer(x), old)


def test_decisions_are_not_made_anew_for_a_write_in_place(kind, monkeypatch):
    layer, x = make(kind), tokens()
    layer(x)
    new = make(kind, seed=7)
    monkeypatch.setattr(choose, "select", lambda *a, **k: pytest.fail("asked the policy"))
    copy_in_place(layer, new)
    layer(x)


def test_threads_that_make_the_first_call_bind_once(hopper):
    made = make("w4a16")
    made(tokens())
    alone, fresh = made.nbytes(), make("w4a16")
    fresh._forget()
    start, wrong, x = threading.Barrier(8), [], tokens()

    def work():
        start.wait()
        try:
            wrong.append(not torch.equal(fresh(x), made(x)))
        except RuntimeError as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [False] * 8
    assert fresh.nbytes() == alone
