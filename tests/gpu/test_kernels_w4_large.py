"""W4P weights by FP8 and 16-bit activations on SM90: e4m3 bit for bit, the GEMM per tile against what it defines."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from fp4dispatch import formats, jit
from fp4dispatch.jit.catalog.manifest import installed
from tests import many_tokens
from tests.gpu.sm90 import OUT_DTYPES, SM90, needs_sm90
from tests.gpu.test_kernels_quantize import any_bits, every_finite_pattern, near_ties
from tests.gpu.tiles import bits, sees_one_wrong_element
from tests.gpu.w4_packed import (
    MANY_TO_PACK,
    Problem,
    activations,
    check_capture,
    check_no_tokens,
    check_nothing_around_enters,
    check_pdl_chain,
    check_scales,
    check_sums_of_one_sign,
    dense,
    empty_packed,
    packer,
    weight,
)
from tests.w4_model import pack_activations

pytestmark = [pytest.mark.gpu, needs_sm90]

VARIANTS = tuple(v for v in installed().kernel("w4_gemm_sm90").variants if not v.startswith("even_"))
"""Even ones: test_kernels_even.py."""
LAUNCHES = (
    *(None, (1, 1, 1), (2, 1, 2), (4, 1, 1), (1, 2, 1), (2, 2, 1), (4, 2, 1)),
    *((1, 3, 1), (2, 3, 2), (1, 4, 1), (2, 4, 1), (1, 8, 1)),
)
SHAPES = (
    (1, 8, 16),
    (65, 72, 48),
    (77, 136, 208),
    (127, 264, 1040),
    (200, 520, 2064),
    (333, 392, 528),
    (256, 256, 256),
)
FEW = ((7, 200, 144), (16, 136, 528), (17, 264, 1040), (32, 520, 2064), (33, 264, 400), (64, 136, 1040))
AT_ENDS = {"32": FEW} | {
    str(t): ((t - 1, 136, 208), (t, 264, 400), (t + 1, 72, 1040), (2 * t + 9, 136, 528))
    for t in (96, 112, 144, 160, 176, 192, 208)
}
"""Around the ends of a tile, which is written in pieces of tokens; the last M ends in a piece of 9."""


@functools.cache
def gemm(variant):
    return many_tokens.Gemm(jit.load("w4_gemm_sm90", variant, SM90).module, "w4_gemm_sm90", variant, sms())


def dtype_of(variant):
    return OUT_DTYPES[variant.split("_")[1]]


def is_fp8(variant):
    return variant.startswith("a8")


EXACT = [variant for variant in VARIANTS if not is_fp8(variant)]


def sms():
    return torch.cuda.get_device_properties(0).multi_processor_count


def most_split(variant, k):
    """Parts of K: each has a stage."""
    tile = many_tokens.tile_of("w4_gemm_sm90", variant)
    return min(tile.most_split, -(-k // tile.stage_k))


SIZES_TO_PACK = (
    *((1, 16), (13, 208), (65, 144), (40, 2064), (3, 8208), (9, 16_400), (3, 40_000), (1, 140_000), (110, 40_000)),
    *((300, 4096), (600, 4096), (1500, 4112), (90, 28_672), *MANY_TO_PACK),
)
"""Every number of words in registers, of blocks that share a token, and rows that do not fit the registers."""
NEAR_TIES = (0.013, 2.0**-30, 2.0**-20 * (2 - 2.0**-23), 2.0**-7 * (1 + 2.0**-23), (1.5 - 2.0**-23) / 8, 2.0**70)
"""Static scales; of the middle ones quotients lie right beside ties."""


def check_packing(x, scales):
    """Bits of a tensor on the GPU, packed by row and with each of some static scales."""
    on_cpu = x.cpu()
    packed, scale, _ = activations(True, x)
    expected = formats.fp8_quantize(on_cpu, "row")
    assert torch.equal(packed.cpu(), pack_activations(expected.data))
    assert torch.equal(bits(scale.cpu()), bits(expected.scale))
    for static in scales:
        packed = empty_packed(*x.shape)
        packer().w4_quantize_tensor(x, packed, torch.full((1,), static, device="cuda"), False)
        exact = formats.fp8_quantize(on_cpu, "tensor", torch.tensor(static)).data
        assert torch.equal(packed.cpu(), pack_activations(exact)), f"static scale {static}"


@pytest.mark.parametrize("dtype", OUT_DTYPES.values(), ids=str)
@pytest.mark.parametrize("make", [any_bits, every_finite_pattern, near_ties], ids=lambda make: make.__name__)
def test_packing_any_bits_and_near_ties(dtype, make):
    x = make(64, 1040, dtype) if make is any_bits else make(dtype)
    check_packing(x.cuda(), (*NEAR_TIES, torch.inf))


@pytest.mark.parametrize("dtype", OUT_DTYPES.values(), ids=str)
@pytest.mark.parametrize(("m", "k"), SIZES_TO_PACK)
def test_packing_bit_for_bit(dtype, m, k):
    draw = torch.Generator().manual_seed(m + k)
    wide = torch.full((m, k + 24), torch.nan, dtype=dtype)
    x = wide[:, 8 : 8 + k]
    x.copy_(torch.randn(m, k, generator=draw) * 3)
    x[m // 2] = 0
    x[m // 2, 0] = -0.0
    x[-1, k // 2] = torch.inf
    if m > 2:
        x[0, k - 1], x[0, 3] = torch.nan, -torch.inf
    check_packing(wide.cuda()[:, 8 : 8 + k], (0.013, 2.0**-30))


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_tile_and_the_same_bits_twice(variant, launch):
    for m, n, k in (*SHAPES, *AT_ENDS.get(variant.split("_")[2], ())):
        if launch is not None and launch[1] > most_split(variant, k):
            continue
        problem = Problem(is_fp8(variant), dtype_of(variant), (m, n, k))
        if launch is None:
            problem.run(gemm(variant).planned)
        else:
            problem.run(gemm(variant).shaped, list(launch))
        problem.check(f"{variant} {launch}")
        problem.check_norms(f"{variant} {launch}")


@pytest.mark.parametrize(
    ("launch", "rounds", "parts"),
    [
        *(((1, split, 8), 2, parts) for split in (2, 3, 4, 8) for parts in ("few", "many")),
        *(((1, 2, 1), 1, "few"), ((1, 2, 2), 5, "few"), ((2, 2, 8), 2, "many"), ((2, 4, 1), 1, "few")),
    ],
    ids=str,
)
@pytest.mark.parametrize("variant", [v for v in VARIANTS if "bf16" in v or v == "a8_fp16_176"])
def test_whole_tiles_and_then_parts_of_k_and_the_same_bits_twice(variant, launch, rounds, parts):
    """In one launch: a CTA's ring goes on from whole tiles into its part of the last one."""
    k = 1040 if launch[1] > 4 else 528
    if launch[1] > most_split(variant, k):
        pytest.skip("a tile of 32 tokens has no 8 parts of K")
    m, n = many_tokens.whole_tiles_first(gemm(variant).tile, launch, sms(), rounds, parts)
    problem = Problem(is_fp8(variant), dtype_of(variant), (m, n, k))
    problem.run(gemm(variant).shaped, list(launch), times=3)
    problem.check(f"{variant} {launch} {rounds} rounds, {parts} parts")
    problem.check_norms(f"{variant} {launch} {rounds} rounds, {parts} parts")


@pytest.mark.parametrize(
    "variant",
    [*(f"a8_bf16_{tile}" for tile in (96, 112, 128, 144, 160, 176, 192, 208)), "a16_bf16_128x128", "a16_bf16_240"],
)
def test_a_plan_that_does_whole_tiles_first(variant):
    m, n = many_tokens.whole_tiles_first(gemm(variant).tile, (1, 2), sms(), 4, "few")
    k = 4112
    shape = gemm(variant).plan(m, n, k).shape
    assert (shape.multicast, shape.split > 1, shape.rounds > 0) == (1, True, True)
    problem = Problem(is_fp8(variant), dtype_of(variant), (m, n, k))
    problem.run(gemm(variant).planned, times=3)
    problem.check(f"{variant} {shape}")


@pytest.mark.parametrize("variant", [v for v in VARIANTS if is_fp8(v)])
def test_one_static_scale_and_scales_that_are_subnormal_or_zero(variant):
    check_scales(gemm(variant).planned, dtype_of(variant), (16, 33, 100), variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_chain_under_pdl_has_the_bits_of_one_without(variant):
    for m in (1, 16, 32, 64) if variant.endswith("_32") else (40, 65, 130, 200, 300):
        check_pdl_chain(gemm(variant).planned, is_fp8(variant), m, dtype_of(variant))


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.startswith("a8_fp16")])
def test_truncation_takes_little_off_sums_of_one_sign(variant):
    check_sums_of_one_sign(gemm(variant).shaped, (1, 1, 1), variant)


def test_long_k_and_many_tiles():
    """More tiles than multiprocessors (a persistent grid's ring runs on into the next tile), and long K."""
    for variant, (m, n, k) in itertools.product(
        (
            *(f"a8_bf16_{tile}" for tile in (32, 64, 96, 112, 128, 144, 160, 176, 192, 208)),
            *(v for v in EXACT if "bf16" in v),
        ),
        ((1024, 5120, 512), (300, 256, 14336)),
    ):
        x = torch.randn(m, k, generator=torch.Generator("cuda").manual_seed(k), device="cuda").bfloat16()
        given, scale, exact_x = activations(is_fp8(variant), x)
        codes, block_scale, w = weight(n, k)
        alpha = torch.full((1,), 2.0**-12, device="cuda")
        out = torch.full((m, n), torch.nan, device="cuda", dtype=torch.bfloat16)
        gemm(variant).planned(given, scale, w, alpha, None, out, True)
        exact = exact_x @ dense(is_fp8(variant), codes, block_scale).t() * 2.0**-12
        tiles = (out.double() - exact).square().unflatten(1, (-1, 128)).sum(dim=(0, 2)).sqrt()
        sizes = exact.square().unflatten(1, (-1, 128)).sum(dim=(0, 2)).sqrt()
        assert float((tiles / sizes).max()) < 8e-3


def test_a_token_that_is_not_finite_stays_alone():
    x = torch.randn(70, 256, device="cuda").bfloat16()
    x[3, 7] = torch.nan
    fp8 = (f"a8_bf16_{tile}" for tile in (32, 64, 96, 112, 144, 160, 176, 192, 208))
    for variant in (*fp8, "a16_bf16_64x128", "a16_bf16_208"):
        given, scale, _ = activations(is_fp8(variant), x)
        out = torch.zeros(70, 128, device="cuda", dtype=torch.bfloat16)
        gemm(variant).planned(given, scale, weight(128, 256)[2], torch.ones(1, device="cuda"), None, out, False)
        assert out[3].isnan().all()
        assert out[torch.arange(70, device="cuda") != 3].isfinite().all()


@pytest.mark.parametrize("launch", [None, (1, 1, 1), (2, 1, 2), (4, 2, 1), (1, 3, 1)], ids=str)
@pytest.mark.parametrize("variant", EXACT)
def test_nothing_around_16_bit_activations_enters(variant, launch):
    call, more = (gemm(variant).planned, ()) if launch is None else (gemm(variant).shaped, (list(launch),))
    for m, n, k in ((1, 72, 16), (65, 136, 208), (77, 264, 272), (300, 392, 1040), (256, 264, 192)):
        if launch is not None and launch[1] > most_split(variant, k):
            continue
        check_nothing_around_enters(Problem(False, dtype_of(variant), (m, n, k)), call, *more)


@pytest.mark.parametrize("stride", [0, 8, 200])
def test_rows_of_16_bit_activations_that_share_memory_are_refused(stride):
    """``expand`` and ``as_strided`` give such; TMA takes none."""
    problem = Problem(False, torch.bfloat16, (77, 264, 208))
    problem.x = torch.randn(208 + 76 * 200, device="cuda").bfloat16().as_strided((77, 208), (stride, 1))
    problem.out.fill_(torch.nan)
    with pytest.raises(ValueError, match=f"x: rows are {stride} elements apart, needed at least K"):
        problem.run(gemm("a16_bf16_128x128").planned)
    assert problem.out.isnan().all()


def test_16_bit_activations_may_change_where_they_lie():
    """One address, and what lies there is now of other sizes or strides, now others' values."""
    memory = torch.randn(200 * 416, device="cuda").bfloat16()
    for m, k, stride in ((200, 208, 208), (100, 208, 416), (200, 208, 416), (70, 208, 208), (200, 400, 416)) * 2:
        memory.copy_(torch.randn_like(memory))
        problem = Problem(False, torch.bfloat16, (m, 264, k))
        problem.x = memory.as_strided((m, k), (stride, 1))
        problem.exact_x = problem.x.double()
        problem.run(gemm("a16_bf16_128x128").planned)
        problem.check(f"stride {stride}")


@pytest.mark.parametrize("variant", ["a16_bf16_64x128", "a16_bf16_240"])
def test_no_16_bit_tokens(variant):
    check_no_tokens(gemm(variant).planned, fp8=False)
    check_no_tokens(gemm(variant).shaped, [1, 1, 1], fp8=False)


@pytest.mark.parametrize("variant", ["a8_bf16_32", "a8_bf16_128"])
def test_capture_and_no_tokens(variant):
    check_capture(gemm(variant).planned, 130)
    check_no_tokens(gemm(variant).planned)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": lambda t: t[:1]}, r"x: size of dimension 0 is 1, needed 2 \(ceil\(K/128\)\)"),
        ({"x": lambda t: t[:, :8].contiguous()}, r"x: size of dimension 1 is 8, needed 9 \(ceil\(M/8\)\)"),
        ({"w": lambda t: t[:1]}, r"w: size of dimension 0 is 1, needed 2 \(ceil\(N/64\)\)"),
        ({"x_scale": lambda t: None}, "x_scale: None, needed the scales"),
        ({"x_scale": lambda t: t[:5]}, r"x_scale: has 5 elements, needed 1 or 70"),
        ({"out": lambda t: t.half()}, "out: dtype is float16, needed bfloat16"),
        ({"shape": lambda t: [3, 1, 1, 1, 0, 1]}, "shape: multicast is 3, needed 1, 2 or 4"),
        ({"shape": lambda t: [4, 4, 1, 1, 0, 1]}, "shape: multicast . split . sharing is 16, needed at most 8"),
        ({"shape": lambda t: [1, 4, 1, 1, 0, 1]}, "shape: split is 4, needed at most 2"),
        ({"shape": lambda t: [1, 2, 1, 1, 0, 1]}, "0 whole tiles and split up to 1, but there are 2 tiles"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    problem = Problem(True, torch.bfloat16, (70, 128, 256))
    given = problem.operands() | {"shape": list(many_tokens.ONE_CLUSTER)}
    for name, wrong in change.items():
        given[name] = wrong(given[name])
    with pytest.raises((ValueError, TypeError), match=message):
        gemm("a8_bf16_64").entry(*given.values(), False)
    assert problem.out.isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": lambda t: t.view(torch.uint8)}, "x: dtype is uint8, needed bfloat16 or float16"),
        ({"x": lambda t: t.half()}, "x: dtype is float16, needed bfloat16"),
        ({"x": lambda t: t[:69]}, r"x: size of dimension 0 is 69, needed 70 \(M\)"),
        ({"x": lambda t: t[:, :192]}, "x: K is 192, but w has 4 chunks of 64 along K"),
        ({"x": lambda t: t[:, :200]}, "K is 200, needed a multiple of 16"),
        ({"x": lambda t: t.t().contiguous().t()}, "x: the last dimension has stride 70, needed 1"),
        ({"x": lambda t: torch.cat([t, t[:, :4]], 1)[:, :208]}, "row stride of x is 212, needed a multiple of 8"),
        ({"x": lambda t: torch.cat([t, t], 1)[:, 4:212]}, "x: address is 8 past a multiple of 16 bytes"),
        ({"x": lambda t: t.cpu()}, "x: is not on a CUDA device"),
        ({"x_scale": lambda t: torch.ones(70, device="cuda")}, "x_scale: a tensor, but 16-bit activations have no"),
    ],
)
def test_wrong_16_bit_activations_are_refused(change, message):
    problem = Problem(False, torch.bfloat16, (70, 128, 208))
    given = problem.operands()
    for name, wrong in change.items():
        given[name] = wrong(given[name])
    with pytest.raises((ValueError, TypeError), match=message):
        gemm("a16_bf16_64x128").planned(*given.values(), False)
    assert problem.out.isnan().all()


def test_a_tile_of_32_tokens_refuses_8_parts_of_k():
    problem = Problem(True, torch.bfloat16, (21, 264, 2064))
    with pytest.raises(ValueError, match="shape: split is 8, needed at most 4"):
        gemm("a8_bf16_32").entry(*problem.operands().values(), [1, 8, 1, 1, 0, 1], False)
    assert problem.out.isnan().all()


def test_the_check_sees_one_wrong_element():
    problem = Problem(True, torch.bfloat16, (33, 264, 400))
    problem.run(gemm("a8_bf16_32").planned)
    sees_one_wrong_element(problem)
