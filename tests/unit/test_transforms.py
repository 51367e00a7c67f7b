"""What torch does with a layer besides calling it: vmap, gradients of ``torch.func``, tangents, dispatch modes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from fp4dispatch.errors import BackwardError, InputError
from fp4dispatch.formats import fp8_quantize
from fp4dispatch.models.linear import FP4Linear
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


def forms(layer):
    """The layer, and its two forwards; each with the number of inputs that it takes."""
    return [(layer, K), (layer.swiglu, 2 * K)]


def test_vmap_computes_what_the_layer_does(layer):
    for form, k in forms(layer):
        x = rows(3, 4, k=k)
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


@pytest.mark.parametrize("how", ["grad", "vjp", "jvp", "jacfwd", "hessian", "per sample", "dual"])
def test_no_gradient_is_zero_in_silence(layer, how):
    for form, k in forms(layer):
        x = rows(4, k=k)

        def scalar(x, form=form):
            return form(x).sum()

        calls = {
            "grad": lambda: torch.func.grad(scalar)(x),
            "vjp": lambda: torch.func.vjp(form, x),
            "jvp": lambda: torch.func.jvp(form, (x,), (x,)),
            "jacfwd": lambda: torch.func.jacfwd(form)(x[:1]),
            "hessian": lambda: torch.func.hessian(scalar)(x[:1]),
            "per sample": lambda: torch.vmap(torch.func.grad(scalar))(x),
        }
        with pytest.raises(BackwardError, match="inference"):
            if how == "dual":
                with forward_ad.dual_level():
                    form(forward_ad.make_dual(x, x))
            else:
                calls[how]()


def test_compiled_code_refuses_forward_gradients_too(layer):
    torch._dynamo.reset()
    for form, k in forms(layer):
        tangent = torch.compile(lambda x: torch.func.jvp(form, (x,), (x,)), backend="eager")  # noqa: B023
        with pytest.raises(Exception, match="BackwardError: a gradient was asked for"):
            tangent(rows(4, k=k))
        batched = torch.compile(torch.vmap(form), backend="aot_eager")
        assert torch.equal(batched(rows(3, 4, k=k)), form(rows(3, 4, k=k)))


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


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_operator(layer):
    for form, k in forms(layer):
        with Seen() as seen:
            form(rows(4, k=k))
        assert sum("fp4dispatch" in name for name in seen.names) == 1, seen.names


def test_a_traced_graph_holds_the_operator(layer):
    for form, k in forms(layer):
        graph = make_fx(lambda x: form(x) + 0)(rows(4, k=k))  # noqa: B023
        other = rows(4, k=k) * 2
        assert torch.equal(graph(other), form(other) + 0)
        assert "fp4dispatch" in graph.code
