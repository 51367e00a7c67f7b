"""w8a8_small and w8_gemm_sm90 under 128x128 block scales, every tile against an fp64 product of the e4m3 values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp4dispatch import formats
from fp4dispatch.backends.own.tiling.few_tokens import CLUSTERS
from fp4dispatch.jit.catalog.manifest import installed
from tests import w8_fake
from tests.gpu import test_kernels_w8_gemm as many
from tests.gpu import test_kernels_w8a8 as few
from tests.gpu.few_tokens import NK, WGMMA_M
from tests.gpu.sm90 import OUT_DTYPES, needs_sm90
from tests.gpu.test_kernels_quantize import any_bits, assert_same, inputs, ordinary
from tests.gpu.tiles import sees_one_wrong_element
from tests.gpu.w4_packed import (
    check_a_token_alone_and_with_others,
    check_argument_refused,
    check_no_tokens,
    check_tokens_stay_alone,
    empty_packed,
    packer,
)
from tests.gpu.w8_packed import (
    Blocks,
    block_activations,
    block_scales,
    check_capture,
    check_nan_among_the_weights,
    check_pdl_chain,
    gemm,
    kernel,
    weight,
)

pytestmark = [pytest.mark.gpu, needs_sm90]

CALLS = {
    "few": (lambda variant: kernel(f"block_{variant}").w8a8_small, (5, 16, 17, 33, 64, 90, 100, 200)),
    "many": (lambda variant: gemm(f"block_{variant}").planned, (1, 65, 128, 200, 300)),
}
"""Kernels, and numbers of tokens that take all of their tiles."""
both = pytest.mark.parametrize("which", CALLS)


def call_of(which: str, variant: str = "bf16") -> Any:
    return CALLS[which][0](variant)


def test_the_builds_are_those_that_are_tested() -> None:
    """Those for other scales in test_kernels_w8a8.py."""
    builds = {f"{block}{dtype}" for block in ("", Blocks.build) for dtype in OUT_DTYPES}
    assert set(installed().kernel("w8a8_small").variants) == builds


# ----------------------------------------------------------------------------------------------------------- quantiser


def quantised(x: torch.Tensor, pdl: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    packed, scale = empty_packed(*x.shape), block_scales(*x.shape)
    packer().w8_quantize_block(x, packed, scale, pdl)
    return packed.cpu(), scale.cpu()


def check_quantised(x: torch.Tensor, on_gpu: torch.Tensor, pdl: bool = False) -> None:
    """Codes, zeros beyond M and K, scales, and 1 beyond M, bit for bit."""
    packed, scale = quantised(on_gpu, pdl)
    q = formats.fp8_quantize(x, "1x128")
    want = torch.ones_like(scale)
    want[:, : x.shape[0]] = q.scale.t()
    assert_same("scales", scale, want, x)
    assert_same("codes", packed, w8_fake.pack_activation(q.data), x)


def test_every_pattern_of_bits_equals_formats() -> None:
    """Ragged tokens and K, blocks of zeros, NaN, Inf and subnormals."""
    for x in inputs():
        for pdl in (False, True):
            check_quantised(x, x.cuda(), pdl)


@pytest.mark.parametrize("dtype", OUT_DTYPES.values(), ids=str)
@pytest.mark.parametrize(("m", "k"), [(300, 4096), (300, 4112), (1000, 4096), (1021, 4240), (3, 40_000)])
def test_warps_with_several_blocks_equal_formats(dtype: torch.dtype, m: int, k: int) -> None:
    for x in (ordinary(m, k, dtype), any_bits(m, k, dtype)):
        check_quantised(x, x.cuda())


def test_rows_with_a_stride() -> None:
    wide = torch.full((33, 304), torch.nan).bfloat16()
    wide[:, 16:288] = ordinary(33, 272, torch.bfloat16)
    check_quantised(wide[:, 16:288], wide.cuda()[:, 16:288])


def test_no_tokens_are_quantised_to_nothing() -> None:
    x, guard = torch.zeros(0, 64, device="cuda").bfloat16(), torch.ones(8, device="cuda")
    for pdl in (False, True):
        packed = torch.zeros(1, 0, 1024, device="cuda", dtype=torch.uint8)
        packer().w8_quantize_block(x, packed, guard[:0].view(1, 0), pdl)
    torch.cuda.synchronize()
    assert bool((guard == 1).all())


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("x", lambda t: t.float(), "x: dtype is float32"),
        ("x", lambda t: t.cpu(), "CUDA device|packed: is not on"),
        ("packed", lambda t: t[:1], r"packed: size of dimension 0 is 1, needed 2 \(ceil\(K/128\)\)"),
        ("scale", lambda t: t[:, :21].contiguous(), r"scale: size of dimension 1 is 21, needed 24 \(8 ceil\(M/8\)\)"),
        ("scale", lambda t: t[:1], r"scale: size of dimension 0 is 1, needed 2 \(ceil\(K/128\)\)"),
        ("scale", lambda t: t.t().contiguous().t(), "scale: not contiguous"),
        ("scale", lambda t: t.half(), "scale: dtype is float16, needed float32"),
        ("scale", lambda t: t.cpu(), "CUDA device|scale: is not on"),
    ],
)
def test_wrong_operands_of_the_quantiser_are_refused(name: str, change: Callable[..., Any], message: str) -> None:
    given = {
        "x": torch.randn(21, 208, device="cuda").bfloat16(),
        "packed": empty_packed(21, 208),
        "scale": block_scales(21, 208),
    }
    with pytest.raises((ValueError, TypeError), match=message):
        packer().w8_quantize_block(*(given | {name: change(given[name])}).values(), False)
    torch.cuda.synchronize()
    assert bool((given["packed"] == 0xFF).all())
    assert bool(given["scale"].isnan().all())


# ----------------------------------------------------------------------------------------------------------- few tokens


@pytest.mark.parametrize("nk", NK, ids=str)
@pytest.mark.parametrize("variant", OUT_DTYPES)
def test_few_tokens_every_tile_is_right_for_every_m(variant: str, nk: tuple[int, int]) -> None:
    for m in WGMMA_M:
        problem = Blocks(OUT_DTYPES[variant], (m, *nk))
        problem.run(call_of("few", variant))
        problem.check(variant)


@pytest.mark.parametrize("instance", few.INSTANCES, ids=str)
@pytest.mark.parametrize("variant", OUT_DTYPES)
def test_few_tokens_every_launch_shape_is_right(variant: str, instance: tuple[int, ...]) -> None:
    """Parts of K without a stage too, and several tiles of tokens."""
    for mnk in ((7, 200, 48), (33, 264, 400), (100, 136, 2064)):
        problem = Blocks(OUT_DTYPES[variant], mnk)
        for cluster in CLUSTERS:
            for stages in (2, 3, 4):
                for trigger in (stages, 0, 100):
                    problem.run(kernel(f"block_{variant}").w8a8_small_shaped, [*instance, cluster, stages, trigger])
                    problem.check(f"{variant} {instance} {cluster} {stages} {trigger}")


# ---------------------------------------------------------------------------------------------------------- many tokens


@pytest.mark.parametrize("launch", many.LAUNCHES, ids=str)
@pytest.mark.parametrize("variant", OUT_DTYPES)
def test_many_tokens_every_tile_and_the_same_bits_twice(variant: str, launch: tuple[int, ...] | None) -> None:
    """A last tile of rows that is not full, alone and in a cluster, and CTAs of a cluster that have no rows."""
    checked = 0
    for m, n, k in many.SHAPES:
        if launch is not None and launch[1] > -(-k // 128):  # each part of K has a stage
            continue
        problem = Blocks(OUT_DTYPES[variant], (m, n, k))
        if launch is None:
            problem.run(call_of("many", variant))
        else:
            problem.run(gemm(f"block_{variant}").shaped, list(launch))
        problem.check(f"{variant} {launch}")
        checked += 1
    assert checked >= 4


@pytest.mark.parametrize(("launch", "mnk"), many.LEFT, ids=str)
def test_many_tokens_whole_tiles_and_then_parts_of_k(launch: tuple[int, ...], mnk: tuple[int, int, int]) -> None:
    problem = Blocks(torch.bfloat16, mnk)
    problem.run(gemm("block_bf16").shaped, list(launch))
    problem.check(launch)


# ----------------------------------------------------------------------------------------------------------------- both


@both
def test_long_k_and_more_tiles_than_multiprocessors(which: str) -> None:
    """Rings run on into the next tile; an odd and an even number of stages."""
    for mnk in ((64, 256, 28672), (16, 28672, 512), (300, 5120, 528), (128, 28672, 640)):
        problem = Blocks(torch.bfloat16, mnk, alpha=2.0**-12)
        problem.run(call_of(which))
        problem.check(which)


@both
@pytest.mark.parametrize("missing", [1, 7])
def test_rows_that_a_weight_lacks_are_zeros(which: str, missing: int) -> None:
    """Of a tile with others, and the last ones of a block of rows."""
    for m, n in ((33, 136), (200, 136), (64, 256)):
        problem = Blocks(torch.bfloat16, (m, n, 208), missing=missing)
        problem.run(call_of(which))
        problem.check(f"{which} {missing} missing")


@both
def test_a_bias_and_none(which: str) -> None:
    for m in CALLS[which][1]:
        problem = Blocks(torch.bfloat16, (m, 200, 336))
        for bias in (None, torch.randn(200, device="cuda").bfloat16()):
            problem.bias = bias
            problem.run(call_of(which))
            problem.check(f"{which} {bias is None}")


@both
def test_repeats_bit_for_bit(which: str) -> None:
    for m in CALLS[which][1]:
        Blocks(torch.bfloat16, (m, 1032, 2064)).run(call_of(which), times=20)


@both
def test_nan_among_the_weights_makes_its_column_nan_and_no_other(which: str) -> None:
    for m in CALLS[which][1]:
        check_nan_among_the_weights(call_of(which), m, Blocks)


@both
def test_nan_among_block_scales_makes_their_rows_nan_and_no_others(which: str) -> None:
    for m in CALLS[which][1]:
        problem = Blocks(torch.bfloat16, (m, 392, 528))
        problem.alpha[1, 4] = torch.nan
        problem.run(call_of(which))
        assert problem.out.isnan().all(0).nonzero().flatten().tolist() == list(range(128, 256))
        assert int(problem.out.isnan().sum()) == 128 * m


@both
def test_a_token_has_the_same_bits_whoever_shares_its_tile(which: str) -> None:
    check_a_token_alone_and_with_others(call_of(which), weight(1032, 2064), block_activations, (9, 17))


@both
def test_tokens_that_are_not_there_and_tokens_that_are_not_finite_stay_alone(which: str) -> None:
    check_tokens_stay_alone(call_of(which), weight(136, 400), block_activations, (2, 4))


@both
def test_a_chain_under_pdl_has_the_bits_of_one_without(which: str) -> None:
    """Each layer reads what the one before wrote, while its weights were already on their way."""
    for m in CALLS[which][1]:
        check_pdl_chain(call_of(which), m, blocks=True)


@both
def test_a_graph_replays_what_an_eager_call_wrote(which: str) -> None:
    for m in CALLS[which][1]:
        check_capture(call_of(which), m, blocks=True)


@both
def test_no_tokens_write_nothing(which: str) -> None:
    scales = torch.ones(4, 0, device="cuda"), torch.ones(2, 4, device="cuda")
    check_no_tokens(call_of(which), w=weight(256, 512), scales=scales)


SHAPED = {
    "few": (lambda: kernel("block_bf16").w8a8_small_shaped, few.SHAPE),
    "many": (lambda: gemm("block_bf16").shaped, (1, 1, 1, 1)),
}


@both
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("x_scale", lambda p: p.x_scale[0], "x_scale: has 1 dimensions, needed 2"),
        ("x_scale", lambda p: p.x_scale[:1], r"x_scale: size of dimension 0 is 1, needed 2 \(ceil\(K/128\)\)"),
        ("x_scale", lambda p: p.x_scale[:, :16].contiguous(), "x_scale: size of dimension 1 is 16, needed 24"),
        ("x_scale", lambda p: p.x_scale.cpu(), "x_scale: is not on a CUDA device"),
        ("alpha", lambda p: p.alpha.view(-1), "alpha: has 1 dimensions, needed 2"),
        ("alpha", lambda p: p.alpha[:1], r"alpha: size of dimension 0 is 1, needed 2 \(ceil\(N/128\)\)"),
        (
            "alpha",
            lambda p: p.alpha[:, :1].contiguous(),
            r"alpha: size of dimension 1 is 1, needed 2 \(ceil\(K/128\)\)",
        ),
        ("alpha", lambda p: p.alpha.cpu(), "alpha: is not on a CUDA device"),
    ],
)
def test_wrong_block_scales_are_refused_before_a_launch(
    which: str, name: str, change: Callable[..., Any], message: str
) -> None:
    problem = Blocks(torch.bfloat16, (21, 136, 208))
    shaped, shape = SHAPED[which]
    check_argument_refused(problem, call_of(which), shaped(), name, change, message, shape)


@both
def test_the_check_sees_one_wrong_element_and_one_wrong_scale(which: str) -> None:
    problem = Blocks(torch.bfloat16, (33, 264, 400))
    problem.run(call_of(which))
    sees_one_wrong_element(problem)
    for change in (functools.partial(torch.roll, shifts=1, dims=0), functools.partial(torch.roll, shifts=1, dims=1)):
        for scale in ("x_scale", "alpha"):
            problem = Blocks(torch.bfloat16, (33, 264, 400))
            weights = problem.weights()
            setattr(problem, scale, change(getattr(problem, scale)).contiguous())
            problem.run(call_of(which))
            problem.weights = lambda weights=weights: weights
            with pytest.raises(AssertionError, match="of 3 tiles wrong"):
                problem.check()
