"""Input and result of the checks of ``fp4dispatch doctor``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fp4dispatch.jit.packages import Report
from fp4dispatch.machine.system import System

Status = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Check:
    """Result of one check; ``fix`` is empty only if the status is ok or skip."""

    name: str
    status: Status
    text: str
    fix: str = ""


@dataclass(frozen=True)
class Kept:
    """One verdict of the self-check that holds on this machine."""

    backend: str
    status: str
    text: str
    findings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Child:
    """Answer of the child process. ``error`` says why torch could not be imported, else None.

    ``plugins_error`` says which plug-ins it was loading when it ended or hung, else it is empty.
    """

    error: str | None = None
    cuda: str | None = None
    archs: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    cuda_error: str = ""
    plugins: dict[str, str | None] = field(default_factory=dict)
    plugins_error: str = ""
    verdicts: tuple[Kept, ...] = ()
    verdicts_error: str = ""


@dataclass(frozen=True)
class Facts:
    """Input of all checks."""

    system: System
    child: Child
    python: tuple[int, int, int]
    settings_errors: tuple[str, ...]
    cache_dir: Path
    distributions: frozenset[str]
    library_path: str = ""
    selfcheck_folder: Path = Path("selfcheck")
    selfcheck_off: bool = False
    values: Mapping[str, Any] = field(default_factory=dict)
    """The settings that could be parsed, by key."""
    kernels: tuple[Report, ...] = ()
    """What installed wheels of finished kernels offer here."""

    @property
    def fp8_copy(self) -> bool:
        """Whether NVFP4 layers may hold an FP8 copy of their weights."""
        return bool(self.values.get("fp8_copy"))
