"""NVFP4 weights by FP8 activations, on an FP8 copy of the weights that is written out once, for cuBLASLt.

The copy holds the very values that w4a8 multiplies (:mod:`~fp4dispatch.backends.folding`): ``e4m3(e2m1 * block_scale /
8)``, and the global scales times 8 as scales of output columns, one per fused shard where shards differ. From then on
it is an FP8 layer scaled by token and by column, so everything else is :mod:`~fp4dispatch.backends.cublaslt`'s, as are
the padding of N and what happens without our quantiser. Sums are promoted to f32, where w4a8's stay in the tensor core.

w4a8 unpacks its weights at each call, in registers or into scratch; here that is saved, for memory: 8 bits a weight
beside the checkpoint's 4.5 and the 4.5 of w4a16 and w4a8, which few tokens go to. So ``auto`` takes it only where
``FP4DISPATCH_FP8_COPY`` allows that (rule ``nvfp4-fp8-copy-not-allowed``), and whoever names it.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fp4dispatch import formats
from fp4dispatch.backends.base import LinearWeights, Plan, Prepared, QuantizedActivation
from fp4dispatch.backends.capability import check
from fp4dispatch.backends.cublaslt import CublasLtBackend
from fp4dispatch.backends.cublaslt_weights import prepare
from fp4dispatch.backends.folding import FOLD, fold_e4m3
from fp4dispatch.backends.operands import per_column
from fp4dispatch.decision import Reason
from fp4dispatch.errors import InputError
from fp4dispatch.problem import Activation, Op, Problem
from fp4dispatch.system import System

_STEP_ELEMENTS = 1 << 24
"""Weights that are folded at a time: in between they are f32."""


class W4A8ExpandedBackend(CublasLtBackend):
    """NVFP4 weights, written out as e4m3 once, by FP8 activations that are scaled per token."""

    name = "w4a8_expanded"
    activations: ClassVar[dict[Op, tuple[Activation, ...]]] = {"nvfp4_gemm": ("fp8",)}

    def supports(self, problem: Problem, system: System) -> tuple[Reason, ...]:
        """Collect every reason why this backend cannot run the problem."""
        return check(self.name, problem, system)

    def builds(self, problem: Problem, device: torch.device) -> tuple[tuple[str, str], ...]:
        """Name the quantiser that a plan will load."""
        return (("fp8_quantize", "any"),)

    def prepare(self, weights: LinearWeights) -> Prepared:
        """Write the weights out, N padded with zeros to a multiple of 16. K is one, as NVFP4 blocks are.

        Tensors: weight e4m3 [np, K]; scale of each output column f32 [1, np]. A static input scale belongs to 4-bit
        activations and is not used.

        Raises
        ------
        InputError
            As :func:`~fp4dispatch.backends.folding.fold_e4m3`.
        """
        w = weights
        scale = (per_column(w, w.n) * FOLD).expand(w.n)
        tensors, layout = prepare(LinearWeights("fp8_gemm", "row", w.n, w.k, _folded(w), scale))
        return Prepared(self.name, tuple(tensors), tuple(layout))

    def run(
        self,
        plan: Plan,
        prepared: Prepared,
        x: Tensor | QuantizedActivation,
        out: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        """Quantise the activation, and launch the GEMM."""
        if not isinstance(x, Tensor):
            raise InputError(f"{self.name} takes 16-bit activations, not quantised ones: use FP4Linear")
        super().run(plan, prepared, x, out, bias)


def _folded(w: LinearWeights) -> Tensor:
    """Return the weights as w4a8 multiplies them, e4m3 [N, K], a few rows at a time."""
    scale = formats.from_128x4(w.scale, w.n, w.k // formats.NVFP4_BLOCK) if w.sf_layout == "128x4" else w.scale
    step = max(1, _STEP_ELEMENTS // w.k)
    if w.n <= step:
        return fold_e4m3(w.weight, scale)
    found = torch.empty(w.n, w.k, dtype=torch.float8_e4m3fn, device=w.weight.device)
    for start in range(0, w.n, step):
        rows = slice(start, start + step)
        found[rows] = fold_e4m3(w.weight[rows], scale[rows])
    return found
