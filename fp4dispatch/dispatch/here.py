"""The facts that a choice on this machine is made from: GPU, libraries, proofs, quarantine, settings. No torch."""

from __future__ import annotations

from dataclasses import replace

from fp4dispatch.backends import registry
from fp4dispatch.machine import system as _system
from fp4dispatch.machine.system import System
from fp4dispatch.problem.arch import Arch
from fp4dispatch.settings import settings
from fp4dispatch.trust import quarantine


def machine() -> System:
    """Return the facts of this machine. From now on, failed verdicts on disk apply."""
    quarantine.recall(_system.current(), registry.backends())
    return _system.current()


def proven() -> frozenset[tuple[str, str]]:
    """Return (op, arch) of the kernels that are built and proven on this machine."""
    from fp4dispatch.jit import proven as kernels  # reads the kernel cache: not at import

    return kernels.proven()


def arch_on(facts: System, gpu: int | None) -> Arch | None:
    """Return the arch of a device; None for the CPU, and for a missing device, which :func:`seen_from` refuses."""
    return facts.gpus[gpu].arch if gpu is not None and gpu < len(facts.gpus) else None


def seen_from(facts: System, gpu: int | None) -> System:
    """Return the facts with a device's GPU first, and with what the settings allow."""
    return allowed(facts).seen_from(gpu)


def allowed(facts: System) -> System:
    """Return the facts with what the settings allow."""
    return facts if facts.fp8_copy == settings.fp8_copy else replace(facts, fp8_copy=settings.fp8_copy)


def finished() -> frozenset[tuple[str, str, str]]:
    """Return (kernel, build, arch) of the kernels that need not be compiled on this machine."""
    from fp4dispatch.jit import proven as kernels  # as above

    return kernels.finished()


_system.provide(proven=proven, finished=finished, quarantined=quarantine.quarantined)
