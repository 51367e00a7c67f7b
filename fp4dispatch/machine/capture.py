"""CUDA graph capture: detect it, and refuse host work during it."""

from __future__ import annotations

import sys
from collections.abc import Callable

from fp4dispatch.errors import CaptureError

_query: Callable[[], bool] | None = None


def is_capturing() -> bool:
    """Whether the current CUDA stream is being captured into a graph. Never initialises CUDA; False without torch.

    The ``is_initialized`` check keeps a forked or CPU-only process away from the driver. Before CUDA is initialised
    there is no capture.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    return bool(torch.cuda.is_current_stream_capturing())


def stream_is_capturing() -> bool:
    """Faster :func:`is_capturing` for code that holds a CUDA tensor, where CUDA is known to be initialised."""
    global _query
    if _query is None:
        _query = sys.modules["torch"]._C._cuda_isCurrentStreamCapturing
    return _query()


def may_log(record: object) -> bool:
    """Filter for :mod:`logging`: drop records during a capture, because a handler may do anything."""
    return not is_capturing()


def forbid_in_capture(what: str, fix: str) -> None:
    """Refuse host work (build, plan, tune, growing a workspace) during a capture, because it would break the graph.

    Parameters
    ----------
    what
        The work that is needed now, e.g. ``no plan for M=48: building one``.
    fix
        The call to make before capturing, e.g. ``fp4dispatch.warmup(model, tokens=[48])``.

    Raises
    ------
    CaptureError
        If the current stream is being captured.
    """
    if is_capturing():
        raise CaptureError(f"{what} would break the CUDA graph that is being captured.\n  Before capturing: {fix}")
