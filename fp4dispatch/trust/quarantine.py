"""Verdicts of the self-check: what they hold, under which facts they stay true, and where they are kept. No torch.

One record per verdict (:mod:`fp4dispatch.jit.store.records`) in ``selfcheck/`` of the cache folder. What cannot be
read, or was made under other facts, does not exist.
"""

from __future__ import annotations

import functools
import secrets
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from fp4dispatch.backends.base import Backend
from fp4dispatch.backends.code_hash import code_hash
from fp4dispatch.errors import SelfCheckFailed
from fp4dispatch.jit.catalog import manifest
from fp4dispatch.jit.store import cache, guard, records
from fp4dispatch.machine import libraries
from fp4dispatch.machine.locks import ForkSafeLock
from fp4dispatch.machine.system import System
from fp4dispatch.problem import Activation, Op, Scaling
from fp4dispatch.settings import settings

FOLDER = "selfcheck"
SCHEMA = 1
Status = Literal["passed", "failed", "unchecked", "off"]

_OWN_CODE = (
    *("formats", "backends", "jit"),
    *(f"trust/{name}.py" for name in ("canary", "trial", "tilecheck", "layer_operands", "layercheck")),
)
"""Files and folders of the package that decide what a built-in computes, and how it is checked. All must be there."""
_THIS_PROCESS = secrets.token_hex(8)
_LONGEST = 1e12
"""No time in a record is longer, in whatever unit."""
_RACE = ("never written", "stale", "not repeatable")


@dataclass(frozen=True)
class CheckResult:
    """What the self-check found out about one backend, for one op, scaling and activation format on one GPU model.

    Parameters
    ----------
    backend, op, scaling, activation
        The subject.
    arch
        Such as ``sm_90``; empty on a machine without a GPU.
    status
        ``passed``; ``failed`` (quarantined); ``unchecked`` (nothing could be run, ``notes`` say why); ``off``.
    ran
        The canaries that ran, as text.
    kind, findings
        The gravest kind of failure, and every finding as text.
    evidence
        The findings as plain data (:class:`fp4dispatch.trust.tilecheck.Finding`).
    gdc
        Whether the barriers of the kernels are proven: ``yes``, ``no``, or ``not known`` for kernels of others.
    seconds
        How long all of it took, building included.
    build_ms, check_ms
        Of that, milliseconds for building (compiling and loading kernels, making plans) and for all the rest
        (:mod:`fp4dispatch.trust.trial`). None in records from before they were told apart.
    lasting
        Whether the verdict may be kept on disk: not if something outside the kernel was in the way.
    notes
        What was left out, and why.
    facts
        Under which the verdict holds; a change of any makes it void.
    half
        The 16-bit dtype that the canaries were in; empty where there were some of each.
    layer
        The shape of the layer that was checked (:mod:`fp4dispatch.trust.layercheck`); empty for the canaries.
    """

    backend: str
    op: Op
    scaling: Scaling
    activation: Activation
    arch: str
    status: Status
    ran: tuple[str, ...] = ()
    kind: str = ""
    findings: tuple[str, ...] = ()
    evidence: tuple[dict[str, Any], ...] = ()
    gdc: str = "not known"
    seconds: float = 0.0
    lasting: bool = True
    notes: tuple[str, ...] = ()
    facts: dict[str, str] = field(default_factory=dict)
    half: str = ""
    build_ms: float | None = None
    check_ms: float | None = None
    layer: str = ""

    @property
    def usable(self) -> bool:
        """Whether nothing speaks against the backend. ``auto`` asks for more: :meth:`vouches_for`."""
        return self.status != "failed"

    def vouches_for(self, *, plugin: bool) -> bool:
        """Whether ``auto`` may use the backend after this.

        One that passed, and any with ``FP4DISPATCH_SELFCHECK=off``. What is unchecked is not used, with one exception:
        a built-in that supports none of the canaries, or whose layer does not fit into memory beside its check. Its
        kernels are tested with each release, on the layer's own path a check follows or has been tried, and a warning
        says so. A plug-in that was not checked is never used. Nor is anything whose canaries did not fit into memory:
        they need a few megabytes, so nothing else is known to run there either.
        """
        if self.status == "unchecked":
            return not plugin and (self.lasting or bool(self.layer))
        return self.status != "failed"

    def text(self) -> str:
        """Return the verdict in a line or two."""
        subject = f"{self.backend} {self.op}"
        kind = f"{self.scaling}, {self.activation} activations" + (f", {self.half}" if self.half else "")
        if self.layer:
            subject, kind = f"{subject} layer", f"{self.layer}, {self.scaling}, {self.activation} activations"
        if self.status == "failed":
            race = " Signature of a launch race." if self.kind in _RACE else ""
            return f"{subject} {self.findings[0]}.{race} GDC proven: {self.gdc}. Quarantined."
        if self.status == "passed":
            what = "numbers of tokens" if self.layer else "canaries"
            return f"{subject} ({kind}): {len(self.ran)} {what} passed {self._times()}"
        why = "; ".join(self.notes) or "FP4DISPATCH_SELFCHECK=off"
        return f"{subject} ({kind}): not checked: {why}"

    def _times(self) -> str:
        if self.build_ms is None or self.check_ms is None:
            return f"in {self.seconds * 1e3:.0f} ms, building included"
        return f"in {self.check_ms:.0f} ms, after {self.build_ms:.0f} ms of building"

    def __str__(self) -> str:
        return self.text()

    def error(self) -> SelfCheckFailed:
        """Return a failed verdict as an exception."""
        return SelfCheckFailed(self.text())

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for ``--json``."""
        plain: dict[str, Any] = json_ready(asdict(self))
        return plain

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CheckResult:
        """Read :meth:`to_dict` back.

        Raises
        ------
        TypeError, ValueError
            If it is not that.
        """
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        result = cls(**values)
        texts = (
            *(result.backend, result.op, result.scaling, result.activation, result.arch, result.kind, result.gdc),
            *(result.half, result.layer),
        )
        if not all(isinstance(text, str) for text in texts) or result.status not in ("passed", "failed", "unchecked"):
            raise ValueError("not a verdict")
        times = (result.seconds, *(time for time in (result.build_ms, result.check_ms) if time is not None))
        if not all(0 <= time <= _LONGEST for time in times):  # a TypeError where it is no number
            raise ValueError("not a verdict")
        if not isinstance(result.facts, dict) or (result.status == "failed") != bool(result.findings):
            raise ValueError("not a verdict")
        return result


def json_ready(value: Any) -> Any:
    """Return plain data as JSON would give it back: lists for tuples."""
    if isinstance(value, dict):
        return {str(k): json_ready(v) for k, v in value.items()}
    return [json_ready(v) for v in value] if isinstance(value, list | tuple) else value


# --------------------------------------------------------------------------------------------------------------- facts


def facts(system: System, backend: Backend) -> dict[str, str]:
    """Return everything that a verdict depends on: GPU model (not which one), libraries, kernels, code, PDL."""
    arch = system.arch
    proven = ",".join(sorted(op for op, where in system.proven if arch and where == arch.sm))
    return {**machine(system), "backend": code_of(type(backend)), "proven": proven or "none"}


def machine(system: System) -> dict[str, str]:
    """Return the facts that are the same for every backend."""
    from fp4dispatch import __version__

    gpu = system.gpus[0] if system.gpus else None
    versions = {
        name: library.version if library else "none"
        for name, library in (
            ("torch", system.torch),
            ("cudnn", system.cudnn),
            ("cudnn_frontend", system.cudnn_frontend),
            ("flashinfer", system.flashinfer),
            ("cutlass", system.cutlass),
            ("nvcc", system.nvcc),
        )
    }
    return {
        "gpu": gpu.name if gpu else "none",
        "arch": gpu.arch.sm if gpu else "",
        "driver": system.driver or "none",
        "cuda": system.cuda or "none",
        **versions,
        "cublas": _cublas(),
        "fp4dispatch": __version__,
        "kernels": _own_code(),
        "pdl": settings.pdl,
    }


@functools.cache
def _cublas() -> str:
    """Return the versions of cuBLASLt, which is a wheel of its own and may be updated without torch."""
    found = [libraries.distribution(name, "nvidia") for name in ("nvidia-cublas", "nvidia-cublas-cu12")]
    return ",".join(library.version for library in found if library) or "none"


@functools.cache
def _own_code() -> str:
    """Hash the sources that decide what a built-in backend computes: kernels, flags, backends, formats, this check.

    Raises
    ------
    CacheError
        If one of them is missing: a verdict would then hold for code that it was not made with.
    """
    package, csrc = Path(__file__).parents[1], manifest.installed().csrc
    return code_hash([csrc, csrc.parent / "jit_flags", *(package / name for name in _OWN_CODE)])


@functools.cache
def code_of(kind: type[Backend]) -> str:
    """Identify the code of a backend: its class, the content of its module and the version of its package.

    Of a module in a package, everything in its folder and below counts: a plug-in may be cut into files. Code that is
    in no file (typed into an interpreter, in a zip archive) is known for this process alone.
    """
    module = sys.modules.get(kind.__module__)
    found = getattr(module, "__file__", None)
    path = Path(found) if found else None
    if path is None or not path.is_file():
        content = f"process {_THIS_PROCESS}"
    elif getattr(module, "__package__", None) and kind.__module__.partition(".")[0] != "fp4dispatch":
        content = code_hash([path.parent])[:16]
    else:
        content = code_hash([path])[:16]
    version = getattr(sys.modules.get(kind.__module__.partition(".")[0]), "__version__", "")
    return f"{kind.__module__}:{kind.__qualname__} {version} {content}".replace("  ", " ")


def key(result: CheckResult) -> str:
    """Return the name of a verdict: the hash of its subject and its facts."""
    subject = [SCHEMA, result.backend, result.op, result.scaling, result.activation, sorted(result.facts.items())]
    subject += [result.half] if result.half else []
    subject += [["layer", result.layer]] if result.layer else []
    return records.name_of(subject)


# --------------------------------------------------------------------------------------------------------------- store

_lock = ForkSafeLock()
_known: dict[str, CheckResult] = {}
_shut: frozenset[tuple[str, str, str]] = frozenset()
_recalled: object = None


def folder() -> Path:
    """Return where verdicts are kept."""
    return cache.default_folder() / FOLDER


def remember(result: CheckResult) -> None:
    """Take a verdict into this process: a failed one shuts its backend out for that op and arch."""
    global _shut
    with _lock:
        _known[key(result)] = result
        _shut = frozenset((r.backend, r.op, r.arch) for r in _known.values() if r.status == "failed")


def recalled(name: str) -> CheckResult | None:
    """Return a verdict of this process by its :func:`key`."""
    return _known.get(name)


def known() -> tuple[CheckResult, ...]:
    """Return every verdict of this process."""
    with _lock:
        return tuple(_known.values())


def quarantined() -> frozenset[tuple[str, str, str]]:
    """Return (backend, op, arch) of what is shut out; :func:`fp4dispatch.machine.system.current` asks this."""
    return frozenset() if settings.selfcheck == "off" else _shut


def reset() -> None:
    """Forget the verdicts of this process; those on disk stay."""
    global _shut, _recalled
    with _lock:
        _known.clear()
        _shut = frozenset()
        _recalled = None


def save(result: CheckResult) -> None:
    """Keep a verdict on disk. Where that is not possible it holds for this process, with one warning."""
    with guard.optional("keeping verdicts of the self-check beyond this process"):
        records.write(folder() / f"{key(result)}.json", {"schema": SCHEMA, "result": result.to_dict()})


def load(path: Path) -> CheckResult | None:
    """Read one verdict; None where there is none that can be trusted."""
    data = records.read(path)
    try:
        if data is None or data["schema"] != SCHEMA:
            return None
        result = CheckResult.from_dict(data["result"])
        return result if key(result) == path.stem else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def stored(name: str) -> CheckResult | None:
    """Return a verdict that is kept on disk by its :func:`key`."""
    return load(folder() / f"{name}.json")


def all_stored() -> Iterator[CheckResult]:
    """Return every readable verdict on disk, of any machine and version."""
    for path in records.paths(folder()):
        result = load(path)
        if result is not None:
            yield result


def holding(system: System, backends: Mapping[str, object]) -> Iterator[CheckResult]:
    """Return the verdicts on disk that hold on a machine, for any of its GPUs."""
    current: dict[str, list[dict[str, str]]] = {}
    for result in all_stored():
        backend = backends.get(result.backend)
        if not isinstance(backend, Backend):
            continue
        if result.backend not in current:
            each = [replace(system, gpus=(gpu,)) for gpu in dict.fromkeys(system.gpus)]
            each.append(replace(system, gpus=()))  # plug-ins are checked on the CPU too
            current[result.backend] = [facts(one, backend) for one in each]
        if result.facts in current[result.backend]:
            yield result


def recall(system: System, backends: Mapping[str, object]) -> None:
    """Take the failed verdicts on disk that hold on a machine into this process, once, without running anything."""
    global _recalled
    if settings.selfcheck != "auto":
        return
    about = (system.gpus, system.driver, system.cudnn, system.proven)
    if about == _recalled:
        return
    _recalled = about
    for result in holding(system, backends):
        if result.status == "failed" and recalled(key(result)) is None:
            remember(result)
