"""NVFP4 weights with 16-bit (w4a16) or FP8 (w4a8) activations: our kernels, on one packed copy of the weights.

Numerics: w4a16 multiplies ``e2m1 * block_scale`` exactly and sums in f32. w4a8 rounds that product to e4m3 first
(:mod:`~fp4dispatch.backends.own.tensors.folding`) and scales activations per token. Global scales (one per output
column for fused shards), activation scales and the bias are applied to the f32 sums, which are rounded once.

For many tokens w4a8 writes its e4m3 weights to scratch memory and lets cuBLASLt multiply: its FP8 GEMM is faster by
more than the write costs. ``w4_tiles.toml`` says from which M on.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fp4dispatch import formats
from fp4dispatch.backends.base import LinearWeights, Prepared
from fp4dispatch.backends.own.compiled import N_MULTIPLE, Launch, Loaded, MakeLaunch, State, Weights
from fp4dispatch.backends.own.from_table import TableBackend
from fp4dispatch.backends.own.launch_choice import Build, Layout
from fp4dispatch.backends.own.scratch import Part, Scratch
from fp4dispatch.backends.own.swiglu import PRODUCT
from fp4dispatch.backends.own.tensors.folding import FOLD
from fp4dispatch.backends.own.tensors.operands import QUANTIZER, await_writes, packed_part
from fp4dispatch.backends.own.tensors.w4_layout import pack_w4p, unpack_w4p
from fp4dispatch.backends.own.tiling.predict import UNFOLD
from fp4dispatch.backends.own.weight_only import launch_weight_only
from fp4dispatch.backends.weight_layout import global_scales
from fp4dispatch.formats import round_up
from fp4dispatch.problem import Activation, Op, Problem

_UNFOLD_N_MULTIPLE = 16  # cuBLASLt's, for FP8


class _W4Backend(TableBackend):
    """What w4a16 and w4a8 share: the weights, and the table ``w4_tiles.toml``."""

    layout = "w4p"
    table = "w4"

    def takes(self, problem: Problem, kernel: str) -> bool:
        """Whether cuBLASLt can multiply what a kernel writes out for it; others take every N."""
        return kernel != UNFOLD or problem.n % _UNFOLD_N_MULTIPLE == 0

    def prepare(self, weights: LinearWeights) -> Prepared:
        """Pack the weights into W4P (:mod:`~fp4dispatch.backends.own.tensors.w4_layout`), zero-padded. Synchronises.

        Tensors: packed weight, uint8 [ceil(N/64), ceil(K/64), 2304]; global scale, f32 [1], or [np] if shards differ;
        if N is a multiple of 16, column scales of the e4m3 weights of w4a8, f32 [1, N]. The static input scale is for
        4-bit activations and is not used.

        Raises
        ------
        InputError, FormatError
            As :func:`~fp4dispatch.backends.own.tensors.w4_layout.pack_w4p`.
        """
        w = weights
        scale = formats.from_128x4(w.scale, w.n, w.k // formats.NVFP4_BLOCK) if w.sf_layout == "128x4" else w.scale
        np = round_up(w.n, N_MULTIPLE)
        tensors = [pack_w4p(w.weight, scale), global_scales(w, np)]
        if w.n % _UNFOLD_N_MULTIPLE == 0:
            tensors.append((tensors[1] * FOLD).expand(w.n).reshape(1, -1).contiguous())
        await_writes(tensors[0])
        return Prepared(self.name, tuple(tensors), tuple(Layout(w.n, w.k, np, w.k)))

    def canonical(self, prepared: Prepared) -> tuple[Tensor, Tensor]:
        """Unpack the weights."""
        layout = Layout(*prepared.layout)
        return unpack_w4p(prepared.tensors[0], layout.n, layout.k)

    def _state(self, problem: Problem, layout: Layout, device: torch.device, loaded: tuple[Loaded, ...]) -> State:
        """Return the launch of the loaded kernels and what it needs."""
        m, gemm = problem.m, loaded[0]
        launch, entry = _LAUNCH[gemm.kernel, problem.activation]
        function = getattr(gemm.module, f"{entry}_even" if gemm.room else entry)
        if problem.activation != "fp8":
            return State(m, layout, launch, function, gemm.pdl, shape=gemm.shape, swiglu=PRODUCT)
        quantizer, scale, swiglu = loaded[1], Part((m,), torch.float32), ""
        if gemm.kernel == UNFOLD:
            quantize = quantizer.module.fp8_quantize_row
            q, w = (Part((rows, layout.k), torch.float8_e4m3fn) for rows in (m, layout.n))
            parts = [q, scale, w]
        else:
            quantize, parts = quantizer.module.w4_quantize_row, [packed_part(m, layout.k), scale]
            swiglu = "w4_swiglu_row"
            if gemm.room:
                launch = _launch_evenly
                parts.append(Part((gemm.room,), torch.uint8))
        scratch = Scratch(device, parts)
        return State(m, layout, launch, function, gemm.pdl, quantize, quantizer.pdl, scratch, gemm.shape, swiglu)


class W4A16Backend(_W4Backend):
    """NVFP4 weights by bfloat16 or float16 activations, exactly dequantised."""

    name = "w4a16"
    activations: ClassVar[dict[Op, tuple[Activation, ...]]] = {"nvfp4_gemm": ("bf16",)}


class W4A8Backend(_W4Backend):
    """NVFP4 weights, block scales folded into e4m3, by FP8 activations that are scaled per token."""

    name = "w4a8"
    activations: ClassVar[dict[Op, tuple[Activation, ...]]] = {"nvfp4_gemm": ("fp8",)}

    def with_quantizer(self, problem: Problem, gemm: Build) -> tuple[Build, ...]:
        """Return a GEMM with the quantiser that it needs."""
        return gemm, ("fp8_quantize" if gemm[0] == UNFOLD else QUANTIZER, "any")


def _launch_fp8(s: State, weights: Weights = ()) -> Launch:
    gemm, pdl, shape = s.gemm, s.gemm_pdl, s.shape
    quantize, quantize_pdl, scratch = s.quantize, s.quantize_pdl, s.scratch

    def launch(x: Tensor, out: Tensor, bias: Tensor | None, w: Weights = weights) -> None:
        q, x_scale = scratch()
        quantize(x, q, x_scale, quantize_pdl)
        if shape is None:
            gemm(q, x_scale, w[0], w[1], bias, out, pdl)
        else:
            gemm(q, x_scale, w[0], w[1], bias, out, shape, pdl)

    return launch


def _launch_evenly(s: State, weights: Weights = ()) -> Launch:
    gemm, pdl, shape = s.gemm, s.gemm_pdl, s.shape
    quantize, quantize_pdl, scratch = s.quantize, s.quantize_pdl, s.scratch

    def launch(x: Tensor, out: Tensor, bias: Tensor | None, w: Weights = weights) -> None:
        q, x_scale, room = scratch()
        quantize(x, q, x_scale, quantize_pdl)
        gemm(q, x_scale, w[0], w[1], bias, out, shape, room, pdl)

    return launch


def _launch_unfold(s: State, weights: Weights = ()) -> Launch:
    unfold, pdl = s.gemm, s.gemm_pdl
    quantize, quantize_pdl, scratch = s.quantize, s.quantize_pdl, s.scratch

    def launch(x: Tensor, out: Tensor, bias: Tensor | None, w: Weights = weights) -> None:
        q, x_scale, unfolded = scratch()
        unfold(w[0], unfolded, pdl)
        quantize(x, q, x_scale, quantize_pdl)
        torch._scaled_mm(q, unfolded.t(), x_scale.unsqueeze(1), w[2], bias, out_dtype=out.dtype, out=out)

    return launch


_LAUNCH: dict[tuple[str, Activation], tuple[MakeLaunch, str]] = {
    ("w4a16_small", "bf16"): (launch_weight_only, "w4a16_small"),
    ("w4_gemm_sm90", "bf16"): (launch_weight_only, "w4_gemm"),
    ("w4a8_small", "fp8"): (_launch_fp8, "w4a8_small"),
    ("w4_gemm_sm90", "fp8"): (_launch_fp8, "w4_gemm"),
    (UNFOLD, "fp8"): (_launch_unfold, "w4_to_e4m3"),
}
"""By kernel and activation format: the launch, and the kernel's function."""
