"""w8a8_small without a GPU: proofs, registers, the launch plan, and what the host code refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp4dispatch import jit
from tests.compile import built_kernels
from tests.compile.built_kernels import REAL, packed_operands
from tests.w4a8_small import H200, end_bytes, tile_of

pytest.importorskip("tvm_ffi")

pytestmark = built_kernels.NEEDS_NVCC

NAME = "w8a8_small"
# Registers of each tile: two CTAs share a multiprocessor's 65536, or one has all.
REGISTERS = dict.fromkeys(((t, 1, 2, 1) for t in (16, 24, 32, 48, 64)), 96)
REGISTERS |= {(16, 1, 4, 1): 96, (32, 1, 4, 1): 96, (16, 2, 1, 1): 112, (64, 2, 1, 1): 112}
REGISTERS |= dict.fromkeys(((t, 1, 2, 1) for t in (80, 96, 112, 128)), 200) | {(96, 2, 1, 1): 224}


VARIANTS = ["bf16", pytest.param("block_bf16", marks=pytest.mark.slow)]


def module(variant: str = "bf16") -> Any:
    return built_kernels.module(NAME, variant)


def shared_bytes(plan: Any, variant: str = "bf16") -> int:
    """Shared memory of a CTA: barriers, the rings, and what its end needs."""
    tokens, row_blocks, groups, _, cluster, stages = plan[:6]
    scales = -(-tokens * 4 // 1024) * 1024 if variant.startswith("block") else 0  # of tokens, in a stage
    ring = groups * stages * (row_blocks * 8192 + tokens * 128 + scales)
    end = end_bytes(tokens, row_blocks, groups, cluster)
    return 1024 + (max(ring, end) if tokens >= 32 else ring + end)


@pytest.mark.parametrize(("variant", "target"), built_kernels.builds(NAME))
def test_every_kernel_is_proved(variant: str, target: str) -> None:
    built_kernels.check_few_tokens_proved(NAME, variant, target, REGISTERS)
    built_kernels.check_wgmmas_overlap(jit.build(NAME, variant, target))


@pytest.mark.parametrize("variant", VARIANTS)
def test_copies_of_weights_are_all_that_comes_before_the_wait(variant: str) -> None:
    assert jit.build(NAME, variant, "90a").entry.request["before_wait"]["access"] == "UTMALDG"
    built_kernels.check_early_accesses(NAME, "UTMALDG.2D", variant)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("nk", REAL, ids=str)
@pytest.mark.parametrize("m", [16, 32, 64, 96, 128])
def test_plan_of_a_real_layer_fits_an_h200(m: int, nk: tuple[int, int], variant: str) -> None:
    plan = list(module(variant).w8a8_small_plan(m, *nk, *H200))
    instance, (cluster, stages, trigger) = tuple(plan[:4]), plan[4:]
    ctas = -(-nk[0] // 64) * cluster
    assert instance == (m, 1, 2, 1)
    assert shared_bytes(plan, variant) <= H200[2]
    resident = 2 if ctas > H200[0] and m <= 64 else 1
    assert resident * (shared_bytes(plan, variant) + 1024) <= H200[1]
    wanted = 0.45 if nk[1] <= 8192 else 0.7
    assert ctas >= wanted * H200[0]  # what the reads need
    assert cluster == 1 or ctas // 2 < wanted * H200[0]  # and no CTA more than that takes shares K
    assert trigger == stages >= 2


def test_a_short_k_is_not_shared_out_where_half_of_the_multiprocessors_have_a_cta() -> None:
    """4096x4096 took 7.5 us with 64 CTAs at 24 tokens and 8.4 with clusters of 2; 4096x14336 the other way round."""
    clusters = {nk: module().w8a8_small_plan(64, *nk, *H200)[4] for nk in ((4096, 4096), (4096, 14336), (1024, 4096))}
    assert clusters == {(4096, 4096): 1, (4096, 14336): 2, (1024, 4096): 8}


@pytest.mark.parametrize("variant", VARIANTS)
def test_any_plan_is_of_what_is_built_and_fits(variant: str) -> None:
    for m in (1, 16, 17, 32, 33, 64, 65, 96, 97, 500):
        for n in (8, 72, 4096, 28672, 151936):
            for k in (16, 80, 128, 4096, 28672):
                plan = list(module(variant).w8a8_small_plan(m, n, k, *H200))
                assert tuple(plan[:4]) in REGISTERS, (m, n, k)
                assert plan[0] == tile_of(m)
                assert plan[4] in (1, 2, 4, 8)
                assert plan[5] >= 2  # wgmma still reads a stage when the next one begins
                assert shared_bytes(plan, variant) <= H200[2]


E4M3, BF16, U8 = torch.float8_e4m3fn, torch.bfloat16, torch.uint8


def operands() -> dict[str, Any]:
    w, alpha = torch.zeros(136, 208, dtype=U8).view(E4M3), torch.ones(136)
    return packed_operands(21, 136, 208) | {"w": w, "alpha": alpha}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "x: is not on a CUDA device"),
        ({"x_scale": torch.ones(1), "alpha": torch.ones(1)}, "x: is not on a CUDA device"),
        ({"w": torch.zeros(129, 208, dtype=U8).view(E4M3)}, "x: is not on a CUDA device"),  # up to 7 rows less
        ({"w": torch.zeros(128, 208, dtype=U8).view(E4M3)}, r"w: size of dimension 0 is 128, needed 136 \(N\)"),
        ({"w": torch.zeros(136, 200, dtype=U8).view(E4M3)}, "K is 200, needed a multiple of 16"),
        ({"w": torch.zeros(136, 0, dtype=U8).view(E4M3)}, "K is 0, needed at least 16"),
        ({"w": torch.zeros(136, 208, dtype=U8)}, "w: dtype is uint8, needed float8_e4m3fn"),
        ({"w": torch.zeros(136, 416, dtype=U8).view(E4M3)[:, ::2]}, "w: not contiguous"),
        ({"x": torch.zeros(1, 3, 1024, dtype=U8)}, r"x: size of dimension 0 is 1, needed 2 \(ceil\(K/128\)\)"),
        ({"x": torch.zeros(2, 2, 1024, dtype=U8)}, r"x: size of dimension 1 is 2, needed 3 \(ceil\(M/8\)\)"),
        ({"x_scale": torch.ones(20)}, r"x_scale: has 20 elements, needed 1 or 21 \(M\)"),
        ({"alpha": torch.ones(5)}, "alpha: has 5 elements, needed 1 or 136"),
        ({"bias": torch.ones(136)}, "bias: dtype is float32, needed bfloat16"),
        ({"out": torch.zeros(21, 132, dtype=BF16)}, "N is 132, needed a multiple of 8"),
    ],
)
def test_wrong_operands_are_refused_before_any_cuda_call(change: dict[str, Any], message: str) -> None:
    built_kernels.check_operands_refused(NAME, operands() | change, message)


@pytest.mark.slow
@pytest.mark.parametrize(("change", "message"), built_kernels.BLOCK_SCALES_REFUSED)
def test_wrong_block_scales_are_refused_before_any_cuda_call(change: dict[str, Any], message: str) -> None:
    given = built_kernels.block_scaled(operands(), 21, 136, 208)
    built_kernels.check_operands_refused(NAME, given | change, message, "block_bf16")


def test_launch_shapes_are_those_that_are_built() -> None:
    with pytest.raises(ValueError, match="no kernel for 24 tokens, 1 row blocks, 4 groups and 1 units"):
        module().w8a8_small_shaped(*operands().values(), [24, 1, 4, 1, 1, 2, 2], False)
