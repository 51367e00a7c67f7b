"""CUDA graph capture: is one going on, and refuse host work while it is."""

from __future__ import annotations

import sys
from collections.abc import Callable

from fp4dispatch.errors import CaptureError

_query: Callable[[], bool] | None = None


def is_capturing() -> bool:
    """Whether the current CUDA stream is being captured into a graph; never initialises CUDA; False without torch.

    The guard on ``is_initialized`` keeps a forked or CPU-only process away from the driver: no capture can be going on
    before CUDA is initialised.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    return bool(torch.cuda.is_current_stream_capturing())


def stream_is_capturing() -> bool:
    """Do what :func:`is_capturing` does in one call, for code that holds a CUDA tensor: CUDA is known to be up."""
    global _query
    if _query is None:
        _query = sys.modules["torch"]._C._cuda_isCurrentStreamCapturing
    return _query()


def may_log(record: object) -> bool:
    """Let a log record pass outside a capture alone; a filter of :mod:`logging`. A handler may do anything."""
    return not is_capturing()


def forbid_in_capture(what: str, fix: str) -> None:
    """Refuse host work (build, plan, tune, growing a workspace) during capture, where it would break the graph.

    Parameters
    ----------
    what
        What would have to be done now, e.g. ``no plan for M=48: building one``.
    fix
        The call to make before capturing, e.g. ``fp4dispatch.warmup(model, tokens=[48])``.

    Raises
    ------
    CaptureError
        If the current stream is being captured.
    """
    if is_capturing():
        raise CaptureError(f"{what} would break the CUDA graph that is being captured.\n  Before capturing: {fix}")
