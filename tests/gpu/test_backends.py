"""Every registered backend keeps the contract on the GPU that is here; what it cannot run is skipped, with why."""

import pytest
import torch

from fp4dispatch import formats
from fp4dispatch.backends import registry
from fp4dispatch.machine import system
from fp4dispatch.models.linear import FP4Linear, FP8Linear
from fp4dispatch.problem import Problem
from fp4dispatch.run import ops
from tests import contract

pytestmark = pytest.mark.gpu

LARGE = ((1024, 2048), (1000, 1040), (4096, 4096))


def _cases():
    for name, backend in registry.backends().items():
        if isinstance(backend, registry.BrokenBackend):
            continue
        for case in [*contract.cases(backend), *contract.cases(backend, tokens=(1, 33, 300), shapes=LARGE)]:
            yield pytest.param(backend, case, id=f"{name}-{case}")


@pytest.mark.parametrize(("backend", "case"), list(_cases()))
def test_contract(backend, case):
    why = contract.unsupported(backend, case, system.current())
    if why:
        pytest.skip(f"{backend.name}: {why}")
    contract.check(backend, case, "cuda")


def test_this_gpu_runs_what_it_should():
    """A skip above must not hide a backend that has to run here: FP8 through cuBLASLt from sm_89 on."""
    facts = system.current()
    backend = registry.instance("cublaslt")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 tensor cores come with sm_89")
    for scaling in ("tensor", "row"):
        assert backend.supports(Problem("fp8_gemm", 16, 128, 128, "fp8", scaling), facts) == ()
    if torch.cuda.get_device_capability() == (9, 0):
        assert backend.supports(Problem("fp8_gemm", 16, 128, 128, "fp8", "block128"), facts) == ()


def test_the_oracle_on_the_gpu_equals_the_one_on_the_cpu():
    from fp4dispatch.backends.reference import ReferenceBackend

    backend = ReferenceBackend()
    for case in contract.cases(backend, tokens=(17,)):
        outs = []
        for device in ("cpu", "cuda"):
            weights = contract.make_weights(case, "cpu", 1)
            moved = contract.make_weights(case, device, 1)
            assert torch.equal(moved.weight.cpu().view(torch.uint8), weights.weight.view(torch.uint8))
            prepared = backend.prepare(moved)
            x, _ = contract.make_activation(case, moved, device, 2)
            out = torch.full((case.m, case.n), float("nan"), device=device)
            backend.run(backend.plan(case.problem(), prepared), prepared, x, out)
            outs.append(out.cpu())
        torch.testing.assert_close(*outs, rtol=2e-5, atol=2e-5 * float(outs[0].abs().max()))


def test_the_oracle_ignores_tf32():
    case = contract.Case("fp8_gemm", "block128", "bf16", 64, 200, 144, "float32", False)
    from fp4dispatch.backends.reference import ReferenceBackend

    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        contract.check(ReferenceBackend(), case, "cuda")
        w = contract.make_weights(case, "cuda", 2)
        x, a = contract.make_activation(case, w, "cuda", 3)
        backend = ReferenceBackend()
        prepared = backend.prepare(w)
        out = torch.empty(64, 200, device="cuda")
        backend.run(backend.plan(case.problem(), prepared), prepared, x, out)
        exact = a @ contract.dequantised(w).t()
        assert ((out - exact).norm() / exact.norm()) < 2e-6
    finally:
        torch.set_float32_matmul_precision(before)


def _op_args():
    torch.manual_seed(0)
    x = torch.randn(5, 64, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(48, 64, device="cuda", dtype=torch.bfloat16)
    a, b = (formats.nvfp4_quantize(t, sf_layout="128x4") for t in (x, w))
    alpha = a.global_scale * b.global_scale
    yield "nvfp4_gemm", (a.data, b.data, a.sf, b.sf, alpha, None, torch.bfloat16, "128x4", "reference")
    fa, fb = (formats.fp8_quantize(t, "row") for t in (x, w))
    yield "fp8_gemm", (fa.data, fb.data, fa.scale, fb.scale, None, torch.bfloat16, "row", None)
    yield "nvfp4_quantize", (x, torch.tensor(0.01, device="cuda"), "128x4")
    yield "fp8_quantize", (x, "row", None)
    linear = torch.nn.Linear(64, 48, device="cuda", dtype=torch.bfloat16)
    layers = [FP4Linear.from_linear(linear), FP8Linear.from_linear(linear, scaling="row")]
    for name, activation in (("w4a16", "bf16"), ("w4a8", "fp8")):
        if not registry.instance(name).supports(Problem("nvfp4_gemm", 5, 48, 64, activation), system.current()):
            layers.append(FP4Linear.from_linear(linear, backend=name))
    for layer in layers:
        bound = layer.bind(x.dtype)
        yield "linear", (x, list(bound.tensors), layer.bias, bound.spec.text)


def test_opcheck_on_cuda(monkeypatch):
    real = torch.allclose

    def allclose(a, b, equal_nan=False):  # opcheck compares operands with it, and torch lacks it for float8
        if a.dtype == torch.float8_e4m3fn:
            return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        return real(a, b, equal_nan=equal_nan)

    monkeypatch.setattr(torch, "allclose", allclose)
    for name, args in _op_args():
        results = torch.library.opcheck(getattr(torch.ops.fp4dispatch, name).default, args)
        assert set(results.values()) == {"SUCCESS"}, name


def test_raw_gemm_does_not_synchronise():
    args = [(name, args) for name, args in _op_args() if name.endswith("gemm")]
    assert args
    for name, operands in args:
        op = getattr(torch.ops.fp4dispatch, name).default
        op(*operands)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            op(*operands)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_ops_refuse_operands_on_two_devices():
    (_, args), *_ = _op_args()
    with pytest.raises(ValueError, match="device"):
        ops.nvfp4_gemm(args[0].cpu(), *args[1:5])
