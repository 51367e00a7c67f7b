"""Measurements of ``tune``: under which facts they hold, and where they are kept. No torch.

One record per problem (:mod:`fp4dispatch.jit.store.records`) in ``tuning/`` of the cache folder. What cannot be read,
or was made under other facts, does not exist.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from fp4dispatch.backends.base import Backend
from fp4dispatch.jit.store import cache, guard, private, records
from fp4dispatch.machine.locks import ForkSafeLock
from fp4dispatch.machine.system import System
from fp4dispatch.problem import Problem
from fp4dispatch.problem.measurement import Measurement, name_of
from fp4dispatch.settings import settings
from fp4dispatch.trust import quarantine

FOLDER = "tuning"

_lock = ForkSafeLock()
_known: dict[str, Measurement | None] = {}
_ignored: set[Problem] = set()


def facts(system: System, backends: Mapping[str, object]) -> dict[str, str]:
    """Return everything that a time depends on: GPU model, libraries, kernels, PDL, and the code of every backend."""
    code = sorted(quarantine.code_of(type(b)) for b in backends.values() if isinstance(b, Backend))
    return {
        **quarantine.machine(system),
        "backends": hashlib.sha256("\n".join(code).encode()).hexdigest()[:32],
    }


def find(problem: Problem, system: System, backends: Mapping[str, object]) -> Measurement | None:
    """Return the measurement that holds for a problem on a machine, if there is one. Reads a file at most once.

    ``problem.m`` is the largest of its bucket. None where ``FP4DISPATCH_TUNED=off``, and without a GPU.
    """
    if settings.tuned == "off" or not system.gpus:
        return None
    if _any_m(problem) in _ignored:
        return None
    name = name_of(problem, facts(system, backends))
    if name not in _known:
        found = load(folder() / f"{name}.json")
        with _lock:
            _known.setdefault(name, found)
    return _known[name]


def remember(measurement: Measurement) -> None:
    """Take a measurement into this process, in place of an older one."""
    with _lock:
        _known[measurement.name] = measurement
        _ignored.discard(_any_m(measurement.problem))


def ignore(problem: Problem) -> None:
    """Do not use what is kept for a problem, of any M, in this process: not every rank has it."""
    with _lock:
        _ignored.add(_any_m(problem))


def _any_m(problem: Problem) -> Problem:
    return replace(problem, m=1, m_min=1, capture="none")


def reset() -> None:
    """Forget what this process knows; what is on disk stays."""
    with _lock:
        _known.clear()
        _ignored.clear()


def folder() -> Path:
    """Return where measurements are kept."""
    return cache.default_folder() / FOLDER


def save(measurement: Measurement) -> None:
    """Keep a measurement on disk. Where that is not possible it holds for this process, with one warning."""
    with guard.optional("keeping tuned times beyond this process"):
        records.write(folder() / f"{measurement.name}.json", measurement.to_dict())


def load(path: Path) -> Measurement | None:
    """Read one measurement; None where there is none that can be trusted."""
    data = records.read(path)
    try:
        if data is None:
            return None
        found = Measurement.from_dict(data)
        return found if found.name == path.stem else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def holding(system: System, backends: Mapping[str, object]) -> Iterator[Measurement]:
    """Return the measurements on disk that hold on a machine, for any of its GPUs."""
    gpus = dict.fromkeys(replace(gpu, index=0, uuid="") for gpu in system.gpus)
    current = [facts(replace(system, gpus=(gpu,)), backends) for gpu in gpus]
    for path in records.paths(folder()):
        found = load(path)
        if found is not None and found.facts in current:
            yield found


def clear() -> int:
    """Remove every measurement from disk, of any machine and version; return how many."""
    count = 0
    for path in records.paths(folder()):
        with private.explained(path):
            path.unlink(missing_ok=True)
        count += 1
    reset()
    return count
