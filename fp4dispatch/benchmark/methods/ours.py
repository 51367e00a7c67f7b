"""Our methods: ``FP4Linear`` and ``FP8Linear`` with the policy's backends, and the raw operators."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fp4dispatch import formats
from fp4dispatch.backends import registry
from fp4dispatch.backends.base import LinearWeights
from fp4dispatch.backends.own.compiled import CompiledBackend
from fp4dispatch.benchmark.methods.base import Card, Launch, Method, Prepared
from fp4dispatch.benchmark.problems.operands import Entering, Format, Operands
from fp4dispatch.machine import system
from fp4dispatch.models.linear import FP4Linear, FP8Linear
from fp4dispatch.models.quantized_linear import QuantizedLinear
from fp4dispatch.problem import Activation, Op, Problem
from fp4dispatch.run import ops
from fp4dispatch.run.routes import Bound


def methods() -> tuple[Method, ...]:
    """Return every method of this package."""
    layers = [Layer("nvfp4", pin) for pin in (None, "bf16", "fp8")]
    layers += [Layer("nvfp4", None, "w4a8_expanded", copied="row")]
    layers += [Layer(fmt, None) for fmt in ("tensor", "row", "block128")]
    return (*layers, RawFp8("tensor"), RawFp8("row"))


def paths() -> tuple[Method, ...]:
    """Return the layers with each of their backends fixed, beside :func:`methods`. CUTLASS compiles for minutes."""
    found = [Layer(fmt, None, name) for fmt, names in _PATHS.items() for name in names]
    for layer in found:
        layer.slow_start = layer.backend == "cutlass"
    return tuple(found)


_PATHS: dict[Format, tuple[str, ...]] = {
    "row": ("w8a16", "w8a8", "cublaslt", "cutlass"),
    "block128": ("w8a8", "cublaslt", "cutlass"),
}


class Layer(Method):
    """A layer as ``replace_linears`` makes it: the policy chooses by M, activation quantisation is included.

    Each call uses the operator behind the layer, on rotating copies of the layer's prepared tensors. ``pin`` fixes the
    activation format. ``backend`` fixes the backend for any M. ``copied`` is the format of the copy of the weights that
    this backend makes.
    """

    ours = True

    def __init__(
        self, fmt: Format, pin: Activation | None, backend: str | None = None, *, copied: Format | None = None
    ) -> None:
        self.format, self.pin, self.backend, self.copied = fmt, pin, backend, copied
        kind = "FP4Linear" if fmt == "nvfp4" else f"FP8Linear/{fmt}"
        named = backend or pin
        self.name = kind + (f"/{named}" if named else "")
        self.what = f"{kind}, " + (f"activation={pin!r}" if pin else "the policy's choice")
        if backend:
            self.what = f"{kind}, backend={backend!r} for any number of tokens"

    def lacks(self, card: Card) -> str:
        """Return what the fixed backend lacks here; empty without one, as the reference backend runs anywhere."""
        if self.backend is None:
            return ""
        if card.arch is None:
            return "needs a CUDA GPU"
        backend = registry.instance(self.backend)
        op: Op = "nvfp4_gemm" if self.format == "nvfp4" else "fp8_gemm"
        assert self.format != "bf16"
        problem = Problem(op, 16, 4096, 4096, backend.activations[op][0], self.format)
        return "; ".join(reason.text for reason in backend.supports(problem, system.current()))

    def layer(self, operands: Operands) -> QuantizedLinear:
        """Make the layer."""
        weights = operands.weights(self.format)
        activation = self.pin or "any"
        if self.format == "nvfp4":
            return FP4Linear.from_weights(weights, activation=activation, backend=self.backend)
        return FP8Linear.from_weights(weights, activation=activation, backend=self.backend)

    def prepare(self, operands: Operands, copies: int, card: Card) -> Prepared:
        """Bind the layer and clone what it prepared."""
        bound = self.layer(operands).bind(torch.bfloat16)
        tensors = [bound.tensors, *(tuple(t.clone() for t in bound.tensors) for _ in range(copies - 1))]

        def at(x: Tensor) -> Launch:
            backend, activation = chosen(bound, x.shape[0])
            entering = _entering(self.format, activation)
            call = lambda i: ops.run_linear(x, tensors[i], None, bound.spec)  # noqa: E731
            return Launch(call, entering, f"{backend} ({activation})", ran=launched(bound, x.shape[0]))

        return at


class RawFp8(Method):
    """``fp4dispatch.fp8_gemm`` on an activation that is quantised already."""

    ours = True
    takes = "fp8"

    def __init__(self, fmt: Literal["tensor", "row"]) -> None:
        self.format, self.scaling = fmt, fmt
        self.name = f"fp8_gemm/{fmt}"
        self.what = f"fp4dispatch.fp8_gemm, one scale a {fmt}, the policy's choice"

    def lacks(self, card: Card) -> str:
        """Return an empty text: the reference backend runs anywhere."""
        return ""

    def prepare(self, operands: Operands, copies: int, card: Card) -> Prepared:
        """Clone the weight."""
        w = operands.weights(self.format)
        weights = [w.weight, *(w.weight.clone() for _ in range(copies - 1))]

        def at(x: Tensor) -> Launch:
            a = formats.fp8_quantize(x, self.scaling)

            def call(i: int) -> Tensor:
                return ops.fp8_gemm(a.data, weights[i], a.scale, w.scale, scaling=w.scaling)

            return Launch(call, self.scaling, _raw_backend(w, x.shape[0], x.device))

        return at


def chosen(bound: Bound, m: int) -> tuple[str, Activation]:
    """Return the backend that a bound layer runs M tokens on, and the activation format there."""
    route = next((route for route in bound.spec.routes if m <= route.m_max), bound.spec.routes[-1])
    return route.backend, route.activation


def launched(bound: Bound, m: int) -> str:
    """Return the launch of our kernels that a bound layer runs M tokens with; empty on other backends."""
    found, prepared = bound.spec.launch(m, bound.dtype, False, bound.tensors)
    backend = registry.instance(found.plan.backend)
    if not isinstance(backend, CompiledBackend):
        return ""
    launch = backend.launch_for(found.plan.problem, prepared)
    return "" if launch is None else f"{backend.name} {launch}"


def _raw_backend(w: LinearWeights, m: int, device: torch.device) -> str:
    """Return the policy's choice for a raw GEMM."""
    from fp4dispatch.dispatch import choose

    problem = Problem(w.op, m, w.n, w.k, "fp8", w.scaling, raw=True)
    decision = choose.select(problem, gpu=device.index if device.type == "cuda" else None)
    return f"{decision.backend} ({decision.activation})"


def _entering(fmt: Format, activation: Activation) -> Entering:
    """Return the format in which a layer without a static input scale multiplies an activation."""
    if activation == "fp8":
        return "1x128" if fmt == "block128" else "row"
    return "nvfp4" if activation == "nvfp4" else "bf16"
