"""FP8 weights with 16-bit activations: our kernel for few tokens, on the checkpoint's own bytes.

With few tokens the time is that of reading the weights. Quantising activations would only add a launch and an error.
Products of e4m3 and bfloat16 or float16 are exact and are summed in f32. Scales and the bias are applied to the sums,
which are rounded once. A static input scale is for 8-bit activations and is not used.

The weight stays as it is stored. ``cublaslt`` and ``cutlass`` read the same bytes, so a layer that switches to one of
them for many tokens holds its weight once. ``csrc/few_tokens/w8/w8a16_small.cu`` needs no reordering: the order along K
does not matter to tensor cores as long as both operands have the same one.

Every M runs, in tiles of up to 32 tokens. Each tile reads all weights, so the kernel is slow for many tokens. 128x128
block scales are not built: they need a sum of their own for every 128 k.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from fp4dispatch.backends.base import LinearWeights, Prepared
from fp4dispatch.backends.own.compiled import (
    N_MULTIPLE,
    Build,
    ByTokens,
    Chosen,
    CompiledBackend,
    Launch,
    Layout,
    Loaded,
    State,
    Weights,
    gpu_and_speeds,
)
from fp4dispatch.backends.own.swiglu import PRODUCT
from fp4dispatch.backends.own.tensors.operands import await_writes, stored_rows
from fp4dispatch.backends.own.tiling import launches, predict
from fp4dispatch.backends.own.tiling.few_tokens import KERNELS, UP_TO
from fp4dispatch.backends.own.tiling.speeds import Speeds
from fp4dispatch.formats import round_up, zero_pad
from fp4dispatch.problem import Activation, Op, Problem
from fp4dispatch.problem.arch import Arch

KERNEL = "w8a16_small"
BUILDS = {"bfloat16": "bf16", "float16": "fp16"}
"""Build of :data:`KERNEL` by output dtype."""

TOKENS = tuple(m for m in UP_TO if m <= KERNELS[KERNEL].most_tokens())
"""Numbers of tokens for which launch shapes of ours take the place of the kernel's own."""

_K_MULTIPLE = 16  # the kernel reads rows of the weight that start on 16 bytes
_STEP_BYTES = 1 << 24
"""Weights that are searched for NaN at a time."""


class W8A16Backend(CompiledBackend):
    """FP8 weights (tensor, row) by bfloat16 or float16 activations, from ``csrc/`` through :mod:`fp4dispatch.jit`."""

    name = "w8a16"
    activations: ClassVar[dict[Op, tuple[Activation, ...]]] = {"fp8_gemm": ("bf16",)}
    plans_by_m = False

    def _kernels(self, problem: Problem, arch: Arch, sms: int, speeds: Speeds | None = None) -> tuple[Build, ...]:
        """Return the one build for the output's dtype."""
        build = BUILDS.get(problem.out_dtype)
        return () if build is None else ((KERNEL, build),)

    def gemms(self, problem: Problem, arch: Arch | None, sms: int) -> tuple[Build, ...]:
        """Name the same build."""
        return () if arch is None else self._kernels(problem, arch, sms)

    def _chosen(self, problem: Problem, layout: Layout, device: torch.device) -> Chosen | None:
        """Return the build, and launch shapes for all M: each timed, predicted or the kernel's own."""
        chosen = self._predicted(problem, layout, *gpu_and_speeds(device))
        if chosen is None:
            return None
        gemm, predicted = chosen
        shapes = predicted if isinstance(predicted, ByTokens) else ByTokens([None] * len(TOKENS))
        for i, m in enumerate(TOKENS):
            at = replace(problem, m=m)
            timed = launches.tuned(self.name, at, device.index or 0)
            if timed is not None and (launch := self._timed(timed, at, layout, device)) is not None:
                shapes[i] = launch.shape
        return gemm, shapes if any(shapes) else None

    def _shape(self, problem: Problem, layout: Layout, gemm: Build, speeds: Speeds) -> ByTokens:
        """Return launch shapes for all M: the plan serves every M."""
        return ByTokens(
            predict.few_tokens_shape(KERNEL, replace(problem, m=m, n=layout.np, k=layout.kp), speeds) for m in TOKENS
        )

    def prepare(self, weights: LinearWeights) -> Prepared:
        """Keep the weight as it is stored; pad it with zeros if K is not a multiple of 16. Synchronises.

        Tensors: weight, e4m3 [n, kp], the layer's own if nothing is padded; scale of each output column, f32 [np]. The
        kernel reads a NaN code as a number, so a row with NaN gets NaN as its scale.
        """
        w = weights
        layout = Layout(w.n, w.k, round_up(w.n, N_MULTIPLE), round_up(w.k, _K_MULTIPLE))
        weight = stored_rows(w.weight, w.n, layout.kp)
        scale = w.scale.float().expand(w.n).masked_fill(_rows_with_nan(weight), float("nan"))
        tensors = (weight, zero_pad(scale.reshape(1, -1), 1, layout.np).reshape(-1).contiguous())
        await_writes(weight)
        return Prepared(self.name, tensors, tuple(layout))

    def _state(self, problem: Problem, layout: Layout, device: torch.device, loaded: tuple[Loaded, ...]) -> State:
        """Return the launch of the loaded kernel, for every M."""
        (kernel,) = loaded
        return State(None, layout, _launch, kernel.module.w8a16_small, kernel.pdl, swiglu=PRODUCT)


def _launch(s: State, weights: Weights = ()) -> Launch:
    gemm, pdl = s.gemm, s.gemm_pdl

    def launch(x: Tensor, out: Tensor, bias: Tensor | None, w: Weights = weights) -> None:
        gemm(x, w[0], w[1], bias, out, pdl)

    return launch


def _rows_with_nan(weight: Tensor) -> Tensor:
    """Return bool [N]: which rows of e4m3 [N, K] hold a NaN. No sync."""
    codes, step = weight.view(torch.uint8), max(1, _STEP_BYTES // weight.shape[1])
    starts = range(0, codes.shape[0], step)
    return torch.cat([((codes[start : start + step] & 0x7F) == 0x7F).any(1) for start in starts])
