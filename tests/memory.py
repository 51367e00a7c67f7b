"""Bytes of tensor storages that are alive, and their peak: what ``torch.cuda.max_memory_allocated`` is on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp4dispatch.machine import transforms


class Alive(TorchDispatchMode):
    """Count the storages of a model's tensors and those beside, and of all that operators return inside the block.

    Host work of layers leaves dispatch modes, whose tensors may have no memory. It must not leave this one, which only
    looks on: so it does not count as a mode there.
    """

    def __init__(self, model: nn.Module, *beside: torch.Tensor) -> None:
        super().__init__()
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        for tensor in (*model.parameters(), *model.buffers(), *beside):
            self._add(tensor)
        self.before = self.peak = self.now()

    def __enter__(self) -> Alive:
        self._modes = transforms._dispatch_modes
        transforms._dispatch_modes = lambda: self._modes() - 1
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        transforms._dispatch_modes = self._modes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                self._add(tensor)
        self.peak = max(self.peak, self.now())
        return out

    def _add(self, tensor: torch.Tensor) -> None:
        if tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        self._held[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def now(self) -> int:
        """Return the bytes that are alive."""
        self._held = {key: (ref, size) for key, (ref, size) in self._held.items() if not ref.expired()}
        return sum(size for _, size in self._held.values())
