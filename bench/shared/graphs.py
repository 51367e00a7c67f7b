"""Times of CUDA graphs for the kernel scripts, by the harness of the package (fp4dispatch.tune.timing)."""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from fp4dispatch.tune import timing

COPY_BYTES_PER_US = 4.28e6  # what a copy reaches on an H200
COLD_BYTES = 300e6
METHOD = f"CUDA graph replay, cold weights (> {COLD_BYTES / 1e6:.0f} MB rotated), medians, us"
K = TypeVar("K")


@dataclass(frozen=True)
class Captured:
    """A recorded series of calls. Holds ``call`` too: a graph does not own the memory that it reads."""

    recording: timing.Recording
    calls: int
    call: Callable[[int], Any]


@functools.cache
def engine() -> timing.GraphEngine:
    """Return what records and times on the current GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    return timing.GraphEngine(device, float(torch.cuda.get_device_properties(device).L2_cache_size))


@contextmanager
def watched(what: object) -> Iterator[None]:
    """End the process, and say why, where a kernel hangs: nothing else could use the GPU."""

    def give_up() -> None:
        print(f"HANGS: {what}", flush=True)
        os._exit(3)

    timer = threading.Timer(25, give_up)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def capture(call: Callable[[int], Any], copies: int, calls: int) -> Captured:
    """Record ``calls`` calls, on copies 0, 1, ... of the weights in turn."""
    return Captured(engine().record(call, calls, copies), calls, call)


def microseconds(graphs: Mapping[K, Captured], rounds: int, warmup: int = 1) -> dict[K, float]:
    """Replay the graphs in turn; return the median time of one call of each. A graph that hangs ends the process."""

    def watching(name: K, replay: timing.Replay) -> timing.Replay:
        def watched_replay() -> float:
            with watched(f"timing {name}"):
                return replay()

        return watched_replay

    replays = {name: watching(name, each.recording.replay) for name, each in graphs.items()}
    counts = {name: each.calls for name, each in graphs.items()}
    found = timing.take_turns(replays, counts, rounds=rounds, least=rounds, warmup=warmup, limit_us=math.inf)
    return {name: sample.us for name, sample in found.items()}
