"""What a layer has seen of its stored tensors, and whether they are the same since.

:mod:`fp4dispatch.models.stored_weights` says what this detects, and what it cannot.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, UntypedStorage

CANONICAL = ("weight", "weight_scale")
"""Buffers that can be dropped. Global scales and input scales are a few bytes and stay."""


@dataclass(frozen=True, eq=False)
class Seen:
    """A stored tensor with its ``_version``, address and storage when layouts were prepared from it.

    ``storage`` keeps no memory. It gives None once the storage is gone: then the tensor has another one, which may lie
    at the same address.
    """

    tensor: Tensor
    version: int
    address: int
    storage: weakref.ref[UntypedStorage] = field(init=False)

    def __post_init__(self) -> None:
        """Watch the storage. Its Python object lives as long as the storage itself."""
        object.__setattr__(self, "storage", weakref.ref(self.tensor.untyped_storage()))


Buffers = Mapping[str, "Tensor | None"]


def look(tensor: Tensor | None) -> Seen | None:
    """Return the record of a tensor as it is now; None for None."""
    return None if tensor is None else Seen(tensor, tensor._version, tensor.data_ptr())


def plain(tensor: Tensor) -> bool:
    """Whether a tensor has memory of its own: it is no subclass and not under vmap."""
    return type(tensor) is Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one dtype, one shape and the same bytes. Synchronises."""
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def unwritten(seen: Seen) -> bool:
    """Whether a tensor was neither written nor moved since it was recorded."""
    tensor = seen.tensor
    return tensor._version == seen.version and tensor.data_ptr() == seen.address and seen.storage() is not None


def same_place(seen: Seen, tensor: Tensor | None) -> bool:
    """Whether this is the recorded tensor, at the same address; its values may differ."""
    return tensor is seen.tensor and tensor.data_ptr() == seen.address


def held_elsewhere(seen: Seen, own: int = 0) -> bool:
    """Whether other code references this tensor or its storage. The base of a view does not count.

    ``own``: number of references of the layer beside this record.
    """
    users = int(torch._C._storage_Use_Count(seen.tensor.untyped_storage()._cdata))
    return sys.getrefcount(seen.tensor) > _REFERENCES + own or users > 2 + seen.tensor._is_view()


_REFERENCES = (lambda seen: sys.getrefcount(seen.tensor))(Seen(torch.empty(0, dtype=torch.uint8, device="cpu"), 0, 0))
"""Reference count of a tensor that only one :class:`Seen` holds, in this Python version."""


def never(_: Buffers) -> bool:
    """Return False: no tensor is recorded yet."""
    return False


def matcher(
    seen: Mapping[str, Seen | None], dropped: tuple[str, ...] = (), lent: tuple[Seen, ...] = ()
) -> Callable[[Buffers], bool]:
    """Return a function that tells whether buffers are the recorded ones. It is on the eager fast path.

    ``dropped`` names must not be there. ``lent`` tensors must be unwritten, and other code must still hold one.
    Layers with one to three stored tensors get unrolled code, which is faster than a loop. Versions only grow, so
    equal sums mean that each version is equal.
    """
    absent = tuple(name for name, found in seen.items() if found is None)
    held = tuple(
        (name, each.tensor, each.version, each.address, each.storage) for name, each in seen.items() if each is not None
    )
    if lent:
        rest = matcher(seen, dropped)
        return lambda buffers: rest(buffers) and all(map(unwritten, lent)) and any(map(held_elsewhere, lent))
    if absent == ("input_scale",) and len(held) == 1 and dropped == CANONICAL:
        return _match_dropped(*held)
    if absent == ("input_scale",) and len(held) == 2 and not dropped:
        return _match_two(*held)
    if absent == ("input_scale",) and len(held) == 3 and not dropped:
        return _match_three(*held)

    def matches(buffers: Buffers) -> bool:
        try:
            for name, tensor, version, address, storage in held:
                if buffers[name] is not tensor or tensor._version != version or tensor.data_ptr() != address:
                    return False
                if storage() is None:
                    return False
            for name in absent:
                if buffers[name] is not None:
                    return False
        except KeyError:
            return False
        return not any(name in buffers for name in dropped)

    return matches


_Held = tuple[str, Tensor, int, int, Callable[[], "UntypedStorage | None"]]


def _match_dropped(first: _Held) -> Callable[[Buffers], bool]:
    a, x, version, address, storage = first
    weight, scale = CANONICAL

    def matches(buffers: Buffers) -> bool:
        try:
            return (
                buffers[a] is x
                and buffers["input_scale"] is None
                and x._version == version
                and x.data_ptr() == address
                and storage() is not None
                and weight not in buffers
                and scale not in buffers
            )
        except KeyError:
            return False

    return matches


def _match_two(first: _Held, second: _Held) -> Callable[[Buffers], bool]:
    (a, x, x_version, x_address, x_storage), (b, y, y_version, y_address, y_storage) = first, second
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
                and x_storage() is not None
                and y_storage() is not None
            )
        except KeyError:
            return False

    return matches


def _match_three(first: _Held, second: _Held, third: _Held) -> Callable[[Buffers], bool]:
    (a, x, x_version, x_address, x_storage), (b, y, y_version, y_address, y_storage) = first, second
    c, z, z_version, z_address, z_storage = third
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
                and x_storage() is not None
                and y_storage() is not None
                and z_storage() is not None
            )
        except KeyError:
            return False

    return matches
