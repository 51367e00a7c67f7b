"""The kernel for FP8 weights and few tokens without a GPU: it compiles, is proved, plans and refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.compile import built_kernels
from tests.compile.built_kernels import MACHINES, Machine
from tests.w4a8_small import end_bytes

pytest.importorskip("tvm_ffi")

pytestmark = built_kernels.NEEDS_NVCC

NAME = "w8a16_small"
# Tokens, row blocks, groups, units: registers that leave room for the CTAs that plan()'s rings count on.
REGISTERS = {
    (8, 1, 4, 2): 80,  # two CTAs of 384 threads
    (8, 2, 4, 4): 104,  # one
    (8, 2, 2, 4): 104,  # three of 192
    (16, 1, 4, 2): 80,
    (16, 2, 2, 4): 128,  # two
    (16, 2, 4, 4): 160,  # one of 384
    (32, 1, 4, 2): 160,
    (32, 2, 2, 4): 160,  # two of 192
    (32, 1, 2, 2): 160,
    (16, 4, 2, 4): 160,  # one of 320
    (32, 2, 4, 4): 160,  # one of 384
    (32, 4, 2, 4): 160,
}
E4M3 = torch.float8_e4m3fn


def module() -> Any:
    return built_kernels.module(NAME, "bf16")


@pytest.mark.parametrize(("variant", "target"), built_kernels.builds(NAME))
def test_every_kernel_is_proved(variant: str, target: str) -> None:
    built_kernels.check_few_tokens_proved(NAME, variant, target, REGISTERS)


def test_the_early_loads_are_there_and_only_their_declaration_lets_them_pass() -> None:
    built_kernels.check_early_accesses(NAME, "UTMALDG.2D")


def shared_bytes(plan: list[int]) -> int:
    """As csrc/few_tokens/tile.h has it, written down once more."""
    tokens, row_blocks, groups, _, cluster, stages, _ = plan
    stage = row_blocks * 8192 + -(-tokens * 272 // 1024) * 1024
    ring, end = groups * stages * stage, end_bytes(tokens, row_blocks, groups, cluster)
    return 1024 + (max(ring, end) if tokens >= 16 else ring + end)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_every_plan_fits_the_machine(machine: Machine) -> None:
    built_kernels.check_plans_fit(module().w8a16_small_plan, machine, REGISTERS, 63, shared_bytes)


def test_launch_shape_does_not_depend_on_the_number_of_tokens_of_a_tile() -> None:
    built_kernels.check_same_plan_for_all_tokens_of_a_tile(
        module().w8a16_small_plan, ((4096, 4096), (28672, 4096), (1024, 4096)), ((1, 8), (9, 16), (17, 32))
    )


def test_plan_is_near_the_best_of_the_sweep_on_an_h200() -> None:
    """Against all launch shapes of the sweep."""
    built_kernels.check_plans_near_the_best(
        module().w8a16_small_plan,
        "w8a16_small",
        lambda m, n: 0.94 if n > 1024 else 0.8,
        lambda m: 0.96 if m == 16 else 0.98,
    )


def arguments(**replaced: Any) -> list[Any]:
    operands: dict[str, Any] = {
        "x": torch.zeros(5, 208, dtype=torch.bfloat16),
        "w": torch.zeros(136, 208).to(E4M3),
        "alpha": torch.ones(1),
        "bias": None,
        "out": torch.zeros(5, 136, dtype=torch.bfloat16),
    }
    return [*(operands | replaced).values(), False]


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({}, "x: is not on a CUDA device"),
        ({"w": torch.zeros(129, 208).to(E4M3)}, "x: is not on a CUDA device"),
        ({"x": torch.zeros(5, 208)}, "x: dtype is float32, needed bfloat16"),
        ({"x": torch.zeros(5, 200, dtype=torch.bfloat16)}, "K is 200, needed a multiple of 16"),
        ({"w": torch.zeros(128, 208).to(E4M3)}, r"w: size of dimension 0 is 128, needed 136 \(N\), or up to 7 less"),
        ({"w": torch.zeros(137, 208).to(E4M3)}, r"w: size of dimension 0 is 137, needed 136"),
        ({"w": torch.zeros(136, 224).to(E4M3)}, r"w: size of dimension 1 is 224, needed 208 \(K\)"),
        ({"w": torch.zeros(136, 208, dtype=torch.uint8)}, "w: dtype is uint8, needed float8_e4m3fn"),
        ({"w": torch.zeros(208, 136).to(E4M3).t()}, "w: not contiguous"),
        ({"w": torch.zeros(136 * 208 + 8).to(E4M3)[8:].view(136, 208)}, "w: address is 8 past a multiple of 16"),
        ({"alpha": torch.ones(5)}, "alpha: has 5 elements, needed 1 or 136"),
        ({"bias": torch.zeros(136)}, "bias: dtype is float32, needed bfloat16"),
        ({"out": torch.zeros(5, 132, dtype=torch.bfloat16)}, "N is 132, needed a multiple of 8"),
        ({"out": torch.zeros(136, 5, dtype=torch.bfloat16).t()}, "out: not contiguous"),
        ({"out": torch.zeros(5, 8).bfloat16()[:, :1].expand(5, 4194248)}, r"N is 4194248, needed at most 4194240"),
    ],
)
def test_wrong_operands_are_refused_before_any_cuda_call(replaced: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        module().w8a16_small(*arguments(**replaced))


def test_a_launch_shape_that_is_not_built_is_refused() -> None:
    with pytest.raises(ValueError, match="no kernel for 8 tokens, 8 row blocks, 1 groups and 2 units"):
        module().w8a16_small_shaped(*arguments()[:-1], [8, 8, 1, 2, 1, 2, 0], False)
