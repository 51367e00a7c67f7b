"""The kernel for FP8 weights and many tokens without a GPU: proofs, registers, tiles, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp4dispatch import jit
from tests.compile import built_kernels
from tests.compile.built_kernels import packed_operands

pytest.importorskip("tvm_ffi")

pytestmark = built_kernels.NEEDS_NVCC

KERNEL = "w8_gemm_sm90"
CI, CI_16, BLOCK = "bf16_128", "a16_bf16_128", "block_bf16_128"
ONE_OF_EACH = [CI, CI_16, pytest.param(BLOCK, marks=pytest.mark.slow)]
E4M3, BF16, U8 = torch.float8_e4m3fn, torch.bfloat16, torch.uint8


def module(variant: str = CI) -> Any:
    return built_kernels.module(KERNEL, variant)


@pytest.mark.parametrize("variant", built_kernels.variants(KERNEL, CI, CI_16))
def test_it_is_proved(variant: str) -> None:
    built = jit.build(KERNEL, variant, "90a")
    assert built.pdl_allowed
    assert built.proof is not None
    (kernel,) = built.proof.kernels
    assert (
        kernel.wait == 4
    )  # who copies activations, who copies weights, these again with idle lanes, and the consumers
    assert kernel.signal == 1
    assert kernel.unguarded == ()
    # Those of a stage; by 16 bits the last two of the last stage too.
    assert built_kernels.mma_kinds(kernel) == ({"HGMMA.64": 6} if variant.startswith("a16") else {"QGMMA.64": 4})
    assert (kernel.spills, kernel.stack) == (0, 0)
    # What a launch may take before setmaxnreg shares it out: 65536 over 384 threads, or as if there were 512 of them.
    assert kernel.registers == (128 if variant.startswith("block") else 168)
    # ptxas says so where it makes MMAs wait for each other, or ignores setmaxnreg.
    log = (built.entry.folder / "build.log").read_text()
    assert "serialized" not in log
    assert "setmaxnreg" not in log


@pytest.mark.parametrize("variant", ONE_OF_EACH)
def test_copies_of_weights_are_all_that_comes_before_the_wait(variant: str) -> None:
    assert jit.build(KERNEL, variant, "90a").entry.request["before_wait"]["access"] == "UTMALDG"
    built_kernels.check_early_accesses(KERNEL, "UTMALDG.2D", variant)


# --------------------------------------------------------------------------------------------------------------- shapes


@pytest.mark.parametrize("variant", built_kernels.variants(KERNEL, CI, CI_16))
def test_the_table_has_the_tile_that_is_built(variant: str) -> None:
    built_kernels.check_tile(module(variant).w8_gemm_tile(), KERNEL, variant)


@pytest.mark.parametrize("variant", built_kernels.variants(KERNEL, CI, CI_16))
def test_it_takes_every_launch_shape_that_the_model_considers(variant: str) -> None:
    for m, n, k in ((1, 8, 16), (300, 136, 2064), (1500, 3000, 144), (4096, 4096, 1024), (129, 40 * 128, 4096)):
        given = operands(m, n, k)
        given["out"] = given["out"].to(torch.bfloat16 if "bf16" in variant else torch.float16)
        given = built_kernels.block_scaled(given, m, n, k) if variant.startswith("block") else given
        given |= {"x": given["out"].new_zeros(m, k), "x_scale": None} if variant.startswith("a16") else {}
        built_kernels.check_takes_shapes(module(variant).w8_gemm, given, KERNEL, variant, (m, n, k))


# ------------------------------------------------------------------------------------------------------------ refusals


def operands(m: int = 70, n: int = 136, k: int = 272) -> dict[str, Any]:
    w = torch.zeros(n, k, dtype=U8).view(E4M3)
    return packed_operands(m, n, k) | {"w": w, "alpha": torch.ones(n)}


NO_SCALES = ({"x_scale": None}, "x_scale: None, needed the scales of e4m3 activations")


def rows(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=U8).view(E4M3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "x: is not on a CUDA device"),
        ({"x_scale": torch.ones(1), "alpha": torch.ones(1)}, "x: is not on a CUDA device"),
        ({"w": rows(129, 272)}, "x: is not on a CUDA device"),  # up to 7 rows less
        ({"w": rows(128, 272)}, r"w: size of dimension 0 is 128, needed 136 \(N\), or up to 7 less"),
        ({"w": rows(137, 272)}, r"w: size of dimension 0 is 137, needed 136 \(N\), or up to 7 less"),
        ({"w": rows(136, 264)}, "K is 264, needed a multiple of 16"),
        ({"w": rows(136, 0)}, "K is 0, needed at least 16"),
        ({"w": rows(136, 272).view(U8)}, "w: dtype is uint8, needed float8_e4m3fn"),
        ({"w": rows(136, 544)[:, ::2]}, "w: not contiguous"),
        (
            {"w": rows(136 * 272 + 8)[8:].view(136, 272)},
            "w: address is 8 past a multiple of 16 bytes, needed a multiple of 16",
        ),
        ({"x": torch.zeros(2, 9, 1024, dtype=U8)}, r"x: size of dimension 0 is 2, needed 3 \(ceil\(K/128\)\)"),
        ({"x": torch.zeros(3, 8, 1024, dtype=U8)}, r"x: size of dimension 1 is 8, needed 9 \(ceil\(M/8\)\)"),
        ({"x": torch.zeros(3, 9, 1024)}, "x: dtype is float32, needed uint8"),
        NO_SCALES,
        ({"x_scale": torch.ones(69)}, r"x_scale: has 69 elements, needed 1 or 70 \(M\)"),
        ({"alpha": torch.ones(5)}, r"alpha: has 5 elements, needed 1 or 136 \(N\)"),
        ({"bias": torch.ones(136)}, "bias: dtype is float32, needed bfloat16"),
        ({"out": torch.zeros(70, 132, dtype=BF16)}, "N is 132, needed a multiple of 8"),
        ({"out": torch.zeros(70, 272, dtype=BF16)[:, :136]}, "out: not contiguous"),
    ],
)
def test_wrong_operands_are_refused_before_any_cuda_call(change: dict[str, Any], message: str) -> None:
    given = operands() | change
    with pytest.raises((ValueError, TypeError), match=message):
        module().w8_gemm(*given.values(), [1, 1, 1, 1, 0, 1], False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "x: is not on a CUDA device"),
        ({"x": torch.zeros(70, 544, dtype=BF16)[:, :272]}, "x: is not on a CUDA device"),
        ({"x": torch.zeros(70, 272, dtype=torch.float16)}, "x: dtype is float16, needed bfloat16"),
        ({"x": torch.zeros(69, 272, dtype=BF16)}, r"x: size of dimension 0 is 69, needed 70 \(M\)"),
        ({"x": torch.zeros(70, 256, dtype=BF16)}, "x: K is 256, but that of w is 272, needed the same"),
        ({"x": torch.zeros(70, 320, dtype=BF16)}, "x: K is 320, but that of w is 272, needed the same"),
        ({"x": torch.zeros(1, 272, dtype=BF16).expand(70, 272)}, "x: rows are 0 elements apart, needed at least K"),
        ({"x_scale": torch.ones(70)}, "x_scale: a tensor, but 16-bit activations have no scale: needed None"),
        ({"alpha": torch.ones(5)}, r"alpha: has 5 elements, needed 1 or 136 \(N\)"),
    ],
)
def test_wrong_16_bit_activations_are_refused_before_any_cuda_call(change: dict[str, Any], message: str) -> None:
    given = operands() | {"x": torch.zeros(70, 272, dtype=BF16), "x_scale": None} | change
    with pytest.raises((ValueError, TypeError), match=message):
        module(CI_16).w8_gemm(*given.values(), [1, 1, 1, 1, 0, 1], False)


@pytest.mark.slow
@pytest.mark.parametrize(("change", "message"), [*built_kernels.BLOCK_SCALES_REFUSED, NO_SCALES])
def test_wrong_block_scales_are_refused_before_any_cuda_call(change: dict[str, Any], message: str) -> None:
    given = built_kernels.block_scaled(operands(21, 136, 208), 21, 136, 208) | change
    with pytest.raises((ValueError, TypeError), match=message):
        module(BLOCK).w8_gemm(*given.values(), [1, 1, 1, 1, 0, 1], False)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ([1, 1, 1, 1], "shape: has 4 numbers, needed 6"),
        ([3, 1, 1, 1, 0, 1], "shape: multicast is 3, needed 1, 2 or 4"),
        ([1, 5, 1, 1, 0, 1], "shape: split is 5, needed 1, 2, 3, 4 or 8"),
        ([1, 1, 1, 3, 0, 1], "shape: sharing is 3, needed 1 or 2"),
        ([2, 3, 1, 2, 0, 1], r"shape: multicast \* split \* sharing is 12, needed at most 8 \(CTAs of a cluster\)"),
        ([1, 4, 1, 1, 0, 1], r"shape: split is 4, needed at most 3 \(parts of K with at least one stage\)"),
        ([1, 1, 0, 1, 0, 1], r"shape: raster is 0, needed at least 1"),
        ([1, 1, 1, 2, 0, 2], "x: is not on a CUDA device"),
    ],
)
def test_wrong_launch_shapes_are_refused_before_any_cuda_call(shape: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module().w8_gemm(*operands().values(), shape, False)


@pytest.mark.parametrize(("shape", "message"), built_kernels.UNCOVERED)
def test_a_launch_shape_that_does_not_cover_the_tiles_once_is_refused(shape: list[int], message: str) -> None:
    """Of 42 tiles: 300 tokens by 13 * 128 + 8 rows."""
    with pytest.raises(ValueError, match=message):
        module().w8_gemm(*operands(300, 13 * 128 + 8, 1024).values(), shape, False)
