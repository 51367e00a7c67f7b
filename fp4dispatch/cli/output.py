"""Standard output that cannot be written: closed (``>&-``), on a full disk, or a pipe that nobody reads any more."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn


class OutputLost(BaseException):
    """What was printed did not arrive. Not an Exception: no handler of a command is meant to go on after it."""


@contextmanager
def checked() -> Iterator[None]:
    """Have every failure to print raise :class:`OutputLost`, at the latest when the block ends.

    A standard error that cannot be written is ignored: there is nobody left to tell.
    """
    _occupy()
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
    """Stands for a stream whose descriptor was closed when the process began."""

    def write(self, text: str) -> NoReturn:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))


class _Stream:
    """A stream that does something of its own about an error; everything else is the real one's."""

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


def _occupy() -> None:
    """Let no file that is opened later become standard output by taking a number that is free."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            with suppress(OSError):
                os.open(os.devnull, os.O_RDWR)  # takes the lowest number, which is this one


def _discard(stream: Any) -> None:
    """Throw away what is buffered, or the interpreter fails on it once more when it ends."""
    with suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
