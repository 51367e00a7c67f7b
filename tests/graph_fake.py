"""A CUDA graph on the CPU: operations that run between ``begin`` and ``end`` are recorded with their tensors.

``replay`` runs them again on the same tensors, and writes the results to the memory of the recorded results. As with a
CUDA graph, Python does not run again, addresses are fixed, and what is not a tensor operation is frozen.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class FakeClock:
    """Time that passes only where it is told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self, work):
        began = self.now
        work()
        return self.now - began


class Recorded:
    def __init__(self, clock=None, seconds=0.0):
        self.calls = []
        self.clock, self.seconds = clock, seconds
        self.was_reset = False
        self.replays = 0

    def replay(self):
        assert not self.was_reset, "a segment that was freed is replayed"
        self.replays += 1
        if self.clock is not None:
            self.clock.now += self.seconds
        with torch.inference_mode():  # a real replay does not care about the mode in which tensors were made
            for op, args, kwargs, outs in self.calls:
                found = pytree.tree_leaves(op(*args, **kwargs))
                for out, new in zip(outs, found, strict=True):
                    if isinstance(out, torch.Tensor) and new.data_ptr() != out.data_ptr():
                        out.copy_(new)

    def reset(self):
        self.was_reset = True
        self.calls = []


class _Recording(TorchDispatchMode):
    def __init__(self, segment):
        super().__init__()
        self.segment = segment

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        self.segment.calls.append((op, args, kwargs or {}, pytree.tree_leaves(out)))
        return out


class FakeTape:
    """``fail_at``: the number of the segment whose capture raises. ``seconds``: of a replay of a segment, by clock."""

    def __init__(self, fail_at=None, error=None, clock=None, seconds=0.0):
        self.segments, self.sessions, self.abandoned = [], 0, 0
        self.fail_at, self.error = fail_at, error or RuntimeError("planted")
        self.clock, self.seconds = clock, seconds
        self._mode = None

    @contextmanager
    def session(self):
        self.sessions += 1
        yield

    def begin(self):
        segment = Recorded(self.clock, self.seconds)
        self._mode = _Recording(segment)
        self._mode.__enter__()
        self.segments.append(segment)

    def end(self):
        self._mode.__exit__(None, None, None)
        self._mode = None
        if self.fail_at == len(self.segments) - 1:
            raise self.error
        return self.segments[-1]

    def held(self):
        """1000 bytes a segment."""
        return 1000 * len(self.segments)

    def abandon(self):
        self.abandoned += 1
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None
