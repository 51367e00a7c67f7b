"""NVFP4 weights by 16-bit (w4a16) or FP8 (w4a8) activations: our own kernels, on one packed copy of the weights.

What the kernels compute: w4a16 multiplies ``e2m1 * block_scale`` exactly and sums in f32; w4a8 multiplies what
:mod:`~fp4dispatch.backends.own.folding` defines by activations that are scaled per token. Global scales (one per output
column for fused shards), activation scales and the bias are applied to the f32 sums, which are rounded once.

For many tokens w4a8 writes its e4m3 weights out, into scratch that lives for one launch, and lets cuBLASLt multiply:
its FP8 GEMM gains more than the write costs (``w4_tiles.toml`` has from when on, ``bench/NOTES.md`` the times).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fp4dispatch import formats, jit
from fp4dispatch.backends.base import Backend, LinearWeights, Plan, Prepared, QuantizedActivation, Ready
from fp4dispatch.backends.own import pdl
from fp4dispatch.backends.own.folding import FOLD
from fp4dispatch.backends.own.operands import aligned, await_writes, bias_row, direct, packed_part, per_column
from fp4dispatch.backends.own.scratch import Part, Scratch, ready_to_launch
from fp4dispatch.backends.own.tiles import Tile, tile_for
from fp4dispatch.backends.own.w4_layout import pack_w4p, unpack_w4p
from fp4dispatch.errors import InputError
from fp4dispatch.formats import round_up
from fp4dispatch.machine.system import System
from fp4dispatch.policy.capability import check
from fp4dispatch.problem import Activation, Op, Problem
from fp4dispatch.problem.arch import Arch
from fp4dispatch.problem.decision import Reason

SMALL, UNFOLD = "w4a16_small", "w4_to_e4m3"
"""The kernel for few tokens of 16 bits, and the one that writes FP8 weights for cuBLASLt."""

_FP8_ENTRY = {"w4_gemm_sm90": "w4_gemm", "w4a8_small": "w4a8_small"}  # a kernel's function

_UNFOLD_N_MULTIPLE = 16  # cuBLASLt's, for FP8
_N_MULTIPLE = 8  # kernels store 16 bytes of a row of the output at a time


class _Layout(NamedTuple):
    """Sizes of prepared weights; the output has ``np`` columns where N is not a multiple of 8."""

    n: int
    k: int
    np: int


class _State(NamedTuple):
    """All that a plan knows.

    ``launch`` quantises where that is needed, and multiplies, with ``quantize`` and ``gemm``; each with PDL where its
    binary's proof and the setting allow it. ``scratch``: the quantised activation and its scales. ``fits``: N is not
    padded, so that operands may be launched on as they come.
    """

    m: int
    layout: _Layout
    fits: bool
    launch: Callable[[_State, Tensor, tuple[Tensor, ...], Tensor, Tensor | None], None]
    gemm: Callable[..., None]
    gemm_pdl: bool
    quantize: Callable[..., None]
    quantize_pdl: bool
    scratch: Callable[[], tuple[Tensor, ...]]


class _W4Backend(Backend):
    """What both have in common: the weights, and from the table ``w4_tiles.toml`` to kernels."""

    layout = "w4p"

    def supports(self, problem: Problem, system: System) -> tuple[Reason, ...]:
        """Collect every reason why this backend cannot run the problem."""
        return check(self.name, problem, system)

    def builds(self, problem: Problem, device: torch.device) -> tuple[tuple[str, str], ...]:
        """Name the kernels that a plan will load."""
        tile = _tile_for(problem, *_gpu(device))
        if tile is None:
            return ()
        quantizers = () if problem.activation != "fp8" else ((_quantizer(tile), "any"),)
        return ((tile.kernel, tile.builds[problem.out_dtype]), *quantizers)

    def prepare(self, weights: LinearWeights) -> Prepared:
        """Pack the weights, padded with zeros, into W4P (:mod:`~fp4dispatch.backends.own.w4_layout`). Synchronises.

        Tensors: packed uint8 [ceil(N/64), ceil(K/64), 2304]; global scale f32 [1], or [np] where shards differ; where
        N is a multiple of 16, the scales of the columns of w4a8's FP8 weights, f32 [1, N]. A static input scale belongs
        to 4-bit activations and is not used.

        Raises
        ------
        InputError, FormatError
            As :func:`~fp4dispatch.backends.own.w4_layout.pack_w4p`.
        """
        w = weights
        scale = formats.from_128x4(w.scale, w.n, w.k // formats.NVFP4_BLOCK) if w.sf_layout == "128x4" else w.scale
        np = round_up(w.n, _N_MULTIPLE)
        tensors = [pack_w4p(w.weight, scale), per_column(w, np)]
        if w.n % _UNFOLD_N_MULTIPLE == 0:
            tensors.append((tensors[1] * FOLD).expand(w.n).reshape(1, -1).contiguous())
        await_writes(tensors[0])
        return Prepared(self.name, tuple(tensors), tuple(_Layout(w.n, w.k, np)))

    def canonical(self, prepared: Prepared) -> tuple[Tensor, Tensor]:
        """Unpack the weights."""
        n, k, _ = _Layout(*prepared.layout)
        return unpack_w4p(prepared.tensors[0], n, k)

    def plan(self, problem: Problem, prepared: Prepared) -> Plan:
        """Load the kernels for this M, compiling and proving them first where they are not in the cache.

        Raises
        ------
        ToolchainError, CompileError, ProofError, CacheError
            Each with what to do.
        InputError
            Where no kernel serves the problem.
        """
        device = prepared.tensors[0].device
        arch, sms = _gpu(device)
        tile = _tile_for(problem, arch, sms)
        if tile is None:
            raise InputError(
                f"{self.name} has no kernel for {problem} on {arch}; fp4dispatch explain lists what can run it"
            )
        return Plan(self.name, problem, _state(problem, _Layout(*prepared.layout), device, tile, arch))

    def run(
        self,
        plan: Plan,
        prepared: Prepared,
        x: Tensor | QuantizedActivation,
        out: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        """Quantise the activation where the kernel needs that, and launch the GEMM."""
        s: _State = plan.state
        if not isinstance(x, Tensor):
            raise InputError(f"{self.name} takes 16-bit activations, not quantised ones: use FP4Linear")
        if out.shape[0] != s.m:
            raise InputError(f"{self.name}: out has {out.shape[0]} rows, the plan is for M={s.m}: make one for this M")
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
        n, k, np = s.layout
        d = out if direct(out, np) else out.new_empty(s.m, np)
        s.launch(s, aligned(x, k), prepared.tensors, d, bias_row(bias, d.dtype, np))
        if d is not out:
            out.copy_(d[:, :n])

    def ready(self, plan: Plan, prepared: Prepared) -> Ready:
        """Return the launches alone, where nothing is padded."""
        s: _State = plan.state
        if not s.fits:
            return super().ready(plan, prepared)
        return ready_to_launch(s, prepared.tensors)


class W4A16Backend(_W4Backend):
    """NVFP4 weights by bfloat16 or float16 activations, exactly dequantised."""

    name = "w4a16"
    activations: ClassVar[dict[Op, tuple[Activation, ...]]] = {"nvfp4_gemm": ("bf16",)}


class W4A8Backend(_W4Backend):
    """NVFP4 weights, block scales folded into e4m3, by FP8 activations that are scaled per token."""

    name = "w4a8"
    activations: ClassVar[dict[Op, tuple[Activation, ...]]] = {"nvfp4_gemm": ("fp8",)}


# ---------------------------------------------------------------------------------------------------------------- plan


def _gpu(device: torch.device) -> tuple[Arch, int]:
    """Return arch and number of SMs of a device."""
    properties = torch.cuda.get_device_properties(device)
    return Arch(properties.major, properties.minor), properties.multi_processor_count


def _tile_for(problem: Problem, arch: Arch, sms: int) -> Tile | None:
    """Return the row of the table that serves a problem."""
    return tile_for(problem, arch, sms, "w4", lambda tile: tile.kernel != UNFOLD or problem.n % _UNFOLD_N_MULTIPLE == 0)


def _quantizer(tile: Tile) -> str:
    """Name the kernel that quantises what a tile's kernel reads."""
    return "fp8_quantize" if tile.kernel == UNFOLD else "w4_activations"


def _state(problem: Problem, layout: _Layout, device: torch.device, tile: Tile, arch: Arch) -> _State:
    """Load the kernels of a tile and return what a plan knows."""
    m, fits = problem.m, layout.np == layout.n
    gemm = jit.load(tile.kernel, tile.builds[problem.out_dtype], arch)
    gemm_pdl = pdl.allowed(gemm, device)
    if problem.activation != "fp8":
        launch, entry = (_launch_small, "w4a16_small") if tile.kernel == SMALL else (_launch_16, "w4_gemm")
        return _State(m, layout, fits, launch, getattr(gemm.module, entry), gemm_pdl, _nothing, False, tuple)
    quantizer = jit.load(_quantizer(tile), "any", arch)
    quantize_pdl = pdl.allowed(quantizer, device)
    scale = Part((m,), torch.float32)
    if tile.kernel == UNFOLD:
        launch, entry, quantize = _launch_unfold, "w4_to_e4m3", quantizer.module.fp8_quantize_row
        q, w = (Part((rows, layout.k), torch.float8_e4m3fn) for rows in (m, layout.n))
        parts = [q, scale, w]
    else:
        launch, entry, quantize = _launch_fp8, _FP8_ENTRY[tile.kernel], quantizer.module.w4_quantize_row
        parts = [packed_part(m, layout.k), scale]
    scratch = Scratch(device, parts)
    return _State(m, layout, fits, launch, getattr(gemm.module, entry), gemm_pdl, quantize, quantize_pdl, scratch)


def _nothing(*_: object) -> None:
    raise AssertionError("16-bit activations are not quantised")


# -------------------------------------------------------------------------------------------------------------- launch


def _launch_small(s: _State, x: Tensor, tensors: tuple[Tensor, ...], d: Tensor, bias: Tensor | None) -> None:
    s.gemm(x, tensors[0], tensors[1], bias, d, s.gemm_pdl)


def _launch_16(s: _State, x: Tensor, tensors: tuple[Tensor, ...], d: Tensor, bias: Tensor | None) -> None:
    s.gemm(x, None, tensors[0], tensors[1], bias, d, s.gemm_pdl)


def _launch_fp8(s: _State, x: Tensor, tensors: tuple[Tensor, ...], d: Tensor, bias: Tensor | None) -> None:
    packed, scale = s.scratch()
    s.quantize(x, packed, scale, s.quantize_pdl)
    s.gemm(packed, scale, tensors[0], tensors[1], bias, d, s.gemm_pdl)


def _launch_unfold(s: _State, x: Tensor, tensors: tuple[Tensor, ...], d: Tensor, bias: Tensor | None) -> None:
    q, scale, w = s.scratch()
    s.gemm(tensors[0], w, s.gemm_pdl)
    s.quantize(x, q, scale, s.quantize_pdl)
    torch._scaled_mm(q, w.t(), scale.unsqueeze(1), tensors[2], bias, out_dtype=d.dtype, out=d)
