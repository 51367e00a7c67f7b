"""w8a16 without a GPU: the contract on an emulated kernel, one copy of the weight, NaN, padding."""

from __future__ import annotations

import itertools

import pytest
import torch

from fp4dispatch import formats
from fp4dispatch.backends.base import LinearWeights
from fp4dispatch.backends.own import w8a16
from fp4dispatch.backends.own.tiling import search, speeds, tiles
from fp4dispatch.errors import InputError
from fp4dispatch.machine import gpu_models
from fp4dispatch.models.linear import FP8Linear
from fp4dispatch.policy.catalogue import catalogue
from fp4dispatch.problem import Problem
from fp4dispatch.problem.arch import KNOWN_ARCHS
from fp4dispatch.run import routes
from fp4dispatch.trust import selfcheck
from tests import bounds, contract, w8_fake
from tests.hopper import HOPPER, seems_to_be_here

BACKEND = w8a16.W8A16Backend()
ARCH = {arch.sm: arch for arch in KNOWN_ARCHS}
(RECORD,) = (c for c in catalogue().capabilities if c.backend == BACKEND.name)
E4M3 = torch.float8_e4m3fn
FEW, MANY = "w8a16_small", "w8_gemm_sm90"
TILES = tuple(range(64, 257, 16))


def problem(m, n=4096, k=4096, scaling="row", **options):
    return Problem("fp8_gemm", m, n, k, options.pop("activation", "bf16"), scaling, **options)


def weights(n, k, scaling="row", seed=0, static=None):
    torch.manual_seed(seed)
    q = formats.fp8_quantize(torch.randn(n, k), scaling)
    return LinearWeights("fp8_gemm", scaling, n, k, q.data, q.scale, input_scale=static)


def run(w, x, bias=None, prepared=None):
    return w8_fake.run(BACKEND, "bf16", w, x, bias, prepared)


# ------------------------------------------------------------------------------------------------------------ contract


def cases():
    """Everything on sm_90; on the other archs, some."""
    claimed = [case for case in contract.cases(BACKEND) if case.scaling in RECORD.scalings]
    for arch in RECORD.archs:
        for case in claimed[:: 1 if arch == "sm_90" else 7]:
            yield pytest.param(arch, case, id=f"{arch}-{case}")


@pytest.mark.parametrize(("arch", "case"), list(cases()))
def test_contract_on_the_emulated_kernel(monkeypatch, arch, case):
    kernels = w8_fake.install(monkeypatch, ARCH[arch].capability)
    contract.check(BACKEND, case)
    assert kernels.launched


@pytest.mark.parametrize(("n", "k"), [(64, 80), (101, 48), (64, 90)])
def test_what_a_layer_calls_is_run(monkeypatch, n, k):
    w8_fake.install(monkeypatch)
    w, x, bias = weights(n, k), torch.randn(5, k).bfloat16(), torch.randn(n).bfloat16()
    prepared, out = BACKEND.prepare(w), torch.full((5, n), torch.nan, dtype=torch.bfloat16)
    BACKEND.ready(w8_fake.plan_of(BACKEND, "bf16", w, prepared, 5), prepared)(x, out, bias)
    assert torch.equal(out, run(w, x, bias, prepared))


def test_everything_that_the_capabilities_claim_has_a_build_and_nothing_else():
    table = [tile for tile in tiles.tiles("w8") if tile.activations == ("bf16",)]
    assert [(tile.kernel, tile.m_min, tile.predicted) for tile in table] == [
        *((MANY, 33 if tokens <= 128 else 65, True) for tokens in TILES),
        (FEW, 0, False),
    ]
    assert tuple(tile.speed.tokens for tile in table[:-1]) == TILES
    assert {tile.scalings for tile in table} == {RECORD.scalings}
    many = [tile.builds for tile in table[:-1]]
    assert many == [{"bfloat16": f"a16_bf16_{t}", "float16": f"a16_fp16_{t}"} for t in TILES]
    sixteen = {"variants": lambda build: build.startswith("a16_")}
    w8_fake.check_built_as_claimed(MANY, RECORD, *many, archs=("sm_90",), **sixteen)
    w8_fake.check_built_as_claimed(FEW, RECORD, table[-1].builds)


def test_block_scales_and_quantised_operands_are_refused_with_reasons():
    for asked, text in (
        (problem(1, scaling="block128"), "scaling is block128, needs tensor or row"),
        (problem(1, activation="fp8"), "activation is fp8, needs bf16"),
        (problem(1, out_dtype="float32"), "output is float32, needs bfloat16 or float16"),
    ):
        (reason,) = BACKEND.supports(asked, HOPPER)
        assert (reason.code, reason.text) == ("DTYPE", text)
    assert BACKEND.supports(problem(1), HOPPER) == ()


# ------------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("n", [64, 65, 72, 79])
def test_the_weight_is_the_layers_own(monkeypatch, n, scaling):
    w8_fake.install(monkeypatch)
    w = weights(n, 208, scaling)
    prepared = BACKEND.prepare(w)
    assert prepared.tensors[0] is w.weight
    assert prepared.nbytes() == w.weight.numel() + 4 * formats.round_up(n, 8)


def test_a_weight_with_other_rows_is_copied_once_padded_with_zeros():
    w8_fake.check_other_rows_are_copied(BACKEND, weights(40, 100))


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_nan_among_the_weights_makes_its_row_nan(monkeypatch, scaling):
    w8_fake.install(monkeypatch)
    monkeypatch.setattr(w8a16, "_STEP_BYTES", 3 * 64)
    w = weights(24, 64, scaling)
    codes = w.weight.view(torch.uint8)
    codes[3, 7], codes[23, 63], codes[4, 1] = 0x7F, 0xFF, 0x7E
    y = run(w, torch.zeros(2, 64).bfloat16() + 1)
    assert y.isnan().all(0).nonzero().flatten().tolist() == [3, 23]
    assert y[:, [i for i in range(24) if i not in (3, 23)]].isfinite().all()


def test_every_finite_weight_is_exact(monkeypatch):
    w8_fake.install(monkeypatch)
    codes = torch.arange(256, dtype=torch.uint8).view(256, 1).expand(256, 16).contiguous()
    codes[[0x7F, 0xFF]] = 0
    w = LinearWeights("fp8_gemm", "tensor", 256, 16, codes.view(E4M3), torch.tensor(1.0))
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.eye(16, dtype=dtype)
        assert torch.equal(run(w, x).double(), x.double() @ w.weight.double().t())


def test_a_static_input_scale_is_not_used(monkeypatch):
    w8_fake.install(monkeypatch)
    x = torch.randn(5, 208).bfloat16()
    plain, static = weights(72, 208, "tensor"), weights(72, 208, "tensor", static=torch.tensor(1e-6))
    assert torch.equal(run(plain, x), run(static, x))


# ---------------------------------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize("k", [208, 100])
@pytest.mark.parametrize("n", [72, 67])
def test_any_strides_and_sizes(monkeypatch, n, k):
    w8_fake.install(monkeypatch)
    w, bias = weights(n, k), torch.randn(n).bfloat16()
    dense = contract.dequantised(w)
    w8_fake.check_any_strides(BACKEND, "bf16", w, bias, lambda x: x.double() @ dense.t() + bias.double())


def test_each_m_has_a_plan_with_the_kernel_that_serves_it(monkeypatch):
    kernels, w = w8_fake.install(monkeypatch), weights(136, 128)
    prepared, dense = BACKEND.prepare(w), contract.dequantised(w)
    for m, kernel in ((1, FEW), (31, FEW), (32, FEW), (33, MANY), (300, MANY), (1000, MANY)):
        plan = w8_fake.plan_of(BACKEND, "bf16", w, prepared, m)
        assert kernels.loaded[-1][0] == kernel, m
        x, out = torch.randn(m, 128).bfloat16(), torch.empty(m, 136, dtype=torch.bfloat16)
        BACKEND.run(plan, prepared, x, out)
        assert w8_fake.error(out, x.double() @ dense.t()) < 3e-3
        assert kernels.launched[-1][:3] == ("w8_gemm" if kernel == MANY else FEW, m, 136)
    assert len(kernels.shapes) == 3
    with pytest.raises(InputError, match="out has 2 rows, the plan is for M=1000"):
        BACKEND.run(plan, prepared, x[:2], out[:2])


@pytest.mark.parametrize(("out_dtype", "build"), [("bfloat16", "bf16"), ("float16", "fp16")])
@pytest.mark.parametrize("arch", RECORD.archs)
def test_other_archs_than_hopper_have_one_kernel_for_every_m(monkeypatch, arch, out_dtype, build):
    w8_fake.install(monkeypatch, ARCH[arch].capability)
    for m in (1, 32, 33, 4096):
        ((kernel, found),) = BACKEND.builds(problem(m, 136, 128, out_dtype=out_dtype), torch.device("cpu"))
        assert (kernel, found) == (FEW, build) or (arch == "sm_90" and m > 32 and found.startswith(f"a16_{build}_"))


@pytest.mark.parametrize("m", [65, 200, 3000])
def test_the_predicted_tile_is_the_best_of_all(m):
    gpu = gpu_models.named("H200 SXM")
    known, asked = speeds.of(gpu), problem(m)
    (chosen,) = BACKEND._kernels(asked, gpu.arch, gpu.sms, known)
    times = {
        each: search.gemm(*each, tiles.speed_of(*each), asked, known) for each in BACKEND.gemms(asked, gpu.arch, 132)
    }
    assert len(times) == len(TILES) + 1
    assert min((us, each) for each, us in times.items() if us is not None)[1] == chosen


@pytest.mark.parametrize(("allowed", "setting", "pdl"), [(True, "", True), (True, "off", False), (False, "", False)])
def test_pdl_where_the_proof_and_the_setting_allow_it(monkeypatch, allowed, setting, pdl):
    if setting:
        monkeypatch.setenv("FP4DISPATCH_PDL", setting)
    kernels = w8_fake.install(monkeypatch, pdl_allowed=allowed)
    run(weights(64, 64), torch.randn(1, 64).bfloat16())
    assert kernels.launched[-1][-1] is pdl


def test_what_it_cannot_run_is_refused(monkeypatch):
    kernels = w8_fake.install(monkeypatch)
    wide, quantised = "w8a16 has no kernel for .* -> float32 on sm_90", "takes 16-bit activations"
    w8_fake.check_refused_before_a_launch(BACKEND, "bf16", weights(64, 64), kernels, wide, quantised)


# ---------------------------------------------------------------------------------------------------------- self-check


def checked(scaling):
    return selfcheck.check(BACKEND, "fp8_gemm", scaling, "bf16", HOPPER, "cpu")


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_the_self_check_passes_the_emulated_kernel(monkeypatch, scaling):
    w8_fake.install(monkeypatch)
    result = checked(scaling)
    assert (result.status, result.findings) == ("passed", ())


@w8_fake.wrong_weights
def test_the_self_check_sees_wrong_weights(monkeypatch, spoil):
    w8_fake.install(monkeypatch)
    w8_fake.spoil_weights(monkeypatch, w8a16, spoil)
    assert checked("row").status == "failed"


# -------------------------------------------------------------------------------------------------------------- layers


@pytest.fixture
def hopper(monkeypatch):
    with seems_to_be_here(monkeypatch):
        yield w8_fake.install(monkeypatch)


BY_TIMES = [(8, "w8a16", "bf16"), (bounds.W8A8, "w8a8", "fp8"), (routes.LARGEST_M, "cublaslt", "fp8")]
BY_RULES = [BY_TIMES[0], (bounds.W8A8_BY_RULES, "w8a8", "fp8"), BY_TIMES[2]]


@pytest.mark.parametrize("wanted", [BY_RULES, BY_TIMES], ids=["rules", "predicted times"])
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_a_layer_on_hopper_changes_with_m_and_holds_its_weight_once(hopper, monkeypatch, scaling, wanted):
    if wanted is BY_TIMES:
        bounds.cublaslt_for_many(monkeypatch)
    w = weights(80, 208, scaling)
    layer = FP8Linear.from_weights(w, torch.randn(80).bfloat16())
    assert [(r.m_max, r.backend, r.activation) for r in layer.bind().spec.routes] == wanted
    held = [t for t in layer.bind().tensors if t.dtype == E4M3]
    assert len(held) == len(wanted)
    assert {t.data_ptr() for t in held} == {layer.weight.data_ptr()}
    assert layer.nbytes() < w.weight.numel() + 4096  # scales and the bias
    assert "w8a16 (bf16) up to M=8, then w8a8 (fp8)" in repr(layer)
    dense = contract.dequantised(w)
    for m in (1, 7, 8):
        x = torch.randn(m, 208).bfloat16()
        want = x.double() @ dense.t() + layer.bias.double()
        assert w8_fake.error(layer(x), want) < 3e-3
    assert [launch[1] for launch in hopper.launched][-3:] == [1, 7, 8]


def test_a_pinned_activation_holds_for_every_m(hopper, monkeypatch):
    def backends(activation):
        layer = FP8Linear.from_weights(weights(80, 208), activation=activation)
        return [(r.m_max, r.backend) for r in layer.bind().spec.routes]

    for most in (bounds.W8A8_BY_RULES, bounds.W8A8):
        assert backends("bf16") == [(routes.LARGEST_M, "w8a16")]
        assert backends("fp8") == [(most, "w8a8"), (routes.LARGEST_M, "cublaslt")]
        bounds.cublaslt_for_many(monkeypatch)


def test_a_decision_says_that_activations_are_not_quantised(hopper):
    layer = FP8Linear.from_weights(weights(80, 208))
    for (_, decision), said in itertools.zip_longest(layer.decisions()[:2], (True, False)):
        assert ("activations stay 16-bit and are NOT quantised" in str(decision)) is said


def test_no_tokens_launch_nothing(hopper):
    layer = FP8Linear.from_weights(weights(80, 208))
    assert layer(torch.zeros(0, 208).bfloat16()).shape == (0, 80)
    assert hopper.launched == []
