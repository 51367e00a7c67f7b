"""``auto`` and the self-check together: a backend that gives wrong numbers is passed over, on GPUs alone."""

from __future__ import annotations

import logging

import pytest
import torch

from fp4dispatch.backends import registry
from fp4dispatch.backends.reference import ReferenceBackend
from fp4dispatch.dispatch import choose
from fp4dispatch.dispatch.explain import explain
from fp4dispatch.errors import BackendUnsupportedError, CaptureError
from fp4dispatch.machine.system import System
from fp4dispatch.problem import Problem
from fp4dispatch.problem.decision import Reason
from fp4dispatch.trust import canary, quarantine, selfcheck
from tests.planted import FAULTS, Honest

NO_GPU = System.fake(cuda="13.0", torch="2.11")
FP8 = Problem("fp8_gemm", 16, 64, 64, scaling="row")


class Wrong(FAULTS["WritesZeros_first"]):
    """A plug-in that does not look at the quarantine when it is asked what it supports."""

    name = "wrong"


class Fine(Honest):
    name = "fine"


class Other(Fine):
    name = "other"


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """An sm_90 machine whose first choice gives wrong numbers; CUDA counts as used, the checks run on the CPU."""
    for name in ("FP4_GEMM_BACKEND", "FP4DISPATCH_FP8_BACKEND", "FP4DISPATCH_DISABLE", "FP4DISPATCH_SELFCHECK"):
        monkeypatch.delenv(name, raising=False)
    tmp_path.chmod(0o755)
    monkeypatch.setenv("FP4DISPATCH_CACHE_DIR", str(tmp_path / "cache"))
    backends = {"wrong": Wrong(), "fine": Fine(), "reference": ReferenceBackend()}
    monkeypatch.setattr(registry, "backends", lambda: backends)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr("fp4dispatch.machine.capture.is_capturing", lambda: False)
    monkeypatch.setattr(selfcheck.capture, "is_capturing", lambda: False)
    monkeypatch.setattr(canary, "SHAPES", canary.SHAPES[:1])
    real = selfcheck.trusted
    asked = []

    def trusted(name, problem, system, device):
        asked.append((name, problem.activation, str(device)))
        return real(name, problem, system, "cpu")

    monkeypatch.setattr(selfcheck, "trusted", trusted)
    base = System.fake("9.0", cuda="13.0", torch="2.11")
    monkeypatch.setattr(
        "fp4dispatch.machine.system.current", lambda: with_quarantine(base, quarantine.quarantined())
    )  # as system.current does
    for forget in (canary.canaries.cache_clear, quarantine.reset, choose.reset):
        forget()
    yield asked
    for forget in (canary.canaries.cache_clear, quarantine.reset, choose.reset):
        forget()


_systems: dict[object, System] = {}


def with_quarantine(base, shut):
    from dataclasses import replace

    return _systems.setdefault(shut, replace(base, quarantined=shut))


def test_auto_takes_the_next_one_and_says_why(machine, caplog):
    with caplog.at_level(logging.INFO, "fp4dispatch"):
        decision = choose.select(FP8)
    assert decision.backend == "fine"
    assert [r.code for r in decision.verdict("wrong").reasons] == ["QUARANTINED"]
    assert machine == [("wrong", "fp8", "cuda:0"), ("fine", "fp8", "cuda:0")]
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert any("wrong fp8_gemm M=1" in text and "Quarantined" in text for text in warnings)
    assert any("wrong: QUARANTINED" in text for text in warnings)


def test_it_happens_once(machine):
    choose.select(FP8)
    asked = list(machine)
    for m in (16, 12, 9):
        choose.select(Problem("fp8_gemm", m, 64, 64, scaling="row"))
    assert machine == asked


def test_what_was_chosen_unchecked_is_checked_once_checks_are_on(machine, monkeypatch):
    monkeypatch.setenv("FP4DISPATCH_SELFCHECK", "off")
    assert choose.select(FP8).backend == "wrong"
    monkeypatch.delenv("FP4DISPATCH_SELFCHECK")
    assert choose.select(FP8).backend == "fine"


def test_a_named_backend_is_refused_once_it_is_quarantined(machine, monkeypatch):
    assert choose.select(FP8, backend="wrong").backend == "wrong"
    assert machine == []
    choose.select(FP8)
    with pytest.raises(BackendUnsupportedError, match="QUARANTINED") as raised:
        choose.select(FP8, backend="wrong")
    assert "FP4DISPATCH_SELFCHECK=force" in str(raised.value)
    monkeypatch.setenv("FP4DISPATCH_SELFCHECK", "off")
    assert choose.select(FP8, backend="wrong").backend == "wrong"


def test_a_new_process_knows_without_checking(machine):
    choose.select(FP8)
    quarantine.reset()
    choose.reset()
    del machine[:]
    with pytest.raises(BackendUnsupportedError, match="QUARANTINED"):
        choose.select(FP8, backend="wrong")
    assert explain("fp8_gemm", 16, 64, 64, scaling="row").backend == "fine"
    assert machine == []


def test_nothing_left_but_the_reference(machine):
    backends = registry.backends()
    backends["fine"] = type("AlsoWrong", (Wrong,), {"name": "fine"})()
    assert choose.select(FP8).backend == "reference"
    assert [name for name, *_ in machine] == ["wrong", "fine"]


def test_a_plugin_has_to_pass_on_a_cpu_too(machine):
    assert choose.select(FP8, gpu=None).backend == "fine"
    assert machine == [("wrong", "fp8", "cpu"), ("fine", "fp8", "cpu")]
    quarantine.reset()
    choose.reset()
    del machine[:]
    assert choose.select(FP8, gpu=None).backend == "fine"  # the verdicts on this CPU were kept
    assert explain("fp8_gemm", 16, 64, 64, scaling="row", system=NO_GPU).backend == "wrong"  # another machine
    with pytest.raises(BackendUnsupportedError, match="QUARANTINED"):
        choose.select(FP8, backend="wrong", gpu=None)


def test_a_plugin_that_does_not_say_so_is_not_in_auto(machine):
    for name in ("wrong", "fine"):
        registry.backends()[name].auto = False
    for gpu in (0, None):
        assert choose.select(FP8, gpu=gpu).backend == "reference"
        assert choose.select(FP8, backend="fine", gpu=gpu).backend == "fine"
    assert machine == []


def test_cuda_is_never_initialised_for_it(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert choose.select(FP8).backend == "wrong"
    assert machine == []


def test_switched_off(machine, monkeypatch):
    monkeypatch.setenv("FP4DISPATCH_SELFCHECK", "off")
    assert choose.select(FP8).backend == "wrong"


def test_never_inside_a_capture(machine, monkeypatch):
    monkeypatch.setattr(selfcheck.capture, "is_capturing", lambda: True)
    monkeypatch.setattr("fp4dispatch.machine.capture.is_capturing", lambda: True)
    with pytest.raises(CaptureError, match="self-check of wrong"):
        choose.select(FP8)


class Picky(Fine):
    def supports(self, problem, system):
        return () if problem.n == 64 else (Reason("SHAPE", "only N=64"),)


@pytest.mark.parametrize("gpu", [0, None])
def test_a_plugin_that_cannot_be_checked_is_passed_over(machine, caplog, gpu):
    registry.backends()["wrong"] = type("Picky", (Picky,), {"name": "wrong"})()
    with caplog.at_level(logging.WARNING, "fp4dispatch"):
        decision = choose.select(FP8, gpu=gpu)
    assert decision.backend == "fine"
    (reason,) = decision.verdict("wrong").reasons
    assert (reason.code, "M=1 N=136 K=256: SHAPE only N=64" in reason.text) == ("UNPROVEN", True)
    assert "not checked: M=1 N=136 K=256: SHAPE only N=64" in caplog.text
    assert choose.select(FP8, gpu=gpu, backend="wrong").backend == "wrong"


@pytest.fixture
def builtin(machine, monkeypatch):
    """Count the first choice as built in."""
    monkeypatch.setattr(registry, "is_plugin", lambda name: name != "wrong")


def test_a_builtin_that_supports_no_canary_is_used_with_a_warning(builtin, caplog):
    """Its layer is checked when it is bound."""
    registry.backends()["wrong"] = type("Picky", (Picky,), {"name": "wrong"})()
    with caplog.at_level(logging.WARNING, "fp4dispatch"):
        assert choose.select(FP8).backend == "wrong"
    assert "not checked: M=1 N=136 K=256: SHAPE only N=64" in caplog.text


def test_what_had_no_memory_to_be_checked_is_passed_over_built_in_or_not_and_tried_again(builtin, machine, caplog):
    class Hungry(Fine):
        short = True

        def plan(self, problem, prepared):
            if self.short:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().plan(problem, prepared)

    hungry = registry.backends()["wrong"] = type("Hungry", (Hungry,), {"name": "wrong"})()
    with caplog.at_level(logging.WARNING, "fp4dispatch"):
        decision = choose.select(FP8)
        assert choose.select(FP8).backend == "fine"
    assert decision.backend == "fine"
    (reason,) = decision.verdict("wrong").reasons
    assert (reason.code, reason.fix) == ("UNPROVEN", "bind the layers before memory is full")
    said = [r.message for r in caplog.records if r.message.startswith("self-check: wrong fp8_gemm")]
    assert len(said) == 1
    hungry.short = False
    assert choose.select(FP8).backend == "wrong"
