"""What torch does with a layer besides calling it: vmap, gradients of ``torch.func``, tangents, dispatch modes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from fp4dispatch.errors import BackwardError, InputError
from fp4dispatch.formats import fp8_quantize
from fp4dispatch.models.linear import FP4Linear
from fp4dispatch.models.seen_tensors import plain
from fp4dispatch.run import ops
from tests import w4_fake
from tests.hopper import seems_to_be_here

N, K = 96, 208


@pytest.fixture(params=["reference", "kernels"])
def layer(request, monkeypatch):
    """A layer on the reference, or on kernels, which need memory; it has run 1 and 4 rows."""
    torch.manual_seed(0)
    linear = nn.Linear(K, N).bfloat16()
    if request.param == "reference":
        yield warm(FP4Linear.from_linear(linear))
        return
    w4_fake.install(monkeypatch)
    with seems_to_be_here(monkeypatch):
        yield warm(FP4Linear.from_linear(linear))


def warm(made):
    for m in (1, 4):
        made(rows(m))
    return made


def rows(*shape, k=K):
    torch.manual_seed(1)
    return torch.randn(*shape, k, dtype=torch.bfloat16)


@pytest.fixture(params=["forward", "swiglu"])
def form(layer, request):
    """One of the two forwards of the layer."""
    return layer if request.param == "forward" else layer.swiglu


def inputs(form, *shape):
    return rows(*shape, k=K if isinstance(form, FP4Linear) else 2 * K)


def test_vmap_computes_what_the_layer_does(form):
    x = inputs(form, 3, 4)
    want = form(x)
    assert torch.equal(torch.vmap(form)(x), want)
    assert torch.equal(torch.vmap(form, in_dims=2)(x.movedim(0, 2)), want)
    assert torch.equal(torch.vmap(torch.vmap(form))(x), want)
    assert torch.equal(torch.func.functionalize(form)(x), want)


def test_vmap_over_layers_is_refused(layer):
    bound = layer.bound_to(torch.bfloat16)
    biases = torch.stack([layer.bias, layer.bias])

    def call(x, bias):
        return ops.linear(x, bound.tensors, bias, bound.spec.text)

    with pytest.raises(InputError, match="only the input may be batched"):
        torch.vmap(call)(rows(2, 4), biases)
    with pytest.raises(InputError, match="only the input may be batched"):
        torch.vmap(call, in_dims=(None, 0))(rows(4), biases)


def dual(form, x):
    with forward_ad.dual_level():
        return form(forward_ad.make_dual(x, x))


DERIVATIVES = {
    "grad": lambda form, x: torch.func.grad(lambda x: form(x).sum())(x),
    "vjp": torch.func.vjp,
    "jvp": lambda form, x: torch.func.jvp(form, (x,), (x,)),
    "jacfwd": lambda form, x: torch.func.jacfwd(form)(x[:1]),
    "hessian": lambda form, x: torch.func.hessian(lambda x: form(x).sum())(x[:1]),
    "per sample": lambda form, x: torch.vmap(torch.func.grad(lambda x: form(x).sum()))(x),
    "dual": dual,
}


@pytest.mark.parametrize("how", DERIVATIVES)
def test_no_derivative_is_zero_in_silence(form, how):
    with pytest.raises(BackwardError, match="inference"):
        DERIVATIVES[how](form, inputs(form, 4))


def test_compiled_code_refuses_forward_gradients_too(form):
    torch._dynamo.reset()
    tangent = torch.compile(lambda x: torch.func.jvp(form, (x,), (x,)), backend="eager")
    with pytest.raises(Exception, match="BackwardError: a gradient was asked for"):
        tangent(inputs(form, 4))
    batched, x = torch.compile(torch.vmap(form), backend="aot_eager"), inputs(form, 3, 4)
    assert torch.equal(batched(x), form(x))


def test_programs_that_were_made_before_refuse_tangents_too(form):
    torch._dynamo.reset()
    x = inputs(form, 4)
    compiled = torch.compile(lambda x: form(x) * 2, backend="aot_eager")
    compiled(x)
    with pytest.raises(BackwardError, match="inference"):
        dual(compiled, x)


def test_an_exported_layer_refuses_tangents(layer):
    program = torch.export.export(layer, (rows(4),)).module()
    with pytest.raises(BackwardError, match="inference"):
        dual(program, rows(4))


def test_operators_refuse_tangents_too():
    x = torch.randn(4, 32)
    q = fp8_quantize(torch.randn(16, 32), "row")
    with pytest.raises(BackwardError), forward_ad.dual_level():
        ops.fp8_quantize(forward_ad.make_dual(x, x), "row")
    scale = torch.ones(4)
    with pytest.raises(BackwardError), forward_ad.dual_level():
        ops.fp8_gemm(q.data[:4], q.data, forward_ad.make_dual(scale, scale), q.scale, scaling="row")


def test_what_is_not_differentiated_runs(layer):
    x = rows(4)
    want = layer(x)
    with forward_ad.dual_level():
        assert torch.equal(layer(x), want)
    grad, out = torch.func.grad(lambda y: (y.sum(), layer(x)), has_aux=True)(torch.ones(2))
    assert torch.equal(out, want)
    assert torch.equal(grad, torch.ones(2))


@pytest.mark.parametrize("how", ["grad", "jvp", "vmap", "functionalize", "make_fx", "fake"])
@pytest.mark.parametrize("state", ["not bound", "written", "read"])
def test_what_a_layer_makes_inside_lasts(layer, how, state):
    """It is bound, or prepares a write, in the first call; its layouts are plain tensors, and not of a level."""
    x = rows(4)
    want = layer(x)
    if state == "not bound":
        layer._forget()
    elif state == "written":
        layer.weight.add_(0)
    else:
        assert layer.weight.numel()
    one = torch.ones(2)
    if how == "grad":
        torch.func.grad(lambda y: (y.sum(), layer(x)), has_aux=True)(one)
    elif how == "jvp":
        torch.func.jvp(lambda y: (y.sum(), layer(x)), (one,), (one,))
    elif how == "vmap":
        assert torch.equal(torch.vmap(layer)(x), want)
    elif how == "functionalize":
        assert torch.equal(torch.func.functionalize(layer)(x), want)
    elif how == "make_fx":
        assert torch.equal(make_fx(layer)(x)(x), want)
    else:
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert layer(torch.empty(4, K, dtype=torch.bfloat16)).shape == want.shape
    assert all(plain(tensor) for tensor in layer._buffers.values() if tensor is not None)
    assert torch.equal(layer(x), want)
    assert torch.equal(layer(x), want)


def test_weights_that_are_read_inside_last(layer):
    x = rows(4)
    want = layer(x)
    torch.func.grad(lambda y: y.sum() + layer.weight.sum())(torch.ones(2))
    assert all(plain(tensor) for tensor in layer._buffers.values() if tensor is not None)
    assert torch.equal(layer(x), want)


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_operator(form):
    with Seen() as seen:
        form(inputs(form, 4))
    assert sum("fp4dispatch" in name for name in seen.names) == 1, seen.names


def test_a_traced_graph_holds_the_operator(form):
    x = inputs(form, 4)
    graph = make_fx(lambda x: form(x) + 0)(x)
    assert torch.equal(graph(2 * x), form(2 * x))
    assert "fp4dispatch" in graph.code
