"""Timed launches of our kernels, without a GPU: all kernels in torch, times from the test, an H200 on paper."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fp4dispatch.backends import registry
from fp4dispatch.backends.own import compiled, launch_choice
from fp4dispatch.backends.own.tiling import speeds
from fp4dispatch.backends.reference import ReferenceBackend
from fp4dispatch.benchmark.methods import ours
from fp4dispatch.dispatch import choose, tuned
from fp4dispatch.dispatch.explain import explain
from fp4dispatch.machine import gpu_models
from fp4dispatch.machine.nvml import Gpu
from fp4dispatch.machine.system import System
from fp4dispatch.models.linear import FP4Linear
from fp4dispatch.models.replace import warmup
from fp4dispatch.policy.rules import bounds, m_bucket
from fp4dispatch.problem import Problem
from fp4dispatch.problem.arch import SM90
from fp4dispatch.problem.measurement import LaunchConfig, Measurement, Timing
from fp4dispatch.run import routes
from fp4dispatch.trust import facts, quarantine, selfcheck
from fp4dispatch.tune import agreement, session, tuning
from fp4dispatch.tune.session import Contender
from fp4dispatch.tune.timing import Engine, Recording
from tests import random_cases

H200 = speeds.of(gpu_models.named("H200 SXM"))
HERE = replace(
    System.fake("9.0", cuda="13.0", torch="2.11", nvcc="13.0", cutlass="4.5", driver="580.1"),
    gpus=(Gpu(0, "NVIDIA H200", "GPU-1", SM90),),
)
N, K = 256, 512
FP4 = Problem("nvfp4_gemm", 16, N, K)
FP8 = Problem("fp8_gemm", 16, 1024, K, scaling="row")


class Kernels:
    """What was given to kernels for few tokens, which launches are bad, and the launch of each plan."""

    def __init__(self):
        self.given, self.refused, self.spoilt, self.of = [], set(), set(), {}
        self.us = {}
        """Microseconds of a launch; 50 of any other."""

    def refuse(self, kernel, shape):
        return shape in self.refused

    def harm(self, kernel, shape, out):
        if shape in self.spoilt and out.shape[1] == N:
            out[-1] = 0


class Clock(Engine):
    """Takes the times that the test states for each launch."""

    device = torch.device("cpu")
    cache_bytes = 1000.0

    def __init__(self, kernels):
        self.kernels, self.recorded = kernels, []

    def once(self, call):
        return 90.0

    def record(self, call, calls, copies):
        plan = next(c.cell_contents for c in call.__closure__ if isinstance(c.cell_contents, compiled.Plan))
        launch = self.kernels.of.get(id(plan), (plan, None))[1]
        self.recorded.append(launch)
        return Recording(lambda: calls * self.kernels.us.get(launch, 50.0), [None])


@pytest.fixture(autouse=True)
def kernels(tmp_path, monkeypatch):
    for name in ("FP4DISPATCH_FP8_BACKEND", "FP4_GEMM_BACKEND", "FP4DISPATCH_DISABLE", "FP4DISPATCH_TUNED"):
        monkeypatch.delenv(name, raising=False)
    tmp_path.chmod(0o755)
    monkeypatch.setenv("FP4DISPATCH_CACHE_DIR", str(tmp_path / "cache"))
    state = Kernels()
    state.given = random_cases.kernels(monkeypatch, state.refuse, state.harm)
    state.built = []
    monkeypatch.setattr(session.jit, "build_together", lambda names, arch: state.built.extend(names))
    monkeypatch.setattr(launch_choice, "speeds_on", lambda device: H200)
    ours = {name: registry.instance(name) for name in ("w4a8", "w4a16", "w8a8", "w8a16")}
    monkeypatch.setattr(registry, "backends", lambda: {**ours, "reference": ReferenceBackend()})
    monkeypatch.setattr("fp4dispatch.machine.system.current", lambda: HERE)
    monkeypatch.setattr("fp4dispatch.machine.capture.is_capturing", lambda: False)
    monkeypatch.setattr(selfcheck, "trusted", lambda *a: SimpleNamespace(status="passed", vouches_for=lambda plugin: 1))
    monkeypatch.setattr(routes, "gpu_of", lambda device: 0)
    monkeypatch.setattr(routes, "_plans", {})
    monkeypatch.setattr(tuning, "engine_of", lambda device: Clock(state))
    real = compiled.CompiledBackend.plan_launch

    def plan_launch(self, problem, prepared, launch):
        plan = real(self, problem, prepared, launch)
        state.of[id(plan)] = (plan, launch)
        return plan

    monkeypatch.setattr(compiled.CompiledBackend, "plan_launch", plan_launch)
    forget = (quarantine.reset, choose.reset, tuned.reset, tuning._engines.clear, routes.LayerSpec.parse.cache_clear)
    for each in forget:
        each()
    yield state
    for each in forget:
        each()


def new_process():
    for forget in (tuned.reset, choose.reset, quarantine.reset):
        forget()


def prepared_for(backend, problem):
    return registry.instance(backend).prepare(tuning.make_weights(problem, "cpu"))


def listed(backend, problem):
    """The launches of a backend that are timed, the usual one first."""
    backend = registry.instance(backend)
    pinned = replace(problem, activation=backend.activation_for(problem))
    return backend.launches(pinned, prepared_for(backend.name, problem))


def another(backend, problem):
    """The usual launch of a backend, and one of the same kernel that is launched with other numbers."""
    usual, *others = listed(backend, problem)
    return usual, next(e for e in others if e.kernel == usual.kernel and e.shape not in (None, usual.shape))


def tune(problem, **options):
    return tuning.tune(problem, tuning.make_weights(problem, "cpu"), gpu=0, **options)


def launched(kernels, backend, problem):
    """The numbers that a fresh plan gives to its kernel; None for the kernel's own choice."""
    found = registry.instance(backend)
    pinned = replace(problem, activation=found.activation_for(problem))
    prepared = prepared_for(backend, problem)
    plan = found.plan(pinned, prepared)
    out = torch.empty(problem.m, problem.n, dtype=torch.bfloat16)
    before = len(kernels.given)
    found.run(plan, prepared, torch.randn(problem.m, problem.k).bfloat16(), out)
    if plan.state.shape is not None:
        return tuple(plan.state.shape)
    return kernels.given[-1][1] if len(kernels.given) > before else None


# ---------------------------------------------------------------------------------------------- what is timed, and used


@pytest.mark.parametrize(("backend", "problem"), [("w4a16", FP4), ("w4a8", FP4), ("w8a8", FP8), ("w8a16", FP8)])
def test_a_bad_predicted_launch_is_beaten_by_the_tuned_one(kernels, backend, problem):
    usual, *others = listed(backend, problem)
    later = replace(problem, m=17)  # the next measurement would be at 24
    unlike = {None, usual.shape, launched(kernels, backend, later)}
    good = next(each for each in others if each.kernel == usual.kernel and each.shape not in unlike)
    assert launched(kernels, backend, problem) == usual.shape
    kernels.us = {usual: 100.0, good: 10.0}
    found = tune(problem)
    assert (found.timings[0].backend, found.timings[0].launch, found.timings[0].us) == (backend, good, 10.0)
    assert launched(kernels, backend, problem) == good.shape
    new_process()
    assert launched(kernels, backend, replace(problem, m=9)) == good.shape
    assert launched(kernels, backend, later) in unlike
    other = replace(problem, n=problem.n + 64)
    assert launched(kernels, backend, other) == listed(backend, other)[0].shape


def test_explain_says_what_was_tuned_and_when(kernels):
    _, good = another("w4a16", FP4)
    kernels.us = {good: 10.0}
    found = tune(FP4)
    decision = explain("nvfp4_gemm", 16, N, K)
    assert (decision.backend, decision.rule.id) == ("w4a16", "tuned")
    assert (
        f"tuned: 10.0 us, launch shape {good} (quartiles 0.0 us apart, {tuning.ROUNDS} repeats), on {found.date}"
        in str(decision)
    )
    assert json.loads(json.dumps(found.to_dict()))["timings"][0]["launch"] == [
        good.kernel,
        good.build,
        list(good.shape),
    ]


def test_a_sieve_leaves_the_fastest_few_and_all_builds_are_compiled_first(kernels):
    every = [*listed("w4a16", FP4), *listed("w4a8", FP4)]
    assert len(every) > 2 * session.FINALISTS
    kernels.us = {launch: 100.0 - i for i, launch in enumerate(every)}
    found = tune(FP4)
    assert {each.gemm for each in every} == set(kernels.built)
    for backend, activation in (("w4a16", "bf16"), ("w4a8", "fp8")):
        mine = sorted(listed(backend, FP4), key=kernels.us.get)
        assert [t.launch for t in found.launches(backend, activation)] == mine[: session.FINALISTS]


def test_finalists_keep_what_has_no_rough_time():
    few, many = Contender("a", "fp8"), [Contender("b", "fp8", LaunchConfig("k", str(i))) for i in range(6)]
    rough = {each: float(-i) for i, each in enumerate(many)}
    assert session.finalists([few, *many], rough) == (few, *many[:1:-1])
    assert session.finalists([few, *many], {}) == (few, *many)


def test_a_wrong_launch_is_left_out_and_its_backend_stays(kernels):
    _, spoilt = another("w4a8", FP4)
    kernels.spoilt, kernels.us = {spoilt.shape}, {spoilt: 1.0}
    found = tune(FP4)
    assert spoilt not in [t.launch for t in found.timings]
    assert found.of("w4a8", "fp8") is not None
    (why,) = [why for name, why in found.left_out if name == "w4a8"]
    assert why.startswith("wrong at this size: M=16 N=256 K=512: tile (0, ")
    assert str(spoilt) in why
    assert quarantine.quarantined() == frozenset()


def test_a_backend_whose_own_choice_is_wrong_goes_into_quarantine(kernels):
    usual = listed("w4a8", FP4)[0]
    kernels.spoilt = {usual.shape}
    found = tune(FP4)
    assert found.of("w4a8", "fp8") is None
    assert ("w4a8", "nvfp4_gemm", "sm_90") in quarantine.quarantined()


def test_a_launch_that_the_kernel_refuses_is_left_out(kernels):
    _, refused = another("w4a8", FP4)
    kernels.refused = {refused.shape}
    found = tune(FP4)
    assert ("w4a8", f"ValueError: shape: needs 300000 bytes of shared memory, a CTA has 232448 (launch {refused})") in (
        found.left_out
    )


def test_a_hopeless_launch_costs_one_call(kernels, monkeypatch):
    _, slow = another("w4a8", FP4)
    real = Clock.once
    calls = []

    def once(self, call):
        plan = next(c.cell_contents for c in call.__closure__ if isinstance(c.cell_contents, compiled.Plan))
        calls.append(kernels.of[id(plan)][1])
        return 400.0 if calls[-1] == slow else real(self, call)

    monkeypatch.setattr(Clock, "once", once)
    found = tune(FP4)
    assert slow in calls
    assert slow not in [t.launch for t in found.timings]
    assert ("w4a8", f"one call takes 400 us, another launch 90 us (launch {slow})") in found.left_out
    assert found.of("w4a8", "fp8") is not None


def test_one_backend_with_several_launches_is_a_choice(kernels, monkeypatch):
    monkeypatch.setenv("FP4DISPATCH_DISABLE", "w4a8")
    _, good = another("w4a16", FP4)
    kernels.us = {good: 10.0}
    assert tune(FP4).timings[0].launch == good
    assert launched(kernels, "w4a16", FP4) == good.shape


# ---------------------------------------------------------------------------------------------------- which M it serves


@pytest.mark.parametrize(
    ("m", "at"),
    [(1, 1), (3, 4), (12, 16), (17, 24), (25, 32), (33, 48), (300, 384), (400, 512)],
)
def test_a_ragged_m_is_timed_at_the_end_of_its_range(m, at):
    assert m_bucket(m, FP4.op, HERE.arch) == at


def test_a_bound_of_a_rule_is_never_passed():
    for m in range(1, 3000):
        last = m_bucket(m, FP8.op, HERE.arch)
        assert m <= last
        assert all(last <= bound or m > bound for bound in bounds("fp8_gemm", HERE.arch))


def test_ragged_tokens_take_the_launch_of_their_own_measurement(kernels):
    problem = replace(FP8, m=300, n=4096, k=4096)
    at = {m: listed("w8a8", replace(problem, m=m)) for m in (384, 512)}
    split = {m: next(e for e in at[m] if e.shape and e.shape[1] == parts) for m, parts in ((384, 2), (512, 1))}
    kernels.us = dict.fromkeys(split.values(), 10.0)
    for m in (300, 500):
        tune(replace(problem, m=m))
    numbers = launched(kernels, "w8a8", problem)
    assert numbers[1] == split[384].shape[1]
    assert launched(kernels, "w8a8", replace(problem, m=500))[1] == split[512].shape[1]
    decision = explain("fp8_gemm", 300, 4096, 4096, scaling="row", backend="w8a8")
    assert any(
        f"launches for M=300 are tuned at M=384: 10.0 us, launch shape {split[384]}" in n for n in decision.notes
    )


def test_what_was_tuned_at_eight_tokens_serves_fewer_and_explain_says_so(kernels):
    _, good = another("w8a16", replace(FP8, m=8))
    kernels.us = {good: 10.0}
    tune(replace(FP8, m=8))
    decision = explain("fp8_gemm", 3, FP8.n, FP8.k, scaling="row", backend="w8a16")
    assert any(f"launches for M=3 are tuned at M=8: 10.0 us, launch shape {good}" in n for n in decision.notes)


def test_a_plan_for_every_m_takes_each_timed_launch(kernels):
    good = {}
    for m in (1, 16):
        _, good[m] = another("w8a16", replace(FP8, m=m))
        kernels.us = {good[m]: 10.0}  # alone: the others may be among the launches for this M too
        tune(replace(FP8, m=m))
    assert [launched(kernels, "w8a16", replace(FP8, m=m)) for m in (1, 8, 9, 16)] == [
        *(good[1].shape,) * 2,
        *(good[16].shape,) * 2,
    ]
    assert launched(kernels, "w8a16", replace(FP8, m=32)) == listed("w8a16", replace(FP8, m=32))[0].shape


# -------------------------------------------------------------------------------------------------- when it is not used


def test_off_and_ignored_launches_are_not_used(kernels, monkeypatch):
    usual, good = another("w4a16", FP4)
    kernels.us = {good: 10.0}
    tune(FP4)
    assert launched(kernels, "w4a16", FP4) == good.shape
    monkeypatch.setenv("FP4DISPATCH_TUNED", "off")
    assert launched(kernels, "w4a16", FP4) == usual.shape
    monkeypatch.delenv("FP4DISPATCH_TUNED")
    assert launched(kernels, "w4a16", FP4) == good.shape
    tuned.ignore(FP4)
    assert launched(kernels, "w4a16", FP4) == usual.shape


def test_launches_of_other_kernels_are_ignored_with_words(kernels, monkeypatch):
    usual, good = another("w4a16", FP4)
    kernels.us = {good: 10.0}
    date = tune(FP4).date
    assert explain("nvfp4_gemm", 16, N, K).notes == ()
    new_process()
    monkeypatch.setattr(facts, "_own_code", lambda: "other kernels")
    assert launched(kernels, "w4a16", FP4) == usual.shape
    decision = explain("nvfp4_gemm", 16, N, K)
    assert "tuned: " not in str(decision)
    assert decision.notes == (
        f"times and launch shapes of {date} are not used, as these facts were others: kernels. "
        "fp4dispatch tune measures again",
    )


def test_a_stored_launch_that_no_build_has_is_not_used(kernels):
    usual = listed("w4a16", FP4)[0]
    gone = Timing("w4a16", "bf16", 1.0, 0.0, 15, LaunchConfig("w4a16_small", "gone", usual.shape))
    held = tuned.facts(choose.facts(0), registry.backends())
    tuned.remember(Measurement(FP4, (gone,), facts=held))
    assert launched(kernels, "w4a16", FP4) == usual.shape


# ----------------------------------------------------------------------------------------------------- layers and ranks


def test_layers_run_the_tuned_launch_also_where_they_had_a_plan(kernels):
    _, good = another("w4a16", FP4)
    layer = FP4Linear.from_linear(nn.Linear(K, N, bias=False).bfloat16(), activation="bf16")
    x = torch.randn(12, K).bfloat16()
    before = layer(x)
    plan = layer.bind().launch(12, False)[1]
    kernels.us = {good: 10.0}
    warmup(layer, tokens=[16], tune=True)
    kernels.given.clear()
    assert torch.equal(layer(x), before)
    assert kernels.given == [("w4a16_small", good.shape)]
    assert layer.bind().launch(12, False)[1] is not plan
    assert plan in routes._plans.values()  # a CUDA graph may hold it
    again = layer.bind().launch(12, False)[1]
    warmup(layer, tokens=[16], tune=True)
    assert layer.bind().launch(12, False)[1] is again


def test_a_benchmark_says_which_launch_a_layer_runs(kernels):
    usual, good = another("w4a16", FP4)
    layer = FP4Linear.from_linear(nn.Linear(K, N, bias=False).bfloat16(), activation="bf16")
    assert ours.launched(layer.bind(), 16) == f"w4a16 {usual}"
    kernels.given.clear()
    layer(torch.randn(16, K).bfloat16())
    assert kernels.given == [("w4a16_small", usual.shape)]
    kernels.us = {good: 10.0}
    warmup(layer, tokens=[16], tune=True)
    assert ours.launched(layer.bind(), 16) == f"w4a16 {good}"
    slow = FP4Linear.from_linear(nn.Linear(K, N, bias=False).bfloat16(), backend="reference")
    assert ours.launched(slow.bind(), 16) == ""


def test_launches_that_one_rank_has_are_used_by_none(kernels):
    usual, good = another("w4a16", FP4)
    decision = choose.select(replace(FP4, activation="bf16"), gpu=0)
    mine = {"layer": ((16, decision),)}
    there = agreement._summary(mine)
    kernels.us = {good: 10.0}
    tune(replace(FP4, activation="bf16"))
    here = agreement._summary(mine)
    assert (there["launches"], here["launches"] != there["launches"]) == ({"layer": ""}, True)
    ranks = agreement.Ranks(alone=True)
    assert not agreement._take_over(ranks, mine, [here, here])
    assert launched(kernels, "w4a16", FP4) == good.shape
    assert agreement._take_over(ranks, mine, [here, there])
    assert launched(kernels, "w4a16", replace(FP4, activation="bf16")) == usual.shape
    assert agreement._summary(mine)["launches"] == {"layer": ""}


def test_ignored_launches_do_not_come_back_from_another_problem_of_the_layer(kernels):
    """Ranks would never agree: each round would ignore the same problem, and find the launch of the other one."""
    usual, good = another("w4a16", FP4)
    kernels.us = {good: 10.0}
    for problem in (FP4, replace(FP4, bias=True), replace(FP4, activation="bf16")):
        tune(problem)
    tuned.ignore(FP4)
    assert launched(kernels, "w4a16", FP4) == usual.shape
    tune(FP4, force=True)
    assert launched(kernels, "w4a16", FP4) == good.shape
