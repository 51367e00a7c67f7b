"""The timing harness: a cold cache, one CUDA graph per method, methods in turn, median and spread.

Tuning, ``fp4dispatch bench`` and the kernel scripts in ``bench/`` use it. A *recording* is a series of calls on
rotating copies of the weights; ``replay`` runs them once and returns the microseconds. On a GPU it is a CUDA graph, on
a CPU a loop. Before each replay other data fills the cache: what a replay left there may serve the next one. The number
of copies, calls and rounds and the order of methods depend on numbers and replays only, so they are tested without a
GPU and without a clock.
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

from fp4dispatch.errors import InputError

K = TypeVar("K")
Call = Callable[[int], object]
"""One call of a method, on copy ``i`` of its weights."""
Replay = Callable[[], float]


@dataclass(frozen=True)
class Recording:
    """A recorded series of calls. ``latest`` holds what the last call returned; empty before the first replay."""

    replay: Replay
    latest: list[object]


COLD = 3.0
"""Rotating weights take more than this many times the L2 cache."""
MOST_COPIES = 256
REPLAY_US = 500.0
"""Least time of a replay, so that its start does not count."""
LONG_REPLAY_US = 50_000.0
EVICTED = 2.0
"""Other data of so many times the L2 cache is read before timed work. It is not written: it would go to memory
meanwhile. A graph that has just been replayed finds its launches' parameters and tensor maps in L2, one that follows
another method does not. FP8 layers of up to 64 tokens then take about 1 us longer (bench/notes/few-tokens.md)."""
HEAD_START, CALL_HEAD_START = 100_000, 400_000
"""Clocks for which the GPU is kept busy before a replay, and before one call. By then the work is queued, so that its
launch is not measured: of a graph about 10 us, of one call up to 100 us."""


@dataclass(frozen=True)
class Sample:
    """Time of one call, in microseconds: ``us`` median, ``low`` least; ``spread`` = quartile distance / median."""

    us: float
    low: float
    spread: float
    rounds: int


def gpu() -> torch.device:
    """Return the current GPU, to measure on; InputError where torch sees none."""
    if not torch.cuda.is_available():
        raise InputError("tune measures on a GPU, and torch sees none\n  fix: `fp4dispatch doctor` says why")
    return torch.device("cuda", torch.cuda.current_device())


def summarise(times: Sequence[float]) -> Sample:
    """Return median, least and spread of at least two positive times."""
    if len(times) < 2 or not all(0 < t < math.inf for t in times):
        raise ValueError(f"need two or more positive times, found {list(times)}")
    median = statistics.median(times)
    first, _, third = statistics.quantiles(times, n=4, method="inclusive")
    return Sample(median, min(times), (third - first) / median, len(times))


def copies_for(weight_bytes: float, cache_bytes: float) -> int:
    """Return how many copies of a weight to rotate: more than ``COLD`` caches, from 2 to ``MOST_COPIES``."""
    return min(max(2, math.floor(COLD * cache_bytes / weight_bytes) + 1), MOST_COPIES)


def is_cold(copies: int, weight_bytes: float, cache_bytes: float) -> bool:
    """Whether so many rotating copies are always read from memory, not from the cache."""
    return copies * weight_bytes > COLD * cache_bytes


def calls_for(copies: int, floor_us: float | None, eager_us: float, replay_us: float = REPLAY_US) -> int:
    """Return how many calls one replay holds, a multiple of ``copies``.

    Parameters
    ----------
    copies
        How many copies of the weights are rotated.
    floor_us
        Lower bound of the time of a call; None if unknown.
    eager_us
        Time of one call on its own; in a graph it takes no longer.
    replay_us
        Least time of a replay.
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
    """Replay every method once a round; return the time of one call of each.

    The first method of a round is the last of the next, so that no method always follows the same one.

    Parameters
    ----------
    replays, calls
        By method: the replay, and how many calls it holds.
    rounds, least, warmup
        Rounds that count. Fewer, but at least ``least``, where they would take longer than ``limit_us``. ``warmup``
        rounds come first and do not count.
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
    """Runs and times calls.

    ``replay_us``: least time of a replay. ``limit_us``: limit for all rounds of one problem.
    """

    device: torch.device
    cache_bytes: float = 0.0
    replay_us: float = REPLAY_US
    limit_us: float = 2e6

    @abc.abstractmethod
    def once(self, call: Call) -> float:
        """Run one call, not the first; return its microseconds."""

    @abc.abstractmethod
    def record(self, call: Call, calls: int, copies: int) -> Recording:
        """Record ``calls`` calls, on copies 0, 1, ... in turn."""

    def finish(self) -> None:  # noqa: B027  (nothing to do on a CPU)
        """Wait for all launches; raise where one failed."""


class WallEngine(Engine):
    """Runs calls one after the other and reads a clock: for a CPU, and for the host cost of a call."""

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
        """Run one call between two events. Includes launch time beyond the head start."""
        self.finish()
        return self._between(lambda: call(0), CALL_HEAD_START)

    def record(self, call: Call, calls: int, copies: int) -> Recording:
        """Capture. The graph owns what the calls allocate; the caller must keep alive what they read.

        Not with ``torch.cuda.graph``: it empties the allocator's cache each time, which takes milliseconds.
        """
        graph = torch.cuda.CUDAGraph()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self.finish()
        with torch.cuda.stream(self._stream):
            call(0)  # allocates what is made once a stream (cuBLAS's workspace) outside of the graph's memory
            self.finish()
            graph.capture_begin()
            try:
                for i in range(calls):
                    result = call(i % copies)
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the first error counts
                    graph.capture_end()
                raise
            graph.capture_end()

        def replay() -> float:
            return self._between(graph.replay, HEAD_START)

        return Recording(replay, [result])

    def _between(self, work: Callable[[], object], head_start: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.empty(int(EVICTED * self.cache_bytes) // 4, dtype=torch.float32, device=self.device).sum()
        torch.cuda._sleep(head_start)  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3
