"""Every exception that fp4dispatch raises on purpose.

A message says what failed, why (value found, value needed) and what to do. Each class also derives from the built-in
exception that a caller expects, so ``except ValueError`` works.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pathlib import Path


class Explanation(Protocol):
    """The part of :class:`fp4dispatch.decision.Decision`, which imports this module, that an error promises."""

    @property
    def backend(self) -> str | None:
        """The backend that was chosen; None where nothing can run."""

    @property
    def requested(self) -> str:
        """``auto``, or the backend that was named."""

    @property
    def verdicts(self) -> tuple[Any, ...]:
        """One for each candidate, with its reasons."""

    def verdict(self, backend: str) -> Any:
        """Return the verdict on one backend."""

    def text(self) -> str:
        """Return the whole trace as text."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""


class Fp4DispatchError(Exception):
    """Base of all errors raised by this package."""


class SettingsError(Fp4DispatchError, ValueError):
    """An environment variable or a setting has an invalid value."""


class UnknownBackendError(Fp4DispatchError, ValueError):
    """A backend was named that is neither built in nor registered by a plug-in."""


class PluginError(Fp4DispatchError, RuntimeError):
    """Two plug-ins, or a plug-in and a built-in backend, claim the same name; the plug-in is rejected."""


class IntegrationError(Fp4DispatchError, ImportError):
    """A library to integrate with is missing, or has a version that was not tested. Nothing was registered."""


class InputError(Fp4DispatchError, ValueError):
    """A tensor or argument has the wrong dtype, shape, device or layout. Raised before any launch."""


class FormatError(InputError):
    """Quantised data breaks its format: NaN scales, a negative global scale, codes of the wrong width."""


class NoBackendError(Fp4DispatchError, RuntimeError):
    """No backend can run the problem. ``decision`` holds every candidate with every reason."""

    def __init__(self, message: str, decision: Explanation | None = None) -> None:
        super().__init__(message)
        self.decision = decision


class BackendUnsupportedError(Fp4DispatchError, RuntimeError):
    """A backend requested by name cannot run the problem. ``decision`` holds its reasons."""

    def __init__(self, message: str, decision: Explanation | None = None) -> None:
        super().__init__(message)
        self.decision = decision


class CaptureError(Fp4DispatchError, RuntimeError):
    """Host work (build, plan, tune, workspace growth) was needed while a CUDA graph was being captured."""


class CaptureDeniedError(CaptureError):
    """A backend requested by name must not run in a CUDA graph, by a rule. ``decision`` holds the rule."""

    def __init__(self, message: str, decision: Explanation | None = None) -> None:
        super().__init__(message)
        self.decision = decision


class InnerNotFoundError(Fp4DispatchError, LookupError):
    """The part of a model that CUDA graphs would capture is not known. The model is unchanged."""


class CheckpointError(Fp4DispatchError, ValueError):
    """A checkpoint is missing, truncated, malformed or hostile. The model is unchanged."""


class CheckpointUnsupportedError(CheckpointError):
    """A valid checkpoint in a format that this package does not read. The text names the format."""


class BackwardError(Fp4DispatchError, RuntimeError):
    """A backward pass through an inference-only layer."""


class ToolchainError(Fp4DispatchError, RuntimeError):
    """nvcc, the CUTLASS headers or a disassembler is missing, too old or unusable."""


class FlagsError(Fp4DispatchError, ValueError):
    """A compile-target record or the kernel manifest is malformed or contradictory. Nothing was compiled."""


class CompileError(Fp4DispatchError, RuntimeError):
    """A kernel did not compile. The message holds the first errors, the log path and the command to rerun."""

    def __init__(self, message: str, log: Path | None = None) -> None:
        super().__init__(message)
        self.log = log


class ProofError(Fp4DispatchError, RuntimeError):
    """A compiled kernel breaks what its flags promise, e.g. lacks a grid barrier or a tensor-core MMA."""


class CacheError(Fp4DispatchError, RuntimeError):
    """The kernel cache cannot be used safely: wrong owner, writable by others, corrupt, read-only or full."""


class RankError(Fp4DispatchError, RuntimeError):
    """Another rank of this job failed or chose differently. This rank stops instead of waiting forever."""


class SelfCheckFailed(Fp4DispatchError, RuntimeError):
    """A backend gave wrong results on this machine and is quarantined."""
