"""Keeps a model running if the cache folder cannot be used.

All files on disk (kernels, verdicts, tuned times, logs, locks) only save work. So a fault of the cache never stops a
model: it is logged as one warning, reading finds nothing, and kernels are built in a temporary folder that is removed
when the process ends. The commands ``fp4dispatch build``, ``cache`` and ``verify`` report the fault as an error
instead, and ``doctor`` as a failed check.

This policy is implemented only here: stores raise CacheError, callers wrap them in :func:`optional`.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from fp4dispatch.errors import CacheError
from fp4dispatch.jit.store import private
from fp4dispatch.jit.store import temporary as temporary_folder
from fp4dispatch.machine import log
from fp4dispatch.machine.locks import ForkSafeLock

UNREADABLE = (CacheError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""All that reading a damaged file of a store can raise; deeply nested JSON raises RecursionError."""

_lock = ForkSafeLock()
_temporary: Path | None = None


class optional:  # noqa: N801 - used like a function
    """Suppress a fault of a store in the body, with one warning per process. ``what`` is then unavailable."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, (CacheError, OSError, RecursionError)):
            return False
        fault(self._what, error)
        return True


def fault(what: str, error: BaseException) -> None:
    """Warn of a fault once per process. OS errors of one kind count as one fault, whatever the file."""
    cause = error if isinstance(error, OSError) else error.__cause__
    number = cause.errno if isinstance(cause, OSError) else None
    key = str(error) if number is None else os.strerror(number)
    warn(f"going on without {what}: {error or type(error).__name__}", key)


def warn(text: str, key: str | None = None) -> None:
    """Log a warning once per process, as :func:`fp4dispatch.machine.log.once` does. ``key``: the text by default."""
    log.once(key or text, logging.WARNING, text)


def reset() -> None:
    """Forget warnings and the temporary folder; the folder is still removed when the process ends."""
    global _temporary
    log.reset()
    with _lock:
        _temporary = None


def temporary() -> Path:
    """Return the temporary folder that replaces the cache in this process; private, created at the first call.

    A forked child uses its parent's folder while it exists.

    Raises
    ------
    CacheError
        If no temporary folder can be made.
    """
    global _temporary
    with _lock:
        if _temporary is None or not _temporary.is_dir():
            try:
                _temporary = temporary_folder.make()
            except OSError as error:
                raise CacheError(
                    f"no folder for temporary files can be made ({error.strerror or error})\n"
                    f"  fix: set TMPDIR to a folder with some space, {private.ELSEWHERE}"
                ) from error
    with private.explained(_temporary):
        private.check_place(_temporary)
    return _temporary


def made() -> Path | None:
    """Return the folder of :func:`temporary`, or None if this process has none."""
    return _temporary


def faults(folder: Path, stores: Iterable[str]) -> list[str]:
    """Return why a cache folder, or something in its stores (folders of these names), is not used; for ``doctor``."""
    found: list[str] = []

    def look(path: Path, *, store: bool = False) -> None:
        try:
            with private.explained(path):
                if not store and not stat.S_ISDIR(path.lstat().st_mode):
                    os.close(private.opened(path))
                    return
                private.check(path)
                inside = sorted(path.iterdir())
        except CacheError as error:
            found.append(str(error))
        else:
            for one in inside:
                look(one)

    try:
        with private.explained(folder):
            try:
                private.check_place(folder)
            except FileNotFoundError:
                return []
            there = [path.name for path in folder.iterdir()]
    except CacheError as error:
        return [str(error)]
    for name in stores:
        if name in there:
            look(folder / name, store=True)
    return found
