"""The operators of a layer: ``linear``, ``linear_stored`` and ``swiglu_linear``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fp4dispatch.backends.own import swiglu
from fp4dispatch.errors import InputError
from fp4dispatch.formats.checks import check_tensor
from fp4dispatch.machine import capture
from fp4dispatch.run import owners, routes
from fp4dispatch.run.operands import check_bias, check_types
from fp4dispatch.run.register import batch_rows, define, refuse_gradients
from fp4dispatch.run.routes import OUT_DTYPE, Bound, LayerSpec


def linear(x: Tensor, tensors: Sequence[Tensor], bias: Tensor | None, spec: str) -> Tensor:
    """Run a linear layer: the operator behind ``FP4Linear`` and ``FP8Linear``.

    Parameters
    ----------
    x
        float32, bfloat16 or float16 [..., K]; any strides.
    tensors
        The prepared weights of all backends of the spec, in its order. On a GPU two calls wait for the stream:
        the first one with these tensors, and the first one after a write that torch counts (``Tensor._version``).
        With PDL, kernels read weights before earlier kernels of the stream have finished.
    bias
        [N], floating point, or None.
    spec
        Text of a :class:`~fp4dispatch.run.routes.LayerSpec`.

    Returns
    -------
    Tensor
        [..., N] in the dtype of ``x``. For an empty ``x`` it is empty, and nothing is launched.

    Raises
    ------
    InputError
        For a wrong dtype, shape or device.
    CaptureError
        During CUDA graph capture, if there is no plan for this M, or the tensors are new or were written. Otherwise
        the call is safe to capture.
    """
    check_types("linear", {"x": x} | {f"tensors[{i}]": tensor for i, tensor in enumerate(tensors)}, bias)
    result: Tensor = torch.ops.fp4dispatch.linear.default(x, list(tensors), bias, spec)
    return result


def linear_stored(
    x: Tensor, tensors: Sequence[Tensor], stored: Sequence[Tensor], bias: Tensor | None, spec: str
) -> Tensor:
    """Run a layer in a compiled graph: as :func:`linear`, but writes to the layer's stored tensors take effect.

    Parameters
    ----------
    x, tensors, bias, spec
        As of :func:`linear`.
    stored
        The layer's stored tensors. If they were written since, the layer prepares ``tensors`` from them again.

    Raises
    ------
    InputError
        As :func:`linear`, and if no layer stores these tensors.
    CaptureError
        As :func:`linear`, and if weights were written and a CUDA graph is being captured.
    """
    refuse_gradients((x, bias))
    result: Tensor = torch.ops.fp4dispatch.linear_stored.default(x, list(tensors), list(stored), bias, spec)
    return result


def swiglu_linear(
    gate_up: Tensor, tensors: Sequence[Tensor], stored: Sequence[Tensor], bias: Tensor | None, spec: str
) -> Tensor:
    """Run a layer on ``silu(gate) * up``: the operator behind :meth:`QuantizedLinear.swiglu`.

    The bits are those of :func:`linear_stored` on ``torch.nn.functional.silu(gate) * up``. Where the route for M takes
    FP8 activations (w4a8, w8a8, and on FP8 weights cutlass and cublaslt), one kernel does both operations and
    quantises. Before others one kernel does both. Where these cannot be compiled, and in float32, torch's operations
    run.

    Parameters
    ----------
    gate_up
        float32, bfloat16 or float16 [..., 2K]: K elements of the gate, then K of up; any strides.
    tensors, stored, bias, spec
        As of :func:`linear_stored`.

    Returns
    -------
    Tensor
        [..., N] in the dtype of ``gate_up``. For an empty ``gate_up`` it is empty, and nothing is launched.

    Raises
    ------
    InputError
        As :func:`linear_stored`.
    CaptureError
        As :func:`linear_stored`, and where the SwiGLU kernel would have to be loaded: the first such call on a GPU must
        be outside of a capture. Otherwise the call is safe to capture.
    """
    check_types("swiglu_linear", {"gate_up": gate_up} | {f"tensors[{i}]": t for i, t in enumerate(tensors)}, bias)
    result: Tensor = torch.ops.fp4dispatch.swiglu_linear.default(gate_up, list(tensors), list(stored), bias, spec)
    return result


def run_linear(x: Tensor, tensors: Sequence[Tensor], bias: Tensor | None, spec: LayerSpec) -> Tensor:
    """Run as :func:`linear` does, without the dispatch of the torch operator."""
    _check_linear(x, tensors, bias, spec)
    lead = x.shape[:-1]
    m = math.prod(lead)
    if not m:
        return x.new_empty(*lead, spec.n)
    rows = x.reshape(m, spec.k)
    if not rows.is_contiguous():
        rows = rows.contiguous()
    ready, prepared = spec.launch(m, x.dtype, bias is not None, tuple(tensors))
    out = routes.launch_into_new(ready.backend, ready.plan, prepared, rows, spec.n, bias)
    return out.reshape(*lead, spec.n)


def run_bound(x: Tensor, bound: Bound, bias: Tensor | None) -> Tensor:
    """Run a bound layer as :func:`linear` does, without the torch operator. Later calls for this M are fast."""
    spec = bound.spec
    _check_linear(x, bound.tensors, bias, spec)
    lead = x.shape[:-1]
    m = math.prod(lead)
    if not m:
        return x.new_empty(*lead, spec.n)
    rows = x.reshape(m, spec.k)
    if not rows.is_contiguous():
        rows = rows.contiguous()
    backend, plan, prepared = bound.launch(m, bias is not None)
    if bound.cuda and capture.stream_is_capturing():
        bound.captured = True
    if bias is not bound.bias and (bias is None) == (bound.bias is None):
        bound.bias = bias  # a new bias, checked above
    out = routes.launch_into_new(backend, plan, prepared, rows, spec.n, bias)
    return out.reshape(*lead, spec.n)


def run_swiglu(gate_up: Tensor, bound: Bound, bias: Tensor | None) -> Tensor:
    """Run a bound layer as :func:`swiglu_linear` does, without the torch operator."""
    spec = bound.spec
    _check_swiglu(gate_up, bound.tensors, bias, spec)
    lead = gate_up.shape[:-1]
    m = math.prod(lead)
    if not m:
        return gate_up.new_empty(*lead, spec.n)
    gated = bound.swiglu(m, bias is not None)
    if gated is None:
        return run_bound(swiglu.product(gate_up), bound, bias)
    if bound.cuda and capture.stream_is_capturing():
        bound.captured = True
    out = gated.into_new(gate_up.reshape(m, 2 * spec.k), spec.n, bias)
    return out.reshape(*lead, spec.n)


def _check_linear(x: Tensor, tensors: Sequence[Tensor], bias: Tensor | None, spec: LayerSpec) -> None:
    check_tensor("linear: x", x)
    k = spec.k
    if x.dtype not in OUT_DTYPE or x.ndim == 0 or x.shape[-1] != k or not tensors or x.device != tensors[0].device:
        raise _unfit("linear: x", x, k, "the layer's in_features", tensors)
    check_bias("linear", bias, spec.n, x.device)


def _check_swiglu(x: Tensor, tensors: Sequence[Tensor], bias: Tensor | None, spec: LayerSpec) -> None:
    check_tensor("swiglu_linear: gate_up", x)
    k = 2 * spec.k
    if x.dtype not in OUT_DTYPE or x.ndim == 0 or x.shape[-1] != k or not tensors or x.device != tensors[0].device:
        raise _unfit("swiglu_linear: gate_up", x, k, "twice the layer's in_features", tensors)
    check_bias("swiglu_linear", bias, spec.n, x.device)


def _unfit(what: str, x: Tensor, k: int, k_is: str, tensors: Sequence[Tensor]) -> InputError:
    """Return the error for an input whose dtype, shape or device does not fit the layer."""
    if x.dtype not in OUT_DTYPE:
        return InputError(f"{what} is {x.dtype}; need torch.bfloat16, torch.float16 or torch.float32: convert it")
    if x.ndim == 0 or x.shape[-1] != k:
        return InputError(f"{what} has shape {list(x.shape)}; need [..., {k}], {k_is}")
    where = tensors[0].device if tensors else "no device"
    return InputError(f"{what} is on {x.device}, the weights on {where}: move one with .to(device)")


_awaited: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Packed weight -> its ``_version`` when the stream was last synchronised. For callers that hold no layer."""


def _await_writes(tensors: Sequence[Tensor]) -> None:
    """Synchronise the stream if a packed weight is new or was written: PDL kernels read weights before they wait."""
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


def _swiglu_linear_impl(
    gate_up: Tensor, tensors: list[Tensor], stored: list[Tensor], bias: Tensor | None, spec: str
) -> Tensor:
    return run_swiglu(gate_up, owners.bound_for(gate_up.dtype, spec, tensors, stored), bias)


def _swiglu_linear_fake(
    gate_up: Tensor, tensors: list[Tensor], stored: list[Tensor], bias: Tensor | None, spec: str
) -> Tensor:
    layer = LayerSpec.parse(spec)
    _check_swiglu(gate_up, tensors, bias, layer)
    return gate_up.new_empty(*gate_up.shape[:-1], layer.n)


def _linear_stored_fake(
    x: Tensor, tensors: list[Tensor], stored: list[Tensor], bias: Tensor | None, spec: str
) -> Tensor:
    return _linear_fake(x, tensors, bias, spec)


def _linear_fake(x: Tensor, tensors: list[Tensor], bias: Tensor | None, spec: str) -> Tensor:
    layer = LayerSpec.parse(spec)
    _check_linear(x, tensors, bias, layer)
    return x.new_empty(*x.shape[:-1], layer.n)


define("linear(Tensor x, Tensor[] tensors, Tensor? bias, str spec) -> Tensor", _linear_impl, _linear_fake)

define(
    "linear_stored(Tensor x, Tensor[] tensors, Tensor[] stored, Tensor? bias, str spec) -> Tensor",
    _linear_stored_impl,
    _linear_stored_fake,
)

define(
    "swiglu_linear(Tensor gate_up, Tensor[] tensors, Tensor[] stored, Tensor? bias, str spec) -> Tensor",
    _swiglu_linear_impl,
    _swiglu_linear_fake,
)

for _name in ("linear", "linear_stored", "swiglu_linear"):
    batch_rows(_name)
