"""Runs the random suite: methods as in any benchmark, and beside them the fastest of all launches of our kernels.

Launches are first timed alone, with few replays. The fastest of each family then take turns with the methods, so that
what is compared was measured together. All are checked like methods: a wrong one is reported and has no time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from fp4dispatch.benchmark import run as runs
from fp4dispatch.benchmark.methods.background import Background
from fp4dispatch.benchmark.methods.base import Launch, Method, Prepared, Problems
from fp4dispatch.benchmark.methods.launches import FAMILIES, FIRST, Family, Launcher, OwnLaunch
from fp4dispatch.benchmark.problems.operands import Format, Operands, Truth
from fp4dispatch.benchmark.problems.sampling import Sample
from fp4dispatch.benchmark.run import Outcome, Row
from fp4dispatch.tune import timing

FINALISTS = 2
"""Launches of a family that take turns with the methods."""
SIEVE_ROUNDS, SIEVE_REPLAY_US = 3, 200.0


class LaunchMethod(Method):
    """One launch as a method of a problem."""

    ours = True

    def __init__(self, launch: OwnLaunch) -> None:
        self.launch, self.name, self.format = launch, launch.name, launch.family.format
        self.what = "a build and launch shape"

    def lacks(self, card: object) -> str:
        """Return an empty text: it has run."""
        return ""

    def prepare(self, operands: Operands, copies: int, card: object) -> Prepared:
        """Raise: a :class:`Launcher` prepares it."""
        raise NotImplementedError("launches are prepared by a Launcher")


class RandomRunner(runs.Runner):
    """A :class:`~fp4dispatch.benchmark.run.Runner` that also times launches.

    ``families``: whose launches; empty for none. ``tried``: (N, K, M) -> how many launches were right and timed.
    ``formats``: weight format of each launch that has a row, by its name. ``refused``: launch shapes that do not fit
    this GPU, each with what its kernel said last.
    """

    families: Sequence[Family] = ()

    def run_sample(self, sample: Sample, families: Iterable[Family] = FAMILIES) -> Outcome:
        """Measure the problems of a sample, in its order, within the budget."""
        self.families = tuple(families)
        self.tried: dict[tuple[int, int, int], int] = {}
        self.formats: dict[str, Format] = {}
        self.refused: dict[str, str] = {}
        self._launcher: Launcher | None = None
        self._wrong: list[Row] = []
        outcome = self.run_each(_problems(sample))
        outcome.rows += self._wrong
        return outcome

    def ahead(self, sample: Sample) -> Background:
        """Return what other processes do for the methods of this run, to be entered for the time of the run."""
        jobs = (method.ahead(_problems(sample), self.card) for method in self.methods)
        return Background(job for job in jobs if job is not None)

    def more(self, truth: Truth) -> Sequence[tuple[Method, Prepared]]:
        """Return the fastest launches of each family."""
        if not self.families or self.over():
            return ()
        if self._launcher is None or self._launcher.operands is not truth.operands:
            self._launcher = None  # frees the weights of the shape before
            self._launcher = Launcher(truth.operands, self.engine.cache_bytes, self.card, self.families)
        launcher, m = self._launcher, truth.x.shape[0]
        times: dict[Family, list[tuple[float, OwnLaunch]]] = {}
        out = truth.x.new_empty(m, truth.operands.n)
        for launch in launcher.all(m, FIRST):
            us = self._sieve(launcher, launch, truth, out)
            if self.outcome.stopped:
                return ()
            if us is not None:
                times.setdefault(launch.family, []).append((us, launch))
        self.tried[truth.operands.n, truth.operands.k, m] = sum(map(len, times.values()))
        best = [each for found in times.values() for _, each in sorted(found, key=lambda t: t[0])[:FINALISTS]]
        return [(LaunchMethod(launch), _at(launcher, launch)) for launch in best]

    def _sieve(self, launcher: Launcher, launch: OwnLaunch, truth: Truth, out: Tensor) -> float | None:
        """Check a launch and return its microseconds; None for one that is wrong or is refused by its kernel."""
        method, m = LaunchMethod(launch), truth.x.shape[0]
        self.formats[method.name] = method.format
        blank = Row(truth.operands.n, truth.operands.k, m, method.name, "failed")
        try:
            made = launcher.at(launch, truth.x, out)
            try:
                row = self.checked(method, made, truth, blank)
            except ValueError as error:  # a launch shape that does not fit this GPU, refused before the launch
                self.refused[method.name] = runs.words(error)
                return None
            if row.status != "ok":
                self._wrong.append(row)
                return None
            return self._short(made, launcher.copies(launch.family), row.least_us)
        except Exception as error:
            self._wrong.append(replace(blank, detail=runs.words(error)))
            self.stop_if_dead(self._wrong[-1])
            return None

    def _short(self, made: Launch, copies: int, least_us: float | None) -> float:
        """Return the median of few replays."""
        once = self.engine.once(made.call)
        calls = timing.calls_for(copies, least_us, once, SIEVE_REPLAY_US)
        replay = self.engine.record(made.call, calls, copies).replay
        return timing.take_turns({"": replay}, {"": calls}, rounds=SIEVE_ROUNDS, least=SIEVE_ROUNDS, warmup=1)[""].us


def _problems(sample: Sample) -> Problems:
    return [(layer.n, layer.k, ms) for layer, ms in sample.shapes]


def _at(launcher: Launcher, launch: OwnLaunch) -> Prepared:
    return lambda x: launcher.at(launch, x)
