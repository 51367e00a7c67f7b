"""Verdicts of the self-check: those of this process, those on disk, and which backends are shut out. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from fp4dispatch.backends.base import Backend
from fp4dispatch.jit.store.records import Store
from fp4dispatch.machine.locks import ForkSafeLock
from fp4dispatch.machine.system import System
from fp4dispatch.settings import settings
from fp4dispatch.trust import facts
from fp4dispatch.trust.verdict import SCHEMA, CheckResult

store = Store("selfcheck", SCHEMA, "verdicts of the self-check", CheckResult.from_dict)

_lock = ForkSafeLock()
_known: dict[str, CheckResult] = {}
_shut: frozenset[tuple[str, str, str]] = frozenset()
_recalled: object = None


def remember(result: CheckResult) -> None:
    """Take a verdict into this process. A failed one shuts out its backend for that op and arch."""
    global _shut
    with _lock:
        _known[result.name] = result
        _shut = frozenset((r.backend, r.op, r.arch) for r in _known.values() if r.status == "failed")


def recalled(name: str) -> CheckResult | None:
    """Return the verdict of this process with this name (:attr:`~fp4dispatch.trust.verdict.CheckResult.name`)."""
    return _known.get(name)


def known() -> tuple[CheckResult, ...]:
    """Return every verdict of this process."""
    with _lock:
        return tuple(_known.values())


def quarantined() -> frozenset[tuple[str, str, str]]:
    """Return (backend, op, arch) of each backend that is shut out. :func:`fp4dispatch.machine.system.current` asks."""
    return frozenset() if settings.selfcheck == "off" else _shut


def reset() -> None:
    """Forget the verdicts of this process; those on disk stay."""
    global _shut, _recalled
    with _lock:
        _known.clear()
        _shut = frozenset()
        _recalled = None


def holding(system: System, backends: Mapping[str, object]) -> Iterator[CheckResult]:
    """Yield the verdicts on disk that hold on a machine, for any of its GPUs."""
    current: dict[str, list[dict[str, str]]] = {}
    for result in store.all():
        backend = backends.get(result.backend)
        if not isinstance(backend, Backend):
            continue
        if result.backend not in current:
            each = [replace(system, gpus=(gpu,)) for gpu in dict.fromkeys(system.gpus)]
            each.append(replace(system, gpus=()))  # plug-ins are checked on the CPU too
            current[result.backend] = [facts.of_backend(one, backend) for one in each]
        if result.facts in current[result.backend]:
            yield result


def recall(system: System, backends: Mapping[str, object]) -> None:
    """Take the failed verdicts on disk that hold on a machine into this process. Once a machine; runs no check."""
    global _recalled
    if settings.selfcheck != "auto":
        return
    about = (system.gpus, system.driver, system.cudnn, system.proven)
    if about == _recalled:
        return
    _recalled = about
    for result in holding(system, backends):
        if result.status == "failed" and recalled(result.name) is None:
            remember(result)
