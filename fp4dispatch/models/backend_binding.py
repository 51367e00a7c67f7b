"""Bind a quantised layer to backends: choose, prepare the weights, bind again when something changed."""

from __future__ import annotations

import itertools
from typing import ClassVar

import torch
from torch import Tensor, nn

from fp4dispatch.backends.base import LinearWeights
from fp4dispatch.errors import Fp4DispatchError, InputError
from fp4dispatch.machine import capture as _capture
from fp4dispatch.machine import system as _system
from fp4dispatch.machine import transforms
from fp4dispatch.models.layer_state import LayerState
from fp4dispatch.models.offloading import Offload
from fp4dispatch.models.state_loading import StateLoading
from fp4dispatch.models.stored_weights import lock
from fp4dispatch.problem import CaptureMode, Op, Problem, Scaling
from fp4dispatch.problem.decision import Decision
from fp4dispatch.run import binding, owners, routes


class BackendBinding(StateLoading):
    """The part of a quantised layer that binds it to backends."""

    op: ClassVar[Op]
    """The op of the layer's problems."""

    quantized: ClassVar[tuple[str, ...]]
    """Names of the buffers whose dtype is part of the format."""

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor | None
    bias: nn.Parameter | None
    capture: CaptureMode = "none"
    """Capture mode for which backends are chosen outside of :func:`fp4dispatch.machine.capture.mode`.
    :meth:`choose_for` sets it."""
    offload: Offload | None = None
    """Set for a layer whose tensors wait elsewhere, and come to a device for each call."""
    m_min: int = 1
    """Smallest M that the caller guarantees in a capture. For M == 0 a layer returns before any launch."""

    def bind(self, dtype: torch.dtype | None = None) -> routes.Bound:
        """Choose a backend for each range of M and prepare the weights. Host work; idempotent.

        Weights that were written since the last call are prepared again. Inside
        :func:`fp4dispatch.machine.capture.mode` this binds for that mode, beside what other calls use.

        Raises
        ------
        BackendUnsupportedError, NoBackendError, UnknownBackendError, SettingsError, InputError, CaptureError
            As ``forward``. During CUDA graph capture always CaptureError.
        """
        bound = self._bind(self.dtype if dtype is None else dtype)
        self._hold_once()
        return bound

    def _bind(self, dtype: torch.dtype, *, checked: bool = False) -> routes.Bound:
        """Bind as :meth:`bind`, and keep the stored tensors. ``checked``: the caller has checked them."""
        with transforms.left():
            self._update_layouts()
            declared = _capture.declared()
            found = self._state.bounds(declared).get(dtype)
            if found is not None:
                return found
            own = self._state.bound.get(dtype) or self._bind_own(dtype, checked)
            return own if declared is None else self._bind_declared(declared, own)

    def _bind_own(self, dtype: torch.dtype, checked: bool) -> routes.Bound:
        if dtype not in routes.OUT_DTYPE:
            raise InputError(
                f"{self._label()}: {dtype} input; need torch.bfloat16, torch.float16 or torch.float32: convert it, "
                f"e.g. x.to({self.dtype})"
            )
        if self.device.type == "meta":
            raise InputError(f"{self._label()} is on the meta device: load its weights first, e.g. load_state_dict")
        binding.refuse_in_capture(self.name)  # before the check, which synchronises
        with lock, _capture.mode("none"):
            if (found := self._state.bound.get(dtype)) is not None:  # another thread was faster
                return found
            if not self._state.bound:
                self._record_stored()
                if not checked:
                    self.check()
            return self._set_bound(self._choose(dtype, (self.capture, self.m_min)), self._state.bound)

    def _bind_as(self, choices: binding.Choices) -> None:
        """Bind with the choices of an earlier binding; with none, choose. The first call raises the errors of that."""
        self._record_stored()
        weights = self.weights(lend=False)
        found = {dtype: binding.again(weights, choice, dtype, self.bias) for dtype, choice in choices.items()}
        if not found or None in found.values():
            self._refresh()
            return
        for bound in found.values():
            assert bound is not None
            self._set_bound(bound, self._state.bound)

    def _bind_declared(self, declared: _capture.Declared, own: routes.Bound) -> routes.Bound:
        """Bind for a declared capture mode. The same choice shares spec, plans and tensors with ``own``."""
        with lock:
            bounds = self._state.graph_bound.setdefault(declared, {})
            if (found := bounds.get(own.dtype)) is not None:  # another thread was faster
                return found
            problem = self.problem(1, own.dtype)
            fresh = binding.like(own, problem, self.backend, self.name) or self._choose(own.dtype, declared)
            return self._set_bound(fresh, bounds)

    def rebind(self, dtype: torch.dtype | None = None) -> routes.Bound:
        """Choose backends again, e.g. after tuning or a new verdict, and bind.

        Drops unused layouts, unless a CUDA graph may hold their addresses. Raises as :meth:`bind`.
        """
        dtype = self.dtype if dtype is None else dtype
        self._update_layouts()
        declared = _capture.declared()
        bounds = self._state.bounds(declared)
        if dtype not in bounds:
            return self.bind(dtype)
        bound = self._replace_bound(self._choose(dtype, declared or (self.capture, self.m_min)), bounds)
        self._hold_once()
        return bound

    def _replace_bound(self, fresh: routes.Bound, bounds: dict[torch.dtype, routes.Bound]) -> routes.Bound:
        old = bounds[fresh.dtype]
        if fresh.spec is old.spec:
            old.decisions = fresh.decisions
            return old
        if old.captured:
            self._state.captured.append(old)
        self._set_bound(fresh, bounds)
        self._drop_unused()
        return fresh

    def choose_for(self, capture: CaptureMode, m_min: int = 1) -> None:
        """Set the capture mode and choose backends for it. Binds again where the choice changes. Host work.

        Backends chosen for ``full`` or ``piecewise`` also serve calls outside of CUDA graphs. To choose for graphs
        alone, see :func:`fp4dispatch.machine.capture.mode`.

        Parameters
        ----------
        capture, m_min
            As in :class:`~fp4dispatch.problem.Problem`.

        Raises
        ------
        BackendUnsupportedError, NoBackendError, UnknownBackendError, SettingsError, CaptureError
            As :meth:`bind`. The layer then keeps its mode and backends.
        """
        old = (self.capture, self.m_min)
        if old == (capture, m_min):
            return
        self.capture, self.m_min = capture, m_min
        try:
            with _capture.mode("none"):
                changed = [d for d, bound in self._state.bound.items() if not self._still_chosen(d, bound)]
                fresh = [self._choose(dtype, (capture, m_min)) for dtype in changed]
        except Fp4DispatchError:
            self.capture, self.m_min = old
            raise
        for bound in fresh:
            self._replace_bound(bound, self._state.bound)
        self._hold_once()

    def _still_chosen(self, dtype: torch.dtype, bound: routes.Bound) -> bool:
        """Whether the policy still chooses the bound backends. Needs no weights: they may be dropped."""
        return binding.still_chosen(bound, self.problem(1, dtype), self.backend, self.name)

    def problem(self, m: int, dtype: torch.dtype | None = None) -> Problem:
        """Return the problem of this layer for M tokens, with the capture mode that is declared, or its own."""
        op, scaling = self._kind()
        capture, m_min = _capture.declared() or (self.capture, self.m_min)
        out_dtype = routes.OUT_DTYPE[self.dtype if dtype is None else dtype]
        n, k = self.out_features, self.in_features
        return Problem(op, m, n, k, self.activation, scaling, out_dtype, self.bias is not None, capture, m_min)

    def _choose(self, dtype: torch.dtype, mode: tuple[CaptureMode, int]) -> routes.Bound:
        binding.refuse_in_capture(self.name)  # before weights are unpacked for it
        return binding.bind(
            self.weights(lend=False),
            dtype=dtype,
            bias=self.bias,
            activation=self.activation,
            backend=self.backend,
            layer=self.name,
            prepared=self._state.prepared,
            capture_mode=mode[0],
            m_min=mode[1],
        )

    def _set_bound(self, bound: routes.Bound, bounds: dict[torch.dtype, routes.Bound]) -> routes.Bound:
        names = [self._buffer_of(t) for t in bound.tensors]
        if bounds is self._state.bound:  # compiled calls pass these, and their operator finds what is bound for a mode
            self._state.names[bound.dtype] = (names, [], bound.spec.text)
        bounds[bound.dtype] = bound
        self._record(self._state.seen)
        return bound

    def _drop_unused(self) -> None:
        """Drop layouts and buffers that no bound dtype uses."""
        state = self._state
        used = {id(tensor) for bound in state.every_bound() for tensor in bound.tensors}
        if state.dropped and any(id(tensor) not in used for tensor in state.prepared[state.dropped].tensors):
            self._restore()
        for name in [name for name in self._buffers if name.startswith("layout")]:
            if id(self._buffers[name]) not in used:
                delattr(self, name)
        state.prepared = {
            layout: prepared
            for layout, prepared in state.prepared.items()
            if all(id(tensor) in used for tensor in prepared.tensors)
        }

    def decisions(self) -> tuple[tuple[int, Decision], ...]:
        """Return (largest M, Decision) for each range of M, for ``self.dtype``, in the mode that is declared."""
        return self.bind().decisions

    def _buffer_of(self, tensor: Tensor) -> str:
        for name, buffer in self._buffers.items():
            if buffer is tensor:
                return name
        name = next(name for i in itertools.count() if (name := f"layout{i}") not in self._buffers)
        self.register_buffer(name, tensor, persistent=False)
        return name

    def _forget(self) -> None:
        """Drop every backend layout."""
        self._restore()
        for name in [name for name in self._buffers if name.startswith("layout")]:
            delattr(self, name)
        owners.forget(self, self._state.keys)
        self._state = LayerState()

    def _refresh(self, *, checked: bool = False) -> None:
        """Bind again if the layer is on its final device: on a GPU, or on the CPU of a machine without GPU.

        ``checked``: the caller has checked the stored tensors. Errors are dropped here, and the first call raises them.
        So moving or loading a model always completes.
        """
        self._forget()
        if self.device.type == "cuda" or (self.device.type == "cpu" and not _system.current().gpus):
            try:
                with _capture.mode("none"):
                    self._bind(self.dtype, checked=checked)
                    self._hold_once()
            except Fp4DispatchError:
                self._forget()

    def weights(self, *, lend: bool = True) -> LinearWeights:
        """Return the canonical tensors as :class:`LinearWeights`. Copies only weights that the layer dropped.

        ``lend=False``: the caller will not write to them. The layer then does not keep such copies.
        """
        raise NotImplementedError

    def _kind(self) -> tuple[Op, Scaling]:
        """Return op and scaling of the layer's problems."""
        raise NotImplementedError
