"""What the ``cublaslt`` backend launches: torch's scaled matmul, with our quantiser before it where one could be built.

``launch_*`` functions take operands that fit as they are. ``run_*`` functions take any, and return the factors that the
caller must still apply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fp4dispatch import formats
from fp4dispatch.backends.base import Prepared, QuantizedActivation
from fp4dispatch.backends.libraries.cublaslt_weights import Layout
from fp4dispatch.backends.own.scratch import Part, ScratchByM
from fp4dispatch.backends.own.swiglu import Front
from fp4dispatch.backends.own.tensors.quantizers import (
    Nvfp4Quantizer,
    Quantizers,
    nvfp4_parts,
    ones_for,
    quantized,
    quantized_nvfp4,
    tokens_fastest,
)
from fp4dispatch.formats import zero_pad
from fp4dispatch.problem import Problem, SfLayout

# torch.nn.functional.ScalingType and SwizzleType as the integers that the operator takes
_TENSORWISE, _BLOCK_1X16, _BLOCK_1X128, _BLOCK_128X128 = 0, 2, 4, 5
_NO_SWIZZLE, _SWIZZLE_32_4_4 = 0, 1

Kind = Literal["nvfp4", "block", "row", "static", "static_row"]
"""How activations are scaled: by one scale for all tokens (``static``) where the layer has it. ``static_row``: it is
multiplied into the row scales of the weight."""

Launch = Callable[["State", int, Tensor, tuple[Tensor, ...], Tensor, "Tensor | None"], None]


class State(NamedTuple):
    """State of a plan; it serves every M.

    ``epilogue``: the GEMM writes f32, and the row scales and the bias are applied after it, so that the output is
    rounded once. ``rows_need_bf16``: row scaling exists for bfloat16 output only; for others it goes to the epilogue.
    ``m_multiple``: M is padded to it, and so may be the rows of the output. ``quantizers``, ``nvfp4``: our quantisers,
    if they could be compiled. ``launch``: quantises into ``scratch`` and multiplies operands that fit as they are; None
    if the layer's never do. ``behind``: makes the same of a kernel that quantises something else in place of x,
    ``function(x, q, scale, pdl)``. ``ones``: f32 [32768, 1].
    """

    layout: Layout
    epilogue: bool
    rows_need_bf16: bool
    m_multiple: int
    quantizers: Quantizers | None
    nvfp4: Nvfp4Quantizer | None
    launch: Launch | None
    behind: Callable[[Front], Launch] | None
    scratch: ScratchByM
    ones: Tensor


def kind_of(layout: Layout) -> Kind:
    """Return the kind of launch that weights of a layout need."""
    if layout.scaling == "nvfp4":
        return "nvfp4"
    if layout.scaling == "block128":
        return "block"
    if not layout.has_input_scale:
        return "row"
    return "static_row" if layout.per_row else "static"


def launch_of(layout: Layout) -> Launch:
    """Return the launch for weights of a layout."""
    return _LAUNCHES[kind_of(layout)]


def launch_behind(layout: Layout, front: Front) -> Launch:
    """Return the launch for FP8 weights behind a kernel that quantises something else in place of x."""
    multiply = launch_of(layout)
    quantizers = Quantizers(front.function, front.function, front.function, front.pdl)

    def launch(s: State, m: int, x: Tensor, tensors: tuple[Tensor, ...], d: Tensor, bias: Tensor | None) -> None:
        multiply(s._replace(quantizers=quantizers), m, x, tensors, d, bias)

    return launch


def parts_of(layout: Layout, m: int) -> list[Part]:
    """Return the scratch of a launch for M tokens: the quantised activation, and its scales unless static."""
    if layout.scaling == "nvfp4":
        return nvfp4_parts(m, layout.kp)
    parts = [Part((m, layout.kp), torch.float8_e4m3fn)]
    if layout.scaling == "block128":
        parts.append(Part((layout.kp // formats.FP8_BLOCK, m), torch.float32))
    elif not layout.has_input_scale:
        parts.append(Part((m, 1), torch.float32))
    return parts


def view_of(layout: Layout) -> Callable[[list[Tensor]], tuple[Tensor, ...]]:
    """Return what brings :func:`parts_of` into the form that the GEMM takes."""
    return _tokens_fastest if layout.scaling == "block128" else tuple


def _tokens_fastest(parts: list[Tensor]) -> tuple[Tensor, ...]:
    """Transpose the scales of a ``block128`` launch: tokens are their fastest dimension."""
    return parts[0], parts[1].t(), *parts[2:]


def _launch_row(s: State, m: int, x: Tensor, tensors: tuple[Tensor, ...], d: Tensor, bias: Tensor | None) -> None:
    assert s.quantizers is not None
    q, scale = s.scratch(m)
    s.quantizers.row(x, q, scale, s.quantizers.pdl)
    torch._scaled_mm(q, tensors[0].t(), scale, tensors[1], bias, out_dtype=d.dtype, out=d)


def _launch_static(s: State, m: int, x: Tensor, tensors: tuple[Tensor, ...], d: Tensor, bias: Tensor | None) -> None:
    assert s.quantizers is not None
    (q,) = s.scratch(m)
    s.quantizers.tensor(x, q, tensors[2], s.quantizers.pdl)
    torch._scaled_mm(q, tensors[0].t(), tensors[2], tensors[1], bias, out_dtype=d.dtype, out=d)


def _launch_static_row(
    s: State, m: int, x: Tensor, tensors: tuple[Tensor, ...], d: Tensor, bias: Tensor | None
) -> None:
    assert s.quantizers is not None
    (q,) = s.scratch(m)
    s.quantizers.tensor(x, q, tensors[3], s.quantizers.pdl)
    torch._scaled_mm(q, tensors[0].t(), ones_for(s.ones, m), tensors[2], bias, out_dtype=d.dtype, out=d)


def _launch_block128(s: State, m: int, x: Tensor, tensors: tuple[Tensor, ...], d: Tensor, bias: Tensor | None) -> None:
    assert s.quantizers is not None
    q, scale = s.scratch(d.shape[0])
    s.quantizers.block(x, q[:m], scale[:m], s.quantizers.pdl)  # what is in the rows beyond M reaches only theirs of d
    _block128_gemm(q, scale, tensors[0], tensors[1], bias, d)


def _launch_nvfp4(s: State, m: int, x: Tensor, tensors: tuple[Tensor, ...], d: Tensor, bias: Tensor | None) -> None:
    assert s.nvfp4 is not None
    scale = tensors[3] if s.layout.has_input_scale else formats.nvfp4_global_scale(x)
    q, sf = s.scratch(m)
    s.nvfp4.quantize(x, scale, q, sf, s.nvfp4.pdl)
    _nvfp4_gemm(q, sf, scale.reshape(()), tensors[0], tensors[1], tensors[2].reshape(()), bias, d)


_LAUNCHES: dict[Kind, Launch] = {
    "nvfp4": _launch_nvfp4,
    "block": _launch_block128,
    "row": _launch_row,
    "static": _launch_static,
    "static_row": _launch_static_row,
}


# ----------------------------------------------------------------------------------------------------------------- run


def _input_scale(layout: Layout, prepared: Prepared) -> Tensor | None:
    return prepared.tensors[-1] if layout.has_input_scale else None


def scales_rows(layout: Layout, x: Tensor | QuantizedActivation) -> bool:
    """Whether the GEMM scales rows: not if the activation has one scale and the weight has one."""
    if layout.scaling not in ("tensor", "row") or not layout.per_row:
        return False
    return layout.scaling == "row" or isinstance(x, Tensor) or x.scale.ndim > 0


def run_fp8(
    s: State,
    prepared: Prepared,
    x: Tensor | QuantizedActivation,
    d: Tensor,
    bias: Tensor | None,
    row_scales: bool,
) -> tuple[Tensor, ...]:
    """Launch a GEMM with tensor or row scaling; return the factors that are still to be applied."""
    layout, (w, w_scale) = s.layout, prepared.tensors[:2]
    by_row = scales_rows(layout, x)
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


def run_block128(
    s: State, prepared: Prepared, x: Tensor | QuantizedActivation, d: Tensor, bias: Tensor | None
) -> tuple[Tensor, ...]:
    """Launch a GEMM with 128x128 scales; nothing is left to be applied."""
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


def run_nvfp4(
    s: State,
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
