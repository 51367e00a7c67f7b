"""NVFP4 and FP8 linear layers for PyTorch: correct first, then fast, on the NVIDIA GPU that is there.

Importing this package asks NVML which GPUs this process will see and does nothing else: no CUDA context, no process, no
file, no logging set-up, and no import of torch. Names that need torch are loaded on first use (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import Any

from fp4dispatch import system as _system
from fp4dispatch.arch import Arch
from fp4dispatch.decision import Decision, Reason, Verdict
from fp4dispatch.errors import (
    BackendUnsupportedError,
    BackwardError,
    CacheError,
    CaptureError,
    CheckpointError,
    CompileError,
    FormatError,
    Fp4DispatchError,
    InputError,
    NoBackendError,
    ProofError,
    SelfCheckFailed,
    SettingsError,
    ToolchainError,
    UnknownBackendError,
)
from fp4dispatch.problem import Problem
from fp4dispatch.system import Gpu, Library, System

__version__ = "0.1.0"

gpus: tuple[Gpu, ...] = _system.detected().gpus
"""GPUs that this process will see, as NVML told at import; empty without driver or GPU."""

gpu_arch: Arch | None = gpus[0].arch if gpus else None
"""Arch of the first of ``gpus``. (``fp4dispatch.arch`` is the module.)"""

_LAZY: dict[str, str] = {}

__all__ = [
    "Arch",
    "BackendUnsupportedError",
    "BackwardError",
    "CacheError",
    "CaptureError",
    "CheckpointError",
    "CompileError",
    "Decision",
    "FormatError",
    "Fp4DispatchError",
    "Gpu",
    "InputError",
    "Library",
    "NoBackendError",
    "Problem",
    "ProofError",
    "Reason",
    "SelfCheckFailed",
    "SettingsError",
    "System",
    "ToolchainError",
    "UnknownBackendError",
    "Verdict",
    "__version__",
    "gpu_arch",
    "gpus",
]


def __getattr__(name: str) -> Any:
    try:
        module = _LAZY[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
