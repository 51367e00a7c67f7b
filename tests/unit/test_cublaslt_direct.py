"""The cuBLASLt backend without torch's operator: a library in plain torch stands in for ours, on the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fp4dispatch import formats
from fp4dispatch.backends import w4a8_expanded
from fp4dispatch.backends.activations import swiglu
from fp4dispatch.backends.base import QuantizedActivation
from fp4dispatch.backends.libraries import cublaslt, cublaslt_direct, cublaslt_gemms
from fp4dispatch.backends.own import scratch
from fp4dispatch.backends.own import swiglu as front
from fp4dispatch.backends.own.tensors import quantizers
from fp4dispatch.backends.w4a8_expanded import W4A8ExpandedBackend
from fp4dispatch.machine import capture
from fp4dispatch.machine.system import System
from fp4dispatch.problem import Problem
from fp4dispatch.problem.arch import SM90, Arch
from fp4dispatch.run import routes
from tests import contract, pdl_fake, quantizer_fake, swiglu_fake
from tests.flashinfer_interpreter import leaf
from tests.unit.test_cublaslt_run import block128, planned, run, weights

DIRECT = [("row", False), ("row", True), ("tensor", False), ("tensor", True), ("block128", False)]
TENSOR, ROW, BLOCK = range(3)


class Library:
    """``cublaslt_*`` of csrc/cublaslt/cublaslt_gemm.h: refuses what that refuses, remembers plans and launches."""

    def __init__(self):
        self.version, self.workspace, self.refuses = 130000, 0, ()
        self.plans, self.launches = [], []

    def cublaslt_version(self, major):
        return self.version if major == 13 else 0

    def cublaslt_fp8_plan(self, major, device, m, n, k, scales, fp16, biased, pdl):
        assert (major, device, pdl) == (13, 0, True)
        if m in self.refuses:
            raise RuntimeError(f"cuBLASLt: no algorithm for M={m}")
        if scales == BLOCK and m % 4:
            raise RuntimeError(f"M is {m}, needed a multiple of 4")
        self.plans.append((m, n, k, scales, fp16, biased))

        @leaf
        def gemm(x, x_scale, a, a_scale, b, b_scale, bias, d, workspace):
            assert x is None or x.dtype == d.dtype
            if x is None:
                assert x_scale is None
            elif scales == BLOCK:
                assert x_scale is None
                assert m - 4 < x.shape[0] <= m
                self.kernels.fp8_quantize_1x128(x, a[: x.shape[0]], a_scale[: x.shape[0]], pdl)
            elif x_scale is None:
                self.kernels.fp8_quantize_row(x, a, a_scale, pdl)
            else:
                self.kernels.fp8_quantize_tensor(x, a, x_scale, pdl)
            assert a.shape == (m, k)
            assert b.shape == (n, k)
            assert d.shape == (m, n)
            assert d.dtype == (torch.float16 if fp16 else torch.bfloat16)
            assert a.dtype == b.dtype == torch.float8_e4m3fn
            blocks = -(-k // 128)
            if scales == BLOCK:
                assert (a_scale.shape, a_scale.stride()) == ((m, blocks), (1, m))
                assert b_scale.shape == (-(-n // 128), -(-blocks // 4) * 4)
            else:
                assert (a_scale.numel(), b_scale.numel()) == ((m, n) if scales == ROW else (1, 1))
            assert (workspace is None) == (self.workspace == 0)
            if workspace is not None:
                assert workspace.dtype == torch.uint8
                assert workspace.numel() >= self.workspace
            for tensor in (a, b, a_scale.t(), b_scale, d, a if workspace is None else workspace):
                assert tensor.is_contiguous()
            assert (bias is not None) == biased
            self.launches.append((a.data_ptr(), a_scale.data_ptr(), b.data_ptr(), b_scale.data_ptr()))
            self.addresses = a.data_ptr(), a.data_ptr() + a.numel(), 0 if workspace is None else workspace.data_ptr()
            if scales == BLOCK:
                left = formats.fp8_dequantize(a, a_scale.contiguous(), "1x128")
                right = formats.fp8_dequantize(b, b_scale[:, :blocks].contiguous(), "block128")
            else:
                left, right = a.float() * a_scale.reshape(-1, 1), b.float() * b_scale.reshape(-1, 1)
            d.copy_(left @ right.t() + (0 if bias is None else bias.float()))

        return [gemm, self.workspace]


@pytest.fixture
def library(monkeypatch):
    """Our quantisers and a cuBLASLt 13, on a machine that seems to have an H200; torch's operator is not called."""
    made = Library()
    made.kernels = quantizer_fake.install(monkeypatch)
    fp8 = quantizers.load(torch.device("cuda:0"))[0]
    monkeypatch.setattr(quantizers, "load", lambda device: (fp8._replace(library=made), ""))
    monkeypatch.setattr(cublaslt, "_arch_of", lambda tensor: SM90)
    monkeypatch.setattr(cublaslt_gemms, "_block128_gemm", block128)
    monkeypatch.setattr(cublaslt_direct._system, "current", lambda: System.fake("9.0", cuda="13.0"))
    without_nvcc = System.fake("9.0", cuda="13.0", torch="2.11")
    monkeypatch.setattr(w4a8_expanded, "_facts", lambda device: without_nvcc)  # whose copy cublaslt then multiplies
    return made


@pytest.fixture
def no_operator(library, monkeypatch):
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, **options: pytest.fail("torch's operator"))
    monkeypatch.setattr(cublaslt_gemms, "_block128_gemm", lambda *args: pytest.fail("torch's operator"))
    return library


def forward(subject, x, bias=None):
    """Run as a layer does: the output has the rows that the backend asks for."""
    backend, plan, prepared = subject
    return routes.launch_into_new(backend, plan, prepared, x, plan.problem.n, bias)


@pytest.mark.parametrize("backend", [cublaslt.CublasLtBackend(), W4A8ExpandedBackend()], ids=lambda b: b.name)
def test_the_contract_holds(backend, library):
    cases = [case for case in contract.cases(backend) if backend.name != "cublaslt" or case.scaling != "nvfp4"]
    for case in cases:
        contract.check(backend, case)
    assert library.launches


@pytest.mark.parametrize(("scaling", "static"), DIRECT)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("biased", [False, True])
def test_what_fits_is_multiplied_without_the_operator(scaling, static, dtype, biased, no_operator):
    if scaling == "block128" and (biased or dtype == "float16"):
        pytest.skip("rounded after the GEMM")
    w = weights(scaling, static)
    subject = planned(w, 4, dtype, biased)
    assert subject[1].note == ""
    bias = torch.randn(128).to(getattr(torch, dtype)) if biased else None
    entering = "1x128" if scaling == "block128" else "tensor" if static else "row"
    for m in (4, 7, 64, 4):
        x = torch.randn(m, 256).to(getattr(torch, dtype))
        got = forward(subject, x, bias)
        assert got.shape == (m, 128)
        q = formats.fp8_quantize(x, entering, w.input_scale)
        left = formats.fp8_dequantize(q.data, q.scale, entering)
        exact = left @ formats.fp8_dequantize(w.weight, w.scale, scaling).t() + (0 if bias is None else bias.float())
        torch.testing.assert_close(got.float(), exact, rtol=0.01, atol=0.01)
    scales = BLOCK if scaling == "block128" else TENSOR if scaling == "tensor" and static else ROW
    plan, seven = (128, 256, scales, dtype == "float16", biased), 8 if scales == BLOCK else 7
    assert no_operator.plans == [(4, *plan), (4, *plan), (seven, *plan), (64, *plan)], "one to try, then one for each M"


@pytest.mark.parametrize(("scaling", "static"), DIRECT)
def test_a_second_call_makes_nothing(scaling, static, no_operator, monkeypatch):
    backend, plan, prepared = planned(weights(scaling, static))
    x, out = torch.randn(4, 256).bfloat16(), torch.empty(4, 128, dtype=torch.bfloat16)
    backend.run(plan, prepared, x, out)
    plans = len(no_operator.plans)
    with monkeypatch.context() as patch:
        for made in ("empty", "zeros", "ones"):
            patch.setattr(torch, made, lambda *args, **kw: pytest.fail("memory was taken"))
        backend.run(plan, prepared, x, out)
    assert len(no_operator.plans) == plans
    assert no_operator.launches[0] == no_operator.launches[1]
    assert no_operator.launches[0][2] == prepared.tensors[0].data_ptr()


@pytest.mark.parametrize("workspace", [0, 4096, scratch.ARENA_BYTES])
@pytest.mark.parametrize("m", [4, 8192])
@pytest.mark.parametrize("capturing", [False, True])
def test_a_workspace_is_as_large_as_the_algorithm_wants_and_no_operand(
    workspace, m, capturing, no_operator, monkeypatch
):
    no_operator.workspace = workspace
    subject = planned(weights("row"))
    run(subject, torch.randn(4, 256).bfloat16())
    monkeypatch.setattr(capture, "stream_is_capturing", lambda: capturing)
    for _ in range(2):
        run(subject, torch.randn(m, 256).bfloat16())
        start, end, found = no_operator.addresses
        assert workspace == 0 or found + workspace <= start or found >= end


def test_so_many_m_are_remembered_and_no_more(no_operator, monkeypatch):
    monkeypatch.setattr(cublaslt_direct, "_MOST", 2)
    subject = planned(weights("row"))
    no_operator.plans.clear()
    for m in (1, 2, 3, 3, 1, 2):
        run(subject, torch.randn(m, 256).bfloat16())
    assert [plan[0] for plan in no_operator.plans] == [1, 2, 3, 3]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 0}, "CUDA 13 is not loaded as a library of its own, needed 120900"),
        ({"version": 120804}, "is 120804, needed 120900"),
        ({"refuses": (1,)}, "no algorithm for M=1"),
    ],
)
def test_where_cublaslt_cannot_be_called_torchs_operator_runs_and_the_plan_says_so(change, says, library, monkeypatch):
    for name, value in change.items():
        setattr(library, name, value)
    subject = planned(weights("row"))
    assert says in subject[1].note
    calls, real = [], torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, **options: calls.append(1) or real(*args, **options))
    run(subject, torch.randn(4, 256).bfloat16())
    assert len(calls) == 1
    assert not library.launches


def test_block_scales_are_tried_with_an_m_that_is_taken(no_operator):
    assert planned(weights("block128"), 7)[1].note == ""
    assert no_operator.plans == [(8, 128, 256, BLOCK, False, False)]


def test_an_output_without_rows_for_the_padding_goes_through_the_operator(library, monkeypatch):
    subject, x = planned(weights("block128"), 7), torch.randn(7, 256).bfloat16()
    want = forward(subject, x)
    assert len(library.launches) == 1
    calls = []
    monkeypatch.setattr(cublaslt_gemms, "_block128_gemm", lambda *args: (calls.append(1), block128(*args)))
    assert torch.equal(run(subject, x), want)
    assert (len(calls), len(library.launches)) == (1, 1)


@pytest.mark.parametrize("workspace", [0, 4096, scratch.ARENA_BYTES])
def test_a_workspace_beside_block_scales_is_its_own(workspace, no_operator):
    no_operator.workspace = workspace
    subject = planned(weights("block128"))
    for m in (7, 8, 4097):
        forward(subject, torch.randn(m, 256).bfloat16())
        start, end, found = no_operator.addresses
        assert workspace == 0 or found + workspace <= start or found >= end


def test_an_unknown_cuda_is_said_too(library, monkeypatch):
    monkeypatch.setattr(cublaslt_direct._system, "current", lambda: System.fake("9.0", cuda=None))
    assert "CUDA unknown is not loaded" in planned(weights("row"))[1].note


def test_what_does_not_fit_and_what_is_not_hopper_stays_with_the_operator(library, monkeypatch):
    calls, real = [], torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, **options: calls.append(1) or real(*args, **options))
    subject = planned(weights("row"))
    x = torch.randn(4, 256).bfloat16()
    run(subject, QuantizedActivation(*formats.fp8_quantize(x, "row")))
    run(subject, x, torch.randn(128).bfloat16())  # the plan is for none
    run(planned(weights("row"), dtype="float32"), x.float())
    run(planned(weights("row", n=120)), x)
    assert len(calls) == 4
    for arch in (None, Arch(10, 0)):
        monkeypatch.setattr(cublaslt, "_arch_of", lambda tensor, arch=arch: arch)
        found = planned(weights("row"))
        run(found, x)
        assert found[1].note == ""
    assert len(calls) == 6
    assert not library.launches


# -------------------------------------------------------------------------------------------------------------- SwiGLU

FRONTS = {
    ("row", False): "fp8_swiglu_row",
    ("row", True): "fp8_swiglu_tensor",
    ("tensor", False): "fp8_swiglu_row",
    ("tensor", True): "fp8_swiglu_tensor",
    ("block128", False): "fp8_swiglu_1x128",
}


@pytest.fixture
def fronts(monkeypatch):
    """What was launched of the SwiGLU kernel, in torch."""
    launched = []
    kernel = SimpleNamespace(module=swiglu_fake.module(launched), pdl_allowed=True)
    pdl_fake.passes(monkeypatch)
    monkeypatch.setattr(front.jit, "load", lambda name, variant, arch: kernel)
    monkeypatch.setattr(front, "_known", {})
    return launched


def from_gate_up(subject, x, bias=None):
    """Run as a layer does."""
    backend, plan, prepared = subject
    rows = backend.out_rows(plan, x.shape[0])
    return routes.Gated(backend.swiglu(plan, prepared), rows).into_new(x, plan.problem.n, bias)


@pytest.mark.parametrize(("scaling", "static"), DIRECT)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("operator", [False, True])
def test_swiglu_takes_the_place_of_the_quantiser(scaling, static, dtype, biased, operator, library, fronts):
    if scaling == "block128" and (biased or dtype == torch.float16):
        pytest.skip("rounded after the GEMM")
    library.version = 0 if operator else 130000
    subject = planned(weights(scaling, static), 4, str(dtype).removeprefix("torch."), biased)
    bias = torch.randn(128).to(dtype) if biased else None
    for m in (4, 7, 64, 4):
        x = torch.randn(m, 512).to(dtype)
        want = forward(subject, swiglu(x), bias)
        library.launches.clear()
        library.kernels.calls.clear()
        fronts.clear()
        got = from_gate_up(subject, x, bias)
        assert got.shape == (m, 128)
        assert torch.equal(got, want)
        assert fronts == [(FRONTS[scaling, static], m, 512)]
        assert library.kernels.calls == []
        assert len(library.launches) == (0 if operator else 1)


@pytest.mark.parametrize(
    "change", ["strided", "misaligned", "another bias", "a bias without a plan", "no rows for the padding"]
)
@pytest.mark.parametrize("scaling", ["row", "block128"])
def test_what_does_not_fit_runs_as_separate_operations(change, scaling, library, fronts):
    subject, bias = planned(weights(scaling), 4), None
    backend, plan, prepared = subject
    wide = torch.randn(7, 520).bfloat16()
    x, rows = wide[:, :512].contiguous(), backend.out_rows(plan, 7)
    if change == "strided":
        x = wide[:, :512]
    elif change == "misaligned":
        x = torch.randn(7 * 512 + 1).bfloat16()[1:].view(7, 512)
    elif change == "another bias":
        if scaling == "row":
            subject = backend, plan, prepared = planned(weights(scaling), 4, bias=True)
        bias = torch.randn(128)
    elif change == "a bias without a plan":
        bias = torch.randn(128).bfloat16()
    elif scaling == "row":
        pytest.skip("asks for none")
    else:
        rows = 7
    launch, out = backend.swiglu(plan, prepared), torch.full((rows, 128), torch.nan, dtype=torch.bfloat16)
    launch(x, out, bias)
    assert fronts == []
    assert torch.equal(out[:7], run(subject, swiglu(x), bias))


@pytest.mark.parametrize(
    ("given", "options", "arch"),
    [
        (weights("row", n=120), {}, SM90),
        (weights("row", k=200), {}, SM90),
        (weights("block128"), {"dtype": "float16"}, SM90),
        (weights("block128"), {"bias": True}, SM90),
        (weights("row"), {"dtype": "float32"}, SM90),
        (weights("nvfp4", static=True), {}, Arch(10, 0)),
        (weights("row"), {}, Arch(7, 5)),
        (weights("row"), {}, None),
    ],
)
def test_where_it_cannot_run_there_is_no_launch_from_gate_up(given, options, arch, library, fronts, monkeypatch):
    monkeypatch.setattr(cublaslt, "_arch_of", lambda tensor: arch)
    backend, plan, prepared = planned(given, 4, **options)
    assert backend.swiglu(plan, prepared) is None
    assert not front._known


@pytest.mark.parametrize("arch", [Arch(8, 9), Arch(10, 0), Arch(12, 0)])
@pytest.mark.parametrize("static", [False, True])
def test_on_other_gpus_the_operator_multiplies_behind_it(arch, static, library, fronts, monkeypatch):
    monkeypatch.setattr(cublaslt, "_arch_of", lambda tensor: arch)
    subject, x = planned(weights("row", static), 4), torch.randn(7, 512).bfloat16()
    assert torch.equal(from_gate_up(subject, x), forward(subject, swiglu(x)))
    assert fronts == [(FRONTS["row", static], 7, 512)]
    assert not library.launches


def test_a_kernel_with_other_bits_is_not_used(library, fronts, monkeypatch):
    other = SimpleNamespace(module=swiglu_fake.module(fronts, lambda gate: gate.sigmoid()), pdl_allowed=True)
    monkeypatch.setattr(front.jit, "load", lambda name, variant, arch: other)
    backend, plan, prepared = planned(weights("row"), 4)
    assert backend.swiglu(plan, prepared) is None


def test_fp8_copies_start_from_gate_up_too(library, fronts):
    backend = W4A8ExpandedBackend()
    case = contract.Case("nvfp4_gemm", "nvfp4", "fp8", 1, 128, 256, "bfloat16", False)
    prepared = backend.prepare(contract.make_weights(case, "cpu", 1))
    subject = backend, backend.plan(Problem("nvfp4_gemm", 4096, 128, 256, "fp8"), prepared), prepared
    x = torch.randn(300, 512).bfloat16()
    assert torch.equal(from_gate_up(subject, x), forward(subject, swiglu(x)))
    assert fronts == [("fp8_swiglu_row", 300, 512)]
