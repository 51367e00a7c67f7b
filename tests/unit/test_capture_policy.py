"""Layers ask the policy with their capture mode: every rule about capture, through FP4Linear and FP8Linear."""

from __future__ import annotations

import copy
import io
import logging

import pytest
import torch

import fp4dispatch
from fp4dispatch import FP4Linear, FP8Linear
from fp4dispatch.backends import registry
from fp4dispatch.backends.reference import ReferenceBackend
from fp4dispatch.dispatch import choose
from fp4dispatch.errors import CaptureError, InputError
from fp4dispatch.machine import capture, system
from fp4dispatch.machine.system import System
from fp4dispatch.policy.capability import check
from fp4dispatch.policy.catalogue import catalogue
from fp4dispatch.policy.rules import rules
from fp4dispatch.run import routes
from tests.parallel import off

FACTS = {"cuda": "13.0", "torch": "2.11", "nvcc": "13.0", "cutlass": "4.5", "cudnn_frontend": "1.25"}
N, K = 64, 64


def stand_in(name: str) -> ReferenceBackend:
    """A backend that says what the real one of this name says, and computes what the reference does."""
    formats: dict[str, tuple[str, ...]] = {}
    for record in catalogue().capabilities:
        if record.backend == name:
            formats.setdefault(record.op, record.activations)
    members = {
        "name": name,
        "auto": True,
        "activations": formats,
        "supports": lambda self, problem, machine: check(name, problem, machine),
    }
    return type(name, (ReferenceBackend,), members)()


@pytest.fixture
def machine(monkeypatch):
    """Return a function that makes a machine of a GPU that is not here, with stand-ins for some backends."""
    for name in ("FP4_GEMM_BACKEND", "FP4DISPATCH_FP8_BACKEND", "FP4DISPATCH_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(routes, "gpu_of", lambda device: 0)
    choose.reset()

    def use(arch: str, *names: str, **facts: str) -> None:
        made = System.fake(arch, **FACTS | {"cudnn": "9.23.1"} | facts)
        offered = {name: stand_in(name) for name in names} | {"reference": ReferenceBackend()}
        monkeypatch.setattr(system, "current", lambda: made)
        monkeypatch.setattr(registry, "backends", lambda: offered)
        choose.reset()

    yield use
    monkeypatch.undo()
    choose.reset()


@pytest.fixture
def capturing(monkeypatch):
    """Return a function that starts or ends a capture."""

    def switch(on: bool) -> None:
        monkeypatch.setattr(capture, "is_capturing", lambda: on)
        monkeypatch.setattr(capture, "stream_is_capturing", lambda: on)

    return switch


FORMATS = 0.16
"""Of the norm, what activations in NVFP4 change beside those in 16 bits: 0.102, standard deviation 0.010 (20 draws)."""


def make(kind: type, **kwargs) -> torch.nn.Module:
    return kind.from_linear(torch.nn.Linear(K, N, dtype=torch.bfloat16), **kwargs)


def chosen(layer) -> set[str]:
    return {decision.backend for _, decision in layer.decisions()}


# rule: kinds of layers, arch, facts, the backend that it denies, the one beside it, capture mode, smallest M
CASES = {
    "piecewise-live-m": [
        *((FP4Linear, arch, {}, "cutlass", "cudnn", "piecewise", 0) for arch in ("10.0", "10.3")),
        (FP4Linear, "11.0", {}, "cutlass", "cublaslt", "piecewise", 0),
        (FP4Linear, "12.0", {"flashinfer": "0.7.2"}, "flashinfer_b12x", "w4a16", "piecewise", 0),
        *((FP8Linear, arch, {}, "cutlass", "cudnn", "piecewise", 0) for arch in ("9.0", "10.0", "12.1")),
    ],
    "cudnn-nvfp4-sm12x-graphs": [
        (FP4Linear, arch, {"cudnn": "9.19.0"}, "cudnn", "cublaslt", mode, 1)
        for arch in ("12.0", "12.1")
        for mode in ("full", "piecewise")
    ],
    "fi-cudnn-workspace-resize": [
        (kind, "10.0", {"flashinfer": "0.6.18"}, "flashinfer_cudnn", "reference", mode, 1)
        for kind in (FP4Linear, FP8Linear)
        for mode in ("full", "piecewise")
    ],
    "fi-cudnn-graph-evicted": [
        (kind, "10.0", {"flashinfer": "0.6.12"}, "flashinfer_cudnn", "reference", mode, 1)
        for kind in (FP4Linear, FP8Linear)
        for mode in ("full", "piecewise")
    ],
}
EACH = [(rule, *case) for rule, cases in CASES.items() for case in cases]
OF_A_FULL_GRAPH = [case for case in EACH if case[6] == "full"]


def test_each_rule_about_capture_has_a_case():
    assert set(CASES) == {rule.id for rule in rules() if rule.when.captures}


def describe(value: object) -> str:
    return value.__name__ if isinstance(value, type) else str(value)


@pytest.mark.parametrize(("rule", "kind", "arch", "facts", "denied", "beside", "mode", "least"), EACH, ids=describe)
def test_each_rule_about_capture_fires_for_layers(
    machine, caplog, rule, kind, arch, facts, denied, beside, mode, least
):
    machine(arch, denied, *(() if beside == "reference" else (beside,)), **facts)
    layer = make(kind)
    layer(torch.randn(3, K, dtype=torch.bfloat16))
    if denied in ("cutlass", "flashinfer_b12x") and arch.startswith("12"):
        layer.backend = denied  # unproven there, or last: named, so that it runs at all
        layer.rebind()
    eager = chosen(layer)
    with caplog.at_level(logging.INFO, "fp4dispatch"):
        fp4dispatch.warmup(layer, [3], capture=mode, m_min=least)
    assert (layer.capture, layer.m_min) == (mode, least)
    hits = {hit.id for _, d in layer.decisions() for hit in d.verdict(denied).denied}
    assert rule in hits
    if layer.backend is None:
        assert denied in eager
        assert chosen(layer) == {beside}
    else:
        assert chosen(layer) == {denied}  # named: honoured, with one warning
        warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING and rule in r.message]
        assert len(warnings) == 1
    fp4dispatch.warmup(layer, [3], capture="none", m_min=1)
    assert rule not in {hit.id for _, d in layer.decisions() for hit in d.verdict(denied).denied}


@pytest.mark.parametrize(
    ("rule", "kind", "arch", "facts", "denied", "beside", "mode", "least"), OF_A_FULL_GRAPH, ids=describe
)
def test_what_was_chosen_without_a_graph_is_not_captured_against_the_rules(
    machine, capturing, rule, kind, arch, facts, denied, beside, mode, least
):
    machine(arch, denied, *(() if beside == "reference" else (beside,)), **facts)
    layer = make(kind)
    x = torch.randn(3, K, dtype=torch.bfloat16)
    want = layer(x)
    assert denied in chosen(layer)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    compiled(x)
    capturing(True)
    for call in (lambda: layer.bind().launch(3, bias=True), lambda: compiled(x)):
        with pytest.raises(CaptureError, match=rf"{denied} for M=3.*{rule}.*\n.*fp4dispatch\.warmup\(model"):
            call()
    capturing(False)
    fp4dispatch.warmup(layer, [3])  # at least `full`, unless it is told otherwise
    assert layer.capture == "full"
    capturing(True)
    backend, _, _ = layer.bind().launch(3, bias=True)
    assert backend.name == beside
    assert off(layer(x), want) < FORMATS


def test_a_named_backend_may_be_captured_and_is_warned_of_once(machine, capturing, caplog):
    machine("10.0", "flashinfer_cudnn", "cutlass", flashinfer="0.6.18")
    with caplog.at_level(logging.INFO, "fp4dispatch"):
        for _ in range(2):
            layer = make(FP4Linear, backend="flashinfer_cudnn")
            layer(torch.randn(3, K, dtype=torch.bfloat16))
        (warning,) = [r.message for r in caplog.records if r.levelno == logging.WARNING]
        for part in ("named by argument", "in a CUDA graph", "fi-cudnn-workspace-resize", "fi-cudnn-graph-evicted"):
            assert part in warning
        capturing(True)
        assert layer.bind().launch(3, bias=True)[0].name == "flashinfer_cudnn"
        capturing(False)
        fp4dispatch.warmup(layer, [3], capture="full")
    assert chosen(layer) == {"flashinfer_cudnn"}


@pytest.mark.parametrize("arch", ["9.0", "10.0", "12.0"])
def test_where_no_rule_speaks_of_capture_nothing_changes(machine, capturing, arch):
    machine(arch, "cudnn", "cutlass", "cublaslt", "w4a16", "w4a8")
    layer = make(FP4Linear)
    layer(torch.randn(3, K, dtype=torch.bfloat16))
    spec = layer.bind().spec
    fp4dispatch.warmup(layer, [3])
    assert layer.bind().spec is spec  # a compiled graph need not be made anew
    capturing(True)
    layer.bind().launch(3, bias=True)


def test_the_mode_of_a_layer_is_kept(machine):
    machine("10.0", "cudnn", "cutlass")
    layer = make(FP4Linear)
    fp4dispatch.warmup(layer, [1], capture="piecewise", m_min=0)
    fp4dispatch.warmup(layer, [2])
    assert (layer.capture, layer.m_min, chosen(layer)) == ("piecewise", 0, {"cudnn"})
    assert layer.problem(3).capture == "piecewise"
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(layer), torch.load(buffer, weights_only=False)):
        assert (other.capture, other.m_min, chosen(other)) == ("piecewise", 0, {"cudnn"})


def test_wrong_modes_are_refused_before_anything_changes(machine):
    machine("10.0", "cudnn", "cutlass")
    layer = make(FP4Linear)
    for wrong in ({"capture": "some"}, {"m_min": -1}, {"m_min": True}, {"m_min": 0.0}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            fp4dispatch.warmup(layer, [1], **wrong)
    assert (layer.capture, layer.m_min) == ("none", 1)


def test_a_mode_that_nothing_can_run_in_leaves_the_layer_as_it_was(machine, monkeypatch):
    machine("10.0", "cutlass")
    layer = make(FP4Linear)
    bound = layer.bind()
    monkeypatch.setenv("FP4DISPATCH_DISABLE", "reference")
    with pytest.raises(fp4dispatch.NoBackendError):
        layer.choose_for("piecewise", 0)
    assert (layer.capture, layer.m_min) == ("none", 1)
    assert layer.bind() is bound


def test_raw_operators_refuse_to_be_captured_against_the_rules(machine, capturing):
    machine("12.0", "cudnn", "cublaslt", cudnn="9.19.0")
    from fp4dispatch import formats

    a, b = (formats.nvfp4_quantize(torch.randn(64, 64), sf_layout="128x4") for _ in range(2))
    alpha = a.global_scale * b.global_scale

    def run(**kwargs):
        return fp4dispatch.nvfp4_gemm(a.data, b.data, a.sf, b.sf, alpha, **kwargs)

    run()
    run(backend="cublaslt")
    capturing(True)
    with pytest.raises(CaptureError, match="cudnn-nvfp4-sm12x-graphs"):
        run()
    run(backend="cublaslt")
