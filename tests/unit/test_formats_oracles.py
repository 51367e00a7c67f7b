"""Bit-for-bit comparison with implementations that nobody here wrote, on the CPU.

Needs (test extra): torchao, compressed-tensors, and, installed with ``--no-deps`` because they ask for gigabytes that
these tests never touch: nvidia-modelopt (+ requests, omegaconf, pulp) and flashinfer-python (+ requests, einops,
apache-tvm-ffi). What is missing is skipped with its reason.
"""

from __future__ import annotations

import importlib
import warnings
from functools import cache

import pytest
import torch

from fp4dispatch import formats as f

E4M3 = torch.float8_e4m3fn


def load(module):
    """Import a reference, or skip with the reason. An installed package whose *API* changed must fail, not skip."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            pytest.skip(f"reference {module} cannot be imported here: {error}")


@pytest.fixture
def modelopt():
    return load("modelopt.torch.quantization.qtensor.nvfp4_tensor").NVFP4QTensor


@pytest.fixture
def torchao():
    return load("torchao.prototype.mx_formats.nvfp4_tensor")


@pytest.fixture
def flashinfer():
    return load("flashinfer.trace.templates.quantize")


@cache
def inputs():
    """Named [M, K] matrices, each made to break something else."""
    g = torch.Generator().manual_seed(7)
    normal = torch.randn(97, 208, generator=g)
    heavy = normal.sign() * torch.exp(normal.abs() * 4 - 6)
    ticks = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    around = torch.stack([ticks, ticks.nextafter(torch.tensor(0.0)), ticks.nextafter(torch.tensor(9.0))]).flatten()
    midpoints = around[torch.randint(24, (64, 64), generator=g)] * (torch.randint(2, (64, 64), generator=g) * 2 - 1)
    midpoints[:, ::16] = 6.0
    steps = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    e4m3_mids = (steps[:-1] + steps[1:]) / 2  # a block maximum of six times these puts the scale on a tie
    scale_ties = torch.zeros(126 * 3, 32)
    scale_ties[:, ::16] = 6 * torch.cat([e4m3_mids, e4m3_mids.nextafter(torch.tensor(0.0)), steps[1:]])[:, None]
    scale_ties[:, 5] = -0.37 * scale_ties[:, 0]
    scale_ties[0, 1] = f.NVFP4_MAX
    zeros = normal[:33, :48].clone()
    zeros[::3] = 0.0
    zeros[1::3, 16:32] = -0.0
    zeros[2::3, ::2] = -0.0
    wide = torch.exp2(torch.randint(-60, 60, (64, 64), generator=g).float()) * normal[:64, :64]
    tiny = normal[:40, :64] * 1e-20
    one_hot = torch.zeros(3, 16)
    one_hot[1, 7] = -1e-3
    # Powers of two in, powers of two out: every quotient of every implementation is exact, so all of them must agree.
    exact = normal[:64, :128].clamp(-6, 6)
    exact[0, 0] = f.NVFP4_MAX
    return {
        "normal": normal,
        "heavy": heavy,
        "midpoints": midpoints,
        "scale_ties": scale_ties,
        "zeros": zeros,
        "wide": wide,
        "tiny": tiny,
        "one_hot": one_hot,
        "exact": exact,
        "1x16": normal[:1, :16],
        "129x64": normal.repeat(2, 1)[:129, :64],
        "strided": normal[:, :200].t(),
    }


NAMES = sorted(inputs())
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def case(name, dtype):
    x = inputs()[name]
    if x.shape[1] % 16:
        x = x[:, : x.shape[1] // 16 * 16]
    if name == "tiny" and dtype == torch.float16:
        x = x * 1e14  # else all zero
    return x.to(dtype).nan_to_num(posinf=6e4, neginf=-6e4)


def bits(x):
    return x.contiguous().view(torch.uint8 if x.element_size() == 1 else torch.int32)


def same(a, b):
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    assert torch.equal(bits(a), bits(b)), f"{(bits(a) != bits(b)).sum()} of {a.numel()} differ"


def ulps_from(value, grid):
    """Distance of each value to the nearest rounding boundary of a sorted grid, in f32 ulps of the value."""
    mids = ((grid[:-1] + grid[1:]) / 2).double()
    at = torch.searchsorted(mids, value.double().contiguous()).clamp(max=len(mids) - 1)
    away = torch.minimum((mids[at] - value).abs(), (mids[(at - 1).clamp(min=0)] - value).abs())
    return away / (value.nextafter(torch.tensor(torch.inf)) - value).double()


def scale_quotient(x, gs):
    return x.float().view(x.shape[0], -1, 16).abs().amax(-1) / (gs * 6)


E4M3_GRID = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
E2M1_GRID = torch.tensor(f.E2M1_VALUES)


# --- ModelOpt: the one that is followed byte for byte -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_modelopt_quantise_is_bit_equal(modelopt, name, dtype):
    x = case(name, dtype).contiguous()
    q, sf, gs = modelopt.quantize(x.clone(), 16)
    ours = f.nvfp4_quantize(x)
    same(ours.global_scale, gs)
    same(ours.sf, sf)
    same(ours.data, q._quantized_data)


@pytest.mark.parametrize("factor", [1.0, 0.011, 37.0])
def test_modelopt_with_a_given_global_scale(modelopt, factor):
    x = case("heavy", torch.bfloat16)
    gs = f.nvfp4_global_scale(x) * factor  # also one under which blocks saturate or fall below the least scale
    q, sf, _ = modelopt.quantize(x.clone(), 16, weights_scaling_factor_2=gs)
    ours = f.nvfp4_quantize(x, gs)
    same(ours.sf, sf)
    same(ours.data, q._quantized_data)


def test_modelopt_block_scales_within_four_ulps_of_every_tie(modelopt):
    """Where amax / (6 * gs) and (amax / 6) / gs round to different bytes: the order of operations is ModelOpt's."""
    middle = (E4M3_GRID[:-1] + E4M3_GRID[1:]) / 2
    orders_differ = 0
    for gs in (torch.rand(20, generator=torch.Generator().manual_seed(5)) * 1e-2).unbind():
        centre = (middle * (gs * 6)).view(torch.int32)
        amax = torch.stack([centre + ulps for ulps in range(-4, 5)], 1).view(torch.float32)
        x = torch.zeros(*amax.shape, 16)
        x[..., 3] = -amax
        q, sf, _ = modelopt.quantize(x.flatten(1), 16, weights_scaling_factor_2=gs)
        ours = f.nvfp4_quantize(x.flatten(1), gs)
        same(ours.sf, sf)
        same(ours.data, q._quantized_data)
        orders_differ += int((bits((amax / 6 / gs).to(E4M3)) != bits((amax / (gs * 6)).to(E4M3))).sum())
    assert orders_differ > 100  # else this test would show nothing


@pytest.mark.parametrize("name", NAMES)
def test_modelopt_dequantise(modelopt, name):
    x = case(name, torch.float32).contiguous()
    q, sf, gs = modelopt.quantize(x.clone(), 16)
    theirs = q.dequantize(torch.float32, scale=sf, double_scale=gs, block_sizes={-1: 16})
    ours = f.nvfp4_dequantize(q._quantized_data, sf, gs)
    # They round sf * global_scale first; this package rounds once. One ulp, and none for powers of two.
    assert ((bits(ours) - bits(theirs)).abs() <= 1).all()
    gs = torch.exp2(gs.log2().round())
    theirs = q.dequantize(torch.float32, scale=sf, double_scale=gs, block_sizes={-1: 16})
    assert torch.equal(f.nvfp4_dequantize(q._quantized_data, sf, gs), theirs)


def test_modelopt_divides_by_zero_where_we_do_not(modelopt):
    x = torch.zeros(2, 32)
    _, sf, gs = modelopt.quantize(x.clone(), 16)
    assert gs == 0
    assert sf.float().isnan().all()
    ours = f.nvfp4_quantize(x)
    assert ours.global_scale == 1
    assert torch.equal(f.nvfp4_dequantize(*ours), x)


def test_modelopt_fp8_is_bit_equal():
    qtensor = load("modelopt.torch.quantization.qtensor.fp8_tensor").FP8QTensor
    x = case("heavy", torch.float32)
    for scaling, how in {
        "tensor": {},
        "row": {"axis": 0},
        "1x128": {"block_sizes": {-1: 128}},
        "block128": {"block_sizes": {-1: 128, -2: 128}},
    }.items():
        q, scale = qtensor.quantize(x.clone(), **how)
        ours = f.fp8_quantize(x, scaling)
        same(ours.scale, scale.reshape(ours.scale.shape))
        same(ours.data, q._quantized_data)


def test_modelopt_fp8_within_four_ulps_of_every_tie():
    """Where x / scale and x * (1 / scale) round to different bytes: this package divides, as ModelOpt does."""
    qtensor = load("modelopt.torch.quantization.qtensor.fp8_tensor").FP8QTensor
    middle = (E4M3_GRID[:-1] + E4M3_GRID[1:]) / 2
    reciprocals_differ = 0
    for scale in (torch.rand(20, generator=torch.Generator().manual_seed(6)) * 1e-2).unbind():
        centre = (middle * scale).view(torch.int32)
        x = torch.stack([centre + ulps for ulps in range(-4, 5)], 1).view(torch.float32)
        q, _ = qtensor.quantize(x, scales=scale.reshape(1, 1))
        same(f.fp8_quantize(x, "tensor", scale).data, q._quantized_data)
        reciprocals_differ += int((bits((x * (1 / scale)).to(E4M3)) != bits(q._quantized_data)).sum())
    assert reciprocals_differ > 100  # else this test would show nothing


# --- compressed-tensors -----------------------------------------------------------------------------------------------


@pytest.fixture
def ct():
    class CompressedTensors:
        helpers = load("compressed_tensors.compressors.nvfp4.helpers")
        quant = load("compressed_tensors.quantization")
        utils = load("compressed_tensors.quantization.utils")
        lifecycle = load("compressed_tensors.quantization.lifecycle.forward")

        def quantize(self, x):
            args = self.quant.QuantizationArgs(
                num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype=E4M3, zp_dtype=E4M3
            )
            blocks = x.view(x.shape[0], -1, 16)
            gs = self.utils.generate_gparam(x.min(), x.max())
            scale, _ = self.utils.calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale=gs)
            return self.helpers.quantize_and_pack_fp4(x, scale, global_scale=gs), scale.to(E4M3), gs

    return CompressedTensors()


def test_compressed_tensors_pack_and_unpack(ct):
    every = torch.arange(256, dtype=torch.uint8).view(8, 32)
    values = f.decode_e2m1(f.unpack_e2m1(every))
    assert torch.equal(values, ct.helpers.unpack_fp4_from_uint8(every, 8, 64, torch.float32))
    same(f.pack_e2m1(f.unpack_e2m1(every)), every)
    same(ct.helpers.pack_fp4_to_uint8(values), every)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_compressed_tensors_packs_the_same_bytes_for_the_same_scales(ct, name, dtype):
    """Power-of-two global scales: scale / (1 / gs) and scale * gs are the same number, so no difference is allowed."""
    x = case(name, dtype).contiguous()
    gs = torch.exp2(f.nvfp4_global_scale(x).log2().ceil())
    ours = f.nvfp4_quantize(x, gs)
    theirs = ct.helpers.quantize_and_pack_fp4(x.float(), ours.sf.float(), global_scale=1 / gs)
    same(ours.data, theirs)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("wide", "tiny", "one_hot")])
def test_compressed_tensors_differs_only_at_rounding_boundaries(ct, name):
    x = case(name, torch.float32).contiguous()
    data, sf, gs = ct.quantize(x)
    ours = f.nvfp4_quantize(x)
    assert ((bits(ours.global_scale.reshape(1)) - bits(1 / gs)).abs() <= 1).all()
    quotient = scale_quotient(x, ours.global_scale)
    stored_eps = (sf.float() == 0.125) & (quotient <= 2**-10)
    differ = (bits(ours.sf) != bits(sf)) & ~stored_eps
    assert differ.float().mean() < 0.01 or name in ("scale_ties",)
    assert (ulps_from(quotient, E4M3_GRID)[differ] <= 4).all()
    if name == "exact":
        assert not differ.any()
    alike = (bits(ours.sf) == bits(sf)).repeat_interleave(16, 1)
    value = (x.view(*sf.shape, 16) / (ours.sf.float() * ours.global_scale)[..., None]).view(x.shape)
    wrong = (f.unpack_e2m1(ours.data) != f.unpack_e2m1(data)) & alike
    assert (ulps_from(value.abs(), E2M1_GRID)[wrong] <= 4).all()
    assert (bits(ours.sf) == bits(sf))[~stored_eps].float().mean() > (0.6 if name == "scale_ties" else 0.98)


def test_compressed_tensors_rounds_bfloat16_scales_twice(ct):
    """Why its bfloat16 exports are compared with their own scales above, and through float32 here."""
    x = case("normal", torch.bfloat16).contiguous()
    _, twice, _ = ct.quantize(x)
    _, once, _ = ct.quantize(x.float())
    ours = f.nvfp4_quantize(x).sf
    assert (bits(ours) != bits(once)).float().mean() < 0.01 < (bits(ours) != bits(twice)).float().mean()


def test_compressed_tensors_reads_what_we_store(ct):
    x = case("heavy", torch.float32)
    ours = f.nvfp4_quantize(x)
    theirs = ct.lifecycle.dequantize(
        ct.helpers.unpack_fp4_from_uint8(ours.data, *x.shape, torch.float32),
        ours.sf.float(),
        args=ct.quant.QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16),
        global_scale=1 / ours.global_scale,
        dtype=torch.float32,
    )
    torch.testing.assert_close(f.nvfp4_dequantize(*ours), theirs, rtol=4e-7, atol=0)


def test_compressed_tensors_zero_tensor_has_the_same_global_scale(ct):
    zero = torch.zeros(1)
    assert ct.utils.generate_gparam(zero, zero) == 1 / f.nvfp4_global_scale(zero) == 1


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_compressed_tensors_fp8_is_bit_equal(ct, scaling):
    x = case("heavy", torch.float32)
    args = ct.quant.QuantizationArgs(
        num_bits=8, type="float", strategy={"row": "channel"}.get(scaling, scaling), symmetric=True
    )
    low, high = (x.amin(1, True), x.amax(1, True)) if scaling == "row" else (x.min(), x.max())
    scale, zero = ct.utils.calculate_qparams(low, high, args)
    theirs = ct.lifecycle.quantize(x, scale, zero, args, dtype=E4M3)
    ours = f.fp8_quantize(x, scaling)
    same(ours.scale, scale.reshape(ours.scale.shape))
    same(ours.data, theirs)


def test_what_each_library_stores_for_a_zero_block(modelopt, ct, torchao, flashinfer):
    x = torch.ones(1, 48)
    x[:, 16:32] = 0.0
    gs = f.nvfp4_global_scale(x)
    assert f.nvfp4_quantize(x).sf[0, 1].float() == 1.0
    assert modelopt.quantize(x.clone(), 16)[1][0, 1].float() == 1.0
    assert ct.quantize(x)[1][0, 1].float() == 0.125
    assert torchao.nvfp4_quantize(x, per_tensor_scale=gs)[0][0, 1].float() == 2**-6
    assert flashinfer._nvfp4_quantize_reference(x, 1 / gs)[1][0, 1].float() == 0.0


# --- torchao ----------------------------------------------------------------------------------------------------------


def test_torchao_e2m1_codes(torchao):
    x = torch.cat([case("midpoints", torch.float32).flatten(), torch.randn(9999), torch.tensor([7.0, 1e9, -1e9, 0.0])])
    same(f.encode_e2m1(x), torchao.f32_to_f4_unpacked(x))
    assert torchao.f32_to_f4_unpacked(torch.tensor([-0.0])) == 8  # kept; ModelOpt and compressed-tensors drop it
    assert f.encode_e2m1(torch.tensor([-0.0])) == 0
    codes = torch.arange(16, dtype=torch.uint8)
    same(f.decode_e2m1(codes), torchao.f4_unpacked_to_f32(codes))
    same(f.pack_e2m1(codes), torchao.pack_uint4(codes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("wide", "tiny")])
def test_torchao_differs_only_at_rounding_boundaries_and_under_its_least_scale(torchao, name, dtype):
    x = case(name, dtype).contiguous()
    gs = torchao.per_tensor_amax_to_scale(x.abs().max())
    sf, data = torchao.nvfp4_quantize(x, per_tensor_scale=gs)
    ours = f.nvfp4_quantize(x)
    same(ours.global_scale, gs)
    quotient = scale_quotient(x, gs)
    small = quotient < 2**-6  # torchao never stores a subnormal scale
    assert (sf.float()[small] == 2**-6).all()
    differ = (bits(ours.sf) != bits(sf)) & ~small
    assert (ulps_from(quotient, E4M3_GRID)[differ] <= 4).all()
    if name == "exact":
        assert not differ.any()
    alike = (bits(ours.sf) == bits(sf)).repeat_interleave(16, 1)
    value = (x.float().view(*sf.shape, 16) / (ours.sf.float() * gs)[..., None]).view(x.shape)
    wrong = (f.unpack_e2m1(ours.data) != f.unpack_e2m1(data)) & alike & (x != 0)  # -0.0 is kept as code 8
    assert (ulps_from(value.abs(), E2M1_GRID)[wrong] <= 4).all()
    assert alike.any() or name == "one_hot"


@pytest.mark.parametrize(("rows", "cols"), [(128, 4), (1, 1), (129, 5), (256, 8), (77, 13), (384, 3)])
def test_torchao_block_scale_layout(rows, cols):
    utils = load("torchao.prototype.mx_formats.utils")
    sf = torch.randint(1, 127, (rows, cols), dtype=torch.uint8).view(E4M3)
    theirs = utils.to_blocked(sf.view(torch.uint8))
    ours = f.to_128x4(sf)
    same(ours.flatten().view(torch.uint8), theirs)
    same(f.from_128x4(theirs.view(E4M3), rows, cols), sf)
    same(utils.from_blocked(ours.view(torch.uint8).flatten(), rows, cols).contiguous().view(E4M3), sf)


# --- FlashInfer -------------------------------------------------------------------------------------------------------


def test_flashinfer_dequantise_is_bit_equal():
    dequantize = load("flashinfer.quantization.fp4_quantization")._e2m1_and_ufp8sf_scale_to_float_cpu
    for name in NAMES:
        q = f.nvfp4_quantize(case(name, torch.bfloat16))
        theirs = dequantize(q.data, q.sf.view(torch.uint8), q.global_scale.reshape(1), 16, 1, False)
        assert torch.equal(f.nvfp4_dequantize(*q), theirs)  # equal, not bitwise: their table has 0 for code 8


@pytest.mark.parametrize(("rows", "cols"), [(128, 4), (1, 1), (129, 5), (300, 7)])
def test_flashinfer_block_scale_layout(rows, cols):
    gemm = load("flashinfer.trace.templates.gemm")
    sf = torch.randint(1, 127, (rows, cols), dtype=torch.uint8)
    same(gemm._unswizzle_sf_128x4(f.to_128x4(sf).flatten(), rows, cols).contiguous(), sf)


@pytest.mark.parametrize("name", ["normal", "heavy", "exact", "129x64", "midpoints"])
def test_flashinfer_reference_differs_only_at_ties(flashinfer, name):
    """Its scale order is compressed-tensors'; it takes ties of elements to the smaller magnitude and keeps scale 0."""
    x = case(name, torch.float32)
    gs = f.nvfp4_global_scale(x)
    data, sf = flashinfer._nvfp4_quantize_reference(x, 1 / gs)
    ours = f.nvfp4_quantize(x, gs)
    quotient = scale_quotient(x, gs)
    differ = (bits(ours.sf) != bits(sf)) & ~((quotient <= 2**-10) & (sf.float() == 0))
    assert (ulps_from(quotient, E4M3_GRID)[differ] <= 4).all()
    alike = (bits(ours.sf) == bits(sf)).repeat_interleave(16, 1)
    assert alike.float().mean() > 0.98
    value = (x.view(*sf.shape, 16) / (ours.sf.float() * gs)[..., None]).view(x.shape).abs()
    wrong = (f.unpack_e2m1(ours.data) != f.unpack_e2m1(data)) & alike
    assert (ulps_from(value, E2M1_GRID)[wrong] <= 4).all()
    if name == "midpoints":
        assert wrong.any()
