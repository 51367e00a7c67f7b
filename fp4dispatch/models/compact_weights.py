"""Store NVFP4 weights once: drop the canonical tensors if a backend layout holds all their bits.

A layer on ``w4a16`` or ``w4a8`` stores each weight twice: 4.5 bits in the canonical tensors, and 4.5 bits in the layout
of the kernels. :func:`compact` drops the canonical tensors. ``state_dict``, saving, copies, moves and other backends
unpack them from the layout again. Before a drop, the layout is unpacked and compared with the canonical tensors.

Other code may hold a dropped tensor, for instance from ``state_dict()``, and write to it. So the layer keeps such
tensors (``_lent``) and checks them before each call. It releases them when no other code holds them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fp4dispatch.backends.base import Prepared
from fp4dispatch.dispatch import choose
from fp4dispatch.machine import capture
from fp4dispatch.models.stored_weights import Seen, StoredWeights, held_elsewhere, lock, same_bytes

_log = logging.getLogger("fp4dispatch")

CANONICAL = ("weight", "weight_scale")
"""Buffers that can be dropped. Global scales and input scales are a few bytes and stay."""


class CompactWeights(StoredWeights):
    """The part of a quantised layer that can drop its canonical weights.

    While they are dropped, ``_dropped`` names the layout that holds them. Reading or setting ``weight`` or
    ``weight_scale`` restores them permanently. :meth:`_restored` restores them for one block.
    """

    _dropped: str
    _order: tuple[str, ...]
    _prepared: dict[str, Prepared]

    def compact(self) -> int:
        """Drop the canonical weights if a layout holds them exactly and no bound backend reads them directly.

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
        self._update_layouts()
        held = self._canonical()
        bounds = [*self._every_bound(), *self._captured]
        read = {tensor.untyped_storage().data_ptr() for bound in bounds for tensor in bound.tensors}
        if self._dropped or len(held) < 2 or any(t.untyped_storage().data_ptr() in read for t in held.values()):
            return 0
        for layout, prepared in self._prepared.items():
            found = choose.instance(prepared.backend).canonical(prepared)
            if found is None:
                continue
            if all(same_bytes(tensor, again) for tensor, again in zip(held.values(), found, strict=True)):
                freed = sum(tensor.numel() * tensor.element_size() for tensor in held.values())
                del held, found
                self._drop(layout, lend=True)
                return freed
            _log.warning("the weights of %s are not what their layout %s holds; both are kept", self, layout)
        return 0

    def _canonical(self) -> dict[str, Tensor]:
        """Return the canonical weights that are held. No frame keeps a reference to one beside the result."""
        found = {name: self._buffers.get(name) for name in CANONICAL}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    @property
    def device(self) -> torch.device:
        """Device of the layer. Reading ``weight.device`` would restore dropped weights; this does not."""
        held = self._buffers.get("weight")
        found: torch.device = (self._prepared[self._dropped].tensors[0] if held is None else held).device
        return found

    def _drop(self, layout: str, *, lend: bool) -> None:
        """Drop the canonical weights. ``lend``: keep those that other code holds, which may write to them."""
        with lock:
            self._order = tuple(self._buffers)
            self._dropped = layout
            seen = {name: found for name in CANONICAL if (found := self._seen[name]) is not None}
            self._buffers = {name: tensor for name, tensor in self._buffers.items() if name not in CANONICAL}
            self._record({name: found for name, found in self._seen.items() if name not in CANONICAL})
            if lend and any(map(held_elsewhere, seen.values())):
                self._lent = seen
                self._record(self._seen)

    def _restore(self) -> None:
        """Restore dropped weights permanently.

        Raises
        ------
        CaptureError
            During CUDA graph capture: unpacking is host work, and its result would belong to the graph.
        """
        if not self.__dict__.get("_dropped"):
            return
        capture.forbid_in_capture(
            "unpacking weights that compact() dropped", "read them before capturing, or do without compact()"
        )
        with lock, torch.inference_mode(mode=False), torch.no_grad():
            if not self._dropped:  # another thread was faster
                return
            held = self._lent or self._unpacked()
            whole = self._buffers | {name: seen.tensor for name, seen in held.items()}
            order = dict.fromkeys(name for name in (*self._order, *whole) if name in whole)
            self._buffers = {name: whole[name] for name in order}  # one assignment, for other threads
            self._dropped, self._lent = "", {}
            seen = self._seen | held
            self._record({name: seen[name] for name in order if name in seen})

    def _unpacked(self) -> dict[str, Seen]:
        """Return the weights that the layout holds, as new tensors."""
        prepared = self._prepared[self._dropped]
        found = choose.instance(prepared.backend).canonical(prepared)
        assert found is not None
        return {
            name: Seen(tensor, tensor._version, tensor.data_ptr())
            for name, tensor in zip(CANONICAL, found, strict=True)
        }

    @contextmanager
    def _restored(self, *, lend: bool = False) -> Iterator[None]:
        """Restore the canonical weights for one ``with`` block. Tensors that were read inside stay valid.

        ``lend``: code that read them may write to them later, and the layer must detect that.
        """
        layout, lend = self._dropped, lend or bool(self._lent)
        held = self._prepared.get(layout)
        self._restore()
        try:
            yield
        finally:
            if layout and self._prepared.get(layout) is held:
                self._drop(layout, lend=lend)

    def __getattr__(self, name: str) -> Any:
        if name in CANONICAL:
            self._restore()
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in CANONICAL:
            self._restore()
        super().__setattr__(name, value)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        with self._restored(lend=True):
            super()._save_to_state_dict(destination, prefix, keep_vars)


def compact(model: nn.Module) -> int:
    """Drop the canonical weights of each layer whose backend layout holds them exactly (``w4a16``, ``w4a8``).

    Call it after :func:`~fp4dispatch.warmup` and before capturing. ``state_dict()``, ``save_quantized``, copies,
    pickles, ``.to(...)`` and other backends work as before: they unpack what they need. A moved or copied layer has
    its canonical weights until the next call of this function. Reading ``layer.weight`` restores them permanently.

    Parameters
    ----------
    model
        A module with bound ``FP4Linear`` layers: on its GPU, or warmed up.

    Returns
    -------
    int
        Bytes that were freed.

    Raises
    ------
    CaptureError
        During CUDA graph capture.
    """
    return sum(module.compact() for module in model.modules() if isinstance(module, CompactWeights))
