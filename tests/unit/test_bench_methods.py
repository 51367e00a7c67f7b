"""Peers and ours: who is compared with whom, and what each adapter hands to what it measures."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from fp4dispatch import formats
from fp4dispatch.benchmark.check import worst_tile
from fp4dispatch.benchmark.methods import base as methods
from fp4dispatch.benchmark.methods import ours, peers
from fp4dispatch.benchmark.methods.base import BASELINE, Card, choose, rivals
from fp4dispatch.benchmark.methods.roster import everything
from fp4dispatch.benchmark.problems.operands import Operands, Truth
from fp4dispatch.dispatch import choose as policy
from fp4dispatch.errors import InputError
from fp4dispatch.problem.arch import Arch
from tests import humming_fake
from tests.bench_cases import CPU, HOPPER_ON_PAPER

NAMES = [method.name for method in everything()]


def test_everything_that_the_contract_names_is_there():
    assert NAMES[0] == BASELINE
    assert {"torch/tensor", "torch/row", "torch/tensor+q", "torch/row+q"} < set(NAMES)
    assert {"flashinfer/block128+q", "humming/nvfp4"} < set(NAMES)
    assert {"FP4Linear", "FP4Linear/bf16", "FP4Linear/fp8", "FP8Linear/row", "fp8_gemm/row"} < set(NAMES)
    assert len(set(NAMES)) == len(NAMES)
    assert all(method.what for method in everything())


def test_methods_are_chosen_by_pattern_and_the_baseline_always():
    assert [m.name for m in choose(everything(), ["FP4*"])] == [
        BASELINE,
        "FP4Linear",
        "FP4Linear/bf16",
        "FP4Linear/fp8",
        "FP4Linear/w4a8_expanded",
    ]
    assert [m.name for m in choose(everything(), ["torch/row", BASELINE])] == [BASELINE, "torch/row"]
    with pytest.raises(InputError, match=r"matches no method\. Did you mean FP4Linear"):
        choose(everything(), ["FP4Liner"])


def test_only_sums_that_nobody_promotes_are_allowed_more():
    assert methods.tolerance("row", "row", 28672) == methods.tolerance("nvfp4", "bf16", 28672) == methods.ROUNDING
    assert methods.tolerance("nvfp4", "row", 128) == pytest.approx(methods.ROUNDING, rel=0.03)
    assert 0.010 < methods.tolerance("nvfp4", "row", 28672) < 0.015  # the format itself loses 0.034
    assert methods.tolerance("nvfp4", "nvfp4", 4096) == 2e-2


def test_rivals_take_the_same_activation():
    found = {method.name: rivals(method, everything()) for method in everything() if method.ours}
    assert found["FP4Linear"] == (BASELINE, "humming/nvfp4")
    assert found["FP8Linear/row"] == (BASELINE, "torch/row+q")
    assert found["FP8Linear/block128"] == (BASELINE, "flashinfer/block128+q")
    assert found["fp8_gemm/tensor"] == ("torch/tensor",)  # the quantisation is in neither time


def test_what_a_method_lacks_is_said():
    lacks = {method.name: method.lacks(CPU) for method in everything()}
    assert [name for name, why in lacks.items() if not why] == [
        BASELINE,
        *(n for n in NAMES if n.startswith(("FP", "fp8")) and n != "FP4Linear/w4a8_expanded"),
    ]
    assert "no GPU" in lacks["torch/row"]
    ada = Card(torch.device("cpu"), "an L4", Arch(8, 9), 48e6, 24e9)
    ampere = Card(torch.device("cpu"), "an A100", Arch(8, 0), 40e6, 80e9)
    by_name = {method.name: method for method in everything()}
    assert by_name["torch/row"].lacks(ada) == ""
    assert "found sm_80" in by_name["torch/row"].lacks(ampere)
    assert "needs sm_90, found sm_89" in by_name["flashinfer/block128+q"].lacks(ada)


@pytest.mark.parametrize(
    ("package", "method"), [("flashinfer", peers.FlashInferBlock()), ("humming", peers.HummingNvfp4())]
)
def test_a_package_that_is_not_installed_is_named(package, method, monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert "is not installed" in method.lacks(HOPPER_ON_PAPER)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: object() if name == package else None)
    assert method.lacks(HOPPER_ON_PAPER) == ""


# ----------------------------------------------------------------------------------------------------------- adapters


@pytest.fixture
def problem():
    operands = Operands(256, 384, torch.device("cpu"))
    return operands, Truth(operands, 37)


def off(method, problem, card=HOPPER_ON_PAPER, copies=3):
    """Return the worst tile of each copy, from poisoned outputs."""
    operands, truth = problem
    launch = method.prepare(operands, copies, card)(truth.x)
    errors = []
    for i in range(copies):
        if launch.out is not None:
            launch.out.fill_(torch.nan)
        got = launch.call(i)
        assert got.dtype == torch.bfloat16
        errors.append(worst_tile(got, truth.want(method.format, launch.entering)).error)
    return max(errors)


@pytest.mark.parametrize("method", [m for m in everything() if not m.lacks(CPU)], ids=lambda m: m.name)
def test_what_runs_on_a_cpu_is_right(method, problem):
    assert off(method, problem, CPU) < methods.ROUNDING


def scaled_mm(a, b, scale_a, scale_b, *, out_dtype, out):
    """torch._scaled_mm in float64, with the operands' layout checked as the real one does."""
    assert a.is_contiguous()
    assert b.t().is_contiguous()
    if scale_a.ndim:
        assert (scale_a.shape, scale_b.shape) == ((a.shape[0], 1), (1, b.shape[1]))
    out.copy_((a.double() * scale_a.double()) @ (b.double() * scale_b.double()))
    assert out.dtype == out_dtype


class Quantiser:
    """Our quantiser's functions, in torch; ``lazy`` writes nothing."""

    def __init__(self, lazy=False):
        self.lazy, self.calls = lazy, []

    def fp8_quantize_row(self, x, q, scale, pdl):
        self.calls.append(("row", pdl))
        if not self.lazy:
            made = formats.fp8_quantize(x, "row")
            q.copy_(made.data)
            scale.copy_(made.scale)

    def fp8_quantize_tensor(self, x, q, scale, pdl):
        assert scale.shape == (1,)
        self.calls.append(("tensor", pdl))
        if not self.lazy:
            q.copy_(formats.fp8_quantize(x, "tensor", scale.reshape(())).data)


@pytest.mark.parametrize("fmt", ["tensor", "row"])
@pytest.mark.parametrize("quantise", [False, True])
def test_scaled_mm(fmt, quantise, problem, monkeypatch):
    kernels = Quantiser()
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(peers.jit, "load", lambda *a: types.SimpleNamespace(module=kernels))
    method = peers.ScaledMm(fmt, quantise)
    assert method.takes == ("bf16" if quantise else "fp8")
    assert off(method, problem) < methods.ROUNDING
    assert kernels.calls == [(fmt, False)] * (3 if quantise else 0)


@pytest.mark.parametrize("fmt", ["tensor", "row"])
def test_a_quantiser_that_writes_nothing_is_seen(fmt, problem, monkeypatch):
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(peers.jit, "load", lambda *a: types.SimpleNamespace(module=Quantiser(lazy=True)))
    assert off(peers.ScaledMm(fmt, True), problem) > 1


def test_flashinfer(problem, monkeypatch):
    def gemm(x, w, input_scale, weight_scale, out):
        assert x.dtype == torch.bfloat16
        assert input_scale is None
        assert weight_scale.shape == (2, 3)
        a = formats.fp8_dequantize(*formats.fp8_quantize(x, "1x128"), "1x128")
        out.copy_(a @ formats.fp8_dequantize(w, weight_scale, "block128").t())

    fake = types.ModuleType("flashinfer.gemm")
    fake.fp8_blockscale_gemm_sm90 = gemm
    monkeypatch.setitem(sys.modules, "flashinfer.gemm", fake)
    assert off(peers.FlashInferBlock(), problem) < methods.ROUNDING


@pytest.fixture
def humming(monkeypatch):
    modules = humming_fake.modules()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(humming_fake.HummingLayer, "chosen", [])
    return modules


@pytest.mark.filterwarnings("error")  # the layer is the one whose kernels are compiled ahead
def test_humming(problem, humming):
    chosen = humming_fake.HummingLayer.chosen
    assert off(peers.HummingNvfp4(), problem) < methods.ROUNDING
    assert chosen == [{"block": 16}] * 3  # 37 tokens: the kernel that it would take, and no other compiled
    operands, _ = problem
    ready = peers.HummingNvfp4().prepare(operands, 1, HOPPER_ON_PAPER)
    for m in (1, 2, 38, 4096):
        ready(operands.activation(m)).call(0)
    assert [each["block"] for each in chosen[3:]] == [8, 16, 64, 64]


def test_humming_without_a_kernel_for_the_tokens(problem, humming, monkeypatch):
    monkeypatch.setattr(humming["humming.tune"], "get_heuristics_config", lambda config, device: [[0, 8, {}]])
    with pytest.raises(ValueError, match="no kernel for M=37"):
        off(peers.HummingNvfp4(), problem)


@pytest.mark.parametrize("changed", [lambda n, k, *_, **__: humming_fake.LayerConfig(n, k + 64), None])
def test_a_humming_whose_kernels_are_others_than_those_compiled_ahead_is_measured_and_said(
    problem, humming, monkeypatch, changed
):
    monkeypatch.setattr(humming["humming.transform"], "prepare_layer_config", changed)
    with pytest.warns(RuntimeWarning, match="kernels compiled ahead are others"):
        assert off(peers.HummingNvfp4(), problem) < methods.ROUNDING
    assert humming_fake.HummingLayer.chosen == [{"block": 16}] * 3, "by the table of the layer itself"


def test_a_backend_by_name_runs_at_any_number_of_tokens_or_says_what_it_lacks():
    """The FP8 copy of NVFP4 weights: auto takes it only where memory was promised, so it is named."""
    by_name = {method.name: method for method in everything()}
    layer = by_name["FP4Linear/w4a8_expanded"]
    made = layer.layer(Operands(64, 64, torch.device("cpu")))
    assert (made.backend, made.activation, layer.ours, layer.takes) == ("w4a8_expanded", "any", True, "bf16")
    assert layer.lacks(CPU) == "needs a CUDA GPU"
    assert "GPU" in layer.lacks(HOPPER_ON_PAPER)  # of the machine that the test runs on: no layer is made in vain
    assert by_name["FP4Linear"].backend is None
    assert by_name["FP4Linear"].lacks(HOPPER_ON_PAPER) == ""


def test_rows_are_of_the_weights_that_a_method_reads():
    by_name = {method.name: method for method in everything()}
    assert by_name["FP4Linear/w4a8_expanded"].held == "row"  # 8 bits a weight, though 4.5 are stored
    assert all(method.held == method.format for name, method in by_name.items() if "expanded" not in name)


def test_rotating_copies_do_not_share_memory(problem):
    operands, truth = problem
    for method in (ours.Layer("nvfp4", None), ours.Layer("row", None), ours.RawFp8("row"), peers.Bf16()):
        launch = method.prepare(operands, 2, CPU)(truth.x)
        stores = [set(), set()]
        for i in range(2):
            for cell in launch.call.__closure__:
                if isinstance(cell.cell_contents, list):
                    held = cell.cell_contents[i]
                    stores[i] |= {t.data_ptr() for t in (held if isinstance(held, tuple) else [held])}
        assert stores[0]
        assert not stores[0] & stores[1], method.name


def test_the_raw_operator_says_what_ran_it(problem, monkeypatch):
    """The policy is asked as the operator asks: its activations are quantised already."""
    operands, truth = problem
    asked, select = [], policy.select
    monkeypatch.setattr(policy, "select", lambda problem, **at: asked.append(problem) or select(problem, **at))
    launch = ours.RawFp8("row").prepare(operands, 1, CPU)(truth.x)
    launch.call(0)
    named, ran = asked
    assert named == ran
    assert named.raw


def test_a_layer_says_what_ran_it(problem):
    operands, truth = problem
    assert ours.Layer("nvfp4", None).prepare(operands, 2, CPU)(truth.x).backend == "reference (bf16)"
    launch = ours.Layer("nvfp4", "fp8").prepare(operands, 2, CPU)(truth.x)
    assert (launch.backend, launch.entering) == ("reference (fp8)", "row")
    assert ours.Layer("nvfp4", "fp8").name == "FP4Linear/fp8"
    named = ours.Layer("nvfp4", None, "reference")
    assert (named.name, named.what) == (
        "FP4Linear/reference",
        "FP4Linear, backend='reference' for any number of tokens",
    )
    assert named.prepare(operands, 2, CPU)(truth.x).backend == "reference (bf16)"
    assert ours._entering("block128", "fp8") == "1x128"
    assert ours._entering("nvfp4", "nvfp4") == "nvfp4"
