"""NVFP4 and FP8 linear layers for PyTorch: correct first, then fast, on the NVIDIA GPU that is there.

Importing this package asks NVML which GPUs this process can use. It does nothing else: no CUDA context,
no process, no file, no logging set-up, no import of torch. Names that need torch load on first use (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fp4dispatch.errors import (
    BackendUnsupportedError,
    BackwardError,
    CacheError,
    CaptureDeniedError,
    CaptureError,
    CheckpointError,
    CheckpointUnsupportedError,
    CompileError,
    FlagsError,
    FormatError,
    Fp4DispatchError,
    InnerNotFoundError,
    InputError,
    IntegrationError,
    NoBackendError,
    PluginError,
    ProofError,
    RankError,
    SelfCheckFailed,
    SettingsError,
    ToolchainError,
    UnknownBackendError,
)
from fp4dispatch.machine import system as _system
from fp4dispatch.machine.system import Gpu, Library, System
from fp4dispatch.problem import Problem
from fp4dispatch.problem.arch import Arch
from fp4dispatch.problem.decision import Decision, Reason, Verdict

if TYPE_CHECKING:  # the names in _LAZY, for type checkers and editors
    from fp4dispatch.checkpoints import load_quantized, open_checkpoint, quantize_checkpoint, save_quantized
    from fp4dispatch.dispatch.choose import select
    from fp4dispatch.dispatch.explain import explain
    from fp4dispatch.formats import fp8_dequantize, nvfp4_dequantize, nvfp4_global_scale
    from fp4dispatch.integrations import register
    from fp4dispatch.models.compact_weights import compact
    from fp4dispatch.models.fusing.fuse import fuse
    from fp4dispatch.models.linear import FP4Linear, FP8Linear
    from fp4dispatch.models.model_report import report
    from fp4dispatch.models.replace import replace_linears, warmup
    from fp4dispatch.models.stored_weights import refresh
    from fp4dispatch.run.ops import fp8_gemm, fp8_quantize, nvfp4_gemm, nvfp4_quantize

__version__ = "0.1.0"

gpus: tuple[Gpu, ...] = _system.detected().gpus
"""The GPUs that this process can use, read from NVML at import. Empty without a driver or a GPU."""

gpu_arch: Arch | None = gpus[0].arch if gpus else None
"""Arch of the first of ``gpus``."""

# Public names that need torch, and the module that each one comes from.
_LAZY: dict[str, str] = {
    "explain": "dispatch.explain",
    "select": "dispatch.choose",
    "fp8_dequantize": "formats",
    "nvfp4_dequantize": "formats",
    "nvfp4_global_scale": "formats",
    "FP4Linear": "models.linear",
    "FP8Linear": "models.linear",
    "fp8_gemm": "run.ops",
    "fp8_quantize": "run.ops",
    "nvfp4_gemm": "run.ops",
    "nvfp4_quantize": "run.ops",
    "load_quantized": "checkpoints",
    "open_checkpoint": "checkpoints",
    "quantize_checkpoint": "checkpoints",
    "save_quantized": "checkpoints",
    "compact": "models.compact_weights",
    "fuse": "models.fusing.fuse",
    "replace_linears": "models.replace",
    "warmup": "models.replace",
    "refresh": "models.stored_weights",
    "register": "integrations",
    "report": "models.model_report",
}

__all__ = [
    "Arch",
    "BackendUnsupportedError",
    "BackwardError",
    "CacheError",
    "CaptureDeniedError",
    "CaptureError",
    "CheckpointError",
    "CheckpointUnsupportedError",
    "CompileError",
    "Decision",
    "FP4Linear",
    "FP8Linear",
    "FlagsError",
    "FormatError",
    "Fp4DispatchError",
    "Gpu",
    "InnerNotFoundError",
    "InputError",
    "IntegrationError",
    "Library",
    "NoBackendError",
    "PluginError",
    "Problem",
    "ProofError",
    "RankError",
    "Reason",
    "SelfCheckFailed",
    "SettingsError",
    "System",
    "ToolchainError",
    "UnknownBackendError",
    "Verdict",
    "__version__",
    "compact",
    "explain",
    "fp8_dequantize",
    "fp8_gemm",
    "fp8_quantize",
    "fuse",
    "gpu_arch",
    "gpus",
    "load_quantized",
    "nvfp4_dequantize",
    "nvfp4_gemm",
    "nvfp4_global_scale",
    "nvfp4_quantize",
    "open_checkpoint",
    "quantize_checkpoint",
    "refresh",
    "register",
    "replace_linears",
    "report",
    "save_quantized",
    "select",
    "warmup",
]


def __getattr__(name: str) -> Any:
    if name == "graphs":  # a subpackage, imported when it is first used
        return importlib.import_module(f"{__name__}.graphs")
    try:
        module = _LAZY[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names alone: ``help(fp4dispatch)`` and completion show what this lists."""
    return sorted({*__all__, "graphs", *(name for name in globals() if name.startswith("__"))})
