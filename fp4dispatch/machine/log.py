"""The package's logger. It logs nothing during CUDA graph capture, and what :func:`once` gets once a process. No torch.

A text that comes during a capture is logged by the next call after it.
"""

from __future__ import annotations

import logging

from fp4dispatch.machine import capture
from fp4dispatch.machine.locks import ForkSafeLock
from fp4dispatch.settings import settings

logger = logging.getLogger("fp4dispatch")
logger.addHandler(logging.NullHandler())
logger.addFilter(capture.may_log)

_lock = ForkSafeLock()
_said: set[object] = set()


def once(key: object, level: int, text: str) -> None:
    """Log a text once per process. ``key`` stands for it; during a capture it is neither logged nor counted."""
    with _lock:
        if key in _said or capture.is_capturing():
            return
        if not _said:
            _set_up()
        _said.add(key)
    logger.log(level, "%s", text)


def said(key: object) -> bool:
    """Whether a text of this key was logged."""
    return key in _said


def count(key: object) -> None:
    """Count a key as logged."""
    with _lock:
        _said.add(key)


def reset() -> None:
    """Forget what has been logged."""
    with _lock:
        _said.clear()


def _set_up() -> None:
    """Apply FP4DISPATCH_LOG. Without it, the application configures logging."""
    level = settings.log
    if level is None:
        return
    if level == "off":
        logger.setLevel(logging.CRITICAL + 1)
        return
    logger.setLevel(level.upper())
    if all(isinstance(handler, logging.NullHandler) for handler in logger.handlers):
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("fp4dispatch %(levelname)s: %(message)s"))
        logger.addHandler(handler)
