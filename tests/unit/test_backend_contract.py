"""Every backend that runs without a GPU keeps the contract, and backends that are broken on purpose do not pass."""

import copy
import functools

import pytest
import torch

from fp4dispatch import formats
from fp4dispatch.backends import registry
from fp4dispatch.backends.base import Plan, Prepared
from fp4dispatch.backends.libraries.cublaslt import CublasLtBackend
from fp4dispatch.backends.reference import ReferenceBackend
from fp4dispatch.machine.system import System
from tests import contract

NO_GPU = System.fake(arch=None)


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Tiny matrices: threads only get into each other's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _on_cpu():
    return list(_each_on_cpu())


def _each_on_cpu():
    for name, backend in registry.backends().items():
        if isinstance(backend, registry.BrokenBackend):
            continue
        for case in contract.cases(backend):
            if not contract.unsupported(backend, case, NO_GPU):
                yield pytest.param(backend, case, id=f"{name}-{case}")


@pytest.mark.parametrize(("backend", "case"), _on_cpu())
def test_registered_backends_on_the_cpu(backend, case):
    contract.check(backend, case)


def test_the_reference_is_among_them_with_every_format():
    seen = {(case.op, case.scaling, case.activation) for case in contract.cases(ReferenceBackend())}
    assert seen >= {("nvfp4_gemm", "nvfp4", a) for a in ("bf16", "nvfp4", "fp8")}
    assert seen >= {("fp8_gemm", s, a) for s in ("tensor", "row", "block128") for a in ("bf16", "fp8")}
    assert {case.m for case in contract.cases(ReferenceBackend())} == set(contract.TOKENS)
    assert {param.values[0].name for param in _on_cpu()} >= {"reference"}


@pytest.mark.parametrize(
    "case",
    [case for case in contract.cases(CublasLtBackend()) if case.scaling in ("tensor", "row")],
    ids=str,
)
def test_cublaslt_padding_and_scales_on_torchs_cpu_kernel(case):
    """torch has a CPU kernel of _scaled_mm for these two scalings, so all but the GPU kernel is tested here."""
    contract.check(CublasLtBackend(), case)


def test_row_scales_left_to_the_epilogue_and_rounded_once():
    for dtype in ("float16", "float32"):
        contract.check(CublasLtBackend(), contract.Case("fp8_gemm", "row", "fp8", 7, 72, 100, dtype, True))


@pytest.mark.parametrize(("n", "k", "np", "kp"), [(72, 100, 80, 112), (80, 112, 80, 112), (1, 1, 16, 16)])
def test_cublaslt_pads_fp8_weights_with_zeros(n, k, np, kp):
    """torch's CPU kernel takes any size, the GPU's multiples of 16."""
    for scaling in ("tensor", "row"):
        w = contract.make_weights(contract.Case("fp8_gemm", scaling, "fp8", 1, n, k, "bfloat16", False), "cpu", 1)
        data = CublasLtBackend().prepare(w).tensors[0]
        assert data.shape == (np, kp)
        assert torch.equal(data[:n, :k].float(), w.weight.float())
        assert not data.view(torch.uint8)[n:].any()
        assert not data.view(torch.uint8)[:, k:].any()


def test_cublaslt_lays_out_block_scales_and_nvfp4_as_torch_asks():
    case = contract.Case("fp8_gemm", "block128", "fp8", 1, 200, 700, "bfloat16", False)
    w = contract.make_weights(case, "cpu", 1)
    data, scale = CublasLtBackend().prepare(w).tensors
    assert data.shape == (208, 768)
    assert scale.t().shape == (8, 2)  # 6 blocks of K, rounded up to 4
    assert scale.t().stride() == (1, 8)
    assert torch.equal(scale[:, :6], w.scale)
    assert not scale[:, 6:].any()
    case = contract.Case("nvfp4_gemm", "nvfp4", "nvfp4", 1, 72, 80, "bfloat16", False, shards=3)
    w = contract.make_weights(case, "cpu", 1)
    data, sf, alpha = CublasLtBackend().prepare(w).tensors
    assert data.shape == (80, 48)
    assert not data[72:].any()
    assert not data[:, 40:].any()
    linear = formats.from_128x4(sf, 80, 6).view(torch.uint8)
    assert torch.equal(linear[:72, :5], w.scale.view(torch.uint8))
    assert not linear[72:].any()
    assert not linear[:, 5:].any()
    assert torch.equal(alpha[:72], formats.expand_shards(w.global_scale, w.shard_rows))


@pytest.mark.parametrize(("dtype", "row_wise"), [("bfloat16", True), ("float16", False), ("float32", False)])
def test_row_wise_kernels_are_only_asked_for_bfloat16_away_from_hopper(monkeypatch, dtype, row_wise):
    calls, real = [], torch._scaled_mm
    monkeypatch.setattr(
        torch, "_scaled_mm", lambda a, b, sa, *r, **k: calls.append(sa.numel()) or real(a, b, sa, *r, **k)
    )
    contract.check(CublasLtBackend(), contract.Case("fp8_gemm", "row", "fp8", 7, 80, 112, dtype, False))
    assert set(calls) == {7 if row_wise else 1}


# ------------------------------------------------------------------------------ the suite itself can tell good from bad


class Broken(ReferenceBackend):
    """The reference with one mistake, made by a subclass."""

    def run(self, plan, prepared, x, out, bias=None):
        super().run(plan, prepared, x, out, bias)
        self.spoil(out)

    def spoil(self, out):
        pass


class UnwrittenTile(Broken):
    def spoil(self, out):
        if out.shape[1] > 128:
            out[:, 128:256] = float("nan")


class ZeroTile(Broken):
    def spoil(self, out):
        if out.shape[0] > 128:
            out[128:, :128] = 0


class LastColumnNotWritten(Broken):
    def spoil(self, out):
        out[:, -1] = float("nan")


class LastRowStale(Broken):
    def spoil(self, out):
        if out.shape[0] > 1:
            out[-1] = out[-2]


class WritesPastTheEnd(Broken):
    def spoil(self, out):
        out.as_strided((out.numel() + 1,), (1,))[-1] = 0


class NotRepeatable(Broken):
    def spoil(self, out):
        self.calls = getattr(self, "calls", 0) + 1
        bits = out.view(torch.int16)
        bits[0, 0] += self.calls % 2


class ReadsOnTheHost(Broken):
    def spoil(self, out):
        float(out[0, 0])


class SwappedScaleRows(ReferenceBackend):
    def prepare(self, weights):
        p = super().prepare(weights)
        scale = p.tensors[1]
        if scale.ndim == 2 and scale.shape[0] > 8 and weights.scaling == "nvfp4":
            scale = scale.view(torch.uint8)[[1, 0, *range(2, scale.shape[0])]].view(scale.dtype)
        return Prepared(p.backend, (p.tensors[0], scale, *p.tensors[2:]), p.layout)


class OneAlphaForAllShards(ReferenceBackend):
    def prepare(self, weights):
        p = super().prepare(weights)
        if len(weights.shard_rows) > 1:
            p.tensors[2].fill_(weights.global_scale.max())
        return p


class DropsTheKTail(ReferenceBackend):
    def run(self, plan, prepared, x, out, bias=None):
        if isinstance(x, torch.Tensor) and x.shape[1] % 128:
            x = x.clone()
            x[:, -16:] = 0
        super().run(plan, prepared, x, out, bias)


class ForgetsTheBias(ReferenceBackend):
    def run(self, plan, prepared, x, out, bias=None):
        super().run(plan, prepared, x, out)


class PlanHoldsWeights(ReferenceBackend):
    def plan(self, problem, prepared):
        return Plan(self.name, problem, {"weights": [prepared.tensors[0]]})


class PlanRemembersTheLayerInAClosure(ReferenceBackend):
    def plan(self, problem, prepared):
        return Plan(self.name, problem, lambda: prepared)


class PlanRemembersTheLayer(ReferenceBackend):
    """Where no search of the plan finds it: the numbers of another layer show it."""

    def plan(self, problem, prepared):
        return Plan(self.name, problem, functools.partial(copy.copy, prepared))

    def run(self, plan, prepared, x, out, bias=None):
        super().run(plan, plan.state(), x, out, bias)


class LayoutDiffersPerLayer(ReferenceBackend):
    def prepare(self, weights):
        p = super().prepare(weights)
        return Prepared(p.backend, p.tensors, (*p.layout, p.tensors[0].data_ptr()))


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (UnwrittenTile, "tile (0, 1): "),
        (ZeroTile, "tile (1, 0): error"),
        (LastColumnNotWritten, "never written"),
        (LastRowStale, "error"),
        (WritesPastTheEnd, "outside its output"),
        (NotRepeatable, "two runs differ in 1 elements"),
        (ReadsOnTheHost, "on the host"),
        (SwappedScaleRows, "error"),
        (OneAlphaForAllShards, "error"),
        (DropsTheKTail, "error"),
        (ForgetsTheBias, "error"),
        (PlanHoldsWeights, "the plan holds 1 of"),
        (PlanRemembersTheLayerInAClosure, "the plan holds"),
        (PlanRemembersTheLayer, "error"),
        (LayoutDiffersPerLayer, "layouts of two layers"),
    ],
)
def test_a_broken_backend_is_found(broken, says):
    found = []
    for case in contract.cases(broken())[::5]:
        try:
            contract.check(broken(), case)
        except contract.Violation as error:
            found.append(str(error))
            if says in found[-1]:
                return
    raise AssertionError(f"{broken.__name__} passed, or was found for another reason: {found[:3]}")


def test_the_suite_passes_what_is_not_broken():
    for case in contract.cases(Broken())[::40]:
        contract.check(Broken(), case)


def test_the_oracle_ignores_switches_that_trade_f32_away():
    case = contract.Case("fp8_gemm", "block128", "bf16", 17, 200, 144, "float32", False)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        contract.check(ReferenceBackend(), case)
        w = contract.make_weights(case, "cpu", 2)
        x, a = contract.make_activation(case, w, "cpu", 3)
        backend = ReferenceBackend()
        prepared = backend.prepare(w)
        out = torch.empty(17, 200)
        backend.run(backend.plan(case.problem(), prepared), prepared, x, out)
        exact = a @ contract.dequantised(w).t()
        assert ((out - exact).norm() / exact.norm()) < 2e-6
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_the_oracle_sees_the_switches(precision):
    """Few CPUs act on them, so the decision is tested beside the result."""
    from fp4dispatch.backends.reference import _f32_products_are_f32, _sums

    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        assert _f32_products_are_f32(torch.ones(1)) is (precision == "highest")
        assert _sums(torch.ones(1, 2), torch.ones(1, 2)).dtype == (
            torch.float32 if precision == "highest" else torch.float64
        )
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_oracle_ignores_autocast(dtype):
    backend = ReferenceBackend()
    for case in contract.cases(backend)[::7]:
        w = contract.make_weights(case, "cpu", 2)
        x, _ = contract.make_activation(case, w, "cpu", 3)
        prepared = backend.prepare(w)
        plan = backend.plan(case.problem(), prepared)
        want = torch.empty(case.m, case.n, dtype=getattr(torch, case.out_dtype))
        got = torch.full_like(want, torch.nan)
        backend.run(plan, prepared, x, want)
        with torch.autocast("cpu", dtype):
            backend.run(plan, prepared, x, got)
            assert torch.is_autocast_enabled("cpu")
        assert torch.equal(got, want), str(case)


def test_blocks_of_n_do_not_change_the_result(monkeypatch):
    from fp4dispatch.backends import reference

    for case in (c for c in contract.cases(ReferenceBackend()) if c.n == 384 and c.m in (1, 129)):
        w = contract.make_weights(case, "cpu", 2)
        x, _ = contract.make_activation(case, w, "cpu", 3)
        backend = ReferenceBackend()
        prepared, results = backend.prepare(w), []
        for elements in (1 << 25, 1):
            monkeypatch.setattr(reference, "BLOCK_ELEMENTS", elements)
            out = torch.full((case.m, case.n), float("nan"))
            backend.run(backend.plan(case.problem(), prepared), prepared, x, out)
            results.append(out)
        assert torch.allclose(*results, rtol=1e-5, atol=1e-6), str(case)


def test_prepare_copies_nothing_that_fits():
    case = contract.Case("fp8_gemm", "row", "fp8", 1, 128, 128, "bfloat16", False)
    w = contract.make_weights(case, "cpu", 1)
    for backend in (ReferenceBackend(), CublasLtBackend()):
        prepared = backend.prepare(w)
        assert prepared.tensors[0].data_ptr() == w.weight.data_ptr()
        assert prepared.tensors[1].data_ptr() == w.scale.data_ptr()
        assert prepared.nbytes() == 128 * 128 + 128 * 4
