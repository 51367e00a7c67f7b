"""The eager fast path of the layers: taken once an M has run, and only where nothing differs from then."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from fp4dispatch.backends import registry
from fp4dispatch.backends.reference import ReferenceBackend
from fp4dispatch.dispatch import choose
from fp4dispatch.errors import BackwardError, CaptureError, InputError
from fp4dispatch.machine import capture
from fp4dispatch.models.linear import FP4Linear, FP8Linear
from fp4dispatch.models.quantized_linear import QuantizedLinear
from fp4dispatch.run import ops, routes

K, N = 64, 48


class Split(ReferenceBackend):
    """The reference with one plan an M; counts its launches."""

    plans_by_m = True
    runs = 0

    def run(self, plan, prepared, x, out, bias=None):
        assert plan.problem.m == out.shape[0] == x.shape[0]
        type(self).runs += 1
        super().run(plan, prepared, x, out, bias)


@pytest.fixture(autouse=True)
def backend(monkeypatch):
    found = Split()
    real = dict(registry.backends())
    monkeypatch.setattr(registry, "backends", lambda: real | {"reference": found})
    monkeypatch.setattr(Split, "runs", 0)
    monkeypatch.setattr(routes, "_plans", {})
    for forget in (routes.LayerSpec.parse.cache_clear, choose.reset):
        forget()
    yield found
    for forget in (routes.LayerSpec.parse.cache_clear, choose.reset):
        forget()


@pytest.fixture
def long_way(monkeypatch):
    """Count the calls that took the long way."""
    calls, real = [], QuantizedLinear._call
    monkeypatch.setattr(QuantizedLinear, "_call", lambda self, x: calls.append(x) or real(self, x))
    return calls


def make(bias=True, fp4=False):
    torch.manual_seed(0)
    linear = nn.Linear(K, N, bias=bias).bfloat16()
    return FP4Linear.from_linear(linear) if fp4 else FP8Linear.from_linear(linear, scaling="row")


def rows(*shape):
    torch.manual_seed(1)
    return torch.randn(*shape, K, dtype=torch.bfloat16)


@pytest.mark.parametrize("fp4", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (16,), (2, 3), (1, 1), (2, 1, 4), ()])
def test_the_second_call_is_fast_and_the_same(shape, bias, fp4, long_way):
    layer, x = make(bias, fp4), rows(*shape)
    want = layer(x)
    assert len(long_way) == 1
    got = layer(x)
    assert len(long_way) == 1
    assert torch.equal(got, want)
    assert got.shape == (*shape, N)
    assert got.is_contiguous()
    assert Split.runs == 2


def test_each_m_is_found_by_its_own_number_of_tokens(long_way):
    layer = make()
    for m in (1, 2, 7, 8):
        layer(rows(m))
    assert len(long_way) == 4
    for shape in ((8,), (2, 4), (7,), (2,), (1, 2), (1,)):
        layer(rows(*shape))  # Split checks that the plan is for this M
    assert len(long_way) == 4


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (torch.zeros(4, K + 16, dtype=torch.bfloat16), "in_features"),
        (torch.zeros(K, 4, dtype=torch.bfloat16), "in_features"),  # as many elements as a good one
        (torch.zeros(2, 2 * K, dtype=torch.bfloat16), "in_features"),
        (torch.zeros((), dtype=torch.bfloat16), "in_features"),
        (torch.zeros(4, K, dtype=torch.bfloat16, device="meta"), "meta"),
        (torch.zeros(4, K, dtype=torch.int16), "int16"),
    ],
)
def test_bad_input_is_refused_by_a_layer_that_is_warm(x, says):
    layer = make()
    for m in (0, 1, 4, 5):
        layer(rows(m))
    runs = Split.runs
    with pytest.raises(InputError, match=says):
        layer(x)
    assert Split.runs == runs


def test_what_differs_takes_the_long_way_and_is_right(long_way):
    layer, x = make(), rows(4)
    want = layer(x)
    for other in (x.t().contiguous().t(), rows(8)[::2], nn.Parameter(x)):
        del long_way[:]
        got = layer(other)
        assert len(long_way) == 1, type(other)
        assert torch.equal(got, layer(other.detach().clone()))
    assert torch.equal(layer(x.t().contiguous().t()), want)
    for _ in range(2):
        assert layer(x.float()).dtype == torch.float32
    del long_way[:]
    with torch.autocast("cpu", torch.float16):
        assert layer(x.float()).dtype == torch.float16
    assert len(long_way) == 1


def test_what_ready_does_not_test_takes_the_long_way(long_way):
    layer, x = make(), rows(4)
    want = layer(x)
    del long_way[:]
    moved = torch.empty(4 * K + 1, dtype=torch.bfloat16)[1:].view(4, K).copy_(x)
    assert moved.data_ptr() % 16
    assert torch.equal(layer(moved), want)
    assert len(long_way) == 1
    bias = layer.bias.data
    for other in (bias.float(), bias.repeat(2).view(2, N).t().contiguous()[:, 0], bias):
        layer.bias.data = other
        del long_way[:]
        torch.testing.assert_close(layer(x), want, rtol=0.02, atol=0.02)
        assert len(long_way) == (other is not bias)


def test_a_capture_takes_the_long_way_and_is_remembered(long_way, monkeypatch):
    layer, x = make(), rows(4)
    want, bound = layer(x), layer.bind()
    bound.cuda = True
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(bound.ready[4][1], "state", None)
    bound.ready[4] = (lambda *operands: pytest.fail("in a capture"), *bound.ready[4][1:])
    monkeypatch.setattr(capture, "stream_is_capturing", lambda: True)
    del long_way[:]
    assert torch.equal(layer(x), want)
    assert len(long_way) == 1
    assert bound.captured


def test_with_many_gpus_it_runs_on_its_own(monkeypatch):
    current, ran, capturing = [0], [], [False]

    class On:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            self.before, current[0] = current[0], self.device.index

        def __exit__(self, *_):
            current[0] = self.before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", On)
    monkeypatch.setattr(capture, "stream_is_capturing", lambda: capturing[0] and current[0] == 1)
    backend = SimpleNamespace(run=lambda *operands: ran.append(("run", current[0])))
    prepared = SimpleNamespace(tensors=(SimpleNamespace(device=torch.device("cuda", 1)),))
    launch = routes._on_its_device(lambda *operands: ran.append(("ready", current[0])), backend, None, prepared)
    launch(None, None, None)
    capturing[0] = True
    launch(None, None, None)
    current[0] = 1
    launch(None, None, None)
    assert ran == [("ready", 1), ("run", 1), ("ready", 1)]
    assert current == [1]


def test_a_gradient_is_still_refused_by_a_layer_that_is_warm():
    layer, x = make(), rows(4)
    layer(x)
    y = layer(x.clone().requires_grad_())
    with pytest.raises(BackwardError):
        y.sum().backward()


@pytest.mark.parametrize("warm", [False, True])
def test_forward_mode_differentiation_is_refused(warm):
    """A kernel writes into an output of its own: the tangent would be gone, which means zero."""
    layer, x = make(), rows(4)
    if warm:
        layer(x)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(BackwardError, match="inference"):
            layer(dual)
        gate_up = forward_ad.make_dual(torch.cat([x, x], -1), torch.ones(4, 2 * x.shape[1]).to(x.dtype))
        with pytest.raises(BackwardError, match="inference"):
            layer.swiglu(gate_up)
        assert torch.equal(layer(x), layer(x)), "a plain tensor is served"
    with pytest.raises(BackwardError, match="inference"):
        torch.func.jvp(layer, (x,), (torch.ones_like(x),))
    assert torch.equal(layer(x), layer(x))


def test_a_bias_that_is_exchanged_is_seen():
    layer, x = make(), rows(4)
    with_bias = layer(x)
    layer(x)
    bias, layer.bias = layer.bias, None
    without = layer(x)
    torch.testing.assert_close(without + bias, with_bias, rtol=0.02, atol=0.02)
    assert torch.equal(layer(x), without)
    layer.bias = nn.Parameter(bias + 1, requires_grad=False)
    torch.testing.assert_close(layer(x), with_bias + 1, rtol=0.02, atol=0.02)
    layer.bias = nn.Parameter(torch.zeros(N + 1), requires_grad=False)
    with pytest.raises(InputError, match="bias"):
        layer(x)


@pytest.mark.parametrize("change", ["load", "half"])
def test_nothing_stale_survives_a_load_or_a_cast(change):
    layer, x = make(), rows(4)
    before = layer(x)
    layer(x)
    if change == "load":
        state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        state["weight_scale"] *= 2
        state["bias"].zero_()
        layer.load_state_dict(state)
        fresh = make()
        fresh.load_state_dict(state)
        assert torch.equal(layer(x), fresh(x))
        assert not torch.equal(layer(x), before)
    else:
        layer.half()
        y = layer(x.half())
        assert y.dtype == torch.float16
        torch.testing.assert_close(y.float(), before.float(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("shape", [(5, K), (1, 5, K), (8, K)])
def test_an_output_has_the_rows_that_a_backend_asks_for(shape, long_way, monkeypatch):
    want, given = make()(rows(40)[:8].view(-1, K)[: torch.Size(shape[:-1]).numel()]), []

    def run(self, plan, prepared, x, out, bias=None):
        given.append(out.shape[0])
        out.fill_(torch.nan)
        ReferenceBackend.run(self, plan, prepared, x, out[: x.shape[0]], bias)

    monkeypatch.setattr(Split, "run", run)
    monkeypatch.setattr(Split, "out_rows", lambda self, plan, m: -(-m // 4) * 4)
    layer, x = make(), rows(40)[: want.shape[0]].view(shape)
    del long_way[:]
    for _ in range(3):
        out = layer(x)
        assert len(long_way) == 1, "only the first time"
        assert (out.shape, out.is_contiguous()) == ((*shape[:-1], N), True)
        assert torch.equal(out.view(-1, N), want)
        assert out.untyped_storage().nbytes() == 8 * N * 2
    assert given == [8] * 3
    assert layer.bind().rows == ({} if want.shape[0] == 8 else {5: 8})
    layer.bind().plan_anew()
    assert layer.bind().rows == {}


def test_only_small_m_are_kept():
    layer = make()
    for m in (1, routes.READY_M, routes.READY_M + 1):
        layer(rows(m))
    assert sorted(layer.bind().ready) == [1, routes.READY_M]


def test_a_warm_m_needs_no_host_work_in_capture_and_another_is_refused(monkeypatch):
    layer = make()
    layer(rows(4))
    monkeypatch.setattr(capture, "is_capturing", lambda: True)
    assert layer(rows(4)).shape == (4, N)
    with pytest.raises(CaptureError, match=r"warmup\(model, tokens=\[5\]\)"):
        layer(rows(5))


def test_no_dispatcher_no_environment_no_log_on_the_fast_path(monkeypatch):
    layer, x = make(), rows(4)
    layer(x)
    for owner, name in ((ops, "linear"), (ops, "run_bound"), (choose, "select"), (routes, "plan_for")):
        monkeypatch.setattr(owner, name, lambda *a, **k: pytest.fail("on the fast path"))
    monkeypatch.setattr("fp4dispatch.settings.Settings.__getattr__", lambda *a: pytest.fail("the environment"))
    layer(x)
