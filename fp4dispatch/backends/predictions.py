"""Ask every backend for its predicted time of a problem. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace

from fp4dispatch.backends.base import Backend
from fp4dispatch.backends.own.tiling import speeds
from fp4dispatch.machine.gpu_models import GpuModel
from fp4dispatch.problem import Problem, m_before
from fp4dispatch.problem.prediction import PredictedTime, Predictions

SMALL_TILES = 64
"""Up to so many tokens, the end of a range stands for all of it: tiles grow by 8 tokens, so none is half empty."""
SHARES = (0.25, 0.625, 1.0)
"""Of a range of more tokens: where it is asked for its times."""


def predictions(problem: Problem, model: GpuModel, backends: Mapping[str, object]) -> Predictions | None:
    """Return the predicted times of a problem on a GPU model; None where no constants hold for it.

    A choice is made for a range of M, which ends at ``problem.m``. So a time is the geometric mean over the range: at
    its end tiles are full, and within it some are half empty, which costs up to 20 % and not every backend alike.
    None for operators on activations that are quantised already, too: models are of whole calls.
    """
    found = speeds.of(model)
    if found is None or problem.raw:
        return None
    ms = tokens(problem.m)
    times = (_time(name, backend, problem, ms, model) for name, backend in backends.items())
    where = f", in the mean of M={', '.join(map(str, ms))}" if len(ms) > 1 else ""
    return Predictions(tuple(t for t in times if t is not None), f"{found}{where}", found.records)


def tokens(m: int) -> tuple[int, ...]:
    """Return the numbers of tokens that stand for the range which ends at ``m``, ascending, ``m`` the last."""
    if m <= SMALL_TILES:
        return (m,)
    before = m_before(m)
    return tuple(dict.fromkeys(before + math.ceil((m - before) * share) for share in SHARES))


def _time(name: str, backend: object, problem: Problem, ms: tuple[int, ...], model: GpuModel) -> PredictedTime | None:
    if not isinstance(backend, Backend):
        return None
    try:
        activation = backend.activation_for(problem)
        if activation is None:
            return None
        found = [backend.predict(replace(problem, activation=activation, m=m), model) for m in ms]
    except Exception:  # a plug-in may raise anything; a decision does not depend on it
        return None
    times = [us for us in found if isinstance(us, float) and us > 0]
    return PredictedTime(name, activation, statistics.geometric_mean(times)) if len(times) == len(ms) else None
