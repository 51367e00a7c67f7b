"""Which timed launches serve a problem: what backends ask when they make a plan. No torch.

Launches are timed at the last M of each range of M that has a decision of its own. A measurement serves that range.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace

from fp4dispatch.backends import registry
from fp4dispatch.backends.own.tiling import launches
from fp4dispatch.backends.own.tiling.launches import Tuned
from fp4dispatch.dispatch import here, tuned
from fp4dispatch.machine.system import System
from fp4dispatch.policy.rules import m_bucket
from fp4dispatch.problem import Problem
from fp4dispatch.problem.measurement import Measurement
from fp4dispatch.settings import settings

MOST_TOKENS = 8192
"""Up to so many tokens, tables of launches that ship are made."""
ONE_TILE = 8
"""Up to so many tokens all launches do the same: the smallest tile holds them."""

_found: dict[tuple[str, Problem, int], tuple[Hashable, Tuned | None]] = {}


def measured(problem: Problem, system: System, backend: str) -> Measurement | None:
    """Return the measurement whose launches serve a problem: this user's own, else one of the shipped table.

    Parameters
    ----------
    problem
        With its true M, and the activation format of the backend.
    system
        The machine, its GPU first.
    backend
        The backend that is to run.
    """
    found = _candidates(problem, system) if tuned.launches_hold(problem, system) else iter(())
    return next((each for each in found if each.launches(backend, problem.activation)), None)


def digest(backends: Iterable[tuple[int, str, Problem]], system: System) -> str:
    """Return a hash of the timed launches of a layer, for comparison among ranks; empty where it has none.

    Parameters
    ----------
    backends
        Each range of M: its largest M, its backend, and a problem with that backend's activation format.
    system
        The machine, its GPU first.
    """
    found, first = [], 1
    for last, backend, problem in backends:
        m = first
        while m <= last:
            each = measured(replace(problem, m=m), system, backend)
            if each is not None:
                found.append(
                    [m, backend, each.problem.m, [t.launch for t in each.launches(backend, problem.activation)]]
                )
            m = m_bucket(m, problem.op, system.arch) + 1
        first = last + 1
    return hashlib.sha256(json.dumps(found).encode()).hexdigest() if found else ""


def _candidates(problem: Problem, system: System) -> Iterator[Measurement]:
    last = m_bucket(problem.m, problem.op, system.arch)
    tokens = dict.fromkeys((last, 8, 4, 2, 1) if problem.m <= ONE_TILE else (last,))
    plain = replace(problem.eager(), sf_layout=None)
    backends = registry.backends()
    for m in tokens:
        for activation in dict.fromkeys((problem.activation, "any")):
            for bias in (problem.bias, not problem.bias):
                asked = replace(plain, m=m, activation=activation, bias=bias)
                if (found := tuned.own(asked, system, backends)) is not None:
                    yield found
    for m in tokens:
        if (shipped := tuned.table(replace(plain, m=m), system)) is not None:
            yield shipped


class _Launches:
    """What tunes and shipped tables say of launches, for backends."""

    def find(self, backend: str, problem: Problem, gpu: int) -> Tuned | None:
        """Return the timed launches of a backend that serve a problem on a GPU."""
        if problem.raw or settings.tuned == "off":
            return None
        version, key = self.version(), (backend, problem, gpu)
        known = _found.get(key)
        if known is None or known[0] != version:
            new, old = self._look(backend, problem, gpu), known[1] if known else None
            same = new is not None and old is not None and (new.m, new.times) == (old.m, old.times)
            known = _found[key] = version, old if same else new
        return known[1]

    def _look(self, backend: str, problem: Problem, gpu: int) -> Tuned | None:
        machine = here.machine()
        found = measured(problem, here.seen_from(machine, gpu), backend) if gpu < len(machine.gpus) else None
        if found is None:
            return None
        rows = found.launches(backend, problem.activation)
        return Tuned(found.problem.m, tuple((t.launch, t.us) for t in rows if t.launch is not None))

    def version(self) -> Hashable:
        """Return a value that changes where any timed launches do."""
        return tuned.changes(), settings.texts(("tuned", "pdl"))  # times with PDL are none without it


def serve() -> None:
    """Let backends find timed launches here. Whoever chooses backends calls it: without it nothing timed is used."""
    launches.provide(_Launches())
