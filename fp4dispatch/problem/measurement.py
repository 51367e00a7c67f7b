"""What ``tune`` measured for one problem, and whether it moves a choice: pure data and one pure rule.

A candidate is a backend with an activation format. Our own kernels are timed in several launch configurations of each
candidate; the fastest one stands for it, and later plans launch it.

Statistics: the time of a candidate is the median of its interleaved repeats, its noise the distance of the quartiles.
A candidate replaces the choice of the rules only where its median is lower by more than the noise of either, and by
more than ``FLOOR`` of that choice's time. Clocks and addresses make two processes differ by more than the repeats
within one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from fp4dispatch.problem import Activation, Problem

FLOOR = 0.02
"""Least gain that counts, as a share of the time of the present choice."""

EXACTNESS: dict[Activation, int] = {"nvfp4": 0, "fp8": 1, "bf16": 2}
"""Rank of each activation format. Speed may move a layer to a finer format than the rules chose. It moves one to a
coarser format only where the rule says what the finer one is worth (:class:`Worth`)."""

SCHEMA = 2
_ROUNDED = 3
_MOST_NUMBERS = 16


class Candidate(Protocol):
    """A backend with an activation format, and its time in microseconds."""

    @property
    def backend(self) -> str:
        """Its name."""

    @property
    def activation(self) -> Activation:
        """Its format."""

    @property
    def us(self) -> float:
        """Its time."""


C = TypeVar("C", bound=Candidate)


class Worth(NamedTuple):
    """What a rule says that its finer activations are worth.

    ``coarser``: the format that would run without the rule. ``share``: how much longer than with that format a call may
    take, as a share of the shorter time.
    """

    coarser: Activation
    share: float

    def __str__(self) -> str:
        return f"while it takes at most {self.share:.0%} longer than {self.coarser} activations"


def fastest(times: Iterable[C], old: C, accepted: Iterable[tuple[str, Activation]], coarsest: Activation) -> C:
    """Return the fastest candidate that may run in place of ``old``: accepted, and no coarser than ``coarsest``.

    ``old`` where there is none.
    """
    may_run = set(accepted)
    fit = [t for t in times if (t.backend, t.activation) in may_run and EXACTNESS[t.activation] >= EXACTNESS[coarsest]]
    return min(fit, key=lambda t: t.us, default=old)


def replacement(
    times: Sequence[C],
    old: C,
    accepted: Collection[tuple[str, Activation]],
    worth: Worth | None,
    gains: Callable[[C, C], bool],
) -> C | None:
    """Return the candidate that replaces ``old``, the choice of the rules; None where that stays.

    ``gains``: whether the first takes less time than the second by enough to count.
    """
    new = fastest(times, old, accepted, old.activation)
    best = new if gains(new, old) else old
    if worth is not None:
        coarser = fastest(times, old, accepted, worth.coarser)
        if gains(coarser, best) and coarser.us * (1 + worth.share) < best.us:
            best = coarser
    return None if best is old else best


def name_of(problem: Problem, facts: Mapping[str, str]) -> str:
    """Return the name of a measurement. Capture mode and promised M do not count: they do not change the time."""
    subject = [SCHEMA, list(astuple(problem.eager())), sorted(facts.items())]
    return hashlib.sha256(json.dumps(subject).encode()).hexdigest()[:40]


class LaunchConfig(NamedTuple):
    """How one of our kernels is launched.

    ``kernel``, ``build``: as in ``kernels.toml``. ``shape``: the numbers of its launch shape, for the M that it was
    measured with; None for the one that the kernel chooses itself, or for a kernel that has none.
    """

    kernel: str
    build: str
    shape: tuple[int, ...] | None = None

    @property
    def gemm(self) -> tuple[str, str]:
        """The names of the kernel and of its build."""
        return self.kernel, self.build

    def __str__(self) -> str:
        numbers = " " + ",".join(map(str, self.shape)) if self.shape else ""
        return f"{self.kernel}/{self.build}{numbers}"

    @classmethod
    def from_list(cls, data: Any) -> LaunchConfig:
        """Read ``[kernel, build, numbers or None]`` back.

        Raises
        ------
        TypeError, ValueError
            If it is not that.
        """
        kernel, build, shape = data
        if not (isinstance(kernel, str) and isinstance(build, str) and kernel and build):
            raise ValueError(f"{data!r} is no launch: need the names of a kernel and of its build")
        if shape is None:
            return cls(kernel, build)
        if not 0 < len(shape) <= _MOST_NUMBERS or not all(type(each) is int and 0 <= each < 1 << 31 for each in shape):
            raise ValueError(f"{data!r} is no launch: {shape!r} are not the numbers of a launch shape")
        return cls(kernel, build, tuple(shape))


@dataclass(frozen=True)
class Timing:
    """One candidate: ``us`` is the median time of a call, ``noise_us`` the distance of the quartiles.

    ``launch``: the launch configuration, for our own kernels.
    """

    backend: str
    activation: Activation
    us: float
    noise_us: float
    repeats: int
    launch: LaunchConfig | None = None

    def __str__(self) -> str:
        shape = f", launch shape {self.launch}" if self.launch else ""
        return f"{self.us:.1f} us{shape} (quartiles {self.noise_us:.1f} us apart, {self.repeats} repeats)"


@dataclass(frozen=True)
class Measurement:
    """The times of every candidate of one problem on one machine, or on the GPU model of a shipped table.

    Parameters
    ----------
    problem
        M is the largest of its bucket; ``activation`` is the format that was asked for, usually ``any``.
    timings
        Fastest first. Several of one candidate differ in their launch.
    left_out
        Candidates without a time, and why.
    date
        Day of the measurement, ISO.
    method
        How time was taken.
    ranks
        How many ranks measured; then each time is the median of theirs, each noise the largest.
    facts
        Under which it holds; a change of any makes it void.
    table
        The shipped table that it is from, in words; empty for what was measured on this machine.
    """

    problem: Problem
    timings: tuple[Timing, ...]
    left_out: tuple[tuple[str, str], ...] = ()
    date: str = ""
    method: str = ""
    ranks: int = 1
    facts: dict[str, str] = field(default_factory=dict)
    table: str = ""

    @property
    def name(self) -> str:
        """The hash of its problem and its facts."""
        return name_of(self.problem, self.facts)

    def of(self, backend: str, activation: Activation) -> Timing | None:
        """Return the time of a candidate, in its fastest launch; None where it has none."""
        return next((t for t in self.timings if (t.backend, t.activation) == (backend, activation)), None)

    def best(self) -> tuple[Timing, ...]:
        """Return the fastest launch of each candidate, fastest first."""
        found: dict[tuple[str, Activation], Timing] = {}
        for timing in self.timings:
            found.setdefault((timing.backend, timing.activation), timing)
        return tuple(found.values())

    def launches(self, backend: str, activation: Activation) -> tuple[Timing, ...]:
        """Return the timed launches of a candidate, fastest first; empty for a backend that has none."""
        return tuple(
            t for t in self.timings if (t.backend, t.activation) == (backend, activation) and t.launch is not None
        )

    def faster(
        self,
        default: tuple[str, Activation],
        accepted: Collection[tuple[str, Activation]],
        worth: Worth | None = None,
    ) -> tuple[Timing, Timing] | None:
        """Return (new, old) where a candidate that may run replaces the choice of the rules; None where that stays.

        Parameters
        ----------
        default
            Backend and activation format that the rules chose.
        accepted
            All candidates that may be chosen. Times never add one.
        worth
            What the rule says that the activation format of its choice is worth; None for any time.
        """

        def gains(new: Timing, old: Timing) -> bool:
            return old.us - new.us > max(old.noise_us, new.noise_us, FLOOR * old.us)

        old = self.of(*default)
        if old is None:
            return None
        new = replacement(self.timings, old, accepted, worth, gains)
        return None if new is None else (new, old)

    def text(self) -> str:
        """Return it as text: the problem, then one line for each candidate."""
        width = max((len(t.backend) for t in self.timings), default=0)
        where = f", {self.table}" if self.table else f" on {self.ranks} ranks" if self.ranks > 1 else ""
        rows = [f"{self.problem}, measured {self.date}{where}"]
        rows += [f"  {t.backend:<{width}} ({t.activation})  {t}" for t in self.timings]
        rows += [f"  {backend}: not timed: {why}" for backend, why in self.left_out]
        return "\n".join(rows)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        data = asdict(self)
        data["timings"] = [
            {k: round(v, _ROUNDED) if isinstance(v, float) else v for k, v in row.items()} for row in data["timings"]
        ]
        for row, timing in zip(data["timings"], self.timings, strict=True):
            row["launch"] = list(timing.launch) if timing.launch else None
        data["left_out"] = [list(pair) for pair in self.left_out]
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Measurement:
        """Read :meth:`to_dict` back.

        Raises
        ------
        TypeError, ValueError, KeyError
            If it is not that.
        """
        timings = fastest_first(checked(**row) for row in data["timings"])
        texts = (data["date"], data["method"], data["table"], *data["facts"], *data["facts"].values())
        left_out = tuple((str(backend), str(why)) for backend, why in data["left_out"])
        if not all(isinstance(text, str) for text in texts) or not _is_count(data["ranks"]):
            raise ValueError("not a measurement")
        problem = Problem(**data["problem"])
        where = data["date"], data["method"], data["ranks"], dict(data["facts"]), data["table"]
        return cls(problem, timings, left_out, *where)


def checked(backend: Any, activation: Any, us: Any, noise_us: Any, repeats: Any, launch: Any = None) -> Timing:
    """Return a timing that was read from a file.

    Raises
    ------
    TypeError, ValueError
        If it is none.
    """
    numbers = (us, noise_us)
    if not all(type(v) in (int, float) and 0 <= v < 1e12 for v in numbers) or us <= 0:  # a bool is an int too
        raise ValueError(f"{backend}: {numbers} are no times")
    if activation not in EXACTNESS or not isinstance(backend, str) or not _is_count(repeats):
        raise ValueError(f"{backend} ({activation}), {repeats} repeats: is no timing")
    how = None if launch is None else LaunchConfig.from_list(launch)
    return Timing(backend, activation, us, noise_us, repeats, how)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def fastest_first(timings: Iterable[Timing]) -> tuple[Timing, ...]:
    """Return the timings of a problem that were read from a file.

    Raises
    ------
    ValueError
        If there are none, or a faster one follows a slower one: the first of a candidate stands for it.
    """
    found = tuple(timings)
    if not found or list(found) != sorted(found, key=lambda t: t.us):
        raise ValueError("need timings, fastest first")
    return found
