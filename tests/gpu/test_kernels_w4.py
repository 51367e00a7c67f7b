"""The W4P kernels against an fp64 product of the exact dequantised weight, tile by tile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp4dispatch.backends.own.tiling.few_tokens import KERNELS, WITHOUT_WGMMA
from tests.gpu import few_tokens
from tests.gpu.few_tokens import DTYPES, NK, WRONG_ARGUMENTS, WRONG_SHAPES, needs_sm80
from tests.gpu.few_tokens import Nvfp4 as Problem

pytestmark = [pytest.mark.gpu, needs_sm80]

NAME = Problem.name

SM90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
TILES = [tile for tile in KERNELS[NAME].instances if SM90 or tile[3] > 1]  # 1 unit is wgmma
TILES += [] if SM90 else WITHOUT_WGMMA[NAME]


@pytest.mark.parametrize("variant", DTYPES)
@pytest.mark.parametrize("nk", NK, ids=str)
def test_every_tile_is_right_for_every_m(variant: str, nk: tuple[int, int]) -> None:
    few_tokens.check_every_m(Problem, variant, nk)


@pytest.mark.parametrize("variant", DTYPES)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_launch_shape_is_right(variant: str, tile: tuple[int, ...]) -> None:
    wgmma = tile[3] == 1
    few_tokens.check_launch_shapes(Problem, variant, tile, ((2 if wgmma else 1, 0), (2, 1), (3, 100)))


@pytest.mark.slow
@pytest.mark.skipif(not SM90, reason="from SM80 to SM89 the other tests run this build")
def test_what_sm80_runs_is_right_too() -> None:
    """A build of its own, from its PTX."""
    few_tokens.check_what_sm80_runs(Problem)


@pytest.mark.parametrize("variant", DTYPES)
def test_repeats_bit_for_bit(variant: str) -> None:
    few_tokens.check_repeats(Problem, variant)


def test_a_token_has_the_same_bits_whoever_shares_its_launch() -> None:
    few_tokens.check_a_token_alone_and_with_others(Problem)


def test_not_finite_activations_stay_with_their_token() -> None:
    few_tokens.check_not_finite_stays_alone(Problem)


@pytest.mark.parametrize("variant", DTYPES)
@pytest.mark.parametrize("m", [1, 16, 32, 48, 64, 96, 700])
def test_a_chain_under_pdl_has_the_bits_of_one_without(m: int, variant: str) -> None:
    """Each layer reads what the one before wrote, while its weights were already on their way."""
    few_tokens.check_pdl_chain([Problem(variant, 1, 2048, 2048) for _ in range(3)], m)


def test_no_tokens_is_no_launch() -> None:
    few_tokens.check_no_tokens(Problem)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        *WRONG_ARGUMENTS,
        ("x", lambda p: p.x[:, :128], r"w: size of dimension 1 is 4, needed 2 \(ceil\(K/64\)\)"),
        ("w", lambda p: p.w[:2], "w: size of dimension 0"),
        ("w", lambda p: p.w.view(torch.int8), "w: dtype is int8"),
    ],
)
def test_wrong_arguments_are_refused(name: str, change: Any, message: str) -> None:
    few_tokens.check_argument_refused(Problem, name, change, message)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        *WRONG_SHAPES,
        ((8, 3, 4, 2, 1, 2, 0), "no kernel for 8 tokens, 3 row blocks"),
        ((8, 1, 4, 2, 1, 0, 0), "0 stages, needed 1 to 7"),
    ],
)
def test_wrong_launch_shapes_are_refused(shape: tuple[int, ...], message: str) -> None:
    few_tokens.check_shape_refused(Problem, shape, message)


def test_the_check_sees_one_wrong_element() -> None:
    few_tokens.check_one_wrong_element_is_seen(Problem)
