"""Handles a standard output that cannot be written: closed (``>&-``), on a full disk, or a broken pipe."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn


class OutputLost(BaseException):
    """Output was lost. Not an Exception, so that no handler in a command catches it."""


@contextmanager
def checked() -> Iterator[None]:
    """Raise :class:`OutputLost` if output cannot be written, at the latest when the block ends.

    Errors of standard error are ignored: there is no other place to report them.
    """
    _reserve_descriptors()
    stdout, stderr = sys.stdout, sys.stderr
    sys.stdout = _Stream(stdout if stdout is not None else _Closed(), _raise)
    sys.stderr = _Stream(stderr if stderr is not None else _Closed(), lambda error: _discard(stderr))
    try:
        try:
            yield
        finally:
            sys.stderr.flush()
            sys.stdout.flush()
    except OutputLost:
        _discard(stdout)
        raise
    finally:
        sys.stdout, sys.stderr = stdout, stderr


class _Closed(io.TextIOBase):
    """Stands in for a stream that was closed when the process started."""

    def write(self, text: str) -> NoReturn:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))


class _Stream:
    """Wraps a stream: passes errors to a handler, everything else to the stream."""

    def __init__(self, stream: Any, failed: Callable[[Exception], object]) -> None:
        self._stream, self._failed = stream, failed

    def write(self, text: str) -> int:
        """Write, as a text stream does."""
        try:
            self._stream.write(text)
        except (OSError, ValueError) as error:  # ValueError: it was closed in this process
            self._failed(error)
        return len(text)

    def flush(self) -> None:
        """Flush, as a text stream does."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._failed(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _raise(error: Exception) -> NoReturn:
    raise OutputLost(str(error)) from error


def _reserve_descriptors() -> None:
    """Open /dev/null for closed descriptors 0 to 2, so that no later file becomes standard output."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            with suppress(OSError):
                os.open(os.devnull, os.O_RDWR)  # takes the lowest number, which is this one


def _discard(stream: Any) -> None:
    """Discard buffered output; otherwise the interpreter fails again when it exits."""
    with suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
