"""CUDA graph capture: declare it, detect it, and refuse host work during it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from fp4dispatch.errors import CaptureError, InputError
from fp4dispatch.machine.locks import ForkSafeLock
from fp4dispatch.problem import CAPTURE_MODES, CaptureMode, one_of

_query: Callable[[], bool] | None = None


class Declared(NamedTuple):
    """What :func:`mode` declares: how CUDA graphs capture, and the smallest M there."""

    capture: CaptureMode
    smallest_m: int


modes_open = 0
"""Number of :func:`mode` blocks that are open, in all threads. While it is 0, no caller need ask :func:`declared`."""

_declared: ContextVar[Declared | None] = ContextVar("fp4dispatch_capture_mode", default=None)
_lock = ForkSafeLock()


@contextmanager
def mode(capture: CaptureMode, smallest_m: int = 1) -> Iterator[None]:
    """Declare how CUDA graphs will capture the layers that run inside this ``with`` block.

    Inside, layers (``FP4Linear``, ``FP8Linear``), :func:`fp4dispatch.warmup` and the raw operators ask the policy with
    this mode. What they choose is kept apart from what calls outside of the block use, layer by layer. So a backend
    that must not be captured can still serve eager calls. Use the same mode to warm up and to capture::

        with capture.mode("piecewise", smallest_m=16):
            fp4dispatch.warmup(model, tokens=[16, 32, 64])  # binds and plans for graphs
            with torch.cuda.graph(graph):
                model(x)

    A rule about capture that forbids the choice of ``auto`` makes it take another backend, with one warning. A backend
    that was named and that such a rule forbids is refused: the caller can run without a graph.
    (``warmup(capture=...)`` outside of a block honours the name, with one warning.)

    The block counts for the current thread or asyncio task. A thread that it starts has no mode. Blocks nest; the
    inner one holds. During a capture without a block, layers run what they were bound to. A backend that the rules do
    not allow in one full graph is then refused with :class:`~fp4dispatch.errors.CaptureError`.

    Parameters
    ----------
    capture
        ``full`` (one graph around everything), ``piecewise`` (graphs between eager parts), or ``none``: as if there
        were no block, e.g. for an eager part inside.
    smallest_m
        Smallest number of tokens of the captured sizes. 0 where captured code reads M at replay, and M may be 0.

    Raises
    ------
    InputError
        For another mode, or a number that is no size.
    CaptureDeniedError
        From the calls inside: a named backend must not run in such a graph.

    Notes
    -----
    Capture-safe to enter and to leave. Costs an eager call outside of all blocks nothing.
    """
    global modes_open
    one_of("capture", capture, CAPTURE_MODES)
    if type(smallest_m) is not int or smallest_m < 0:
        raise InputError(f"smallest_m={smallest_m!r} is not a number of tokens: need an integer of at least 0")
    token = _declared.set(None if capture == "none" else Declared(capture, smallest_m))
    with _lock:
        modes_open += 1
    try:
        yield
    finally:
        with _lock:
            modes_open -= 1
        _declared.reset(token)


def declared() -> Declared | None:
    """Return what the innermost :func:`mode` block of this thread or task declares; None without one."""
    return _declared.get() if modes_open else None


def warmup_call(tokens: str) -> str:
    """Return the call of ``warmup`` that prepares these numbers of tokens, in the mode that is declared."""
    call = f"fp4dispatch.warmup(model, tokens=[{tokens}])"
    found = declared()
    return call if found is None else f"{call}, inside capture.mode({found.capture!r}, smallest_m={found.smallest_m})"


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
