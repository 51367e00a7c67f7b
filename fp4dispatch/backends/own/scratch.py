"""Scratch memory for launches. Allocating it in each call would cost a small layer more host time than the launch.

Eager launches use an arena: one per thread and CUDA stream, of fixed size at a fixed address. Launches of one thread on
one stream run in order, so they can share it. Two threads could interleave on one stream, so each has its own.

A captured launch never uses the arena: a replay may run beside eager work on any stream. Its scratch comes from torch's
allocator, which inside a capture is the graph's own pool.

The arena never grows, so no address that a launch in flight uses is ever freed (flashinfer#4666 shows what a shared
workspace that grows does to graphs). A plan that needs more than the arena allocates in each call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from fp4dispatch.machine import capture
from fp4dispatch.problem.integers import round_up

ARENA_BYTES = 4 << 20
"""512 tokens of 4096 elements in 16 bits. With more, the GPU is busy for longer than an allocation takes."""
_ALIGNMENT = 512  # as torch's allocator

_arenas: dict[tuple[int, int, int], Tensor] = {}


def _no_stream(index: int) -> int:
    raise AssertionError("scratch memory for launches on a torch without CUDA")


class Part(NamedTuple):
    """One temporary tensor, contiguous."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes, rounded up so that the next part is aligned."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return round_up(count, _ALIGNMENT)


class Scratch:
    """The temporaries of one plan, which is for one M on one device.

    Parameters
    ----------
    device
        The CUDA device of the launches.
    parts
        What each launch needs. Nothing in them survives from one launch to the next.
    view
        Brings the tensors of ``parts`` into the form that the launch takes.
    """

    def __init__(
        self,
        device: torch.device,
        parts: Sequence[Part],
        view: Callable[[list[Tensor]], tuple[Tensor, ...]] = tuple,
    ) -> None:
        self._device, self._parts, self._view = device, tuple(parts), view
        self._index = 0 if device.index is None else device.index
        self._fits = sum(part.nbytes for part in self._parts) <= ARENA_BYTES
        self._found: dict[tuple[int, int], tuple[Tensor, ...]] = {}

    def __call__(self) -> tuple[Tensor, ...]:
        """Return the temporaries for a launch on the current stream, which must be on the device of the plan."""
        return self._allocated() if capture.stream_is_capturing() else self.eager()

    def eager(self) -> tuple[Tensor, ...]:
        """Return the temporaries; the caller knows that the current stream is not being captured."""
        key = (threading.get_ident(), _stream(self._index))
        return self._found.get(key) or self._first(key)

    def _first(self, key: tuple[int, int]) -> tuple[Tensor, ...]:
        if not self._fits:
            return self._allocated()
        with torch.inference_mode(mode=False):  # these tensors outlive the call: they must work outside it too
            found = self._found[key] = self._cut(key)
        return found

    def _allocated(self) -> tuple[Tensor, ...]:
        return self._view([torch.empty(part.shape, dtype=part.dtype, device=self._device) for part in self._parts])

    def _cut(self, key: tuple[int, int]) -> tuple[Tensor, ...]:
        arena = self._arena(key)
        tensors, start = [], 0
        for part in self._parts:
            flat = arena[start : start + part.nbytes]
            count = torch.Size(part.shape).numel() * part.dtype.itemsize
            tensors.append(flat[:count].view(part.dtype).view(part.shape))
            start += part.nbytes
        return self._view(tensors)

    def _arena(self, key: tuple[int, int]) -> Tensor:
        name = (*key, self._index)
        arena = _arenas.get(name)
        if arena is None:
            capture.forbid_in_capture("making scratch memory for eager launches", "run one such layer eagerly")
            arena = _arenas[name] = _lasting(self._device)
        return arena


def _lasting(device: torch.device) -> Tensor:
    """Allocate an arena in a thread of its own, so that it belongs to no CUDA graph.

    ``torch.compile(mode="reduce-overhead")`` warms a graph up before it captures it. What the calling thread allocates
    meanwhile comes from the graph's pool, and torch refuses whatever outlives the warm-up there
    (torch/_inductor/cudagraph_trees.py, ``_use_cuda_memory_pool_manager``).

    A new thread has the default stream, and the allocator gives it memory that work queued there may still use. So
    the arena is allocated on the stream that will use it.
    """
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def allocated() -> Tensor:
        with torch.cuda.stream(stream):  # None: as it is
            return torch.empty(ARENA_BYTES, dtype=torch.uint8, device=device)

    with ThreadPoolExecutor(1) as own:
        return own.submit(allocated).result()


def eager(scratch: Callable[[], tuple[Tensor, ...]]) -> Callable[[], tuple[Tensor, ...]]:
    """Return ``scratch`` without its test for a capture, if it has one."""
    return scratch.eager if isinstance(scratch, Scratch) else scratch


class ScratchByM:
    """The temporaries of a plan that holds for every M.

    Parameters
    ----------
    device, view
        As of :class:`Scratch`.
    parts
        What a launch for M tokens needs.
    """

    _MOST = 512
    """So many M are remembered; a prefill may bring any."""

    def __init__(
        self,
        device: torch.device,
        parts: Callable[[int], Sequence[Part]],
        view: Callable[[list[Tensor]], tuple[Tensor, ...]] = tuple,
    ) -> None:
        self._device, self._parts, self._view = device, parts, view
        self._known: dict[int, Scratch] = {}

    def __call__(self, m: int) -> tuple[Tensor, ...]:
        """Return the temporaries for a launch of M tokens, as :meth:`Scratch.__call__` does."""
        return self.of(m)()

    def of(self, m: int) -> Scratch:
        """Return the scratch memory for launches of M tokens."""
        found = self._known.get(m)
        if found is None:
            found = Scratch(self._device, self._parts(m), self._view)
            if len(self._known) < self._MOST:
                self._known[m] = found
        return found


_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _no_stream)
"""Returns the handle of the current stream of a device."""
