"""The reference backend: dequantise, multiply, round once. The oracle of every other backend, and the last resort.

Runs on any device. f32 products are true f32: if an application has allowed TensorFloat-32 or bfloat16 for them
(``torch.set_float32_matmul_precision``), they are computed in f64 instead. ``torch.autocast`` around a call changes
nothing. An oracle must not depend on such switches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import ClassVar

import torch
from torch import Tensor

from fp4dispatch import formats
from fp4dispatch.backends.activations import quantize_activation
from fp4dispatch.backends.base import Backend, LinearWeights, Plan, Prepared, QuantizedActivation
from fp4dispatch.backends.own.tensors.folding import FOLD, fold_e4m3
from fp4dispatch.machine.system import System
from fp4dispatch.policy.capability import check
from fp4dispatch.problem import Activation, Op, Problem
from fp4dispatch.problem.decision import Reason

BLOCK_ELEMENTS = 1 << 25
"""Weight elements that are dequantised at a time: 64 MiB in 16 bits, 128 MiB in f32."""


class ReferenceBackend(Backend):
    """Weights in exact f32 (16-bit where that is exact too), products summed in f32, one rounding to the output.

    NVFP4 weights under FP8 activations are folded to e4m3 first (:mod:`~fp4dispatch.backends.own.tensors.folding`):
    that is what w4a8 means. Block-scaled codes (at most 6 significant bits) and e4m3 codes are exact in bfloat16 and
    float16, so on CUDA the tensor cores multiply them exactly and hand over the f32 sums; global, row and activation
    scales multiply the sums. ``prepare`` keeps the canonical tensors as they are.
    """

    name = "reference"
    activations: ClassVar[dict[Op, tuple[Activation, ...]]] = {
        "nvfp4_gemm": ("bf16", "nvfp4", "fp8"),
        "fp8_gemm": ("bf16", "fp8"),
    }
    plans_by_m = False

    def supports(self, problem: Problem, system: System) -> tuple[Reason, ...]:
        """Collect every reason why this backend cannot run the problem."""
        return check(self.name, problem, system)

    def prepare(self, weights: LinearWeights) -> Prepared:
        """Return the canonical tensors themselves; fused shards get one global scale per row, exactly."""
        tensors = [weights.weight, weights.scale]
        if weights.global_scale is not None:
            fused = len(weights.shard_rows) > 1
            tensors.append(
                formats.expand_shards(weights.global_scale, weights.shard_rows) if fused else weights.global_scale
            )
        if weights.input_scale is not None:
            tensors.append(weights.input_scale)
        layout = (weights.op, weights.scaling, weights.n, weights.k, weights.sf_layout, weights.input_scale is not None)
        return Prepared(self.name, tuple(tensors), layout)

    def plan(self, problem: Problem, prepared: Prepared) -> Plan:
        """Return a plan; there is nothing to do ahead."""
        return Plan(self.name, problem)

    def run(
        self,
        plan: Plan,
        prepared: Prepared,
        x: Tensor | QuantizedActivation,
        out: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        """Compute ``out = x @ W^T (+ bias)`` in blocks of output columns."""
        _, scaling, n, k, _, has_input_scale = prepared.layout
        input_scale = prepared.tensors[-1] if has_input_scale else None
        with without_autocast():
            a, a_scale = _activation(plan.problem, scaling, x, input_scale)
            for start, stop in _blocks(n, k):
                codes, scale = _weight(prepared, plan.problem.activation, start, stop, a.dtype)
                acc = _sums(a, codes)
                for factor in (scale, a_scale):
                    if factor is not None:
                        acc.mul_(factor)
                if bias is not None:
                    acc.add_(bias[start:stop])
                out[:, start:stop].copy_(acc)


def without_autocast() -> AbstractContextManager[None]:
    """Switch ``torch.autocast`` off for the body, on every device."""
    return torch._C._DisableAutocast()


def _blocks(n: int, k: int) -> Iterator[tuple[int, int]]:
    """Split N at multiples of 128, so that blocks of scales and 128x4 tiles are never cut."""
    step = max(BLOCK_ELEMENTS // (k * 128), 1) * 128
    return ((start, min(start + step, n)) for start in range(0, n, step))


def _activation(
    problem: Problem, scaling: str, x: Tensor | QuantizedActivation, input_scale: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return A [M, K] in the dtype to multiply in, and the scale of its sums: f32 [], [1] or [M, 1], or None."""
    if isinstance(x, Tensor):
        if problem.activation in ("bf16", "any"):
            exact = x.is_cuda and x.dtype != torch.float32 and scaling != "block128"
            return (x if exact else x.float()), None
        x = quantize_activation(x, problem.activation, problem.scaling, input_scale)
        sf_layout = "linear"
    else:
        sf_layout = problem.sf_layout or "linear"
    dtype = torch.bfloat16 if x.data.is_cuda else torch.float32
    if problem.activation == "nvfp4":
        ones = torch.ones((), dtype=torch.float32, device=x.data.device)
        values = formats.nvfp4_dequantize(x.data, x.scale, ones, sf_layout=sf_layout, dtype=dtype)  # type: ignore[arg-type]
        return values, x.global_scale
    if scaling == "block128":
        return formats.fp8_dequantize(x.data, x.scale, "1x128"), None
    return x.data.to(dtype), x.scale.reshape(-1, 1)


def _weight(
    prepared: Prepared, activation: Activation, start: int, stop: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return rows ``start`` to ``stop`` of W in ``dtype``, as they are multiplied, and the scale of their sums."""
    _, scaling, _, _, sf_layout, _ = prepared.layout
    weight, scale = prepared.tensors[:2]
    data = weight[start:stop]
    if scaling == "nvfp4":
        rows = slice(start, formats.round_up(stop, 128) if sf_layout == "128x4" else stop)
        global_scale = prepared.tensors[2]
        factor = global_scale if global_scale.numel() == 1 else global_scale[start:stop]
        if activation == "fp8":
            return fold_e4m3(data, scale[rows], sf_layout=sf_layout).to(dtype), factor * FOLD
        ones = torch.ones((), dtype=torch.float32, device=weight.device)
        return formats.nvfp4_dequantize(data, scale[rows], ones, sf_layout=sf_layout, dtype=dtype), factor
    if scaling == "block128":
        blocks = slice(start // formats.FP8_BLOCK, -(-stop // formats.FP8_BLOCK))
        return formats.fp8_dequantize(data, scale[blocks], "block128").to(dtype), None
    return data.to(dtype), scale if scaling == "tensor" else scale[start:stop]


def _sums(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b^T`` with f32 (or wider) accumulation, in f32 or f64."""
    if a.dtype != torch.float32:
        return torch.mm(a, b.t(), out_dtype=torch.float32)
    if not _f32_products_are_f32(a):
        a, b = a.double(), b.double()
    return torch.mm(a, b.t())


def _f32_products_are_f32(x: Tensor) -> bool:
    """Whether no switch lets f32 matmuls on this device run in TensorFloat-32 or bfloat16."""
    group = torch.backends.cuda.matmul if x.is_cuda else torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    everywhere = torch.backends.fp32_precision  # type: ignore[attr-defined]
    return {group.fp32_precision, everywhere} <= {"none", "ieee"}
