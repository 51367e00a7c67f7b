"""The flashinfer_* backends without a GPU: their operands go through the installed FlashInfer's own Python."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fp4dispatch import formats, jit
from fp4dispatch.backends import registry
from fp4dispatch.backends.base import QuantizedActivation
from fp4dispatch.backends.libraries import flashinfer as backends
from fp4dispatch.backends.libraries import flashinfer_package as package
from fp4dispatch.backends.libraries.flashinfer_deepgemm import FlashInferDeepGemmBackend
from fp4dispatch.errors import BackendUnsupportedError, CaptureError
from fp4dispatch.machine import capture
from fp4dispatch.machine.system import System
from tests import contract
from tests.flashinfer_interpreter import DeepGemmRunner, install, load, our_quantiser

FACTS = {"cuda": "13.0", "torch": "2.11", "nvcc": "13.0", "flashinfer": "0.7.2.post1"}
FACTS |= {"cudnn": "9.23.1", "cudnn_frontend": "1.32"}
RUNNERS = (
    backends.FlashInferCutlassBackend,
    backends.FlashInferCudnnBackend,
    backends.FlashInferTrtllmBackend,
    backends.FlashInferCuteDslBackend,
    backends.FlashInferB12xBackend,
)
DEEPGEMM = FlashInferDeepGemmBackend


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Tiny matrices: threads only get into each other's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def supported(backend, arch, tokens=contract.TOKENS):
    system = System.fake(arch, **FACTS)
    return [case for case in contract.cases(backend, tokens) if not contract.unsupported(backend, case, system)]


def _cases():
    for cls in RUNNERS:
        for arch in ("9.0", "10.0", "12.0"):
            if cls is backends.FlashInferCuteDslBackend and arch == "12.0":
                continue  # it insists on CUDA tensors; tests/unit/test_flashinfer_package.py
            for case in supported(cls(), arch):
                yield pytest.param(cls, arch, case, id=f"{cls.name}-{arch}-{case}")


@pytest.mark.parametrize(("cls", "arch", "case"), list(_cases()))
def test_what_flashinfer_is_handed_computes_what_the_reference_does(cls, arch, case, monkeypatch):
    kernels = install(monkeypatch, arch)
    contract.check(cls(), case)
    assert len(kernels.calls) == 3 * case.shards  # the plan's trial, and the two runs


def test_token_scales_after_rounding_are_held_to_two_roundings_and_to_no_more(monkeypatch):
    """Few rows, and few columns that make up the error: in one tile two roundings are 3.2 times one."""
    cls = backends.FlashInferCudnnBackend
    case = contract.Case("fp8_gemm", "tensor", "fp8", 3, 1024, 2048, "bfloat16", False)
    install(monkeypatch, "10.0")
    contract.check(cls(), case)
    real = torch.Tensor.mul_
    with monkeypatch.context() as patch:
        wrong = {torch.bfloat16: 1 + 2**-6}  # the reference multiplies sums in float32
        patch.setattr(torch.Tensor, "mul_", lambda self, scale: real(self, scale * wrong.get(self.dtype, 1)))
        with pytest.raises(contract.Violation, match="error"):
            contract.check(cls(), case)
    monkeypatch.setattr(contract, "TOKEN_SCALE_AFTER_ROUNDING", "none")
    with pytest.raises(contract.Violation, match=r"tile \(0, 4\): error 0\.855"):
        contract.check(cls(), case)


def test_the_scale_of_one_token_is_multiplied_by_cudnn_and_rounded_once(monkeypatch):
    cls = backends.FlashInferCudnnBackend
    case = contract.Case("fp8_gemm", "tensor", "fp8", 1, 1024, 2048, "bfloat16", False)
    install(monkeypatch, "10.0")
    contract.check(cls(), case)
    monkeypatch.setattr(cls, "runner", cls.runner._replace(fuses_one=False))
    with pytest.raises(contract.Violation, match=r"tile \(0, 5\): error 0\.139"):
        contract.check(cls(), case)


def test_every_claimed_format_is_among_the_cases():
    seen = {(p.values[0].name, p.values[2].op, p.values[2].scaling) for p in _cases()}
    assert seen == {
        *((cls.name, "nvfp4_gemm", "nvfp4") for cls in RUNNERS),
        ("flashinfer_cutlass", "fp8_gemm", "tensor"),
        ("flashinfer_cutlass", "fp8_gemm", "block128"),
        ("flashinfer_cudnn", "fp8_gemm", "tensor"),
    }
    for cls in RUNNERS:
        mine = [p.values[2] for p in _cases() if p.values[0] is cls]
        assert {c.shards for c in mine if c.op == "nvfp4_gemm"} == {1, 3}
        assert {c.static for c in mine} == {c.bias for c in mine} == {True, False}
        whole = cls is backends.FlashInferTrtllmBackend  # raw operands are 128x128, and it needs K % 256 == 0
        assert {c.raw for c in mine if c.op == "nvfp4_gemm"} == ({""} if whole else {"", "128x4"})


# ------------------------------------------------------------------------------------------------------------- deepgemm


@pytest.fixture
def deepgemm(monkeypatch):
    """Return the backend and the object that FlashInfer would have compiled for it."""
    runner = DeepGemmRunner()
    package.gemm_module.cache_clear()
    monkeypatch.setattr(load("flashinfer.gemm.gemm_base"), "get_fp8_blockscale_gemm_runner_sm90", lambda: runner)
    ours = SimpleNamespace(module=SimpleNamespace(fp8_quantize_1x128=our_quantiser), pdl_allowed=False)
    monkeypatch.setattr(jit, "load", lambda kernel, variant, arch: ours)
    return DEEPGEMM(), runner


@pytest.mark.parametrize("case", supported(DEEPGEMM(), "9.0", (*contract.TOKENS, 3, 1000)), ids=str)
def test_deepgemm_computes_what_the_reference_does(case, deepgemm):
    backend, runner = deepgemm
    contract.check(backend, case)
    assert len(runner.calls) == 3


def test_a_bias_after_rounding_is_held_to_two_roundings_and_to_no_more(deepgemm, monkeypatch):
    """The one row of this shape's last tiles: two roundings are 2.6 times one, by nobody's mistake."""
    backend, _ = deepgemm
    case = contract.Case("fp8_gemm", "block128", "fp8", 129, 1000, 1040, "bfloat16", True)
    contract.check(backend, case)
    real = torch.Tensor.add_
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "add_", lambda self, bias: real(self, -bias))
        with pytest.raises(contract.Violation, match="error"):
            contract.check(backend, case)
    monkeypatch.setattr(contract, "BIAS_AFTER_ROUNDING", "none")
    with pytest.raises(contract.Violation, match=r"tile \(1, 3\): error 0\.38"):
        contract.check(backend, case)


def test_deepgemm_runs_block_scaled_fp8_into_bfloat16_and_nothing_else():
    system = System.fake("9.0", **FACTS)
    taken = {(c.scaling, c.activation, c.out_dtype) for c in supported(DEEPGEMM(), "9.0")}
    assert taken == {("block128", "fp8", "bfloat16")}
    for arch in ("8.9", "10.0", "12.0"):
        assert supported(DEEPGEMM(), arch) == []
    old = DEEPGEMM().supports(supported(DEEPGEMM(), "9.0")[0].problem(), replace(system, cuda="12.6"))
    assert [reason.text for reason in old] == ["CUDA 12.6 (needs 12.8)"]


def test_deepgemm_never_asks_for_the_shared_scratch(deepgemm):
    """Its layout moves with the largest M that anybody asked about; the stand-in raises when asked for its size."""
    backend, runner = deepgemm
    case = contract.Case("fp8_gemm", "block128", "fp8", 5, 128, 128, "bfloat16", False)
    contract.check(backend, case)
    assert runner.workspace.numel() < 1024


def test_deepgemm_takes_16_and_32_bit_activations_other_than_bfloat16(deepgemm):
    backend, runner = deepgemm
    case = contract.Case("fp8_gemm", "block128", "fp8", 9, 192, 300, "bfloat16", False)
    weights = contract.make_weights(case, "cpu", 1)
    prepared = backend.prepare(weights)
    plan = backend.plan(case.problem(), prepared)
    launched = len(runner.calls)
    for dtype in (torch.float16, torch.float32):
        x = torch.randn(9, 300).to(dtype)
        out = torch.full((9, 192), float("nan"), dtype=torch.bfloat16)
        backend.run(plan, prepared, x, out)
        q = formats.fp8_quantize(x, "1x128")
        exact = q.data.double() * q.scale.double().repeat_interleave(128, 1)[:, :300]
        torch.testing.assert_close(out, (exact @ contract.dequantised(weights).t()).bfloat16(), rtol=2**-7, atol=2**-7)
    assert len(runner.calls) == launched + 2


def test_deepgemm_pads_without_adding_blocks_of_scales():
    for n, k in ((72, 100), (129, 128), (64, 1000), (200, 384)):
        case = contract.Case("fp8_gemm", "block128", "fp8", 1, n, k, "bfloat16", False)
        weights = contract.make_weights(case, "cpu", 1)
        data, scale = DEEPGEMM().prepare(weights).tensors
        assert data.shape[0] % 64 == data.shape[1] % 128 == 0
        assert scale.shape == weights.scale.shape == (-(-data.shape[0] // 128), data.shape[1] // 128)
        assert not data.view(torch.uint8)[n:].any()
        assert not data.view(torch.uint8)[:, k:].any()


# ---------------------------------------------------------------------------------------------------------------- plans


def one(cls, arch="10.0", **changes):
    """Return a backend, a case that it runs, and the case's weights, prepared."""
    op, scaling, activation = ("nvfp4_gemm", "nvfp4", "nvfp4")
    case = replace(contract.Case(op, scaling, activation, 5, 256, 256, "bfloat16", False), **changes)
    backend = cls()
    return backend, case, backend.prepare(contract.make_weights(case, "cpu", 1))


@pytest.mark.parametrize("cls", [*RUNNERS, DEEPGEMM])
def test_planning_is_refused_during_capture(cls, monkeypatch):
    monkeypatch.setattr(capture, "is_capturing", lambda: True)
    monkeypatch.setattr(package, "gemm_module", lambda: pytest.fail("FlashInfer was imported"))
    changes = {"op": "fp8_gemm", "scaling": "block128", "activation": "fp8"} if cls is DEEPGEMM else {}
    if cls is backends.FlashInferTrtllmBackend:
        monkeypatch.setattr(package, "shuffle_rows", lambda data, sf, tile: (data, sf))
    backend, case, prepared = one(cls, **changes)
    with pytest.raises(CaptureError, match=r"warmup\(model, tokens="):
        backend.plan(case.problem(), prepared)


def test_the_first_call_is_checked_and_the_others_are_not(monkeypatch):
    install(monkeypatch, "10.0")
    gemm, seen = load("flashinfer.gemm.gemm_base"), []
    real = gemm.mm_fp4
    monkeypatch.setattr(gemm, "mm_fp4", lambda *a, **k: seen.append(k["skip_check"]) or real(*a, **k))
    contract.check(*one(backends.FlashInferCutlassBackend)[:2])
    assert seen == [False, True, True]


def test_a_kernel_that_writes_nothing_is_not_planned(monkeypatch):
    """On sm_120 gemm_fp8_nt_groupwise drops the status of its launch."""
    install(monkeypatch, "12.0").silent = True
    backend, case, prepared = one(
        backends.FlashInferCutlassBackend, op="fp8_gemm", scaling="block128", activation="fp8"
    )
    with pytest.raises(BackendUnsupportedError, match=r"left 2048 of 2048 outputs unwritten"):
        backend.plan(case.problem(), prepared)


def test_what_flashinfer_says_is_in_the_refusal(monkeypatch):
    install(monkeypatch, "9.0")
    backend, case, prepared = one(backends.FlashInferCutlassBackend)
    with pytest.raises(BackendUnsupportedError, match=r"mm_fp4 does not support backend 'cutlass' with capability 90"):
        backend.plan(case.problem(), prepared)


def test_a_compile_error_is_told_by_its_end(monkeypatch, deepgemm):
    install(monkeypatch, "10.0")
    gemm = load("flashinfer.gemm.gemm_base")

    def build(*_):
        raise RuntimeError("Ninja build failed. " + "x" * 5000 + " error: no such header")

    monkeypatch.setattr(gemm, "get_cutlass_fp4_gemm_module", build)
    backend, case, prepared = one(backends.FlashInferCutlassBackend)
    with pytest.raises(BackendUnsupportedError, match=r"no such header\n  fix: ") as caught:
        backend.plan(case.problem(), prepared)
    assert len(str(caught.value)) < 1100
    monkeypatch.setattr(gemm, "get_fp8_blockscale_gemm_runner_sm90", build)
    backend, case, prepared = one(DEEPGEMM, op="fp8_gemm", scaling="block128", activation="fp8")
    with pytest.raises(BackendUnsupportedError, match=r"no such header\n  fix: point CUDA_HOME"):
        backend.plan(case.problem(), prepared)


def test_running_out_of_memory_is_not_a_verdict_on_the_backend(monkeypatch):
    install(monkeypatch, "10.0")

    def mm_fp4(*args, **kwargs):
        raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(load("flashinfer.gemm.gemm_base"), "mm_fp4", mm_fp4)
    backend, case, prepared = one(backends.FlashInferCutlassBackend)
    with pytest.raises(torch.OutOfMemoryError):
        backend.plan(case.problem(), prepared)


def test_tuning_inside_a_capture_is_refused(monkeypatch):
    kernels = install(monkeypatch, "10.0")
    backend, case, prepared = one(backends.FlashInferCutlassBackend)
    plan = backend.plan(case.problem(), prepared)
    launched = len(kernels.calls)
    x, out = torch.randn(5, 256).bfloat16(), torch.empty(5, 256, dtype=torch.bfloat16)
    monkeypatch.setattr(capture, "is_capturing", lambda: True)
    backend.run(plan, prepared, x, out)
    monkeypatch.setattr(package.tuner(), "is_tuning_mode", True)
    with pytest.raises(CaptureError, match=r"autotune\(\) is on"):
        backend.run(plan, prepared, x, out)
    assert len(kernels.calls) == launched + 1


@pytest.mark.parametrize("cls", [backends.FlashInferCudnnBackend, DEEPGEMM])
def test_calls_from_many_threads_take_turns(cls, monkeypatch, deepgemm):
    """One cuDNN handle a device and one map of kernels, neither of them locked."""
    if cls is DEEPGEMM:
        (backend, target), name = deepgemm, "run_gemm"
        changes = {"op": "fp8_gemm", "scaling": "block128", "activation": "fp8"}
    else:
        backend, target, name, changes = cls(), install(monkeypatch, "10.0"), "fp4", {}
    inside, most = [], []
    real = getattr(target, name)

    def counted(*args, **kwargs):
        inside.append(1)
        most.append(len(inside))
        try:
            return real(*args, **kwargs)
        finally:
            inside.pop()

    monkeypatch.setattr(target, name, counted)
    _, case, prepared = one(cls, **changes)
    plan = backend.plan(case.problem(), prepared)
    xs = [torch.randn(5, 256).bfloat16() for _ in range(4)]
    expected = [torch.empty(5, 256, dtype=torch.bfloat16) for _ in xs]
    for x, out in zip(xs, expected, strict=True):
        backend.run(plan, prepared, x, out)
    wrong = []

    def work(i):
        for _ in range(20):
            out = torch.empty(5, 256, dtype=torch.bfloat16)
            backend.run(plan, prepared, xs[i], out)
            if not torch.equal(out, expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(most) == 1 + 4 + 80
    assert max(most) == 1


# ------------------------------------------------------------------------------------------------------------- operands


def test_trtllm_weights_are_shuffled_as_flashinfer_shuffles_them(monkeypatch):
    quantization = load("flashinfer.quantization.fp4_quantization")
    monkeypatch.setattr(quantization, "block_scale_interleave", lambda sf: sf)  # a CUDA kernel; ours is to_128x4
    case = contract.Case("nvfp4_gemm", "nvfp4", "nvfp4", 1, 384, 512, "bfloat16", False)
    weights = contract.make_weights(case, "cpu", 1)
    data, sf, _ = backends.FlashInferTrtllmBackend().prepare(weights).tensors
    assert torch.equal(data, quantization.shuffle_matrix_a(weights.weight, 128))
    rows = quantization.shuffle_matrix_sf_a(weights.scale.view(torch.uint8), 128)
    assert torch.equal(sf.view(torch.uint8), formats.to_128x4(rows))
    assert not torch.equal(data, weights.weight)


@pytest.mark.parametrize("cls", [cls for cls in RUNNERS if not cls.runner.shuffled])
def test_prepare_copies_nothing_that_fits(cls):
    case = contract.Case("nvfp4_gemm", "nvfp4", "nvfp4", 1, 128, 128, "bfloat16", False, raw="128x4")
    weights = contract.make_weights(case, "cpu", 1)
    tensors = cls().prepare(weights).tensors
    assert [t.data_ptr() for t in tensors[:2]] == [weights.weight.data_ptr(), weights.scale.data_ptr()]


def test_garbage_in_the_padding_of_raw_scales_reaches_nothing(monkeypatch):
    """vllm#48898: padding of block scales that was left uninitialised turned real rows into garbage."""
    install(monkeypatch, "12.0")
    backend = backends.FlashInferB12xBackend()
    case = contract.Case("nvfp4_gemm", "nvfp4", "nvfp4", 5, 72, 64, "bfloat16", False, raw="128x4")
    weights = contract.make_weights(case, "cpu", 1)
    prepared = backend.prepare(weights)
    x, a = contract.make_activation(case, weights, "cpu", 3)
    real = formats.to_128x4(torch.ones(5, 4, dtype=torch.uint8)).bool()
    nan = torch.full_like(x.scale.view(torch.uint8), 0x7F)
    poisoned = torch.where(real, x.scale.view(torch.uint8), nan).view(torch.float8_e4m3fn)
    out = torch.empty(5, 72, dtype=torch.bfloat16)
    backend.run(
        backend.plan(case.problem(), prepared), prepared, QuantizedActivation(x.data, poisoned, x.global_scale), out
    )
    torch.testing.assert_close(out, (a @ contract.dequantised(weights).t()).bfloat16(), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("cls", [*RUNNERS, DEEPGEMM])
def test_operands_at_odd_addresses_are_moved(cls, monkeypatch, deepgemm):
    """The stand-ins refuse an address that FlashInfer's kernels could not load from."""
    arch = "12.0" if cls is backends.FlashInferB12xBackend else "10.0"
    install(monkeypatch, arch)
    changes = {"op": "fp8_gemm", "scaling": "block128", "activation": "fp8"} if cls is DEEPGEMM else {}
    backend, case, prepared = one(cls, **changes)
    backend = deepgemm[0] if cls is DEEPGEMM else backend
    plan = backend.plan(case.problem(), prepared)
    x = torch.empty(5 * 256 + 1, dtype=torch.bfloat16)[1:].view(5, 256).normal_()
    out = torch.empty(5 * 256 + 1, dtype=torch.bfloat16)[1:].view(5, 256)
    expected = torch.empty(5, 256, dtype=torch.bfloat16)
    backend.run(plan, prepared, x, out)
    backend.run(plan, prepared, x.clone(), expected)
    assert out.data_ptr() % 16
    assert torch.equal(out, expected)


def odd(tensor):
    """Return the same values one byte past an aligned address."""
    raw = tensor.contiguous().view(torch.uint8)
    moved = torch.empty(raw.numel() + 64, dtype=torch.uint8)
    start = (-moved.data_ptr()) % 32 + tensor.element_size()
    return moved[start : start + raw.numel()].copy_(raw.flatten()).view(tensor.dtype).view(tensor.shape)


@pytest.mark.parametrize("cls", [*RUNNERS, DEEPGEMM])
def test_weights_and_quantised_operands_at_odd_addresses_are_moved(cls, monkeypatch, deepgemm):
    install(monkeypatch, "12.0" if cls is backends.FlashInferB12xBackend else "10.0")
    changes = {"op": "fp8_gemm", "scaling": "block128", "activation": "fp8"} if cls is DEEPGEMM else {}
    _, case, _ = one(cls, raw="linear" if cls is DEEPGEMM else "128x4", **changes)
    weights = contract.make_weights(case, "cpu", 1)
    x, a = contract.make_activation(case, weights, "cpu", 3)
    backend = deepgemm[0] if cls is DEEPGEMM else cls()
    prepared = backend.prepare(replace(weights, weight=odd(weights.weight), scale=odd(weights.scale)))
    out = torch.empty(5, 256, dtype=torch.bfloat16)
    moved = QuantizedActivation(odd(x.data), odd(x.scale), x.global_scale)
    backend.run(backend.plan(case.problem(), prepared), prepared, moved, out)
    torch.testing.assert_close(out, (a @ contract.dequantised(weights).t()).bfloat16(), rtol=2**-7, atol=2**-7)


# ----------------------------------------------------------------------------------------------------- loading, support


def test_flashinfer_that_cannot_be_imported_is_a_refusal(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer.gemm.gemm_base", None)
    package.gemm_module.cache_clear()
    backend, case, prepared = one(backends.FlashInferCutlassBackend)
    with contextlib.ExitStack() as stack:
        stack.callback(package.gemm_module.cache_clear)
        with pytest.raises(BackendUnsupportedError, match=r"cannot be imported: .*\n  fix: pip install"):
            backend.plan(case.problem(), prepared)


def test_flashinfer_is_not_imported_before_it_is_needed():
    code = (
        "import sys, fp4dispatch; from fp4dispatch.backends import registry; from fp4dispatch.problem import Problem\n"
        "from fp4dispatch.machine.system import System\n"
        "for name, backend in registry.backends().items():\n"
        "    backend.supports(Problem('nvfp4_gemm', 1, 128, 128), System.fake('12.0', flashinfer='0.7.2'))\n"
        "sys.exit('flashinfer' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_they_are_registered_under_the_names_that_users_know():
    for cls in (*RUNNERS, DEEPGEMM):
        assert type(registry.instance(cls.name)) is cls
        assert registry.canonical(cls.name) == (cls.name, None)
    assert {cls.name for cls in (*RUNNERS, DEEPGEMM)} == {n for n in registry.BUILTINS if n.startswith("flashinfer")}
