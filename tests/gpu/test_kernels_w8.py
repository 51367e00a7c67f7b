"""The kernel for FP8 weights and few tokens against an fp64 product of the weights, tile by tile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp4dispatch.backends.own.tiling.few_tokens import KERNELS
from tests.gpu import few_tokens
from tests.gpu.few_tokens import DTYPES, NK, WRONG_ARGUMENTS, WRONG_SHAPES, needs_sm80
from tests.gpu.few_tokens import E4m3 as Problem

pytestmark = [pytest.mark.gpu, needs_sm80]

SM90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
TILES = tuple(KERNELS[Problem.name].instances)


@pytest.mark.parametrize("variant", DTYPES)
@pytest.mark.parametrize("nk", NK, ids=str)
def test_every_tile_is_right_for_every_m(variant: str, nk: tuple[int, int]) -> None:
    few_tokens.check_every_m(Problem, variant, nk)


@pytest.mark.parametrize("variant", DTYPES)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_launch_shape_is_right(variant: str, tile: tuple[int, ...]) -> None:
    few_tokens.check_launch_shapes(Problem, variant, tile, ((1, 0), (2, 1), (2, 100)))


@pytest.mark.parametrize("variant", DTYPES)
@pytest.mark.parametrize("m", [8, 16, 32])
def test_every_finite_code_is_exact_at_every_k(variant: str, m: int) -> None:
    """Subnormals and -0 too: one weight a product, so that nothing is rounded."""
    dtype, module = DTYPES[variant], Problem(variant, 1, 8, 16).module
    codes = (torch.arange(256).view(256, 1) + 7 * torch.arange(272)).remainder(256).to(torch.uint8).cuda()
    codes[codes & 0x7F == 0x7F] = 0x80
    w = codes.view(torch.float8_e4m3fn)
    for first in range(0, 272, m):
        x = torch.zeros(m, 272, device="cuda", dtype=dtype)
        x[torch.arange(m), torch.arange(first, first + m) % 272] = 1
        out = torch.full((m, 256), torch.nan, device="cuda", dtype=dtype)
        module.w8a16_small(x, w, torch.ones(1, device="cuda"), None, out, False)
        assert torch.equal(out.double(), x.double() @ w.double().t())


@pytest.mark.parametrize("missing", [1, 7])
def test_rows_that_a_weight_lacks_are_zeros(missing: int) -> None:
    problem = Problem("bf16", 5, 136, 208, vector=True)
    problem.dense[136 - missing :] = 0
    problem.w[136 - missing :] = torch.nan  # in memory after the shorter weight
    problem.run(w=problem.w[: 136 - missing])
    problem.check()


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
@pytest.mark.parametrize("m", [1, 16, 32])
def test_a_chain_under_pdl_has_the_bits_of_one_without(m: int, variant: str) -> None:
    """Each layer reads what the one before wrote, while its weights were already on their way."""
    few_tokens.check_pdl_chain([Problem(variant, seed, 2048, 2048) for seed in (1, 2, 3)], m)


def test_no_tokens_is_no_launch() -> None:
    few_tokens.check_no_tokens(Problem)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        *WRONG_ARGUMENTS,
        ("x", lambda p: p.x[:, :128], r"w: size of dimension 1 is 208, needed 128 \(K\)"),
        ("w", lambda p: p.w[:128], "w: size of dimension 0 is 128, needed 136"),
        ("w", lambda p: p.w.view(torch.uint8), "w: dtype is uint8, needed float8_e4m3fn"),
        ("w", lambda p: p.w.t().contiguous().t(), "w: not contiguous"),
    ],
)
def test_wrong_arguments_are_refused(name: str, change: Any, message: str) -> None:
    few_tokens.check_argument_refused(Problem, name, change, message)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        *WRONG_SHAPES,
        ((16, 1, 2, 1, 1, 2, 0), "no kernel for 16 tokens, 1 row blocks, 2 groups and 1 units"),
        ((8, 1, 4, 2, 1, 0, 0), "0 stages, needed 1 to 15"),
    ],
)
def test_wrong_launch_shapes_are_refused(shape: tuple[int, ...], message: str) -> None:
    few_tokens.check_shape_refused(Problem, shape, message)


def test_the_check_sees_one_wrong_element() -> None:
    few_tokens.check_one_wrong_element_is_seen(Problem)
