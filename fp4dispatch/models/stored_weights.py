"""Detect writes to the stored tensors of a layer, and prepare its layouts again.

Kernels read layouts, which backends prepare from the stored tensors (the ``state_dict``). Before each eager call the
layer compares its stored tensors with those that the layouts were prepared from: same object, same address, same
``Tensor._version``, and the memory was never freed, as the allocator may hand out an address again. A compiled call
does this inside its operator. So the layer detects ``layer.weight.copy_(...)``, ``layer.weight = ...``,
``layer.weight.data = ...``, ``swap_tensors`` and ``functional_call``. Then:

* After an in-place write, the new layout is copied into the old one. CUDA graphs that read it use the new weights.
* After a tensor was replaced, the layer gets new layouts. Graphs captured before keep the old ones.

The layer cannot detect writes that torch does not count: through ``layer.weight.data``, its storage, ``numpy()`` or
DLPack; in inference mode through a view of another dtype; by collectives (``torch.distributed.broadcast``); by other
processes; and in replays of CUDA graphs, which run no host code. After these writes, and after any write before a
replay, call :func:`refresh`. Or announce the write of your own kernel:
``torch.autograd.graph.increment_version(weight)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fp4dispatch.backends.base import LinearWeights, Prepared
from fp4dispatch.dispatch import choose
from fp4dispatch.errors import InputError
from fp4dispatch.formats.checks import check_module
from fp4dispatch.machine import capture
from fp4dispatch.machine.locks import ForkSafeLock
from fp4dispatch.models.layer_state import LayerState
from fp4dispatch.models.seen_tensors import (
    Seen,
    held_elsewhere,
    look,
    plain,
    same_bytes,
    same_place,
)
from fp4dispatch.run import owners
from fp4dispatch.run.routes import Bound

lock = ForkSafeLock()
"""Hold it to replace layouts or stored tensors of a layer."""


class StoredWeights(nn.Module):
    """The part of a quantised layer that keeps its layouts up to date with its stored tensors."""

    quantized: ClassVar[tuple[str, ...]]
    _state: LayerState

    # What the layer provides.
    bind: Callable[..., Bound]
    check: Callable[[], None]
    weights: Callable[..., LinearWeights]
    _bind: Callable[..., Bound]
    _forget: Callable[[], None]
    _hold_once: Callable[[], None]
    _restore: Callable[[], None]
    _label: Callable[[], str]

    def refresh(self) -> None:
        """Prepare the layouts again, in place, also if no write was detected. See :func:`refresh`.

        Raises
        ------
        InputError, FormatError
            If the stored tensors do not fit the format.
        CaptureError
            During CUDA graph capture.
        """
        self._update_layouts(force=True)
        self._hold_once()

    def _update_layouts(self, *, force: bool = False, check: bool = True) -> None:
        """Prepare the layouts again if the stored tensors changed, or if ``force``. Synchronises in that case.

        The writes must end before the next launch: with PDL, a kernel reads weights before it waits.
        """
        if self._state.lent:
            self._forget_lent()
        if not self._state.bound or (not force and self._current()):
            return
        if torch.compiler.is_compiling() and not all(map(plain, self._stored())):
            return  # the buffers hold tensors of a tracer
        capture.forbid_in_capture(
            f"the weights of {self._label()} were written or replaced, and preparing them anew",
            "fp4dispatch.refresh(model), or call the layer once",
        )
        with lock:
            if not force and self._current():  # another thread was faster
                return
            if self._state.dropped and not self._current():
                self._restore()
            self._require_plain_tensors()
            if check:
                self.check()
            if not (self._written_in_place() and self._rewrite()):
                self._replace()

    def _rewrite(self) -> bool:
        """Copy new layouts into the old ones. Return False, and change nothing, if they do not fit."""
        seen = {name: look(tensor) for name, tensor in self._stored_by_name()}
        weights = self.weights(lend=False)
        fresh: dict[str, Prepared] = {}
        pairs: dict[int, tuple[Tensor, Tensor]] = {}
        for bound in (*self._state.every_bound(), *self._state.captured):
            for route in bound.spec.routes:
                backend = choose.instance(route.backend)
                if backend.layout_name not in fresh:
                    fresh[backend.layout_name] = backend.prepare(weights)
                new = fresh[backend.layout_name]
                old = bound.tensors[route.start : route.stop]
                if (
                    tuple(new.layout) != route.layout
                    or len(new.tensors) != len(old)
                    or not all(map(_fit, old, new.tensors))
                ):
                    return False
                pairs |= {id(a): (a, b) for a, b in zip(old, new.tensors, strict=True)}
        with torch.inference_mode():  # layouts may be inference tensors, which can be written here only
            for a, b in pairs.values():
                if a is not b and a.data_ptr() != b.data_ptr():
                    a.copy_(b)
        for a, _ in pairs.values():
            if a.is_cuda:
                torch.cuda.current_stream(a.device).synchronize()
                break
        self._record(seen)
        return True

    def _replace(self) -> None:
        """Prepare new layouts. Keep the old ones that a CUDA graph may read."""
        captured = [*self._state.captured, *(bound for bound in self._state.every_bound() if bound.captured)]
        dtypes = list(self._state.bound)
        self._forget()
        self._state.captured = captured
        with capture.mode("none"):  # for other modes, the next call inside binds
            for dtype in dtypes:
                self._bind(dtype, checked=True)

    def _replicate_for_data_parallel(self) -> Any:
        """Return a replica for ``nn.DataParallel``, with a state of its own: it may restore what this layer dropped."""
        replica = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        replica._state = self._state.copy()
        return replica

    # --------------------------------------------------------------------------------------------------------- looking

    def _stored_by_name(self) -> list[tuple[str, Tensor | None]]:
        return [(name, self._buffers[name]) for name in self.quantized if name in self._buffers]

    def _stored(self) -> list[Tensor]:
        return [tensor for _, tensor in self._stored_by_name() if tensor is not None]

    def _record_stored(self) -> None:
        """Record the stored tensors before layouts are prepared from them."""
        self._require_plain_tensors()
        for name, tensor in self._stored_by_name():
            if tensor is not None and tensor.is_inference():
                self._buffers[name] = _with_version(tensor)
        self._record({name: look(tensor) for name, tensor in self._stored_by_name()})

    def _record(self, seen: dict[str, Seen | None]) -> None:
        """Set the record of stored tensors, and register them for compiled calls."""
        state = self._state
        state.record(seen)
        stored = [name for name, found in seen.items() if found is not None]
        addresses = [found.address for found in seen.values() if found is not None]
        owners.forget(self, state.keys)
        state.names = {dtype: (names, stored, spec) for dtype, (names, _, spec) in state.names.items()}
        keys: dict[owners.Key, None] = {}
        for bound in state.every_bound():
            where = (bound.tensors[0].data_ptr(), *addresses)
            keys |= {(bound.spec.text, where): None, ("", where): None}
        state.keys = list(keys)
        owners.register(self, state.keys)

    def _written_in_place(self) -> bool:
        """Whether all stored tensors are the same objects at the same addresses; their values may differ."""
        for name, seen in self._state.seen.items():
            tensor = self._buffers.get(name)
            if (seen is None) != (tensor is None) or (seen is not None and not same_place(seen, tensor)):
                return False
        return True

    def _current(self) -> bool:
        """Whether no stored tensor was written or replaced, also none that the layer dropped and other code holds."""
        return self._state.matches(self._buffers) and self._state.lent_unwritten()

    def _forget_lent(self) -> None:
        """Forget dropped weights that other code does not hold any more."""
        with lock:
            if self._state.lent_unwritten() and not any(map(held_elsewhere, self._state.lent.values())):
                self._state.lent = {}
                self._record(self._state.seen)

    def _require_plain_tensors(self) -> None:
        for name, tensor in self._stored_by_name():
            if tensor is not None and not plain(tensor):
                raise InputError(
                    f"{self._label()}: {name} is a {type(tensor).__name__} that holds no memory of its own (a tensor "
                    "subclass, or one under vmap); need a plain torch.Tensor"
                )

    # ---------------------------------------------------------------------------------------------------------- owners

    def bound_to(self, dtype: torch.dtype) -> Bound:
        """Return the bound layer for a dtype, up to date with the stored tensors. Host work only if they changed."""
        bound = self._state.bounds(capture.declared()).get(dtype)
        return bound if bound is not None and self._state.unchanged(self._buffers) else self.bind(dtype)

    def stores(self, addresses: Sequence[int]) -> bool:
        """Whether all these addresses are addresses of stored tensors."""
        return {tensor.data_ptr() for tensor in self._stored() if plain(tensor)}.issuperset(addresses)

    def runs(self, dtype: torch.dtype, *, spec: str | None = None, address: int | None = None) -> bool:
        """Whether the layer is bound for a dtype with this spec, or with its first packed tensor at this address."""
        mine = [bound for bound in self._state.every_bound() if bound.dtype == dtype]
        return any(bound.spec.text == spec or bound.tensors[0].data_ptr() == address for bound in mine)

    def same_content(self, stored: Sequence[Tensor]) -> bool:
        """Whether these tensors have the same bytes as the stored ones. Synchronises."""
        mine = self._stored()
        return len(mine) == len(stored) and all(map(same_bytes, mine, stored))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.quantized and isinstance(value, nn.Parameter) and name not in self._parameters:
            value = value.detach()  # stored tensors are buffers; the two count versions together
        super().__setattr__(name, value)


def refresh(model: nn.Module) -> int:
    """Prepare the backend layouts of all layers again from their stored tensors.

    Layers detect most writes (:mod:`fp4dispatch.models.stored_weights`). Call this after writes that torch does not
    count: through ``.data``, by ``torch.distributed`` collectives, by another process. Also call it after any write
    before the next replay of a CUDA graph (``torch.compile(mode="reduce-overhead")`` too): replays run no host code.
    Layouts are written in place, so graphs use the new weights.

    Parameters
    ----------
    model
        A module with ``FP4Linear`` or ``FP8Linear`` in it.

    Returns
    -------
    int
        Number of layers that were prepared again. Layers that are not bound have no layouts. Synchronises.

    Raises
    ------
    InputError, FormatError
        If ``model`` is no module, or the stored tensors of a layer do not fit the format.
    CaptureError
        During CUDA graph capture.
    """
    check_module("refresh: model", model)
    layers = [module for module in model.modules() if isinstance(module, StoredWeights) and module._state.bound]
    for layer in layers:
        layer.refresh()
    return len(layers)


def _fit(old: Tensor, new: Tensor) -> bool:
    return (old.shape, old.dtype, old.device, old.stride()) == (new.shape, new.dtype, new.device, new.stride())


def _with_version(tensor: Tensor) -> Tensor:
    """Return a normal tensor, which counts versions, on the memory of an inference tensor, which does not."""
    with torch.inference_mode(mode=False):
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
