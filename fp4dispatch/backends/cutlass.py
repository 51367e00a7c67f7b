"""Our CUTLASS GEMMs and quantisers: compiled on first use, proved, launched with PDL only where the proof says so."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fp4dispatch import formats, jit
from fp4dispatch.arch import Arch
from fp4dispatch.backends.base import Backend, LinearWeights, Plan, Prepared, QuantizedActivation
from fp4dispatch.backends.capability import check
from fp4dispatch.backends.cutlass_tiles import tile_for
from fp4dispatch.backends.operands import aligned, bias_row, direct, per_column
from fp4dispatch.decision import Reason
from fp4dispatch.errors import InputError
from fp4dispatch.formats import round_up, zero_pad
from fp4dispatch.problem import Activation, Op, Problem
from fp4dispatch.settings import settings
from fp4dispatch.system import System

_N_MULTIPLE = 8  # TMA rows of D are multiples of 16 bytes
_K_MULTIPLE = {"nvfp4_gemm": 32, "fp8_gemm": 16}  # likewise of A and B


class _Layout(NamedTuple):
    """Sizes of prepared weights; ``np``, ``kp`` are padded with zeros, which is exact."""

    scaling: str
    n: int
    k: int
    np: int
    kp: int
    has_input_scale: bool


class _Kernels(NamedTuple):
    """A plan's functions, and whether each may be launched with PDL: the binary's own proof, and the setting."""

    gemm: Any
    gemm_pdl: bool
    quantize: Any
    quantize_pdl: bool


class CutlassBackend(Backend):
    """FP8 (tensor, row; block128 on sm_90) and NVFP4 x NVFP4, from ``csrc/`` through :mod:`fp4dispatch.jit`."""

    name = "cutlass"
    activations: ClassVar[dict[Op, tuple[Activation, ...]]] = {"nvfp4_gemm": ("nvfp4",), "fp8_gemm": ("fp8",)}

    def supports(self, problem: Problem, system: System) -> tuple[Reason, ...]:
        """Collect every reason why this backend cannot run the problem."""
        return check(self.name, problem, system)

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
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        arch = Arch(*torch.cuda.get_device_capability(device))
        tile = tile_for(problem, arch, sms)
        if tile is None:
            raise InputError(
                f"cutlass has no kernel for {problem} on {arch}; fp4dispatch explain lists what can run it"
            )
        gemm = jit.load(tile.kernel, tile.builds[problem.out_dtype], arch)
        quantize = jit.load("nvfp4_quantize" if problem.op == "nvfp4_gemm" else "fp8_quantize", "any", arch)
        pdl = settings.pdl != "off"
        kernels = _Kernels(gemm.module, pdl and gemm.pdl_allowed, quantize.module, pdl and quantize.pdl_allowed)
        return Plan(self.name, problem, kernels)

    def run(
        self,
        plan: Plan,
        prepared: Prepared,
        x: Tensor | QuantizedActivation,
        out: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        """Quantise the activation where that is still to do, and launch the GEMM."""
        layout = _Layout(*prepared.layout)
        kernels: _Kernels = plan.state
        m = out.shape[0]
        d = out if direct(out, layout.np) else out.new_empty(m, layout.np)
        bias = bias_row(bias, out.dtype, layout.np)
        if layout.scaling == "nvfp4":
            _run_nvfp4(kernels, layout, prepared, x, plan.problem, d, bias)
        else:
            _run_fp8(kernels, layout, prepared, x, d, bias)
        if d is not out:
            out.copy_(d[:, : layout.n])


# ------------------------------------------------------------------------------------------------------------- prepare


def _sf_128x4(sf: Tensor, w: LinearWeights, np: int, kp: int) -> Tensor:
    if w.sf_layout == "128x4":
        if (np, kp) == (w.n, w.k):
            return sf
        sf = formats.from_128x4(sf, w.n, w.k // formats.NVFP4_BLOCK)
    return formats.to_128x4(zero_pad(sf, np, kp // formats.NVFP4_BLOCK))


# ----------------------------------------------------------------------------------------------------------------- run


def _workspace(kernels: _Kernels, d: Tensor, k: int) -> Tensor:
    return d.new_empty(kernels.gemm.workspace_size(d.shape[0], d.shape[1], k), dtype=torch.uint8)


def _run_fp8(
    kernels: _Kernels,
    layout: _Layout,
    prepared: Prepared,
    x: Tensor | QuantizedActivation,
    d: Tensor,
    bias: Tensor | None,
) -> None:
    w, w_scale = prepared.tensors[:2]
    if isinstance(x, Tensor):
        a, a_scale = _quantize_fp8(kernels, layout, prepared, aligned(x, layout.kp))
    else:
        a, a_scale = aligned(x.data, layout.kp), x.scale
        if layout.scaling == "block128":
            a_scale = _tokens_fastest(a_scale, a)
    workspace = _workspace(kernels, d, layout.kp)
    kernels.gemm.fp8_gemm(a, w, a_scale, w_scale, bias, d, workspace, kernels.gemm_pdl)


def _quantize_fp8(kernels: _Kernels, layout: _Layout, prepared: Prepared, x: Tensor) -> tuple[Tensor, Tensor]:
    m = x.shape[0]
    q = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    if layout.scaling == "block128":
        scale = _token_major(x, m, layout.kp)
        kernels.quantize.fp8_quantize_1x128(x, q, scale, kernels.quantize_pdl)
    elif layout.has_input_scale:
        scale = prepared.tensors[-1].reshape(1)
        kernels.quantize.fp8_quantize_tensor(x, q, scale, kernels.quantize_pdl)
    else:
        scale = x.new_empty(m, dtype=torch.float32)
        kernels.quantize.fp8_quantize_row(x, q, scale, kernels.quantize_pdl)
    return q, scale


def _token_major(x: Tensor, m: int, k: int) -> Tensor:
    """Return an empty f32 [M, ceil(K/128)], tokens contiguous, column stride a multiple of 4: TMA loads it."""
    return x.new_empty(-(-k // formats.FP8_BLOCK), round_up(m, 4), dtype=torch.float32).t()[:m]


def _tokens_fastest(scale: Tensor, a: Tensor) -> Tensor:
    return _token_major(a, a.shape[0], a.shape[1]).copy_(scale)


def _run_nvfp4(
    kernels: _Kernels,
    layout: _Layout,
    prepared: Prepared,
    x: Tensor | QuantizedActivation,
    problem: Problem,
    d: Tensor,
    bias: Tensor | None,
) -> None:
    w, w_sf, w_global = prepared.tensors[:3]
    m = d.shape[0]
    if isinstance(x, Tensor):
        x = aligned(x, layout.kp)
        a_global = prepared.tensors[3] if layout.has_input_scale else formats.nvfp4_global_scale(x)
        a = x.new_empty(m, layout.kp // 2, dtype=torch.uint8)
        a_sf = x.new_empty(round_up(m, 128), round_up(layout.kp // 16, 4), dtype=torch.float8_e4m3fn)
        kernels.quantize.nvfp4_quantize(x, a_global.reshape(1), a, a_sf, kernels.quantize_pdl)
        alpha = w_global * a_global
    else:
        a, a_sf = aligned(x.data, layout.kp // 2), x.scale
        if problem.sf_layout != "128x4" or layout.kp != layout.k:
            columns = layout.k // formats.NVFP4_BLOCK
            linear = formats.from_128x4(a_sf, m, columns) if problem.sf_layout == "128x4" else a_sf
            a_sf = formats.to_128x4(zero_pad(linear, m, layout.kp // formats.NVFP4_BLOCK))
        alpha = w_global if x.global_scale is None else w_global * x.global_scale
    kernels.gemm.nvfp4_gemm(a, w, a_sf, w_sf, alpha, bias, d, _workspace(kernels, d, layout.kp), kernels.gemm_pdl)
