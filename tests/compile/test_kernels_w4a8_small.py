"""w4a8_small without a GPU: proofs, registers, the launch plan, and what the host code refuses."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from fp4dispatch import jit
from fp4dispatch.jit.catalog.manifest import installed
from tests.compile import built_kernels
from tests.compile.built_kernels import REAL, packed_operands, tile_in
from tests.w4a8_small import H200, INSTANCES, MOST_SLOTS, NAME, TILES, shared_bytes, threads, tile_of

pytest.importorskip("tvm_ffi")

pytestmark = built_kernels.NEEDS_NVCC

# CTAs of a multiprocessor that plan()'s rings count on; an SM90 has 65536 registers, dealt out to warps by 256.
RESIDENT = dict.fromkeys(INSTANCES, 1)
RESIDENT |= dict.fromkeys([(16, 2, 1, 1), *((tokens, 1, 2, 1) for tokens in (16, 24, 32, 48, 64))], 2)


def module(variant: str = "bf16") -> Any:
    return built_kernels.module(NAME, variant)


@pytest.mark.parametrize("variant", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_every_kernel_is_proved(variant: str) -> None:
    assert set(installed().kernel(NAME).variants) == {"bf16", "fp16"}
    built = jit.build(NAME, variant, "90a")
    assert built.proven
    assert built.pdl_allowed
    assert built.proof is not None
    assert sorted(tile_in(kernel.name) for kernel in built.proof.kernels) == sorted(INSTANCES)
    for kernel in built.proof.kernels:
        instance = tile_in(kernel.name)
        assert kernel.wait == 2  # the producer and the consumers
        assert kernel.signal >= 1
        assert (kernel.spills, kernel.stack, kernel.local) == (0, 0, 0), instance
        warps = threads(instance) // 32
        built_kernels.check_registers_of_the_model(NAME, variant, "90a", kernel)
        assert RESIDENT[instance] * warps * -(-kernel.registers // 8) * 256 <= 65536, (instance, kernel.registers)
    built_kernels.check_wgmmas_overlap(built)


def test_copies_of_weights_are_all_that_comes_before_the_wait() -> None:
    assert jit.build(NAME, "bf16", "90a").entry.request["before_wait"]["access"] == "UBLKCP"
    built_kernels.check_early_accesses(NAME, "UBLKCP.S.G")


# ---------------------------------------------------------------------------------------------------------------- plan


@pytest.mark.parametrize("nk", REAL, ids=str)
@pytest.mark.parametrize("m", [16, 32, 64, 96, 128])
def test_plan_of_a_real_layer_fits_an_h200(m: int, nk: tuple[int, int]) -> None:
    plan = list(module().w4a8_small_plan(m, *nk, *H200))
    instance, (cluster, stages, trigger) = tuple(plan[:4]), plan[4:]
    ctas = -(-nk[0] // (64 * instance[1])) * cluster
    assert instance in INSTANCES
    assert instance[0] == m
    assert shared_bytes(plan) <= H200[2]
    resident = RESIDENT[instance] if stages > 2 else 1
    assert resident * (shared_bytes(plan) + 1024) <= H200[1]
    wanted = 0.45 if nk == (4096, 4096) else 0.7
    assert ctas >= wanted * H200[0]  # the GPU is full, or nearly; half of it where K is short
    assert cluster == 1 or ctas // 2 < wanted * H200[0]  # and no CTA more than that takes shares K
    assert 2 <= stages <= max(2, -(-nk[1] // (128 * cluster * instance[2])))
    assert trigger == stages


def test_four_groups_where_a_cta_has_a_multiprocessor_and_much_of_k() -> None:
    """What bench/NOTES.md found fastest."""
    groups = {(m, nk): module().w4a8_small_plan(m, *nk, *H200)[2] for m in (16, 32, 64, 96, 128) for nk in REAL}
    many = {(4096, 4096), (4096, 14336), (8192, 8192), (8192, 28672)}
    assert groups == {(m, nk): 4 if nk in many and m <= 64 else 2 for m, nk in groups}


def test_any_plan_is_of_what_is_built_and_fits() -> None:
    plan_of = module().w4a8_small_plan
    for m, n, k in itertools.product(
        (1, 16, 17, 32, 33, 64, 65, 96, 97, 500),
        (8, 64, 72, 1024, 4096, 28672, 151936),
        (16, 64, 144, 4096, 14336, 28672),
    ):
        plan = list(plan_of(m, n, k, *H200))
        tokens, _, groups, _, cluster, stages, trigger = plan
        assert tuple(plan[:4]) in INSTANCES, (m, n, k)
        assert tokens == tile_of(m)
        assert cluster in (1, 2, 4, 8)
        assert stages >= 2  # wgmma still reads a stage when the next one begins
        assert groups * stages <= MOST_SLOTS
        assert trigger >= 0
        assert shared_bytes(plan) <= H200[2]


@pytest.mark.parametrize("tokens", [16, 32, 64, 96, 128])
def test_more_rows_need_no_more_parts_of_k_and_more_k_no_fewer_stages(tokens: int) -> None:
    plan_of = module().w4a8_small_plan
    rows = [plan_of(tokens, n, 8192, *H200)[4] for n in (64, 512, 1024, 2048, 4096, 8192, 16384, 57344)]
    assert rows == sorted(rows, reverse=True)
    assert (rows[0], rows[-1]) == (8 if RESIDENT[tuple(plan_of(tokens, 64, 8192, *H200)[:4])] > 1 else 4, 1)
    for n in (1024, 4096, 28672):
        deep = [plan_of(tokens, n, k, *H200) for k in (128, 512, 2048, 8192, 28672)]
        rings = [plan[2] * plan[5] for plan in deep]  # of all groups
        assert rings == sorted(rings), (n, rings)


def test_less_shared_memory_means_fewer_stages_and_too_little_no_plan() -> None:
    plan_of = module().w4a8_small_plan
    needed = shared_bytes((*plan_of(32, 4096, 28672, *H200)[:5], 2))
    sizes = (232448, 200000, 160000, 120000, needed, needed - 1)
    plans = [list(plan_of(32, 4096, 28672, 132, size + 1024, size, True)) for size in sizes]
    stages = [plan[5] for plan in plans]
    assert stages == sorted(stages, reverse=True)
    assert stages[0] > stages[-2] == 2
    assert plans[-1] == [0] * 7


def test_launch_shape_does_not_depend_on_the_number_of_tokens_of_a_tile() -> None:
    built_kernels.check_same_plan_for_all_tokens_of_a_tile(module().w4a8_small_plan, (*REAL, (1024, 4096)), TILES)


# ------------------------------------------------------------------------------------------------------------ refusals


def operands() -> dict[str, Any]:
    return packed_operands(21, 136, 208)


def shifted(size: tuple[int, ...], dtype: torch.dtype, elements: int) -> torch.Tensor:
    """Contiguous, and ``elements`` past an aligned address."""
    return torch.zeros(elements + torch.Size(size).numel(), dtype=dtype)[elements:].view(size)


U8, BF16 = torch.uint8, torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "x: is not on a CUDA device"),
        ({"x_scale": torch.ones(1)}, "x: is not on a CUDA device"),
        ({"x_scale": torch.ones(1), "alpha": torch.ones(136)}, "x: is not on a CUDA device"),
        ({"x": torch.zeros(2, 3, 1024)}, "x: dtype is float32, needed uint8"),
        ({"x": torch.zeros(6, 1024, dtype=U8)}, "x: has 2 dimensions, needed 3"),
        ({"x": torch.zeros(1, 3, 1024, dtype=U8)}, r"x: size of dimension 0 is 1, needed 2 \(ceil\(K/128\)\)"),
        ({"x": torch.zeros(2, 4, 1024, dtype=U8)}, r"x: size of dimension 1 is 4, needed 3 \(ceil\(M/8\)\)"),
        ({"x": torch.zeros(2, 3, 512, dtype=U8)}, "x: size of dimension 2 is 512, needed 1024"),
        ({"x": torch.zeros(3, 2, 1024, dtype=U8).transpose(0, 1)}, "x: not contiguous"),
        ({"x": shifted((2, 3, 1024), U8, 8)}, "x: address is 8 past a multiple of 16"),
        ({"x_scale": torch.ones(20)}, r"x_scale: has 20 elements, needed 1 or 21 \(M\)"),
        ({"x_scale": torch.ones(21).double()}, "x_scale: dtype is float64, needed float32"),
        ({"x_scale": torch.ones(42)[::2]}, "x_scale: not contiguous"),
        ({"w": torch.zeros(2, 4, 2304, dtype=U8)}, r"w: size of dimension 0 is 2, needed 3 \(ceil\(N/64\)\)"),
        ({"w": torch.zeros(3, 0, 2304, dtype=U8)}, "chunks of w along K is 0, needed at least 1"),
        ({"w": torch.zeros(3, 4, 2048, dtype=U8)}, "w: size of dimension 2 is 2048, needed 2304"),
        ({"w": torch.zeros(3, 4, 2304, dtype=torch.int8)}, "w: dtype is int8, needed uint8"),
        ({"w": torch.zeros(3, 8, 2304, dtype=U8)[:, ::2]}, "w: not contiguous"),
        ({"w": shifted((3, 4, 2304), U8, 8)}, "w: address is 8 past a multiple of 16"),
        ({"alpha": torch.ones(5)}, "alpha: has 5 elements, needed 1 or 136"),
        ({"alpha": torch.ones(1).half()}, "alpha: dtype is float16, needed float32"),
        ({"bias": torch.ones(136)}, "bias: dtype is float32, needed bfloat16"),
        ({"bias": torch.ones(128, dtype=BF16)}, "bias: .*128, needed 136"),
        ({"out": torch.zeros(21, 136).half()}, "out: dtype is float16, needed bfloat16"),
        ({"out": torch.zeros(21, 132, dtype=BF16)}, "N is 132, needed a multiple of 8"),
        ({"out": torch.zeros(21, 272, dtype=BF16)[:, :136]}, "out: not contiguous"),
        ({"out": shifted((21, 136), BF16, 4)}, "out: address is 8 past a multiple of 16"),
    ],
)
def test_wrong_operands_are_refused_before_any_cuda_call(change: dict[str, Any], message: str) -> None:
    built_kernels.check_operands_refused(NAME, operands() | change, message)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ([16, 1, 2, 1, 1, 2], "shape: has 6 numbers, needed 7"),
        ([8, 1, 4, 2, 1, 2, 0], "no kernel for 8 tokens, 1 row blocks, 4 groups and 2 units"),
        ([16, 1, 2, 2, 1, 2, 0], "no kernel for 16 tokens, 1 row blocks, 2 groups and 2 units"),
        *[([*instance, 1, 2, 2], "x: is not on a CUDA device") for instance in INSTANCES],
    ],
)
def test_launch_shapes_are_those_that_are_built(shape: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module().w4a8_small_shaped(*operands().values(), shape, False)
