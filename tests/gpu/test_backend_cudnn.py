"""cuDNN on a GPU: captured graphs, streams and threads, and every M on the graph of its own bucket.

The numbers of single calls are held to the reference by tests/gpu/test_backends.py, for every backend.
"""

from __future__ import annotations

import random
import threading

import pytest
import torch

from fp4dispatch import registry, routes, system
from fp4dispatch.backends.cudnn import m_bucket
from fp4dispatch.errors import CaptureError
from fp4dispatch.linear import FP4Linear, FP8Linear
from fp4dispatch.replace import warmup
from tests import contract, quantizer_fake

pytestmark = pytest.mark.gpu

N, K = 1024, 2048
KINDS = ("tensor", "row", "nvfp4")


def case_of(kind, m, *, out_dtype="bfloat16", n=N, k=K, bias=False, static=False):
    """Return a case, or skip where this machine's cuDNN cannot run it."""
    op, activation = ("nvfp4_gemm", "nvfp4") if kind == "nvfp4" else ("fp8_gemm", "fp8")
    case = contract.Case(op, kind, activation, m, n, k, out_dtype, bias, static=static)
    why = contract.unsupported(registry.instance("cudnn"), case, system.current())
    if why:
        pytest.skip(f"cudnn: {why}")
    return case


def layer_of(kind, seed=0):
    case_of(kind, 1)
    torch.manual_seed(seed)
    linear = torch.nn.Linear(K, N, device="cuda", dtype=torch.bfloat16)
    if kind == "nvfp4":
        return FP4Linear.from_linear(linear, backend="cudnn")
    return FP8Linear.from_linear(linear, scaling=kind, backend="cudnn")


def tokens(m, seed=0):
    return torch.randn(m, K, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).bfloat16()


def captured(fn, stream=None):
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, stream=stream):
        out = fn()
    return graph, out


def test_fp8_runs_from_ada_on():
    """No skip below may hide that cuDNN does not run here: this fails where it is installed and cannot."""
    facts = system.current()
    if facts.cudnn_frontend is None or torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs nvidia-cudnn-frontend and sm_89 or later")
    for kind in ("tensor", "row"):
        case = contract.Case("fp8_gemm", kind, "fp8", 16, N, K, "bfloat16", False)
        assert registry.instance("cudnn").supports(case.problem(), facts) == ()


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("bias", "static"), [(False, False), (True, True)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_output_dtype(kind, out_dtype, bias, static):
    contract.check(
        registry.instance("cudnn"), case_of(kind, 33, out_dtype=out_dtype, n=392, bias=bias, static=static), "cuda"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_m_runs_on_the_graph_of_its_bucket(kind):
    """flashinfer#3140, #3260: plans of one M on the graph of another. M in random order, each twice."""
    backend = registry.instance("cudnn")
    sizes = [*range(1, 40), 63, 64, 65, 100, 127, 128, 129, 255, 257, 511, 513, 1000, 1025, 2001, 2049] * 2
    random.Random(0).shuffle(sizes)
    weights = contract.make_weights(case_of(kind, 1), "cuda", 1)
    prepared = backend.prepare(weights)
    exact = contract.dequantised(weights).float()
    for m in sizes:
        case = case_of(kind, m)
        plan = routes.plan_for(backend, case.problem(), prepared)
        assert plan.state.executable.key.m == m_bucket(m)
        x, a = contract.make_activation(case, weights, "cuda", m)
        out = torch.full((m, N), float("nan"), device="cuda", dtype=torch.bfloat16)
        backend.run(plan, prepared, x, out)
        expected = a.float() @ exact.t()
        error = (out - expected).abs().amax(1) / expected.abs().amax(1)
        assert bool((error < 0.01).all()), f"M={m}: row {int(error.argmax())} is off by {float(error.max()):.3g}"


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_those_of_the_path_without_our_quantisers(kind, static, monkeypatch):
    backend = registry.instance("cudnn")
    prepared = backend.prepare(contract.make_weights(case_of(kind, 1, static=static), "cuda", 1))
    for m in (1, 3, 64, 129, 1000, 2049):
        problem = case_of(kind, m, static=static).problem()
        ours = backend.plan(problem, prepared)
        if ours.note and system.current().nvcc is None:
            pytest.skip(ours.note)
        assert ours.note == ""
        with monkeypatch.context() as patch:
            quantizer_fake.without(patch, "off")
            plain = backend.plan(problem, prepared)
        assert plain.note == "off"
        outs = []
        for plan in (ours, plain):
            outs.append(torch.full((m, N), float("nan"), device="cuda", dtype=torch.bfloat16))
            backend.run(plan, prepared, tokens(m), outs[-1])
        assert outs[0].isfinite().all()
        assert torch.equal(*outs), f"M={m}: {int((outs[0] != outs[1]).sum())} of {outs[0].numel()} differ"


@pytest.mark.parametrize("kind", KINDS)
def test_replay_equals_eager_and_survives_what_is_planned_later(kind):
    layer = layer_of(kind)
    sizes = (1, 7, 16, 130)
    warmup(layer, tokens=list(sizes))
    xs = [tokens(m, m) for m in sizes]
    graphs = [captured(lambda x=x: layer(x)) for x in xs]
    with torch.inference_mode():
        expected = [layer(x) for x in xs]
        warmup(layer, tokens=[3, 40, 300, 700])  # more graphs, and more of everything that cuDNN keeps
        other = layer_of(kind, 1)
        for m in (1, 16, 130, 513):
            other(tokens(m))
        torch.cuda.empty_cache()
        poison = [torch.full((1 << 24,), float("nan"), device="cuda") for _ in range(8)]
        for _ in range(3):
            for (graph, out), want in zip(graphs, expected, strict=True):
                out.fill_(float("nan"))
                graph.replay()
                assert torch.equal(out, want)
        for (graph, out), x in zip(graphs, xs, strict=True):
            x.copy_(tokens(x.shape[0], 99))
            graph.replay()
            assert torch.equal(out, layer(x))
    del poison


@pytest.mark.parametrize("kind", KINDS)
def test_a_bucket_that_was_never_planned_is_refused_in_capture(kind):
    layer = layer_of(kind)
    warmup(layer, tokens=[16])
    x = tokens(500)
    with pytest.raises(CaptureError, match=r"warmup\(model, tokens=\[500\]\)"):
        captured(lambda: layer(x))
    graph, out = captured(lambda: layer(x[:16]))
    graph.replay()
    with torch.inference_mode():
        assert torch.equal(out, layer(x[:16]))


@pytest.mark.parametrize("kind", KINDS)
def test_many_threads_and_streams_at_once(kind):
    layers = [layer_of(kind, seed) for seed in range(2)]
    sizes = (1, 5, 16, 200)
    for layer in layers:
        warmup(layer, tokens=list(sizes))
    xs = {m: tokens(m, m) for m in sizes}
    with torch.inference_mode():
        expected = {(i, m): layer(xs[m]) for i, layer in enumerate(layers) for m in sizes}
    torch.cuda.synchronize()
    wrong, raised = [], []

    def work(seed):
        try:
            stream, order = torch.cuda.Stream(), random.Random(seed)
            with torch.cuda.stream(stream), torch.inference_mode():
                for _ in range(100):
                    i, m = order.randrange(2), order.choice(sizes)
                    if not torch.equal(layers[i](xs[m]), expected[i, m]):
                        wrong.append((i, m))
        except Exception as error:
            raised.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert raised == []
    assert wrong == []


def test_launches_go_to_the_current_stream():
    """A launch on another stream (flashinfer#1303) would not wait for the one that fills x."""
    layer = layer_of("tensor")
    warmup(layer, tokens=[16])
    with torch.inference_mode():
        final = tokens(16, 1)
        expected = layer(final)
        x, stream = torch.zeros_like(final), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            x.copy_(final)
            out = layer(x)
        stream.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck_of_the_layer(kind, monkeypatch):
    real = torch.allclose

    def allclose(a, b, equal_nan=False):  # opcheck compares operands with it, and torch lacks it for float8
        if a.dtype == torch.float8_e4m3fn:
            return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        return real(a, b, equal_nan=equal_nan)

    monkeypatch.setattr(torch, "allclose", allclose)
    layer = layer_of(kind)
    x = tokens(5)
    bound = layer.bind(x.dtype)
    assert {route.backend for route in bound.spec.routes} == {"cudnn"}
    results = torch.library.opcheck(
        torch.ops.fp4dispatch.linear.default, (x, list(bound.tensors), layer.bias, bound.spec.text)
    )
    assert set(results.values()) == {"SUCCESS"}


def test_no_plan_costs_memory_per_call():
    """flashinfer#1887, #1741: memory or host work that grows with each call."""
    layer = layer_of("row")
    with torch.inference_mode():
        for m in (3, 16):
            layer(tokens(m))
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(), len(routes._plans)
        for _ in range(200):
            layer(tokens(3))
            layer(tokens(16))
        torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), len(routes._plans)) == before
