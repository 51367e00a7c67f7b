"""cuDNN on a GPU: captured graphs, streams and threads, and every M on the graph of its own bucket.

The numbers of single calls are held to the reference by tests/gpu/test_backends.py, for every backend.
"""

from __future__ import annotations

import functools
import random

import pytest
import torch

from fp4dispatch import jit
from fp4dispatch.backends import registry
from fp4dispatch.backends.base import QuantizedActivation
from fp4dispatch.backends.libraries.cudnn import m_bucket
from fp4dispatch.backends.libraries.fence import Fence
from fp4dispatch.jit.kernels import CHAIN
from fp4dispatch.machine import system
from fp4dispatch.models.linear import FP4Linear, FP8Linear
from fp4dispatch.problem.arch import SM90
from fp4dispatch.run import routes
from tests import contract, quantizer_fake
from tests.gpu import backend_cases
from tests.gpu.backend_cases import K, N, tokens

pytestmark = pytest.mark.gpu

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
    """More graphs are planned later, and more of everything that cuDNN keeps."""
    backend_cases.replay_equals_eager_and_survives_what_is_planned_later(
        functools.partial(layer_of, kind), (1, 7, 16, 130), (3, 40, 300, 700), (1, 16, 130, 513)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_bucket_that_was_never_planned_is_refused_in_capture(kind):
    backend_cases.an_m_that_was_never_planned_is_refused_in_capture(functools.partial(layer_of, kind), 16)


@pytest.mark.parametrize("kind", KINDS)
def test_many_threads_and_streams_at_once(kind):
    backend_cases.many_threads_and_streams_at_once([layer_of(kind, seed) for seed in range(2)], (1, 5, 16, 200))


def test_launches_go_to_the_current_stream():
    backend_cases.launches_go_to_the_current_stream(functools.partial(layer_of, "tensor"), 16)


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
    backend_cases.no_call_costs_memory(functools.partial(layer_of, "row"), (3, 16))


@pytest.mark.parametrize("fenced", [True, False])
def test_a_launch_behind_a_late_writer_reads_what_it_wrote(fenced, monkeypatch):
    """The writer releases its dependents at once. Without the fence, cuDNN's kernel for M=320 reads too early.

    The writer waits for 2 ms: the launch must come before it writes, on a busy host too.
    """
    case = case_of("tensor", 320, n=512, k=8192)
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the control is known for sm_90")
    if not fenced:
        monkeypatch.setattr(Fence, "__call__", lambda self, like: None)
    chain = jit.load(*CHAIN, SM90).module
    backend = registry.instance("cudnn")
    prepared = backend.prepare(contract.make_weights(case, "cuda", 1))
    plan = backend.plan(case.problem(), prepared)
    arena = torch.zeros(320 * 8192 + 256, dtype=torch.uint8, device="cuda")
    codes, scale = arena[:-256].view(torch.float8_e4m3fn).view(320, 8192), arena[-256:].view(torch.float32)[:1]
    codes.copy_(torch.randn(320, 8192, device="cuda"))
    scale.fill_(0.7)
    activation = QuantizedActivation(codes, scale)
    source, out = arena.clone(), torch.empty(320, 512, dtype=torch.bfloat16, device="cuda")
    backend.run(plan, prepared, activation, out)
    torch.cuda.synchronize()
    want, wrong = out.clone(), 0
    for _ in range(20):
        arena.fill_(0x11)
        torch.cuda.synchronize()
        chain.produce(source, arena, 4_000_000, False)
        backend.run(plan, prepared, activation, out)
        torch.cuda.synchronize()
        wrong += not torch.equal(out, want)
    if fenced:
        assert wrong == 0
    elif wrong == 0:
        pytest.skip("this cuDNN waits: the fence is not needed for this kernel")
