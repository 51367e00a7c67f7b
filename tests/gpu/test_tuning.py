"""Tuning on a GPU: real times, memory given back, and what follows from it in layers and graphs."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from fp4dispatch.backends import registry
from fp4dispatch.dispatch import choose, tuned
from fp4dispatch.dispatch.explain import explain
from fp4dispatch.models.linear import FP4Linear, FP8Linear
from fp4dispatch.models.replace import warmup
from fp4dispatch.policy.capability import offered
from fp4dispatch.problem import Problem
from fp4dispatch.trust import quarantine
from fp4dispatch.tune import tuning

pytestmark = pytest.mark.gpu

N, K = 2048, 4096


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    """Times and verdicts of their own; kernels that are finished are used."""
    tmp_path.chmod(0o755)
    monkeypatch.setattr(tuned.store, "folder", lambda: tmp_path / "tuning")
    monkeypatch.setattr(quarantine.store, "folder", lambda: tmp_path / "selfcheck")
    for name in ("FP4DISPATCH_TUNED", "FP4DISPATCH_FP8_BACKEND", "FP4_GEMM_BACKEND", "FP4DISPATCH_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    torch.cuda.init()
    for forget in (tuned.reset, choose.reset, quarantine.reset):
        forget()
    yield
    for forget in (tuned.reset, choose.reset, quarantine.reset):
        forget()


def candidates(scaling="row"):
    decision = explain("fp8_gemm", 16, N, K, scaling=scaling)
    return [v.backend for v in decision.verdicts if v.accepted and offered(v.backend, registry.backends()[v.backend])]


def need_two():
    if len(candidates()) < 2:
        pytest.skip(f"needs two backends for FP8, found {candidates()}")


@pytest.mark.parametrize("m", [1, 100, 2048])
def test_every_candidate_gets_a_plausible_time(m):
    need_two()
    problem = Problem("fp8_gemm", m, N, K, scaling="row")
    found = tuning.tune(problem, tuning.make_weights(problem, "cuda"), gpu=0)
    assert [t.us for t in found.timings] == sorted(t.us for t in found.timings)
    assert len(found.timings) + len({name for name, _ in found.left_out}) >= len(candidates())
    assert len(found.timings) >= 2, found.text()
    least = N * K / 8e12 * 1e6  # the weights at 8 TB/s
    for t in found.timings:
        assert least < t.us < 1e4, found.text()
        assert t.repeats >= 5
        assert t.noise_us < 0.5 * t.us, found.text()
    decision = choose.select(problem, gpu=0)
    if decision.rule and decision.rule.id == "tuned":
        assert decision.backend == found.timings[0].backend
    tuned.reset()
    choose.reset()
    again = choose.select(problem, gpu=0)
    assert (again.backend, again.verdict(again.backend).measured) == (
        decision.backend,
        decision.verdict(decision.backend).measured,
    )
    assert again.verdict(again.backend).measured


def held():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def test_memory_is_given_back():
    need_two()
    problem = Problem("fp8_gemm", 64, N, K, scaling="row")
    weights = tuning.make_weights(problem, "cuda")
    tuning.tune(problem, weights, gpu=0)  # what is kept once: the arena and cuBLAS's workspace of the timing stream
    before = held()
    tuning.tune(problem, weights, gpu=0, force=True)
    allocated, reserved = held()
    assert allocated == before[0]
    assert reserved <= before[1] + (4 << 20)


def test_layers_and_graphs_run_what_was_tuned():
    torch.manual_seed(0)
    linears = [nn.Linear(K, N).to("cuda", torch.bfloat16) for _ in range(2)]
    model = nn.ModuleList([FP8Linear.from_linear(linears[0], scaling="row"), FP4Linear.from_linear(linears[1])])
    x = torch.randn(16, K, device="cuda", dtype=torch.bfloat16)
    want = [linear(x) for linear in linears]
    warmup(model, tokens=[16], tune=True)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = [layer(x) for layer in model]
    graph.replay()
    for got, exact, layer, least in zip(out, want, model, (0.998, 0.99), strict=True):
        assert torch.equal(got, layer(x))
        near = torch.nn.functional.cosine_similarity(got.float().flatten(), exact.float().flatten(), dim=0)
        assert float(near) > least
        problem = layer.problem(16)
        found = tuned.find(problem, choose.facts(0), registry.backends())
        route = layer.bind().spec.routes[layer.bind().spec.index(16)]
        assert route.backend == choose.select(problem, gpu=0).backend
        assert found is None or found.timings == () or found.of(route.backend, route.activation) is not None


def test_graphs_captured_before_tuning_stay_valid():
    need_two()
    layer = FP8Linear.from_linear(nn.Linear(K, N + 4).to("cuda", torch.bfloat16), scaling="row")  # padded: copies
    x = torch.randn(16, K, device="cuda", dtype=torch.bfloat16)
    want = layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = layer(x)
    warmup(layer, tokens=[1, 16, 64], tune=True)
    gc.collect()
    poison = [torch.full((N + 16, K), 0x7F, dtype=torch.uint8, device="cuda") for _ in range(4)]
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, want)
    assert len(poison) == 4
