"""Our CUTLASS GEMMs and quantisers: compiled on first use, proved, launched with PDL only where the proof says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fp4dispatch import formats
from fp4dispatch.backends.base import LinearWeights, Plan, Prepared, QuantizedActivation
from fp4dispatch.backends.own.compiled import N_MULTIPLE, CompiledBackend, Launch, Loaded, State, Weights
from fp4dispatch.backends.own.launch_choice import Build, Layout
from fp4dispatch.backends.own.scratch import Part, Scratch
from fp4dispatch.backends.own.tensors.operands import aligned
from fp4dispatch.backends.own.tiling.speeds import Speeds
from fp4dispatch.backends.own.tiling.tiles import builds_for, tile_for
from fp4dispatch.backends.weight_layout import block_scales_128x4, global_scales, row_scales
from fp4dispatch.formats import round_up, zero_pad
from fp4dispatch.problem import Activation, Op, Problem
from fp4dispatch.problem.arch import Arch

_K_MULTIPLE = {"nvfp4_gemm": 32, "fp8_gemm": 16}  # TMA rows of A and B are multiples of 16 bytes
_AT_ONCE = ("fp8_gemm_sm90",)
"""Kernels whose module has ``fp8_quantize_gemm``, which calls the quantiser too: one call from Python, not two."""

_QUANTIZER: dict[Op, str] = {"nvfp4_gemm": "nvfp4_quantize", "fp8_gemm": "fp8_quantize"}


@dataclass(slots=True, eq=False)
class _State(State):
    """Also: ``at_once``, one function that quantises and multiplies without a workspace; None if it takes two calls.

    The last tensor of ``scratch`` is the GEMM's workspace.
    """

    at_once: Callable[..., None] | None = None
    workspace_bytes: int = 0


class CutlassBackend(CompiledBackend):
    """FP8 (tensor, row; block128 on sm_90) and NVFP4 x NVFP4, from ``csrc/`` through :mod:`fp4dispatch.jit`."""

    name = "cutlass"
    activations: ClassVar[dict[Op, tuple[Activation, ...]]] = {"nvfp4_gemm": ("nvfp4",), "fp8_gemm": ("fp8",)}

    def _kernels(self, problem: Problem, arch: Arch, sms: int, speeds: Speeds | None = None) -> tuple[Build, ...]:
        """Return the builds of the first row of ``cutlass_tiles.toml`` that serves a problem."""
        tile = tile_for(problem, arch, sms)
        return () if tile is None else self.with_quantizer(problem, (tile.kernel, tile.builds[problem.out_dtype]))

    def gemms(self, problem: Problem, arch: Arch | None, sms: int) -> tuple[Build, ...]:
        """Name every build of ``cutlass_tiles.toml`` that runs a problem."""
        return builds_for(problem, arch, "cutlass")

    def with_quantizer(self, problem: Problem, gemm: Build) -> tuple[Build, ...]:
        """Return a GEMM with the quantiser that it needs."""
        return gemm, (_QUANTIZER[problem.op], "any")

    def prepare(self, weights: LinearWeights) -> Prepared:
        """Pad with zeros to TMA's row sizes, swizzle NVFP4 scales; weights that fit are not copied.

        Tensors: weight [np, kp]; scale (nvfp4: 128x4; row: f32 [np]); nvfp4: global scale f32 [1] or [np]; input scale.
        """
        w = weights
        np, kp = round_up(w.n, N_MULTIPLE), round_up(w.k, _K_MULTIPLE[w.op])
        layout = Layout(w.n, w.k, np, kp, w.input_scale is not None)
        if w.op == "nvfp4_gemm":
            tensors = [zero_pad(w.weight, np, kp // 2), block_scales_128x4(w, np, kp), global_scales(w, np)]
        else:
            scale = row_scales(w.scale, np) if w.scaling == "row" else w.scale.contiguous()
            tensors = [zero_pad(w.weight, np, kp), scale]
        if w.input_scale is not None:
            tensors.append(w.input_scale)
        return Prepared(self.name, tuple(tensors), tuple(layout))

    def _state(self, problem: Problem, layout: Layout, device: torch.device, loaded: tuple[Loaded, ...]) -> _State:
        """Return the launch of the loaded kernels and what it needs."""
        m, (gemm, quantizer) = problem.m, loaded
        workspace_bytes = gemm.module.workspace_size(m, layout.np, layout.kp)
        view: Callable[[list[Tensor]], tuple[Tensor, ...]] = tuple
        at_once, gated = None, ""
        if problem.op == "nvfp4_gemm":
            launch, quantize = _launch_nvfp4, quantizer.module.nvfp4_quantize
            sf = (round_up(m, 128), round_up(layout.kp // formats.NVFP4_BLOCK, 4))
            parts = [Part((m, layout.kp // 2), torch.uint8), Part(sf, torch.float8_e4m3fn)]
        else:
            at_once = gemm.module.fp8_quantize_gemm if gemm.kernel in _AT_ONCE else None
            launch = _launch_fp8 if at_once is None else _launch_fp8_at_once
            parts = [Part((m, layout.kp), torch.float8_e4m3fn)]
            if problem.scaling == "block128":
                quantize, gated = quantizer.module.fp8_quantize_1x128, "fp8_swiglu_1x128"
                parts.append(Part(_columns(m, layout.kp), torch.float32))
                view = _transposed(m)
            elif layout.has_input_scale:
                quantize, gated = quantizer.module.fp8_quantize_tensor, "fp8_swiglu_tensor"
            else:
                quantize, gated = quantizer.module.fp8_quantize_row, "fp8_swiglu_row"
                parts.append(Part((m,), torch.float32))
        return _State(
            m,
            layout,
            launch,
            gemm.module.nvfp4_gemm if problem.op == "nvfp4_gemm" else gemm.module.fp8_gemm,
            gemm.pdl,
            quantize,
            quantizer.pdl,
            Scratch(device, [*parts, Part((workspace_bytes,), torch.uint8)], view),
            swiglu=gated,
            at_once=at_once,
            workspace_bytes=workspace_bytes,
        )

    def _run_quantized(self, plan: Plan, w: Weights, x: QuantizedActivation, d: Tensor, bias: Tensor | None) -> None:
        """Launch on an activation that the caller has quantised."""
        (_raw_nvfp4 if plan.problem.op == "nvfp4_gemm" else _raw_fp8)(plan.state, plan.problem, w, x, d, bias)


# ---------------------------------------------------------------------------------------------------------------- plan


def _columns(m: int, k: int) -> tuple[int, int]:
    """Return the sizes of the scales of 1x128 blocks of [M, K], tokens last and padded to 16 bytes, as TMA loads it."""
    return -(-k // formats.FP8_BLOCK), round_up(m, 4)


def _transposed(m: int) -> Callable[[list[Tensor]], tuple[Tensor, ...]]:
    return lambda parts: (parts[0], parts[1].t()[:m], *parts[2:])


# -------------------------------------------------------------------------------------------------------------- launch


def _launch_fp8(s: _State, weights: Weights = ()) -> Launch:
    gemm, pdl, static = s.gemm, s.gemm_pdl, s.layout.has_input_scale
    quantize, quantize_pdl, scratch = s.quantize, s.quantize_pdl, s.scratch

    def launch(x: Tensor, out: Tensor, bias: Tensor | None, w: Weights = weights) -> None:
        parts = scratch()
        q, x_scale = parts[0], w[2] if static else parts[1]
        quantize(x, q, x_scale, quantize_pdl)
        gemm(q, w[0], x_scale, w[1], bias, out, parts[-1], pdl)

    return launch


def _launch_fp8_at_once(s: _State, weights: Weights = ()) -> Launch:
    assert s.at_once is not None
    at_once, pdl, static = s.at_once, s.gemm_pdl, s.layout.has_input_scale
    quantize, quantize_pdl, scratch = s.quantize, s.quantize_pdl, s.scratch

    def launch(x: Tensor, out: Tensor, bias: Tensor | None, w: Weights = weights) -> None:
        parts = scratch()
        x_scale = w[2] if static else parts[1]
        at_once(quantize, x, parts[0], w[0], x_scale, w[1], bias, out, quantize_pdl, pdl)

    return launch


def _launch_nvfp4(s: _State, weights: Weights = ()) -> Launch:
    gemm, pdl, static = s.gemm, s.gemm_pdl, s.layout.has_input_scale
    quantize, quantize_pdl, scratch = s.quantize, s.quantize_pdl, s.scratch

    def launch(x: Tensor, out: Tensor, bias: Tensor | None, w: Weights = weights) -> None:
        x_global = w[3] if static else formats.nvfp4_global_scale(x)
        q, x_sf, workspace = scratch()
        quantize(x, x_global, q, x_sf, quantize_pdl)
        gemm(q, w[0], x_sf, w[1], w[2] * x_global, bias, out, workspace, pdl)

    return launch


# ------------------------------------------------------------------------------------------------ quantised activations


def _workspace(s: _State, d: Tensor) -> Tensor:
    return d.new_empty(s.workspace_bytes, dtype=torch.uint8)


def _raw_fp8(s: _State, problem: Problem, w: Weights, x: QuantizedActivation, d: Tensor, bias: Tensor | None) -> None:
    a, a_scale = aligned(x.data, s.layout.kp), x.scale
    if problem.scaling == "block128":
        a_scale = _tokens_fastest(a_scale, a)
    s.gemm(a, w[0], a_scale, w[1], bias, d, _workspace(s, d), s.gemm_pdl)


def _tokens_fastest(scale: Tensor, a: Tensor) -> Tensor:
    m, k = a.shape
    return a.new_empty(_columns(m, k), dtype=torch.float32).t()[:m].copy_(scale)


def _raw_nvfp4(s: _State, problem: Problem, w: Weights, x: QuantizedActivation, d: Tensor, bias: Tensor | None) -> None:
    layout = s.layout
    a, a_sf = aligned(x.data, layout.kp // 2), x.scale
    if problem.sf_layout != "128x4" or layout.kp != layout.k:
        columns = layout.k // formats.NVFP4_BLOCK
        linear = formats.from_128x4(a_sf, problem.m, columns) if problem.sf_layout == "128x4" else a_sf
        a_sf = formats.to_128x4(zero_pad(linear, problem.m, layout.kp // formats.NVFP4_BLOCK))
    alpha = w[2] if x.global_scale is None else w[2] * x.global_scale
    s.gemm(a, w[0], a_sf, w[1], alpha, bias, d, _workspace(s, d), s.gemm_pdl)
