"""The kernel for FP8 weights and few tokens against an fp64 product of the weights, tile by tile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu import tiles
from tests.gpu.few_tokens import DTYPES, NK, RAGGED_M, check_pdl_chain, clusters
from tests.gpu.few_tokens import E4m3 as Problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="needs a GPU from SM80 on"
    ),
]

# Tokens, row blocks, groups and units of what is built.
TILES = (
    *((8, *tile) for tile in ((1, 4, 2), (2, 2, 4), (2, 4, 4))),
    *((16, *tile) for tile in ((1, 4, 2), (2, 2, 4), (2, 4, 4), (4, 2, 4))),
    *((32, *tile) for tile in ((1, 4, 2), (2, 2, 4), (2, 4, 4), (4, 2, 4), (1, 2, 2))),
)


@pytest.mark.parametrize("variant", DTYPES)
@pytest.mark.parametrize("nk", NK, ids=str)
def test_every_tile_is_right_for_every_m(variant: str, nk: tuple[int, int]) -> None:
    for m in RAGGED_M:
        problem = Problem(variant, m, *nk, bias=m % 2 == 1, vector=m % 3 == 1)
        problem.run()
        problem.check()


@pytest.mark.parametrize("variant", DTYPES)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_launch_shape_is_right(variant: str, tile: tuple[int, ...]) -> None:
    for nk in ((264, 144), (136, 2064)):
        problem = Problem(variant, 33, *nk, bias=True, vector=True)
        for cluster in clusters():
            for stages, trigger in ((1, 0), (2, 1), (2, 100)):
                problem.out.fill_(torch.nan)
                problem.run((*tile, cluster, stages, trigger))
                problem.check()


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


@pytest.mark.parametrize("variant", DTYPES)
def test_repeats_bit_for_bit(variant: str) -> None:
    for m, n, k in ((1, 4096, 4096), (16, 1032, 2064), (32, 4096, 1040)):
        problem = Problem(variant, m, n, k, bias=True)
        first = problem.run().clone()
        for _ in range(20):
            problem.out.fill_(torch.nan)
            assert torch.equal(tiles.bits(problem.run(pdl=problem.pdl)), tiles.bits(first))


def test_a_token_has_the_same_bits_whoever_shares_its_launch() -> None:
    problem = Problem("bf16", 8, 1032, 2064)
    together = problem.run().clone()
    for token in range(8):
        alone = torch.empty(1, 1032, device="cuda", dtype=torch.bfloat16)
        problem.run(x=problem.x[token : token + 1], out=alone)
        assert torch.equal(tiles.bits(alone[0]), tiles.bits(together[token]))


def test_not_finite_activations_stay_with_their_token() -> None:
    problem = Problem("bf16", 5, 136, 208)
    problem.x[2, 207], problem.x[4, 0] = torch.inf, torch.nan
    problem.run()
    assert problem.out[4].isnan().all()
    assert not problem.out[2].isfinite().any()
    assert problem.out[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("m", [1, 16, 32])
def test_a_chain_under_pdl_has_the_bits_of_one_without(m: int) -> None:
    """Each layer reads what the one before wrote, while its weights were already on their way."""
    layers = [Problem("bf16", seed, 2048, 2048) for seed in (1, 2, 3)]
    if not layers[0].pdl:
        pytest.skip("this GPU has no PDL")
    check_pdl_chain(layers, m)


def test_no_tokens_is_no_launch() -> None:
    problem = Problem("bf16", 0, 136, 144)
    problem.run()
    torch.cuda.synchronize()
    assert problem.guard.isnan().all()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("x", lambda p: p.x.half(), "x: dtype is float16, needed bfloat16"),
        ("x", lambda p: p.x[:, :128], r"w: size of dimension 1 is 208, needed 128 \(K\)"),
        ("x", lambda p: p.x.cpu(), "on a CUDA device|w: is not on"),
        ("w", lambda p: p.w[:128], "w: size of dimension 0 is 128, needed 136"),
        ("w", lambda p: p.w.view(torch.uint8), "w: dtype is uint8, needed float8_e4m3fn"),
        ("w", lambda p: p.w.t().contiguous().t(), "w: not contiguous"),
        ("alpha", lambda p: p.alpha.expand(3).contiguous(), "alpha: has 3 elements, needed 1 or 136"),
        ("bias", lambda p: torch.zeros(136, device="cuda"), "bias: dtype is float32"),
        ("out", lambda p: p.out[:-1], "out: size of dimension 0 is 4, needed 5"),
        ("out", lambda p: p.out.t().contiguous().t(), "out: not contiguous"),
    ],
)
def test_wrong_arguments_are_refused(name: str, change: Any, message: str) -> None:
    problem = Problem("bf16", 5, 136, 208)
    with pytest.raises((ValueError, TypeError), match=message):
        problem.run(**{name: change(problem)})
    torch.cuda.synchronize()
    assert problem.out.isnan().all()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((8, 1, 4, 2, 1, 2), "shape: has 6 numbers, needed 7"),
        ((16, 1, 2, 1, 1, 2, 0), "no kernel for 16 tokens, 1 row blocks, 2 groups and 1 units"),
        ((8, 1, 4, 2, 3, 2, 0), "cluster is 3"),
        ((8, 1, 4, 2, 1, 0, 0), "0 stages, needed 1 to 15"),
        ((8, 2, 2, 4, 1, 15, 0), "bytes of shared memory"),
        ((8, 1, 4, 2, 1, 2, -1), "trigger is -1"),
    ],
)
def test_wrong_launch_shapes_are_refused(shape: tuple[int, ...], message: str) -> None:
    problem = Problem("bf16", 5, 136, 208)
    with pytest.raises(ValueError, match=message):
        problem.run(shape)
    assert problem.out.isnan().all()


def test_the_check_sees_one_wrong_element() -> None:
    problem = Problem("bf16", 33, 264, 144)
    problem.run()
    problem.out[32, 263] += problem.out.abs().max()
    with pytest.raises(AssertionError, match="1 of 3 tiles wrong"):
        problem.check()
