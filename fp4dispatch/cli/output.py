"""Handles a standard output that cannot be written: closed (``>&-``), on a full disk, or a broken pipe.

Also writes what a command offers in several formats.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from fp4dispatch.cli.answers import answer
from fp4dispatch.errors import InputError

STDOUT = "-"
"""The value of a format's option without a file."""


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
        self.stream, self._failed = stream, failed

    def write(self, text: str) -> int:
        """Write, as a text stream does."""
        try:
            try:
                self.stream.write(text)
            except UnicodeEncodeError as error:  # letters that this locale lacks, or a path that is no text
                self.stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        except (OSError, ValueError) as error:  # ValueError: it was closed in this process
            self._failed(error)
        return len(text)

    def flush(self) -> None:
        """Flush, as a text stream does."""
        try:
            self.stream.flush()
        except (OSError, ValueError) as error:
            self._failed(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


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
        number = stream.fileno()
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, number)
        finally:
            os.close(null)


def prints_data(args: Namespace) -> bool:
    """Whether standard output is for data that a program reads."""
    return any(getattr(args, name, None) in (True, STDOUT) for name in ("json", "csv", "md"))


def formats_to_print(args: Namespace, names: tuple[str, ...] = ("json", "csv", "md")) -> list[str]:
    """Return the formats that go to standard output; InputError for more than one."""
    streams = [name for name in names if getattr(args, name) == STDOUT]
    if len(streams) > 1:
        raise InputError(f"--{' and --'.join(streams)} would both print: name a FILE for all but one")
    return streams


def check_files(args: Namespace, names: tuple[str, ...] = ("json", "csv", "md")) -> None:
    """Refuse a file that could not be written, or that another option needs; InputError. Call it before measuring."""
    _check_distinct(args, (*names, "plot", "compare"))
    for name in names:
        target = getattr(args, name)
        if target in (None, STDOUT):
            continue
        path = Path(target).absolute()
        if not path.parent.is_dir():
            raise InputError(f"--{name} {target}: cannot be written: there is no folder {Path(target).parent}")
        if path.is_dir():
            raise InputError(f"--{name} {target}: cannot be written: it is a folder")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise InputError(f"--{name} {target}: cannot be written: permission denied")


def _check_distinct(args: Namespace, names: tuple[str, ...]) -> None:
    """Refuse two options that name one file: the second would replace what the first wrote, or reads."""
    taken: dict[str, str] = {}
    for name in names:
        target = getattr(args, name, None)
        if target in (None, STDOUT):
            continue
        path = os.path.realpath(target)
        if Path(path).exists() and not Path(path).is_file():  # pipes and devices take several
            continue
        if path in taken:
            raise InputError(
                f"--{taken[path]} and --{name} name one file, {target}, which can hold one of them: name two"
            )
        taken[path] = name


def write(args: Namespace, renderers: Mapping[str, Callable[[Any], str]], document: Any) -> None:
    """Write a document in each format that was asked for: to its file, or to standard output."""
    for name, render in renderers.items():
        target = getattr(args, name)
        if target == STDOUT:
            answer(render(document), end="")
        elif target is not None:
            write_file(name, target, render(document))


def write_file(name: str, target: str, text: str) -> None:
    """Write the file of an option; InputError where it cannot be written.

    A regular file is replaced by a rename: who ends the process, or fills the disk, leaves the old one whole. Pipes,
    devices, and files in folders that forbid a rename are written in place.
    """
    path = Path(target)
    try:
        in_place = (path.exists() and not path.is_file()) or str(path.absolute()).startswith(("/dev/", "/proc/"))
        if in_place or not _replaced(path.resolve(), text):
            path.write_text(text, "utf-8")
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise InputError(f"--{name} {target}: cannot be written: {error}") from error


_NO_RENAME = (errno.EACCES, errno.EPERM, errno.EBUSY, errno.EXDEV, errno.ENAMETOOLONG)


def _replaced(path: Path, text: str) -> bool:
    """Replace a file by a rename. Return False, and change nothing, where its folder has no room for that."""
    from fp4dispatch.checkpoints.files.rename import beside  # brings torch

    partial = beside(path.with_name(f".{path.name}"), "partial")
    try:
        partial.write_text(text, "utf-8")
        if path.exists():
            shutil.copymode(path, partial)
        partial.replace(path)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in _NO_RENAME:
            return False
        raise
    return True
