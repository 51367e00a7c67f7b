"""Predicted times of the candidates of a problem, for the policy. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from fp4dispatch.backends.predictions import predictions
from fp4dispatch.machine import gpu_models
from fp4dispatch.machine.locks import ForkSafeLock
from fp4dispatch.machine.system import System
from fp4dispatch.problem import Problem
from fp4dispatch.problem.prediction import Predictions

_lock = ForkSafeLock()
_ignored: set[Problem] = set()


def find(problem: Problem, system: System, backends: Mapping[str, object]) -> Predictions | None:
    """Return the predicted times of a problem on the first GPU of a machine; None where nothing is known of it.

    The same facts give the same times: ranks with equal GPUs choose alike.
    """
    if not system.gpus or problem.any_m() in _ignored:
        return None
    model = gpu_models.of(system.gpus[0])
    return None if model is None else predictions(problem, model, backends)


def ignore(problem: Problem) -> None:
    """Do not use predictions for a problem, for any M, in this process: ranks have different GPUs."""
    with _lock:
        _ignored.add(problem.any_m())


def reset() -> None:
    """Use all predictions again."""
    with _lock:
        _ignored.clear()
