"""The W4P kernels for many tokens without a GPU: proofs, registers, tiles, and what the host code refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fp4dispatch import jit
from fp4dispatch.backends.own.swiglu import kernel_of
from fp4dispatch.backends.own.tiling import launch_model
from fp4dispatch.backends.own.tiling.launch_model import LaunchShape
from tests import many_tokens
from tests.compile import built_kernels

pytest.importorskip("tvm_ffi")

pytestmark = built_kernels.NEEDS_NVCC

KERNEL = "w4_gemm_sm90"
CSRC = Path(__file__).parents[2] / "csrc"
CI, CI_16 = "a8_bf16_128", "a16_bf16_128x128"
BESIDE_A_PACKER = 128
"""Registers of a thread at the launch of a tile of 96 to 128 tokens by 128 rows, which has 384 threads."""


def module(variant: str = CI) -> Any:
    return built_kernels.module(KERNEL, variant)


@pytest.mark.parametrize("variant", built_kernels.variants(KERNEL, CI, CI_16))
def test_gemm_is_proved(variant: str) -> None:
    built = jit.build(KERNEL, variant, "90a")
    assert built.pdl_allowed
    assert built.proof is not None
    (kernel,) = built.proof.kernels
    # Who copies activations, who copies weights, these again with idle lanes, the consumers; evenly who sets marks.
    assert kernel.wait == 4 + variant.startswith("even_")
    assert kernel.signal == 1
    assert kernel.unguarded == ()
    # The four of a stage, all of the kind that the activations need; by 16 bits the last two of the last stage too.
    fp8 = variant.removeprefix("even_").startswith("a8")
    assert built_kernels.mma_kinds(kernel) == ({"QGMMA.64": 4} if fp8 else {"HGMMA.64": 6})
    assert (kernel.spills, kernel.stack) == (0, 0)
    # What a launch may take before setmaxnreg shares it out: 65536 registers over all threads.
    tile = many_tokens.tile_of(KERNEL, variant)
    alone = BESIDE_A_PACKER if fp8 and 96 <= tile.tokens <= 128 else 168
    assert kernel.registers == (80 if tile.ctas == 2 else alone)
    # ptxas says so where it makes MMAs wait for each other, or ignores setmaxnreg.
    log = (built.entry.folder / "build.log").read_text()
    assert "serialized" not in log
    assert "setmaxnreg" not in log


packers = pytest.mark.parametrize("packer", ["w4_activations", "swiglu_activations"])


@packers
def test_packer_is_proved(packer: str) -> None:
    built = jit.build(packer, "any", "90a")
    assert built.pdl_allowed
    assert built.proof is not None
    assert all((k.wait, k.unguarded, k.spills) == (1, (), 0) for k in built.proof.kernels)


@packers
def test_a_packer_fits_beside_a_tile_of_96_to_128_tokens(packer: str) -> None:
    """There it waits for the GEMM before it. Registers are dealt out to warps, by 256."""
    (warps,) = re.findall(r"kMaxWarps = (\d+)", (CSRC / "quantise" / "pack_e4m3.h").read_text())
    built = jit.build(packer, "any", "90a")
    assert built.proof is not None
    of_rows = [kernel for kernel in built.proof.kernels if "quantize_tokens" in kernel.name]
    assert of_rows
    for kernel in of_rows:
        assert int(warps) * -(-kernel.registers // 8) * 256 <= 65536 - 384 * BESIDE_A_PACKER, kernel.name


@pytest.mark.parametrize("variant", built_kernels.variants(KERNEL, CI, CI_16))
def test_the_table_has_the_tile_that_is_built(variant: str) -> None:
    built_kernels.check_tile(module(variant).w4_gemm_tile(), KERNEL, variant)


@pytest.mark.parametrize("variant", built_kernels.variants(KERNEL, CI, CI_16))
def test_it_takes_every_launch_shape_that_the_model_considers(variant: str) -> None:
    fp8, tile = variant.removeprefix("even_").startswith("a8"), many_tokens.tile_of(KERNEL, variant)

    def even(*operands: Any) -> None:
        room = torch.empty(launch_model.room_bytes(tile, LaunchShape(*operands[6])), dtype=torch.uint8)
        module(variant).w4_gemm_even(*operands[:7], room, operands[7])

    for m, n, k in ((1, 8, 16), (200, 136, 2064), (1500, 3000, 144), (4096, 4096, 1024), (129, 40 * 128, 4096)):
        given = built_kernels.packed_operands(m, n, k)
        dtype = torch.bfloat16 if "bf16" in variant else torch.float16
        given["out"] = given["out"].to(dtype)
        given |= {} if fp8 else {"x": torch.zeros(m, k, dtype=dtype), "x_scale": None}
        call = even if tile.even else module(variant).w4_gemm
        built_kernels.check_takes_shapes(call, given, KERNEL, variant, (m, n, k))


def test_a_tile_of_32_tokens_refuses_8_parts_of_k() -> None:
    """A part of K adds up 8 tokens at least; two CTAs share a multiprocessor."""
    built, given = module("a8_bf16_32"), operands(m=21, k=2048)
    with pytest.raises(
        ValueError, match=r"shape: split is 8, needed at most 4 \(parts of K for a tile of so few tokens"
    ):
        built.w4_gemm(*(given | {"shape": [1, 8, 1, 1, 0, 1]}).values(), False)
    with pytest.raises(ValueError, match="x: is not on a CUDA device"):
        built.w4_gemm(*(given | {"shape": [2, 4, 1, 1, 0, 1]}).values(), False)


def operands(m: int = 70, n: int = 128, k: int = 256) -> dict[str, Any]:
    return built_kernels.packed_operands(m, n, k) | {"shape": [1, 1, 1, 1, 0, 1]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "x: is not on a CUDA device"),
        ({"x": torch.zeros(1, 9, 1024, dtype=torch.uint8)}, r"x: size of dimension 0 is 1, needed 2 \(ceil\(K/128\)\)"),
        ({"x": torch.zeros(2, 8, 1024, dtype=torch.uint8)}, r"x: size of dimension 1 is 8, needed 9 \(ceil\(M/8\)\)"),
        ({"x": torch.zeros(2, 9, 1024)}, "x: dtype is float32, needed uint8"),
        ({"x_scale": None}, "x_scale: None, needed the scales of e4m3 activations"),
        ({"x_scale": torch.ones(69)}, "x_scale: has 69 elements, needed 1 or 70"),
        ({"w": torch.zeros(1, 4, 2304, dtype=torch.uint8)}, r"w: size of dimension 0 is 1, needed 2 \(ceil\(N/64\)\)"),
        ({"w": torch.zeros(2, 4, 2304, dtype=torch.uint8)[:, :, :2048]}, "w: size of dimension 2 is 2048, needed 2304"),
        ({"alpha": torch.ones(2)}, "alpha: has 2 elements, needed 1 or 128"),
        ({"bias": torch.ones(128)}, "bias: dtype is float32, needed bfloat16"),
        ({"out": torch.zeros(70, 124, dtype=torch.bfloat16)}, "N is 124, needed a multiple of 8"),
        ({"out": torch.zeros(70, 256, dtype=torch.bfloat16)[:, :128]}, "out: not contiguous"),
        ({"shape": [1, 1, 1]}, "shape: has 3 numbers, needed 6"),
        ({"shape": [3, 1, 1, 1, 0, 1]}, "shape: multicast is 3, needed 1, 2 or 4"),
        ({"shape": [1, 5, 1, 1, 0, 1]}, "shape: split is 5, needed 1, 2, 3, 4 or 8"),
        ({"shape": [4, 3, 1, 1, 0, 1]}, r"shape: multicast \* split \* sharing is 12, needed at most 8"),
        ({"shape": [1, 3, 1, 1, 0, 1]}, "shape: split is 3, needed at most 2"),
        ({"shape": [4, 4, 1, 1, 0, 1]}, r"shape: multicast \* split \* sharing is 16, needed at most 8"),
        ({"shape": [1, 4, 1, 1, 0, 1]}, "shape: split is 4, needed at most 2"),
        ({"shape": [1, 1, 0, 1, 0, 1]}, "shape: raster is 0, needed at least 1"),
        ({"shape": [1, 1, 1, 2, 0, 1]}, "shape: sharing is 2, needed 1: this kernel cannot share rows"),
    ],
)
def test_wrong_arguments_are_refused_before_any_cuda_call(change: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        module().w4_gemm(*(operands() | change).values(), False)


def activations(
    m: int = 70, k: int = 208, dtype: torch.dtype = torch.bfloat16, *, stride: int = 0, first: int = 0
) -> Any:
    """16-bit activations, ``first`` elements into their memory."""
    return torch.zeros(first + m * max(stride, k), dtype=dtype)[first:].view(m, -1)[:, :k]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "x: is not on a CUDA device"),
        ({"x": activations(stride=216)}, "x: is not on a CUDA device"),
        ({"x": activations(first=8)}, "x: is not on a CUDA device"),
        *(({"x": activations(k=k)}, "x: is not on a CUDA device") for k in (240, 256)),  # 4 chunks of 64, as 208
        ({"x": torch.zeros(4, 9, 1024, dtype=torch.uint8)}, "x: dtype is uint8, needed bfloat16 or float16"),
        ({"x": activations(dtype=torch.float32)}, "x: dtype is float32, needed bfloat16 or float16"),
        ({"x": activations(dtype=torch.float16)}, "x: dtype is float16, needed bfloat16"),
        ({"x": activations()[0]}, "x: has 1 dimensions, needed 2"),
        ({"x": activations(m=69)}, r"x: size of dimension 0 is 69, needed 70 \(M\)"),
        ({"x": activations(m=72)}, r"x: size of dimension 0 is 72, needed 70 \(M\)"),
        *(
            ({"x": activations(k=k)}, rf"x: K is {k}, but w has 4 chunks of 64 along K, needed ceil\(K/64\) of them")
            for k in (16, 192, 272)
        ),
        ({"x": activations(k=200)}, "K is 200, needed a multiple of 16"),
        ({"x": activations(k=0)}, "K is 0, needed at least 16"),
        ({"x": activations(208, 70).t()}, r"x: the last dimension has stride 70, needed 1; call .contiguous\(\)"),
        ({"x": activations(stride=212)}, "row stride of x is 212, needed a multiple of 8"),
        *(
            (
                {"x": torch.zeros(70 * 208).bfloat16().as_strided((70, 208), (stride, 1))},
                f"x: rows are {stride} elements ap",
            )
            for stride in (0, 8, 200)
        ),
        ({"x": activations(first=4)}, "x: address is 8 past a multiple of 16 bytes, needed a multiple of 16"),
        ({"x_scale": torch.ones(70)}, "x_scale: a tensor, but 16-bit activations have no scale: needed None"),
        ({"w": torch.zeros(2, 3, 2304, dtype=torch.uint8)}, "x: K is 208, but w has 3 chunks of 64 along K"),
        ({"out": torch.zeros(70, 128, dtype=torch.float16)}, "out: dtype is float16, needed bfloat16"),
        ({"shape": [1, 8, 1, 1, 0, 1]}, "shape: split is 8, needed at most 4"),
    ],
)
def test_wrong_16_bit_activations_are_refused_before_any_cuda_call(change: dict[str, Any], message: str) -> None:
    given = operands(k=208) | {"x": activations(), "x_scale": None} | change
    with pytest.raises((ValueError, TypeError), match=message):
        module(CI_16).w4_gemm(*given.values(), True)


@pytest.mark.parametrize(("shape", "message"), built_kernels.UNCOVERED)
def test_a_launch_shape_that_does_not_cover_the_tiles_once_is_refused(shape: list[int], message: str) -> None:
    """Of 42 tiles: 300 tokens by 13 * 128 + 8 rows."""
    given = operands(m=300, n=13 * 128 + 8, k=1024) | {"shape": shape}
    with pytest.raises(ValueError, match=message):
        module().w4_gemm(*given.values(), False)


def codes(m: int, k: int) -> torch.Tensor:
    return torch.zeros(m, k, dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        *(
            ("w4_quantize_row", (x, torch.zeros(1, 1, 1024, dtype=torch.uint8), torch.ones(4)), text)
            for x, text in (
                (torch.zeros(4, 128).half(), "x: is not on a CUDA device"),
                (torch.zeros(4, 24).half(), "K is 24, needed a multiple of 16"),
                (torch.zeros(4, 144).half(), r"packed: size of dimension 0 is 1, needed 2 \(ceil\(K/128\)\)"),
            )
        ),
        (
            "w4_quantize_row",
            (torch.zeros(9, 64).half(), torch.zeros(1, 2, 1024, dtype=torch.uint8), torch.ones(1)),
            r"scale: has 1 elements, needed 9 \(M\)",
        ),
        (
            "w4_quantize_tensor",
            (torch.zeros(9, 64).half(), torch.zeros(1, 2, 1024, dtype=torch.uint8), torch.ones(9)),
            "scale: has 9 elements, needed 1",
        ),
        *(
            ("w8_quantize_block", (torch.zeros(9, 208).half(), torch.zeros(2, 2, 1024, dtype=torch.uint8), scale), text)
            for scale, text in (
                (torch.ones(2, 16), "x: is not on a CUDA device"),
                (torch.ones(16), "scale: has 1 dimensions, needed 2"),
                (torch.ones(1, 16), r"scale: size of dimension 0 is 1, needed 2 \(ceil\(K/128\)\)"),
                (torch.ones(2, 9), r"scale: size of dimension 1 is 9, needed 16 \(8 ceil\(M/8\)\)"),
                (torch.ones(16, 2).t(), "scale: not contiguous"),
                (torch.ones(2, 16).half(), "scale: dtype is float16, needed float32"),
            )
        ),
        (
            "w8_quantize_block",
            (torch.zeros(9, 208).half(), torch.zeros(2, 1, 1024, dtype=torch.uint8), torch.ones(2, 16)),
            r"packed: size of dimension 1 is 1, needed 2 \(ceil\(M/8\)\)",
        ),
        (
            "w8_quantize_block",
            (torch.zeros(9, 200).half(), torch.zeros(2, 2, 1024, dtype=torch.uint8), torch.ones(2, 16)),
            "K is 200, needed a multiple of 16",
        ),
        *(
            ("w4_swiglu_row", (x, torch.zeros(2, 2, 1024, dtype=torch.uint8), torch.ones(9)), text)
            for x, text in (
                (torch.zeros(9, 416).half(), "x: is not on a CUDA device"),
                (torch.zeros(9, 400).half(), "K is 400, needed a multiple of 32"),
                (torch.zeros(9, 16).half(), "K is 16, needed at least 32"),
                (torch.zeros(9, 256).half(), r"packed: size of dimension 0 is 2, needed 1 \(ceil\(K/128\)\)"),
                (torch.zeros(9, 416), "x: dtype is float32"),
                (torch.zeros(416, 9).half().t(), "x: the last dimension has stride 9, needed 1"),
                (torch.zeros(9, 420).half()[:, :416], "row stride of x is 420, needed a multiple of 8"),
            )
        ),
        (
            "w8_swiglu_row",
            (torch.zeros(9, 416).half(), torch.zeros(2, 2, 1024, dtype=torch.uint8), torch.ones(1)),
            r"scale: has 1 elements, needed 9 \(M\)",
        ),
        (
            "w8_swiglu_tensor",
            (torch.zeros(9, 416).half(), torch.zeros(2, 2, 1024, dtype=torch.uint8), torch.ones(9)),
            "scale: has 9 elements, needed 1",
        ),
        (
            "w8_swiglu_block",
            (torch.zeros(9, 416).half(), torch.zeros(2, 2, 1024, dtype=torch.uint8), torch.ones(4, 16)),
            r"scale: size of dimension 0 is 4, needed 2 \(ceil\(K/128\)\)",
        ),
        *(
            (f"fp8_swiglu_{by}", (torch.zeros(9, 416).half(), q, scale), text)
            for by, q, scale, text in (
                ("row", torch.zeros(9, 208).half(), torch.ones(9), "q: dtype is float16, needed float8_e4m3fn"),
                ("row", codes(9, 416), torch.ones(9), r"q: size of dimension 1 is 416, needed 208 \(K\)"),
                ("row", codes(8, 208), torch.ones(9), r"q: size of dimension 0 is 8, needed 9 \(M\)"),
                ("row", codes(9, 208), torch.ones(9), "x: is not on a CUDA device"),
            )
        ),
        *(
            ("swiglu_product", (torch.zeros(9, 416).half(), out), text)
            for out, text in (
                (torch.zeros(9, 208), "out: dtype is float32, needed float16"),
                (torch.zeros(9, 416).half(), r"out: size of dimension 1 is 416, needed 208 \(K\)"),
                (torch.zeros(8, 208).half(), r"out: size of dimension 0 is 8, needed 9 \(M\)"),
                (torch.zeros(9, 209).half()[:, :208], "out: "),
                (torch.zeros(9, 208).half(), "x: is not on a CUDA device"),
            )
        ),
    ],
)
def test_packer_refuses(function: str, arguments: tuple[Any, ...], message: str) -> None:
    packer = built_kernels.module(kernel_of(function) if "swiglu" in function else "w4_activations", "any")
    with pytest.raises((ValueError, TypeError), match=message):
        getattr(packer, function)(*arguments, False)
