"""Keeps standard output for a command's answer, such as the JSON of ``--json``.

Commands import libraries and plug-ins, which may print: in Python, below it, or from a process that they start. A
program that reads the answer must not find that in it. While an answer is awaited, it goes to standard error.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_OUT, _ERR = 1, 2
_kept: list[tuple[Any, int | None]] = []
"""Of each :func:`kept` block that is open: the stream for answers, and a copy of its descriptor."""


def answer(text: str, end: str = "\n") -> None:
    """Print what the command was asked for. In a :func:`kept` block only this reaches standard output."""
    if not _kept:
        print(text, end=end)
        return
    stream, copy = _kept[-1]
    with _turned(copy, stream):
        print(text, end=end, file=stream, flush=True)


@contextmanager
def kept(*, for_good: bool = False) -> Iterator[None]:
    """Send to standard error whatever else is printed in this block; call it in :func:`fp4dispatch.cli.output.checked`.

    ``for_good``: also what is printed below Python until the process ends, by handlers of ``atexit`` for example.
    """
    stdout = sys.stdout
    stdout.flush()
    copy = os.dup(_OUT) if _is_descriptor_1(stdout) else None
    _kept.append((stdout, copy))
    sys.stdout = sys.stderr
    if copy is not None:
        os.dup2(_ERR, _OUT)
    try:
        yield
    finally:
        _kept.pop()
        sys.stdout = stdout
        if copy is not None:
            if not for_good:
                _flush(stdout)
                os.dup2(copy, _OUT)
            os.close(copy)


@contextmanager
def _turned(copy: int | None, stream: Any) -> Iterator[None]:
    """Let descriptor 1 be standard output in this block."""
    if copy is None:
        yield
        return
    _flush(stream)
    os.dup2(copy, _OUT)
    try:
        yield
    except BaseException:
        _drop(stream)  # what could not be written would go to standard error below
        raise
    finally:
        os.dup2(_ERR, _OUT)


def _flush(stream: Any) -> None:
    """Write what others have left in the buffers of Python's and of C's stream; drop what cannot be written."""
    raw = getattr(stream, "stream", stream)  # what others print may be lost, unlike an answer
    try:
        raw.flush()
    except OSError:
        _drop(stream)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)


def _drop(stream: Any) -> None:
    """Empty the buffer of a stream of descriptor 1, which leads nowhere afterwards."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, _OUT)
    os.close(null)
    getattr(stream, "stream", stream).flush()


def _is_descriptor_1(stream: Any) -> bool:
    """Whether a stream writes to descriptor 1; not where it is closed, or a test reads it."""
    try:
        return bool(stream.fileno() == _OUT)
    except (OSError, ValueError, AttributeError):
        return False
