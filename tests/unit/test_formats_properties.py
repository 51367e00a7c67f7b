"""Properties of the formats that must hold for every input (hypothesis)."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4dispatch import formats as f

E4M3 = torch.float8_e4m3fn
LEAST_NORMAL = 2.0**-6


def for_all(*strategies):
    return lambda test: settings(deadline=None, max_examples=150)(given(*strategies)(test))


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
moderate = st.floats(-1e4, 1e4, width=32).map(lambda v: v if abs(v) > 1e-4 else 0.0)
exponents = st.integers(-20, 20)


@st.composite
def matrices(draw, elements=finite, max_rows=4, max_blocks=3):
    rows, blocks = draw(st.integers(1, max_rows)), draw(st.integers(1, max_blocks))
    values = draw(st.lists(elements, min_size=rows * blocks * 16, max_size=rows * blocks * 16))
    return torch.tensor(values, dtype=torch.float32).view(rows, blocks * 16)


@st.composite
def byte_matrices(draw, low=0, high=255):
    rows, cols = draw(st.integers(1, 300)), draw(st.integers(1, 20))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    return torch.randint(low, high + 1, (rows, cols), generator=generator, dtype=torch.uint8)


def per_element(blockwise):
    return blockwise.repeat_interleave(16, dim=1)


@for_all(byte_matrices())
def test_pack_inverts_unpack(packed):
    codes = f.unpack_e2m1(packed)
    assert codes.shape == (packed.shape[0], packed.shape[1] * 2)
    assert codes.max() < 16
    assert torch.equal(f.pack_e2m1(codes), packed)


@for_all(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=64))
def test_encode_is_monotone_and_odd(values):
    x = torch.tensor(values).sort().values
    decoded = f.decode_e2m1(f.encode_e2m1(x))
    assert (decoded.diff() >= 0).all()
    assert torch.equal(f.decode_e2m1(f.encode_e2m1(-x)), -decoded)
    assert torch.equal(f.decode_e2m1(f.encode_e2m1(decoded)), decoded)


@for_all(byte_matrices(1))
def test_128x4_is_a_permutation_plus_zero_padding(sf):
    rows, cols = sf.shape
    swizzled = f.to_128x4(sf)
    assert swizzled.shape == (f.round_up(rows, 128), f.round_up(cols, 4))
    assert swizzled.count_nonzero() == sf.numel()
    assert torch.equal(swizzled.flatten().bincount(minlength=256)[1:], sf.flatten().bincount(minlength=256)[1:])
    assert torch.equal(f.from_128x4(swizzled, rows, cols), sf)
    assert torch.equal(f.from_128x4(swizzled.view(E4M3).flatten(), rows, cols).view(torch.uint8), sf)


@for_all(matrices())
def test_nvfp4_output_is_always_well_formed(x):
    q = f.nvfp4_quantize(x)
    f.check_nvfp4(*q)
    assert (q.sf.float() > 0).all()
    y = f.nvfp4_dequantize(*q)
    assert y.isfinite().all()
    assert not (y * x.sign() < 0).any()


@for_all(matrices())
def test_nvfp4_error_bound_per_block(x):
    """Half the widest e2m1 gap, or what the rounding of the block scale makes saturate, whichever is more."""
    q = f.nvfp4_quantize(x)
    sf = q.sf.double()
    amax = x.double().view(*sf.shape, 16).abs().amax(-1)
    scale = q.global_scale.double()
    bound = torch.maximum(sf * scale, amax - 6 * sf * scale) * (1 + 1e-6)
    error = (f.nvfp4_dequantize(*q).double() - x.double()).abs().view(*sf.shape, 16).amax(-1)
    assert (error <= bound).all()
    normal = sf >= LEAST_NORMAL
    assert (error[normal] <= 0.19 * amax[normal]).all()


@for_all(matrices(moderate), exponents)
def test_nvfp4_is_equivariant_under_powers_of_two(x, exponent):
    q, scaled = f.nvfp4_quantize(x), f.nvfp4_quantize(x * 2.0**exponent)
    assert torch.equal(q.data, scaled.data)
    assert torch.equal(q.sf.view(torch.uint8), scaled.sf.view(torch.uint8))
    assert scaled.global_scale == (q.global_scale * 2.0**exponent if x.any() else 1.0)


@for_all(matrices())
def test_nvfp4_is_odd_and_monotone_within_a_block(x):
    y = f.nvfp4_dequantize(*f.nvfp4_quantize(x))
    assert torch.equal(f.nvfp4_dequantize(*f.nvfp4_quantize(-x)), -y)
    order = x.view(-1, 16).argsort(dim=-1)
    assert (y.view(-1, 16).gather(1, order).diff() >= 0).all()


@for_all(matrices())
def test_nvfp4_requantising_changes_nothing_where_scales_are_normal(x):
    q = f.nvfp4_quantize(x)
    y = f.nvfp4_dequantize(*q)
    again = f.nvfp4_quantize(y, q.global_scale)
    stable = per_element((q.sf.float() >= LEAST_NORMAL) & (q.sf.float() <= f.E4M3_MAX))
    stable &= per_element((y.view(*q.sf.shape, 16) != 0).any(-1))
    assert torch.equal(f.nvfp4_dequantize(*again)[stable], y[stable])


@for_all(matrices(), st.sampled_from([torch.bfloat16, torch.float16]))
def test_nvfp4_of_a_16_bit_input_is_that_of_its_float32_copy(x, dtype):
    x = x.clamp(-6e4, 6e4).to(dtype)
    for ours, theirs in zip(f.nvfp4_quantize(x), f.nvfp4_quantize(x.float()), strict=True):
        assert torch.equal(ours.float(), theirs.float())


@for_all(matrices(), st.lists(st.sampled_from([float("nan"), float("inf"), float("-inf")]), min_size=1, max_size=3))
def test_nvfp4_non_finite_stays_in_its_block(x, bad):
    spoiled = x.clone()
    for i, value in enumerate(bad):
        spoiled[i % x.shape[0], (i * 23) % x.shape[1]] = value
    hit = per_element((~spoiled.isfinite()).view(x.shape[0], -1, 16).any(-1))
    gs = f.nvfp4_global_scale(spoiled)
    y = f.nvfp4_dequantize(*f.nvfp4_quantize(spoiled))
    assert y[hit].isnan().all()
    assert torch.equal(y[~hit], f.nvfp4_dequantize(*f.nvfp4_quantize(x, gs))[~hit])


@for_all(matrices(), st.data())
def test_nvfp4_rows_do_not_see_each_other(x, data):
    """With a given global scale, batch composition changes nothing."""
    gs = f.nvfp4_global_scale(x)
    row = data.draw(st.integers(0, x.shape[0] - 1))
    whole, alone = f.nvfp4_quantize(x, gs), f.nvfp4_quantize(x[row : row + 1], gs)
    assert torch.equal(whole.data[row : row + 1], alone.data)
    assert torch.equal(whole.sf[row : row + 1].float(), alone.sf.float())


@for_all(matrices(), st.sampled_from(f.FP8_SCALINGS))
def test_fp8_error_bound_and_fixed_point(x, scaling):
    q = f.fp8_quantize(x, scaling)
    f.check_fp8(*q, scaling)
    y = f.fp8_dequantize(*q, scaling)
    step = (q.scale.reshape(-1, 1) if q.scale.ndim < 2 else q.scale.repeat_interleave(128, 0)[: x.shape[0]]).double()
    if scaling == "1x128":
        step = q.scale.double()
    x64 = x.double()
    assert ((y.double() - x64).abs() <= torch.maximum(x64.abs() / 16, step * 2.0**-10) * (1 + 1e-6)).all()
    again = f.fp8_quantize(y, scaling, q.scale)
    assert torch.equal(again.data.view(torch.uint8), q.data.view(torch.uint8))


@for_all(matrices(moderate), st.sampled_from(f.FP8_SCALINGS), exponents)
def test_fp8_is_equivariant_under_powers_of_two(x, scaling, exponent):
    q, scaled = f.fp8_quantize(x, scaling), f.fp8_quantize(x * 2.0**exponent, scaling)
    assert torch.equal(q.data.view(torch.uint8), scaled.data.view(torch.uint8))


@for_all(st.lists(st.tuples(st.floats(0, 2.0**99, width=32), st.integers(0, 50)), min_size=1, max_size=6))
def test_expand_shards(shards):
    values = torch.tensor([value for value, _ in shards], dtype=torch.float32)
    rows = tuple(count for _, count in shards)
    assert torch.equal(f.expand_shards(values, rows), values.repeat_interleave(torch.tensor(rows)))
