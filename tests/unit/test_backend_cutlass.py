"""The CUTLASS backend without a GPU: which build serves what, layouts, and that the tables agree."""

from __future__ import annotations

import itertools

import pytest
import torch

from fp4dispatch import formats
from fp4dispatch.backends.base import LinearWeights
from fp4dispatch.backends.own import cutlass
from fp4dispatch.backends.own.tensors import operands
from fp4dispatch.backends.own.tiling import tiles
from fp4dispatch.errors import FlagsError
from fp4dispatch.jit.catalog.manifest import installed
from fp4dispatch.policy.catalogue import catalogue
from fp4dispatch.problem import Problem
from fp4dispatch.problem.arch import KNOWN_ARCHS, SM90, SM100, SM120

SMS = 132
TOKENS = (1, 16, 17, 32, 33, 64, 65, 128, 129, 4096, 100_000)
CLAIMS = [
    (c, arch, scaling, dtype)
    for c in catalogue().capabilities
    if c.backend == "cutlass"
    for arch, scaling, dtype in itertools.product(c.archs, c.scalings, c.out_dtypes)
]


def problem(op="fp8_gemm", m=16, n=4096, k=4096, scaling="row", out="bfloat16"):
    return Problem(op, m, n, k, "nvfp4" if op == "nvfp4_gemm" else "fp8", scaling, out)


@pytest.mark.parametrize(("claim", "sm", "scaling", "dtype"), CLAIMS)
def test_everything_that_the_capabilities_claim_has_a_build(claim, sm, scaling, dtype):
    (arch,) = (a for a in KNOWN_ARCHS if a.sm == sm)
    for m in TOKENS:
        assert tiles.tile_for(problem(claim.op, m, scaling=scaling, out=dtype), arch, SMS), (m, sm)


def test_every_build_of_the_gemms_is_used_or_the_manifest_is_too_large():
    used = {(tile.kernel, build) for tile in tiles.tiles() for build in tile.builds.values()}
    made = {
        (kernel.name, variant)
        for kernel in installed().kernels.values()
        if kernel.op in ("nvfp4_gemm", "fp8_gemm")
        for variant in kernel.variants
    }
    assert used == made


@pytest.mark.parametrize(
    ("m", "build"),
    [
        (1, "swap_64x16"),
        (16, "swap_64x16"),
        (17, "swap_64x32"),
        (64, "swap_64x64"),
        (128, "swap_64x64"),
        (129, "swap_64x64"),
        (385, "128x128"),
    ],
)
def test_decode_takes_the_narrow_tile(m, build):
    assert tiles.tile_for(problem(m=m), SM90, SMS).builds["bfloat16"] == f"row_bf16_{build}"


def test_two_sm_tile_only_where_it_fills_the_gpu():
    small, large = (tiles.tile_for(problem("nvfp4_gemm", m, scaling="nvfp4"), SM100, 148) for m in (16, 4096))
    assert small.builds["bfloat16"] == "bf16_1sm_128x128"
    assert large.builds["bfloat16"] == "bf16_2sm_256x128"
    assert tiles.tile_for(problem("nvfp4_gemm", scaling="nvfp4"), SM120, 188).kernel == "nvfp4_gemm_sm120"


def test_no_build_is_no_tile():
    assert tiles.tile_for(problem(scaling="block128"), SM100, SMS) is None
    assert tiles.tile_for(problem(out="float32"), SM90, SMS) is None
    assert tiles.tile_for(problem(), None, SMS) is None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tiles": 3}, "unknown key 'tiles'"),
        ({"scalings": ["col"]}, "scalings: .* must be a list of nvfp4, tensor"),
        ({"builds": {"bfloat32": "row_bf16_128x128"}}, "builds: unknown key 'bfloat32'"),
        ({"builds": {"bfloat16": "row_bf16_1x1"}}, "no variant 'row_bf16_1x1'"),
        ({"fill": {"tile": 1}}, "fill: unknown key 'tile'.*'tile_m' is missing"),
    ],
)
def test_a_wrong_row_is_refused(change, text):
    row = {"kernel": "fp8_gemm_sm90", "scalings": ["row"], "builds": {"bfloat16": "row_bf16_128x128"}}
    assert len(tiles.load({"tile": [row]}, installed())) == 1
    with pytest.raises(FlagsError, match=text):
        tiles.load({"tile": [row | change]}, installed())


def nvfp4_weights(n, k, shards=()):
    q = formats.nvfp4_quantize(torch.randn(n, k))
    scales = torch.rand(max(len(shards), 1)) + 0.5
    return LinearWeights("nvfp4_gemm", "nvfp4", n, k, q.data, q.sf, scales, shards or (n,))


def test_prepared_nvfp4_weights_are_the_same_values_padded_with_zeros():
    weights = nvfp4_weights(100, 48, (60, 40))
    w, sf, alpha = cutlass.CutlassBackend().prepare(weights).tensors
    assert w.shape == (104, 32)
    assert alpha.shape == (104,)
    one = torch.ones(())
    padded = formats.nvfp4_dequantize(w, sf, one, sf_layout="128x4")
    assert torch.equal(padded[:100, :48], formats.nvfp4_dequantize(weights.weight, weights.scale, one))
    assert not padded[100:].any()
    assert not padded[:, 48:].any()
    assert torch.equal(alpha[:100], formats.expand_shards(weights.global_scale, (60, 40)))


def test_weights_that_fit_are_not_copied():
    backend = cutlass.CutlassBackend()
    weight = torch.randn(64, 128).to(torch.float8_e4m3fn)
    fp8 = LinearWeights("fp8_gemm", "row", 64, 128, weight, torch.rand(64))
    assert backend.prepare(fp8).tensors[0].data_ptr() == weight.data_ptr()
    fp4 = nvfp4_weights(128, 64)
    assert backend.prepare(fp4).tensors[0].data_ptr() == fp4.weight.data_ptr()


def test_layouts_of_one_shape_are_equal_and_hashable():
    a, b = (cutlass.CutlassBackend().prepare(nvfp4_weights(64, 64)).layout for _ in range(2))
    assert a == b
    assert hash(a) == hash(b)


def test_activation_scales_of_blocks_are_laid_out_for_tma():
    given = torch.rand(7, 3)
    scale = cutlass._tokens_fastest(given, torch.empty(7, 300))
    assert torch.equal(scale, given)
    assert scale.stride() == (1, 8)


def test_misaligned_activations_are_copied_and_others_are_not():
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    assert operands.aligned(x, 64).data_ptr() == x.data_ptr()
    odd = torch.randn(4 * 64 + 1, dtype=torch.bfloat16)[1:].view(4, 64)
    copied = operands.aligned(odd, 64)
    assert copied.data_ptr() % 16 == 0
    assert torch.equal(copied, odd)
    assert operands.aligned(x, 80).shape == (4, 80)
