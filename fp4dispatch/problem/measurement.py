"""What ``tune`` measured for one problem, and whether it moves a choice: pure data and one pure rule.

Statistics: the time of a candidate is the median of its interleaved repeats, its noise the distance of the quartiles.
A candidate replaces the choice of the rules only where its median is lower by more than the noise of either, and by
more than ``FLOOR`` of that choice's time. Clocks and addresses make two processes differ by more than the repeats
within one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Any

from fp4dispatch.problem import Activation, Problem

FLOOR = 0.02
"""Least gain that counts, as a share of the time of the present choice."""

EXACTNESS: dict[Activation, int] = {"nvfp4": 0, "fp8": 1, "bf16": 2}
"""Rank of each activation format. Speed may move a layer to a finer format than the rules chose, never to a coarser."""

SCHEMA = 1
_ROUNDED = 3


def name_of(problem: Problem, facts: Mapping[str, str]) -> str:
    """Return the name of a measurement. Capture mode and promised M do not count: they do not change the time."""
    subject = [SCHEMA, list(astuple(replace(problem, capture="none", m_min=1))), sorted(facts.items())]
    return hashlib.sha256(json.dumps(subject).encode()).hexdigest()[:40]


@dataclass(frozen=True)
class Timing:
    """One candidate: ``us`` is the median time of a call, ``noise_us`` the distance of the quartiles."""

    backend: str
    activation: Activation
    us: float
    noise_us: float
    repeats: int

    def __str__(self) -> str:
        return f"{self.us:.1f} us (quartiles {self.noise_us:.1f} us apart, {self.repeats} repeats)"


@dataclass(frozen=True)
class Measurement:
    """The times of every candidate of one problem on one machine.

    Parameters
    ----------
    problem
        M is the largest of its bucket; ``activation`` is the format that was asked for, usually ``any``.
    timings
        Fastest first.
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
    """

    problem: Problem
    timings: tuple[Timing, ...]
    left_out: tuple[tuple[str, str], ...] = ()
    date: str = ""
    method: str = ""
    ranks: int = 1
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The hash of its problem and its facts."""
        return name_of(self.problem, self.facts)

    def of(self, backend: str, activation: Activation) -> Timing | None:
        """Return the time of a candidate; None where it has none."""
        return next((t for t in self.timings if (t.backend, t.activation) == (backend, activation)), None)

    def faster(
        self, default: tuple[str, Activation], accepted: Iterable[tuple[str, Activation]]
    ) -> tuple[Timing, Timing] | None:
        """Return (new, old) where a candidate that may run replaces the choice of the rules; None where that stays.

        Parameters
        ----------
        default
            Backend and activation format that the rules chose.
        accepted
            All candidates that may be chosen. Times never add one.
        """
        old = self.of(*default)
        if old is None:
            return None
        may_run = set(accepted)
        fit = [
            t
            for t in self.timings
            if (t.backend, t.activation) in may_run and EXACTNESS[t.activation] >= EXACTNESS[old.activation]
        ]
        new = min(fit, key=lambda t: t.us, default=None)
        if new is None or old.us - new.us <= max(old.noise_us, new.noise_us, FLOOR * old.us):
            return None
        return new, old

    def text(self) -> str:
        """Return it as text: the problem, then one line for each candidate."""
        width = max((len(t.backend) for t in self.timings), default=0)
        rows = [f"{self.problem}, measured {self.date}" + (f" on {self.ranks} ranks" if self.ranks > 1 else "")]
        rows += [f"  {t.backend:<{width}} ({t.activation})  {t}" for t in self.timings]
        rows += [f"  {backend}: not timed: {why}" for backend, why in self.left_out]
        return "\n".join(rows)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        data = asdict(self)
        data["timings"] = [
            {k: round(v, _ROUNDED) if isinstance(v, float) else v for k, v in row.items()} for row in data["timings"]
        ]
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
        timings = tuple(Timing(**row) for row in data["timings"])
        for t in timings:
            numbers = (t.us, t.noise_us)
            if not all(isinstance(v, int | float) and 0 <= v < 1e12 for v in numbers) or t.us <= 0:
                raise ValueError(f"{t.backend}: {numbers} are no times")
            if t.activation not in EXACTNESS or not isinstance(t.backend, str) or not isinstance(t.repeats, int):
                raise ValueError(f"{t} is no timing")
        texts = (data["date"], data["method"], *data["facts"], *data["facts"].values())
        left_out = tuple((str(backend), str(why)) for backend, why in data["left_out"])
        if not all(isinstance(text, str) for text in texts) or not isinstance(data["ranks"], int):
            raise ValueError("not a measurement")
        problem = Problem(**data["problem"])
        return cls(problem, timings, left_out, data["date"], data["method"], data["ranks"], dict(data["facts"]))
