"""Building is timed apart from checking, is over before anything is launched, and hides nothing of the check."""

from __future__ import annotations

import time

import pytest
import torch

from fp4dispatch import jit
from fp4dispatch.errors import CaptureError
from fp4dispatch.machine.system import System
from fp4dispatch.problem.decision import Reason
from fp4dispatch.trust import canary, selfcheck, trial
from tests.planted import FAULTS, Honest

CPU = torch.device("cpu")
ROW = ("fp8_gemm", "row", "fp8")
HERE = System.fake("9.0")


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch):
    canary.canaries(*ROW)
    found = Clock()
    monkeypatch.setattr(time, "perf_counter", found)
    return found


class Takes(Honest):
    """Takes its time: 1 s to prepare, 100 s to plan, 10,000 s to run; ``steps`` are what was called, in order."""

    def __init__(self, clock, spend=None):
        self.steps = []
        self.clock = clock
        self.spend = spend or self.pass_time

    def pass_time(self, seconds):
        self.clock.seconds += seconds

    def prepare(self, w):
        self.steps.append("prepare")
        self.spend(1)
        return super().prepare(w)

    def plan(self, problem, prepared):
        self.steps.append("plan")
        self.spend(100)
        return super().plan(problem, prepared)

    def run(self, plan, prepared, x, out, bias=None):
        self.steps.append("run")
        self.spend(10_000)
        super().run(plan, prepared, x, out, bias)


def check(backend, system=HERE, **options):
    return selfcheck.check(backend, *ROW, system, CPU, **options)


def test_compiling_and_planning_are_building_and_all_else_is_checking(clock, monkeypatch):
    def compile_them(names, arch):
        clock.seconds += 5_000_000

    monkeypatch.setattr(jit, "build_together", compile_them)
    result = check(Takes(clock))
    assert result.status == "passed"
    assert result.build_ms == 1e3 * (5_000_000 + 6 * 100)
    assert result.check_ms == 1e3 * (6 * 1 + 18 * 10_000)
    assert result.seconds == pytest.approx((result.build_ms + result.check_ms) / 1e3)


def test_a_backend_that_builds_when_it_is_run_pays_in_the_check(clock):
    class Lazy(Takes):
        built = False

        def plan(self, problem, prepared):
            return Honest.plan(self, problem, prepared)

        def run(self, plan, prepared, x, out, bias=None):
            if not self.built:
                self.built = True
                self.pass_time(7_000_000)
            Honest.run(self, plan, prepared, x, out, bias)

    result = check(Lazy(clock))
    assert result.build_ms == 0
    assert result.check_ms > 7e9


def test_every_plan_is_made_before_anything_runs(clock):
    backend = Takes(clock)
    check(backend)
    assert backend.steps == ["prepare"] * 6 + ["plan"] * 6 + ["run"] * 18


def test_what_is_launched_is_waited_for_before_the_next_step_is_timed(clock, monkeypatch):
    """On a device, steps return before they are done: what each launched counts as its own."""
    pending = []

    def finish(device):
        clock.seconds += sum(pending)
        pending.clear()

    monkeypatch.setattr(trial, "finish", finish)
    result = check(Takes(clock, pending.append))
    assert result.build_ms == 1e3 * 6 * 100
    assert result.check_ms == 1e3 * 6 * 1
    assert pending == [10_000] * 18  # nothing waits between launches: the copies back do, after them


def test_operands_and_answers_are_no_building(clock, monkeypatch):
    """Also where what will be compiled is asked for first, which goes through the canaries."""

    def draw(*kind):
        clock.seconds += 3
        return canary.canaries(*kind)

    def name_them(*_):
        trial.canaries(*ROW)
        return set()

    monkeypatch.setattr(trial, "canaries", draw)
    monkeypatch.setattr(trial, "builds", name_them)
    result = check(Takes(clock))
    assert result.build_ms == 1e3 * 600
    assert result.check_ms == 1e3 * (2 * 3 + 6 * 1 + 18 * 10_000)


# ------------------------------------------------------------------------------------------------- one that raises


def raises_for(m, step, error):
    """One that raises in a step for the canary of M tokens, and writes zeros otherwise."""

    class RaisesThere(FAULTS["WritesZeros_first"]):
        def supports(self, problem, system):
            return self.step_for(problem, "supports", ())

        def prepare(self, w):
            there = next(c for c in canary.canaries(*ROW) if c.problem.m == m)
            return self.step_for(there.problem, "prepare", super().prepare(w), same=w.n == there.weights.n)

        def plan(self, problem, prepared):
            return self.step_for(problem, "plan", super().plan(problem, prepared))

        def run(self, plan, prepared, x, out, bias=None):
            super().run(plan, prepared, x, out, bias)
            self.step_for(plan.problem, "run", None)

        def step_for(self, problem, here, value, same=True):
            if here == step and problem.m == m and same:
                raise error
            return value

    return RaisesThere()


@pytest.mark.parametrize("step", ["supports", "prepare", "plan", "run"])
def test_what_is_ahead_of_one_that_raises_is_judged_and_what_is_behind_is_left(step):
    """Wrong numbers of a canary are kept whatever happens to a later one."""
    every = [str(each) for each in canary.canaries(*ROW)]
    at = [each.problem.m for each in canary.canaries(*ROW)].index(37)
    result = check(raises_for(37, step, RuntimeError("no")))
    assert result.ran == tuple(every[:at])
    kinds = {finding["canary"]: finding["kind"] for finding in result.evidence}
    assert kinds == dict.fromkeys(every[:at], "zero") | {every[at]: "raised"}
    assert (result.status, result.lasting) == ("failed", True)


@pytest.mark.parametrize("step", ["prepare", "plan"])
def test_memory_that_runs_out_leaves_the_verdict_on_what_ran(step):
    result = check(raises_for(37, step, torch.OutOfMemoryError("CUDA out of memory")))
    assert (result.status, result.kind) == ("failed", "zero")
    assert result.notes == ("M=37 N=208 K=272: memory ran out: CUDA out of memory",)


@pytest.mark.parametrize("step", ["supports", "prepare", "plan", "run"])
def test_a_refusal_during_capture_is_nobodys_fault(step):
    with pytest.raises(CaptureError, match="not now"):
        check(raises_for(37, step, CaptureError("not now")))


@pytest.mark.parametrize("second", [RuntimeError("cuDNN failed"), torch.OutOfMemoryError("CUDA out of memory")])
def test_a_dead_device_stays_dead_whatever_comes_after(second):
    """What ran into it first says so; those ahead of it then fail in other words, and the verdict is kept."""

    class DiesInPlan(Honest):
        def plan(self, problem, prepared):
            if problem.m == 37:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            return super().plan(problem, prepared)

        def run(self, plan, prepared, x, out, bias=None):
            raise second

    result = check(DiesInPlan())
    assert (result.status, result.kind, result.ran, result.lasting) == ("failed", "raised", (), True)


def test_what_is_not_supported_is_neither_prepared_nor_planned(clock):
    class Half(Takes):
        def supports(self, problem, system):
            return (Reason("DTYPE", "not this"),) if problem.out_dtype == "float32" else ()

    backend = Half(clock)
    result = check(backend)
    assert (len(result.ran), len(result.notes)) == (5, 1)
    assert backend.steps == ["prepare"] * 5 + ["plan"] * 5 + ["run"] * 15
