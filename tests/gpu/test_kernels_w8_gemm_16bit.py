"""w8_gemm_sm90 by 16-bit activations: FP8 weights in rows, many tokens, every tile against an fp64 product."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import many_tokens
from tests.gpu.sm90 import OUT_DTYPES, needs_sm90
from tests.gpu.tiles import sees_one_wrong_element
from tests.gpu.w4_packed import check_no_tokens, check_nothing_around_enters, check_shape_refused
from tests.gpu.w8_packed import (
    LAUNCHES,
    SHAPES,
    TILES_16_BIT,
    AsTheyAre,
    check_every_finite_code,
    check_pdl_chain,
    gemm,
    weight,
)

pytestmark = [pytest.mark.gpu, needs_sm90]

STAGE_K = 64


def build(tile: int = 128, dtype: str = "bf16") -> Any:
    """A build by its tokens and its type."""
    return gemm(f"a16_{dtype}", tile)


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
@pytest.mark.parametrize("tile", TILES_16_BIT)
@pytest.mark.parametrize("variant", OUT_DTYPES)
def test_every_tile_and_the_same_bits_twice(variant: str, tile: int, launch: tuple[int, ...] | None) -> None:
    checked = 0
    for m, n, k in (*SHAPES, *((tile + more, 200, 528) for more in (-1, 0, 1, 9))):
        if launch is not None and launch[1] > -(-k // STAGE_K):  # each part of K has a stage
            continue
        problem = AsTheyAre(OUT_DTYPES[variant], (m, n, k))
        if launch is None:
            problem.run(build(tile, variant).planned)
        else:
            problem.run(build(tile, variant).shaped, list(launch))
        problem.check(f"{variant} {tile} {launch}")
        checked += 1
    assert checked >= 4


@pytest.mark.parametrize("split", [2, 3, 4, 8])
@pytest.mark.parametrize("tile", TILES_16_BIT)
def test_each_build_does_whole_tiles_and_then_parts_of_k(tile: int, split: int) -> None:
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    m, n = many_tokens.whole_tiles_first(build(tile).tile, (1, split), sms, 2, "few")
    problem = AsTheyAre(torch.bfloat16, (m, n, 1040))
    problem.run(build(tile).shaped, [1, split, 8, 1], times=3)
    problem.check(f"{tile} {split}")


@pytest.mark.parametrize("variant", OUT_DTYPES)
@pytest.mark.parametrize("m", [68, 136])
def test_every_finite_code_is_exact_at_every_k(variant: str, m: int) -> None:
    check_every_finite_code(build(128, variant).planned, OUT_DTYPES[variant], m, quantised=False)


@pytest.mark.parametrize("missing", [1, 7])
@pytest.mark.parametrize("launch", [(1, 1, 1, 1), (2, 1, 1, 1), (1, 1, 1, 2), (1, 2, 1, 1)], ids=str)
def test_rows_that_a_weight_lacks_are_zeros(launch: tuple[int, ...], missing: int) -> None:
    problem = AsTheyAre(torch.bfloat16, (200, 136, 208), missing=missing)
    problem.run(build().shaped, list(launch))
    problem.check(f"{missing} missing")


@pytest.mark.parametrize("tile", TILES_16_BIT)
def test_repeats_bit_for_bit(tile: int) -> None:
    for mnk in ((128, 4096, 4096), (256, 4096, 1040), (200, 1032, 2064)):
        AsTheyAre(torch.bfloat16, mnk).run(build(tile).planned, times=20)


@pytest.mark.parametrize("tile", TILES_16_BIT)
def test_long_k_and_more_tiles_than_multiprocessors(tile: int) -> None:
    """A persistent grid's ring runs on into the next tile."""
    for mnk in ((1024, 5120, 512), (300, 256, 28672), (128, 28672, 512), (256, 28672, 1040)):
        problem = AsTheyAre(torch.bfloat16, mnk, alpha=2.0**-12)
        problem.run(build(tile).planned)
        problem.check()


def test_a_token_that_is_not_finite_stays_alone() -> None:
    x, one = torch.randn(70, 256, device="cuda").bfloat16(), torch.ones(1, device="cuda")
    x[3, 7] = torch.nan
    for tile in TILES_16_BIT:
        out = torch.zeros(70, 128, device="cuda", dtype=torch.bfloat16)
        build(tile).planned(x, None, weight(128, 256), one, None, out, False)
        assert out[3].isnan().all()
        assert out[torch.arange(70, device="cuda") != 3].isfinite().all()


@pytest.mark.parametrize("tile", TILES_16_BIT)
def test_nothing_around_activations_enters(tile: int) -> None:
    for m, n, k in ((65, 136, 208), (77, 264, 272), (300, 392, 1040), (256, 264, 192)):
        check_nothing_around_enters(AsTheyAre(torch.bfloat16, (m, n, k)), build(tile).planned)


@pytest.mark.parametrize("m", [65, 128, 200, 512])
@pytest.mark.parametrize("tile", TILES_16_BIT)
def test_a_chain_under_pdl_has_the_bits_of_one_without(tile: int, m: int) -> None:
    check_pdl_chain(build(tile).planned, m, quantised=False)


def test_no_tokens_write_nothing() -> None:
    check_no_tokens(build().planned, fp8=False, w=weight(256, 512))
    check_no_tokens(build().shaped, [1, 1, 1, 1], fp8=False, w=weight(256, 512))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("x", lambda p: p.x.view(torch.uint8), "x: dtype is uint8, needed bfloat16 or float16"),
        ("x", lambda p: p.x.half(), "x: dtype is float16, needed bfloat16"),
        ("x", lambda p: p.x[:69], r"x: size of dimension 0 is 69, needed 70 \(M\)"),
        ("x", lambda p: p.x[:, :192], "x: K is 192, but that of w is 208"),
        ("x", lambda p: p.x.t().contiguous().t(), "x: the last dimension has stride 70, needed 1"),
        ("x", lambda p: torch.cat([p.x, p.x[:, :4]], 1)[:, :208], "row stride of x is 212, needed a multiple of 8"),
        ("x", lambda p: torch.cat([p.x, p.x], 1)[:, 4:212], "x: address is 8 past a multiple of 16 bytes"),
        ("x", lambda p: p.x[:1].expand(70, 208), "x: rows are 0 elements apart, needed at least K"),
        ("x", lambda p: p.x.cpu(), "x: is not on a CUDA device"),
        ("x_scale", lambda p: torch.ones(70, device="cuda"), "x_scale: a tensor, but 16-bit activations have no"),
        ("w", lambda p: p.w[:64], r"w: size of dimension 0 is 64, needed 128 \(N\), or up to 7 less"),
        ("w", lambda p: p.w[:, :200].contiguous(), "K is 200, needed a multiple of 16"),
        ("alpha", lambda p: torch.ones(3, device="cuda"), "alpha: has 3 elements, needed 1 or 128"),
        ("out", lambda p: p.out.half(), "out: dtype is float16, needed bfloat16"),
    ],
)
def test_wrong_operands_are_refused_before_a_launch(name: str, change: Any, message: str) -> None:
    problem = AsTheyAre(torch.bfloat16, (70, 128, 208))
    given = problem.operands() | {name: change(problem)}
    with pytest.raises((ValueError, TypeError), match=message):
        build().planned(*given.values(), False)
    torch.cuda.synchronize()
    assert problem.out.isnan().all()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ([1, 5, 1, 1, 0, 1], "shape: split is 5, needed 1, 2, 3, 4 or 8"),
        ([1, 8, 1, 1, 0, 1], "shape: split is 8, needed at most 4"),
        ([4, 2, 1, 2, 0, 1], r"shape: multicast \* split \* sharing is 16, needed at most 8"),
        ([1, 2, 1, 1, 0, 1], "0 whole tiles and split up to 1, but there are 2 tiles"),
    ],
)
def test_wrong_launch_shapes_are_refused(shape: list[int], message: str) -> None:
    check_shape_refused(AsTheyAre(torch.bfloat16, (21, 136, 208)), build().entry, shape, message)


def test_the_check_sees_one_wrong_element() -> None:
    problem = AsTheyAre(torch.bfloat16, (100, 264, 144))
    problem.run(build().planned)
    sees_one_wrong_element(problem)
