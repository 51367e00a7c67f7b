"""cuBLASLt through torch's scaled matmul (``torch._scaled_mm`` and ``_scaled_mm_v2``).

On Hopper, FP8 layers with ``row`` or ``tensor`` scaling call cuBLASLt without torch's operator
(:mod:`~fp4dispatch.backends.libraries.cublaslt_direct`): the same GEMM for less host time.

What torch requires of the operands (https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cuda/ScaledBlas.cpp):

* A row-major, B [N, K] row-major; K and N multiples of 16. ``prepare`` pads other sizes with zeros; the output is
  sliced.
* ``row`` scaling runs on cuBLASLt on sm_90 from CUDA 12.9 on. Elsewhere torch's own CUTLASS kernels run, which write
  bfloat16 only.
* ``block128`` needs sm_90 and cuBLASLt 12.9: scales of A [M, K/128] with M the fastest dimension, scales of B
  [K/128 rounded up to 4, N/128] with K the fastest.
* NVFP4: e2m1 pairs, e4m3 scales in the 128x4 layout, and two f32 global scales whose product is alpha, on the device.

``use_fast_accum`` stays off: Hopper's FP8 tensor cores keep about 14 bits of a running sum; with it off, cuBLASLt adds
partial sums in f32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from packaging.version import Version
from torch import Tensor

from fp4dispatch import formats
from fp4dispatch.backends.base import Backend, LinearWeights, Plan, Prepared, QuantizedActivation, Ready
from fp4dispatch.backends.libraries.cublaslt_direct import direct_gemms
from fp4dispatch.backends.libraries.cublaslt_weights import Layout, prepare
from fp4dispatch.backends.own.scratch import Part, ScratchByM
from fp4dispatch.backends.own.tensors import quantizers
from fp4dispatch.backends.own.tensors.operands import taken_as_is
from fp4dispatch.backends.own.tensors.quantizers import (
    Nvfp4Quantizer,
    Quantizers,
    nvfp4_parts,
    ones,
    ones_for,
    quantized,
    quantized_nvfp4,
    tokens_fastest,
)
from fp4dispatch.formats import round_up, zero_pad
from fp4dispatch.machine import capture
from fp4dispatch.machine import system as _system
from fp4dispatch.machine.system import System
from fp4dispatch.policy.capability import check
from fp4dispatch.policy.catalogue import parse_version
from fp4dispatch.problem import Activation, Op, Problem, SfLayout
from fp4dispatch.problem.arch import SM90
from fp4dispatch.problem.decision import Reason

# torch.nn.functional.ScalingType and SwizzleType as the integers that the operator takes
_TENSORWISE, _BLOCK_1X16, _BLOCK_1X128, _BLOCK_128X128 = 0, 2, 4, 5
_NO_SWIZZLE, _SWIZZLE_32_4_4 = 0, 1

_ROWS_FROM = Version("12.9")
"""First CUDA whose cuBLASLt supports row scaling, on sm_90."""


_Launch = Callable[["_State", int, Tensor, tuple[Tensor, ...], Tensor, "Tensor | None"], None]


class _State(NamedTuple):
    """State of a plan; it serves every M.

    ``epilogue``: the GEMM writes f32, and the row scales and the bias are applied after it, so that the output is
    rounded once. ``rows_need_bf16``: row scaling exists for bfloat16 output only; for others it goes to the epilogue.
    ``m_multiple``: M is padded to it. ``quantizers``, ``nvfp4``: our quantisers, if they could be compiled. ``launch``:
    quantises into ``scratch`` and multiplies operands that fit as they are; None if the layer's never do. ``ones``: f32
    [32768, 1].
    """

    layout: Layout
    epilogue: bool
    rows_need_bf16: bool
    m_multiple: int
    quantizers: Quantizers | None
    nvfp4: Nvfp4Quantizer | None
    launch: _Launch | None
    scratch: ScratchByM
    ones: Tensor


class CublasLtBackend(Backend):
    """FP8 (tensor, row, block128) and NVFP4 x NVFP4 on the cuBLASLt that torch brings."""

    name = "cublaslt"
    activations: ClassVar[dict[Op, tuple[Activation, ...]]] = {"nvfp4_gemm": ("nvfp4",), "fp8_gemm": ("fp8",)}
    plans_by_m = False

    def supports(self, problem: Problem, system: System) -> tuple[Reason, ...]:
        """Collect every reason why this backend cannot run the problem."""
        return check(self.name, problem, system)

    def builds(self, problem: Problem, device: torch.device) -> tuple[tuple[str, str], ...]:
        """Name the quantiser that a plan will load."""
        return quantizers.builds(problem)

    def prepare(self, weights: LinearWeights) -> Prepared:
        """Pad with zeros to what cuBLASLt needs; weights that fit are not copied."""
        tensors, layout = prepare(weights)
        return Prepared(self.name, tuple(tensors), tuple(layout))

    def plan(self, problem: Problem, prepared: Prepared) -> Plan:
        """Decide what is fused, and load our kernels for activations, compiling them first where needed.

        cuBLASLt's own heuristic runs at launch, is cached by torch and safe to capture.

        Raises
        ------
        CaptureError
            During capture.

        Notes
        -----
        Where our kernels cannot be compiled, torch's operations quantise: a warning and the plan's ``note`` say so.
        """
        capture.forbid_in_capture(f"planning {problem}", "fp4dispatch.warmup(model, tokens=[...])")
        layout = Layout(*prepared.layout)
        device = prepared.tensors[0].device
        block = layout.scaling == "block128"
        epilogue = (
            (layout.scaling == "nvfp4" and layout.per_row)
            or (problem.bias and (block or problem.out_dtype == "float32"))
            or (block and problem.out_dtype == "float16")
        )
        rows_need_bf16 = _rows_need_bf16(prepared.tensors[0])
        found, nvfp4, note = _kernels(layout, device)
        launch = None
        rows_fit = not (layout.per_row and rows_need_bf16) or problem.out_dtype == "bfloat16"
        if (
            (found or nvfp4) is not None
            and (layout.np, layout.kp) == (layout.n, layout.k)
            and rows_fit
            and not epilogue
            and problem.out_dtype != "float32"
        ):
            launch = _launch_of(layout)
            direct, why = _direct(layout, problem, device, found, prepared.tensors[0])
            launch, note = direct or launch, note or why
        scratch = ScratchByM(device, functools.partial(_parts, layout), _transposed if block else tuple)
        state = _State(layout, epilogue, rows_need_bf16, 4 if block else 1, found, nvfp4, launch, scratch, ones(device))
        return Plan(self.name, problem, state, note)

    def run(
        self,
        plan: Plan,
        prepared: Prepared,
        x: Tensor | QuantizedActivation,
        out: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        """Quantise the activation if it is not quantised yet, and launch the GEMM."""
        s: _State = plan.state
        m = out.shape[0]
        if (
            s.launch is not None
            and isinstance(x, Tensor)
            and x.dtype == out.dtype
            and not m % s.m_multiple
            and (bias is not None) == plan.problem.bias
            and taken_as_is(x, out, bias)
        ):
            s.launch(s, m, x, prepared.tensors, out, bias)
            return
        layout = s.layout
        epilogue = s.epilogue or (bias is not None and bias.dtype != out.dtype)
        row_scales = _by_row(layout, x) and s.rows_need_bf16 and (epilogue or out.dtype != torch.bfloat16)
        epilogue = epilogue or row_scales
        mp = round_up(m, s.m_multiple)
        direct = not epilogue and (mp, layout.np) == (m, layout.n) and out.is_contiguous()
        d = out if direct else out.new_empty(mp, layout.np, dtype=torch.float32 if epilogue else out.dtype)
        fused_bias = None if bias is None or epilogue else zero_pad(bias.reshape(1, -1), 1, layout.np).reshape(-1)
        if layout.scaling == "nvfp4":
            after = _run_nvfp4(s, plan.problem, prepared, x, d, fused_bias)
        elif layout.scaling == "block128":
            after = _run_block128(s, prepared, x, d, fused_bias)
        else:
            after = _run_fp8(s, prepared, x, d, fused_bias, row_scales)
        if direct:
            return
        result = d[:m, : layout.n]
        if epilogue:
            for factor in after:
                result.mul_(factor)
            if bias is not None:
                result.add_(bias)
        out.copy_(result)

    def ready(self, plan: Plan, prepared: Prepared) -> Ready:
        """Return the launch alone if nothing is padded."""
        s: _State = plan.state
        if s.launch is None or s.m_multiple != 1:
            return super().ready(plan, prepared)
        launch, tensors = s.launch, prepared.tensors

        def ready(x: Tensor, out: Tensor, bias: Tensor | None) -> None:
            launch(s, x.shape[0], x, tensors, out, bias)

        return ready


def _kernels(layout: Layout, device: torch.device) -> tuple[Quantizers | None, Nvfp4Quantizer | None, str]:
    """Return the quantisers that a layer needs, and if there is none, why."""
    if layout.scaling == "nvfp4":
        nvfp4, note = quantizers.load_nvfp4(device)
        return None, nvfp4, note
    fp8, note = quantizers.load(device)
    return fp8, None, note


def _rows_need_bf16(tensor: Tensor) -> bool:
    """Whether row scaling runs on torch's own kernels, which write bfloat16 only."""
    cuda = parse_version(_system.current().cuda or "")
    return _arch_of(tensor) != SM90 or (cuda is not None and cuda < _ROWS_FROM)


def _arch_of(tensor: Tensor) -> Any:
    """Return the arch of the GPU that a tensor is on; None on a CPU."""
    gpus = _system.current().gpus
    index = tensor.device.index
    return gpus[index].arch if tensor.is_cuda and index is not None and index < len(gpus) else None


# -------------------------------------------------------------------------------------------------------------- launch


def _direct(
    layout: Layout, problem: Problem, device: torch.device, found: Quantizers | None, weight: Tensor
) -> tuple[_Launch | None, str]:
    """Return the launch without torch's operator; or None, and why if one could be expected."""
    if found is None or found.library is None or layout.scaling not in ("row", "tensor") or _arch_of(weight) != SM90:
        return None, ""
    gemms, why = direct_gemms(found, device, functools.partial(_parts, layout), layout, problem)
    if gemms is None:
        return None, why
    if not layout.has_input_scale:
        return gemms.row, ""
    return (gemms.static_row if layout.per_row else gemms.static), ""


def _launch_of(layout: Layout) -> _Launch:
    if layout.scaling == "nvfp4":
        return _launch_nvfp4
    if layout.scaling == "block128":
        return _launch_block128
    if not layout.has_input_scale:
        return _launch_row
    return _launch_static_row if layout.per_row else _launch_static


def _parts(layout: Layout, m: int) -> list[Part]:
    """Return the scratch of a launch for M tokens: the quantised activation, and its scales unless static."""
    if layout.scaling == "nvfp4":
        return nvfp4_parts(m, layout.kp)
    parts = [Part((m, layout.kp), torch.float8_e4m3fn)]
    if layout.scaling == "block128":
        parts.append(Part((layout.kp // formats.FP8_BLOCK, m), torch.float32))
    elif not layout.has_input_scale:
        parts.append(Part((m, 1), torch.float32))
    return parts


def _transposed(parts: list[Tensor]) -> tuple[Tensor, ...]:
    return parts[0], parts[1].t()


def _launch_row(s: _State, m: int, x: Tensor, tensors: tuple[Tensor, ...], d: Tensor, bias: Tensor | None) -> None:
    assert s.quantizers is not None
    q, scale = s.scratch(m)
    s.quantizers.row(x, q, scale, s.quantizers.pdl)
    torch._scaled_mm(q, tensors[0].t(), scale, tensors[1], bias, out_dtype=d.dtype, out=d)


def _launch_static(s: _State, m: int, x: Tensor, tensors: tuple[Tensor, ...], d: Tensor, bias: Tensor | None) -> None:
    assert s.quantizers is not None
    (q,) = s.scratch(m)
    s.quantizers.tensor(x, q, tensors[2], s.quantizers.pdl)
    torch._scaled_mm(q, tensors[0].t(), tensors[2], tensors[1], bias, out_dtype=d.dtype, out=d)


def _launch_static_row(
    s: _State, m: int, x: Tensor, tensors: tuple[Tensor, ...], d: Tensor, bias: Tensor | None
) -> None:
    assert s.quantizers is not None
    (q,) = s.scratch(m)
    s.quantizers.tensor(x, q, tensors[3], s.quantizers.pdl)
    torch._scaled_mm(q, tensors[0].t(), ones_for(s.ones, m), tensors[2], bias, out_dtype=d.dtype, out=d)


def _launch_block128(s: _State, m: int, x: Tensor, tensors: tuple[Tensor, ...], d: Tensor, bias: Tensor | None) -> None:
    assert s.quantizers is not None
    q, scale = s.scratch(m)
    s.quantizers.block(x, q, scale, s.quantizers.pdl)
    _block128_gemm(q, scale, tensors[0], tensors[1], bias, d)


def _launch_nvfp4(s: _State, m: int, x: Tensor, tensors: tuple[Tensor, ...], d: Tensor, bias: Tensor | None) -> None:
    assert s.nvfp4 is not None
    scale = tensors[3] if s.layout.has_input_scale else formats.nvfp4_global_scale(x)
    q, sf = s.scratch(m)
    s.nvfp4.quantize(x, scale, q, sf, s.nvfp4.pdl)
    _nvfp4_gemm(q, sf, scale.reshape(()), tensors[0], tensors[1], tensors[2].reshape(()), bias, d)


# ----------------------------------------------------------------------------------------------------------------- run


def _input_scale(layout: Layout, prepared: Prepared) -> Tensor | None:
    return prepared.tensors[-1] if layout.has_input_scale else None


def _by_row(layout: Layout, x: Tensor | QuantizedActivation) -> bool:
    """Whether the GEMM scales rows: not if the activation has one scale and the weight has one."""
    if layout.scaling not in ("tensor", "row") or not layout.per_row:
        return False
    return layout.scaling == "row" or isinstance(x, Tensor) or x.scale.ndim > 0


def _run_fp8(
    s: _State,
    prepared: Prepared,
    x: Tensor | QuantizedActivation,
    d: Tensor,
    bias: Tensor | None,
    row_scales: bool,
) -> tuple[Tensor, ...]:
    """Launch a GEMM with tensor or row scaling; return the factors that are still to be applied."""
    layout, (w, w_scale) = s.layout, prepared.tensors[:2]
    by_row = _by_row(layout, x)
    if isinstance(x, Tensor):
        x = quantized(s.quantizers, x, d.shape[0], layout.kp, layout.scaling, _input_scale(layout, prepared))
    a, a_scale = zero_pad(x.data, d.shape[0], layout.kp), x.scale
    if row_scales:
        one = s.ones[0, 0]
        torch._scaled_mm(a, w.t(), one, one, out_dtype=d.dtype, out=d)
        return w_scale[0, : layout.n], a_scale.reshape(-1, 1)
    if not by_row:
        scales = a_scale.reshape(()), w_scale.view(-1)[0]
    elif a_scale.ndim == 0 and layout.has_input_scale:
        scales = ones_for(s.ones, d.shape[0]), prepared.tensors[2]
    else:
        scales = a_scale.reshape(-1, 1).expand(a.shape[0], 1).contiguous(), w_scale
    torch._scaled_mm(a, w.t(), *scales, bias, out_dtype=d.dtype, out=d)
    return ()


def _run_block128(
    s: _State, prepared: Prepared, x: Tensor | QuantizedActivation, d: Tensor, bias: Tensor | None
) -> tuple[Tensor, ...]:
    w, w_scale = prepared.tensors[:2]
    mp, kp = d.shape[0], s.layout.kp
    if isinstance(x, Tensor):
        a, a_scale = quantized(s.quantizers, x, mp, kp, "block128")[:2]
    else:
        a = zero_pad(x.data, mp, kp)
        a_scale = tokens_fastest(x.data, mp, x.scale.shape[1]).copy_(x.scale)
    _block128_gemm(a, a_scale.as_strided((mp, a_scale.shape[1]), (1, mp)), w, w_scale, bias, d)
    return ()


def _block128_gemm(a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, d: Tensor) -> None:
    torch.ops.aten._scaled_mm_v2.out(
        a,
        w.t(),
        [a_scale],
        [_BLOCK_1X128],
        [_NO_SWIZZLE],
        [w_scale.t()],
        [_BLOCK_128X128],
        [_NO_SWIZZLE],
        bias,
        d.dtype,
        out=d,
    )


def _run_nvfp4(
    s: _State,
    problem: Problem,
    prepared: Prepared,
    x: Tensor | QuantizedActivation,
    d: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, ...]:
    """Launch an NVFP4 GEMM; for fused shards return their alphas, to be applied to the f32 sums."""
    layout, (w, w_sf, alpha) = s.layout, prepared.tensors[:3]
    m, kp = d.shape[0], layout.kp
    sf_layout: SfLayout = problem.sf_layout or "linear"
    if isinstance(x, Tensor):
        scale = prepared.tensors[-1] if layout.has_input_scale else formats.nvfp4_global_scale(x)
        x = quantized_nvfp4(s.nvfp4, x, m, kp, scale)
        a_sf = x.scale
    elif sf_layout == "linear" or kp != layout.k:
        linear = formats.from_128x4(x.scale, m, layout.k // 16) if sf_layout == "128x4" else x.scale
        a_sf = formats.to_128x4(zero_pad(linear, m, kp // 16))
    else:
        a_sf = x.scale
    one = s.ones[0, 0]
    a_global = one if x.global_scale is None else x.global_scale.reshape(())
    b_global = one if layout.per_row else alpha.reshape(())
    _nvfp4_gemm(zero_pad(x.data, m, kp // 2), a_sf, a_global, w, w_sf, b_global, bias, d)
    return (alpha[: layout.n],) if layout.per_row else ()


def _nvfp4_gemm(
    a: Tensor,
    a_sf: Tensor,
    a_global: Tensor,
    w: Tensor,
    w_sf: Tensor,
    w_global: Tensor,
    bias: Tensor | None,
    d: Tensor,
) -> None:
    fp4 = torch.float4_e2m1fn_x2
    torch.ops.aten._scaled_mm_v2.out(
        a.view(fp4),
        w.view(fp4).t(),
        [a_sf, a_global],
        [_BLOCK_1X16, _TENSORWISE],
        [_SWIZZLE_32_4_4, _NO_SWIZZLE],
        [w_sf, w_global],
        [_BLOCK_1X16, _TENSORWISE],
        [_SWIZZLE_32_4_4, _NO_SWIZZLE],
        bias,
        d.dtype,
        out=d,
    )
