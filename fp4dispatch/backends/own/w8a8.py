"""FP8 weights by FP8 activations: our kernels for few and for many tokens, on the checkpoint's own bytes.

A GEMM of few tokens takes as long as the read of its weights. The kernel for up to 64 (``w8a8_small.cu`` in
``csrc/few_tokens/w8``) streams them as ``w8a16`` does, and FP8 tensor cores multiply: 16-bit ones are what ``w8a16``
waits for from a dozen tokens on. Each of its tiles reads all weights, so from 65 tokens on another one multiplies
(``w8_gemm_sm90.cu`` in ``csrc/many_tokens/w8``): tiles of 128 tokens by 128 rows, whose CTAs share what they copy.
``w8_tiles.toml`` has which serves which M; every M runs.
Activations are quantised ahead of either, one scale a token or the layer's static one, into the order in which both
load them: for the host and the GPU the same two launches as any FP8 GEMM of ours. Sums are f32 (FP8 tensor cores' own
over 256 k, which are added in f32); scales and the bias are applied to them, and the result is rounded once.

Under 128x128 block scales each token has a scale for every 128 k, and what tensor cores sum over these is multiplied by
both as it is added: builds of their own of both kernels.

The weight stays [N, K] as it is stored and as ``w8a16``, ``cutlass`` and ``cublaslt`` read it: a layer that goes from
one to the other by the number of tokens holds it once. So do block scales, as they are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fp4dispatch import jit
from fp4dispatch.backends.base import Backend, LinearWeights, Plan, Prepared, QuantizedActivation, Ready
from fp4dispatch.backends.own import pdl
from fp4dispatch.backends.own.operands import (
    aligned,
    arch_of,
    await_writes,
    bias_row,
    block_scales_part,
    direct,
    packed_part,
    stored_rows,
)
from fp4dispatch.backends.own.scratch import Part, Scratch, ready_to_launch
from fp4dispatch.backends.own.tiles import Tile, tile_for
from fp4dispatch.errors import InputError
from fp4dispatch.formats import round_up, zero_pad
from fp4dispatch.machine.system import System
from fp4dispatch.policy.capability import check
from fp4dispatch.problem import Activation, Op, Problem
from fp4dispatch.problem.decision import Reason

QUANTIZER = "w4_activations"
"""The kernels that pack activations, for W4P weights and for these; its one build reads both types."""

_ENTRY = {"w8a8_small": "w8a8_small", "w8_gemm_sm90": "w8_gemm"}  # a kernel's function

_N_MULTIPLE = 8  # kernels store 16 bytes of a row of the output at a time
_K_MULTIPLE = 16  # and read rows of the weight that start on 16 bytes


class Layout(NamedTuple):
    """Sizes of prepared weights; ``np``, ``kp`` are padded with zeros: columns of the output, and K."""

    n: int
    k: int
    np: int
    kp: int
    has_input_scale: bool


class _State(NamedTuple):
    """All that a plan knows.

    ``launch`` quantises and multiplies, with ``quantize`` and ``gemm``; each with PDL where its binary's proof and the
    setting allow it. ``scratch``: the packed activation, and its scales unless they are static. ``fits``: nothing is
    padded, so that operands may be launched on as they come.
    """

    m: int
    layout: Layout
    fits: bool
    launch: Callable[[_State, Tensor, tuple[Tensor, ...], Tensor, Tensor | None], None]
    gemm: Callable[..., None]
    gemm_pdl: bool
    quantize: Callable[..., None]
    quantize_pdl: bool
    scratch: Callable[[], tuple[Tensor, ...]]


class W8A8Backend(Backend):
    """FP8 weights (tensor, row, block128) by FP8 activations, from ``csrc/``. Plans are by M."""

    name = "w8a8"
    activations: ClassVar[dict[Op, tuple[Activation, ...]]] = {"fp8_gemm": ("fp8",)}

    def supports(self, problem: Problem, system: System) -> tuple[Reason, ...]:
        """Collect every reason why this backend cannot run the problem."""
        return check(self.name, problem, system)

    def builds(self, problem: Problem, device: torch.device) -> tuple[tuple[str, str], ...]:
        """Name the kernels that a plan will load."""
        tile = _tile_for(problem, device)
        return () if tile is None else ((tile.kernel, tile.builds[problem.out_dtype]), (QUANTIZER, "any"))

    def prepare(self, weights: LinearWeights) -> Prepared:
        """Take the weight as it is; pad with zeros where K is not a multiple of 16. Synchronises.

        Tensors: weight e4m3 [n, kp], the layer's own where nothing is padded; its scale f32 [1] (``tensor``), [np]
        (``row``) or [ceil(N/128), ceil(K/128)] (``block128``, which np and kp do not change); the static input scale
        f32 [1], where the layer has one: not under ``block128``, whose activations are scaled from their own values.
        NaN among the weights needs no care: FP8 tensor cores multiply it as what it is.
        """
        w = weights
        static = None if w.scaling == "block128" else w.input_scale
        layout = Layout(w.n, w.k, round_up(w.n, _N_MULTIPLE), round_up(w.k, _K_MULTIPLE), static is not None)
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

    def plan(self, problem: Problem, prepared: Prepared) -> Plan:
        """Load the kernels for this M, compiling and proving them first where they are not in the cache.

        Raises
        ------
        ToolchainError, CompileError, ProofError, CacheError
            Each with what to do.
        InputError
            Where no kernel serves the problem: a float32 output, or an arch that has none.
        """
        device = prepared.tensors[0].device
        tile = _tile_for(problem, device)
        if tile is None:
            raise InputError(
                f"w8a8 has no kernel for {problem} on {arch_of(device)}; fp4dispatch explain lists what can run it"
            )
        return Plan(self.name, problem, _state(problem, Layout(*prepared.layout), device, tile))

    def run(
        self,
        plan: Plan,
        prepared: Prepared,
        x: Tensor | QuantizedActivation,
        out: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        """Quantise the activation and launch the GEMM."""
        s: _State = plan.state
        if not isinstance(x, Tensor):
            raise InputError("w8a8 takes 16-bit activations and quantises them itself: use FP8Linear")
        if out.shape[0] != s.m:
            raise InputError(f"w8a8: out has {out.shape[0]} rows, the plan is for M={s.m}: make one for this M")
        # As a layer calls it: straight to the launches. Each test and view that is left out is a microsecond.
        if (
            s.fits
            and not (x.data_ptr() | out.data_ptr()) % 16
            and x.is_contiguous()
            and out.is_contiguous()
            and (bias is None or (bias.dtype == out.dtype and bias.is_contiguous()))
        ):
            s.launch(s, x, prepared.tensors, out, bias)
            return
        n, _, np, kp, _ = s.layout
        d = out if direct(out, np) else out.new_empty(out.shape[0], np)
        s.launch(s, aligned(x, kp), prepared.tensors, d, bias_row(bias, d.dtype, np))
        if d is not out:
            out.copy_(d[:, :n])

    def ready(self, plan: Plan, prepared: Prepared) -> Ready:
        """Return the launches alone, where nothing is padded."""
        s: _State = plan.state
        if not s.fits:
            return super().ready(plan, prepared)
        return ready_to_launch(s, prepared.tensors)


def _tile_for(problem: Problem, device: torch.device) -> Tile | None:
    """Return the first row of ``w8_tiles.toml`` that serves a problem; none asks how many SMs there are."""
    return tile_for(problem, arch_of(device), 0, "w8")


def _state(problem: Problem, layout: Layout, device: torch.device, tile: Tile) -> _State:
    """Load the kernels of a tile and return what a plan knows."""
    m, arch, static = problem.m, arch_of(device), layout.has_input_scale
    gemm = jit.load(tile.kernel, tile.builds[problem.out_dtype], arch)
    quantizer = jit.load(QUANTIZER, "any", arch)
    quantize, parts = quantizer.module.w8_quantize_row, [packed_part(m, layout.kp)]
    if static:
        quantize = quantizer.module.w8_quantize_tensor
    elif problem.scaling == "block128":
        quantize = quantizer.module.w8_quantize_block
        parts.append(block_scales_part(m, layout.kp))
    else:
        parts.append(Part((m,), torch.float32))
    return _State(
        m,
        layout,
        (layout.np, layout.kp) == (layout.n, layout.k),
        _launch_static if static else _launch_dynamic,
        getattr(gemm.module, _ENTRY[tile.kernel]),
        pdl.allowed(gemm, device),
        quantize,
        pdl.allowed(quantizer, device),
        Scratch(device, parts),
    )


def _launch_dynamic(s: _State, x: Tensor, tensors: tuple[Tensor, ...], d: Tensor, bias: Tensor | None) -> None:
    packed, scale = s.scratch()
    s.quantize(x, packed, scale, s.quantize_pdl)
    s.gemm(packed, scale, tensors[0], tensors[1], bias, d, s.gemm_pdl)


def _launch_static(s: _State, x: Tensor, tensors: tuple[Tensor, ...], d: Tensor, bias: Tensor | None) -> None:
    (packed,) = s.scratch()
    s.quantize(x, packed, tensors[2], s.quantize_pdl)
    s.gemm(packed, tensors[2], tensors[0], tensors[1], bias, d, s.gemm_pdl)
