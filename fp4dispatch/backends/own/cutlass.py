"""Our CUTLASS GEMMs and quantisers: compiled on first use, proved, launched with PDL only where the proof says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fp4dispatch import formats, jit
from fp4dispatch.backends.base import Backend, LinearWeights, Plan, Prepared, QuantizedActivation, Ready
from fp4dispatch.backends.own import pdl
from fp4dispatch.backends.own.operands import aligned, bias_row, direct, per_column
from fp4dispatch.backends.own.scratch import Part, Scratch, eager, ready_to_launch
from fp4dispatch.backends.own.tiles import tile_for
from fp4dispatch.errors import InputError
from fp4dispatch.formats import round_up, zero_pad
from fp4dispatch.jit.kernels import LoadedKernel
from fp4dispatch.machine.system import System
from fp4dispatch.policy.capability import check
from fp4dispatch.problem import Activation, Op, Problem
from fp4dispatch.problem.arch import Arch
from fp4dispatch.problem.decision import Reason

_N_MULTIPLE = 8  # TMA rows of D are multiples of 16 bytes
_K_MULTIPLE = {"nvfp4_gemm": 32, "fp8_gemm": 16}  # likewise of A and B
_AT_ONCE = ("fp8_gemm_sm90",)
"""Kernels whose module has ``fp8_quantize_gemm``, which calls the quantiser too: a call through Python less."""

_QUANTIZER: dict[Op, str] = {"nvfp4_gemm": "nvfp4_quantize", "fp8_gemm": "fp8_quantize"}


class _Layout(NamedTuple):
    """Sizes of prepared weights; ``np``, ``kp`` are padded with zeros, which is exact."""

    scaling: str
    n: int
    k: int
    np: int
    kp: int
    has_input_scale: bool


class _State(NamedTuple):
    """All that a plan knows.

    ``launch`` quantises and multiplies, with ``gemm`` and ``quantize``, or with ``at_once``, which calls ``quantize``
    and needs no workspace; each with PDL where its binary's proof and the setting allow it. ``scratch``: quantised
    activation, its scales unless they are static, workspace. ``fits``: nothing is padded, so that operands may be
    launched on as they come.
    """

    m: int
    layout: _Layout
    fits: bool
    launch: Callable[[_State, Tensor, tuple[Tensor, ...], Tensor, Tensor | None], None]
    gemm: Callable[..., None]
    gemm_pdl: bool
    quantize: Callable[..., None]
    quantize_pdl: bool
    at_once: Callable[..., None] | None
    workspace: Part
    scratch: Callable[[], tuple[Tensor, ...]]


class CutlassBackend(Backend):
    """FP8 (tensor, row; block128 on sm_90) and NVFP4 x NVFP4, from ``csrc/`` through :mod:`fp4dispatch.jit`."""

    name = "cutlass"
    activations: ClassVar[dict[Op, tuple[Activation, ...]]] = {"nvfp4_gemm": ("nvfp4",), "fp8_gemm": ("fp8",)}

    def supports(self, problem: Problem, system: System) -> tuple[Reason, ...]:
        """Collect every reason why this backend cannot run the problem."""
        return check(self.name, problem, system)

    def builds(self, problem: Problem, device: torch.device) -> tuple[tuple[str, str], ...]:
        """Name the kernels that a plan will load."""
        tile = tile_for(problem, *_gpu(device))
        return () if tile is None else ((tile.kernel, tile.builds[problem.out_dtype]), (_QUANTIZER[problem.op], "any"))

    def prepare(self, weights: LinearWeights) -> Prepared:
        """Pad with zeros to TMA's row sizes, swizzle NVFP4 scales; weights that fit are not copied.

        Tensors: weight [np, kp]; scale (nvfp4: 128x4; row: f32 [np]); nvfp4: global scale f32 [1] or [np]; input scale.
        """
        w = weights
        np, kp = round_up(w.n, _N_MULTIPLE), round_up(w.k, _K_MULTIPLE[w.op])
        layout = _Layout(w.scaling, w.n, w.k, np, kp, w.input_scale is not None)
        if w.op == "nvfp4_gemm":
            tensors = [zero_pad(w.weight, np, kp // 2), _sf_128x4(w.scale, w, np, kp), per_column(w, np)]
        else:
            scale = zero_pad(w.scale.reshape(1, -1), 1, np).reshape(np) if w.scaling == "row" else w.scale
            tensors = [zero_pad(w.weight, np, kp), scale.contiguous()]
        if w.input_scale is not None:
            tensors.append(w.input_scale)
        return Prepared(self.name, tuple(tensors), tuple(layout))

    def plan(self, problem: Problem, prepared: Prepared) -> Plan:
        """Load the kernels, compiling and proving them first where they are not in the cache.

        Raises
        ------
        ToolchainError, CompileError, ProofError, CacheError
            Each with what to do.
        InputError
            Where no tile serves the problem.
        """
        device = prepared.tensors[0].device
        arch, sms = _gpu(device)
        tile = tile_for(problem, arch, sms)
        if tile is None:
            raise InputError(
                f"cutlass has no kernel for {problem} on {arch}; fp4dispatch explain lists what can run it"
            )
        gemm = jit.load(tile.kernel, tile.builds[problem.out_dtype], arch)
        quantize = jit.load(_QUANTIZER[problem.op], "any", arch)
        return Plan(self.name, problem, _state(problem, _Layout(*prepared.layout), device, tile.kernel, gemm, quantize))

    def run(
        self,
        plan: Plan,
        prepared: Prepared,
        x: Tensor | QuantizedActivation,
        out: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        """Quantise the activation where that is still to do, and launch the GEMM."""
        s: _State = plan.state
        # As a layer calls it: straight to the launches. Each test and view that is left out is a microsecond.
        if (
            s.fits
            and isinstance(x, Tensor)
            and out.shape[0] == s.m
            and not (x.data_ptr() | out.data_ptr()) % 16
            and x.is_contiguous()
            and out.is_contiguous()
            and (bias is None or (bias.dtype == out.dtype and bias.is_contiguous()))
        ):
            s.launch(s, x, prepared.tensors, out, bias)
            return
        if out.shape[0] != s.m:
            raise InputError(f"cutlass: out has {out.shape[0]} rows, the plan is for M={s.m}: make one for this M")
        layout = s.layout
        d = out if direct(out, layout.np) else out.new_empty(s.m, layout.np)
        bias = bias_row(bias, out.dtype, layout.np)
        if isinstance(x, Tensor):
            s.launch(s, aligned(x, layout.kp), prepared.tensors, d, bias)
        elif layout.scaling == "nvfp4":
            _raw_nvfp4(s, prepared, x, plan.problem, d, bias)
        else:
            _raw_fp8(s, prepared, x, d, bias)
        if d is not out:
            out.copy_(d[:, : layout.n])

    def ready(self, plan: Plan, prepared: Prepared) -> Ready:
        """Return the launches alone, where nothing is padded."""
        s: _State = plan.state
        if not s.fits:
            return super().ready(plan, prepared)
        return (ready_to_launch if s.at_once is None else _ready_at_once)(s, prepared.tensors)


# ------------------------------------------------------------------------------------------------------------- prepare


def _sf_128x4(sf: Tensor, w: LinearWeights, np: int, kp: int) -> Tensor:
    if w.sf_layout == "128x4":
        if (np, kp) == (w.n, w.k):
            return sf
        sf = formats.from_128x4(sf, w.n, w.k // formats.NVFP4_BLOCK)
    return formats.to_128x4(zero_pad(sf, np, kp // formats.NVFP4_BLOCK))


# ---------------------------------------------------------------------------------------------------------------- plan


def _gpu(device: torch.device) -> tuple[Arch, int]:
    """Return arch and number of SMs of a device."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return Arch(*torch.cuda.get_device_capability(device)), sms


def _state(
    problem: Problem, layout: _Layout, device: torch.device, name: str, gemm: LoadedKernel, quantize: LoadedKernel
) -> _State:
    """Return what a plan of loaded kernels knows."""
    m = problem.m
    workspace = Part((gemm.module.workspace_size(m, layout.np, layout.kp),), torch.uint8)
    view: Callable[[list[Tensor]], tuple[Tensor, ...]] = tuple
    at_once = gemm.module.fp8_quantize_gemm if name in _AT_ONCE and problem.op == "fp8_gemm" else None
    launch, function = _launch_fp8 if at_once is None else _launch_fp8_at_once, quantize.module
    parts = [Part((m, layout.kp), torch.float8_e4m3fn)]
    if problem.op == "nvfp4_gemm":
        launch, function = _launch_nvfp4, function.nvfp4_quantize
        sf = (round_up(m, 128), round_up(layout.kp // formats.NVFP4_BLOCK, 4))
        parts = [Part((m, layout.kp // 2), torch.uint8), Part(sf, torch.float8_e4m3fn)]
    elif layout.scaling == "block128":
        function = function.fp8_quantize_1x128
        parts.append(Part(_columns(m, layout.kp), torch.float32))
        view = _transposed(m)
    elif layout.has_input_scale:
        launch = _launch_fp8_static if at_once is None else _launch_fp8_static_at_once
        function = function.fp8_quantize_tensor
    else:
        function = function.fp8_quantize_row
        parts.append(Part((m,), torch.float32))
    return _State(
        m,
        layout,
        (layout.np, layout.kp) == (layout.n, layout.k),
        launch,
        gemm.module.nvfp4_gemm if problem.op == "nvfp4_gemm" else gemm.module.fp8_gemm,
        pdl.allowed(gemm, device),
        function,
        pdl.allowed(quantize, device),
        at_once,
        workspace,
        Scratch(device, [*parts, workspace], view),
    )


def _columns(m: int, k: int) -> tuple[int, int]:
    """Return the sizes of the scales of 1x128 blocks of [M, K], tokens last and padded to 16 bytes, as TMA loads it."""
    return -(-k // formats.FP8_BLOCK), round_up(m, 4)


def _transposed(m: int) -> Callable[[list[Tensor]], tuple[Tensor, ...]]:
    return lambda parts: (parts[0], parts[1].t()[:m], *parts[2:])


# -------------------------------------------------------------------------------------------------------------- launch


def _launch_fp8(s: _State, x: Tensor, tensors: tuple[Tensor, ...], d: Tensor, bias: Tensor | None) -> None:
    q, scale, workspace = s.scratch()
    s.quantize(x, q, scale, s.quantize_pdl)
    s.gemm(q, tensors[0], scale, tensors[1], bias, d, workspace, s.gemm_pdl)


def _launch_fp8_static(s: _State, x: Tensor, tensors: tuple[Tensor, ...], d: Tensor, bias: Tensor | None) -> None:
    q, workspace = s.scratch()
    scale = tensors[2]
    s.quantize(x, q, scale, s.quantize_pdl)
    s.gemm(q, tensors[0], scale, tensors[1], bias, d, workspace, s.gemm_pdl)


def _launch_fp8_at_once(s: _State, x: Tensor, tensors: tuple[Tensor, ...], d: Tensor, bias: Tensor | None) -> None:
    assert s.at_once is not None
    q, scale, _ = s.scratch()
    s.at_once(s.quantize, x, q, tensors[0], scale, tensors[1], bias, d, s.quantize_pdl, s.gemm_pdl)


def _launch_fp8_static_at_once(
    s: _State, x: Tensor, tensors: tuple[Tensor, ...], d: Tensor, bias: Tensor | None
) -> None:
    assert s.at_once is not None
    q, _ = s.scratch()
    s.at_once(s.quantize, x, q, tensors[0], tensors[2], tensors[1], bias, d, s.quantize_pdl, s.gemm_pdl)


def _ready_at_once(s: _State, tensors: tuple[Tensor, ...]) -> Ready:
    assert s.at_once is not None
    at_once, quantize, quantize_pdl, gemm_pdl = s.at_once, s.quantize, s.quantize_pdl, s.gemm_pdl
    scratch, weight, w_scale = eager(s.scratch), tensors[0], tensors[1]
    static = tensors[2] if s.layout.has_input_scale else None

    def ready(x: Tensor, out: Tensor, bias: Tensor | None) -> None:
        parts = scratch()
        a_scale = parts[1] if static is None else static
        at_once(quantize, x, parts[0], weight, a_scale, w_scale, bias, out, quantize_pdl, gemm_pdl)

    return ready


def _launch_nvfp4(s: _State, x: Tensor, tensors: tuple[Tensor, ...], d: Tensor, bias: Tensor | None) -> None:
    w, w_sf, w_global = tensors[:3]
    a_global = tensors[3] if s.layout.has_input_scale else formats.nvfp4_global_scale(x)
    q, sf, workspace = s.scratch()
    s.quantize(x, a_global, q, sf, s.quantize_pdl)
    s.gemm(q, w, sf, w_sf, w_global * a_global, bias, d, workspace, s.gemm_pdl)


# ------------------------------------------------------------------------------------------------------- raw operands


def _workspace(s: _State, d: Tensor) -> Tensor:
    return d.new_empty(s.workspace.shape, dtype=s.workspace.dtype)


def _raw_fp8(s: _State, prepared: Prepared, x: QuantizedActivation, d: Tensor, bias: Tensor | None) -> None:
    w, w_scale = prepared.tensors[:2]
    a, a_scale = aligned(x.data, s.layout.kp), x.scale
    if s.layout.scaling == "block128":
        a_scale = _tokens_fastest(a_scale, a)
    s.gemm(a, w, a_scale, w_scale, bias, d, _workspace(s, d), s.gemm_pdl)


def _tokens_fastest(scale: Tensor, a: Tensor) -> Tensor:
    m, k = a.shape
    return a.new_empty(_columns(m, k), dtype=torch.float32).t()[:m].copy_(scale)


def _raw_nvfp4(
    s: _State, prepared: Prepared, x: QuantizedActivation, problem: Problem, d: Tensor, bias: Tensor | None
) -> None:
    w, w_sf, w_global = prepared.tensors[:3]
    layout = s.layout
    a, a_sf = aligned(x.data, layout.kp // 2), x.scale
    if problem.sf_layout != "128x4" or layout.kp != layout.k:
        columns = layout.k // formats.NVFP4_BLOCK
        linear = formats.from_128x4(a_sf, s.m, columns) if problem.sf_layout == "128x4" else a_sf
        a_sf = formats.to_128x4(zero_pad(linear, s.m, layout.kp // formats.NVFP4_BLOCK))
    alpha = w_global if x.global_scale is None else w_global * x.global_scale
    s.gemm(a, w, a_sf, w_sf, alpha, bias, d, _workspace(s, d), s.gemm_pdl)
