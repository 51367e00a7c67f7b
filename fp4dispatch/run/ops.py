"""The operators ``torch.ops.fp4dispatch.*``: schema, fake and autograd of each, and Python functions with the defaults.

Each is opaque to ``torch.compile``, runs without host synchronisation, and is for inference: a backward raises
:class:`~fp4dispatch.errors.BackwardError`, it never silently detaches. Bad operands raise
:class:`~fp4dispatch.errors.InputError` before anything is launched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fp4dispatch import formats
from fp4dispatch.backends.base import LinearWeights, QuantizedActivation
from fp4dispatch.dispatch import choose
from fp4dispatch.dispatch.request import check_request
from fp4dispatch.errors import BackwardError, InputError
from fp4dispatch.formats.checks import check_tensor
from fp4dispatch.machine import capture
from fp4dispatch.problem import Op, Problem, Scaling, SfLayout
from fp4dispatch.run import owners, routes
from fp4dispatch.run.routes import OUT_DTYPE, Bound, LayerSpec

_library = torch.library.Library("fp4dispatch", "DEF")  # type: ignore[no-untyped-call]


# ------------------------------------------------------------------------------------------------------------- linear


def linear(x: Tensor, tensors: Sequence[Tensor], bias: Tensor | None, spec: str) -> Tensor:
    """Run a linear layer: the operator behind ``FP4Linear`` and ``FP8Linear``.

    Parameters
    ----------
    x
        float32, bfloat16 or float16 [..., K]; any strides.
    tensors
        The prepared weights of all backends of the spec, in its order. On a GPU the first call on them, and the first
        after a write that torch counts, waits for the stream: kernels read weights before what is ahead has finished.
    bias
        [N], floating point, or None.
    spec
        Text of a :class:`~fp4dispatch.run.routes.LayerSpec`.

    Returns
    -------
    Tensor
        [..., N] in the dtype of ``x``; empty, and nothing is launched, where ``x`` is.

    Raises
    ------
    InputError
        For a wrong dtype, shape or device.
    CaptureError
        If no plan is there for this M, or the tensors are new or were written, and a CUDA graph is being captured.
        Otherwise safe to capture.
    """
    _check_types("linear", {"x": x} | {f"tensors[{i}]": tensor for i, tensor in enumerate(tensors)}, bias)
    result: Tensor = torch.ops.fp4dispatch.linear.default(x, list(tensors), bias, spec)
    return result


def linear_stored(
    x: Tensor, tensors: Sequence[Tensor], stored: Sequence[Tensor], bias: Tensor | None, spec: str
) -> Tensor:
    """Run a layer in a compiled graph: :func:`linear`, but its weights are what the layer stores when it runs.

    Parameters
    ----------
    x, tensors, bias, spec
        As of :func:`linear`.
    stored
        The layer's stored tensors. Where they were written since ``tensors`` were made of them, these are made anew.

    Raises
    ------
    InputError
        As :func:`linear`, and if no layer stores these tensors.
    CaptureError
        As :func:`linear`, and if weights were written and a CUDA graph is being captured.
    """
    result: Tensor = torch.ops.fp4dispatch.linear_stored.default(x, list(tensors), list(stored), bias, spec)
    return result


def run_linear(x: Tensor, tensors: Sequence[Tensor], bias: Tensor | None, spec: LayerSpec) -> Tensor:
    """Do what :func:`linear` does without crossing the operator boundary."""
    _check_linear(x, tensors, bias, spec)
    lead = x.shape[:-1]
    m = math.prod(lead)
    out = x.new_empty(m, spec.n)
    if m:
        rows = x.reshape(m, spec.k)
        if not rows.is_contiguous():
            rows = rows.contiguous()
        ready, prepared = spec.launch(m, x.dtype, bias is not None, tuple(tensors))
        routes.launch(ready.backend, ready.plan, prepared, rows, out, bias)
    return out.reshape(*lead, spec.n)


def run_bound(x: Tensor, bound: Bound, bias: Tensor | None) -> Tensor:
    """Do what :func:`linear` does for a layer, without the operator boundary; the next call for this M is fast."""
    spec = bound.spec
    _check_linear(x, bound.tensors, bias, spec)
    lead = x.shape[:-1]
    m = math.prod(lead)
    out = x.new_empty(m, spec.n)
    if m:
        rows = x.reshape(m, spec.k)
        if not rows.is_contiguous():
            rows = rows.contiguous()
        backend, plan, prepared = bound.launch(m, bias is not None)
        if bound.cuda and capture.stream_is_capturing():
            bound.captured = True
        if bias is not bound.bias and (bias is None) == (bound.bias is None):
            bound.bias = bias  # another one; it has been checked
        routes.launch(backend, plan, prepared, rows, out, bias)
    return out.reshape(*lead, spec.n)


def _check_types(
    what: str,
    operands: Mapping[str, object],
    bias: object = None,
    out_dtype: object = torch.bfloat16,
) -> None:
    """Refuse what an operator's schema would refuse with an error of its own."""
    for name, operand in operands.items():
        check_tensor(f"{what}: {name}", operand)
    if bias is not None:
        check_tensor(f"{what}: bias", bias)
    if not isinstance(out_dtype, torch.dtype):
        raise InputError(f"{what}: out_dtype={out_dtype!r}; need torch.bfloat16, torch.float16 or torch.float32")


def _check_linear(x: Tensor, tensors: Sequence[Tensor], bias: Tensor | None, spec: LayerSpec) -> None:
    check_tensor("linear: x", x)
    if x.dtype not in OUT_DTYPE:
        raise InputError(f"linear: x is {x.dtype}; need torch.bfloat16, torch.float16 or torch.float32: convert it")
    if x.ndim == 0 or x.shape[-1] != spec.k:
        raise InputError(f"linear: x has shape {list(x.shape)}; need [..., {spec.k}], the layer's in_features")
    if not tensors or x.device != tensors[0].device:
        where = tensors[0].device if tensors else "no device"
        raise InputError(f"linear: x is on {x.device}, the weights on {where}: move one with .to(device)")
    if bias is not None and (tuple(bias.shape) != (spec.n,) or bias.device != x.device or bias.dtype not in OUT_DTYPE):
        raise InputError(
            f"linear: bias is {bias.dtype} {list(bias.shape)} on {bias.device}; "
            f"need a floating-point [{spec.n}] on {x.device}"
        )


_awaited: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Packed weights of callers that hold no layer, by what version they had when their writes were waited for."""


def _await_writes(tensors: Sequence[Tensor]) -> None:
    """Wait for writes to packed weights that are new or were written: kernels read weights ahead of their PDL wait."""
    if not tensors or not tensors[0].is_cuda:
        return
    versions = [None if tensor.is_inference() else tensor._version for tensor in tensors]
    if all(tensor in _awaited and _awaited[tensor] == v for tensor, v in zip(tensors, versions, strict=True)):
        return
    capture.forbid_in_capture("waiting for writes to packed weights", "run the operator once on these tensors, eagerly")
    torch.cuda.current_stream(tensors[0].device).synchronize()
    for tensor, version in zip(tensors, versions, strict=True):
        _awaited[tensor] = version


def _linear_impl(x: Tensor, tensors: list[Tensor], bias: Tensor | None, spec: str) -> Tensor:
    _await_writes(tensors)
    return run_linear(x, tensors, bias, LayerSpec.parse(spec))


def _linear_stored_impl(
    x: Tensor, tensors: list[Tensor], stored: list[Tensor], bias: Tensor | None, spec: str
) -> Tensor:
    return run_bound(x, owners.bound_for(x.dtype, spec, tensors, stored), bias)


def _linear_stored_fake(
    x: Tensor, tensors: list[Tensor], stored: list[Tensor], bias: Tensor | None, spec: str
) -> Tensor:
    return _linear_fake(x, tensors, bias, spec)


def _linear_fake(x: Tensor, tensors: list[Tensor], bias: Tensor | None, spec: str) -> Tensor:
    layer = LayerSpec.parse(spec)
    _check_linear(x, tensors, bias, layer)
    return x.new_empty(*x.shape[:-1], layer.n)


# ----------------------------------------------------------------------------------------------------------- raw GEMMs


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
        If a plan has to be made during capture: run the shape once before. Or if the policy chose a backend that may
        not be captured: name another one.
    """
    _check_name("nvfp4_gemm", backend)
    _check_types("nvfp4_gemm", {"a": a, "b": b, "a_sf": a_sf, "b_sf": b_sf, "alpha": alpha}, bias, out_dtype)
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
    _check_types("fp8_gemm", {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale}, bias, out_dtype)
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
    """Refuse a name that is no text; the operator would say it in the words of C++. Traced by ``torch.compile``."""
    if backend is not None and not isinstance(backend, str):
        check_request(op, backend)


def _gemm_check(what: Op, a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Check what both GEMMs have in common, without reading values; return the empty output."""
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
    if bias is not None and (tuple(bias.shape) != (n,) or bias.device != a.device or bias.dtype not in OUT_DTYPE):
        raise InputError(
            f"{what}: bias is {bias.dtype} {list(bias.shape)} on {bias.device}; "
            f"need a floating-point [{n}] on {a.device}"
        )
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
    gpu = routes.gpu_of(out.device)
    decision = choose.select(problem, backend=name, gpu=gpu)
    routes.check_capture(decision, gpu)
    backend = choose.instance(str(decision.backend))
    prepared = backend.prepare(weights)
    routes.launch(backend, routes.plan_for(backend, problem, prepared), prepared, x, out, bias)
    return out


# -------------------------------------------------------------------------------------------------------- quantisation


def nvfp4_quantize(x: Tensor, global_scale: Tensor, sf_layout: SfLayout = "128x4") -> tuple[Tensor, Tensor]:
    """Quantise ``x`` [M, K] as :func:`fp4dispatch.formats.nvfp4_quantize` does, as one operator.

    Returns
    -------
    tuple of Tensor
        Data uint8 [M, K/2] and block scales float8_e4m3fn.
    """
    _check_types("nvfp4_quantize", {"x": x, "global_scale": global_scale})
    data, sf = torch.ops.fp4dispatch.nvfp4_quantize.default(x, global_scale, sf_layout)
    return data, sf


def _nvfp4_quantize_impl(x: Tensor, global_scale: Tensor, sf_layout: SfLayout) -> tuple[Tensor, Tensor]:
    q = formats.nvfp4_quantize(x, global_scale, sf_layout=sf_layout)
    return q.data, q.sf


def _nvfp4_quantize_fake(x: Tensor, global_scale: Tensor, sf_layout: SfLayout) -> tuple[Tensor, Tensor]:
    """Return the shapes alone: running the real thing on fakes would guard on M."""
    m, k = x.shape
    swizzled = sf_layout == "128x4"
    sf = ((m + 127) // 128 * 128, (k // 16 + 3) // 4 * 4) if swizzled else (m, k // 16)
    return x.new_empty(m, k // 2, dtype=torch.uint8), x.new_empty(sf, dtype=torch.float8_e4m3fn)


def fp8_quantize(x: Tensor, scaling: formats.FP8Scaling, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantise ``x`` [M, K] as :func:`fp4dispatch.formats.fp8_quantize` does, as one operator.

    Returns
    -------
    tuple of Tensor
        Data float8_e4m3fn [M, K] and the f32 scale, a copy where one was given.
    """
    _check_types("fp8_quantize", {"x": x} if scale is None else {"x": x, "scale": scale})
    data, out_scale = torch.ops.fp4dispatch.fp8_quantize.default(x, scaling, scale)
    return data, out_scale


def _fp8_quantize_impl(x: Tensor, scaling: formats.FP8Scaling, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    q = formats.fp8_quantize(x, scaling, scale)
    return q.data, q.scale if scale is None else scale.clone()


def _fp8_quantize_fake(x: Tensor, scaling: formats.FP8Scaling, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    m, k = x.shape
    blocks = ((m + 127) // 128, (k + 127) // 128)
    shape = {"tensor": (), "row": (m,), "block128": blocks, "1x128": (m, blocks[1])}[scaling]
    return x.new_empty(m, k, dtype=torch.float8_e4m3fn), x.new_empty(shape, dtype=torch.float32)


# ------------------------------------------------------------------------------------------------------------ register


def _save_shapes(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.operands = [(x.shape, x.dtype) if isinstance(x, Tensor) else x for x in inputs]


def _backward(ctx: Any, *grads: Any) -> Any:
    """Hand on to an operator that raises when it runs: ``torch.compile`` traces backwards that nobody calls."""
    grad = next(g for g in grads if g is not None)
    return tuple(
        [None] * len(operand)
        if isinstance(operand, list)
        else torch.ops.fp4dispatch.refuse_backward.default(grad, *operand)
        if needed
        else None
        for operand, needed in zip(ctx.operands, ctx.needs_input_grad, strict=True)
    )


def _refuse_backward(grad: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    raise BackwardError(
        "a gradient was asked for through fp4dispatch, which is for inference: run the model under "
        "torch.inference_mode() or torch.no_grad(), or keep this layer unquantised for training"
    )


def _define(schema: str, impl: Callable[..., Any], fake: Callable[..., Any], *, autograd: bool = True) -> None:
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    name = schema[: schema.index("(")]
    _library.impl(name, impl, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"fp4dispatch::{name}", fake, lib=_library)
    if autograd:
        torch.library.register_autograd(f"fp4dispatch::{name}", _backward, setup_context=_save_shapes, lib=_library)


_define(
    "refuse_backward(Tensor grad, SymInt[] shape, ScalarType dtype) -> Tensor",
    _refuse_backward,
    lambda grad, shape, dtype: grad.new_empty(shape, dtype=dtype),
    autograd=False,
)
_define("linear(Tensor x, Tensor[] tensors, Tensor? bias, str spec) -> Tensor", _linear_impl, _linear_fake)
_define(
    "linear_stored(Tensor x, Tensor[] tensors, Tensor[] stored, Tensor? bias, str spec) -> Tensor",
    _linear_stored_impl,
    _linear_stored_fake,
)
_define(
    "nvfp4_gemm(Tensor a, Tensor b, Tensor a_sf, Tensor b_sf, Tensor alpha, Tensor? bias, ScalarType out_dtype, "
    "str sf_layout, str? backend) -> Tensor",
    _nvfp4_gemm_impl,
    _nvfp4_gemm_check,
)
_define(
    "fp8_gemm(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? bias, ScalarType out_dtype, str scaling, "
    "str? backend) -> Tensor",
    _fp8_gemm_impl,
    _fp8_gemm_check,
)
_define(
    "nvfp4_quantize(Tensor x, Tensor global_scale, str sf_layout) -> (Tensor, Tensor)",
    _nvfp4_quantize_impl,
    _nvfp4_quantize_fake,
)
_define(
    "fp8_quantize(Tensor x, str scaling, Tensor? scale) -> (Tensor, Tensor)",
    _fp8_quantize_impl,
    _fp8_quantize_fake,
)
