"""FP8 weights by 16-bit activations that are not quantised: our kernel for few tokens, on the checkpoint's own bytes.

A decode step takes as long as the read of its weights. So the time of quantising activations is saved, and so is what
that rounds: products of e4m3 and bfloat16 or float16 are exact and are summed in f32; scales and the bias are applied
to the sums, which are rounded once. A static input scale belongs to 8-bit activations and is not used.

The weight stays [N, K] as it is stored and as ``cublaslt`` and ``cutlass`` read it: a layer that goes to one of them
for many tokens holds it once. Tensor cores do not ask for an order along K, only for the same one on both sides, which
the kernel (``csrc/few_tokens/w8/w8a16_small.cu``) makes use of.

Every M runs, in tiles of up to 32 tokens that each read all weights: who pins this backend pins that too. 128x128 block
scales would need sums of their own for every 128 along K; they are not built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fp4dispatch import jit
from fp4dispatch.backends.base import Backend, LinearWeights, Plan, Prepared, QuantizedActivation, Ready
from fp4dispatch.backends.own import pdl
from fp4dispatch.backends.own.operands import aligned, arch_of, await_writes, bias_row, direct, stored_rows
from fp4dispatch.errors import InputError
from fp4dispatch.formats import round_up, zero_pad
from fp4dispatch.machine.system import System
from fp4dispatch.policy.capability import check
from fp4dispatch.problem import Activation, Op, Problem
from fp4dispatch.problem.decision import Reason

KERNEL = "w8a16_small"
BUILDS = {"bfloat16": "bf16", "float16": "fp16"}
"""Build of :data:`KERNEL` by output dtype."""

_N_MULTIPLE = 8  # the kernel stores 16 bytes of a row of the output at a time
_K_MULTIPLE = 16  # and reads rows of the weight that start on 16 bytes
_STEP_BYTES = 1 << 24
"""Weights that are looked through at a time."""


class _Layout(NamedTuple):
    """Sizes of prepared weights; ``np``, ``kp`` are padded with zeros: columns of the output, and K."""

    n: int
    k: int
    np: int
    kp: int


class _State(NamedTuple):
    """All that a plan knows; it serves every M.

    ``pdl``: launch with PDL, as the binary's proof and the setting allow. ``fits``: nothing is padded, so that operands
    may be launched on as they come.
    """

    layout: _Layout
    fits: bool
    gemm: Callable[..., None]
    pdl: bool


class W8A16Backend(Backend):
    """FP8 weights (tensor, row) by bfloat16 or float16 activations, from ``csrc/`` through :mod:`fp4dispatch.jit`."""

    name = "w8a16"
    activations: ClassVar[dict[Op, tuple[Activation, ...]]] = {"fp8_gemm": ("bf16",)}
    plans_by_m = False

    def supports(self, problem: Problem, system: System) -> tuple[Reason, ...]:
        """Collect every reason why this backend cannot run the problem."""
        return check(self.name, problem, system)

    def builds(self, problem: Problem, device: torch.device) -> tuple[tuple[str, str], ...]:
        """Name the kernel that a plan will load."""
        build = BUILDS.get(problem.out_dtype)
        return () if build is None else ((KERNEL, build),)

    def prepare(self, weights: LinearWeights) -> Prepared:
        """Take the weight as it is; pad with zeros where K is not a multiple of 16. Synchronises.

        Tensors: weight e4m3 [n, kp], the layer's own where nothing is padded; scale of each output column f32 [np]. A
        row that holds NaN gets NaN for a scale, as the kernel reads NaN as a number.
        """
        w = weights
        layout = _Layout(w.n, w.k, round_up(w.n, _N_MULTIPLE), round_up(w.k, _K_MULTIPLE))
        weight = stored_rows(w.weight, w.n, layout.kp)
        scale = w.scale.float().expand(w.n).masked_fill(_rows_with_nan(weight), float("nan"))
        tensors = (weight, zero_pad(scale.reshape(1, -1), 1, layout.np).reshape(-1).contiguous())
        await_writes(weight)
        return Prepared(self.name, tensors, tuple(layout))

    def plan(self, problem: Problem, prepared: Prepared) -> Plan:
        """Load the kernel, compiling and proving it first where it is not in the cache.

        Raises
        ------
        ToolchainError, CompileError, ProofError, CacheError
            Each with what to do.
        InputError
            For a float32 output.
        """
        build = BUILDS.get(problem.out_dtype)
        if build is None:
            raise InputError(f"w8a16: output is {problem.out_dtype}, needs {' or '.join(BUILDS)}")
        layout = _Layout(*prepared.layout)
        device = prepared.tensors[0].device
        kernel = jit.load(KERNEL, build, arch_of(device))
        fits = (layout.np, layout.kp) == (layout.n, layout.k)
        return Plan(self.name, problem, _State(layout, fits, kernel.module.w8a16_small, pdl.allowed(kernel, device)))

    def run(
        self,
        plan: Plan,
        prepared: Prepared,
        x: Tensor | QuantizedActivation,
        out: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        """Launch the kernel; the activation stays as it is."""
        s: _State = plan.state
        if not isinstance(x, Tensor):
            raise InputError("w8a16 takes 16-bit activations, not quantised ones: use FP8Linear")
        weight, scale = prepared.tensors
        # As a layer calls it: straight to the launch. Each test and view that is left out is a microsecond.
        if (
            s.fits
            and not (x.data_ptr() | out.data_ptr()) % 16
            and x.is_contiguous()
            and out.is_contiguous()
            and (bias is None or (bias.dtype == out.dtype and bias.is_contiguous()))
        ):
            s.gemm(x, weight, scale, bias, out, s.pdl)
            return
        n, _, np, kp = s.layout
        d = out if direct(out, np) else out.new_empty(out.shape[0], np)
        s.gemm(aligned(x, kp), weight, scale, bias_row(bias, d.dtype, np), d, s.pdl)
        if d is not out:
            out.copy_(d[:, :n])

    def ready(self, plan: Plan, prepared: Prepared) -> Ready:
        """Return the launch alone, where nothing is padded."""
        s: _State = plan.state
        if not s.fits:
            return super().ready(plan, prepared)
        gemm, pdl, (weight, scale) = s.gemm, s.pdl, prepared.tensors

        def ready(x: Tensor, out: Tensor, bias: Tensor | None) -> None:
            gemm(x, weight, scale, bias, out, pdl)

        return ready


def _rows_with_nan(weight: Tensor) -> Tensor:
    """Return bool [N], which rows of e4m3 [N, K] hold NaN. No sync."""
    codes, step = weight.view(torch.uint8), max(1, _STEP_BYTES // weight.shape[1])
    starts = range(0, codes.shape[0], step)
    return torch.cat([((codes[start : start + step] & 0x7F) == 0x7F).any(1) for start in starts])
