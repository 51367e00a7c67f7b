"""Capture a sequence of CUDA graphs into one memory pool.

:class:`torch.cuda.graph` synchronises, collects garbage and empties the allocator's cache for each graph. A model has
one segment between two breaks, and so dozens of graphs a bucket: here this happens once a bucket.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Protocol

import torch


class Segment(Protocol):
    """What was captured between two breaks."""

    def replay(self) -> None:
        """Launch it on the current stream."""

    def reset(self) -> None:
        """Give its memory back to the pool."""


class Tape(Protocol):
    """Captures one segment after the other."""

    def session(self) -> AbstractContextManager[None]:
        """Prepare for the segments of one bucket."""

    def begin(self) -> None:
        """Start a segment."""

    def end(self) -> Segment:
        """End the segment and return it."""

    def abandon(self) -> None:
        """End a segment that failed. Never raises."""

    def held(self) -> int:
        """Return the bytes of the memory pool that the segments share."""


_streams: dict[torch.device, torch.cuda.Stream] = {}


class CudaTape:
    """Captures into a memory pool of its own, on a stream that all captures on the device share.

    What layers keep for each stream, such as scratch memory, is then there once.
    ``capture_error_mode="thread_local"``: other threads may allocate and launch during a capture.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream = _streams[device]
        self._graph: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def session(self) -> Iterator[None]:
        """Run the block on the capture stream, behind all work of the current stream."""
        current = torch.cuda.current_stream(self._device)
        gc.collect()  # a tensor that dies during a capture would be freed there
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def begin(self) -> None:
        """Start a segment."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graph = graph

    def end(self) -> Segment:
        """End the segment and return it."""
        graph, self._graph = self._graph, None
        assert graph is not None
        graph.capture_end()
        return graph

    def abandon(self) -> None:
        """End a segment that failed. Never raises."""
        graph, self._graph = self._graph, None
        if graph is not None:
            with suppress(RuntimeError):  # the error that broke the capture is reported already
                graph.capture_end()
            with suppress(RuntimeError):
                graph.reset()

    def held(self) -> int:
        """Return the bytes of the memory pool that the segments share."""
        pools = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return sum(part["total_size"] for part in pools if tuple(part["segment_pool_id"]) == tuple(self._pool))
