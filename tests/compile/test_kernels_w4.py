"""The W4P kernels without a GPU: they compile, the binary is proved, the host code plans and refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp4dispatch import jit
from tests.compile import built_kernels
from tests.compile.built_kernels import MACHINES
from tests.w4a8_small import end_bytes

pytest.importorskip("tvm_ffi")

pytestmark = built_kernels.NEEDS_NVCC

SMALL = "w4a16_small"
# Tokens, row blocks, groups, units: registers that leave room for the CTAs that plan()'s rings count on.
REGISTERS = {
    (8, 1, 4, 2): 80,  # two CTAs of 384 threads
    (8, 2, 4, 4): 80,
    (8, 2, 2, 4): 128,  # two of 192
    (16, 1, 4, 2): 80,
    (16, 2, 2, 4): 128,
    (16, 2, 4, 4): 160,  # one of 384
}
WGMMA = dict.fromkeys(((t, 1, 2, 1) for t in (32, 48, 64)), 96)  # two of 320
WGMMA |= {(48, 1, 4, 1): 96, (64, 1, 4, 1): 96, (64, 2, 2, 1): 112, (96, 1, 2, 1): 200}  # one
WGMMA |= {(48, 2, 1, 1): 112, (96, 2, 1, 1): 112}  # two of 288
MMA = {(32, 1, 4, 2): 160, (32, 2, 2, 4): 168}
TILES = ((1, 8), (9, 16), (17, 32), (33, 48), (49, 64), (65, 500))
"""The fewest and the most tokens for which plan() takes a tile on SM90."""
SLOW, SELDOM = pytest.mark.slow, ("RTX4090", "RTX5090")


def registers(target: str) -> dict[tuple[int, ...], int]:
    """Of each tile that is built for a target."""
    return REGISTERS | (WGMMA if target == "90a" else MMA)


def module() -> Any:
    return built_kernels.module(SMALL, "bf16")


@pytest.mark.parametrize(("variant", "target"), built_kernels.builds(SMALL))
def test_small_is_proved(variant: str, target: str) -> None:
    built_kernels.check_few_tokens_proved(SMALL, variant, target, registers(target))
    if target == "90a":
        built_kernels.check_no_mma_waits(jit.build(SMALL, variant, target))


def test_the_early_copies_are_there_and_only_their_declaration_lets_them_pass() -> None:
    built_kernels.check_early_accesses(SMALL, "UBLKCP.S.G")


def shared_bytes(plan: list[int]) -> int:
    """As csrc/few_tokens/tile.h has it, written down once more."""
    tokens, row_blocks, groups, units, cluster, stages, _ = plan
    stage = row_blocks * 4608 + tokens * (256 if units == 1 else 272)
    stage = -(-stage // 1024) * 1024 if units == 1 else stage
    ring, end = groups * stages * stage, end_bytes(tokens, row_blocks, groups, cluster)
    return (1024 if units == 1 else 512) + (max(ring, end) if tokens >= 32 else ring + end)


TARGETS = {"H200": "90a", "A100": "80", "RTX4090": "89", "RTX5090": "120f"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW if name in SELDOM else ()) for name in MACHINES])
def test_every_plan_fits_the_machine(name: str) -> None:
    target = TARGETS[name]
    plan_of = built_kernels.module(SMALL, "bf16", target).w4a16_small_plan
    slots = 63 if target == "90a" else 31
    built_kernels.check_plans_fit(plan_of, MACHINES[name], registers(target), slots, shared_bytes)


def test_launch_shape_does_not_depend_on_the_number_of_tokens_of_a_tile() -> None:
    built_kernels.check_same_plan_for_all_tokens_of_a_tile(
        module().w4a16_small_plan, ((4096, 4096), (28672, 4096), (1024, 4096)), TILES
    )


def test_plan_is_near_the_best_of_the_sweep_on_an_h200() -> None:
    """Against all launch shapes of the sweep, built today or not. It has none of the tiles of 32 tokens and more.

    Of 1024 rows K is shared out to 8 CTAs, whose sums took longer when the sweep was made.
    """
    plan_of = module().w4a16_small_plan
    least = lambda m, n: 0.95 if n > 1024 else 0.85  # noqa: E731
    built_kernels.check_plans_near_the_best(plan_of, SMALL, least, lambda m: 0.97, (1, 8, 16))


def arguments(**replaced: Any) -> list[Any]:
    operands: dict[str, Any] = {
        "x": torch.zeros(5, 208, dtype=torch.bfloat16),
        "w": torch.zeros(3, 4, 2304, dtype=torch.uint8),
        "alpha": torch.ones(1),
        "bias": None,
        "out": torch.zeros(5, 136, dtype=torch.bfloat16),
    }
    return [*(operands | replaced).values(), False]


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({}, "x: is not on a CUDA device"),
        ({"x": torch.zeros(5, 208)}, "x: dtype is float32, needed bfloat16"),
        ({"x": torch.zeros(5, 200, dtype=torch.bfloat16)}, "K is 200, needed a multiple of 16"),
        ({"x": torch.zeros(5, 2, 208, dtype=torch.bfloat16)[:, 0, :].t()[:16].t()}, "w: size of dimension 1 is 4"),
        ({"w": torch.zeros(2, 4, 2304, dtype=torch.uint8)}, r"w: size of dimension 0 is 2, needed 3 \(ceil\(N/64\)\)"),
        ({"w": torch.zeros(3, 4, 2048, dtype=torch.uint8)}, "w: size of dimension 2 is 2048, needed 2304"),
        ({"alpha": torch.ones(5)}, "alpha: has 5 elements, needed 1 or 136"),
        ({"bias": torch.zeros(136)}, "bias: dtype is float32, needed bfloat16"),
        ({"out": torch.zeros(5, 132, dtype=torch.bfloat16)}, "N is 132, needed a multiple of 8"),
        ({"out": torch.zeros(136, 5, dtype=torch.bfloat16).t()}, "out: not contiguous"),
        (
            {
                "x": torch.zeros(1, 208, dtype=torch.bfloat16).expand(33, 208),
                "out": torch.zeros(33, 136, dtype=torch.bfloat16),
            },
            "x: rows are 0 elements apart, needed at least K",
        ),
    ],
)
def test_small_refuses_before_any_cuda_call(replaced: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        module().w4a16_small(*arguments(**replaced))


def test_a_launch_shape_that_is_not_built_is_refused() -> None:
    with pytest.raises(ValueError, match="no kernel for 8 tokens, 8 row blocks, 1 groups and 2 units"):
        module().w4a16_small_shaped(*arguments()[:-1], [8, 8, 1, 2, 1, 2, 0], False)
