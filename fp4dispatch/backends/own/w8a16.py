"""FP8 weights with 16-bit activations: our kernels for few and for many tokens, on the checkpoint's own bytes.

With few tokens the time is that of reading the weights. Quantising activations would only add a launch and an error.
Products of e4m3 and bfloat16 or float16 are exact and are summed in f32. Scales and the bias are applied to the sums,
which are rounded once. A static input scale is for 8-bit activations and is not used.

The weight stays as it is stored. ``w8a8``, ``cublaslt`` and ``cutlass`` read the same bytes, so a layer that switches
to one of them for many tokens holds its weight once. ``csrc/few_tokens/w8/w8a16_small.cu`` needs no reordering: the
order along K does not matter to tensor cores as long as both operands have the same one. On SM90
``csrc/many_tokens/w8/w8_gemm_sm90.cu`` has tiles of 64 to 256 tokens, which dequantise in their loop. ``w8_tiles.toml``
says which serves which M; every build runs every M.

128x128 block scales are not built: they need a sum of their own for every 128 k.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fp4dispatch.backends.base import LinearWeights, Prepared
from fp4dispatch.backends.own.compiled import N_MULTIPLE, Loaded, State
from fp4dispatch.backends.own.from_table import TableBackend
from fp4dispatch.backends.own.launch_choice import Layout
from fp4dispatch.backends.own.swiglu import PRODUCT
from fp4dispatch.backends.own.tensors.operands import await_writes, stored_rows
from fp4dispatch.backends.own.weight_only import launch_weight_only
from fp4dispatch.formats import round_up, zero_pad
from fp4dispatch.problem import Activation, Op, Problem

_ENTRY = {"w8a16_small": "w8a16_small", "w8_gemm_sm90": "w8_gemm"}  # a kernel's function

_K_MULTIPLE = 16  # the kernel reads rows of the weight that start on 16 bytes
_STEP_BYTES = 1 << 24
"""Weights that are searched for NaN at a time."""


class W8A16Backend(TableBackend):
    """FP8 weights (tensor, row) by bfloat16 or float16 activations, from ``csrc/`` through :mod:`fp4dispatch.jit`."""

    name = "w8a16"
    table = "w8"
    activations: ClassVar[dict[Op, tuple[Activation, ...]]] = {"fp8_gemm": ("bf16",)}

    def prepare(self, weights: LinearWeights) -> Prepared:
        """Keep the weight as it is stored; pad it with zeros if K is not a multiple of 16. Synchronises.

        Tensors: weight, e4m3 [n, kp], the layer's own if nothing is padded; scale of each output column, f32 [np].
        Kernels read a NaN code as a number, so a row with NaN gets NaN as its scale.
        """
        w = weights
        layout = Layout(w.n, w.k, round_up(w.n, N_MULTIPLE), round_up(w.k, _K_MULTIPLE))
        weight = stored_rows(w.weight, w.n, layout.kp)
        scale = w.scale.float().expand(w.n).masked_fill(_rows_with_nan(weight), float("nan"))
        tensors = (weight, zero_pad(scale.reshape(1, -1), 1, layout.np).reshape(-1).contiguous())
        await_writes(weight)
        return Prepared(self.name, tensors, tuple(layout))

    def _state(self, problem: Problem, layout: Layout, device: torch.device, loaded: tuple[Loaded, ...]) -> State:
        """Return the launch of the loaded kernel."""
        (gemm,) = loaded
        function = getattr(gemm.module, _ENTRY[gemm.kernel])
        return State(problem.m, layout, launch_weight_only, function, gemm.pdl, shape=gemm.shape, swiglu=PRODUCT)


def _rows_with_nan(weight: Tensor) -> Tensor:
    """Return bool [N]: which rows of e4m3 [N, K] hold a NaN. No sync."""
    codes, step = weight.view(torch.uint8), max(1, _STEP_BYTES // weight.shape[1])
    starts = range(0, codes.shape[0], step)
    return torch.cat([((codes[start : start + step] & 0x7F) == 0x7F).any(1) for start in starts])
