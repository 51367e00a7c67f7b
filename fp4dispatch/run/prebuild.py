"""Compile the kernels of all layers in parallel, before the layers load them.

Self-checks and plans load kernels. Their names are known before: the policy names the backends, and a backend names its
kernels (:meth:`~fp4dispatch.backends.base.Backend.builds`). This module decides nothing. A kernel that it misses
compiles when it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import torch

from fp4dispatch import jit
from fp4dispatch.backends import registry
from fp4dispatch.backends.base import Backend, builds_of
from fp4dispatch.backends.own import swiglu
from fp4dispatch.dispatch import choose
from fp4dispatch.errors import Fp4DispatchError
from fp4dispatch.machine import system as _system
from fp4dispatch.machine.system import System
from fp4dispatch.problem import Problem
from fp4dispatch.problem.arch import Arch
from fp4dispatch.settings import settings
from fp4dispatch.trust import quarantine, selfcheck, trial

SAMPLES = (1, *range(8, 65, 8), *range(80, 2049, 16), *range(2112, 4097, 64), *range(4352, 8193, 256), 32768)
"""Token counts that represent all others, so that a bound layer does not compile while it serves. Tiles hold multiples
of 8 tokens, of 16 where many are multiplied: from 17 to 64 and from 257 to 2048 all that are not alike
(:func:`~fp4dispatch.backends.own.tiling.search.alike`), between these every second, above fewer. With 49 token counts
a third of 96 layers lacked a build (random weights, two GPUs), with these a sixteenth, for 0.03 % of token counts up
to 8192."""


class Ask(NamedTuple):
    """A layer: its problem (M is ignored), the backend that it names or None, its GPU index, and token counts.

    ``gated``: it is called with ``gate_up`` too (:meth:`~fp4dispatch.backends.base.Backend.swiglu`).
    """

    problem: Problem
    backend: str | None
    gpu: int | None
    tokens: tuple[int, ...] = SAMPLES
    gated: bool = False


_seen: dict[Ask, tuple[object, ...]] = {}


def together(asks: Iterable[Ask]) -> None:
    """Compile in parallel the kernels that these layers need for their self-checks and their token counts.

    Layers on a CPU need none. Errors are not raised here: binding or running the layer raises them.
    """
    wanted: dict[Arch, dict[tuple[str, str], None]] = {}
    now = _facts()
    for ask in dict.fromkeys(asks):
        if ask.gpu is None or _seen.get(ask) == now:
            continue
        _seen[ask] = now
        try:
            system = choose.facts(ask.gpu)
            if system.arch is not None:
                wanted.setdefault(system.arch, {}).update(dict.fromkeys(_builds(ask, system)))
        except Fp4DispatchError:  # binding the layer raises it, with all details
            continue
    for arch, names in wanted.items():
        jit.build_together(names, arch)


def _facts() -> tuple[object, ...]:
    """Return the facts that an answer depends on: machine, verdicts, settings. If one changes, ask again."""
    names = (settings.selfcheck, settings.disable, settings.fp4_gemm_backend, settings.fp8_backend)
    return (id(_system.current()), len(quarantine.known()), *names)


def _builds(ask: Ask, system: System) -> list[tuple[str, str]]:
    """Return (kernel, variant) of each own kernel that a layer will load."""
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
    if ask.gated and system.arch is not None:
        wanted = swiglu.kernels_beside(kernel for kernel, _ in names)
        names += [(each, "any") for each in wanted if swiglu.built_for(each, system.arch, ask.problem.k)]
    return names
