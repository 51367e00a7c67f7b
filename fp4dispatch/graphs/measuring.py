"""Measure replays beside eager calls, and find from how many tokens on the replays of a bucket pay.

A replay of a bucket costs nearly the same however many tokens fill it. An eager call costs the launches at least, and
above that grows with its tokens. So two sizes tell: the fewest tokens that the bucket serves, and the full bucket.
Between them both times are taken as linear.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fp4dispatch.errors import CaptureError
from fp4dispatch.graphs.batch import MAX_PADDING
from fp4dispatch.tune.agreement import Ranks

MARGIN = 0.03
"""An eager call must be faster by this share of its time, or it counts as noise and the graph is used."""

ROUNDS = 3
"""Timed pairs of calls at one size, after one that does not count. The fastest of each counts."""

LONG = 0.1
"""Seconds of a pair of calls from which on one round less is timed: noise is small beside them."""

Clock = Callable[[Callable[[], object]], float]
"""Runs some work to its end and returns the seconds that it took."""

Call = Callable[[int], object]
"""Runs the model on so many tokens."""


@dataclass(frozen=True)
class Point:
    """Seconds of an eager call and of a replay of the same tokens, on the slowest rank."""

    tokens: int
    eager: float
    replay: float

    @property
    def gain(self) -> float:
        """How much longer the eager call takes, in seconds. An eager call that is faster within the margin gains."""
        return self.eager * (1 + MARGIN) - self.replay


@dataclass(frozen=True)
class Measured:
    """What was measured of a bucket: at its fewest tokens first, then where it is full, if that was needed."""

    bucket: int
    points: tuple[Point, ...]

    @property
    def pays_from(self) -> int:
        """Smallest number of tokens whose replay pays; larger than the bucket if none does."""
        low, full = self.points[0], self.points[-1]
        if low.gain >= 0:
            return 1
        if full.gain < 0:
            return self.bucket + 1
        return low.tokens + math.ceil((full.tokens - low.tokens) * low.gain / (low.gain - full.gain))


def fewest_tokens(bucket: int, smaller: int) -> int:
    """Return the fewest tokens that a bucket serves. ``smaller``: the next smaller bucket, 0 if there is none."""
    return max(smaller + 1, -(-bucket // MAX_PADDING))


def measure(buckets: Sequence[int], eager: Call, replay: Call, clock: Clock, ranks: Ranks) -> dict[int, Measured]:
    """Time eager calls and replays of each bucket, in turn.

    A size costs at most 1 + :data:`ROUNDS` eager calls and as many replays. A bucket costs one size where its replays
    win with the fewest tokens already, else two.

    Parameters
    ----------
    buckets
        Captured numbers of tokens, ascending.
    eager, replay
        Run a call without and with graphs.
    clock
        Times them.
    ranks
        All must make this call. They get the same numbers: those of the slowest rank.

    Raises
    ------
    CaptureError
        If a call failed, on any rank.
    RankError
        If a rank died.
    """
    found = {}
    for smaller, bucket in zip((0, *buckets), buckets, strict=False):
        points = [_point(fewest_tokens(bucket, smaller), eager, replay, clock, ranks)]
        if points[0].gain < 0 and points[0].tokens < bucket:
            points.append(_point(bucket, eager, replay, clock, ranks))
        found[bucket] = Measured(bucket, tuple(points))
    return found


def _point(tokens: int, eager: Call, replay: Call, clock: Clock, ranks: Ranks) -> Point:
    def pair() -> tuple[float, float]:
        return clock(lambda: eager(tokens)), clock(lambda: replay(tokens))

    first = _slowest(tokens, pair, ranks)  # binds layers and fills caches; all ranks count rounds by its time
    rounds = ROUNDS - (sum(first) >= LONG)

    def fastest() -> tuple[float, float]:
        pairs = [pair() for _ in range(rounds)]
        return min(mine for mine, _ in pairs), min(theirs for _, theirs in pairs)

    return Point(tokens, *_slowest(tokens, fastest, ranks))


def _slowest(tokens: int, work: Callable[[], tuple[float, float]], ranks: Ranks) -> tuple[float, float]:
    times, fault = (0.0, 0.0), ""
    try:
        times = work()
    except Exception as error:  # any error: the other ranks must not wait for this one
        fault = f"{type(error).__name__}: {error}"
    everyone = ranks.gather((times, fault))
    if fault := next((fault for _, fault in everyone if fault), ""):
        raise CaptureError(f"a call of {tokens} tokens failed: {fault}")
    return max(times[0] for times, _ in everyone), max(times[1] for times, _ in everyone)


def device_clock(device: torch.device) -> Clock:
    """Return a clock that waits for a GPU before and after the work: launches on the host count too."""

    def clock(work: Callable[[], object]) -> float:
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        work()
        torch.cuda.synchronize(device)
        return time.perf_counter() - began

    return clock
