"""Verdicts on real backends and hardware, how long they take, and faults planted on the device."""

from __future__ import annotations

import time

import pytest
import torch

from bench.candidates import LIMIT_MS
from fp4dispatch.backends import registry
from fp4dispatch.backends.base import Backend
from fp4dispatch.dispatch import choose
from fp4dispatch.dispatch.explain import explain
from fp4dispatch.errors import CaptureError
from fp4dispatch.machine import system as _system
from fp4dispatch.problem import Problem
from fp4dispatch.trust import canary, quarantine, selfcheck

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, scope="module")
def context():
    """Make the CUDA context: it is no backend's."""
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()


@pytest.fixture(autouse=True)
def clean(tmp_path, monkeypatch):
    tmp_path.chmod(0o755)
    # The verdicts alone go elsewhere: kernels that are finished are used, not compiled anew for each test.
    monkeypatch.setattr(quarantine.store, "folder", lambda: tmp_path / "cache" / "selfcheck")
    for name in ("FP4DISPATCH_SELFCHECK", "FP4DISPATCH_FP8_BACKEND", "FP4DISPATCH_DISABLE", "FP4_GEMM_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    quarantine.reset()
    choose.reset()
    yield
    quarantine.reset()
    choose.reset()


def facts():
    torch.cuda.init()
    return _system.current()


SUBJECTS = [
    (name, *kind)
    for name, backend in registry.backends().items()
    if isinstance(backend, Backend)
    for kind in canary.kinds(backend.activations)
]


def reasons(name, *kind):
    """Why no canary of a kind runs here; empty where one does."""
    system, backend = facts(), registry.instance(name)
    each = [backend.supports(c.problem, system) for c in canary.canaries(*kind)]
    return "" if not all(each) else "; ".join(str(reason) for reason in each[0])


@pytest.mark.parametrize("subject", SUBJECTS, ids="-".join)
def test_every_backend_of_this_machine_passes_in_time(subject, record_property):
    """Legitimate rounding of real kernels is never quarantined, for other numbers too. Checking is quick, the first in
    a process too; how long building takes is shown."""
    if why := reasons(*subject):
        pytest.skip(why)
    name, op, scaling, activation = subject
    backend = registry.instance(name)
    first = selfcheck.check(backend, op, scaling, activation, facts(), "cuda:0")
    assert first.status == "passed", first.text()
    for seed in range(1, 6):
        result = selfcheck.check(backend, op, scaling, activation, facts(), "cuda:0", seed=seed)
        assert result.status == "passed", (seed, result.text())
    again, system = [], facts()
    for _ in range(3):
        canary.canaries.cache_clear()
        started = time.perf_counter()
        result = selfcheck.check(backend, op, scaling, activation, system, "cuda:0")
        again.append((time.perf_counter() - started) * 1e3)
        assert result.build_ms + result.check_ms == pytest.approx(again[-1], abs=5)
    record_property("build_ms", round(first.build_ms))
    record_property("check_ms", round(first.check_ms))
    record_property("again_ms", round(min(again)))
    shown = f"built in {first.build_ms:.0f} ms, checked in {first.check_ms:.0f} ms, again in {min(again):.0f} ms"
    print(f"{' '.join(subject)}: {shown}")
    assert first.check_ms < LIMIT_MS, shown
    assert min(again) < LIMIT_MS, shown  # nothing is left to build


class _Busy(Backend):
    """The reference, with a kernel behind one of its steps that only keeps the device busy, and is not waited for."""

    name = "busy"
    activations = registry.instance("reference").activations

    def __init__(self, step, cycles):
        self.step, self.cycles, self.calls = step, cycles, 0
        self.inner = registry.instance("reference")

    def keep_busy(self, step):
        if step == self.step:
            self.calls += 1
            torch.cuda._sleep(self.cycles)

    def supports(self, problem, system):
        return self.inner.supports(problem, system)

    def prepare(self, weights):
        prepared = self.inner.prepare(weights)
        self.keep_busy("prepare")
        return prepared

    def plan(self, problem, prepared):
        plan = self.inner.plan(problem, prepared)
        self.keep_busy("plan")
        return plan

    def run(self, plan, prepared, x, out, bias=None):
        self.inner.run(plan, prepared, x, out, bias)
        self.keep_busy("run")


def _milliseconds(cycles):
    torch.cuda.synchronize()
    started = time.perf_counter()
    torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e3


@pytest.mark.parametrize("step", ["prepare", "plan", "run"])
def test_what_the_device_still_does_counts_as_the_step_that_launched_it(step):
    """Building is over before checking is timed, and what runs late is not counted as building."""
    subject = ("fp8_gemm", "row", "fp8")
    selfcheck.check(registry.instance("reference"), *subject, facts(), "cuda:0")
    cycles = 100_000_000
    each = min(_milliseconds(cycles) for _ in range(3))
    backend = _Busy(step, cycles)
    result = selfcheck.check(backend, *subject, facts(), "cuda:0")
    assert result.status == "passed", result.text()
    busy = 0.9 * each * backend.calls
    assert backend.calls >= 5
    assert (result.build_ms > busy, result.check_ms > busy) == (step == "plan", step != "plan")


def test_fp8_is_among_them():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no FP8 tensor cores")
    for scaling in ("tensor", "row"):
        assert reasons("cublaslt", "fp8_gemm", scaling, "fp8") == ""


class _Planted(Backend):
    """The reference with a fault on the device, which ``auto`` may choose."""

    auto = True
    activations = registry.instance("reference").activations

    def __init__(self, name, spoil):
        self.name, self.spoil = name, spoil
        self.inner = registry.instance("reference")

    def supports(self, problem, system):
        return self.inner.supports(problem, system)

    def prepare(self, weights):
        return self.inner.prepare(weights)

    def plan(self, problem, prepared):
        return self.inner.plan(problem, prepared)

    def run(self, plan, prepared, x, out, bias=None):
        before = out.clone()
        self.inner.run(plan, prepared, x, out, bias)
        self.spoil(out, before)


def _lose_the_last_tile(out, before):
    i, j = (out.shape[0] - 1) // 128 * 128, (out.shape[1] - 1) // 128 * 128
    out[i:, j:] = before[i:, j:]


def _swap_rows(out, before):
    if out.shape[0] > 9:
        out[[3, 9]] = out[[9, 3]]


FAULTS = {
    "never written": _lose_the_last_tile,
    "zero": lambda out, before: out[:128, :128].zero_(),
    "NaN": lambda out, before: out[-1].fill_(torch.nan),
    "wrong values": _swap_rows,
}


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("subject", [("nvfp4_gemm", "nvfp4", "nvfp4"), ("fp8_gemm", "row", "fp8")], ids="-".join)
def test_faults_on_the_device_are_caught(subject, kind):
    result = selfcheck.check(_Planted("planted", FAULTS[kind]), *subject, facts(), "cuda:0")
    assert (result.status, result.kind) == ("failed", kind)


def test_auto_passes_over_a_wrong_backend_and_remembers(monkeypatch):
    """With real CUDA state: the wrong one is asked first, checked once, and never again after a restart."""
    backends = {"wrong": _Planted("wrong", FAULTS["zero"]), "reference": registry.instance("reference")}
    monkeypatch.setattr(registry, "backends", lambda: backends)
    facts()
    problem = Problem("fp8_gemm", 16, 256, 256, scaling="row", activation="fp8")
    decision = choose.select(problem)
    assert decision.backend != "wrong"
    assert [r.code for r in decision.verdict("wrong").reasons] == ["QUARANTINED"]
    quarantine.reset()
    choose.reset()
    monkeypatch.setattr(selfcheck, "check", lambda *a, **k: pytest.fail("checked again"))
    assert explain("fp8_gemm", 16, 256, 256, scaling="row", activation="fp8").backend == decision.backend


def test_refused_while_a_graph_is_captured():
    backend = registry.instance("reference")
    system = facts()
    torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(CaptureError, match="self-check of reference"):
        selfcheck.check(backend, "fp8_gemm", "row", "fp8", system, "cuda:0")
