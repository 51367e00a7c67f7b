"""The kernel for FP8 weights and few tokens without a GPU: it compiles, is proved, plans and refuses."""

from __future__ import annotations

import collections
import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from fp4dispatch import jit, libraries
from fp4dispatch.jit.manifest import installed

tvm_ffi = pytest.importorskip("tvm_ffi")

pytestmark = [pytest.mark.compile, pytest.mark.skipif(libraries.nvcc()[0] is None, reason="needs nvcc")]

NAME = "w8a16_small"
SWEEP = Path(__file__).parents[2] / "bench" / "results" / "2026-11-21-h200-w8a16-sweep.json"
# Tokens, row blocks, groups, units: registers that leave room for the CTAs that plan()'s rings count on.
REGISTERS = {
    (8, 1, 4, 2): 80,  # two CTAs of 384 threads
    (8, 2, 4, 4): 80,
    (8, 2, 2, 4): 80,  # four of 192
    (16, 1, 4, 2): 80,
    (16, 2, 2, 4): 112,  # three of 192
    (16, 2, 4, 4): 160,  # one of 384
    (32, 1, 4, 2): 160,
    (32, 2, 2, 4): 160,  # two of 192
    (32, 1, 2, 2): 160,
    (16, 4, 2, 4): 160,  # one of 320
    (32, 2, 4, 4): 160,  # one of 384
    (32, 4, 2, 4): 160,
}
MACHINES = {
    "H200": (132, 233472, 232448, True),
    "A100": (108, 167936, 166912, False),
    "RTX4090": (128, 102400, 101376, False),
    "RTX5090": (170, 102400, 101376, True),
}
E4M3 = torch.float8_e4m3fn


def builds() -> list[Any]:
    return [
        pytest.param(variant, target, marks=() if (variant, target) == ("bf16", "90a") else pytest.mark.slow)
        for variant in installed().kernel(NAME).variants
        for target in installed().kernel(NAME).targets
    ]


def module() -> Any:
    return tvm_ffi.load_module(str(jit.build(NAME, "bf16", "90a").entry.library))


@pytest.mark.parametrize(("variant", "target"), builds())
def test_every_kernel_is_proved(variant: str, target: str) -> None:
    built = jit.build(NAME, variant, target)
    assert built.proven
    assert built.proof is not None
    assert built.pdl_allowed == (target not in ("80", "89"))
    assert len(built.proof.kernels) == len(REGISTERS)
    for kernel in built.proof.kernels:
        assert (kernel.spills, kernel.stack) == (0, 0)
        tile = re.search(r"TileILi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)E", kernel.name)
        assert tile is not None
        assert kernel.registers <= REGISTERS[tuple(map(int, tile.groups()))]
        if built.pdl_allowed:
            assert kernel.wait == 2  # the producer and the consumers
            assert kernel.signal >= 1


def test_the_early_loads_are_there_and_only_their_declaration_lets_them_pass() -> None:
    from fp4dispatch.jit import prove
    from fp4dispatch.jit.toolchain import disassembler

    built = jit.build(NAME, "bf16", "90a")
    request = {key: value for key, value in built.entry.request.items() if key != "before_wait"}
    proof = prove.prove(built.entry.library, request, disassembler(installed().common.minimum["disassembler"]))
    for kernel in proof.kernels:
        assert kernel.unguarded
        assert all(" UTMALDG.2D " in access for access in kernel.unguarded)
    assert not proof.pdl_allowed(request)


def shared_bytes(plan: list[int]) -> int:
    """As csrc/few_tokens_tile.h has it, written down once more."""
    tokens, row_blocks, groups, _, cluster, stages, _ = plan
    stage = row_blocks * 8192 + -(-tokens * 272 // 1024) * 1024
    ring, sums = groups * stages * stage, groups * cluster * 4 * tokens * (row_blocks * 64 // cluster + 4)
    return 1024 + (max(ring, sums) if tokens >= 16 else ring + sums)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_every_plan_fits_the_machine(machine: tuple[int, int, int, bool]) -> None:
    plan_of = module().w8a16_small_plan
    for m in (1, 8, 9, 16, 17, 32, 33, 500):
        for n in (8, 64, 1024, 4096, 28672, 151936):
            for k in (16, 64, 128, 4096, 14336, 28672):
                plan = list(plan_of(m, n, k, *machine))
                tokens, _, groups, _, cluster, stages, trigger = plan
                assert tokens == (8 if m <= 8 else 16 if m <= 16 else 32)
                assert tuple(plan[:4]) in REGISTERS
                assert cluster in (1, 2, 4, 8)
                assert machine[3] or cluster == 1
                assert stages >= 2
                assert groups * stages <= 63
                assert trigger >= 0
                assert shared_bytes(plan) <= machine[2]


def test_launch_shape_does_not_depend_on_the_number_of_tokens_of_a_tile() -> None:
    """So a token has the same bits whether it decodes alone or with others of its tile."""
    plan_of = module().w8a16_small_plan
    for n, k in ((4096, 4096), (28672, 4096), (1024, 4096)):
        for few, many in ((1, 8), (9, 16), (17, 32)):
            machine = MACHINES["H200"]
            assert list(plan_of(few, n, k, *machine)) == list(plan_of(many, n, k, *machine))


def test_plan_is_near_the_best_of_the_sweep_on_an_h200() -> None:
    """In the sweep that bench/results keeps, against all its launch shapes."""
    plan_of = module().w8a16_small_plan
    of_tokens = collections.defaultdict(list)
    for problem in json.loads(SWEEP.read_text())["problems"]:
        m, n, k = problem["m"], problem["n"], problem["k"]
        us = {tuple(shape): us for shape, us in problem["shapes"]}
        plan = tuple(plan_of(m, n, k, *MACHINES["H200"]))
        assert plan in us, f"M={m} N={n} K={k}: {plan} was not measured"
        of_best = min(us.values()) / us[plan]
        assert of_best >= (0.94 if n > 1024 else 0.8), f"M={m} N={n} K={k}: {plan} has {of_best:.3f} of the best speed"
        of_tokens[m].append(of_best)
    assert {m: len(found) for m, found in of_tokens.items()} == {1: 8, 8: 8, 16: 8, 32: 8}
    for m, found in of_tokens.items():
        assert statistics.geometric_mean(found) >= (0.96 if m == 16 else 0.98), f"M={m}: {found}"


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
