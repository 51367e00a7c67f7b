"""Bind a quantised layer to backends: choose, prepare the weights, bind again when something changed."""

from __future__ import annotations

import itertools
from typing import ClassVar

import torch
from torch import Tensor, nn

from fp4dispatch.backends.base import LinearWeights, Prepared
from fp4dispatch.errors import Fp4DispatchError, InputError
from fp4dispatch.machine import system as _system
from fp4dispatch.models.state_loading import StateLoading
from fp4dispatch.models.stored_weights import never
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
    """Capture mode for which backends are chosen. :meth:`choose_for` sets it."""
    m_min: int = 1
    """Smallest M that the caller guarantees in a capture. For M == 0 a layer returns before any launch."""
    _prepared: dict[str, Prepared]
    """Prepared weights by layout name."""
    _bound: dict[torch.dtype, routes.Bound]
    _captured: list[routes.Bound]
    """Bindings that were replaced. CUDA graphs may hold the addresses of their tensors, so they are kept."""

    def bind(self, dtype: torch.dtype | None = None) -> routes.Bound:
        """Choose a backend for each range of M and prepare the weights. Host work; idempotent.

        Weights that were written since the last call are prepared again.

        Raises
        ------
        BackendUnsupportedError, NoBackendError, UnknownBackendError, SettingsError, InputError, CaptureError
            As ``forward``. During CUDA graph capture always CaptureError.
        """
        dtype = self.dtype if dtype is None else dtype
        self._update_layouts()
        if dtype in self._bound:
            return self._bound[dtype]
        if dtype not in routes.OUT_DTYPE:
            raise InputError(
                f"{self._label()}: {dtype} input; need torch.bfloat16, torch.float16 or torch.float32: convert it, "
                f"e.g. x.to({self.dtype})"
            )
        if self.device.type == "meta":
            raise InputError(f"{self._label()} is on the meta device: load its weights first, e.g. load_state_dict")
        if not self._bound:
            self._record_stored()
        return self._set_bound(self._choose(dtype))

    def rebind(self, dtype: torch.dtype | None = None) -> routes.Bound:
        """Choose backends again, e.g. after tuning or a new verdict, and bind.

        Drops unused layouts, unless a CUDA graph may hold their addresses. Raises as :meth:`bind`.
        """
        dtype = self.dtype if dtype is None else dtype
        self._update_layouts()
        old = self._bound.get(dtype)
        if old is None:
            return self.bind(dtype)
        return self._replace_bound(self._choose(dtype))

    def _replace_bound(self, fresh: routes.Bound) -> routes.Bound:
        old = self._bound[fresh.dtype]
        if fresh.spec is old.spec:
            old.decisions = fresh.decisions
            return old
        if old.captured:
            self._captured.append(old)
        self._set_bound(fresh)
        self._drop_unused()
        return fresh

    def choose_for(self, capture: CaptureMode, m_min: int = 1) -> None:
        """Set the capture mode and choose backends for it. Binds again where the choice changes. Host work.

        Backends chosen for ``full`` or ``piecewise`` also serve calls outside of CUDA graphs.

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
            changed = [d for d, bound in self._bound.items() if not self._still_chosen(d, bound)]
            fresh = [self._choose(dtype) for dtype in changed]
        except Fp4DispatchError:
            self.capture, self.m_min = old
            raise
        for bound in fresh:
            self._replace_bound(bound)

    def _still_chosen(self, dtype: torch.dtype, bound: routes.Bound) -> bool:
        """Whether the policy still chooses the bound backends. Needs no weights: they may be dropped."""
        return binding.still_chosen(bound, self.problem(1, dtype), self.backend, self.name)

    def problem(self, m: int, dtype: torch.dtype | None = None) -> Problem:
        """Return the problem of this layer for M tokens."""
        op, scaling = self._kind()
        out_dtype = routes.OUT_DTYPE[self.dtype if dtype is None else dtype]
        n, k = self.out_features, self.in_features
        return Problem(
            op, m, n, k, self.activation, scaling, out_dtype, self.bias is not None, self.capture, self.m_min
        )

    def _choose(self, dtype: torch.dtype) -> routes.Bound:
        return binding.bind(
            self.weights(),
            dtype=dtype,
            bias=self.bias,
            activation=self.activation,
            backend=self.backend,
            layer=self.name,
            prepared=self._prepared,
            capture_mode=self.capture,
            m_min=self.m_min,
        )

    def _set_bound(self, bound: routes.Bound) -> routes.Bound:
        self._names[bound.dtype] = ([self._buffer_of(t) for t in bound.tensors], [], bound.spec.text)
        self._bound[bound.dtype] = bound
        self._record(self._seen)
        return bound

    def _drop_unused(self) -> None:
        """Drop layouts and buffers that no bound dtype uses."""
        used = {id(tensor) for bound in self._bound.values() for tensor in bound.tensors}
        if self._dropped and any(id(tensor) not in used for tensor in self._prepared[self._dropped].tensors):
            self._restore()
        for name in [name for name in self._buffers if name.startswith("layout")]:
            if id(self._buffers[name]) not in used:
                delattr(self, name)
        self._prepared = {
            layout: prepared
            for layout, prepared in self._prepared.items()
            if all(id(tensor) in used for tensor in prepared.tensors)
        }

    def decisions(self) -> tuple[tuple[int, Decision], ...]:
        """Return (largest M, Decision) for each range of M, for ``self.dtype``."""
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
        owners.forget(self, self.__dict__.get("_keys", ()))
        self._prepared, self._bound, self._names, self._captured = {}, {}, {}, []
        self._dropped, self._lent, self._keys = "", {}, []
        self._seen, self._unchanged = {}, never

    def _refresh(self) -> None:
        """Bind again if the layer is on its final device: on a GPU, or on the CPU of a machine without GPU.

        Errors are dropped here, and the first call raises them. So moving or loading a model always completes.
        """
        self._forget()
        if self.device.type == "cuda" or (self.device.type == "cpu" and not _system.current().gpus):
            try:
                self.bind()
            except Fp4DispatchError:
                self._forget()

    def weights(self) -> LinearWeights:
        """Return the canonical tensors as :class:`LinearWeights`. Copies only weights that :func:`compact` dropped."""
        raise NotImplementedError

    def _kind(self) -> tuple[Op, Scaling]:
        """Return op and scaling of the layer's problems."""
        raise NotImplementedError
