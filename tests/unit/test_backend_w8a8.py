"""w8a8 without a GPU: the contract on emulated kernels, one copy of the weight, scales, padding, scratch, refusals."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from fp4dispatch import formats
from fp4dispatch.backends.base import LinearWeights
from fp4dispatch.backends.own import compiled, cutlass, launch_choice, scratch, w8a8, w8a16
from fp4dispatch.backends.own.tensors.operands import QUANTIZER
from fp4dispatch.backends.own.tiling import launch_model, tiles
from fp4dispatch.errors import InputError
from fp4dispatch.jit.catalog.manifest import installed
from fp4dispatch.machine import capture
from fp4dispatch.models.linear import FP8Linear
from fp4dispatch.policy.catalogue import catalogue
from fp4dispatch.problem import Problem
from fp4dispatch.problem.arch import KNOWN_ARCHS, SM90
from fp4dispatch.run import ops, routes
from fp4dispatch.trust import selfcheck
from tests import bounds, contract, many_tokens, w8_fake
from tests.hopper import HOPPER, seems_to_be_here

BACKEND = w8a8.W8A8Backend()
ARCH = {arch.sm: arch for arch in KNOWN_ARCHS}
(RECORD,) = (c for c in catalogue().capabilities if c.backend == BACKEND.name)
E4M3 = torch.float8_e4m3fn
FEW, MANY = "w8a8_small", "w8_gemm_sm90"
DYNAMIC_AND_STATIC = [("row", None), ("row", torch.tensor(0.1)), ("block128", None)]
"""Scaling and static scale: what each way to quantise is for."""
ROW_TILES = (128, 96, 160, 192, 208, 224, 176, 144, 112)
"""Tokens of the builds for many tokens, as the table has them; block scales have 128."""


def problem(m, n=4096, k=4096, scaling="row", **options):
    return Problem("fp8_gemm", m, n, k, options.pop("activation", "fp8"), scaling, **options)


def weights(n, k, scaling="row", seed=0, static=None):
    torch.manual_seed(seed)
    q = formats.fp8_quantize(torch.randn(n, k) * 2.0 ** torch.randint(-3, 4, (n, 1)), scaling)
    return LinearWeights("fp8_gemm", scaling, n, k, q.data, q.scale, input_scale=static)


def run(w, x, bias=None, prepared=None):
    return w8_fake.run(BACKEND, "fp8", w, x, bias, prepared)


def exact(w, x, bias=None):
    """In float64, of the activation as it is quantised."""
    if w.scaling == "block128":
        q = formats.fp8_quantize(x, "1x128")
        a = q.data.double() * q.scale.double().repeat_interleave(128, 1)[:, : w.k]
    else:
        static = w.input_scale
        q = formats.fp8_quantize(x, "row") if static is None else formats.fp8_quantize(x, "tensor", static)
        a = q.data.double() * q.scale.double().reshape(-1, 1)
    return a @ contract.dequantised(w).t() + (0 if bias is None else bias.double())


# ------------------------------------------------------------------------------------------------------- the emulation


def test_emulated_activations_are_packed_as_the_kernel_documents():
    """csrc/quantise/pack_e4m3.h, k in their own order, one byte at a time."""
    m, k = 13, 336
    x = torch.randint(256, (m, k), dtype=torch.uint8)
    packed = w8_fake.pack_activation(x.view(E4M3))
    assert packed.shape == (3, 2, 1024)
    seen = torch.zeros_like(packed)
    for token, at in itertools.product(range(16), range(3 * 128)):
        block, column, byte = at // 128, at % 128 // 16, at % 16
        where = (block, token // 8, 128 * (token % 8) + 16 * (column ^ (token % 8)) + byte)
        assert packed[where] == (x[token, at] if token < m and at < k else 0)
        seen[where] += 1
    assert bool((seen == 1).all())
    assert torch.equal(w8_fake.unpack_activation(packed, m, k).view(torch.uint8), x)


def entry_of(module, entry):
    """Return a GEMM; that for many tokens with its launch shape."""
    call = getattr(module, entry)
    return call if entry == FEW else lambda *given: call(*given[:-1], many_tokens.ONE_CLUSTER, given[-1])


@pytest.mark.parametrize("static", [None, 0.013])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("kernel", "build", "entry"), [(FEW, "{}", FEW), (MANY, "{}_128", "w8_gemm")])
def test_emulated_kernels_compute_what_they_define(kernel, build, entry, dtype, static):
    m, n, k, build, dtype, kernels = 21, 72, 208, build.format(dtype), w8_fake.DTYPES[dtype], w8_fake.Kernels()
    x, w, alpha = torch.randn(m, k).to(dtype), torch.randn(69, k).to(E4M3), torch.rand(n)
    bias, out = torch.randn(n).to(dtype), torch.full((m, n), torch.nan, dtype=dtype)
    packed, scale = torch.full((2, 3, 1024), 0xFF, dtype=torch.uint8), torch.full((m,), torch.nan)
    gemm = entry_of(kernels.load(kernel, build, SM90).module, entry)
    quantizers = kernels.load(QUANTIZER, "any", SM90).module
    if static is None:
        quantizers.w8_quantize_row(x, packed, scale, True)
    else:
        scale = torch.tensor([static])
        quantizers.w8_quantize_tensor(x, packed, scale, True)
    gemm(packed, scale, w, alpha, bias, out, False)
    dense = torch.zeros(n, k, dtype=torch.float64)
    dense[:69] = w.double()
    found = LinearWeights("fp8_gemm", "row", n, k, dense.to(E4M3), alpha, input_scale=static and scale[0])
    assert w8_fake.error(out, exact(found, x, bias)) < 3e-3
    assert [(name, pdl) for name, *_, pdl in kernels.launched][1:] == [(entry, False)]
    for wrong in (out.float(), out[:, :64], out[:20], out[:0]):  # dtype, stride, scales of another M, no tokens
        with pytest.raises(AssertionError):
            gemm(packed, torch.rand(m), w, alpha, bias, wrong, True)
    for wrong in (packed[:1], packed[:, :2].contiguous(), packed.transpose(0, 1).contiguous().transpose(0, 1)):
        with pytest.raises(AssertionError):
            gemm(wrong, scale, w, alpha, bias, out, True)
        with pytest.raises(AssertionError):
            quantizers.w8_quantize_row(x, wrong, torch.empty(m), True)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("kernel", "build", "entry"), [(FEW, "block_{}", FEW), (MANY, "block_{}_128", "w8_gemm")])
def test_emulated_kernels_of_blocks_compute_what_they_define(kernel, build, entry, dtype):
    m, n, k, build, dtype, kernels = 21, 200, 336, build.format(dtype), w8_fake.DTYPES[dtype], w8_fake.Kernels()
    x, w, alpha = torch.randn(m, k).to(dtype), torch.randn(197, k).to(E4M3), torch.rand(2, 3)
    x[2, 128:] = 0
    bias, out = torch.randn(n).to(dtype), torch.full((m, n), torch.nan, dtype=dtype)
    packed, scale = torch.full((3, 3, 1024), 0xFF, dtype=torch.uint8), torch.full((3, 24), torch.nan)
    gemm = entry_of(kernels.load(kernel, build, SM90).module, entry)
    quantize = kernels.load(QUANTIZER, "any", SM90).module.w8_quantize_block
    quantize(x, packed, scale, True)
    assert torch.equal(scale[:, :m].t(), formats.fp8_quantize(x, "1x128").scale)
    assert bool((scale[1:, 2] == 1).all())
    assert bool((scale[:, m:] == 1).all())
    gemm(packed, scale, w, alpha, bias, out, False)
    dense = torch.zeros(n, k)
    dense[:197] = w.float()
    found = LinearWeights("fp8_gemm", "block128", n, k, dense.to(E4M3), alpha)
    assert w8_fake.error(out, exact(found, x, bias)) < 3e-3
    for wrong in (torch.rand(3, 21), torch.rand(2, 24), torch.rand(24, 3).t(), torch.rand(21)):
        with pytest.raises(AssertionError):
            gemm(packed, wrong, w, alpha, bias, out, True)
        with pytest.raises(AssertionError):
            quantize(x, packed, wrong, True)
    for wrong in (torch.rand(1, 3), torch.rand(2, 2), torch.rand(3, 2).t(), torch.rand(1), torch.rand(n)):
        with pytest.raises(AssertionError):
            gemm(packed, scale, w, wrong, bias, out, True)


@pytest.mark.parametrize(
    ("m", "n", "k", "tokens"), [(190, 1000, 4100, 96), (129, 1000, 4100, 144), (300, 2568, 4096, 112)]
)
@pytest.mark.parametrize("scaling", ["row", "block128"])
def test_a_plan_gives_the_kernel_the_launch_shape_that_the_model_chooses(monkeypatch, m, n, k, tokens, scaling):
    """That of the padded problem, by the build for which it is the fastest."""
    kernels = w8_fake.install(monkeypatch)
    w = weights(n, k, scaling)
    w8_fake.run(BACKEND, "fp8", w, torch.randn(m, k).bfloat16())
    builds = [f"bf16_{each}" for each in ROW_TILES] if scaling == "row" else ["block_bf16_128"]
    padded = m, -(-n // 8) * 8, -(-k // 16) * 16
    best = {each: launch_model.best(many_tokens.tile_of(MANY, each), *padded, launch_model.H200) for each in builds}
    build = min(best, key=lambda each: best[each].clocks)
    assert build == (f"bf16_{tokens}" if scaling == "row" else "block_bf16_128")
    assert kernels.loaded[0] == (MANY, build)
    assert kernels.shapes == [best[build].shape]


# ------------------------------------------------------------------------------------------------------------ contract


def cases():
    return [case for case in contract.cases(BACKEND) if case.scaling in RECORD.scalings and not case.raw]


def most_few(scaling):
    """Most tokens of w8a8_small where the weights are few."""
    return 128 if scaling == "block128" else 64


@pytest.mark.parametrize("case", cases(), ids=str)
def test_contract_on_emulated_kernels(monkeypatch, case):
    kernels = w8_fake.install(monkeypatch)
    contract.check(BACKEND, case)
    dynamic = "w8_quantize_block" if case.scaling == "block128" else "w8_quantize_row"
    quantizer = "w8_quantize_tensor" if case.static else dynamic
    gemm = "w8a8_small" if case.m <= most_few(case.scaling) else "w8_gemm"
    assert [name for name, *_ in kernels.launched] == [quantizer, gemm] * 2


def test_the_contract_has_static_scales_biases_and_all_scalings():
    ours = ("tensor", "row", "block128")
    static = set(itertools.product(ours, (False, True))) - {("block128", True)}
    assert {(case.scaling, case.static) for case in cases()} == static
    assert {(case.scaling, case.bias) for case in cases()} == set(itertools.product(ours, (False, True)))


def test_everything_that_the_capabilities_claim_has_a_build_and_nothing_else():
    table = [tile for tile in tiles.tiles("w8") if tile.activations == ("fp8",)]
    plain, blocks = ("tensor", "row"), ("block128",)
    assert [(tile.kernel, tile.m_max, tile.weights_max, tile.scalings) for tile in table] == [
        *((FEW, 64, None, plain), *[(MANY, None, None, plain)] * len(ROW_TILES)),
        *((FEW, 64, None, blocks), (FEW, 128, 4096 * 4096, blocks), (MANY, None, None, blocks)),
    ]
    many = [(tile.speed.tokens, tile.predicted) for tile in table if tile.kernel == MANY]
    assert many == [*((tokens, True) for tokens in ROW_TILES), (128, False)]
    assert {*plain, *blocks} == set(RECORD.scalings)
    for kernel in (FEW, MANY):
        whole = [tile.builds for tile in table if tile.kernel == kernel and tile.weights_max is None]
        fp8 = {"variants": lambda build: not build.startswith("a16_")}
        w8_fake.check_built_as_claimed(kernel, RECORD, *whole, **fp8)
        assert all(tile.builds in whole for tile in table if tile.kernel == kernel)
    assert set(RECORD.activations) == {"fp8"}
    catalog = installed()
    quantizer = catalog.kernel(QUANTIZER)
    assert all(catalog.target_for(quantizer, ARCH[arch]) is not None for arch in RECORD.archs)
    assert "any" in quantizer.variants


@pytest.mark.parametrize(
    ("n", "k", "most"), [(64, 64, 128), (4096, 4096, 128), (4096, 4112, 64), (4104, 4096, 64), (57344, 8192, 64)]
)
def test_block_scales_of_few_weights_stay_with_the_kernel_for_few_tokens(monkeypatch, n, k, most):
    w8_fake.install(monkeypatch)
    for m in (1, 64, 65, 128, 129, 4096):
        (kernel, _), _ = BACKEND.builds(problem(m, n, k, "block128"), torch.device("cpu"))
        assert kernel == (FEW if m <= most else MANY), (m, n, k)


@pytest.mark.parametrize("m", [1, 64, 65, 256, 4096])
@pytest.mark.parametrize("scaling", ["row", "block128"])
@pytest.mark.parametrize(("out_dtype", "build"), [("bfloat16", "bf16"), ("float16", "fp16")])
def test_only_what_an_m_needs_is_loaded_and_named(monkeypatch, out_dtype, build, scaling, m):
    kernels = w8_fake.install(monkeypatch)
    build = f"block_{build}" if scaling == "block128" else build
    asked = problem(m, 64, 64, scaling, out_dtype=out_dtype)
    BACKEND.plan(asked, BACKEND.prepare(weights(64, 64, scaling)))
    tokens = 128 if scaling == "block128" else 96  # a layer of 64 rows has a multiprocessor for every tile
    gemm = (FEW, build) if m <= most_few(scaling) else (MANY, f"{build}_{tokens}")
    assert tuple(kernels.loaded) == BACKEND.builds(asked, torch.device("cpu")) == (gemm, ("w4_activations", "any"))
    assert BACKEND.builds(problem(m, scaling=scaling, out_dtype="float32"), torch.device("cpu")) == ()
    for module in (compiled, launch_choice):
        monkeypatch.setattr(module, "gpu_of", lambda device: (ARCH["sm_120"], 132))
    assert BACKEND.builds(asked, torch.device("cpu")) == ()


def test_what_it_cannot_run_is_refused_with_reasons():
    for asked, code, text in (
        (problem(17, activation="bf16"), "DTYPE", "activation is bf16, needs fp8"),
        (problem(17, out_dtype="float32"), "DTYPE", "output is float32, needs bfloat16 or float16"),
        (
            problem(17, raw=True),
            "LAYOUT",
            "operands are quantised already (raw operator), needs 16-bit activations",
        ),
    ):
        (reason,) = BACKEND.supports(asked, HOPPER)
        assert (reason.code, reason.text) == (code, text)
    assert "FP8Linear" in reason.fix
    assert all(BACKEND.supports(problem(17, scaling=scaling), HOPPER) == () for scaling in RECORD.scalings)


# ------------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("n", [64, 65, 72, 79])
def test_the_weight_is_the_layers_own_and_that_of_w8a16(n, scaling):
    w = weights(n, 208, scaling)
    prepared = BACKEND.prepare(w)
    assert prepared.tensors[0] is w.weight is w8a16.W8A16Backend().prepare(w).tensors[0]
    assert prepared.nbytes() == w.weight.numel() + 4 * (1 if scaling == "tensor" else formats.round_up(n, 8))
    if scaling == "tensor" or n % 8 == 0:
        assert prepared.tensors[1].data_ptr() == w.scale.data_ptr()


@pytest.mark.parametrize("n", [64, 67, 128, 300])
def test_a_weight_and_its_block_scales_are_the_layers_own_and_those_of_cutlass(n):
    w = weights(n, 208, "block128", static=torch.tensor(0.5))  # which block scales do not use
    prepared, other = BACKEND.prepare(w), cutlass.CutlassBackend().prepare(w)
    assert len(prepared.tensors) == 2
    assert prepared.tensors[0] is w.weight
    assert prepared.tensors[1].data_ptr() == w.scale.data_ptr() == other.tensors[1].data_ptr()
    assert tuple(prepared.tensors[1].shape) == (-(-n // 128), 2)
    assert (other.tensors[0].data_ptr() == w.weight.data_ptr()) == (n % 8 == 0)
    w = replace(w, scale=w.scale.t().contiguous().t())
    assert BACKEND.prepare(w).tensors[1].is_contiguous()


def test_a_weight_with_other_rows_is_copied_once_padded_with_zeros():
    w = weights(40, 100)
    w8_fake.check_other_rows_are_copied(BACKEND, w)
    assert torch.equal(BACKEND.prepare(w).tensors[1], w.scale)


@pytest.mark.parametrize("n", [67, 72])
def test_scales_of_columns_are_padded_with_zeros(n):
    w = weights(n, 64, static=torch.tensor(0.5))
    _, alpha, static = BACKEND.prepare(w).tensors
    assert torch.equal(alpha[:n], w.scale)
    assert (alpha.shape, int(alpha[n:].count_nonzero())) == ((72,), 0)
    assert torch.equal(static, torch.tensor([0.5]))


@pytest.mark.parametrize("scaling", ["tensor", "row", "block128"])
def test_nan_among_the_weights_makes_its_column_nan_and_no_other(monkeypatch, scaling):
    w8_fake.install(monkeypatch)
    w = weights(24, 64, scaling)
    codes = w.weight.view(torch.uint8)
    codes[3, 7], codes[23, 63], codes[4, 1] = 0x7F, 0xFF, 0x7E
    y = run(w, torch.ones(20, 64).bfloat16())
    assert y.isnan().all(0).nonzero().flatten().tolist() == [3, 23]
    assert int(y.isnan().sum()) == 40


def test_nan_among_the_scales_makes_its_column_nan_and_no_other(monkeypatch):
    w8_fake.install(monkeypatch)
    w = weights(24, 64)
    w.scale[5] = torch.nan
    y = run(w, torch.randn(20, 64).bfloat16())
    assert y.isnan().all(0).nonzero().flatten().tolist() == [5]
    assert int(y.isnan().sum()) == 20


def test_nan_among_block_scales_makes_their_rows_nan_and_no_others(monkeypatch):
    w8_fake.install(monkeypatch)
    w = weights(300, 272, "block128")
    w.scale[1, 2] = torch.nan
    y = run(w, torch.randn(20, 272).bfloat16())
    assert y.isnan().all(0).nonzero().flatten().tolist() == list(range(128, 256))
    assert int(y.isnan().sum()) == 20 * 128


# ---------------------------------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize("static", [None, 0.02])
@pytest.mark.parametrize("k", [208, 100, 16, 80])
@pytest.mark.parametrize("n", [72, 67])
def test_any_strides_and_sizes(monkeypatch, n, k, static):
    check_any_strides(monkeypatch, n, k, static, "row")


@pytest.mark.parametrize("k", [272, 300, 16])
@pytest.mark.parametrize("n", [264, 131])
def test_any_strides_and_sizes_under_block_scales(monkeypatch, n, k):
    check_any_strides(monkeypatch, n, k, None, "block128")


def check_any_strides(monkeypatch, n, k, static, scaling):
    w8_fake.install(monkeypatch)
    w = weights(n, k, scaling, static=None if static is None else torch.tensor(static))
    # As large as the products: one in the wrong place shows.
    bias = (torch.randn(n) * contract.dequantised(w).norm(dim=1)).bfloat16()
    w8_fake.check_any_strides(BACKEND, "fp8", w, bias, lambda x: exact(w, x, bias))


def test_operands_off_16_bytes_are_copied(monkeypatch):
    w8_fake.install(monkeypatch)
    w = weights(64, 64)
    prepared = BACKEND.prepare(w)
    plan = BACKEND.plan(problem(5, 64, 64), prepared)
    flat = torch.randn(2, 5 * 64 + 1).bfloat16()
    x, out = flat[0, 1:].view(5, 64), flat[1, 1:].view(5, 64)
    BACKEND.run(plan, prepared, x, out)
    assert torch.equal(out, run(w, x.clone()))


def test_tokens_are_scaled_on_their_own_or_by_the_static_scale(monkeypatch):
    """A token that is 2^20 larger leaves the others as exact as they were; a static scale saturates it."""
    w8_fake.install(monkeypatch)
    x = torch.randn(17, 64).bfloat16()
    w, static = weights(64, 64), weights(64, 64, static=torch.tensor(0.02))
    want = run(w, x)
    large = x.clone()
    large[3] *= 2.0**20
    assert torch.equal(run(w, large)[:3], want[:3])
    assert torch.equal(run(w, large)[3], want[3] * 2.0**20)
    assert (
        float(run(static, large)[3].abs().max()) < float(contract.dequantised(static).abs().sum(1).max()) * 448 * 0.021
    )


def test_blocks_of_a_token_are_scaled_on_their_own(monkeypatch):
    """One that is 2^20 larger leaves the products of the others as exact as they were."""
    w8_fake.install(monkeypatch)
    w, x = weights(64, 272, "block128"), torch.randn(17, 272).bfloat16()
    w.weight[:, 128:256] = 0
    want = run(w, x)
    x[3, 128:256] *= 2.0**20
    assert torch.equal(run(w, x), want)
    x[5, 256:] *= 2.0**20
    others = torch.arange(17) != 5
    assert torch.equal(run(w, x)[others], want[others])
    assert w8_fake.error(run(w, x)[5], exact(w, x)[5]) < 3e-3


@pytest.mark.parametrize(("n", "k"), [(64, 80), (101, 48), (64, 90)])
@pytest.mark.parametrize("m", [5, 65])
@pytest.mark.parametrize(("scaling", "static"), DYNAMIC_AND_STATIC)
def test_what_a_layer_calls_is_run(monkeypatch, scaling, static, m, n, k):
    kernels = w8_fake.install(monkeypatch)
    w, x, bias = weights(n, k, scaling, static=static), torch.randn(m, k).bfloat16(), torch.randn(n).bfloat16()
    prepared, out = BACKEND.prepare(w), torch.full((m, n), torch.nan, dtype=torch.bfloat16)
    BACKEND.ready(w8_fake.plan_of(BACKEND, "fp8", w, prepared, m), prepared)(x, out, bias)
    assert torch.equal(out, run(w, x, bias, prepared))
    assert kernels.launched[:2] == kernels.launched[2:]


def test_a_plan_is_for_one_m(monkeypatch):
    kernels = w8_fake.install(monkeypatch)
    prepared = BACKEND.prepare(weights(64, 64))
    plan = BACKEND.plan(problem(64, 64, 64), prepared)
    assert BACKEND.plans_by_m
    x = torch.randn(65, 64).bfloat16()
    with pytest.raises(InputError, match="w8a8: out has 65 rows, the plan is for M=64: make one for this M"):
        BACKEND.run(plan, prepared, x, torch.empty_like(x))
    assert kernels.launched == []


@pytest.mark.parametrize("m", [33, 130])
@pytest.mark.parametrize(("scaling", "static"), DYNAMIC_AND_STATIC)
def test_during_a_capture_scratch_comes_from_the_allocator(monkeypatch, scaling, static, m):
    """A replay may run beside eager work, which uses the arena."""
    w8_fake.install(monkeypatch)
    w = weights(64, 64, scaling, static=static)
    prepared = BACKEND.prepare(w)
    x = torch.randn(m, 64).bfloat16()
    plan = BACKEND.plan(problem(m, 64, 64, scaling), prepared)
    want = run(w, x)
    run(w, -x)
    arenas = dict(scratch._arenas)
    assert len(arenas) == 1
    (arena,) = arenas.values()
    monkeypatch.setattr(capture, "stream_is_capturing", lambda: True)
    before, out = arena.clone(), torch.empty(m, 64, dtype=torch.bfloat16)
    BACKEND.run(plan, prepared, x, out)
    assert torch.equal(out, want)
    assert torch.equal(arena, before)
    assert list(scratch._arenas) == list(arenas)
    parts = plan.state.scratch()
    assert len(parts) == (2 if static is None else 1)
    assert all(part.untyped_storage().data_ptr() != arena.untyped_storage().data_ptr() for part in parts)


@pytest.mark.parametrize(("allowed", "setting", "pdl"), [(True, "", True), (True, "off", False), (False, "", False)])
def test_pdl_where_the_proofs_and_the_setting_allow_it(monkeypatch, allowed, setting, pdl):
    if setting:
        monkeypatch.setenv("FP4DISPATCH_PDL", setting)
    kernels = w8_fake.install(monkeypatch, pdl_allowed=allowed)
    for m, (scaling, static) in itertools.product((17, 65), DYNAMIC_AND_STATIC):
        run(weights(64, 64, scaling, static=static), torch.randn(m, 64).bfloat16())
    assert [launch[-1] for launch in kernels.launched] == [pdl] * 12


@pytest.mark.parametrize(
    ("m", "proven"), [(17, FEW), (17, MANY), (17, QUANTIZER), (129, FEW), (129, MANY), (129, QUANTIZER)]
)
@pytest.mark.parametrize("scaling", ["row", "block128"])
def test_each_launch_has_the_pdl_of_its_own_proof(monkeypatch, scaling, m, proven):
    kernels = w8_fake.install(monkeypatch)
    real = kernels.load

    def load(kernel, build, arch):
        kernels.pdl_allowed = kernel == proven
        return real(kernel, build, arch)

    monkeypatch.setattr(compiled.jit, "load", load)
    run(weights(64, 64, scaling), torch.randn(m, 64).bfloat16())
    gemm = FEW if m <= most_few(scaling) else MANY
    assert [launch[-1] for launch in kernels.launched] == [proven == QUANTIZER, proven == gemm]


def test_what_it_cannot_launch_is_refused(monkeypatch):
    kernels = w8_fake.install(monkeypatch)
    wide, quantised = "w8a8 has no kernel for .* -> float32 on sm_90", "w8a8 takes 16-bit activations"
    w8_fake.check_refused_before_a_launch(BACKEND, "fp8", weights(64, 64), kernels, wide, quantised)


# ---------------------------------------------------------------------------------------------------------- self-check


def checked(scaling):
    return selfcheck.check(BACKEND, "fp8_gemm", scaling, "fp8", HOPPER, "cpu")


@pytest.mark.parametrize("scaling", ["tensor", "row", "block128"])
def test_the_self_check_passes_the_emulated_kernels(monkeypatch, scaling):
    w8_fake.install(monkeypatch)
    result = checked(scaling)
    assert (result.status, result.findings) == ("passed", ())
    assert len(result.ran) >= 3
    assert any("output is float32" in note for note in result.notes)
    assert any("quantised already" in note for note in result.notes)


@w8_fake.wrong_weights
@pytest.mark.parametrize("scaling", ["row", "block128"])
def test_the_self_check_sees_wrong_weights(monkeypatch, scaling, spoil):
    w8_fake.install(monkeypatch)
    w8_fake.spoil_weights(monkeypatch, w8a8, spoil)
    assert checked(scaling).status == "failed"


@pytest.mark.parametrize(
    ("which", "spoil"),
    [
        ("x_scale", lambda s: s.roll(1, 0)),
        ("x_scale", lambda s: s.roll(1, 1)),
        ("x_scale", lambda s: s[:1].expand(s.shape).contiguous()),
        ("alpha", lambda s: s.roll(1, 0)),
        ("alpha", lambda s: s.roll(1, 1)),
        ("alpha", lambda s: s[:1].expand(s.shape).contiguous()),
        ("alpha", lambda s: s[:, :1].expand(s.shape).contiguous()),
    ],
)
def test_the_self_check_sees_wrong_block_scales(monkeypatch, which, spoil):
    kernels = w8_fake.install(monkeypatch)
    real = kernels.load

    def load(kernel, build, arch):
        found = real(kernel, build, arch)
        for name, gemm in list(vars(found.module).items()):
            if "quantize" not in name:
                setattr(found.module, name, lambda *args, gemm=gemm: gemm(*spoiled(args)))
        return found

    def spoiled(args):
        at = 1 if which == "x_scale" else 3
        return [spoil(arg) if i == at else arg for i, arg in enumerate(args)]

    monkeypatch.setattr(compiled.jit, "load", load)
    assert checked("block128").status == "failed"


@pytest.mark.parametrize("spoil", [lambda p: p.roll(1, 1), lambda p: p.roll(16, 2), lambda p: p.roll(128, 2)])
def test_the_self_check_sees_wrong_packing(monkeypatch, spoil):
    w8_fake.install(monkeypatch)
    real = w8_fake.unpack_activation
    monkeypatch.setattr(w8_fake, "unpack_activation", lambda packed, m, k: real(spoil(packed), m, k))
    assert checked("row").status == "failed"


# -------------------------------------------------------------------------------------------------------------- layers


@pytest.fixture
def hopper(monkeypatch):
    with seems_to_be_here(monkeypatch):
        yield w8_fake.install(monkeypatch)


BY_RULES = [(bounds.W8A8_BY_RULES, "w8a8", "fp8"), (routes.LARGEST_M, "cublaslt", "fp8")]
BY_TIMES = [(bounds.W8A8, "w8a8", "fp8"), (routes.LARGEST_M, "cublaslt", "fp8")]


@pytest.mark.parametrize("wanted", [BY_RULES, BY_TIMES], ids=["rules", "predicted times"])
@pytest.mark.parametrize("static", [None, 0.02])
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_a_small_layer_pinned_to_fp8_runs_on_its_own_weight(hopper, monkeypatch, scaling, static, wanted):
    if wanted is BY_TIMES:
        bounds.cublaslt_for_many(monkeypatch)
    w = weights(80, 208, scaling, static=None if static is None else torch.tensor(static))
    layer = FP8Linear.from_weights(w, torch.randn(80).bfloat16(), activation="fp8")
    assert [(r.m_max, r.backend, r.activation) for r in layer.bind().spec.routes] == wanted
    held = [t for t in layer.bind().tensors if t.dtype == E4M3]
    assert {t.data_ptr() for t in held} == {layer.weight.data_ptr()}
    for m in (1, 7, 16, 17, 64, 65, 300, bounds.W8A8):
        x = torch.randn(m, 208).bfloat16()
        assert w8_fake.error(layer(x), exact(w, x, layer.bias)) < 3e-3
    quantizer = "w8_quantize_row" if static is None else "w8_quantize_tensor"
    assert [launch[:2] for launch in hopper.launched[-6:]] == [
        *((quantizer, 65), ("w8_gemm", 65)),
        *((quantizer, 300), ("w8_gemm", 300)),
        *((quantizer, bounds.W8A8), ("w8_gemm", bounds.W8A8)),
    ]


def test_a_layer_with_block_scales_has_it_for_any_number_of_tokens_and_holds_its_weight_once(hopper):
    w = weights(264, 400, "block128")
    layer = FP8Linear.from_weights(w, torch.randn(264).bfloat16())
    assert [(r.backend, r.activation) for r in layer.bind().spec.routes] == [("w8a8", "fp8")]
    held = layer.bind().tensors
    assert {t.data_ptr() for t in held if t.dtype == E4M3} == {layer.weight.data_ptr()}
    assert {t.data_ptr() for t in held if t.dtype == torch.float32} == {layer.weight_scale_inv.data_ptr()}
    for m in (1, 17, 64, 65, 128, 129, 300):
        x = torch.randn(m, 400).bfloat16()
        assert w8_fake.error(layer(x), exact(w, x, layer.bias)) < 3e-3
    assert [launch[:2] for launch in hopper.launched[-4:]] == [
        *(("w8_quantize_block", 129), ("w8_gemm", 129)),
        *(("w8_quantize_block", 300), ("w8_gemm", 300)),
    ]


def test_raw_operators_do_not_go_to_it(hopper):
    a, b = (formats.fp8_quantize(torch.randn(rows, 64), "row") for rows in (5, 48))
    chosen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            routes, "plan_for", lambda backend, asked, prepared: chosen.append((backend.name, asked.raw)) or None
        )
        patch.setattr(routes, "launch", lambda *_: None)
        ops.fp8_gemm(a.data, b.data, a.scale, b.scale, scaling="row")
    assert chosen == [("cutlass", True)]


def test_no_tokens_launch_nothing(hopper):
    layer = FP8Linear.from_weights(weights(80, 208), activation="fp8")
    assert layer(torch.zeros(0, 208).bfloat16()).shape == (0, 80)
    assert hopper.launched == []
