"""Find the layer that owns the tensors of a compiled call.

The inputs of a compiled graph are the packed weights and the stored tensors of a layer. The operator finds the layer
by the addresses of these tensors. The layer then tells whether the packed weights are up to date with the stored
tensors (:mod:`fp4dispatch.models.stored_weights`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from fp4dispatch.errors import InputError
from fp4dispatch.machine import capture
from fp4dispatch.run.routes import Bound

Key = tuple[str, tuple[int, ...]]
"""Spec text, or empty for any; addresses of the first packed tensor and of all stored ones."""


class Owner(Protocol):
    """The interface of a layer that this module needs."""

    def bound_to(self, dtype: torch.dtype) -> Bound:
        """Return the bound layer for a dtype, with weights prepared from the stored tensors."""

    def stores(self, addresses: Sequence[int]) -> bool:
        """Whether these are addresses of its stored tensors."""

    def runs(self, dtype: torch.dtype, *, spec: str | None = None, address: int | None = None) -> bool:
        """Whether it is bound for a dtype with this spec, or with its first packed tensor at this address."""

    def same_content(self, stored: Sequence[Tensor]) -> bool:
        """Whether these tensors hold the bytes that it stores. Synchronises."""


_owners: dict[Key, weakref.ref[Owner]] = {}
_all: weakref.WeakSet[Owner] = weakref.WeakSet()


def register(owner: Owner, keys: Sequence[Key]) -> None:
    """Register an owner under its keys. Of two layers that share tensors and spec, either is right."""
    _all.add(owner)
    for key in keys:
        _owners[key] = weakref.ref(owner, lambda gone, key=key: _drop(key, gone))  # type: ignore[misc]


def forget(owner: Owner, keys: Sequence[Key]) -> None:
    """Remove what :func:`register` added."""
    for key in keys:
        found = _owners.get(key)
        if found is not None and found() is owner:
            del _owners[key]


def _drop(key: Key, gone: weakref.ref[Owner]) -> None:
    if _owners.get(key) is gone:
        del _owners[key]


def bound_for(dtype: torch.dtype, spec: str, tensors: Sequence[Tensor], stored: Sequence[Tensor]) -> Bound:
    """Return the bound layer that owns these tensors, with weights prepared from its stored tensors.

    Layers may share tensors and run other backends, so those with this ``spec`` come first. A graph keeps the spec that
    it was compiled with, and its layer may have been bound anew: then the tensors decide.

    Raises
    ------
    InputError
        If no layer stores them, e.g. under ``torch.func.functional_call`` with other weights.
    CaptureError
        If weights would have to be prepared anew while a CUDA graph is being captured.
    """
    addresses = tuple(tensor.data_ptr() for tensor in stored)
    first = tensors[0].data_ptr()
    where = (first, *addresses)
    found = _owners.get((spec, where)) or _owners.get(("", where))
    owner = None if found is None else found()
    if owner is not None:
        bound = owner.bound_to(dtype)
        if owner.stores(addresses):
            return bound
    layers = list(_all)
    candidates = [owner for owner in layers if owner.runs(dtype, spec=spec)]
    candidates += [owner for owner in layers if owner.runs(dtype, address=first)]
    for owner in candidates:
        if owner.stores(addresses):
            return owner.bound_to(dtype)
    # A compiler may copy an input to align it. Then addresses differ: compare bytes.
    capture.forbid_in_capture("comparing weights that were copied for this call", "run the compiled model once")
    for owner in candidates:
        if owner.same_content(stored):
            return owner.bound_to(dtype)
    raise InputError(
        "a compiled call was given weights that are not what its layer stores (torch.func.functional_call with other "
        "weights, for instance), and packed weights belong to stored ones: call it without torch.compile, or give the "
        "layer these weights first, with load_state_dict"
    )
