"""w8_gemm_sm90: FP8 weights in rows by packed FP8 activations, many tokens, every tile against an fp64 product."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp4dispatch.jit.catalog.manifest import installed
from tests import many_tokens
from tests.gpu.sm90 import OUT_DTYPES, needs_sm90
from tests.gpu.tiles import sees_one_wrong_element
from tests.gpu.w4_packed import (
    check_a_token_alone_and_with_others,
    check_argument_refused,
    check_no_tokens,
    check_shape_refused,
    check_tokens_stay_alone,
)
from tests.gpu.w8_packed import (
    LAUNCHES,
    SHAPES,
    TILES_16_BIT,
    WRONG_OPERANDS,
    AsTheyAre,
    Blocks,
    Problem,
    activations,
    check_capture,
    check_every_finite_code,
    check_nan_among_the_weights,
    check_pdl_chain,
    gemm,
    weight,
)

pytestmark = [pytest.mark.gpu, needs_sm90]

TILES = (96, 112, 128, 144, 160, 176, 192, 208, 224)
"""Tokens, of builds for scales by row. Block scales have 128."""
AT_ENDS = tuple((tile + more, 200, 528) for tile in TILES for more in (-1, 0, 1, 9))
# Whole tiles first, once and twice, and what is left of them in parts of K.
LEFT = (
    *(((1, 2, 8, 1), (300, 6016, 512)), ((1, 2, 8, 1), (300, 12160, 528)), ((1, 3, 8, 1), (300, 6016, 528))),
    *(((1, 4, 8, 1), (300, 6016, 1040)), ((1, 8, 8, 1), (300, 5504, 1040)), ((2, 2, 8, 1), (300, 6144, 512))),
    *(((1, 2, 8, 2), (300, 4480, 512)), ((2, 2, 1, 1), (300, 6136, 400))),
)


def test_the_builds_are_those_that_are_tested() -> None:
    """Those for block scales in test_kernels_w8_blocks.py, those by 16 bits in test_kernels_w8_gemm_16bit.py."""
    tiles = {Problem: TILES, Blocks: (128,), AsTheyAre: TILES_16_BIT}
    builds = {f"{kind.build}{dtype}_{tile}" for kind in tiles for dtype in OUT_DTYPES for tile in tiles[kind]}
    assert set(installed().kernel("w8_gemm_sm90").variants) == builds


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("variant", OUT_DTYPES)
def test_every_tile_and_the_same_bits_twice(variant: str, tile: int, launch: tuple[int, ...] | None) -> None:
    checked = 0
    for m, n, k in (*SHAPES, *AT_ENDS):
        if launch is not None and launch[1] > -(-k // 128):  # each part of K has a stage
            continue
        problem = Problem(OUT_DTYPES[variant], (m, n, k))
        if launch is None:
            problem.run(gemm(variant, tile).planned)
        else:
            problem.run(gemm(variant, tile).shaped, list(launch))
        problem.check(f"{variant} {tile} {launch}")
        checked += 1
    assert checked >= 4


@pytest.mark.parametrize(("launch", "mnk"), LEFT, ids=str)
def test_whole_tiles_and_then_parts_of_k(launch: tuple[int, ...], mnk: tuple[int, int, int]) -> None:
    problem = Problem(torch.bfloat16, mnk)
    problem.run(gemm().shaped, list(launch))
    problem.check(launch)


@pytest.mark.parametrize("split", [2, 3, 4, 8])
@pytest.mark.parametrize("tile", TILES)
def test_each_build_does_whole_tiles_and_then_parts_of_k(tile: int, split: int) -> None:
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    m, n = many_tokens.whole_tiles_first(gemm("bf16", tile).tile, (1, split), sms, 2, "few")
    problem = Problem(torch.bfloat16, (m, n, 1040))
    problem.run(gemm("bf16", tile).shaped, [1, split, 8, 1], times=3)
    problem.check(f"{tile} {split}")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("vector", [False, True])
def test_every_pair_of_bias_and_scales_of_columns(vector: bool, bias: bool) -> None:
    for m in (65, 130):
        problem = Problem(torch.bfloat16, (m, 200, 208))
        problem.alpha = (torch.rand(200 if vector else 1, device="cuda") + 0.5) * 2.0**-9
        problem.bias = torch.randn(200, device="cuda").bfloat16() if bias else None
        problem.run(gemm().planned)
        problem.check(f"{vector} {bias}")


@pytest.mark.parametrize("variant", OUT_DTYPES)
def test_one_static_scale_for_all_tokens(variant: str) -> None:
    for m in (65, 128, 200):
        problem = Problem(OUT_DTYPES[variant], (m, 264, 1040), static=0.013)
        problem.run(gemm(variant).planned)
        problem.check(variant)


@pytest.mark.parametrize("variant", OUT_DTYPES)
@pytest.mark.parametrize("m", [68, 136])
def test_every_finite_code_is_exact_at_every_k(variant: str, m: int) -> None:
    check_every_finite_code(gemm(variant).planned, OUT_DTYPES[variant], m)


@pytest.mark.parametrize("missing", [1, 7])
@pytest.mark.parametrize("launch", [(1, 1, 1, 1), (2, 1, 1, 1), (1, 1, 1, 2), (1, 2, 1, 1)], ids=str)
def test_rows_that_a_weight_lacks_are_zeros(launch: tuple[int, ...], missing: int) -> None:
    problem = Problem(torch.bfloat16, (200, 136, 208), missing=missing)
    problem.run(gemm().shaped, list(launch))
    problem.check(f"{missing} missing")


def test_nan_among_the_weights_makes_its_column_nan_and_no_other() -> None:
    check_nan_among_the_weights(gemm().planned, 133)


@pytest.mark.parametrize("tile", TILES)
def test_repeats_bit_for_bit(tile: int) -> None:
    for mnk in ((128, 4096, 4096), (256, 4096, 1040), (200, 1032, 2064)):
        Problem(torch.bfloat16, mnk).run(gemm("bf16", tile).planned, times=20)


@pytest.mark.parametrize("tile", TILES)
def test_a_token_has_the_same_bits_whoever_shares_its_tile(tile: int) -> None:
    check_a_token_alone_and_with_others(gemm("bf16", tile).planned, weight(1032, 2064), activations)


@pytest.mark.parametrize("tile", TILES)
def test_long_k_and_more_tiles_than_multiprocessors(tile: int) -> None:
    """A persistent grid's ring runs on into the next tile."""
    for mnk in ((1024, 5120, 512), (300, 256, 28672), (128, 28672, 512), (256, 28672, 1040)):
        problem = Problem(torch.bfloat16, mnk, alpha=2.0**-12)
        problem.run(gemm("bf16", tile).planned)
        problem.check()


def test_tokens_that_are_not_there_and_tokens_that_are_not_finite_stay_alone() -> None:
    check_tokens_stay_alone(gemm().planned, weight(136, 400), activations)


@pytest.mark.parametrize("static", [None, 0.01])
@pytest.mark.parametrize("m", [65, 128, 200, 512])
@pytest.mark.parametrize("tile", TILES)
def test_a_chain_under_pdl_has_the_bits_of_one_without(tile: int, m: int, static: float | None) -> None:
    """Each layer reads what the one before wrote, while its weights were already on their way."""
    check_pdl_chain(gemm("bf16", tile).planned, m, static)


def test_a_graph_replays_what_an_eager_call_wrote() -> None:
    check_capture(gemm().planned, 130)


def test_no_tokens_write_nothing() -> None:
    check_no_tokens(gemm().planned, w=weight(256, 512))
    check_no_tokens(gemm().shaped, [1, 1, 1, 1], w=weight(256, 512))


@pytest.mark.parametrize(("name", "change", "message"), WRONG_OPERANDS)
def test_wrong_operands_are_refused_before_a_launch(name: str, change: Any, message: str) -> None:
    problem = Problem(torch.bfloat16, (21, 136, 208))
    calls = gemm().planned, gemm().shaped
    check_argument_refused(problem, *calls, name, change, message, (1, 1, 1, 1))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ([1, 1, 1, 1], "shape: has 4 numbers, needed 6"),
        ([3, 1, 1, 1, 0, 1], "shape: multicast is 3, needed 1, 2 or 4"),
        ([1, 5, 1, 1, 0, 1], "shape: split is 5, needed 1, 2, 3, 4 or 8"),
        ([1, 3, 1, 1, 0, 1], "shape: split is 3, needed at most 2"),
        ([1, 1, 1, 4, 0, 1], "shape: sharing is 4, needed 1 or 2"),
        ([4, 2, 1, 2, 0, 1], r"shape: multicast \* split \* sharing is 16, needed at most 8"),
        ([1, 1, 0, 1, 0, 1], "shape: raster is 0, needed at least 1"),
        ([1, 2, 1, 1, 0, 1], "0 whole tiles and split up to 1, but there are 2 tiles"),
    ],
)
def test_wrong_launch_shapes_are_refused(shape: list[int], message: str) -> None:
    check_shape_refused(Problem(torch.bfloat16, (21, 136, 208)), gemm().entry, shape, message)


def test_the_check_sees_one_wrong_element() -> None:
    problem = Problem(torch.bfloat16, (100, 264, 144))
    problem.run(gemm().planned)
    sees_one_wrong_element(problem)
