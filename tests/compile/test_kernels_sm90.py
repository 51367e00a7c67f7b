"""SM90 GEMMs and quantisers without a GPU: they compile, the binary is proved, the host code refuses what is wrong.

One GEMM and the quantisers of one target run by default; the rest are marked slow (`-m "compile and slow"`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp4dispatch import jit
from fp4dispatch.jit.catalog.manifest import installed
from fp4dispatch.machine import libraries
from fp4dispatch.trust.race import CASES, without_barriers

tvm_ffi = pytest.importorskip("tvm_ffi")

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(
        libraries.nvcc()[0] is None or libraries.cutlass() is None, reason="needs nvcc and the CUTLASS headers"
    ),
]

GEMM = "fp8_gemm_sm90"
CI = "row_bf16_swap_64x16"
# Registers are dealt out between producer and consumer warps (setmaxnreg), so ptxas reports the launch figure.
MAX_SHARED = 232448


def variants() -> list[Any]:
    return [
        pytest.param(name, marks=() if name == CI else pytest.mark.slow) for name in installed().kernel(GEMM).variants
    ]


def quantizers() -> list[Any]:
    return [
        pytest.param(kernel, target, marks=() if target == "90a" else pytest.mark.slow)
        for kernel in ("nvfp4_quantize", "fp8_quantize")
        for target in installed().kernel(kernel).targets
    ]


def module(kernel: str, variant: str, target: str = "90a") -> Any:
    return tvm_ffi.load_module(str(jit.build(kernel, variant, target).entry.library))


@pytest.mark.parametrize("variant", variants())
def test_gemm_is_proved(variant: str) -> None:
    built = jit.build(GEMM, variant, "90a")
    assert built.pdl_allowed
    assert built.proof is not None
    (kernel,) = built.proof.kernels
    # The warp that loads operands, the epilogue, and with block scales the warp that loads those.
    assert kernel.wait >= (3 if variant.startswith("block") else 2)
    assert kernel.signal >= 1
    assert kernel.unguarded == ()
    assert sum(kernel.mma.values()) >= 4
    assert (kernel.spills, kernel.stack) == (0, 0)
    assert module(GEMM, variant).shared_memory_bytes() <= MAX_SHARED
    assert module(GEMM, variant).workspace_size(4096, 28672, 4096) == 0


def control_builds() -> list[Any]:
    """Each build that the race runs; slow but for three."""
    names = dict.fromkeys((case.kernel, case.variant) for case in CASES)
    quick = {("w4a16_small", "bf16"), ("w4_activations", "any"), ("swiglu_activations", "any")}
    return [pytest.param(*name, marks=() if name in quick else pytest.mark.slow) for name in names]


@pytest.mark.parametrize(("kernel", "variant"), control_builds())
def test_control_of_the_race_has_no_barrier_and_no_leave_for_pdl(kernel: str, variant: str) -> None:
    control = jit.build(kernel, variant, "90a", catalog=without_barriers(installed(), kernel))
    assert control.proof is not None
    assert {proof.wait for proof in control.proof.kernels} == {0}
    assert not control.pdl_allowed
    assert control.entry.library != jit.build(kernel, variant, "90a").entry.library


@pytest.mark.parametrize(("kernel", "target"), quantizers())
def test_quantizer_is_proved(kernel: str, target: str) -> None:
    built = jit.build(kernel, "any", target)
    assert built.proven
    assert built.pdl_allowed == (target not in ("80", "89"))
    assert built.proof is not None
    assert all((proof.spills, proof.stack) == (0, 0) for proof in built.proof.kernels)


def gemm_arguments(**replaced: torch.Tensor | None) -> list[Any]:
    def fp8(rows: int, k: int) -> torch.Tensor:
        return torch.zeros(rows, k, dtype=torch.uint8).view(torch.float8_e4m3fn)

    arguments: dict[str, Any] = {
        "a": fp8(5, 96),
        "b": fp8(64, 96),
        "a_scale": torch.ones(5),
        "b_scale": torch.ones(64),
        "bias": None,
        "d": torch.zeros(5, 64, dtype=torch.bfloat16),
        "workspace": torch.zeros(0, dtype=torch.uint8),
    }
    return [*(arguments | replaced).values(), False]


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({}, "a: is not on a CUDA device"),
        ({"a": torch.zeros(5, 96)}, "a: dtype is float32, needed float8_e4m3fn"),
        ({"b": torch.zeros(64, 80, dtype=torch.uint8).view(torch.float8_e4m3fn)}, "b: size of dimension 1 is 80"),
        ({"a_scale": torch.ones(4)}, "a_scale: has 4 elements, needed 1 or 5"),
        ({"d": torch.zeros(5, 64, dtype=torch.float16)}, "d: dtype is float16, needed bfloat16"),
        ({"d": torch.zeros(64, 5, dtype=torch.bfloat16).t()}, "d: the last dimension has stride 5, needed 1"),
        ({"bias": torch.zeros(64)}, "bias: dtype is float32"),
    ],
)
def test_gemm_refuses_before_any_cuda_call(replaced: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        module(GEMM, CI).fp8_gemm(*gemm_arguments(**replaced))


def test_quantizer_refuses_before_any_cuda_call() -> None:
    x = torch.zeros(4, 32, dtype=torch.bfloat16)
    q, sf = torch.zeros(4, 16, dtype=torch.uint8), torch.zeros(512, dtype=torch.uint8)
    nvfp4_quantize = module("nvfp4_quantize", "any").nvfp4_quantize
    with pytest.raises(ValueError, match="x: is not on a CUDA device"):
        nvfp4_quantize(x, torch.ones(1), q, sf, False)
    with pytest.raises(ValueError, match="sf: has 511 elements, needed 512"):
        nvfp4_quantize(x, torch.ones(1), q, sf[1:], False)
