"""Ask every backend for its predicted time of a problem. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fp4dispatch.backends.base import Backend
from fp4dispatch.backends.own.tiling import speeds
from fp4dispatch.machine.gpu_models import GpuModel
from fp4dispatch.problem import Problem
from fp4dispatch.problem.prediction import PredictedTime, Predictions


def predictions(problem: Problem, model: GpuModel, backends: Mapping[str, object]) -> Predictions | None:
    """Return the predicted times of a problem on a GPU model; None where no constants hold for it.

    None for operators on activations that are quantised already, too: models are of whole calls.
    """
    found = speeds.of(model)
    if found is None or problem.raw:
        return None
    times = (_time(name, backend, problem, model) for name, backend in backends.items())
    return Predictions(tuple(t for t in times if t is not None), str(found), found.records)


def _time(name: str, backend: object, problem: Problem, model: GpuModel) -> PredictedTime | None:
    if not isinstance(backend, Backend):
        return None
    try:
        activation = backend.activation_for(problem)
        if activation is None:
            return None
        us = backend.predict(replace(problem, activation=activation), model)
    except Exception:  # a plug-in may raise anything; a decision does not depend on it
        return None
    return PredictedTime(name, activation, us) if isinstance(us, float) and us > 0 else None
