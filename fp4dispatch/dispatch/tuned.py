"""Tuned times: the measurements of ``tune``, one record a problem, and the facts under which they hold. No torch.

What this user has measured comes first, then the shipped table of the GPU model (:mod:`~fp4dispatch.dispatch.shipped`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace

from fp4dispatch.backends.base import Backend
from fp4dispatch.dispatch import shipped
from fp4dispatch.jit.store.records import Store
from fp4dispatch.machine.locks import ForkSafeLock
from fp4dispatch.machine.system import System
from fp4dispatch.problem import Op, Problem, Scaling
from fp4dispatch.problem.measurement import SCHEMA, Measurement, name_of
from fp4dispatch.settings import settings
from fp4dispatch.trust.facts import code_of, of_machine

Layer = tuple[Op, Scaling, int, int]
"""Op, scaling, N, K."""

store = Store("tuning", SCHEMA, "tuned times", Measurement.from_dict)

_lock = ForkSafeLock()
_known: dict[str, Measurement | None] = {}
_ignored: set[Problem] = set()
_without_launches: set[Layer] = set()
_changes = 0


def facts(system: System, backends: Mapping[str, object]) -> dict[str, str]:
    """Return the facts of a tuned time: GPU model, libraries, kernels, PDL, and the code of every backend."""
    code = sorted(code_of(type(b)) for b in backends.values() if isinstance(b, Backend))
    return {
        **of_machine(system),
        "backends": hashlib.sha256("\n".join(code).encode()).hexdigest()[:32],
    }


def find(problem: Problem, system: System, backends: Mapping[str, object]) -> Measurement | None:
    """Return the measurement that holds for a problem on a machine, this user's own or a shipped one; else None.

    ``problem.m`` is the largest M of its bucket. None with ``FP4DISPATCH_TUNED=off``, and without a GPU.
    """
    return own(problem, system, backends) or table(problem, system)


def table(problem: Problem, system: System) -> Measurement | None:
    """Return the measurement of the shipped table of the GPU model; None as for :func:`find`."""
    return None if _silent(problem, system) else shipped.find(problem, shipped.model_of(system))


def _silent(problem: Problem, system: System) -> bool:
    return settings.tuned == "off" or not system.gpus or problem.any_m() in _ignored


def own(problem: Problem, system: System, backends: Mapping[str, object]) -> Measurement | None:
    """Return what this user has measured for a problem; None as for :func:`find`. Reads its file once a process."""
    if _silent(problem, system):
        return None
    kept = store.names()
    if not kept and not _known:
        return None
    name = name_of(problem, facts(system, backends))
    if name not in _known:
        if name not in kept:
            return None
        found = store.find(name)
        with _lock:
            _known.setdefault(name, found)
    return _known[name]


def remember(measurement: Measurement) -> None:
    """Take a measurement into this process; it replaces an older one."""
    with _lock:
        _known[measurement.name] = measurement
        _ignored.discard(measurement.problem.any_m())
        _without_launches.discard(_layer(measurement.problem))
        _changed()


def ignore(problem: Problem) -> None:
    """Do not use the times of a problem, for any M, in this process: not every rank has them.

    Nor any launches of its layer: those of a problem serve others with the same weights.
    """
    with _lock:
        _ignored.add(problem.any_m())
        _without_launches.add(_layer(problem))
        _changed()


def launches_hold(problem: Problem, system: System) -> bool:
    """Whether there may be timed launches of a layer, shipped or this user's own. A cheap question."""
    if settings.tuned == "off" or not system.gpus or _layer(problem) in _without_launches:
        return False
    return bool(_known or store.names()) or shipped.of(system) is not None


def _layer(problem: Problem) -> Layer:
    return problem.op, problem.scaling, problem.n, problem.k


def _changed() -> None:
    global _changes
    _changes += 1


def changes() -> int:
    """Return a number that grows whenever what :func:`find` returns may have changed."""
    return _changes


def reset() -> None:
    """Forget the measurements of this process; those on disk stay."""
    with _lock:
        _known.clear()
        _ignored.clear()
        _without_launches.clear()
        _changed()


def void(
    problem: Problem, system: System, backends: Mapping[str, object]
) -> tuple[Measurement, tuple[str, ...]] | None:
    """Return the newest measurement of a problem on this GPU model that does not hold now, and the facts that differ.

    None where one holds, or there is none. Reads every record on disk: for people who ask why.
    """
    if _silent(problem, system) or own(problem, system, backends) is not None:
        return None
    now, asked = facts(system, backends), problem.eager()
    old = [
        (found.date, found)
        for found in store.all()
        if found.problem.eager() == asked and found.facts.get("gpu") == now["gpu"]
    ]
    if not old:
        return None
    newest = max(old, key=lambda each: each[0])[1]
    return newest, tuple(name for name in now if newest.facts.get(name) != now[name])


def holding(system: System, backends: Mapping[str, object]) -> Iterator[Measurement]:
    """Yield the measurements on disk that hold on a machine, for any of its GPUs."""
    gpus = dict.fromkeys(replace(gpu, index=0, uuid="") for gpu in system.gpus)
    current = [facts(replace(system, gpus=(gpu,)), backends) for gpu in gpus]
    yield from (found for found in store.all() if found.facts in current)


def clear() -> int:
    """Remove every measurement, of any machine and version, from disk and from this process; return how many."""
    count = store.clear()
    reset()
    return count
