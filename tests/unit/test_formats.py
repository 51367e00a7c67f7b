"""What formats.py promises in its docstrings, on values worked out by hand."""

from __future__ import annotations

import pytest
import torch

from fp4dispatch import formats as f
from fp4dispatch.errors import FormatError, InputError

E4M3 = torch.float8_e4m3fn
NAN, INF = float("nan"), float("inf")


def t(*values):
    return torch.tensor(values)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- e2m1 -------------------------------------------------------------------------------------------------------------


def test_e2m1_rounds_to_nearest_ties_to_even_code():
    ties = t(0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
    assert f.encode_e2m1(ties).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert f.encode_e2m1(ties.nextafter(t(0.0))).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert f.encode_e2m1(ties.nextafter(t(9.0))).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert f.encode_e2m1(-ties).tolist() == [8, 10, 10, 12, 12, 14, 14]


def test_e2m1_nearest_by_brute_force():
    x = torch.linspace(-7, 7, 20011)
    grid = f.decode_e2m1(torch.arange(16, dtype=torch.uint8))
    assert grid.tolist() == [*f.E2M1_VALUES, *[-v for v in f.E2M1_VALUES]]
    found = (f.decode_e2m1(f.encode_e2m1(x)) - x).abs()
    assert torch.equal(found, (grid[:, None] - x).abs().amin(0))


def test_e2m1_special_values():
    assert f.encode_e2m1(t(NAN, -NAN, INF, -INF, 1e30, -1e30, 0.0, -0.0, 1e-40, -1e-40)).tolist() == [
        *(7, 7, 7, 15, 7, 15, 0, 0, 0, 8)
    ]
    assert f.decode_e2m1(torch.tensor([8], dtype=torch.uint8)).signbit().item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_e2m1_dtypes_and_strides(dtype):
    x = randn(6, 8).to(dtype)
    assert torch.equal(f.encode_e2m1(x.t()), f.encode_e2m1(x).t())
    assert torch.equal(f.encode_e2m1(x), f.encode_e2m1(x.float()))


def test_pack_puts_the_even_element_in_the_low_nibble():
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert f.pack_e2m1(codes).tolist() == [[0x21, 0x0F]]
    assert f.unpack_e2m1(f.pack_e2m1(codes)).tolist() == codes.tolist()


@pytest.mark.parametrize("bad", [torch.zeros(2, 3, dtype=torch.uint8), torch.zeros(2, 4), torch.zeros(())])
def test_pack_refuses(bad):
    with pytest.raises(InputError, match=r"need torch\.uint8"):
        f.pack_e2m1(bad)


def test_unpack_refuses():
    with pytest.raises(InputError, match=r"need torch\.uint8"):
        f.unpack_e2m1(torch.zeros(2, 4))


# --- global scale -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_global_scale_is_float32_for_every_input(dtype):
    """flashinfer#3398: a global scale that inherits bfloat16 is read as float32 and turns outputs into zeros."""
    scale = f.nvfp4_global_scale(t(-1.2, 0.3).to(dtype))
    assert scale.dtype == torch.float32
    assert scale.shape == ()
    assert scale == t(1.2).to(dtype).float() / t(2688.0)
    assert f.nvfp4_quantize(randn(2, 16).to(dtype)).global_scale.dtype == torch.float32


def test_global_scale_of_nothing_of_zero_and_of_tiny_values():
    assert f.nvfp4_global_scale(torch.zeros(3)) == 1.0
    assert f.nvfp4_global_scale(torch.zeros(0, 16)) == 1.0
    assert f.nvfp4_global_scale(t(NAN, INF, -INF)) == 1.0
    assert f.nvfp4_global_scale(t(1e-44)) == 2.0**-116
    assert f.nvfp4_global_scale(t(NAN, INF, -26.88)) == t(26.88) / t(2688.0)


def test_largest_float_survives():
    x = torch.full((1, 16), torch.finfo(torch.float32).max)
    assert f.nvfp4_dequantize(*f.nvfp4_quantize(x)).isfinite().all()
    for scaling in f.FP8_SCALINGS:
        assert f.fp8_dequantize(*f.fp8_quantize(x, scaling), scaling).isfinite().all()


# --- NVFP4 ------------------------------------------------------------------------------------------------------------


def test_nvfp4_by_hand():
    x = torch.zeros(1, 32)
    x[0, :4] = t(6.0, -3.0, 0.5, 2.5)
    x[0, 16:18] = t(12.0, -0.4)
    q = f.nvfp4_quantize(x, torch.tensor(0.5))
    assert q.sf.float().tolist() == [[2.0, 4.0]]
    assert q.data[0].tolist() == [0xD7, 0x41] + [0] * 6 + [0x87] + [0] * 7
    assert f.nvfp4_dequantize(*q)[0, :4].tolist() == [6.0, -3.0, 0.5, 2.0]
    assert f.nvfp4_dequantize(*q)[0, 16:18].tolist() == [12.0, 0.0]


def test_block_scale_is_never_zero_and_saturates():
    x = torch.zeros(1, 64)
    x[0, 0], x[0, 16], x[0, 32] = 1e6, 1e-6, 1e-38
    q = f.nvfp4_quantize(x, torch.tensor(1.0))
    assert q.sf.float().tolist() == [[448.0, 2.0**-9, 2.0**-9, 1.0]]  # too large, too small, nearly zero, all zero
    assert f.nvfp4_dequantize(*q)[0, 0] == f.NVFP4_MAX
    assert not f.nvfp4_dequantize(*q)[0, 16:].any()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_non_finite_element_spoils_its_block_loudly_and_no_other(bad):
    x = randn(4, 64)
    clean = f.nvfp4_quantize(x)
    spoiled = x.clone()
    spoiled[2, 20] = bad
    scale = f.nvfp4_global_scale(spoiled)
    got = f.nvfp4_dequantize(*f.nvfp4_quantize(spoiled))
    assert scale == f.nvfp4_global_scale(x.masked_fill(spoiled != x, 0))
    assert got[2, 16:32].isnan().all()
    got[2, 16:32] = 0
    assert torch.equal(got, f.nvfp4_dequantize(*clean).index_put((t(2), torch.arange(16, 32)), t(0.0)))


@pytest.mark.parametrize("bad", [0.0, -1.0, NAN, INF, 1e-40])
def test_a_bad_global_scale_is_loud(bad):
    x = randn(2, 32)
    x[1, 16:] = 0.0
    assert f.nvfp4_dequantize(*f.nvfp4_quantize(x, torch.tensor(bad))).isnan().all()


def test_all_zero_input_round_trips():
    for x in (torch.zeros(3, 32), -torch.zeros(3, 32)):
        assert torch.equal(f.nvfp4_dequantize(*f.nvfp4_quantize(x)), torch.zeros(3, 32))


@pytest.mark.parametrize("layout", ["linear", "128x4"])
@pytest.mark.parametrize(("m", "k"), [(0, 16), (1, 16), (1, 48), (128, 64), (129, 80), (300, 1024)])
def test_nvfp4_shapes_and_layouts(m, k, layout):
    x = randn(m, k).to(torch.bfloat16)
    q = f.nvfp4_quantize(x, sf_layout=layout)
    assert (q.data.dtype, q.data.shape) == (torch.uint8, (m, k // 2))
    padded = (f.round_up(m, 128), f.round_up(k // 16, 4)) if layout == "128x4" else (m, k // 16)
    assert (q.sf.dtype, q.sf.shape) == (E4M3, padded)
    assert all(part.is_contiguous() for part in q)
    y = f.nvfp4_dequantize(*q, sf_layout=layout, dtype=torch.bfloat16)
    assert (y.dtype, y.shape) == (torch.bfloat16, (m, k))
    assert torch.equal(y, f.nvfp4_dequantize(*f.nvfp4_quantize(x), dtype=torch.bfloat16))
    f.check_nvfp4(*q, sf_layout=layout)
    if m:
        assert (y.float() - x.float()).norm() < 0.12 * x.float().norm()


def test_nvfp4_takes_strided_input_and_one_element_scales():
    x = randn(64, 32)
    gs = torch.tensor([0.01])
    q = f.nvfp4_quantize(x.t(), gs)
    assert q.global_scale.shape == ()
    assert torch.equal(q.data, f.nvfp4_quantize(x.t().contiguous(), gs).data)


def test_dequantise_takes_one_global_scale_per_row():
    data, sf, _ = f.nvfp4_quantize(randn(5, 32))
    scales = f.expand_shards(t(0.1, 7.0), (2, 3))
    whole = f.nvfp4_dequantize(data, sf, scales)
    assert torch.equal(whole[:2], f.nvfp4_dequantize(data[:2], sf[:2], torch.tensor(0.1)))
    assert torch.equal(whole[2:], f.nvfp4_dequantize(data[2:], sf[2:], torch.tensor(7.0)))


def test_dequantise_reads_scales_without_a_gap_in_memory():
    data, sf, gs = f.nvfp4_quantize(randn(4, 64))
    wide = torch.cat([sf.view(torch.uint8)] * 2, 1).view(E4M3)[:, :4]
    assert torch.equal(f.nvfp4_dequantize(data, wide, gs), f.nvfp4_dequantize(data, sf, gs))


@pytest.mark.parametrize(
    ("x", "kwargs", "needle"),
    [
        (torch.zeros(2, 24), {}, "K=24 is not a multiple of 16"),
        (torch.zeros(2, 0), {}, "K > 0"),
        (torch.zeros(16), {}, r"need \[M, K\]"),
        (torch.zeros(2, 16, dtype=torch.float64), {}, r"x is torch\.float64"),
        (torch.zeros(2, 16, dtype=torch.int32), {}, r"x is torch\.int32"),
        (torch.zeros(2, 16), {"sf_layout": "8x4"}, "'8x4' is not known; use one of 'linear', '128x4'"),
        (torch.zeros(2, 16), {"global_scale": torch.ones(2)}, "one element"),
        (torch.zeros(2, 16), {"global_scale": torch.ones((), dtype=torch.bfloat16)}, "need torch.float32"),
        (torch.zeros(2, 16), {"global_scale": torch.ones((), device="meta")}, "on meta; need .* on cpu"),
    ],
)
def test_nvfp4_quantize_refuses(x, kwargs, needle):
    with pytest.raises(InputError, match=needle):
        f.nvfp4_quantize(x, **kwargs)


# --- layout, padding, shards ------------------------------------------------------------------------------------------


def test_128x4_puts_each_scale_where_the_documentation_says():
    rows, cols = 200, 6
    sf = torch.randint(1, 127, (rows, cols), dtype=torch.uint8)
    out = f.to_128x4(sf)
    assert out.shape == (256, 8)
    flat, seen = out.flatten(), torch.zeros(256 * 8, dtype=torch.bool)
    for r in range(rows):
        for c in range(cols):
            at = (r // 128 * 2 + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
            assert flat[at] == sf[r, c]
            seen[at] = True
    assert not flat[~seen].any()  # vllm#48898: padding that is not zero is read by kernels
    assert torch.equal(f.from_128x4(flat, rows, cols), sf)


def test_layout_functions_refuse():
    with pytest.raises(InputError, match="need float8_e4m3fn"):
        f.to_128x4(torch.zeros(2, 4))
    with pytest.raises(InputError, match="need float8_e4m3fn"):
        f.to_128x4(torch.zeros(8, dtype=torch.uint8))
    for wrong in (torch.zeros(128, 8), torch.zeros(128, 3), torch.zeros(4, 128).t(), torch.zeros(511)):
        with pytest.raises(InputError, match=r"need \[128, 4\]"):
            f.from_128x4(wrong.to(torch.uint8), 100, 3)


def test_zero_pad():
    x = torch.ones(2, 3)
    assert f.zero_pad(x, 2, 3) is x
    assert f.zero_pad(x, 4, 4).sum() == 6
    padded = f.zero_pad(x.to(E4M3), 3, 16)
    assert padded.dtype == E4M3
    assert padded.float().sum() == 6
    for rows, cols in ((1, 3), (2, 2)):
        with pytest.raises(InputError, match=r"cannot pad \[2, 3\]"):
            f.zero_pad(x, rows, cols)


def test_expand_shards_is_exact_per_shard():
    values = t(0.1, 1e-30, 3e7)
    rows = f.expand_shards(values, (3, 0, 2))
    assert torch.equal(rows, values[[0, 0, 0, 2, 2]])
    assert torch.equal(f.expand_shards(torch.tensor(0.5), (4,)), torch.full((4,), 0.5))


@pytest.mark.parametrize(
    ("values", "rows"),
    [(torch.ones(2), (4,)), (torch.ones(2), (4, -1)), (torch.ones(2).double(), (1, 1)), (torch.ones(0), ())],
)
def test_expand_shards_refuses(values, rows):
    with pytest.raises(InputError, match="one value per shard"):
        f.expand_shards(values, rows)


# --- FP8 --------------------------------------------------------------------------------------------------------------

SHAPES = [(0, 128), (1, 16), (3, 130), (128, 128), (129, 257), (300, 64)]


@pytest.mark.parametrize("scaling", f.FP8_SCALINGS)
@pytest.mark.parametrize(("m", "k"), SHAPES)
def test_fp8_against_a_loop_over_parts(m, k, scaling):
    x = randn(m, k) * torch.exp(randn(m, 1, seed=1) * 3)
    q = f.fp8_quantize(x, scaling)
    assert (q.data.dtype, q.data.shape, q.scale.dtype) == (E4M3, (m, k), torch.float32)
    assert q.data.is_contiguous()
    f.check_fp8(*q, scaling)
    bm, bk = {"tensor": (m or 1, k), "row": (1, k), "block128": (128, 128), "1x128": (1, 128)}[scaling]
    grid = (-(-m // bm), -(-k // bk))
    assert tuple(q.scale.shape) == {"tensor": (), "row": (m,)}.get(scaling, grid)
    y = f.fp8_dequantize(*q, scaling)
    for i in range(grid[0]):
        for j in range(grid[1]):
            part = (slice(i * bm, (i + 1) * bm), slice(j * bk, (j + 1) * bk))
            scale = x[part].abs().max() / t(448.0)
            want = (x[part] / scale).to(E4M3)
            assert torch.equal(q.data[part].contiguous().view(torch.uint8), want.view(torch.uint8))
            assert torch.equal(y[part], want.float() * scale)


def test_fp8_tensor_scale_of_an_empty_matrix_is_one():
    assert f.fp8_quantize(torch.zeros(0, 32), "tensor").scale == 1.0


@pytest.mark.parametrize("scaling", f.FP8_SCALINGS)
def test_fp8_zero_tiny_and_non_finite(scaling):
    x = torch.zeros(130, 140)
    assert torch.equal(f.fp8_dequantize(*f.fp8_quantize(x, scaling), scaling), x)
    x = randn(130, 140)
    clean = f.fp8_quantize(x.index_put((t(1, 2, 3), t(4, 5, 6)), t(0.0)), scaling)
    x[1, 4], x[2, 5], x[3, 6] = NAN, INF, -INF
    q = f.fp8_quantize(x, scaling)
    bad = ~x.isfinite()
    assert torch.equal(q.scale, clean.scale)
    assert q.data.float()[bad].isnan().all()
    assert torch.equal(q.data.float()[~bad], clean.data.float()[~bad])
    assert (f.fp8_quantize(torch.full((2, 2), 1e-45), scaling).scale == 2.0**-116).all()


def test_fp8_static_scale_saturates_rounds_to_even_and_refuses_bad_scales_loudly():
    x = t(1e30, -1e30, 464.0, 1.0, 17.0, 19.0, 2.0**-10, 3 * 2.0**-10).reshape(1, -1)
    q = f.fp8_quantize(x, "tensor", torch.tensor(1.0))
    assert q.data.float().tolist() == [[448.0, -448.0, 448.0, 1.0, 16.0, 20.0, 0.0, 2.0**-8]]
    for bad in (0.0, -1.0, NAN, 1e-40):
        assert f.fp8_quantize(x, "tensor", torch.tensor(bad)).data.float().isnan().all()


def test_fp8_refuses():
    x = torch.zeros(4, 256)
    with pytest.raises(InputError, match="scaling='channel' is not known"):
        f.fp8_quantize(x, "channel")
    with pytest.raises(InputError, match=r"'row' scaling of \[4, 256\] needs torch.float32 \[4\]"):
        f.fp8_quantize(x, "row", torch.ones(4, 1))
    with pytest.raises(InputError, match=r"needs torch.float32 \[1, 2\]"):
        f.fp8_dequantize(x.to(E4M3), torch.ones(2, 1), "block128")
    with pytest.raises(InputError, match=r"need torch\.float8_e4m3fn"):
        f.fp8_dequantize(x, torch.ones(()), "tensor")
    with pytest.raises(InputError, match=r"x is torch\.int8"):
        f.fp8_quantize(x.to(torch.int8), "tensor")


# --- validation -------------------------------------------------------------------------------------------------------


def good(layout="linear"):
    return list(f.nvfp4_quantize(randn(5, 48), sf_layout=layout))


def poke(x, index, byte):
    x = x.clone()
    x.view(torch.uint8)[index] = byte
    return x


BAD_NVFP4 = {
    "data dtype": (InputError, r"data is torch.int8", lambda d, s, g: (d.view(torch.int8), s, g)),
    "data rank": (InputError, r"need torch.uint8 \[M, K/2\]", lambda d, s, g: (d[0], s, g)),
    "data K": (InputError, r"K a multiple of 16", lambda d, s, g: (d[:, :20], s, g)),
    "data strides": (InputError, r"call .contiguous", lambda d, s, g: (d.t().contiguous().t(), s, g)),
    "scale dtype": (InputError, r"\.view\(torch.float8_e4m3fn\)", lambda d, s, g: (d, s.view(torch.uint8), g)),
    "scale shape": (InputError, r"block scales are .* \[5, 2\]; .* \[5, 3\]", lambda d, s, g: (d, s[:, :2], g)),
    "scale NaN": (FormatError, r"1 NaN and 0 negative", lambda d, s, g: (d, poke(s, (4, 2), 127), g)),
    "scale -NaN": (FormatError, r"1 NaN and 1 negative", lambda d, s, g: (d, poke(s, (4, 2), 255), g)),
    "scale sign": (FormatError, r"0 NaN and 1 negative", lambda d, s, g: (d, poke(s, (0, 0), 129), g)),
    "global dtype": (InputError, r"need torch.float32", lambda d, s, g: (d, s, g.bfloat16())),
    "global shape": (InputError, r"or \[5\], one per row", lambda d, s, g: (d, s, torch.ones(4))),
    "global device": (InputError, r"global_scale on meta", lambda d, s, g: (d, s, g.to("meta"))),
    "global zero": (FormatError, r"1 of 1 global scales", lambda d, s, g: (d, s, g * 0)),
    "global negative": (FormatError, r"1 of 5 global scales", lambda d, s, g: (d, s, t(1.0, 1.0, -1.0, 1.0, 1.0))),
    "global NaN": (FormatError, r"not finite and positive", lambda d, s, g: (d, s, g * NAN)),
    "global Inf": (FormatError, r"not finite and positive", lambda d, s, g: (d, s, g * INF)),
}


@pytest.mark.parametrize("why", BAD_NVFP4)
def test_check_nvfp4_refuses(why):
    error, needle, spoil = BAD_NVFP4[why]
    f.check_nvfp4(*good(), name="w")
    with pytest.raises(error, match=needle) as caught:
        f.check_nvfp4(*spoil(*good()), name="model.w")
    assert str(caught.value).startswith("model.w: ")
    assert (error is FormatError) == isinstance(caught.value, FormatError)


def test_check_nvfp4_refuses_dirty_padding_and_wrong_layouts():
    data, sf, gs = good("128x4")
    f.check_nvfp4(data, sf, gs, sf_layout="128x4")
    for at in ((127, 3), (0, 3), (90, 0)):
        with pytest.raises(FormatError, match=r"1 padding bytes .* rebuild with to_128x4\(from_128x4\(sf, 5, 3\)\)"):
            f.check_nvfp4(data, poke(sf, at, 56), gs, sf_layout="128x4")
    with pytest.raises(InputError, match="in the linear layout"):
        f.check_nvfp4(data, sf, gs)
    with pytest.raises(InputError, match="128x4 block scales has strides"):
        f.check_nvfp4(data, sf.view(torch.uint8).t().contiguous().t().view(E4M3), gs, sf_layout="128x4")


def test_check_nvfp4_takes_one_global_scale_per_row():
    data, sf, _ = good()
    f.check_nvfp4(data, sf, f.expand_shards(t(0.1, 2.0), (2, 3)))


def test_check_nvfp4_refuses_what_was_quantised_from_nan():
    x = randn(4, 32)
    x[0, 0] = NAN
    with pytest.raises(FormatError, match="1 NaN"):
        f.check_nvfp4(*f.nvfp4_quantize(x))


def test_check_fp8_refuses():
    data, scale = f.fp8_quantize(randn(4, 256), "row")
    f.check_fp8(data, scale, "row")
    f.check_fp8(data, scale * t(0.0, 1.0, 1.0, 1.0), "row")  # a pruned row
    with pytest.raises(FormatError, match=r"w: data hold 1 NaN .*; need finite e4m3"):
        f.check_fp8(poke(data, (3, 9), 255), scale, "row", name="w")
    for bad in (NAN, INF, -1.0):
        with pytest.raises(FormatError, match="1 of 4 scales are not finite and at least 0"):
            f.check_fp8(data, scale * t(1.0, bad, 1.0, 1.0), "row")
    with pytest.raises(FormatError, match="not finite and positive"):
        f.check_fp8(data, torch.tensor(0.0), "tensor")
    with pytest.raises(InputError, match=r"scale is torch\.float16"):
        f.check_fp8(data, scale.half(), "row")
    with pytest.raises(InputError, match=r"call \.contiguous"):
        f.check_fp8(data.view(torch.uint8).t().contiguous().t().view(E4M3), scale, "row")
    with pytest.raises(InputError, match="on meta"):
        f.check_fp8(data, scale.to("meta"), "row")
    with pytest.raises(FormatError):
        f.check_fp8(*f.fp8_quantize(t(NAN, 1.0).reshape(1, 2), "tensor"), "tensor")


# --- torch.compile and fakes ------------------------------------------------------------------------------------------


def everything(x, gs):
    q = f.nvfp4_quantize(x)
    s = f.nvfp4_quantize(x, gs, sf_layout="128x4")
    return [
        *q,
        *s,
        f.nvfp4_dequantize(*q),
        f.nvfp4_dequantize(*s, sf_layout="128x4"),
        *(part for scaling in f.FP8_SCALINGS for part in f.fp8_quantize(x, scaling)),
        *(f.fp8_dequantize(*f.fp8_quantize(x, scaling), scaling) for scaling in f.FP8_SCALINGS),
        f.expand_shards(gs.reshape(1), (3,)),
    ]


def test_compiles_without_a_graph_break():
    x, gs = randn(5, 160), torch.tensor(0.002)
    compiled = torch.compile(everything, fullgraph=True, backend="eager", dynamic=True)
    for m in (5, 33):
        x = randn(m, 160)
        for got, want in zip(compiled(x, gs), everything(x, gs), strict=True):
            assert torch.equal(got.float(), want.float())


def test_never_reads_a_value():
    """Meta tensors have no values: whatever synchronises (``.item()``, a branch on a tensor) raises here."""
    x, gs = randn(5, 160), torch.tensor(0.002)
    for got, want in zip(everything(x.to("meta"), gs.to("meta")), everything(x, gs), strict=True):
        assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
