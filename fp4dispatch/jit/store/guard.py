"""Never worse than without a cache: what happens where the cache folder cannot be used.

Everything that is kept on disk (kernels, verdicts, tuned times, logs, locks) only saves work. So whatever is wrong with
it, at whatever moment, a model goes on: the fault is one warning, reading finds nothing, and kernels are built in a
folder of this process that is removed at its end. Commands that were asked about the cache (``fp4dispatch build``,
``cache``, ``verify``) say the fault instead; so does a line of ``doctor``.

This is the only place that decides so: stores raise CacheError, callers hold them in :func:`optional`.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fp4dispatch.errors import CacheError
from fp4dispatch.jit.store import private
from fp4dispatch.machine import capture
from fp4dispatch.machine.locks import ForkSafeLock

UNREADABLE = (CacheError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What reading a file of a store can raise, whatever is in it: deep JSON is a RecursionError."""

_log = logging.getLogger("fp4dispatch")
_lock = ForkSafeLock()
_said: set[str] = set()
_temporary: Path | None = None


@contextmanager
def optional(what: str) -> Iterator[None]:
    """Leave the body at a fault of a store, with one warning a process for each fault; ``what`` then is not there."""
    try:
        yield
    except (CacheError, OSError, RecursionError) as error:
        fault(what, error)


def fault(what: str, error: BaseException) -> None:
    """Warn of a fault once a process: what the file system refuses in one place, it refuses in all of a cache."""
    cause = error if isinstance(error, OSError) else error.__cause__
    number = cause.errno if isinstance(cause, OSError) else None
    key = str(error) if number is None else os.strerror(number)
    warn(f"going on without {what}: {error or type(error).__name__}", key)


def warn(text: str, key: str | None = None) -> None:
    """Warn of something once a process; during a capture nothing is said, so that it is said when it comes up again."""
    with _lock:
        if (key or text) in _said or capture.is_capturing():
            return
        _said.add(key or text)
    _log.warning("%s", text)


def reset() -> None:
    """Forget what was said and made; the folder is still removed at the end."""
    global _temporary
    with _lock:
        _said.clear()
        _temporary = None


def temporary() -> Path:
    """Return the folder that takes the place of the cache in this process; made at the first call, private.

    A child of a fork goes on with its parent's for as long as that is there.

    Raises
    ------
    CacheError
        Where there is no place for temporary files either.
    """
    global _temporary
    with _lock:
        if _temporary is None or not _temporary.is_dir():
            try:
                made = Path(tempfile.mkdtemp(prefix="fp4dispatch-")).resolve()
            except OSError as error:
                raise CacheError(
                    f"no folder for temporary files can be made ({error.strerror or error})\n"
                    f"  fix: set TMPDIR to a folder with some space, {private.ELSEWHERE}"
                ) from error
            atexit.register(_remove, made, os.getpid())
            _temporary = made
    with private.explained(_temporary):
        private.check_place(_temporary)
    return _temporary


def made() -> Path | None:
    """Return the folder of :func:`temporary` if this process has one."""
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


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
