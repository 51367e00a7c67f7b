"""The operators ``nvfp4_gemm`` and ``fp8_gemm``: GEMMs of operands that are quantised already."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fp4dispatch import formats
from fp4dispatch.backends.base import LinearWeights, QuantizedActivation
from fp4dispatch.dispatch import choose
from fp4dispatch.dispatch.request import check_request
from fp4dispatch.errors import InputError
from fp4dispatch.machine import capture
from fp4dispatch.problem import Op, Problem, Scaling, SfLayout
from fp4dispatch.run import binding, routes
from fp4dispatch.run.operands import check_bias, check_types
from fp4dispatch.run.register import define
from fp4dispatch.run.routes import OUT_DTYPE


def nvfp4_gemm(
    a: Tensor,
    b: Tensor,
    a_sf: Tensor,
    b_sf: Tensor,
    alpha: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    sf_layout: SfLayout = "128x4",
    backend: str | None = None,
) -> Tensor:
    """Return ``alpha * A @ B^T (+ bias)`` of two NVFP4 matrices.

    Parameters
    ----------
    a, b
        uint8 [M, K/2] and [N, K/2], row-major, two e2m1 codes a byte, even element in the low nibble; K a multiple
        of 16.
    a_sf, b_sf
        float8_e4m3fn block scales: [M, K/16] and [N, K/16] where ``sf_layout`` is ``linear``, [pad128(M), pad4(K/16)]
        and [pad128(N), pad4(K/16)] in ``128x4``, with zero padding.
    alpha
        f32, one element: the product of both global scales as they multiply (amax / 2688; FlashInfer and
        compressed-tensors keep the reciprocals).
    bias
        [N], floating point.
    out_dtype
        bfloat16, float16 or float32.
    sf_layout
        Layout of both block scales.
    backend
        A backend's name; None leaves it to ``FP4_GEMM_BACKEND`` and the policy.

    Returns
    -------
    Tensor
        [M, N]; empty, and nothing is launched, for M == 0.

    Raises
    ------
    InputError
        For wrong operands.
    BackendUnsupportedError, NoBackendError, UnknownBackendError, SettingsError
        As :func:`fp4dispatch.dispatch.choose.select`.
    CaptureError
        During CUDA graph capture, if this shape has no plan yet (run it once before), or if the rules do not allow the
        chosen backend in a graph (name another one). Otherwise the call is safe to capture.
    """
    _check_name("nvfp4_gemm", backend)
    operands = {"a": a, "b": b, "a_sf": a_sf, "b_sf": b_sf, "alpha": alpha}
    check_types("nvfp4_gemm", operands, bias, out_dtype, {"sf_layout": sf_layout})
    result: Tensor = torch.ops.fp4dispatch.nvfp4_gemm.default(
        a, b, a_sf, b_sf, alpha, bias, out_dtype, sf_layout, backend
    )
    return result


def _nvfp4_gemm_check(
    a: Tensor,
    b: Tensor,
    a_sf: Tensor,
    b_sf: Tensor,
    alpha: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    sf_layout: str,
    backend: str | None,
) -> Tensor:
    if alpha.numel() != 1:
        raise InputError(f"nvfp4_gemm: alpha has {alpha.numel()} elements; need one. FP4Linear takes fused shards")
    formats.check_nvfp4_meta("nvfp4_gemm: b", b, b_sf, alpha, sf_layout)
    formats.check_nvfp4_meta("nvfp4_gemm: a", a, a_sf, alpha, sf_layout)
    return _gemm_check("nvfp4_gemm", a, b, bias, out_dtype)


def _nvfp4_gemm_impl(
    a: Tensor,
    b: Tensor,
    a_sf: Tensor,
    b_sf: Tensor,
    alpha: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    sf_layout: SfLayout,
    backend: str | None,
) -> Tensor:
    out = _nvfp4_gemm_check(a, b, a_sf, b_sf, alpha, bias, out_dtype, sf_layout, backend)
    n, k = b.shape[0], b.shape[1] * 2
    weights = LinearWeights("nvfp4_gemm", "nvfp4", n, k, b, b_sf, alpha.reshape(1), (n,), sf_layout=sf_layout)
    return _gemm(weights, QuantizedActivation(a, a_sf), out, bias, backend, sf_layout)


def fp8_gemm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    scaling: Scaling = "tensor",
    backend: str | None = None,
) -> Tensor:
    """Return ``(A * a_scale) @ (B * b_scale)^T (+ bias)`` of two FP8 matrices.

    Parameters
    ----------
    a, b
        float8_e4m3fn [M, K] and [N, K], row-major.
    a_scale, b_scale
        f32. ``tensor``: [] and []; ``row``: [M] and [N]; ``block128``: [M, ceil(K/128)] (1x128) and
        [ceil(N/128), ceil(K/128)] (128x128).
    bias, out_dtype, backend
        As in :func:`nvfp4_gemm`; the environment variable is ``FP4DISPATCH_FP8_BACKEND``.
    scaling
        ``tensor``, ``row`` or ``block128``.

    Returns
    -------
    Tensor
        [M, N]; empty, and nothing is launched, for M == 0.

    Raises
    ------
    InputError, BackendUnsupportedError, NoBackendError, UnknownBackendError, SettingsError, CaptureError
        As :func:`nvfp4_gemm`.
    """
    _check_name("fp8_gemm", backend)
    operands = {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale}
    check_types("fp8_gemm", operands, bias, out_dtype, {"scaling": scaling})
    result: Tensor = torch.ops.fp4dispatch.fp8_gemm.default(a, b, a_scale, b_scale, bias, out_dtype, scaling, backend)
    return result


def _fp8_gemm_check(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    scaling: Scaling,
    backend: str | None,
) -> Tensor:
    if scaling not in ("tensor", "row", "block128"):
        raise InputError(f"fp8_gemm: scaling={scaling!r} is not known; use 'tensor', 'row' or 'block128'")
    formats.check_fp8_meta("fp8_gemm: b", b, b_scale, scaling)
    formats.check_fp8_meta("fp8_gemm: a", a, a_scale, "1x128" if scaling == "block128" else scaling)
    return _gemm_check("fp8_gemm", a, b, bias, out_dtype)


def _fp8_gemm_impl(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    scaling: Scaling,
    backend: str | None,
) -> Tensor:
    out = _fp8_gemm_check(a, b, a_scale, b_scale, bias, out_dtype, scaling, backend)
    weights = LinearWeights("fp8_gemm", scaling, b.shape[0], b.shape[1], b, b_scale)
    return _gemm(weights, QuantizedActivation(a, a_scale), out, bias, backend, None)


def _check_name(op: Op, backend: object) -> None:
    """Refuse a backend name that is not a str with our error, not torch's. ``torch.compile`` traces this function."""
    if backend is not None and not isinstance(backend, str):
        check_request(op, backend)


def _gemm_check(what: Op, a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Check operands as both GEMMs need them, without reading values; return the uninitialised output [M, N]."""
    for name, operand in (("a", a), ("b", b)):
        if not operand.is_contiguous():
            raise InputError(f"{what}: {name} has strides {list(operand.stride())}; need row-major: .contiguous()")
    if a.shape[1] != b.shape[1] or a.device != b.device:
        raise InputError(
            f"{what}: a is {list(a.shape)} on {a.device}, b {list(b.shape)} on {b.device}; need one K and one device"
        )
    if out_dtype not in OUT_DTYPE:
        raise InputError(f"{what}: out_dtype={out_dtype}; need torch.bfloat16, torch.float16 or torch.float32")
    n = b.shape[0]
    check_bias(what, bias, n, a.device)
    return a.new_empty(a.shape[0], n, dtype=out_dtype)


def _gemm(
    weights: LinearWeights,
    x: QuantizedActivation,
    out: Tensor,
    bias: Tensor | None,
    name: str | None,
    sf_layout: SfLayout | None,
) -> Tensor:
    check_request(weights.op, name)
    m = out.shape[0]
    if m == 0:
        return out
    activation = "nvfp4" if weights.op == "nvfp4_gemm" else "fp8"
    problem = Problem(
        weights.op,
        m,
        weights.n,
        weights.k,
        activation,  # type: ignore[arg-type]
        weights.scaling,
        OUT_DTYPE[out.dtype],
        bias is not None,
        sf_layout=sf_layout,
        raw=True,
    )
    asked = problem
    if (declared := capture.declared()) is not None:
        asked = replace(problem, capture=declared.capture, m_min=declared.smallest_m)
    gpu = routes.gpu_of(out.device)
    decision = choose.select(asked, backend=name, gpu=gpu)
    binding.check_capture(decision, gpu)
    backend = choose.instance(str(decision.backend))
    prepared = backend.prepare(weights)
    routes.launch(backend, routes.plan_for(backend, problem, prepared), prepared, x, out, bias)
    return out


define(
    "nvfp4_gemm(Tensor a, Tensor b, Tensor a_sf, Tensor b_sf, Tensor alpha, Tensor? bias, ScalarType out_dtype, "
    "str sf_layout, str? backend) -> Tensor",
    _nvfp4_gemm_impl,
    _nvfp4_gemm_check,
)

define(
    "fp8_gemm(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? bias, ScalarType out_dtype, str scaling, "
    "str? backend) -> Tensor",
    _fp8_gemm_impl,
    _fp8_gemm_check,
)
