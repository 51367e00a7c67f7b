"""w4a8_small on SM90, tile by tile against an fp64 product of what it defines."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from fp4dispatch import jit
from tests.gpu.few_tokens import NK, WGMMA_M
from tests.gpu.sm90 import OUT_DTYPES, SM90, needs_sm90
from tests.gpu.tiles import sees_one_wrong_element
from tests.gpu.w4_packed import (
    Problem,
    activations,
    check_a_token_alone_and_with_others,
    check_argument_refused,
    check_capture,
    check_no_tokens,
    check_pdl_chain,
    check_scales,
    check_shape_refused,
    check_sums_of_one_sign,
    check_tokens_stay_alone,
    weight,
)
from tests.w4a8_small import INSTANCES, NAME, launch_shapes

pytestmark = [pytest.mark.gpu, needs_sm90]


@functools.cache
def module(variant: str = "bf16") -> Any:
    return jit.load(NAME, variant, SM90).module


@pytest.mark.parametrize("nk", NK, ids=str)
@pytest.mark.parametrize("variant", OUT_DTYPES)
def test_every_tile_is_right_for_every_m(variant: str, nk: tuple[int, int]) -> None:
    for m in WGMMA_M:
        problem = Problem(True, OUT_DTYPES[variant], (m, *nk))
        problem.run(module(variant).w4a8_small)
        problem.check(variant)
        problem.check_norms(variant)


@pytest.mark.parametrize("instance", INSTANCES, ids=str)
@pytest.mark.parametrize("variant", OUT_DTYPES)
def test_every_launch_shape_is_right(variant: str, instance: tuple[int, ...]) -> None:
    """Parts of K without a stage too, and several tiles of tokens."""
    shapes = [shape for shape in launch_shapes() if shape[:4] == instance]
    assert {shape[4] for shape in shapes} == set(range(1, 9))
    for mnk in ((7, 200, 48), (33, 264, 400), (100, 136, 2064)):
        problem = Problem(True, OUT_DTYPES[variant], mnk)
        for shape in shapes:
            for trigger in (shape[6], 0, 100):
                problem.run(module(variant).w4a8_small_shaped, [*shape[:6], trigger])
                problem.check(f"{variant} {shape} {trigger}")
            problem.check_norms(f"{variant} {shape}")


@pytest.mark.parametrize("variant", OUT_DTYPES)
def test_one_static_scale_and_scales_that_are_subnormal_or_zero(variant: str) -> None:
    check_scales(module(variant).w4a8_small, OUT_DTYPES[variant], (1, 16, 33, 100), variant)


def test_repeats_bit_for_bit() -> None:
    for mnk in ((1, 4096, 4096), (16, 1032, 2064), (64, 4096, 1040), (96, 4096, 1040), (128, 1032, 2064)):
        Problem(True, torch.bfloat16, mnk).run(module().w4a8_small, times=20)


def test_a_token_has_the_same_bits_whoever_shares_its_launch() -> None:
    e4m3 = functools.partial(activations, True)
    check_a_token_alone_and_with_others(module().w4a8_small, weight(1032, 2064)[2], e4m3)


def test_long_k_and_more_tiles_than_multiprocessors() -> None:
    for mnk in ((64, 256, 28672), (16, 256, 28672), (64, 28672, 512), (300, 5120, 512)):
        problem = Problem(True, torch.bfloat16, mnk, alpha=2.0**-12)
        problem.run(module().w4a8_small)
        problem.check()


def test_tokens_that_are_not_there_and_tokens_that_are_not_finite_stay_alone() -> None:
    check_tokens_stay_alone(module().w4a8_small, weight(136, 400)[2], functools.partial(activations, True))


@pytest.mark.parametrize("variant", OUT_DTYPES)
@pytest.mark.parametrize("m", [1, 16, 24, 32, 48, 64, 80, 96, 112, 128, 700])
def test_a_chain_under_pdl_has_the_bits_of_one_without(m: int, variant: str) -> None:
    """Each layer reads what the one before wrote, while its weights were already on their way."""
    check_pdl_chain(module(variant).w4a8_small, True, m, OUT_DTYPES[variant])


def test_truncation_takes_little_off_sums_of_one_sign() -> None:
    fewest = min(INSTANCES, key=lambda instance: instance[2])  # groups: each adds up a part of K
    check_sums_of_one_sign(module("fp16").w4a8_small_shaped, (*fewest, 1, 2, 2))


def test_capture_and_no_tokens() -> None:
    check_capture(module().w4a8_small, 40)
    check_no_tokens(module().w4a8_small)
    check_no_tokens(module().w4a8_small_shaped, [16, 1, 2, 1, 1, 2, 2])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("x", lambda p: p.x.view(torch.int8), "x: dtype is int8, needed uint8"),
        ("x", lambda p: p.x[:1], r"x: size of dimension 0 is 1, needed 2 \(ceil\(K/128\)\)"),
        ("x", lambda p: p.x[:, :2].contiguous(), r"x: size of dimension 1 is 2, needed 3 \(ceil\(M/8\)\)"),
        ("x", lambda p: p.x.transpose(0, 1).contiguous().transpose(0, 1), "x: not contiguous"),
        ("x", lambda p: p.x.cpu(), "x: is not on a CUDA device"),
        ("x_scale", lambda p: p.x_scale[:20], r"x_scale: has 20 elements, needed 1 or 21 \(M\)"),
        ("x_scale", lambda p: p.x_scale.half(), "x_scale: dtype is float16, needed float32"),
        ("x_scale", lambda p: p.x_scale.cpu(), "x_scale: is not on a CUDA device"),
        ("w", lambda p: p.w[:2], r"w: size of dimension 0 is 2, needed 3 \(ceil\(N/64\)\)"),
        ("w", lambda p: p.w.repeat(1, 2, 1)[:, ::2], "w: not contiguous"),
        ("w", lambda p: p.w.cpu(), "w: is not on a CUDA device"),
        ("alpha", lambda p: p.alpha[:3], "alpha: has 3 elements, needed 1 or 136"),
        ("bias", lambda p: torch.zeros(136, device="cuda"), "bias: dtype is float32, needed bfloat16"),
        ("bias", lambda p: torch.zeros(136, dtype=torch.bfloat16), "bias: is not on a CUDA device"),
        ("out", lambda p: p.out.view(torch.float16), "out: dtype is float16, needed bfloat16"),
        ("out", lambda p: p.out[:, :128], "out: not contiguous"),
        ("out", lambda p: p.out[:16], r"x: size of dimension 1 is 3, needed 2 \(ceil\(M/8\)\)"),
    ],
)
def test_wrong_operands_are_refused_before_a_launch(name: str, change: Any, message: str) -> None:
    problem = Problem(True, torch.bfloat16, (21, 136, 208))
    check_argument_refused(problem, module().w4a8_small, module().w4a8_small_shaped, name, change, message)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ([16, 1, 2, 1, 1, 2], "shape: has 6 numbers, needed 7"),
        ([16, 3, 2, 1, 1, 2, 0], "no kernel for 16 tokens, 3 row blocks, 2 groups and 1 units"),
        ([8, 1, 4, 2, 1, 2, 0], "no kernel for 8 tokens, 1 row blocks, 4 groups and 2 units"),
        ([16, 1, 2, 1, 9, 2, 0], "cluster is 9, needed 1 to 8"),
        ([16, 1, 2, 1, 0, 2, 0], "cluster is 0, needed 1 to 8"),
        ([16, 1, 2, 1, 1, 1, 0], "1 stages, needed 2 to 31"),
        ([16, 1, 2, 1, 1, 32, 0], "32 stages, needed 2 to 31"),
        ([64, 1, 2, 1, 1, 31, 0], "bytes of shared memory, a CTA has 232448"),
        ([16, 1, 2, 1, 1, 2, -1], "trigger is -1, needed at least 0"),
    ],
)
def test_wrong_launch_shapes_are_refused(shape: list[int], message: str) -> None:
    problem = Problem(True, torch.bfloat16, (21, 136, 208))
    check_shape_refused(problem, module().w4a8_small_shaped, shape, message)


def test_the_check_sees_one_wrong_element() -> None:
    problem = Problem(True, torch.bfloat16, (33, 264, 144))
    problem.run(module().w4a8_small)
    sees_one_wrong_element(problem)
