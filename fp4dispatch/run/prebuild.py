"""Compile what layers are going to load in one go: one after the other, a model's kernels take minutes.

Binding a layer runs self-checks, and running it makes plans, each of which loads kernels. What those will be is known
before: the policy names the backends, backends name the kernels (:meth:`~fp4dispatch.backends.base.Backend.builds`).
Nothing here decides anything, and what is not foreseen compiles when it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import torch

from fp4dispatch import jit
from fp4dispatch.backends import registry
from fp4dispatch.backends.base import Backend, builds_of
from fp4dispatch.dispatch import choose
from fp4dispatch.errors import Fp4DispatchError
from fp4dispatch.machine import system as _system
from fp4dispatch.machine.system import System
from fp4dispatch.problem import Problem
from fp4dispatch.problem.arch import Arch
from fp4dispatch.settings import settings
from fp4dispatch.trust import quarantine, selfcheck, trial

SAMPLES = (1, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 640, 768, 1024, 2048, 4096, 8192, 32768)
"""Numbers of tokens that stand for all: a layer that was bound should not stop for a compiler while it serves."""


class Ask(NamedTuple):
    """A layer: its problem with any M, the backend that it names, its GPU, and for how many tokens."""

    problem: Problem
    backend: str | None
    gpu: int | None
    tokens: tuple[int, ...] = SAMPLES


_seen: dict[Ask, tuple[object, ...]] = {}


def together(asks: Iterable[Ask]) -> None:
    """Compile at once what these layers will load: for their self-checks, and for their numbers of tokens.

    Layers on a CPU need nothing. What cannot be compiled, or not be decided, is left to whoever needs it.
    """
    wanted: dict[Arch, dict[tuple[str, str], None]] = {}
    now = _what_it_depends_on()
    for ask in dict.fromkeys(asks):
        if ask.gpu is None or _seen.get(ask) == now:
            continue
        _seen[ask] = now
        try:
            system = choose.facts(ask.gpu)
            if system.arch is not None:
                wanted.setdefault(system.arch, {}).update(dict.fromkeys(_builds(ask, system)))
        except Fp4DispatchError:  # who binds the layer is told, with everything that goes with it
            continue
    for arch, names in wanted.items():
        jit.build_together(names, arch)


def _what_it_depends_on() -> tuple[object, ...]:
    """Return what makes an answer void: the machine, verdicts, settings. A model has many layers of one shape."""
    names = (settings.selfcheck, settings.disable, settings.fp4_gemm_backend, settings.fp8_backend)
    return (id(_system.current()), len(quarantine.known()), *names)


def _builds(ask: Ask, system: System) -> list[tuple[str, str]]:
    """Return (kernel, variant) of ours that a layer will load."""
    assert ask.gpu is not None
    device = torch.device("cuda", ask.gpu)
    names: list[tuple[str, str]] = []
    decided: dict[int, tuple[Backend, Problem]] = {}
    for m in ask.tokens:
        bucket = choose.bucket(m, ask.problem.op, ask.gpu)
        if bucket not in decided:
            problem = replace(ask.problem, m=bucket)
            decision, checked = choose.prospect(problem, backend=ask.backend, gpu=ask.gpu)
            backend = registry.backends().get(str(decision.backend))
            if not isinstance(backend, Backend):
                continue
            decided[bucket] = backend, replace(problem, activation=decision.activation)
            if checked and selfcheck.known(*decided[bucket], system) is None:
                p = decided[bucket][1]
                half = selfcheck.half_of(p)
                names += trial.builds(backend, p.op, p.scaling, p.activation, system, device, half)
        backend, problem = decided[bucket]
        names += builds_of(backend, replace(problem, m=m), device)
    return names
