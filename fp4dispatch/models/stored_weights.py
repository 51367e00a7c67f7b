"""What a layer multiplies is what it stores: how a write to stored tensors is noticed, and what is done about it.

Backends multiply layouts that were made of the stored tensors (the ``state_dict``). Before each eager call the layer
looks whether its stored tensors are the same objects, at the same address, with the same ``Tensor._version`` as then.
A compiled call does so inside its operator. So ``layer.weight.copy_(...)``, ``layer.weight = ...``,
``layer.weight.data = ...``, ``swap_tensors`` and ``functional_call`` are noticed, and the layouts are made anew:

* After a write in place the new layout is copied into the old one. CUDA graphs that read it see the new weights.
* Where a tensor was replaced the layer gets new layouts. Graphs that were captured before keep the old ones.

What torch itself cannot tell is not noticed: writes through ``layer.weight.data``, ``numpy()`` or DLPack, in inference
mode through a view of another dtype, by collectives (``torch.distributed.broadcast`` counts no version), by other
processes, and in replays of CUDA graphs, which run no host code. After those, and after any write that a replay is to
see, call :func:`refresh`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fp4dispatch.backends.base import LinearWeights, Prepared
from fp4dispatch.dispatch import choose
from fp4dispatch.errors import InputError
from fp4dispatch.machine import capture
from fp4dispatch.machine.locks import ForkSafeLock
from fp4dispatch.run import owners
from fp4dispatch.run.routes import Bound

lock = ForkSafeLock()
"""Held where layouts or stored tensors of a layer are exchanged."""


class Seen(NamedTuple):
    """A stored tensor as layouts were made of it."""

    tensor: Tensor
    version: int
    address: int


Buffers = Mapping[str, "Tensor | None"]


class StoredWeights(nn.Module):
    """The part of a quantised layer that keeps layouts and stored tensors together."""

    quantized: ClassVar[tuple[str, ...]]
    _bound: dict[torch.dtype, Bound]
    _captured: list[Bound]
    _names: dict[torch.dtype, tuple[list[str], list[str], str]]
    """By dtype, for compiled calls: the buffers that are multiplied, those that are stored, and the spec."""
    _seen: dict[str, Seen | None]
    """By name: the stored tensors that the layouts were made of. What is dropped is not in it."""
    _lent: dict[str, Seen]
    """Weights that :meth:`compact` dropped while somebody else held them: who holds them may write."""
    _unchanged: Callable[[Buffers], bool]
    """Whether stored tensors are what the layouts were made of."""
    _keys: list[owners.Key]

    # What the layer provides.
    bind: Callable[..., Bound]
    check: Callable[[], None]
    weights: Callable[[], LinearWeights]
    _forget: Callable[[], None]
    _restore: Callable[[], None]
    _label: Callable[[], str]

    def refresh(self) -> None:
        """Make the layouts anew of what is stored now, in place, whatever was noticed. See :func:`refresh`.

        Raises
        ------
        InputError, FormatError
            If what is stored breaks its format.
        CaptureError
            During CUDA graph capture.
        """
        self._settle(force=True)

    def _settle(self, *, force: bool = False, check: bool = True) -> None:
        """Bring what is multiplied up to date with what is stored. Synchronises where there was something to do.

        Waiting for the stream ends the writes before the next launch, which may read weights ahead of its wait (PDL).
        """
        if self._lent:
            self._take_back()
        if not self._bound or (not force and self._matches(self._buffers)):
            return
        if torch.compiler.is_compiling() and not all(map(_plain, self._stored())):
            return  # a tracer has put its own tensors into the buffers
        capture.forbid_in_capture(
            f"the weights of {self._label()} were written or replaced, and preparing them anew",
            "fp4dispatch.refresh(model), or call the layer once",
        )
        with lock:
            if not force and self._matches(self._buffers):  # another thread was faster
                return
            self._refuse_what_is_not_plain()
            if check:
                self.check()
            if not (self._written_in_place() and self._rewrite()):
                self._replace()

    def _rewrite(self) -> bool:
        """Copy new layouts into the old ones; False, and nothing is changed, where they do not fit."""
        seen = {name: _look(tensor) for name, tensor in self._stored_by_name()}
        weights = self.weights()
        fresh: dict[str, Prepared] = {}
        pairs: dict[int, tuple[Tensor, Tensor]] = {}
        for bound in (*self._bound.values(), *self._captured):
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
        with torch.inference_mode():  # layouts may be inference tensors, which nothing else may write
            for a, b in pairs.values():
                if a is not b and a.data_ptr() != b.data_ptr():
                    a.copy_(b)
        for a, _ in pairs.values():
            if a.is_cuda:
                torch.cuda.current_stream(a.device).synchronize()
                break
        self._see(seen)
        return True

    def _replace(self) -> None:
        """Make layouts of their own for what is stored now; those that a CUDA graph may read stay as they are."""
        captured = [*self._captured, *(bound for bound in self._bound.values() if bound.captured)]
        dtypes = list(self._bound)
        self._forget()
        self._captured = captured
        for dtype in dtypes:
            self.bind(dtype)

    # --------------------------------------------------------------------------------------------------------- looking

    def _stored_by_name(self) -> list[tuple[str, Tensor | None]]:
        return [(name, self._buffers[name]) for name in self.quantized if name in self._buffers]

    def _stored(self) -> list[Tensor]:
        return [tensor for _, tensor in self._stored_by_name() if tensor is not None]

    def _watch(self) -> None:
        """Remember the stored tensors as they are: layouts are about to be made of them."""
        self._refuse_what_is_not_plain()
        for name, tensor in self._stored_by_name():
            if tensor is not None and tensor.is_inference():
                self._buffers[name] = _counting(tensor)
        self._see({name: _look(tensor) for name, tensor in self._stored_by_name()})

    def _see(self, seen: dict[str, Seen | None]) -> None:
        """Take over what layouts were made of, and tell the operators of compiled calls."""
        self._seen = seen
        self._unchanged = never if self._lent else _matcher(seen)
        stored = [name for name, found in seen.items() if found is not None]
        addresses = [found.address for found in seen.values() if found is not None]
        owners.forget(self, self._keys)
        self._names = {dtype: (names, stored, spec) for dtype, (names, _, spec) in self._names.items()}
        self._keys = [(bound.tensors[0].data_ptr(), *addresses) for bound in self._bound.values()]
        owners.register(self, self._keys)

    def _matches(self, buffers: Buffers) -> bool:
        return _matcher(self._seen)(buffers)

    def _written_in_place(self) -> bool:
        """Whether the stored tensors are the same ones, where they were: only what they hold may differ."""
        for name, seen in self._seen.items():
            tensor = self._buffers.get(name)
            if (seen is None) != (tensor is None) or (seen is not None and not _same_place(seen, tensor)):
                return False
        return True

    def _take_back(self) -> None:
        """Look at weights that were dropped while somebody held them: written, they are the layer's again."""
        with lock:
            if any(seen.tensor._version != seen.version for seen in self._lent.values()):
                self._restore()
            elif not any(map(held_elsewhere, self._lent.values())):
                self._lent = {}
                self._see(self._seen)

    def _refuse_what_is_not_plain(self) -> None:
        for name, tensor in self._stored_by_name():
            if tensor is not None and not _plain(tensor):
                raise InputError(
                    f"{self._label()}: {name} is a {type(tensor).__name__} that holds no memory of its own (a tensor "
                    "subclass, or one under vmap); need a plain torch.Tensor"
                )

    # ---------------------------------------------------------------------------------------------------------- owners

    def bound_to(self, dtype: torch.dtype) -> Bound:
        """Return what runs for a dtype, made of what is stored now. Host work where something has to be made."""
        bound = self._bound.get(dtype)
        return bound if bound is not None and self._unchanged(self._buffers) else self.bind(dtype)

    def stores(self, addresses: Sequence[int]) -> bool:
        """Whether these are addresses of stored tensors; not all, where a graph was given those of a time before."""
        return {tensor.data_ptr() for tensor in self._stored() if _plain(tensor)}.issuperset(addresses)

    def runs(self, dtype: torch.dtype, spec: str, address: int) -> bool:
        """Whether this is bound for a dtype with this spec, or with its first packed tensor at this address."""
        bound = self._bound.get(dtype)
        return bound is not None and (bound.spec.text == spec or bound.tensors[0].data_ptr() == address)

    def same_content(self, stored: Sequence[Tensor]) -> bool:
        """Whether these tensors hold the bytes that are stored. Synchronises."""
        mine = self._stored()
        return len(mine) == len(stored) and all(map(same_bytes, mine, stored))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.quantized and isinstance(value, nn.Parameter):
            value = value.detach()  # stored tensors are buffers; the two count versions together
        super().__setattr__(name, value)


def refresh(model: nn.Module) -> int:
    """Make what backends multiply anew of what the layers store, whatever wrote it.

    Layers notice most writes by themselves (:mod:`fp4dispatch.models.stored_weights`). Call this after those that torch
    does not count: through ``.data``, by ``torch.distributed`` collectives, by another process. Call it after any write
    before the next replay of a CUDA graph (also ``torch.compile(mode="reduce-overhead")``): replays run no host code.
    Layouts are written in place, so that graphs see the new weights.

    Parameters
    ----------
    model
        A module with ``FP4Linear`` or ``FP8Linear`` in it.

    Returns
    -------
    int
        How many layers were prepared anew. Layers that are not bound yet have nothing to prepare. Synchronises.

    Raises
    ------
    InputError, FormatError
        If what a layer stores breaks its format.
    CaptureError
        During CUDA graph capture.
    """
    layers = [module for module in model.modules() if isinstance(module, StoredWeights) and module._bound]
    for layer in layers:
        layer.refresh()
    return len(layers)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one dtype, one shape and the same bytes. Synchronises."""
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def held_elsewhere(seen: Seen) -> bool:
    """Whether anybody but ``seen`` holds its tensor, or another tensor on the memory (but the base of a view)."""
    users = int(torch._C._storage_Use_Count(seen.tensor.untyped_storage()._cdata))
    return sys.getrefcount(seen.tensor) > _REFERENCES or users > 2 + seen.tensor._is_view()


def _look(tensor: Tensor | None) -> Seen | None:
    return None if tensor is None else Seen(tensor, tensor._version, tensor.data_ptr())


def _plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _same_place(seen: Seen, tensor: Tensor | None) -> bool:
    return tensor is seen.tensor and tensor.data_ptr() == seen.address


def _fit(old: Tensor, new: Tensor) -> bool:
    return (old.shape, old.dtype, old.device, old.stride()) == (new.shape, new.dtype, new.device, new.stride())


def _counting(tensor: Tensor) -> Tensor:
    """Return an inference tensor, which counts no versions, as one that does, on the same memory."""
    with torch.inference_mode(mode=False):
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


_REFERENCES = (lambda seen: sys.getrefcount(seen.tensor))(Seen(torch.empty(0, dtype=torch.uint8, device="cpu"), 0, 0))
"""To a tensor that only one :class:`Seen` holds, as this Python counts."""


def never(_: Buffers) -> bool:
    """Stand where nothing was seen yet."""
    return False


def _matcher(seen: Mapping[str, Seen | None]) -> Callable[[Buffers], bool]:
    """Return the function that tells whether buffers are what was seen: part of the eager fast path of a layer.

    Written out for the layers that there are: a loop takes a tenth of a microsecond more. Versions only grow, so that
    their sum is the same only where each is.
    """
    absent = tuple(name for name, found in seen.items() if found is None)
    held = tuple((name, *found) for name, found in seen.items() if found is not None)
    if absent == ("input_scale",) and len(held) == 2:
        return _match_two(*held)
    if absent == ("input_scale",) and len(held) == 3:
        return _match_three(*held)

    def matches(buffers: Buffers) -> bool:
        try:
            for name, tensor, version, address in held:
                if buffers[name] is not tensor or tensor._version != version or tensor.data_ptr() != address:
                    return False
            for name in absent:
                if buffers[name] is not None:
                    return False
        except KeyError:
            return False
        return True

    return matches


_Held = tuple[str, Tensor, int, int]


def _match_two(first: _Held, second: _Held) -> Callable[[Buffers], bool]:
    (a, x, x_version, x_address), (b, y, y_version, y_address) = first, second
    versions = x_version + y_version

    def matches(buffers: Buffers) -> bool:
        try:
            return (
                buffers[a] is x
                and buffers[b] is y
                and buffers["input_scale"] is None
                and x._version + y._version == versions
                and x.data_ptr() == x_address
                and y.data_ptr() == y_address
            )
        except KeyError:
            return False

    return matches


def _match_three(first: _Held, second: _Held, third: _Held) -> Callable[[Buffers], bool]:
    (a, x, x_version, x_address), (b, y, y_version, y_address), (c, z, z_version, z_address) = first, second, third
    versions = x_version + y_version + z_version

    def matches(buffers: Buffers) -> bool:
        try:
            return (
                buffers[a] is x
                and buffers[b] is y
                and buffers[c] is z
                and buffers["input_scale"] is None
                and x._version + y._version + z._version == versions
                and x.data_ptr() == x_address
                and y.data_ptr() == y_address
                and z.data_ptr() == z_address
            )
        except KeyError:
            return False

    return matches
