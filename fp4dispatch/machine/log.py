"""The package's logger. It logs nothing during CUDA graph capture, and what :func:`once` gets once a process. No torch.

A text that comes during a capture is logged by the next call after it.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from fp4dispatch.errors import SettingsError
from fp4dispatch.machine import capture
from fp4dispatch.machine.locks import ForkSafeLock
from fp4dispatch.settings import settings

logger = logging.getLogger("fp4dispatch")
logger.addHandler(logging.NullHandler())
logger.addFilter(capture.may_log)

_lock = ForkSafeLock()
_said: set[object] = set()


def debug(text: str, *args: object) -> None:
    """Log for whoever looks for a fault of this package."""
    _log(logging.DEBUG, text, args)


def info(text: str, *args: object) -> None:
    """Log what may be of interest."""
    _log(logging.INFO, text, args)


def warning(text: str, *args: object) -> None:
    """Log what a user should know."""
    _log(logging.WARNING, text, args)


def _log(level: int, text: str, args: tuple[object, ...]) -> None:
    with suppress(SettingsError):  # of a wrong FP4DISPATCH_LOG the next choice says so
        _ready()
    logger.log(level, text, *args, stacklevel=3)


def once(key: object, level: int, text: str) -> None:
    """Log a text once per process. ``key`` stands for it; during a capture it is neither logged nor counted."""
    with _lock:
        if key in _said or capture.is_capturing():
            return
        _ready()
        _said.add(key)
    logger.log(level, "%s", text, stacklevel=2)


def said(key: object) -> bool:
    """Whether a text of this key was logged."""
    return key in _said


def count(key: object) -> None:
    """Count a key as logged."""
    with _lock:
        _said.add(key)


def reset() -> None:
    """Forget what has been logged, and read FP4DISPATCH_LOG again."""
    with _lock:
        _said.clear()
    _ready.cache_clear()


@contextmanager
def shown() -> Iterator[None]:
    """Show warnings on stderr in the body, unless FP4DISPATCH_LOG or the application says what to show."""
    _ready()
    if settings.log is not None or not _silent():
        yield
        return
    level, handler = logger.level, _to_stderr("warning")
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@functools.cache
def _ready() -> None:
    """Apply FP4DISPATCH_LOG. Without it, the application configures logging."""
    level = settings.log
    if level == "off":
        logger.setLevel(logging.CRITICAL + 1)
    elif level is not None and _silent():
        _to_stderr(level)
    elif level is not None:
        logger.setLevel(level.upper())


def _silent() -> bool:
    return all(isinstance(handler, logging.NullHandler) for handler in logger.handlers)


class _Stderr(logging.StreamHandler[Any]):
    """Writes to what ``sys.stderr`` is at that time."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        """The stream of now."""
        return sys.stderr


def _to_stderr(level: str) -> logging.Handler:
    handler = _Stderr()
    handler.setFormatter(logging.Formatter("fp4dispatch %(levelname)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    return handler
