"""Runs a benchmark: for every (N, K) and M check each method, then time the correct ones in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fp4dispatch.benchmark import check, roofline
from fp4dispatch.benchmark.methods.base import Card, Launch, Method, Prepared, Problems, tolerance
from fp4dispatch.benchmark.problems.operands import WEIGHT_BYTES, Operands, Truth
from fp4dispatch.benchmark.roofline import Peaks
from fp4dispatch.tune import timing
from fp4dispatch.tune.timing import Engine, Recording, Sample

LARGE = 64e6
"""Bytes of an output above which the memory of a problem's graphs is released before the next problem."""

Status = Literal["ok", "WRONG", "failed"]


@dataclass(frozen=True)
class Row:
    """One method on one problem. Only an ``ok`` row has a time.

    Of one call: ``us`` median, ``low`` minimum, ``spread`` interquartile range / median. ``off``: error of the worst
    tile against the product of the values that the method multiplies; ``tile``: that tile. ``error``: error of the
    whole output against the exact product of the stored weight and the given activation. ``least_us``: least time by
    the measured limits. ``cold``: whether weights come from memory, not from a cache. ``detail``: why there is no time.
    ``ran``: of a layer on kernels of ours, backend, kernel, build and launch shape (``Launch.ran``).
    """

    n: int
    k: int
    m: int
    method: str
    status: Status
    us: float | None = None
    low: float | None = None
    spread: float | None = None
    rounds: int = 0
    backend: str = ""
    entering: str = ""
    off: float | None = None
    tile: tuple[int, int] | None = None
    error: float | None = None
    least_us: float | None = None
    cold: bool = False
    detail: str = ""
    ran: str = ""

    @property
    def roofline(self) -> float | None:
        """Return the share of the measured roofline, 0 to 1."""
        return self.least_us / self.us if self.us and self.least_us else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; floats with five significant digits."""
        data = asdict(self) | {"roofline": self.roofline, "tile": list(self.tile) if self.tile else None}
        return {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in data.items()}


@dataclass
class Outcome:
    """The result of a run. ``absent``: method -> what it lacks here; ``left``: (N, K, M) not measured."""

    rows: list[Row] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    left: list[tuple[int, int, int]] = field(default_factory=list)
    stopped: str = ""
    seconds: float = 0.0


Say = Callable[[int, str], None]
"""Called with the number of finished problems and the current step."""
Keep = Callable[[Outcome], None]
"""Called with the result so far after every shape, so that a killed run leaves its results."""
TIMING = 0.5
"""Share of a problem's time budget for replays; the rest is for checks."""


@dataclass(frozen=True)
class _Recorded:
    """A correct method with its recording. Keeps alive what the recording reads."""

    method: Method
    launch: Launch
    recording: Recording
    calls: int


class Runner:
    """Runs methods on problems.

    Parameters
    ----------
    card, engine
        The device, and what times calls on it.
    methods
        What to compare, the baseline first.
    peaks
        Measured limits of the GPU.
    budget_s
        Seconds after which no new problem is started; None for no limit. A short budget first reduces the rounds of
        long problems, to five at least.
    clock
        Seconds, for the budget.
    say
        Called with the progress.
    keep
        Called with the result so far after each shape.
    rounds
        Rounds of each problem, unless they would take longer than the engine's limit or the budget allows.
    """

    def __init__(
        self,
        card: Card,
        engine: Engine,
        methods: Sequence[Method],
        *,
        peaks: Peaks | None = None,
        budget_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        say: Say = lambda done, text: None,
        keep: Keep = lambda outcome: None,
        rounds: int = 15,
    ) -> None:
        self.card, self.engine, self.peaks, self.rounds = card, engine, peaks or Peaks(), rounds
        self.clock, self.say, self.keep = clock, say, keep
        self.began = clock()
        self.ends = None if budget_s is None else self.began + budget_s
        self.outcome = Outcome()
        self._done = self._todo = 0
        self.methods: list[Method] = []
        for method in methods:
            lacks = method.lacks(card)
            if lacks:
                self.outcome.absent[method.name] = lacks
            else:
                self.methods.append(method)

    def run(self, shapes: Sequence[tuple[int, int]], ms: Sequence[int]) -> Outcome:
        """Measure every (N, K) with every M, in this order, within the budget."""
        return self.run_each([(n, k, ms) for n, k in shapes])

    def run_each(self, shapes: Problems) -> Outcome:
        """Measure every (N, K) with its own M, in this order, within the budget."""
        todo = [(n, k, m) for n, k, ms in shapes for m in ms]
        self._todo, self.outcome.left = len(todo), todo
        for n, k, ms in shapes:
            if self.over() or self.outcome.stopped:
                break
            self.outcome.rows += self._shape(n, k, ms)
            self.outcome.left = todo[self._done :]
            self.outcome.seconds = self.clock() - self.began
            self.keep(self.outcome)
        return self.outcome

    def over(self) -> bool:
        """Whether the budget is used up."""
        return self.ends is not None and self.clock() >= self.ends

    def limit_us(self) -> float:
        """Return the time limit for the rounds of the next problem: the engine's limit, or its share of the budget."""
        if self.ends is None:
            return self.engine.limit_us
        share = (self.ends - self.clock()) / max(self._todo - self._done, 1)
        return min(self.engine.limit_us, max(share, 0.0) * TIMING * 1e6)

    # ------------------------------------------------------------------------------------------------------- one shape

    def _shape(self, n: int, k: int, ms: Sequence[int]) -> Iterator[Row]:
        self.say(self._done, f"{n}x{k}: weights")
        operands = Operands(n, k, self.card.device)
        ready: dict[str, Prepared] = {}
        broken: dict[str, str] = {}
        for method in self.methods:
            try:
                ready[method.name] = method.prepare(operands, self._copies(method, n, k), self.card)
            except Exception as error:  # a peer may raise anything; it must not stop the others
                broken[method.name] = words(error)
        for m in ms:
            if self.over() or self.outcome.stopped:
                return
            self.say(self._done, f"{n}x{k}, M={m}")
            yield from self._problem(operands, m, ready, broken)
            self._done += 1
            if n * m * 2 > LARGE:
                self._release()
        del ready
        self._release()

    def _release(self) -> None:
        """Release the memory of captured graphs; each has its own pool."""
        if self.card.device.type == "cuda" and not self.outcome.stopped:
            torch.cuda.empty_cache()

    def _copies(self, method: Method, n: int, k: int) -> int:
        return timing.copies_for(n * k * WEIGHT_BYTES[method.held], self.engine.cache_bytes)

    # ----------------------------------------------------------------------------------------------------- one problem

    def _problem(
        self, operands: Operands, m: int, ready: Mapping[str, Prepared], broken: Mapping[str, str]
    ) -> list[Row]:
        truth = Truth(operands, m)
        rows: dict[str, Row] = {}
        recorded: dict[str, _Recorded] = {}
        contestants = [(method, ready.get(method.name)) for method in self.methods if method.most_m >= m]
        for method, prepared in [*contestants, *self.more(truth)]:
            blank = Row(operands.n, operands.k, m, method.name, "failed")
            if prepared is None:
                rows[method.name] = replace(blank, detail=broken[method.name])
                continue
            try:
                launch = prepared(truth.x)
                rows[method.name] = self.checked(method, launch, truth, blank)
                if rows[method.name].status == "ok":
                    recorded[method.name] = self._record(method, launch, rows[method.name])
            except Exception as error:
                rows[method.name] = replace(blank, detail=words(error))
                recorded.pop(method.name, None)
                if self.stop_if_dead(rows[method.name]):
                    return list(rows.values())
        try:
            self._time(recorded, rows, truth)
        except Exception as error:
            failed = {name: replace(rows[name], status="failed", us=None, detail=words(error)) for name in recorded}
            rows |= failed
            self.stop_if_dead(next(iter(failed.values())))
        return list(rows.values())

    def more(self, truth: Truth) -> Sequence[tuple[Method, Prepared]]:
        """Return what is compared in this problem beside the methods; nothing here."""
        return ()

    def _record(self, method: Method, launch: Launch, row: Row) -> _Recorded:
        copies = self._copies(method, row.n, row.k)
        count = timing.calls_for(copies, row.least_us, self.engine.once(launch.call), self.engine.replay_us)
        return _Recorded(method, launch, self.engine.record(launch.call, count, copies), count)

    def _time(self, recorded: Mapping[str, _Recorded], rows: dict[str, Row], truth: Truth) -> None:
        """Time the methods in turns, then check the outputs of the replays: a race shows only in a chain."""
        for each in recorded.values():
            for output in each.recording.latest:
                if isinstance(output, Tensor):
                    output.fill_(torch.nan)
        replays = {name: each.recording.replay for name, each in recorded.items()}
        calls = {name: each.calls for name, each in recorded.items()}
        times = timing.take_turns(replays, calls, rounds=self.rounds, limit_us=self.limit_us())
        for name, each in recorded.items():
            (output,) = each.recording.latest
            assert isinstance(output, Tensor)
            row = self._judged(each.method, each.launch, truth, rows[name], output)
            right = row.status == "ok"
            rows[name] = _timed(row, times[name]) if right else replace(row, detail=f"{row.detail}, in replays")

    def checked(self, method: Method, launch: Launch, truth: Truth, blank: Row) -> Row:
        """Run once into NaN-poisoned memory and check."""
        _poison(launch, blank.m, blank.n, self.card.device)
        got = launch.call(0)
        self.engine.finish()
        copies, size = self._copies(method, blank.n, blank.k), blank.n * blank.k * WEIGHT_BYTES[method.held]
        row = replace(
            blank,
            backend=launch.backend,
            entering=launch.entering,
            error=check.relative_error(got, truth.want(method.format, "bf16")),
            least_us=roofline.least_us(self.peaks, blank.n, blank.k, blank.m, method.held, launch.entering),
            cold=timing.is_cold(copies, size, self.engine.cache_bytes),
            ran=launch.ran,
        )
        return self._judged(method, launch, truth, row, got)

    def _judged(self, method: Method, launch: Launch, truth: Truth, row: Row, got: Tensor) -> Row:
        """Compare an output tile by tile with the exact product of the values that the method multiplies."""
        worst = check.worst_tile(got, truth.want(method.format, launch.entering))
        limit = tolerance(method.format, launch.entering, row.k)
        right = worst.error <= limit
        why = "" if right else f"tile {worst.tile} is off by {worst.error:.2g}, allowed {limit:.2g}"
        return replace(row, status="ok" if right else "WRONG", off=worst.error, tile=worst.tile, detail=why)

    def stop_if_dead(self, row: Row) -> bool:
        """Stop the run if the device is unusable after an error."""
        try:
            self.engine.finish()
        except Exception as error:
            where = f"{row.method} at {row.n}x{row.k}, M={row.m}"
            self.outcome.stopped = f"{where}: {row.detail}; the device cannot go on: {words(error)}"
        return bool(self.outcome.stopped)


def _poison(launch: Launch, m: int, n: int, device: torch.device) -> None:
    """Fill the output with NaN; without a fixed output, the memory that the allocator returns next."""
    if launch.out is not None:
        launch.out.fill_(torch.nan)
    else:
        fresh: Tensor | None = torch.full((m, n), torch.nan, dtype=torch.bfloat16, device=device)
        del fresh


def _timed(row: Row, sample: Sample) -> Row:
    return replace(row, us=sample.us, low=sample.low, spread=sample.spread, rounds=sample.rounds)


def words(error: Exception) -> str:
    """Return an exception as one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
