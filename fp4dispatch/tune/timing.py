"""How time is taken: weights from memory, one graph a method, methods in turns, the median and its spread.

A *recording* is a series of calls on rotating copies of the weights; its ``replay`` runs them once and returns how many
microseconds that took. On a GPU it is a CUDA graph, on a CPU a loop. Everything that decides (how many copies, calls,
rounds; whose turn it is) works on numbers and replays alone, so it is tested without a GPU and without a clock.
"""

from __future__ import annotations

import abc
import contextlib
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

K = TypeVar("K")
Call = Callable[[int], object]
"""One call of a method, on copy ``i`` of its weights."""
Replay = Callable[[], float]


@dataclass(frozen=True)
class Recording:
    """A recorded series of calls. ``latest`` holds what the last call returned, once something has run."""

    replay: Replay
    latest: list[object]


COLD = 3.0
"""Weights are rotated over more than this many times the L2 cache."""
MOST_COPIES = 256
REPLAY_US = 500.0
"""A replay lasts about this long at least, so that what it takes to start one does not count."""
LONG_REPLAY_US = 50_000.0
HEAD_START = 100_000
"""Clocks for which the GPU is kept busy before a timed piece of work: by then the work is in the queue, and the time of
launching it, about 10 us, is not measured."""


@dataclass(frozen=True)
class Sample:
    """Times of one call, in microseconds: the median, the least; ``spread`` = quartile distance over the median."""

    us: float
    low: float
    spread: float
    rounds: int


def summarise(times: Sequence[float]) -> Sample:
    """Return median, least and spread of at least two positive times."""
    if len(times) < 2 or not all(0 < t < math.inf for t in times):
        raise ValueError(f"need two or more positive times, found {list(times)}")
    median = statistics.median(times)
    first, _, third = statistics.quantiles(times, n=4, method="inclusive")
    return Sample(median, min(times), (third - first) / median, len(times))


def copies_for(weight_bytes: float, cache_bytes: float) -> int:
    """Return how many copies of a weight to rotate: over three caches, at least two and at most ``MOST_COPIES``."""
    return min(max(2, math.floor(COLD * cache_bytes / weight_bytes) + 1), MOST_COPIES)


def is_cold(copies: int, weight_bytes: float, cache_bytes: float) -> bool:
    """Whether rotating so many copies takes every weight from memory."""
    return copies * weight_bytes > COLD * cache_bytes


def calls_for(copies: int, floor_us: float | None, eager_us: float, replay_us: float = REPLAY_US) -> int:
    """Return how many calls one replay holds, a multiple of ``copies``.

    Parameters
    ----------
    copies
        How many copies of the weights are rotated.
    floor_us
        Least time of a call that is possible; None where it is not known.
    eager_us
        What one call took on its own: never less than the call takes in a graph.
    replay_us
        How long a replay is to last at least.
    """
    wanted = replay_us / max(floor_us or eager_us, 0.1)
    most = LONG_REPLAY_US / max(eager_us, 0.1)
    return copies * max(1, math.ceil(min(wanted, most) / copies))


def take_turns(
    replays: Mapping[K, Replay],
    calls: Mapping[K, int],
    *,
    rounds: int = 15,
    least: int = 5,
    warmup: int = 2,
    limit_us: float = 2e6,
) -> dict[K, Sample]:
    """Replay every method once a round and return the time of one call of each.

    Whoever goes first in a round goes last in the next, so that no method always follows the same one.

    Parameters
    ----------
    replays, calls
        By method: the replay, and how many calls it holds.
    rounds, least, warmup
        Rounds that count, unless they would take longer than ``limit_us``: then fewer, at least ``least``. ``warmup``
        rounds go before and do not count.
    """
    names = list(replays)
    times: dict[K, list[float]] = {name: [] for name in names}
    took = 0.0
    for _ in range(warmup):
        took = sum(replays[name]() for name in names)
    if took > 0:
        rounds = max(least, int(min(rounds, limit_us / took)))
    for turn in range(rounds):
        start = turn % max(len(names), 1)
        for name in names[start:] + names[:start]:
            times[name].append(replays[name]() / calls[name])
    return {name: summarise(values) for name, values in times.items()}


class Engine(abc.ABC):
    """What runs and times calls.

    ``replay_us``: how long a replay lasts at least; ``limit_us``: how long the rounds of one problem may take.
    """

    device: torch.device
    cache_bytes: float = 0.0
    replay_us: float = REPLAY_US
    limit_us: float = 2e6

    @abc.abstractmethod
    def once(self, call: Call) -> float:
        """Run a call that has run before, on its own; return its microseconds."""

    @abc.abstractmethod
    def record(self, call: Call, calls: int, copies: int) -> Recording:
        """Record ``calls`` calls, on copies 0, 1, ... in turn."""

    def finish(self) -> None:  # noqa: B027  (nothing to do on a CPU)
        """Wait for everything that was launched; raises where something of it failed."""


class WallEngine(Engine):
    """Runs calls one after the other and reads a clock: for a CPU, and for what a call costs the host."""

    replay_us = 0.0
    limit_us = 3e5

    def __init__(self, clock: Callable[[], float] = time.perf_counter, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.clock = clock

    def once(self, call: Call) -> float:
        """Run one call."""
        start = self.clock()
        call(0)
        return (self.clock() - start) * 1e6

    def record(self, call: Call, calls: int, copies: int) -> Recording:
        """Return a loop over the calls."""
        latest: list[object] = []

        def replay() -> float:
            start = self.clock()
            for i in range(calls):
                result = call(i % copies)
            took = self.clock() - start
            latest[:] = [result]
            return took * 1e6

        return Recording(replay, latest)


class GraphEngine(Engine):
    """Captures calls into a CUDA graph and times its replays with events."""

    def __init__(self, device: torch.device, cache_bytes: float) -> None:
        self.device, self.cache_bytes = device, cache_bytes
        self._stream: torch.cuda.Stream | None = None

    def finish(self) -> None:
        """Synchronise the device."""
        torch.cuda.synchronize(self.device)

    def once(self, call: Call) -> float:
        """Run one call between two events: with what of its launch takes longer than the head start."""
        self.finish()
        return self._between(lambda: call(0))

    def record(self, call: Call, calls: int, copies: int) -> Recording:
        """Capture; the graph keeps alive what the calls allocate, the caller what they read.

        Not with ``torch.cuda.graph``, which empties the allocator's cache each time: milliseconds, thousands of times.
        """
        graph = torch.cuda.CUDAGraph()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self.finish()
        with torch.cuda.stream(self._stream):
            call(0)  # what is made once a stream, e.g. cuBLAS's workspace, must not end up in the graph's memory
            self.finish()
            graph.capture_begin()
            try:
                for i in range(calls):
                    result = call(i % copies)
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the capture is spoilt already: the first error is the one
                    graph.capture_end()
                raise
            graph.capture_end()

        def replay() -> float:
            return self._between(graph.replay)

        return Recording(replay, [result])

    def _between(self, work: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(HEAD_START)  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3
