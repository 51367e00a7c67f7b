"""Tuning on a GPU: real times, memory given back, and what follows from it in layers and graphs."""

from __future__ import annotations

import gc
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from fp4dispatch.backends import registry
from fp4dispatch.backends.own.compiled import CompiledBackend
from fp4dispatch.backends.own.launch_choice import Layout
from fp4dispatch.backends.own.tensors.operands import speeds_on
from fp4dispatch.backends.own.tiling import launches as tiling
from fp4dispatch.dispatch import choose, tuned
from fp4dispatch.dispatch.explain import explain
from fp4dispatch.models.linear import FP4Linear, FP8Linear
from fp4dispatch.models.replace import warmup
from fp4dispatch.policy.capability import offered
from fp4dispatch.problem import Problem
from fp4dispatch.trust import facts, quarantine
from fp4dispatch.trust.tilecheck import worst_tile
from fp4dispatch.tune import session, tuning
from fp4dispatch.tune.copies import Copies
from fp4dispatch.tune.session import Contender
from tests.gpu.sm90 import needs_sm90

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
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def test_memory_is_given_back():
    need_two()
    problem = Problem("fp8_gemm", 64, N, K, scaling="row")
    weights = tuning.make_weights(problem, "cuda")
    tuning.tune(problem, weights, gpu=0)  # what is kept once: the arena and cuBLAS's workspace of the timing stream
    gc.collect()
    before = held()
    gc.disable()  # it has to come back by itself
    try:
        tuning.tune(problem, weights, gpu=0, force=True)
        allocated, reserved = held()
    finally:
        gc.enable()
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


# ------------------------------------------------------------------------------------------------------------ launches

FORMATS = [("nvfp4_gemm", "nvfp4", "w4a16"), ("nvfp4_gemm", "nvfp4", "w4a8"), ("fp8_gemm", "row", "w8a8")]
FORMATS += [("fp8_gemm", "row", "w8a16"), ("fp8_gemm", "block128", "w8a8")]
SECONDS = 5.0
"""For one layer shape at ten numbers of tokens, kernels compiled and self-checks passed before."""
TOKENS = (1, 4, 8, 16, 32, 64, 128, 256, 1024, 2048)


def slowest(backend, problem, weights):
    """The launch that the models call slowest, of the build that they choose."""
    prepared = backend.prepare(weights)
    usual = next(each for each in backend.launches(problem, prepared) if each.shape is not None)
    known = speeds_on(weights.weight.device)
    every = [each for each in tiling._launches(usual.kernel, usual.build, problem, known) if each.shape is not None]
    return max(every, key=lambda each: tiling.microseconds(each, problem, known)), prepared


def mislead(monkeypatch, kind, problem, launch):
    """Let a backend predict this launch for a problem; checks of other problems go on as ever."""
    predicted = kind._predicted

    def _predicted(self, p, *facts):
        meant = (p.n, p.k, p.m) == (problem.n, problem.k, problem.m)
        return launch if meant else predicted(self, p, *facts)

    monkeypatch.setattr(kind, "_predicted", _predicted)


def times_of(launches, name, problem, weights):
    """The microseconds of launches of a backend, taken in turns."""
    timed = session.Session(problem, Copies(weights, tuning.engine_of(weights.weight.device)), 0)
    try:
        for launch in launches:
            timed._enter(Contender(name, problem.activation, launch), usual=False)
        assert timed.left_out == []
        return {each.launch: each.us for each in timed.time(tuple(timed._entries))}
    finally:
        timed.close()


@needs_sm90
@pytest.mark.parametrize("m", [16, 384])
@pytest.mark.parametrize(("op", "scaling", "name"), FORMATS)
def test_a_bad_predicted_launch_is_beaten_by_the_tuned_one(monkeypatch, op, scaling, name, m):
    """The models are made to choose the launch that they call slowest; tuning finds a faster one, and it runs."""
    backend = registry.instance(name)
    any_format = Problem(op, m, N, K, scaling=scaling)
    assert m == choose.bucket(m, any_format.op, 0)
    problem = replace(any_format, activation=backend.activation_for(any_format))
    weights = tuning.make_weights(problem, "cuda")
    device = weights.weight.device
    bad, prepared = slowest(backend, problem, weights)
    mislead(monkeypatch, type(backend), problem, bad)
    assert backend.launches(problem, prepared)[0] == bad
    before = backend.plan(problem, prepared)
    assert backend._chosen(problem, Layout(*prepared.layout), device) == bad

    tuning.tune(any_format, weights, gpu=0)
    found = tuned.own(any_format, choose.facts(0), registry.backends())
    best = found.of(name, problem.activation)
    assert best.launch not in (None, bad), found.text()
    us = times_of([bad, best.launch], name, problem, weights)
    assert us[best.launch] < us[bad], (us, found.text())

    assert backend._chosen(problem, Layout(*prepared.layout), device) == best.launch
    x = torch.randn(m, K, device=device, dtype=torch.bfloat16)
    outs = [torch.full((m, N), torch.nan, device=device, dtype=torch.bfloat16) for _ in range(2)]
    for plan, out in zip((before, backend.plan(problem, prepared)), outs, strict=True):
        backend.run(plan, prepared, x, out)
    assert worst_tile(outs[1], outs[0].float()).error < 0.02
    if m == 16:
        said = explain(op, m, N, K, scaling=scaling).verdict(name).measured
    else:  # between two decisions: the launch is tuned at this M, the backend at 512
        (said,) = explain(op, m, N, K, scaling=scaling, backend=name).notes
    assert f"launch shape {best.launch} (" in said
    assert said.endswith(f", on {found.date}")


@needs_sm90
@pytest.mark.parametrize(("op", "scaling"), [("nvfp4_gemm", "nvfp4"), ("fp8_gemm", "row"), ("fp8_gemm", "block128")])
def test_tuned_layers_are_right_at_every_m(op, scaling):
    """Also at the M that no measurement was taken at, where launches are laid out anew."""
    linear = nn.Linear(K, N, bias=False).to("cuda", torch.bfloat16)
    layer = FP4Linear.from_linear(linear) if op == "nvfp4_gemm" else FP8Linear.from_linear(linear, scaling=scaling)
    tokens = (1, 7, 33, 100, 300, 777, 2000)
    warmup(layer, tokens=tokens, tune=True)
    assert not quarantine.quarantined()
    oracle = registry.instance("reference")
    weights = layer.weights(lend=False)
    for m in (*tokens, 3, 48, 90, 290, 600, 1900):
        x = torch.randn(m, K, device=weights.weight.device, dtype=torch.bfloat16)
        backend, plan, _ = layer.bind().launch(m, False)
        problem = replace(layer.problem(m), activation=plan.problem.activation, out_dtype="float32")
        want, held = torch.empty(m, N, device=x.device, dtype=torch.float32), oracle.prepare(weights)
        oracle.run(oracle.plan(problem, held), held, x, want)
        assert worst_tile(layer(x), want).error < session.TILE_ERROR, (m, backend.name)


@needs_sm90
def test_a_stored_launch_of_other_kernels_is_ignored_with_words(monkeypatch):
    problem = Problem("nvfp4_gemm", 16, N, K)
    weights = tuning.make_weights(problem, "cuda")
    found = tuning.tune(problem, weights, gpu=0)
    assert any(t.launch for t in found.timings)
    monkeypatch.setattr(facts, "_own_code", lambda: "another build")
    for forget in (tuned.reset, choose.reset):
        forget()
    decision = explain("nvfp4_gemm", 16, N, K)
    assert decision.rule is None or decision.rule.id != "tuned"
    assert any(
        f"times and launch shapes of {found.date} are not used" in note and "kernels" in note for note in decision.notes
    )
    for backend in ("w4a16", "w4a8"):
        own = registry.instance(backend)
        assert isinstance(own, CompiledBackend)
        pinned = replace(problem, activation=own.activation_for(problem))
        assert tiling.tuned(backend, pinned, 0) is None


@needs_sm90
@pytest.mark.parametrize(("op", "scaling"), [("nvfp4_gemm", "nvfp4"), ("fp8_gemm", "block128")])
def test_a_layer_shape_is_tuned_in_seconds(op, scaling):
    """Also what the kernels' own launches take; plans of libraries (cuDNN: 0.1 s each) are not counted."""
    problem = Problem(op, 1, 4096, 4096, scaling=scaling)
    weights = tuning.make_weights(problem, "cuda")
    for m in TOKENS:  # compiles and checks
        tuning.tune(replace(problem, m=m), weights, gpu=0)
    started = time.perf_counter()
    launches = sum(len(tuning.tune(replace(problem, m=m), weights, gpu=0, force=True).timings) for m in TOKENS)
    took = time.perf_counter() - started
    print(f"{op} {scaling}: {launches} launches at {len(TOKENS)} numbers of tokens in {took:.2f} s")
    assert took < SECONDS


@needs_sm90
def test_nothing_is_timed_during_capture_and_graphs_keep_their_launch(monkeypatch):
    layer = FP4Linear.from_linear(nn.Linear(K, N, bias=False).to("cuda", torch.bfloat16))
    x = torch.randn(16, K, device="cuda", dtype=torch.bfloat16)
    warmup(layer, tokens=[16])
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = layer(x)
    graph.replay()
    want = out.clone()
    warmup(layer, tokens=[16], tune=True)
    monkeypatch.setattr(tuning, "_measure", lambda *a: pytest.fail("measured"))
    again = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(again):
        tuned_out = layer(x)
    again.replay()
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, want)
    assert torch.equal(tuned_out, layer(x))
