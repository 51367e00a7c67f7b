"""Which of our kernels can run where nothing can be compiled: those that are finished.

A container or a wheel may carry the kernels of some models, and neither nvcc nor the CUTLASS headers. Every build of a
GEMM but the even ones runs every number of tokens, so one finished build serves a problem, if not as fast as the one
that fits best.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

import torch

from fp4dispatch.machine import log
from fp4dispatch.machine import system as _system
from fp4dispatch.machine.system import System
from fp4dispatch.policy.capability import toolchain
from fp4dispatch.problem import Problem
from fp4dispatch.problem.decision import Reason
from fp4dispatch.settings import settings

_FORBIDDEN = Reason(
    "TOOLCHAIN",
    "FP4DISPATCH_JIT=0 forbids compiling",
    "compile ahead of time with `fp4dispatch build`, or unset FP4DISPATCH_JIT",
)


def seen_from(device: torch.device) -> System | None:
    """Return the facts of this machine as seen from a GPU; None for any other device."""
    system, index = _system.current(), device.index or 0
    return system.seen_from(index) if device.type == "cuda" and index < len(system.gpus) else None


def lacking(backend: str, problem: Problem, system: System) -> tuple[Reason, ...]:
    """Return why the kernels of a backend cannot be compiled.

    Empty if they can, or if ``system`` does not know what is finished.
    """
    if system.finished is None:
        return ()
    found = (_FORBIDDEN,) if settings.jit is False else toolchain(backend, problem, system)
    return tuple(replace(reason, text=f"{reason.text}, and no finished kernel runs this") for reason in found)


def all_there(builds: Iterable[tuple[str, str]], system: System) -> bool:
    """Whether all of these (kernel, build) are finished for the GPU of ``system``."""
    sm = system.arch.sm if system.arch else ""
    return system.finished is not None and all((*build, sm) in system.finished for build in builds)


def say(backend: str, wanted: tuple[str, str], used: tuple[str, str]) -> None:
    """Warn, once a process, that a finished build takes the place of a better one."""
    text = (
        f"{backend}: {'/'.join(wanted)} fits best, is not finished and cannot be compiled here; {'/'.join(used)} runs "
        "in its place and may be slower\n  fix: make it with `fp4dispatch build` where nvcc is, and carry it here"
    )
    log.once(text, logging.WARNING, text)
