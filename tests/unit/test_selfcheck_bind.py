"""Binding a layer checks it: ``auto`` takes the next backend, a named one is refused, ranks and settings are heeded."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn

from fp4dispatch.backends import registry
from fp4dispatch.backends.reference import ReferenceBackend
from fp4dispatch.dispatch import choose
from fp4dispatch.errors import BackendUnsupportedError, CaptureError, SelfCheckFailed
from fp4dispatch.machine.system import System
from fp4dispatch.models.linear import FP8Linear
from fp4dispatch.run import binding, routes
from fp4dispatch.trust import canary, layercheck, quarantine, selfcheck
from tests.planted import LAYER_FAULTS, Honest

HERE = System.fake("9.0", cuda="13.0", torch="2.11", driver="580.1")


class Narrow(LAYER_FAULTS["WrongAboveK2048"][0]):
    """Right for the canaries, and wrong above K=128: a small layer shows it."""

    name = "narrow"

    def multiply(self, p, a, b):
        return Honest.multiply(self, p, a, b) if p.k < 1000 else super().multiply(p, a[:, :512], b[:, :512])


class Fine(Honest):
    name = "fine"


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """An sm_90 machine whose first choice is wrong for long K; everything runs on the CPU."""
    for name in ("FP4DISPATCH_FP8_BACKEND", "FP4DISPATCH_DISABLE", "FP4DISPATCH_SELFCHECK"):
        monkeypatch.delenv(name, raising=False)
    tmp_path.chmod(0o755)
    monkeypatch.setenv("FP4DISPATCH_CACHE_DIR", str(tmp_path / "cache"))
    backends = {"narrow": Narrow(), "fine": Fine(), "reference": ReferenceBackend()}
    monkeypatch.setattr(registry, "backends", lambda: backends)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr("fp4dispatch.machine.capture.is_capturing", lambda: False)
    monkeypatch.setattr(canary, "SHAPES", canary.SHAPES[:1])
    monkeypatch.setattr(layercheck, "REPEATS", (2, 1, 1))
    real = selfcheck.trusted
    monkeypatch.setattr(selfcheck, "trusted", lambda name, problem, system, device: real(name, problem, system, "cpu"))
    systems = {}

    def current():
        shut = quarantine.quarantined()
        return systems.setdefault(shut, replace(HERE, quarantined=shut))

    monkeypatch.setattr("fp4dispatch.machine.system.current", current)
    monkeypatch.setattr(routes, "gpu_of", lambda device: 0)
    monkeypatch.setattr(routes, "_plans", {})
    forget = (canary.canaries.cache_clear, quarantine.reset, choose.reset, routes.LayerSpec.parse.cache_clear)
    for each in forget:
        each()
    yield backends
    for each in forget:
        each()


def layer(k=1024, **options):
    torch.manual_seed(0)
    made = FP8Linear.from_linear(nn.Linear(k, 64).bfloat16(), scaling="row", **options)
    made._forget()
    return made


def new_process():
    quarantine.reset()
    choose.reset()


@pytest.fixture
def checks(monkeypatch):
    """Which backends are checked on which layer."""
    ran = []
    real = layercheck.run

    def run(subject, system, seed=0):
        ran.append((subject.backend.name, str(subject)))
        return real(subject, system, seed)

    monkeypatch.setattr(layercheck, "run", run)
    return ran


@pytest.mark.parametrize("gpu", [0, None])
def test_auto_takes_the_next_one_and_keeps_the_evidence(checks, monkeypatch, caplog, gpu):
    monkeypatch.setattr(routes, "gpu_of", lambda device: gpu)
    made = layer()
    with caplog.at_level(logging.WARNING, "fp4dispatch"):
        bound = made.bind()
    assert made.backend_text() == "fine (fp8)"
    assert [name for name, _ in checks] == ["narrow", "fine"]
    assert checks[0][1] == "N=64 K=1024 -> bfloat16 + bias, M=1..32768"
    assert list(made._state.prepared) == ["fine"]  # nothing of the one that failed is held
    assert [r.code for r in bound.decisions[0][1].verdict("narrow").reasons] == ["QUARANTINED"]
    assert "narrow fp8_gemm layer M=1 N=64 K=1024: tile (0, 0) is wrong" in caplog.text
    x = torch.randn(3, 1024).bfloat16()
    want = x.float() @ made.weights().weight.float().t() * made.weight_scale + made.bias
    assert torch.nn.functional.cosine_similarity(made(x).float(), want.float(), dim=1).min() > 0.99


def test_once_for_each_shape_in_a_process_and_in_the_next(checks):
    first, again, other = layer(512), layer(512), layer(640)
    for each in (first, again, other):
        each.bind()
    assert [text.split(" ->")[0] for _, text in checks] == ["N=64 K=512", "N=64 K=640"]
    new_process()
    layer(512).bind()
    assert len(checks) == 2


def test_a_named_backend_fails_loudly_and_changes_nothing(checks):
    made = layer(backend="narrow")
    with pytest.raises(SelfCheckFailed, match=r"narrow fp8_gemm layer M=1 N=64 K=1024: tile \(0, 0\) is wrong"):
        made.bind()
    assert (made._state.prepared, made._state.bound) == ({}, {})
    assert not any(name.startswith("layout") for name in made._buffers)
    with pytest.raises(SelfCheckFailed, match="layer M=1 N=64 K=1024"):
        made.bind()
    with pytest.raises(BackendUnsupportedError, match="QUARANTINED"):  # another shape: nothing is known of that one
        layer(512, backend="narrow").bind()
    new_process()
    with pytest.raises(SelfCheckFailed, match="layer M=1 N=64 K=1024"):  # known from disk
        made.bind()
    assert len(checks) == 1
    assert layer(512, backend="fine").bind()


def test_a_layer_that_binds_when_it_is_made_says_why_at_its_first_call(monkeypatch):
    """As on a GPU: loading and moving keep a refusal for later."""
    made = layer(backend="narrow")
    monkeypatch.setattr("fp4dispatch.models.backend_binding._system.current", lambda: System.fake())
    made._refresh()
    assert made._state.bound == {}
    with pytest.raises(SelfCheckFailed, match=r"tile \(0, 0\) is wrong"):
        made(torch.ones(1, 1024, dtype=torch.bfloat16))


def test_off_checks_nothing_and_force_each_process_anew(checks, monkeypatch):
    monkeypatch.setenv("FP4DISPATCH_SELFCHECK", "off")
    made = layer()
    made.bind()
    assert (made.backend_text(), checks) == ("narrow (fp8)", [])
    monkeypatch.setenv("FP4DISPATCH_SELFCHECK", "force")
    for _ in range(2):
        new_process()
        layer(512).bind()
    assert len(checks) == 2


def test_the_reference_is_not_checked_against_itself(checks):
    layer(backend="reference").bind()
    assert checks == []


def test_builtins_are_not_checked_on_a_cpu(checks, monkeypatch):
    monkeypatch.setattr(registry, "is_plugin", lambda name: False)
    layer().bind()
    assert checks == []


def test_no_memory_for_the_check(monkeypatch, caplog):
    """A plug-in is passed over; a built-in, whose canaries passed, is used, and so is what is named. Each warns."""

    def none(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(layercheck.Operands, "x", none)
    with caplog.at_level(logging.WARNING, "fp4dispatch"):
        plugin = layer()
        plugin.bind()
    assert plugin.backend_text() == "reference (bf16)"
    assert "narrow fp8_gemm layer" in caplog.text
    assert "not checked: M=288: memory ran out" in caplog.text
    named = layer(512, backend="fine")
    named.bind()
    assert named.backend_text() == "fine (fp8)"
    new_process()
    monkeypatch.setattr(registry, "is_plugin", lambda name: name == "reference")
    real = binding._subjects
    monkeypatch.setattr(binding, "_subjects", lambda *a: with_all_checked(real, *a))
    with caplog.at_level(logging.WARNING, "fp4dispatch"):
        builtin = layer(512)
        builtin.bind()
    assert builtin.backend_text() == "narrow (fp8)"


def with_all_checked(real, *args):
    """Subjects as on a GPU, where built-ins are checked too."""
    before, registry.is_plugin = registry.is_plugin, lambda name: True
    try:
        return list(real(*args))
    finally:
        registry.is_plugin = before


def test_each_backend_of_a_layer_is_checked_for_its_own_tokens(checks, monkeypatch):
    """One serves few tokens, one many."""

    class Few(Fine):
        name = "narrow"

        def supports(self, problem, system):
            from fp4dispatch.problem.decision import Reason

            return () if problem.m <= 256 else (Reason("SHAPE", f"M is {problem.m}, needs 256 at most"),)

    registry.backends()["narrow"] = Few()
    made = layer(512)
    made.bind()
    spans = [(name, text.partition(", M=")[2]) for name, text in checks]
    limit = made.bind().spec.routes[0].m_max
    assert spans == [("narrow", f"1..{limit}"), ("fine", f"{limit + 1}..32768")]


def test_never_inside_a_capture(monkeypatch):
    monkeypatch.setattr(routes.capture, "is_capturing", lambda: True)
    with pytest.raises(CaptureError):
        layer().bind()
