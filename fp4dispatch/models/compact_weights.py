"""Store NVFP4 weights once: drop the canonical tensors if a backend layout holds all their bits.

A layer on ``w4a16`` or ``w4a8`` needs each weight in the layout of the kernels: 4.5 bits. The canonical tensors are the
same bits in another order. So a bound layer drops them, unless it was made with ``keep_stored=True``. ``state_dict``,
saving, copies, moves and other backends unpack them from the layout again. Before a drop, the layout is unpacked and
compared with the canonical tensors.

A write to a stored tensor must never be lost:

* Reading ``layer.weight`` unpacks it. The next eager call uses what was written to it, and drops it again.
* While other code holds a stored tensor, the layer does not drop it. To free it would free no memory.
* ``state_dict()``, ``weights()`` and an explicit :func:`compact` may leave other code with a dropped tensor. The layer
  keeps such tensors (``lent``) and checks them at each call. It releases them when no other code holds them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from fp4dispatch.backends.base import Backend
from fp4dispatch.dispatch import choose
from fp4dispatch.formats.checks import check_module
from fp4dispatch.machine import capture, transforms
from fp4dispatch.machine import log as _log
from fp4dispatch.models.layer_state import LayerState
from fp4dispatch.models.seen_tensors import CANONICAL, Seen, held_elsewhere, never, plain, same_bytes
from fp4dispatch.models.stored_weights import StoredWeights, lock

_only_held: ContextVar[bool] = ContextVar("only_held", default=False)


@contextmanager
def without_dropped() -> Iterator[None]:
    """Leave tensors that layers dropped out of each ``state_dict()`` that is made inside, instead of unpacking them."""
    token = _only_held.set(True)
    try:
        yield
    finally:
        _only_held.reset(token)


class CompactWeights(StoredWeights):
    """The part of a quantised layer that can drop its canonical weights.

    While they are dropped, the state names the layout that holds them (``dropped``). Reading or setting ``weight`` or
    ``weight_scale`` restores them; :meth:`_hold_once` drops them again. :meth:`_restored` restores them for one block.
    """

    keep_stored: bool = False
    """Whether the layer keeps its canonical weights beside a layout that holds them too."""
    in_features: int
    out_features: int

    def compact(self) -> int:
        """Drop the canonical weights now if a layout holds them exactly and no bound backend reads them directly.

        Also drops weights that other code holds, and those of a layer with ``keep_stored``. The layer does not drop
        these again after they were read.

        Returns
        -------
        int
            Bytes that were freed. 0 if nothing can be dropped, or the layer is not bound. Synchronises.

        Raises
        ------
        CaptureError
            During CUDA graph capture.
        InputError, FormatError
            If the stored tensors do not fit the format.
        """
        capture.forbid_in_capture("dropping canonical weights", "compact(model), then capture")
        with lock:
            self._update_layouts()
            return self._drop_exact() if self._can_drop() else 0

    def dropped_nbytes(self) -> int:
        """Return the bytes of the canonical weights that the layer does not hold beside their layout."""
        held = self._buffers.keys()
        n, k = self.out_features, self.in_features
        return 0 if not self._state.dropped or "weight" in held else n * k // 2 + n * k // 16

    def stored_nbytes(self) -> int:
        """Return the bytes of what ``state_dict`` has: the parameters and all stored tensors, also dropped ones."""
        held = {name: tensor for name, tensor in self._buffers.items() if name not in self._non_persistent_buffers_set}
        tensors = [tensor for tensor in (*self._parameters.values(), *held.values()) if tensor is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors) + self.dropped_nbytes()

    def _hold_once(self) -> None:
        """Drop the canonical weights if a layout holds them exactly and no other code holds them.

        For layers without ``keep_stored``. Does nothing during CUDA graph capture. Synchronises if there is anything to
        drop.

        Raises
        ------
        InputError, FormatError
            If weights that torch did not count as written do not fit the format.
        """
        if not self._state.due or self.keep_stored or not self._state.bound or capture.is_capturing():
            return
        if not all(map(plain, self._stored())):
            return  # the buffers hold tensors of a tracer
        with lock, transforms.left():
            if not self._can_drop():
                self._state.due = False
            elif self._state.matches(self._buffers) and not self._held_by_others():
                self._drop_exact()
                self._state.due = False  # not again, if it failed
            if not self._state.dropped:
                self._record(self._state.seen)

    def _can_drop(self) -> bool:
        """Whether the layer holds canonical weights that no bound backend reads, and a layout may hold them."""
        held = self._canonical()
        bounds = [*self._state.every_bound(), *self._state.captured]
        read = {
            tensor.untyped_storage().data_ptr() for bound in bounds for tensor in bound.tensors if tensor is not None
        }
        if self._state.dropped or len(held) < 2 or any(t.untyped_storage().data_ptr() in read for t in held.values()):
            return False
        backends = (type(choose.instance(prepared.backend)) for prepared in self._state.prepared.values())
        return any(backend.canonical is not Backend.canonical for backend in backends)

    def _drop_exact(self) -> int:
        """Drop the canonical weights if unpacking a layout gives the same bytes. Return the bytes that were freed.

        Other bytes: they were written, and torch did not count the write. Then the layouts are prepared again first.
        """
        freed = self._try_drop()
        if freed == 0:
            self._update_layouts(force=True)
            freed = self._try_drop()
            if freed == 0:
                _log.warning("the weights of %s are not what its layout holds; both are kept", self)
        return freed or 0

    def _try_drop(self) -> int | None:
        """Drop the canonical weights, return their bytes. 0: they differ from the layout. None: no layout has them."""
        differs = False
        held = self._canonical()
        for layout, prepared in self._state.prepared.items():
            found = choose.instance(prepared.backend).canonical(prepared)
            if found is None:
                continue
            if all(same_bytes(tensor, again) for tensor, again in zip(held.values(), found, strict=True)):
                freed = sum(tensor.numel() * tensor.element_size() for tensor in held.values())
                del held, found
                self._drop(layout, lend=True)
                return freed
            differs = True
        return 0 if differs else None

    def _held_by_others(self) -> bool:
        """Whether other code than this layer references canonical weights."""
        own = 1 + (self._state.unchanged is not never)  # the buffers, and the function that compares them
        return any(seen is not None and held_elsewhere(seen, own) for seen in map(self._state.seen.get, CANONICAL))

    def _canonical(self) -> dict[str, Tensor]:
        """Return the canonical weights that are held. No frame keeps a reference to one beside the result."""
        found = {name: self._buffers.get(name) for name in CANONICAL}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    @property
    def device(self) -> torch.device:
        """Device of the layer. Reading ``weight.device`` would restore dropped weights; this does not."""
        held = self._buffers.get("weight")
        found: torch.device = (self._state.prepared[self._state.dropped].tensors[0] if held is None else held).device
        return found

    def _drop(self, layout: str, *, lend: bool) -> None:
        """Drop the canonical weights. ``lend``: keep those that other code holds, which may write to them."""
        with lock:
            state = self._state
            state.order, state.dropped, state.due = tuple(self._buffers), layout, False
            seen = {name: found for name in CANONICAL if (found := state.seen[name]) is not None}
            self._buffers = {name: tensor for name, tensor in self._buffers.items() if name not in CANONICAL}
            self._record({name: found for name, found in state.seen.items() if name not in CANONICAL})
            if lend and any(map(held_elsewhere, seen.values())):
                state.lent = seen
                self._record(state.seen)

    def _restore(self) -> None:
        """Restore dropped weights. The next eager call drops them again if it can, unless ``keep_stored``.

        Raises
        ------
        CaptureError
            During CUDA graph capture: unpacking is host work, and its result would belong to the graph.
        """
        if not self._is_compact():
            return
        capture.forbid_in_capture(
            "unpacking weights that the layer dropped", "read them before capturing, or make it with keep_stored=True"
        )
        with lock, transforms.left(), torch.inference_mode(mode=False), torch.no_grad():
            state = self._state
            if not state.dropped:  # another thread was faster
                return
            held = state.lent or self._unpacked()
            whole = {name: seen.tensor for name, seen in held.items()} | self._buffers  # what was put there counts
            order = dict.fromkeys(name for name in (*state.order, *whole) if name in whole)
            self._buffers = {name: whole[name] for name in order}  # one assignment, for other threads
            state.dropped, state.lent = "", {}
            seen = state.seen | held
            self._record({name: seen[name] for name in order if name in seen})
            if not self.keep_stored:
                state.due, state.unchanged = True, never

    def _unpacked(self) -> dict[str, Seen]:
        """Return the weights that the layout holds, as new tensors."""
        prepared = self._state.prepared[self._state.dropped]
        found = choose.instance(prepared.backend).canonical(prepared)
        assert found is not None
        return {
            name: Seen(tensor, tensor._version, tensor.data_ptr())
            for name, tensor in zip(CANONICAL, found, strict=True)
        }

    @contextmanager
    def _restored(self, *, lend: bool = False) -> Iterator[None]:
        """Restore the canonical weights for one ``with`` block. Tensors that were read inside stay valid.

        ``lend``: code that read them may write to them later, and the layer must detect that. The block holds the
        lock, so that no other thread drops the weights inside it.
        """
        with lock:
            layout, lend = self._state.dropped, lend or bool(self._state.lent)
            held = self._state.prepared.get(layout)
            self._restore()
            try:
                yield
            finally:
                if layout and not self._state.dropped and self._state.prepared.get(layout) is held:
                    self._drop(layout, lend=lend)

    def _is_compact(self) -> bool:
        """Whether the layer has dropped its canonical weights. Modules ask for attributes before they have a state."""
        state: LayerState | None = self.__dict__.get("_state")
        return state is not None and state.dropped != ""

    def __getattr__(self, name: str) -> Any:
        if name in CANONICAL and self._is_compact():
            with lock:
                self._restore()
                return super().__getattr__(name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in CANONICAL:
            self._restore()
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in CANONICAL:
            self._restore()
        super().__delattr__(name)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if _only_held.get():
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        with self._restored(lend=True):
            super()._save_to_state_dict(destination, prefix, keep_vars)


def compact(model: nn.Module) -> int:
    """Drop now the canonical weights of each layer whose backend layout holds them exactly (``w4a16``, ``w4a8``).

    Layers do this themselves when they are bound, unless they have ``keep_stored`` or other code holds the tensors.
    Call it for layers with ``keep_stored``, or after reading ``layer.weight`` of layers that only run compiled or in
    CUDA graphs. Call it before capturing. ``state_dict()``, ``save_quantized``, copies, pickles, ``.to(...)`` and other
    backends work as before: they unpack what they need. Reading ``layer.weight`` restores it: until the next eager
    call, or permanently with ``keep_stored``.

    Parameters
    ----------
    model
        A module with bound ``FP4Linear`` layers: on its GPU, or warmed up.

    Returns
    -------
    int
        Bytes that were freed by this call.

    Raises
    ------
    InputError
        If ``model`` is no module.
    CaptureError
        During CUDA graph capture.
    """
    check_module("compact: model", model)
    return sum(module.compact() for module in model.modules() if isinstance(module, CompactWeights))
