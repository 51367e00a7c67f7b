"""What time models say of the candidates of one problem: pure data and one pure rule.

A candidate replaces the choice of the rules only where its predicted time is lower by more than :data:`MARGIN`: models
are off by some percent, and a choice should not flip from one M to the next for less.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from fp4dispatch.problem import Activation
from fp4dispatch.problem.measurement import Worth, replacement

MARGIN = 0.03
"""Least predicted gain that counts, as a share of the time of the choice of the rules."""


class PredictedTime(NamedTuple):
    """One candidate: the microseconds of a call, quantiser included."""

    backend: str
    activation: Activation
    us: float


@dataclass(frozen=True)
class Predictions:
    """The predicted times of the candidates of one problem on one GPU.

    Parameters
    ----------
    times
        Of candidates that have a model.
    source
        Where the constants come from, and of which M times are the mean: ``fitted on H200 SXM, in the mean of M=80,
        104, 128``.
    records
        What they were fitted to.
    """

    times: tuple[PredictedTime, ...]
    source: str
    records: tuple[str, ...] = ()

    def of(self, backend: str, activation: Activation) -> PredictedTime | None:
        """Return the time of a candidate; None where it has none."""
        return next((t for t in self.times if (t.backend, t.activation) == (backend, activation)), None)

    def faster(
        self,
        default: tuple[str, Activation],
        accepted: Collection[tuple[str, Activation]],
        worth: Worth | None = None,
    ) -> tuple[PredictedTime, PredictedTime] | None:
        """Return (new, old) where a candidate that may run replaces the choice of the rules; None where that stays.

        As :meth:`~fp4dispatch.problem.measurement.Measurement.faster`.
        """

        def gains(new: PredictedTime, old: PredictedTime) -> bool:
            return new.us < (1 - MARGIN) * old.us

        old = self.of(*default)
        if old is None:
            return None
        new = replacement(self.times, old, accepted, worth, gains)
        return None if new is None else (new, old)
