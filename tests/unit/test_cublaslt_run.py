"""What the cuBLASLt backend launches for activations: quantisers in plain torch stand in for ours, on the CPU."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from fp4dispatch import formats
from fp4dispatch.backends.base import LinearWeights, QuantizedActivation
from fp4dispatch.backends.libraries import cublaslt, cublaslt_gemms
from fp4dispatch.backends.own import scratch
from fp4dispatch.backends.own.tensors import quantizers
from fp4dispatch.errors import CaptureError, CompileError, FlagsError, ToolchainError
from fp4dispatch.machine import log
from fp4dispatch.machine.system import System
from fp4dispatch.problem import Problem
from fp4dispatch.problem.arch import SM90
from fp4dispatch.run import routes
from tests import contract, pdl_fake, quantizer_fake

KINDS = [("tensor", False), ("tensor", True), ("row", False), ("row", True), ("block128", False)]
ALL = [*KINDS, ("nvfp4", False), ("nvfp4", True)]
CUDA = torch.device("cuda:0")


def block128(a, a_scale, w, w_scale, bias, d):
    """Multiply as torch's block-scaled kernel does, with what it asks of scales."""
    m, blocks = a.shape[0], -(-a.shape[1] // 128)
    assert a_scale.shape == (m, blocks)
    assert a_scale.stride(0) == 1
    assert blocks == 1 or a_scale.stride(1) == m
    assert m % 4 == 0
    left = formats.fp8_dequantize(a, a_scale.contiguous(), "1x128")
    right = formats.fp8_dequantize(w, w_scale[:, :blocks].contiguous(), "block128")
    d.copy_(left @ right.t() + (0 if bias is None else bias.float()))


def nvfp4(a, a_sf, a_global, w, w_sf, w_global, bias, d):
    """Multiply as torch's NVFP4 GEMM does, with what it asks of operands; a NaN among padding scales is felt."""
    (m, half), n = a.shape, w.shape[0]
    columns = half // 8
    for rows, sf in ((m, a_sf), (n, w_sf)):
        assert sf.numel() == formats.round_up(rows, 128) * formats.round_up(columns, 4)
        assert sf.is_contiguous()
        with _disable_current_modes():
            assert bool(sf.float().isfinite().all())
    assert a_global.shape == w_global.shape == ()
    assert half % 16 == n % 16 == 0
    left = formats.nvfp4_dequantize(a, a_sf, a_global, sf_layout="128x4")
    right = formats.nvfp4_dequantize(w, w_sf, w_global, sf_layout="128x4")
    d.copy_(left @ right.t() + (0 if bias is None else bias.float()))


@pytest.fixture
def kernels(monkeypatch):
    """Our kernels and the block-scaled GEMMs in torch, on a machine that seems to have an H200."""
    monkeypatch.setattr(cublaslt_gemms, "_block128_gemm", block128)
    monkeypatch.setattr(cublaslt_gemms, "_nvfp4_gemm", nvfp4)
    monkeypatch.setattr(cublaslt, "_arch_of", lambda tensor: SM90)
    return quantizer_fake.install(monkeypatch)


@pytest.fixture
def gemms(monkeypatch):
    """The scales of A and B of each call of torch's FP8 GEMM."""
    calls, real = [], torch._scaled_mm

    def spy(a, b, a_scale, b_scale, *rest, **options):
        calls.append((a_scale, b_scale))
        return real(a, b, a_scale, b_scale, *rest, **options)

    monkeypatch.setattr(torch, "_scaled_mm", spy)
    return calls


def weights(scaling, static=False, n=128, k=256):
    torch.manual_seed(n + k)
    if scaling == "nvfp4":
        case = contract.Case("nvfp4_gemm", "nvfp4", "nvfp4", 1, n, k, "bfloat16", False, static=static)
        return contract.make_weights(case, "cpu", 1)
    q = formats.fp8_quantize(torch.randn(n, k), scaling)
    scale = torch.tensor(0.03) if static else None
    return LinearWeights("fp8_gemm", scaling, n, k, q.data, q.scale, input_scale=scale)


def planned(w, m=1, dtype="bfloat16", bias=False):
    backend = cublaslt.CublasLtBackend()
    prepared = backend.prepare(w)
    activation = "nvfp4" if w.op == "nvfp4_gemm" else "fp8"
    plan = backend.plan(Problem(w.op, m, w.n, w.k, activation, w.scaling, dtype, bias), prepared)
    return backend, plan, prepared


def run(subject, x, bias=None):
    backend, plan, prepared = subject
    rows = x if isinstance(x, torch.Tensor) else x.data
    dtype = x.dtype if isinstance(x, torch.Tensor) else torch.bfloat16
    out = torch.full((rows.shape[0], plan.problem.n), torch.nan, dtype=dtype)
    backend.run(plan, prepared, x, out, bias)
    return out


@pytest.mark.parametrize("case", contract.cases(cublaslt.CublasLtBackend()), ids=str)
def test_the_contract_holds_with_our_quantisers(case, kernels):
    contract.check(cublaslt.CublasLtBackend(), case)
    assert len(kernels.calls) == (0 if case.raw else 2)


@pytest.mark.parametrize(("dtype", "row_wise"), [("bfloat16", True), ("float16", False)])
def test_away_from_hopper_scales_per_row_are_for_bfloat16_alone(dtype, row_wise, kernels, gemms, monkeypatch):
    monkeypatch.setattr(cublaslt, "_arch_of", lambda tensor: None)
    for static in (False, True):
        contract.check(
            cublaslt.CublasLtBackend(),
            contract.Case("fp8_gemm", "row", "fp8", 7, 128, 256, dtype, False, static=static),
        )
    assert {a.numel() for a, _ in gemms} == {7 if row_wise else 1}
    assert len(kernels.calls) == 4


@pytest.mark.parametrize(("cuda", "rows"), [("12.8", 1), ("12.9", 7), ("13.0", 7)])
def test_before_cuda_12_9_scales_per_row_are_for_bfloat16_alone_on_hopper_too(cuda, rows, kernels, gemms, monkeypatch):
    monkeypatch.setattr(cublaslt._system, "current", lambda: System.fake("9.0", cuda=cuda))
    for dtype, wanted in (("float16", rows), ("bfloat16", 7)):
        gemms.clear()
        contract.check(cublaslt.CublasLtBackend(), contract.Case("fp8_gemm", "row", "fp8", 7, 128, 256, dtype, False))
        assert {a.numel() for a, _ in gemms} == {wanted}


@pytest.mark.parametrize(("scaling", "static"), ALL)
@pytest.mark.parametrize("shape", [(128, 256), (200, 144)])
def test_the_bits_are_those_of_torchs_operations(scaling, static, shape, kernels, monkeypatch):
    """Any M, ragged sizes, addresses and strides that the kernels refuse."""
    subject = planned(weights(scaling, static, *shape))
    with monkeypatch.context() as patch:
        quantizer_fake.without(patch)
        plain = planned(weights(scaling, static, *shape))
    for m in (1, 3, 4, 17, 128):
        wide = torch.randn(m, 2 * shape[1] + 1).bfloat16()
        for x in (wide[:, : shape[1]].contiguous(), wide[:, 1 : shape[1] + 1], wide[:, :-1:2], wide[:, 1::2]):
            before = len(kernels.calls)
            assert torch.equal(run(subject, x), run(plain, x))
            assert len(kernels.calls) == before + 1


@pytest.mark.parametrize(("scaling", "static"), ALL)
def test_operands_that_fit_go_straight_to_two_launches(scaling, static, kernels, gemms, monkeypatch):
    backend, plan, prepared = planned(weights(scaling, static))
    kernel = {"block128": "1x128", "nvfp4": "nvfp4"}.get(scaling, "tensor" if static else "row")
    for m in (4, 64):
        x, out = torch.randn(m, 256).bfloat16(), torch.empty(m, 128, dtype=torch.bfloat16)
        backend.run(plan, prepared, x, out)
        kernels.calls.clear()
        with monkeypatch.context() as patch:
            for slow in ("quantized", "quantized_nvfp4", "zero_pad"):
                patch.setattr(cublaslt_gemms, slow, lambda *args: pytest.fail("the long way"))
            patch.setattr(cublaslt, "zero_pad", lambda *args: pytest.fail("the long way"))
            for made in ("empty", "zeros", "ones"):
                patch.setattr(torch, made, lambda *args, **kw: pytest.fail("memory was taken"))
            backend.run(plan, prepared, x, out)
            backend.run(plan, prepared, x, out)
        first, second = kernels.calls
        assert first == second  # the addresses too
        assert (first[0], first[3]) == (kernel, True)


def test_one_scale_for_each_operand_is_the_tensor_wise_gemm(kernels, gemms):
    """Also where the weight's is expanded, for the tokens' own scales."""
    w = weights("tensor")
    x = torch.randn(7, 256).bfloat16()
    run(planned(weights("tensor", static=True)), x)
    raw = run(planned(w), QuantizedActivation(*formats.fp8_quantize(x, "tensor")))
    assert [(a.numel(), b.numel()) for a, b in gemms] == [(1, 1), (1, 1)]
    q = formats.fp8_quantize(x, "tensor")
    exact = formats.fp8_dequantize(q.data, q.scale, "tensor") @ formats.fp8_dequantize(w.weight, w.scale, "tensor").t()
    assert (raw.float() - exact).norm() < 0.004 * exact.norm()
    gemms.clear()
    run(planned(w), x)
    assert [(a.numel(), b.numel()) for a, b in gemms] == [(7, 128)]


def test_a_static_scale_beside_scales_per_row_is_multiplied_once(kernels, gemms):
    w = weights("row", static=True)
    subject = planned(w)
    for m in (5, 9):
        run(subject, torch.randn(m, 256).bfloat16())
    for m, (a, b) in zip((5, 9), gemms, strict=True):
        assert a.shape == (m, 1)
        assert (a == 1).all()
        assert a.data_ptr() == subject[1].state.ones.data_ptr()
        assert b.data_ptr() == subject[2].tensors[2].data_ptr()
        assert torch.equal(b.view(-1), w.scale * w.input_scale)
    x = torch.randn(40_000, 16).bfloat16()
    wide = planned(weights("row", static=True, n=16, k=16))
    assert torch.equal(run(wide, x)[-5:], run(wide, x[-5:].contiguous()))


@pytest.mark.parametrize(("scaling", "static"), ALL)
@pytest.mark.parametrize("m", [7, 8])
def test_what_a_layer_calls_is_run(kernels, scaling, static, m):
    subject, x = planned(weights(scaling, static), m), torch.randn(m, 256).bfloat16()
    out = torch.full((m, 128), torch.nan, dtype=torch.bfloat16)
    backend, plan, prepared = subject
    backend.ready(plan, prepared)(x, out, None)
    assert torch.equal(out, run(subject, x))


@pytest.mark.parametrize(("scaling", "static"), ALL)
def test_only_block_scales_ask_for_more_rows(kernels, scaling, static):
    backend, plan, _ = planned(weights(scaling, static))
    assert [backend.out_rows(plan, m) for m in (1, 4, 6)] == ([4, 4, 8] if scaling == "block128" else [1, 4, 6])


@pytest.mark.parametrize("options", [{"bias": True}, {"dtype": "float16"}, {"dtype": "float32"}])
def test_what_is_rounded_after_the_gemm_asks_for_no_rows(kernels, options):
    backend, plan, _ = planned(weights("block128"), **options)
    assert backend.out_rows(plan, 6) == 6
    padded = planned(weights("block128", n=120))
    assert padded[0].out_rows(padded[1], 6) == 6


def test_an_output_with_rows_for_the_padding_is_written_in_place(kernels, monkeypatch):
    (backend, plan, prepared), x = planned(weights("block128"), 6), torch.randn(6, 256).bfloat16()
    want, into = run((backend, plan, prepared), x), []
    monkeypatch.setattr(cublaslt_gemms, "_block128_gemm", lambda *args: (into.append(args[-1]), block128(*args)))
    whole = torch.full((8, 128), torch.nan, dtype=torch.bfloat16)
    backend.run(plan, prepared, x, whole)
    assert torch.equal(whole[:6], want)
    assert into == [whole]
    # a bias that is added after the GEMM: the output is copied, and its other rows stay
    bias = torch.randn(128)
    want_biased = run((backend, plan, prepared), x, bias)
    backend.run(plan, prepared, x, whole.fill_(torch.nan), bias)
    assert torch.equal(whole[:6], want_biased)
    assert whole[6:].isnan().all()
    # what does not fit as it is: an activation that starts off 16 bytes, one in float32
    odd = torch.zeros(6 * 256 + 1).bfloat16()[1:].view(6, 256).copy_(x)
    assert odd.data_ptr() % 16
    for other in (odd, x.float()):
        backend.run(plan, prepared, other, whole.fill_(torch.nan))
        assert torch.equal(whole[:6], want)
        assert into[-1] is whole


def test_a_new_output_keeps_its_rows_and_is_no_view(kernels):
    (backend, plan, prepared), x = planned(weights("block128"), 6), torch.randn(6, 256).bfloat16()
    want = run((backend, plan, prepared), x)
    with torch.no_grad():
        out = routes.launch_into_new(backend, plan, prepared, x, 128, None)
    assert out.shape == want.shape
    assert torch.equal(out, want)
    assert out.is_contiguous()
    assert out.untyped_storage().nbytes() == 8 * 128 * 2
    out.add_(torch.ones(128, dtype=torch.bfloat16, requires_grad=True))  # of a view without gradients it is refused
    assert out.requires_grad


def test_a_backend_that_asks_for_fewer_rows_gets_them_all(kernels, monkeypatch):
    (backend, plan, prepared), x = planned(weights("block128"), 6), torch.randn(6, 256).bfloat16()
    monkeypatch.setattr(cublaslt.CublasLtBackend, "out_rows", lambda *_: 2)
    assert routes.launch_into_new(backend, plan, prepared, x, 128, None).shape == (6, 128)


def test_f32_activations_are_quantised_by_torch(kernels):
    for scaling, static in ALL:
        run(planned(weights(scaling, static), dtype="float32"), torch.randn(8, 256))
        backend, plan, prepared = planned(weights(scaling, static))
        backend.run(plan, prepared, torch.randn(8, 256), torch.empty(8, 128, dtype=torch.bfloat16))
    assert kernels.calls == []


def test_scratch_is_kept_for_a_bounded_number_of_m(kernels, monkeypatch):
    monkeypatch.setattr(scratch.ScratchByM, "_MOST", 3)
    subject = planned(weights("row"))
    first = [run(subject, torch.ones(m, 256).bfloat16()) for m in range(1, 9)]
    assert len(subject[1].state.scratch._known) == 3
    assert [torch.equal(run(subject, torch.ones(m, 256).bfloat16()), first[m - 1]) for m in range(1, 9)] == [True] * 8


# ------------------------------------------------------------------------------------------------------------- loading


@pytest.fixture
def machine(monkeypatch):
    """Let ``jit.load`` answer for a GPU; return what to set it to."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    log.reset()
    pdl_fake.passes(monkeypatch)

    def answers(result, pdl="auto"):
        def load(kernel, variant, arch):
            assert kernel in ("fp8_quantize", "nvfp4_quantize")
            assert (variant, arch) == ("any", SM90)
            if isinstance(result, Exception):
                raise result
            return result

        monkeypatch.setattr(quantizers.jit, "load", load)
        monkeypatch.setenv("FP4DISPATCH_PDL", pdl)

    return answers


@pytest.mark.parametrize(
    "error",
    [
        ToolchainError("nvcc was not found\n  fix: install it"),
        FlagsError("no target for sm_90"),
        CompileError("no", ""),
    ],
    ids=["toolchain", "flags", "compile"],
)
def test_without_our_kernels_a_plan_says_so_and_warns_once(error, machine, caplog):
    machine(error)
    for load, label in ((quantizers.load, "FP8"), (quantizers.load_nvfp4, "NVFP4")):
        assert load(torch.device("cpu")) == (None, "")
        for _ in range(2):
            found, why = load(CUDA)
            assert found is None
            assert why.startswith(f"{label} activations are quantised by torch's operations")
            assert str(error) in why
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        assert record.message == why
        caplog.clear()


@pytest.mark.parametrize("scaling", ["row", "nvfp4"])
def test_the_note_is_in_the_plan(scaling, kernels, monkeypatch):
    quantizer_fake.without(monkeypatch, "by torch's operations: no nvcc")
    _, plan, _ = subject = planned(weights(scaling))
    assert "by torch's operations: no nvcc" in repr(plan)
    assert plan.state.launch is None
    assert run(subject, torch.randn(3, 256).bfloat16()).isfinite().all()


def test_a_capture_is_no_reason_to_go_without(machine):
    machine(CaptureError("loading the kernel"))
    for load in (quantizers.load, quantizers.load_nvfp4):
        with pytest.raises(CaptureError):
            load(CUDA)


@pytest.mark.parametrize(("proven", "setting"), list(itertools.product((True, False), ("auto", "off"))))
def test_pdl_needs_the_proof_and_the_setting(proven, setting, machine):
    machine(SimpleNamespace(module=quantizer_fake.Kernels(), pdl_allowed=proven), setting)
    for load in (quantizers.load, quantizers.load_nvfp4):
        found, why = load(CUDA)
        assert why == ""
        assert found.pdl == (proven and setting == "auto")
