"""FP8 weights with FP8 activations: our kernels for few and for many tokens, on the checkpoint's own bytes.

With few tokens the time is that of reading the weights: ``csrc/few_tokens/w8/w8a8_small.cu`` streams them once per tile
of up to 128 tokens. For many tokens ``csrc/many_tokens/w8/w8_gemm_sm90.cu`` has tiles of 96 to 224 tokens by 128 rows,
and one of 128 by 128 for block scales. ``w8_tiles.toml`` says which serves which M; every build runs every M.

A first launch quantises the activation and stores it in the order in which the GEMM loads it; the scale is one per
token or the layer's static one. Tensor cores sum over 256 k; these sums are added in f32. Scales and the bias are
applied to the f32 sums, which are rounded once.

128x128 block scales have builds of their own: the activation has one scale per token and 128 k, and each partial sum
over 128 k is multiplied by both scales as it is added.

Weights and block scales stay as they are stored. ``w8a16``, ``cutlass`` and ``cublaslt`` read the same bytes, so a
layer that switches between them by M holds its weight once.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fp4dispatch.backends.base import LinearWeights, Prepared
from fp4dispatch.backends.own.compiled import N_MULTIPLE, Launch, Loaded, State, Weights
from fp4dispatch.backends.own.from_table import TableBackend
from fp4dispatch.backends.own.launch_choice import Build, Layout
from fp4dispatch.backends.own.scratch import Part, Scratch
from fp4dispatch.backends.own.tensors.operands import (
    QUANTIZER,
    await_writes,
    block_scales_part,
    packed_part,
    stored_rows,
)
from fp4dispatch.formats import round_up, zero_pad
from fp4dispatch.problem import Activation, Op, Problem

_ENTRY = {"w8a8_small": "w8a8_small", "w8_gemm_sm90": "w8_gemm"}  # a kernel's function

_K_MULTIPLE = 16  # kernels read rows of the weight that start on 16 bytes


class W8A8Backend(TableBackend):
    """FP8 weights (tensor, row, block128) by FP8 activations, from ``csrc/``. Plans are by M."""

    name = "w8a8"
    table = "w8"
    activations: ClassVar[dict[Op, tuple[Activation, ...]]] = {"fp8_gemm": ("fp8",)}

    def with_quantizer(self, problem: Problem, gemm: Build) -> tuple[Build, ...]:
        """Return a GEMM with the quantiser that it needs."""
        return gemm, (QUANTIZER, "any")

    def prepare(self, weights: LinearWeights) -> Prepared:
        """Keep the weight as it is stored; pad it with zeros if K is not a multiple of 16. Synchronises.

        Tensors: weight, e4m3 [n, kp], the layer's own if nothing is padded; its scale, f32 [1] (``tensor``), [np]
        (``row``) or [ceil(N/128), ceil(K/128)] (``block128``); the static input scale, f32 [1], if the layer has one.
        ``block128`` never has one here: its activations are scaled from their own values. NaN in the weight stays NaN:
        FP8 tensor cores multiply it as NaN.
        """
        w = weights
        static = None if w.scaling == "block128" else w.input_scale
        layout = Layout(w.n, w.k, round_up(w.n, N_MULTIPLE), round_up(w.k, _K_MULTIPLE), static is not None)
        weight = stored_rows(w.weight, w.n, layout.kp)
        if w.scaling == "block128":
            scale = w.scale
        else:
            scale = zero_pad(w.scale.reshape(1, -1), 1, layout.np if w.scaling == "row" else 1).reshape(-1)
        tensors = [weight, scale.contiguous()]
        if static is not None:
            tensors.append(static.reshape(1))
        await_writes(weight)
        return Prepared(self.name, tuple(tensors), tuple(layout))

    def _state(self, problem: Problem, layout: Layout, device: torch.device, loaded: tuple[Loaded, ...]) -> State:
        """Return the launch of the loaded kernels and what it needs."""
        m, (gemm, quantizer) = problem.m, loaded
        parts = [packed_part(m, layout.kp)]
        if layout.has_input_scale:
            quantize, swiglu = quantizer.module.w8_quantize_tensor, "w8_swiglu_tensor"
        elif problem.scaling == "block128":
            quantize, swiglu = quantizer.module.w8_quantize_block, "w8_swiglu_block"
            parts.append(block_scales_part(m, layout.kp))
        else:
            quantize, swiglu = quantizer.module.w8_quantize_row, "w8_swiglu_row"
            parts.append(Part((m,), torch.float32))
        function = getattr(gemm.module, _ENTRY[gemm.kernel])
        scratch = Scratch(device, parts)
        return State(m, layout, _launch, function, gemm.pdl, quantize, quantizer.pdl, scratch, gemm.shape, swiglu)


def _launch(s: State, weights: Weights = ()) -> Launch:
    gemm, pdl, shape, static = s.gemm, s.gemm_pdl, s.shape, s.layout.has_input_scale
    quantize, quantize_pdl, scratch = s.quantize, s.quantize_pdl, s.scratch

    def launch(x: Tensor, out: Tensor, bias: Tensor | None, w: Weights = weights) -> None:
        parts = scratch()
        packed, x_scale = parts[0], w[2] if static else parts[1]
        quantize(x, packed, x_scale, quantize_pdl)
        if shape is None:
            gemm(packed, x_scale, w[0], w[1], bias, out, pdl)
        else:
            gemm(packed, x_scale, w[0], w[1], bias, out, shape, pdl)

    return launch
