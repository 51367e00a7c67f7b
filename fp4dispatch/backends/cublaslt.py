"""cuBLASLt through torch's scaled matmul (``torch._scaled_mm`` and ``_scaled_mm_v2``).

What torch asks of the operands, read in aten/src/ATen/native/cuda/ScaledBlas.cpp
(https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cuda/ScaledBlas.cpp):

* A row-major, B^T column-major (that is, B [N, K] row-major); K and N multiples of 16. Anything else is padded with
  zeros in ``prepare`` and sliced after; a row-major B is silent garbage elsewhere (bmm_fp8), here it cannot be passed.
* ``row`` scaling runs on cuBLASLt on sm_90 and on torch's own CUTLASS kernels, bfloat16 output only, elsewhere.
* ``block128`` is for sm_90 and cuBLASLt 12.9: scales of A [M, K/128] with M the fastest dimension, scales of B
  [K/128 rounded up to 4, N/128] with K the fastest.
* NVFP4: e2m1 pairs, e4m3 scales in the 128x4 layout, and two f32 global scales whose product is alpha, on the device.

``use_fast_accum`` stays off: Hopper's FP8 tensor cores keep about 14 bits of a running sum, and without it cuBLASLt
promotes partial sums to f32.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fp4dispatch import formats
from fp4dispatch import system as _system
from fp4dispatch.arch import SM90
from fp4dispatch.backends.activations import quantize_activation
from fp4dispatch.backends.base import Backend, LinearWeights, Plan, Prepared, QuantizedActivation
from fp4dispatch.backends.capability import check
from fp4dispatch.decision import Reason
from fp4dispatch.formats import round_up, zero_pad
from fp4dispatch.problem import Activation, Op, Problem, SfLayout
from fp4dispatch.system import System

# torch.nn.functional.ScalingType and SwizzleType as the integers that the operator takes
_TENSORWISE, _BLOCK_1X16, _BLOCK_1X128, _BLOCK_128X128 = 0, 2, 4, 5
_NO_SWIZZLE, _SWIZZLE_32_4_4 = 0, 1


class _Layout(NamedTuple):
    """Sizes of prepared weights; ``np``, ``kp`` are padded. ``per_row``: tensors[2] of nvfp4 is [np], not one value."""

    scaling: str
    n: int
    k: int
    np: int
    kp: int
    per_row: bool
    has_input_scale: bool


class _Recipe(NamedTuple):
    """How a plan runs.

    ``epilogue``: the GEMM writes f32, and scales per row and the bias are applied after, so that the output is rounded
    once. ``rows_need_bf16``: scaling per row is only there with bfloat16 output; otherwise it goes to the epilogue.
    """

    epilogue: bool
    rows_need_bf16: bool
    m_multiple: int


class CublasLtBackend(Backend):
    """FP8 (tensor, row, block128) and NVFP4 x NVFP4 on the cuBLASLt that torch brings."""

    name = "cublaslt"
    activations: ClassVar[dict[Op, tuple[Activation, ...]]] = {"nvfp4_gemm": ("nvfp4",), "fp8_gemm": ("fp8",)}
    plans_by_m = False

    def supports(self, problem: Problem, system: System) -> tuple[Reason, ...]:
        """Collect every reason why this backend cannot run the problem."""
        return check(self.name, problem, system)

    def prepare(self, weights: LinearWeights) -> Prepared:
        """Pad with zeros to what cuBLASLt needs; weights that fit are not copied."""
        make = {"nvfp4": _prepare_nvfp4, "block128": _prepare_block128}.get(weights.scaling, _prepare_fp8)
        tensors, layout = make(weights)
        if weights.input_scale is not None:
            tensors.append(weights.input_scale)
        return Prepared(self.name, tuple(tensors), tuple(layout))

    def plan(self, problem: Problem, prepared: Prepared) -> Plan:
        """Decide what is fused; cuBLASLt's own heuristic runs at launch, is cached by torch and safe to capture."""
        layout = _Layout(*prepared.layout)
        block = layout.scaling == "block128"
        epilogue = (
            (layout.scaling == "nvfp4" and layout.per_row)
            or (problem.bias and (block or problem.out_dtype == "float32"))
            or (block and problem.out_dtype == "float16")
        )
        return Plan(self.name, problem, _Recipe(epilogue, _arch_of(prepared.tensors[0]) != SM90, 4 if block else 1))

    def run(
        self,
        plan: Plan,
        prepared: Prepared,
        x: Tensor | QuantizedActivation,
        out: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        """Quantise the activation where that is still to do, and launch the GEMM."""
        layout = _Layout(*prepared.layout)
        recipe: _Recipe = plan.state
        epilogue = recipe.epilogue or (bias is not None and bias.dtype != out.dtype)
        row_scales = layout.scaling in ("tensor", "row") and layout.per_row and recipe.rows_need_bf16
        row_scales = row_scales and (epilogue or out.dtype != torch.bfloat16)
        epilogue = epilogue or row_scales
        m = out.shape[0]
        mp = round_up(m, recipe.m_multiple)
        direct = not epilogue and (mp, layout.np) == (m, layout.n) and out.is_contiguous()
        d = out if direct else out.new_empty(mp, layout.np, dtype=torch.float32 if epilogue else out.dtype)
        fused_bias = None if bias is None or epilogue else zero_pad(bias.reshape(1, -1), 1, layout.np).reshape(-1)
        if layout.scaling == "nvfp4":
            after = _run_nvfp4(layout, plan.problem, prepared, x, d, fused_bias)
        elif layout.scaling == "block128":
            after = _run_block128(layout, prepared, x, d, fused_bias)
        else:
            after = _run_fp8(layout, prepared, x, d, fused_bias, row_scales)
        if direct:
            return
        result = d[:m, : layout.n]
        if epilogue:
            for factor in after:
                result.mul_(factor)
            if bias is not None:
                result.add_(bias)
        out.copy_(result)


def _arch_of(tensor: Tensor) -> Any:
    """Return the arch of the GPU that a tensor is on; None on a CPU."""
    gpus = _system.current().gpus
    index = tensor.device.index
    return gpus[index].arch if tensor.is_cuda and index is not None and index < len(gpus) else None


# ------------------------------------------------------------------------------------------------------------- prepare


def _prepare_fp8(w: LinearWeights) -> tuple[list[Tensor], _Layout]:
    np, kp = round_up(w.n, 16), round_up(w.k, 16)
    per_row = w.scaling == "row" or w.input_scale is None  # per-token activations need per-row weights beside them
    scale = w.scale
    if per_row:
        scale = zero_pad(scale.expand(w.n).reshape(1, -1), 1, np).reshape(np).contiguous()
    layout = _Layout(w.scaling, w.n, w.k, np, kp, per_row, w.input_scale is not None)
    return [zero_pad(w.weight, np, kp), scale], layout


def _prepare_block128(w: LinearWeights) -> tuple[list[Tensor], _Layout]:
    np, kp = round_up(w.n, 16), round_up(w.k, 128)
    scale = zero_pad(w.scale, w.scale.shape[0], round_up(w.scale.shape[1], 4)).contiguous()
    layout = _Layout(w.scaling, w.n, w.k, np, kp, False, w.input_scale is not None)
    return [zero_pad(w.weight, np, kp), scale], layout


def _prepare_nvfp4(w: LinearWeights) -> tuple[list[Tensor], _Layout]:
    np, kp = round_up(w.n, 16), round_up(w.k, 32)
    scale = w.scale
    if w.sf_layout == "linear" or (np, kp) != (w.n, w.k):
        linear = formats.from_128x4(scale, w.n, w.k // 16) if w.sf_layout == "128x4" else scale
        scale = formats.to_128x4(zero_pad(linear, np, kp // 16))
    assert w.global_scale is not None
    per_row = len(w.shard_rows) > 1
    alpha = w.global_scale
    if per_row:
        alpha = zero_pad(formats.expand_shards(alpha, w.shard_rows).reshape(1, -1), 1, np).reshape(np)
    layout = _Layout("nvfp4", w.n, w.k, np, kp, per_row, w.input_scale is not None)
    return [zero_pad(w.weight, np, kp // 2), scale, alpha], layout


# ----------------------------------------------------------------------------------------------------------------- run


def _input_scale(layout: _Layout, prepared: Prepared) -> Tensor | None:
    return prepared.tensors[-1] if layout.has_input_scale else None


def _run_fp8(
    layout: _Layout,
    prepared: Prepared,
    x: Tensor | QuantizedActivation,
    d: Tensor,
    bias: Tensor | None,
    row_scales: bool,
) -> tuple[Tensor, ...]:
    """Launch a tensor- or row-wise GEMM; return the factors that are left to apply."""
    w, w_scale = prepared.tensors[:2]
    if isinstance(x, Tensor):
        x = quantize_activation(x, "fp8", "row", _input_scale(layout, prepared))
    a = zero_pad(x.data, d.shape[0], layout.kp)
    if row_scales:
        one = torch.ones((), device=a.device)
        torch._scaled_mm(a, w.t(), one, one, out_dtype=d.dtype, out=d)
        return w_scale[: layout.n], x.scale.reshape(-1, 1)
    if layout.per_row:
        a_scale = x.scale.reshape(-1, 1).expand(a.shape[0], 1).contiguous()
        torch._scaled_mm(a, w.t(), a_scale, w_scale.reshape(1, -1), bias, out_dtype=d.dtype, out=d)
    else:
        torch._scaled_mm(a, w.t(), x.scale.reshape(()), w_scale.reshape(()), bias, out_dtype=d.dtype, out=d)
    return ()


def _run_block128(
    layout: _Layout, prepared: Prepared, x: Tensor | QuantizedActivation, d: Tensor, bias: Tensor | None
) -> tuple[Tensor, ...]:
    w, w_scale = prepared.tensors[:2]
    if isinstance(x, Tensor):
        x = quantize_activation(x, "fp8", "block128")
    a = zero_pad(x.data, d.shape[0], layout.kp)
    a_scale = torch.zeros(x.scale.shape[1], d.shape[0], device=d.device)
    a_scale[:, : x.scale.shape[0]].copy_(x.scale.t())
    torch.ops.aten._scaled_mm_v2.out(
        a,
        w.t(),
        [a_scale.t()],
        [_BLOCK_1X128],
        [_NO_SWIZZLE],
        [w_scale.t()],
        [_BLOCK_128X128],
        [_NO_SWIZZLE],
        bias,
        d.dtype,
        out=d,
    )
    return ()


def _run_nvfp4(
    layout: _Layout,
    problem: Problem,
    prepared: Prepared,
    x: Tensor | QuantizedActivation,
    d: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, ...]:
    """Launch an NVFP4 GEMM; with one alpha per shard, return them to be applied to the f32 sums."""
    w, w_sf, alpha = prepared.tensors[:3]
    m, kp = d.shape[0], layout.kp
    sf_layout: SfLayout = problem.sf_layout or "linear"
    if isinstance(x, Tensor):
        x = quantize_activation(zero_pad(x, m, kp), "nvfp4", "nvfp4", _input_scale(layout, prepared), "128x4")
        sf_layout = "128x4"
    a_sf = x.scale
    if sf_layout == "linear" or kp != layout.k:
        linear = formats.from_128x4(a_sf, m, a_sf.shape[1]) if sf_layout == "128x4" else a_sf
        a_sf = formats.to_128x4(zero_pad(linear[:, : layout.k // 16], m, kp // 16))
    one = torch.ones((), device=d.device)
    a_global = one if x.global_scale is None else x.global_scale.reshape(())
    fp4 = torch.float4_e2m1fn_x2
    torch.ops.aten._scaled_mm_v2.out(
        zero_pad(x.data, m, kp // 2).view(fp4),
        w.view(fp4).t(),
        [a_sf, a_global],
        [_BLOCK_1X16, _TENSORWISE],
        [_SWIZZLE_32_4_4, _NO_SWIZZLE],
        [w_sf, one if layout.per_row else alpha.reshape(())],
        [_BLOCK_1X16, _TENSORWISE],
        [_SWIZZLE_32_4_4, _NO_SWIZZLE],
        bias,
        d.dtype,
        out=d,
    )
    return (alpha[: layout.n],) if layout.per_row else ()
