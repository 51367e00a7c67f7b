"""The quantisers against formats.py, bit for bit."""

from __future__ import annotations

import pytest
import torch

from fp4dispatch import formats, jit
from fp4dispatch.problem.arch import Arch
from tests.gpu.tiles import bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

SHAPES = ((1, 16), (1, 4096), (2, 14336), (7, 144), (33, 1040), (127, 208), (128, 256), (129, 272), (300, 2064))
DTYPES = (torch.bfloat16, torch.float16)
E4M3 = torch.float8_e4m3fn


def load(kernel):
    return jit.load(kernel, "any", Arch(*torch.cuda.get_device_capability())).module


def ordinary(m, k, dtype):
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m * k)) * 3
    x[m // 2, :16] = 0  # a block of zeros
    x[0, k // 2] = 40  # an outlier
    return x.to(dtype)


def any_bits(m, k, dtype):
    """Every sign, exponent and payload, so NaN, Inf and subnormals too."""
    raw = torch.randint(-(2**15), 2**15, (m, k), generator=torch.Generator().manual_seed(m + k)).to(torch.int16)
    return raw.view(dtype)


def every_finite_pattern(dtype):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return torch.where(x.isfinite(), x, torch.zeros_like(x)).view(256, 256)


def near_ties(dtype):
    """Rows of one exponent and one amax each: near-ties of every significand against every scale of a row."""
    exponent, mantissa = (7, 7) if dtype == torch.bfloat16 else (4, 10)
    rows = torch.arange(2**mantissa)[:: max(1, 2**mantissa // 256), None]
    top = (1 + rows / 2**mantissa) * 2**exponent
    below = (1 + torch.arange(2**mantissa) / 2**mantissa)[None]
    x = torch.cat([torch.where(below * 2**e <= top, below * 2**e, 0.0) for e in range(exponent - 11, exponent)], 1)
    x[:, -1:] = top
    return x.to(dtype)


def inputs():
    for dtype in DTYPES:
        for m, k in SHAPES:
            yield ordinary(m, k, dtype)
            yield any_bits(m, k, dtype)
        yield every_finite_pattern(dtype)
        yield near_ties(dtype)


def poisoned(*shape, dtype):
    """A buffer of 0xA5 bytes."""
    size = torch.empty(shape, dtype=dtype, device="meta")
    return (
        torch.full((size.numel() * size.element_size(),), 0xA5, device="cuda", dtype=torch.uint8)
        .view(dtype)
        .view(shape)
    )


def assert_same(what, got, expected, x):
    wrong = bits(got.cpu()) != bits(expected)
    assert not wrong.any(), f"{what} of {x.dtype} {list(x.shape)}: {int(wrong.sum())} of {wrong.numel()} differ"


def test_nvfp4_equals_formats():
    module = load("nvfp4_quantize")
    for x in inputs():
        m, k = x.shape
        for global_scale in (formats.nvfp4_global_scale(x), torch.tensor(0.37), torch.tensor(2.0**-120)):
            q = poisoned(m, k // 2, dtype=torch.uint8)
            sf = poisoned(formats.round_up(m, 128), formats.round_up(k // 16, 4), dtype=E4M3)
            module.nvfp4_quantize(x.cuda(), global_scale.cuda(), q, sf, False)
            expected = formats.nvfp4_quantize(x, global_scale, sf_layout="128x4")
            assert_same("block scales", sf, expected.sf, x)
            assert_same("codes", q, expected.data, x)


def test_fp8_row_equals_formats():
    module = load("fp8_quantize")
    for x in (*inputs(), ordinary(3, 40_000, torch.bfloat16)):  # the last does not fit the registers of a block
        q, scale = poisoned(*x.shape, dtype=E4M3), poisoned(x.shape[0], dtype=torch.float32)
        module.fp8_quantize_row(x.cuda(), q, scale, False)
        expected = formats.fp8_quantize(x, "row")
        assert_same("scales", scale, expected.scale, x)
        assert_same("codes", q, expected.data, x)


def test_division_is_exact_for_many_scales():
    """Every bf16 and fp16 number by 200 scales across the exponents: near-ties of e4m3 and e2m1 included."""
    fp8, nvfp4 = load("fp8_quantize"), load("nvfp4_quantize")
    generator = torch.Generator().manual_seed(0)
    exponents = torch.linspace(-124, 126, 200)
    scales = torch.exp2(exponents) * (1 + torch.rand(200, generator=generator))
    # Quotients right beside ties; the first once gave a wrong code at 2^-10 (its reciprocal was a bit too small).
    near_ties = [(2 - 2**-23) * 2.0**e for e in range(-40, 41, 8)] + [
        1 + 2**-23,
        1.5 - 2**-23,
        1 / 3,
        2.0**64,
        2.0**100,
    ]
    scales = torch.cat([scales, torch.tensor([*near_ties, torch.inf])])
    for dtype in DTYPES:
        x = every_finite_pattern(dtype)
        for scale in scales:
            q = poisoned(*x.shape, dtype=E4M3)
            fp8.fp8_quantize_tensor(x.cuda(), q, scale.cuda(), False)
            assert_same(f"codes at scale {scale}", q, formats.fp8_quantize(x, "tensor", scale).data, x)
            packed, sf = poisoned(256, 128, dtype=torch.uint8), poisoned(256, 16, dtype=E4M3)
            nvfp4.nvfp4_quantize(x.cuda(), scale.cuda(), packed, sf, False)
            expected = formats.nvfp4_quantize(x, scale, sf_layout="128x4")
            assert_same(f"block scales at {scale}", sf, expected.sf, x)
            assert_same(f"codes at {scale}", packed, expected.data, x)


def test_fp8_tensor_equals_formats():
    module = load("fp8_quantize")
    for x in inputs():
        for scale in (torch.tensor(0.013), torch.tensor(0.0), torch.tensor(torch.nan), torch.tensor(torch.inf)):
            q = poisoned(*x.shape, dtype=E4M3)
            module.fp8_quantize_tensor(x.cuda(), q, scale.cuda(), False)
            assert_same(f"codes at scale {scale}", q, formats.fp8_quantize(x, "tensor", scale).data, x)


def check_1x128(x, layout="row-major", q_offset=0):
    m, k = x.shape
    blocks = -(-k // 128)
    if layout == "gemm":
        scale = poisoned(blocks, formats.round_up(m, 4), dtype=torch.float32).t()[:m]
    else:
        scale = poisoned(m, blocks, dtype=torch.float32)
    room = poisoned(q_offset + m * k + 16, dtype=E4M3)
    q = room[q_offset:][: m * k].view(m, k)
    load("fp8_quantize").fp8_quantize_1x128(x.cuda(), q, scale, False)
    expected = formats.fp8_quantize(x, "1x128")
    assert_same("scales", scale, expected.scale, x)
    assert_same("codes", q, expected.data, x)
    around = torch.cat([room[:q_offset], room[q_offset + m * k :]])
    assert bool((around.view(torch.uint8) == 0xA5).all()), "bytes beside the codes were written"


@pytest.mark.parametrize("layout", ["row-major", "gemm"])
def test_fp8_1x128_equals_formats(layout):
    for x in inputs():
        check_1x128(x, layout)


@pytest.mark.parametrize("q_offset", [0, 8])
@pytest.mark.parametrize(("m", "k"), [(300, 4096), (300, 4104), (1021, 4240), (1021, 4232), (3, 200_000)])
def test_fp8_1x128_of_several_vectors_a_thread_equals_formats(m, k, q_offset):
    """One vector a thread, two, and twice two; codes that start on 8 bytes, and rows of them that do."""
    for x in (ordinary(m, k, torch.bfloat16), any_bits(m, k, torch.float16)):
        check_1x128(x, q_offset=q_offset)


def test_strided_rows_and_no_rows():
    module = load("fp8_quantize")
    wide = ordinary(33, 304, torch.bfloat16).cuda()
    x = wide[:, 16:288]
    q, scale = poisoned(33, 272, dtype=E4M3), poisoned(33, dtype=torch.float32)
    module.fp8_quantize_row(x, q, scale, False)
    assert_same("codes", q, formats.fp8_quantize(x.cpu(), "row").data, x)
    module.fp8_quantize_row(x[:0], q[:0], scale[:0], False)
    nvfp4 = load("nvfp4_quantize")
    empty = torch.empty(0, device="cuda", dtype=torch.uint8)
    nvfp4.nvfp4_quantize(x[:0], scale[:1], q[:0, :136].view(torch.uint8), empty, False)


def test_capture_and_replay():
    module = load("nvfp4_quantize")
    x, scale = ordinary(129, 272, torch.bfloat16), torch.tensor(0.37)
    static = torch.zeros_like(x, device="cuda")
    q = poisoned(129, 136, dtype=torch.uint8)
    sf = poisoned(256, 20, dtype=E4M3)
    device_scale = scale.cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        module.nvfp4_quantize(static, device_scale, q, sf, False)
    static.copy_(x)
    graph.replay()
    expected = formats.nvfp4_quantize(x, scale, sf_layout="128x4")
    assert_same("codes", q, expected.data, x)
    assert_same("block scales", sf, expected.sf, x)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(4, 24, dtype=torch.bfloat16), "K is 24, needed a multiple of 16"),
        (torch.zeros(4, 32), "x: dtype is float32"),
        (torch.zeros(32, 4, dtype=torch.bfloat16).t(), "x: the last dimension has stride"),
    ],
)
def test_wrong_input_is_refused(x, message):
    module = load("nvfp4_quantize")
    q = poisoned(x.shape[0], x.shape[1] // 2, dtype=torch.uint8)
    sf = poisoned(128, formats.round_up(x.shape[1] // 16, 4), dtype=E4M3)
    with pytest.raises((ValueError, TypeError), match=message):
        module.nvfp4_quantize(x.cuda(), torch.ones(1, device="cuda"), q, sf, False)
    assert (q == 0xA5).all()
