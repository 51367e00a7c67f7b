"""Load a ``state_dict`` into a quantised layer: all of it, or nothing.

Codes and scales belong together. A partly refused load would leave wrong weights. So the load first goes into
placeholder tensors. The layer takes the values over only if all checks pass.

Torch does not tell the modules of a model whether a load is strict. So a layer inside a model takes its weights if only
its bias is missing or a key is unexpected. Torch then raises if the load was strict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp4dispatch.errors import Fp4DispatchError
from fp4dispatch.machine import capture
from fp4dispatch.models.compact_weights import CompactWeights
from fp4dispatch.run import routes

_ASSIGN = "assign_to_params_buffers"
_Tensors = dict[str, Tensor]


class StateLoading(CompactWeights):
    """The part of a quantised layer that takes a ``state_dict``."""

    _refresh: Callable[..., None]
    _strict: bool | None = None
    """Whether the current ``load_state_dict`` of this layer is strict. None: not known."""

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load all of a state, or leave the layer as it was; arguments and result as of ``nn.Module``.

        Raises
        ------
        RuntimeError
            For wrong shapes, dtypes or keys.
        InputError, FormatError
            For values that do not fit the format.
        CaptureError
            During CUDA graph capture.
        """
        self._strict = strict
        try:
            return super().load_state_dict(state_dict, strict, assign)
        finally:
            self._strict = None

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load the canonical tensors, or leave the layer unchanged and report why.

        Refuses other dtypes, which ``copy_`` would convert without an error. Refuses weights without their scales, also
        with ``strict=False``.
        """
        assign = bool(local_metadata.get(_ASSIGN, False))
        faults = (missing_keys, unexpected_keys, error_msgs)
        fatal = faults if self._strict else (error_msgs,)
        if self.device.type == "meta" and not assign:  # loads nothing, and torch says so
            super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *faults)
            return
        capture.forbid_in_capture("loading weights", "load_state_dict")
        before = sum(map(len, fatal))
        with self._restored():
            placeholders = self._placeholders(prefix + "input_scale" in state_dict)
            _reshape(state_dict, prefix, placeholders)
            kept = self._parameters, self._buffers
            try:
                self._parameters = {name: placeholders.get(name) for name in kept[0]}  # type: ignore[misc]
                self._buffers = {name: tensor for name, tensor in placeholders.items() if name not in kept[0]}
                super()._load_from_state_dict(state_dict, prefix, local_metadata | {_ASSIGN: True}, strict, *faults)
                tried = {**self._parameters, **self._buffers}
            finally:
                self._parameters, self._buffers = kept
            new: _Tensors = {
                name: tensor
                for name, tensor in tried.items()
                if tensor is not None and (tensor is not placeholders[name] or not tensor.is_meta)
            }
            error_msgs += self._load_errors(new, placeholders, prefix, assign)
            if sum(map(len, fatal)) > before:
                return
            self._check_values(new, assign)
        self._set_tensors(new, assign)
        del new
        self._hold_once()

    def _placeholders(self, input_scale: bool) -> _Tensors:
        """Return a placeholder on the meta device for each tensor that a state can have."""
        found: _Tensors = {}
        for name, parameter in self._parameters.items():
            if parameter is not None:
                found[name] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        for name, buffer in self._buffers.items():
            if buffer is not None and name not in self._non_persistent_buffers_set:
                found[name] = torch.empty_like(buffer, device="meta")
        if input_scale:
            found.setdefault("input_scale", torch.empty((), dtype=torch.float32, device="meta"))
        return found

    def _load_errors(self, new: _Tensors, placeholders: _Tensors, prefix: str, assign: bool) -> list[str]:
        """Return error texts for dtypes and missing tensors. Torch has checked the shapes."""
        wrong = [
            f"{prefix}{name} is {new[name].dtype}, needs {placeholders[name].dtype}: quantise it first"
            for name in self.quantized
            if name in new and new[name].dtype != placeholders[name].dtype
        ]
        bias = new.get("bias")
        if bias is not None and not (bias.dtype in routes.OUT_DTYPE if assign else bias.is_floating_point()):
            wrong.append(f"{prefix}bias is {bias.dtype}; need torch.bfloat16, torch.float16 or torch.float32")
        belong = [name for name in self.quantized if name in placeholders and name != "input_scale"]
        missing = [name for name in belong if name not in new]
        if missing and len(missing) < len(belong) and not self._strict:  # a strict load reports them as missing
            wrong.append(
                f"{', '.join(prefix + name for name in missing)} missing: codes and scales belong together, load all "
                f"of {', '.join(belong)} or none"
            )
        return wrong

    def _check_values(self, new: _Tensors, assign: bool) -> None:
        """Check the new values with :meth:`check`, before the layer takes them over."""
        kept = self._buffers
        trial = {name: new.get(name, buffer) for name, buffer in kept.items()}
        weight = trial["weight"]
        if weight is None or weight.is_meta:
            return
        if not assign:  # copy a state from any device to the layer's
            trial = {name: None if t is None else t.to(weight.device) for name, t in trial.items()}
        try:
            self._buffers = trial
            self.check()
        finally:
            self._buffers = kept

    def _set_tensors(self, new: _Tensors, assign: bool) -> None:
        """Set the new tensors and update the layouts. If binding fails, the first call raises the error."""
        self._restore()
        for name, tensor in new.items():
            current = self._parameters.get(name, self._buffers.get(name))
            if assign:
                setattr(self, name, tensor)
            elif current is None:
                setattr(self, name, tensor.detach().to(self.device, copy=True))
            else:
                with torch.inference_mode():  # here, inference tensors can be written too
                    current.copy_(tensor)
        if not self._state.bound:
            self._refresh(checked=True)
            return
        try:
            self._update_layouts(check=False)
        except Fp4DispatchError:
            self._forget()


def _reshape(state_dict: dict[str, Any], prefix: str, placeholders: _Tensors) -> None:
    """Give scales the layer's shape: [1] for [], [N, 1] for [N]."""
    for name, wanted in placeholders.items():
        tensor = state_dict.get(prefix + name)
        if name != "bias" and isinstance(tensor, Tensor) and wanted.ndim < 2 and tensor.numel() == wanted.numel():
            state_dict[prefix + name] = tensor.reshape(wanted.shape)
