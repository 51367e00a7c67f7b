"""W4P weights by FP8 and 16-bit activations on SM90: packing bit for bit, the GEMM per tile against what it defines."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from fp4dispatch import formats, jit
from fp4dispatch.backends.folding import FOLD, fold_e4m3
from fp4dispatch.backends.w4_layout import pack_w4p
from fp4dispatch.jit.manifest import installed
from tests.gpu.sm90 import OUT_DTYPES, SM90, needs_sm90
from tests.gpu.tiles import bits, wrong_tiles
from tests.w4_model import pack_activations

pytestmark = [pytest.mark.gpu, needs_sm90]

VARIANTS = tuple(installed().kernel("w4_gemm_sm90").variants)
LAUNCHES = (None, (1, 1, 1), (2, 1, 2), (4, 1, 1), (1, 2, 1), (2, 2, 1), (2, 4, 1), (1, 8, 1), (4, 2, 1))
SHAPES = (
    (1, 8, 16),
    (65, 72, 48),
    (77, 136, 208),
    (127, 264, 1040),
    (200, 520, 2064),
    (333, 392, 528),
    (256, 256, 256),
)


def packer():
    return jit.load("w4_activations", "any", SM90).module


@functools.cache
def gemm(variant):
    return jit.load("w4_gemm_sm90", variant, SM90).module


def dtype_of(variant):
    return OUT_DTYPES[variant.split("_")[1]]


def is_fp8(variant):
    return variant.startswith("a8")


@functools.cache
def weight(n, k):
    """Codes, scales (subnormal ones and zero too) and packed, on the GPU."""
    draw = torch.Generator().manual_seed(n * k)
    codes = torch.randint(256, (n, k // 2), generator=draw, dtype=torch.uint8).cuda()
    scale = torch.randint(127, (n, k // 16), generator=draw).to(torch.uint8).cuda().view(torch.float8_e4m3fn)
    return codes, scale, pack_w4p(codes, scale)


def dense(variant, n, k):
    codes, scale, _ = weight(n, k)
    if is_fp8(variant):
        return fold_e4m3(codes, scale).double() * FOLD
    return formats.decode_e2m1(formats.unpack_e2m1(codes)).double() * scale.double().repeat_interleave(16, 1)


def activations(variant, x):
    """(packed, scale or None, what they stand for in float64)."""
    m, k = x.shape
    block = 128 if is_fp8(variant) else 64
    packed = torch.full((-(-k // block), -(-m // 8), 1024), 0xFF, device="cuda", dtype=torch.uint8)
    if not is_fp8(variant):
        packer().w4_pack(x, packed, False)
        return packed, None, x.double()
    scale = torch.full((m,), torch.nan, device="cuda")
    packer().w4_quantize_row(x, packed, scale, False)
    q = formats.fp8_quantize(x, "row")
    return packed, scale, q.data.double() * q.scale.double().view(-1, 1)


@pytest.mark.parametrize("dtype", OUT_DTYPES.values(), ids=str)
@pytest.mark.parametrize(("m", "k"), [(1, 16), (13, 208), (65, 144), (40, 2064), (300, 272), (3, 40_000)])
def test_packing_bit_for_bit(dtype, m, k):
    draw = torch.Generator().manual_seed(m + k)
    wide = torch.full((m, k + 24), torch.nan, dtype=dtype)
    x = wide[:, 8 : 8 + k]
    x.copy_(torch.randn(m, k, generator=draw) * 3)
    x[m // 2] = 0
    x[-1, k // 2] = torch.inf
    on_gpu = wide.cuda()[:, 8 : 8 + k]
    for variant, expected in (("a16", x), ("a8", formats.fp8_quantize(x, "row").data)):
        packed, scale, _ = activations(variant, on_gpu)
        assert torch.equal(packed.cpu(), pack_activations(expected))
        if scale is not None:
            assert torch.equal(bits(scale.cpu()), bits(formats.fp8_quantize(x, "row").scale))
    for static in (torch.tensor(0.013), torch.tensor(2.0**-30)):
        packed = torch.full((-(-k // 128), -(-m // 8), 1024), 0xFF, device="cuda", dtype=torch.uint8)
        packer().w4_quantize_tensor(on_gpu, packed, static.cuda().view(1), False)
        assert torch.equal(packed.cpu(), pack_activations(formats.fp8_quantize(x, "tensor", static).data))


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_tile_and_the_same_bits_twice(variant, launch):
    dtype = dtype_of(variant)
    for m, n, k in SHAPES:
        stages = -(-k // (128 if is_fp8(variant) else 64))
        if launch is not None and launch[1] > stages:
            continue
        draw = torch.Generator("cuda").manual_seed(m)
        x = torch.randn(m, k, generator=draw, device="cuda").to(dtype)
        packed, scale, exact_x = activations(variant, x)
        alpha = torch.rand(n if m % 2 else 1, generator=draw, device="cuda") * 2.0**-9 + 2.0**-10
        bias = torch.randn(n, generator=draw, device="cuda").to(dtype) if m % 3 else None
        guarded = torch.full((m + 2, n), torch.nan, device="cuda", dtype=dtype)
        out = guarded[1:-1]
        results = []
        for pdl in (False, True):
            out.fill_(torch.nan)
            operands = (packed, scale, weight(n, k)[2], alpha, bias, out)
            if launch is None:
                gemm(variant).w4_gemm(*operands, pdl)
            else:
                gemm(variant).w4_gemm_shaped(*operands, list(launch), pdl)
            results.append(out.clone())
        assert torch.equal(bits(results[0]), bits(results[1]))
        assert guarded[0].isnan().all()
        assert guarded[-1].isnan().all()
        w = dense(variant, n, k) * alpha.double().view(-1, 1)
        exact = exact_x @ w.t() + (0 if bias is None else bias.double())
        # An MMA of 32 k cuts up to 2^-13 off an FP8 sum, which stays within 4 times its root-sum-square.
        sums = (exact_x.square() @ w.t().square()).sqrt() * 4 * (k / 32 + 2) * 2.0**-13
        allowed = sums if is_fp8(variant) else 2.0**-17 * (exact_x.abs() @ w.t().abs())
        unit = torch.finfo(dtype).eps
        wrong = ~((out.double() - exact).abs() <= unit * exact.abs() + allowed + 2.0**-24)
        bad, of = wrong_tiles(wrong)
        assert not bad, f"{variant} {launch} M={m} N={n} K={k}: {bad} of {of} tiles wrong"


def test_long_k_and_many_tiles():
    """More tiles than multiprocessors (a persistent grid's ring runs on into the next tile), and long K."""
    for variant, (m, n, k) in itertools.product(
        ("a8_bf16_64", "a8_bf16_192", "a16_bf16_128"), ((1024, 5120, 512), (300, 256, 14336))
    ):
        x = torch.randn(m, k, generator=torch.Generator("cuda").manual_seed(k), device="cuda").bfloat16()
        packed, scale, exact_x = activations(variant, x)
        alpha = torch.full((1,), 2.0**-12, device="cuda")
        out = torch.full((m, n), torch.nan, device="cuda", dtype=torch.bfloat16)
        gemm(variant).w4_gemm(packed, scale, weight(n, k)[2], alpha, None, out, True)
        exact = exact_x @ dense(variant, n, k).t() * 2.0**-12
        tiles = (out.double() - exact).square().unflatten(1, (-1, 128)).sum(dim=(0, 2)).sqrt()
        sizes = exact.square().unflatten(1, (-1, 128)).sum(dim=(0, 2)).sqrt()
        assert float((tiles / sizes).max()) < 8e-3


def test_a_token_that_is_not_finite_stays_alone():
    x = torch.randn(70, 256, device="cuda").bfloat16()
    x[3, 7] = torch.nan
    for variant in ("a8_bf16_64", "a16_bf16_64"):
        packed, scale, _ = activations(variant, x)
        out = torch.zeros(70, 128, device="cuda", dtype=torch.bfloat16)
        gemm(variant).w4_gemm(packed, scale, weight(128, 256)[2], torch.ones(1, device="cuda"), None, out, False)
        assert out[3].isnan().all()
        assert out[torch.arange(70, device="cuda") != 3].isfinite().all()


def test_capture_and_no_tokens():
    variant = "a8_bf16_128"
    x = torch.randn(130, 512, device="cuda").bfloat16()
    packed, scale, _ = activations(variant, x)
    alpha, out = torch.ones(1, device="cuda"), torch.zeros(130, 256, device="cuda", dtype=torch.bfloat16)
    w = weight(256, 512)[2]
    gemm(variant).w4_gemm(packed, scale, w, alpha, None, out, True)
    expected = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packer().w4_quantize_row(x, packed, scale, True)
        gemm(variant).w4_gemm(packed, scale, w, alpha, None, out, True)
    packed.fill_(0xFF)
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(bits(out), bits(expected))
    gemm(variant).w4_gemm(packed[:, :0].contiguous(), scale[:0], w, alpha, None, out[:0], False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": lambda t: t[:1]}, r"x: size of dimension 0 is 1, needed 2 \(ceil\(K/128\)\)"),
        ({"x": lambda t: t[:, :8].contiguous()}, r"x: size of dimension 1 is 8, needed 9 \(ceil\(M/8\)\)"),
        ({"w": lambda t: t[:1]}, r"w: size of dimension 0 is 1, needed 2 \(ceil\(N/64\)\)"),
        ({"x_scale": lambda t: None}, "x_scale: None, needed the scales"),
        ({"x_scale": lambda t: t[:5]}, r"x_scale: has 5 elements, needed 1 or 70"),
        ({"out": lambda t: t.half()}, "out: dtype is float16, needed bfloat16"),
        ({"shape": lambda t: [3, 1, 1]}, "shape: multicast is 3, needed 1, 2 or 4"),
        ({"shape": lambda t: [4, 4, 1]}, "shape: multicast . split is 16, needed at most 8"),
        ({"shape": lambda t: [1, 4, 1]}, "shape: split is 4, needed at most 2"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    variant = "a8_bf16_64"
    packed, scale, _ = activations(variant, torch.randn(70, 256, device="cuda").bfloat16())
    given = {
        "x": packed,
        "x_scale": scale,
        "w": weight(128, 256)[2],
        "alpha": torch.ones(1, device="cuda"),
        "bias": None,
        "out": torch.full((70, 128), 3.0, device="cuda", dtype=torch.bfloat16),
        "shape": [1, 1, 1],
    }
    for name, wrong in change.items():
        given[name] = wrong(given[name])
    with pytest.raises((ValueError, TypeError), match=message):
        gemm(variant).w4_gemm_shaped(*given.values(), False)
    assert (given["out"] == 3).all()
