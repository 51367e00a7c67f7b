"""The base of ``FP4Linear`` and ``FP8Linear``: forward, moving, pickling.

The canonical checkpoint tensors are buffers with ModelOpt's names. They are the ``state_dict``, which therefore works
with any backend and machine. Backends prepare non-persistent buffers ``layout0``, ``layout1``, ... from them. A tensor
that a backend uses unchanged gets no second buffer. Layouts are rebuilt after a move and a load. If a layout holds all
bits of the canonical tensors, the layer drops these (:mod:`fp4dispatch.models.compact_weights`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar

import torch
from torch import Tensor, nn

from fp4dispatch.backends import activations
from fp4dispatch.backends.own import swiglu
from fp4dispatch.dispatch.request import check_request
from fp4dispatch.errors import FormatError, InputError
from fp4dispatch.formats.checks import check_tensor
from fp4dispatch.machine import capture, transforms
from fp4dispatch.models.backend_binding import BackendBinding
from fp4dispatch.models.layer_state import PICKLED_BEFORE, LayerState
from fp4dispatch.problem import ACTIVATIONS, Activation, one_of
from fp4dispatch.run import ops, routes
from fp4dispatch.run.register import gradient_error

_Self = TypeVar("_Self", bound="QuantizedLinear")


class LayerOptions(TypedDict, total=False):
    """Options that layers of all formats have, as parameters of :class:`QuantizedLinear`."""

    activation: Activation
    backend: str | None
    dtype: torch.dtype
    name: str
    keep_stored: bool


class QuantizedLinear(BackendBinding):
    """Base class of ``FP4Linear`` and ``FP8Linear``. Do not use it directly.

    Parameters
    ----------
    in_features, out_features
        K and N.
    bias
        Whether there is a bias (a parameter of ``dtype`` without gradient).
    activation
        Pins the activation format (``nvfp4`` = w4a4, ``fp8``, ``bf16`` = weight-only). ``any``: the policy chooses.
    backend
        Pins the backend. None: the environment or the policy chooses.
    dtype
        Dtype of the bias, and the input and output dtype for which backends are chosen before the first call. Calls
        with another supported dtype work too. ``.half()`` and ``.to(torch.bfloat16)`` change it; they do not convert
        quantised tensors and scales.
    device
        Device of the tensors; ``meta`` allocates nothing.
    name
        Name of the layer in messages.
    keep_stored
        Whether the layer keeps its stored tensors beside a layout that holds the same bits (NVFP4 on ``w4a16`` and
        ``w4a8``): 4.5 bits a weight more. By default it drops them when it is bound, and unpacks them for who reads
        them (:mod:`fp4dispatch.models.compact_weights`).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        activation: Activation = "any",
        backend: str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        name: str = "",
        keep_stored: bool = False,
    ) -> None:
        super().__init__()
        self._state = LayerState()
        one_of("activation", activation, ACTIVATIONS)
        if dtype not in routes.OUT_DTYPE:
            raise InputError(f"dtype={dtype}; need torch.bfloat16, torch.float16 or torch.float32")
        if not all(isinstance(size, int) and not isinstance(size, bool) for size in (in_features, out_features)):
            raise InputError(f"in_features={in_features!r}, out_features={out_features!r}; both need to be int")
        check_request(self.op, backend)
        if in_features < 1 or out_features < 1:
            raise InputError(f"in_features={in_features}, out_features={out_features}; both need to be at least 1")
        self.in_features, self.out_features = in_features, out_features
        self.activation, self.backend, self.dtype, self.name = activation, backend, dtype, name
        self.keep_stored = keep_stored
        zeros = torch.zeros(out_features, dtype=dtype, device=device) if bias else None
        self.register_parameter("bias", None if zeros is None else nn.Parameter(zeros, requires_grad=False))
        self.register_buffer("input_scale", None)

    # --------------------------------------------------------------------------------------------------------- forward

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x @ W^T + bias``.

        Parameters
        ----------
        x
            float32, bfloat16 or float16 [..., K] on the layer's device, any strides and alignment. Under autocast it is
            cast first.

        Returns
        -------
        Tensor
            [..., N], contiguous, in the dtype of ``x``. For an empty ``x`` it is empty, and nothing is launched.

        Raises
        ------
        InputError
            For a wrong dtype, shape or device, before any launch.
        CaptureError
            During CUDA graph capture, if there is no plan for this number of tokens: call :func:`warmup` before.
            Otherwise the call is safe to capture.
        CaptureDeniedError
            Inside :func:`fp4dispatch.machine.capture.mode`, if a rule about capture forbids the named backend.
        BackendUnsupportedError, NoBackendError
            If no backend, or not the named one, can run this layer.
        """
        if _dynamo():
            return self._traced(x)
        # The eager fast path: a plain input with an M that ran before goes directly to its kernel. Host time decides
        # the speed of small layers. All other inputs go to _call, which also raises for wrong ones.
        try:
            bound = self._state.bound.get(x.dtype)
            if bound is not None and type(x) is Tensor:
                shape, spec = x.shape, bound.spec
                m = shape[0] if len(shape) == 2 else shape.numel() // spec.k
                bias = self._parameters["bias"]
                ready = bound.ready.get(m)
                if ready is not None and shape[-1] == spec.k and self._taken(x, bound, bias):
                    rows = bound.rows.get(m, m)
                    out = x.new_empty(rows, spec.n)
                    ready[0](x if len(shape) == 2 else x.view(m, spec.k), out, bias)
                    if rows != m:
                        out.resize_(m, spec.n)
                    return out if len(shape) == 2 else out.view(*shape[:-1], spec.n)
        except (AttributeError, RuntimeError):
            check_tensor(f"{self._label()}: the input", x)  # None and sparse tensors get our error
            raise
        except IndexError:  # no dimension: _call says what is needed
            pass
        return self._call(x)

    def _taken(self, x: Tensor, bound: routes.Bound, bias: Tensor | None) -> bool:
        """Whether a ready launch takes a plain tensor and the bias as they are, and nothing has changed since."""
        return (
            not _any_autocast()
            and not _transforms_active()  # before the rest: tensors may have no address
            and not _wants_grad(x)
            and bias is bound.bias
            and (x.is_cuda and x.get_device() == bound.index if bound.cuda else x.is_cpu)
            and x.is_contiguous()
            and not x.data_ptr() % 16
            and (bias is None or (bias.dtype == x.dtype and bias.is_contiguous() and not _wants_grad(bias)))
            and self._state.unchanged(self._buffers)
            and not (capture.modes_open or (bound.cuda and capture.stream_is_capturing()))
        )

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """Return ``layer(silu(gate) * up)``, with the same bits, for the down projection of an MLP.

        For numbers of tokens that ``w4a8``, ``w8a8``, ``cutlass`` (FP8) or ``cublaslt`` (FP8) serves, one kernel
        multiplies and quantises. Before others one kernel multiplies. Where these cannot be compiled, and in float32,
        torch's operations run. ``torch.compile`` sees one operator. Hooks of the layer do not run: this is not a call
        of it.

        Parameters
        ----------
        gate_up
            float32, bfloat16 or float16 [..., 2K] on the layer's device: K elements of the gate, then K of up, as
            a fused ``gate_up_proj`` returns them. Any strides and alignment. Under autocast the product is cast.

        Returns
        -------
        Tensor
            [..., N], contiguous, in the dtype of ``gate_up``. For an empty one it is empty, and nothing is launched.

        Raises
        ------
        InputError
            For a wrong dtype, shape or device, before any launch.
        CaptureError
            As :meth:`forward`, and during capture if the kernel is not loaded yet: call this once before. Otherwise the
            call is safe to capture.
        CaptureDeniedError, BackendUnsupportedError, NoBackendError
            As :meth:`forward`.
        """
        if not _dynamo() and type(gate_up) is Tensor:
            bound, shape = self._state.bound.get(gate_up.dtype), gate_up.shape
            k = 2 * self.in_features
            if bound is not None and shape[-1:] == (k,):  # host time decides the speed of few tokens
                m = gate_up.numel() // k
                if m in bound.apart and not self._followed(gate_up):
                    return self.forward(swiglu.product(gate_up))
                gated, bias = bound.gated.get(m), self._parameters["bias"]
                plain = type(self).forward is QuantizedLinear.forward
                if gated is not None and plain and self._taken(gate_up, bound, bias):
                    out = gated.into_new(gate_up.view(m, k), bound.spec.n, bias)
                    return out.view(*shape[:-1], bound.spec.n)
        check_tensor(f"{self._label()}: gate_up", gate_up)
        if gate_up.ndim == 0 or gate_up.shape[-1] != 2 * self.in_features:
            raise InputError(
                f"{self._label()}: gate_up has shape {list(gate_up.shape)}; need [..., {2 * self.in_features}], K "
                f"elements of the gate and K of up, K={self.in_features}"
            )
        # Layers of a rank add up behind the GEMM, and autocast casts the product.
        if type(self).forward is not QuantizedLinear.forward or _autocast_dtype(gate_up) != gate_up.dtype:
            return self.forward(activations.swiglu(gate_up))
        if _dynamo() or torch.compiler.is_compiling():
            return self._traced(gate_up, swiglu=True)
        bound = self.bound_to(gate_up.dtype)
        if self._state.due:
            self._hold_once()
        if self._followed(gate_up):
            return ops.swiglu_linear(gate_up, bound.tensors, self._stored(), self.bias, bound.spec.text)
        m = gate_up.shape[:-1].numel()
        if m and bound.swiglu(m, self.bias is not None) is None:
            return self.forward(swiglu.product(gate_up))
        return ops.run_swiglu(gate_up, bound, self.bias)

    def _call(self, x: Tensor) -> Tensor:
        """Run eagerly, with all checks; bind and plan if needed."""
        check_tensor(f"{self._label()}: the input", x)
        if torch.compiler.is_compiling():  # a tracer other than Dynamo
            return self._traced(x)
        x = _autocast(x)
        bound = self.bound_to(x.dtype)
        if self._state.due:
            self._hold_once()
        if self._followed(x):
            return ops.linear_stored(x, bound.tensors, self._stored(), self.bias, bound.spec.text)
        return ops.run_bound(x, bound, self.bias)

    def _followed(self, x: Tensor) -> bool:
        """Whether torch follows what is done with a tensor. It sees the operator, and would not see a bare launch.

        A gradient is refused by the operator, with a reason.
        """
        bias = self._parameters["bias"]
        return (
            type(x) is not Tensor or _transforms_active() or _wants_grad(x) or (bias is not None and _wants_grad(bias))
        )

    def _traced(self, x: Tensor, *, swiglu: bool = False) -> Tensor:
        """Run under ``torch.compile`` and ``torch.export``: all tensors are inputs of the graph.

        The operator of a compiled call also gets the stored tensors, so it can detect writes to them. An exported
        program may run without this layer: there, weights are constants.
        """
        x = _autocast(x)
        self._ensure(x.dtype)
        names, stored, spec = self._state.names[x.dtype]
        tensors = [getattr(self, name) for name in names]
        if _exporting():
            x = activations.swiglu(x) if swiglu else x
            return torch.ops.fp4dispatch.linear.default(x, tensors, self.bias, spec)  # type: ignore[no-any-return]
        kept = [getattr(self, name) for name in stored]
        if swiglu:
            return torch.ops.fp4dispatch.swiglu_linear.default(x, tensors, kept, self.bias, spec)  # type: ignore[no-any-return]
        return torch.ops.fp4dispatch.linear_stored.default(x, tensors, kept, self.bias, spec)  # type: ignore[no-any-return]

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _ensure(self, dtype: torch.dtype) -> bool:
        """Bind outside the trace of ``torch.compile``. Attributes that are read after this call get guards as usual.

        A compiled call passes the tensors of the layer's own mode. Its operator asks which mode is declared. Torch
        would drop forward gradients there, so they are refused here, where their level is known.
        """
        if transforms.forward_gradients():
            raise gradient_error()
        with capture.mode("none"):
            return bool(self._bind(dtype))  # drops no tensor that the trace may have seen

    # --------------------------------------------------------------------------------------------------------- weights

    def check(self) -> None:
        """Validate the canonical tensors; synchronises.

        Raises
        ------
        InputError, FormatError
            As :func:`fp4dispatch.formats.check_nvfp4` and :func:`fp4dispatch.formats.check_fp8`.
        """
        raise NotImplementedError

    def nbytes(self) -> int:
        """Return the bytes of all tensors of the layer, with backend layouts. Shared memory counts once."""
        tensors = [*self._parameters.values(), *self._buffers.values()]
        unique = {t.data_ptr() or id(t): t.numel() * t.element_size() for t in tensors[::-1] if t is not None}
        return sum(unique.values())

    def _fill(self: _Self, tensors: Mapping[str, Tensor | None], bias: Tensor | None) -> _Self:
        """Set the canonical tensors and the bias, validate them and bind."""
        device = tensors["weight"].device if tensors["weight"] is not None else None
        for name, tensor in tensors.items():
            setattr(self, name, tensor)
        if bias is not None:
            check_tensor(f"{self._label()}: bias", bias)
            if tuple(bias.shape) != (self.out_features,) or bias.dtype not in routes.OUT_DTYPE:
                raise InputError(
                    f"{self._label()}: bias is {bias.dtype} {list(bias.shape)}; "
                    f"need a floating-point [{self.out_features}]"
                )
            self.bias = nn.Parameter(bias.detach().to(device), requires_grad=False)
        if not self.weight.is_meta:
            self.check()
            self._refresh(checked=True)
        return self

    def _check_input_scale(self) -> None:
        scale = self.input_scale
        if scale is None:
            return
        if scale.dtype != torch.float32 or scale.numel() != 1 or scale.device != self.weight.device:
            raise InputError(
                f"{self._label()}: input_scale is {scale.dtype} {list(scale.shape)} on {scale.device}; need "
                f"torch.float32 with one element on {self.weight.device}"
            )
        value = float(scale)
        if not 0 < value < float("inf"):
            raise FormatError(
                f"{self._label()}: input_scale is {value}; need finite and positive: export the checkpoint again"
            )

    def _label(self) -> str:
        return f'{type(self).__name__} "{self.name}"' if self.name else type(self).__name__

    # ------------------------------------------------------------------------------------------------ nn.Module's hooks

    def _apply(self: _Self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Self:
        """Move all tensors. Convert only the bias, and only to a supported dtype: quantised tensors keep theirs."""
        self._forget()
        probe = fn(torch.empty(0, dtype=self.dtype, device=self.weight.device))
        if probe.dtype in routes.OUT_DTYPE:
            self.dtype = probe.dtype
        bias = self._parameters.get("bias") if probe.dtype in routes.OUT_DTYPE else None
        super()._apply(lambda t: fn(t) if t is bias else _move(fn, t), recurse)  # type: ignore[no-untyped-call, arg-type]
        self._refresh()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return the state with canonical tensors only; e4m3 as uint8, as pickle cannot load float8 (torch 2.13)."""
        with self._restored():
            buffers = {k: v for k, v in self._buffers.items() if not k.startswith("layout")}
        e4m3 = [k for k, v in buffers.items() if v is not None and v.dtype == torch.float8_e4m3fn]
        buffers |= {k: buffers[k].view(torch.uint8) for k in e4m3}  # type: ignore[union-attr]
        state = {k: v for k, v in self.__dict__.items() if k != "_state"}
        return state | {"_buffers": buffers, "_e4m3": e4m3, "_non_persistent_buffers_set": set()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        buffers = state["_buffers"] | {k: state["_buffers"][k].view(torch.float8_e4m3fn) for k in state["_e4m3"]}
        kept = {k: v for k, v in state.items() if k != "_e4m3" and k not in PICKLED_BEFORE}
        super().__setstate__(kept | {"_buffers": buffers, "_state": LayerState()})  # type: ignore[no-untyped-call]
        self._refresh()

    def extra_repr(self) -> str:
        """Show sizes, format and backend."""
        return ", ".join(
            [
                f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}",
                *self._format_repr(),
                f"backend={self.backend_text()}",
            ]
        )

    def _format_repr(self) -> Sequence[str]:
        return (f"activation={self.activation}",)

    def backend_text(self) -> str:
        """Return the chosen backends as text, e.g. ``w4a16 (bf16) up to M=64, then cutlass (nvfp4)``.

        Other choices for graphs follow in brackets.
        """
        bound = self._state.bound.get(self.dtype) or next(iter(self._state.bound.values()), None)
        if bound is None:
            return "not chosen yet"
        text = _routes_text(bound)
        for declared, bounds in self._state.graph_bound.items():
            other = bounds.get(bound.dtype)
            if other is not None and (shown := _routes_text(other)) != text:
                text += f" [{declared.capture} graphs from M={declared.smallest_m}: {shown}]"
        return text


def _routes_text(bound: routes.Bound) -> str:
    parts = [f"{route.backend} ({route.activation})" for route in bound.spec.routes]
    limits = [f" up to M={route.m_max}" for route in bound.spec.routes[:-1]]
    return ", then ".join(part + limit for part, limit in zip(parts, [*limits, ""], strict=True))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _exporting() -> bool:
    """Whether ``torch.export`` traces. Before torch 2.12 Dynamo replaces the direct call by True (pytorch#176347)."""
    return bool(torch.compiler.is_exporting())


_transforms_active = transforms.active
_any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
_dynamo: Callable[[], bool] = torch.compiler.is_dynamo_compiling


def _autocast(x: Tensor) -> Tensor:
    """Cast to the dtype of ``torch.autocast``. As for ``nn.Linear``, float64 and non-float tensors are not cast."""
    dtype = _autocast_dtype(x)
    return x if dtype == x.dtype else x.to(dtype)


def _autocast_dtype(x: Tensor) -> torch.dtype:
    eligible = x.is_floating_point() and x.dtype != torch.float64 and x.device.type in ("cuda", "cpu")
    if eligible and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def _wants_grad(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def _move(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Apply ``fn``. If it would convert the dtype, only move the tensor to its target device."""
    target = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
    if target.dtype == tensor.dtype:
        return fn(tensor)
    return torch.empty_like(tensor, device=target.device) if tensor.is_meta else tensor.to(target.device)
