"""A lock that is released in a forked child.

``fork`` copies a locked lock but not the thread that holds it, so a child (e.g. a DataLoader worker) would wait
forever. Our locks guard caches that change by single assignments, so a child can safely continue with the parent's
content. Every lock of this package is one of these.
"""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType


class ForkSafeLock:
    """A reentrant lock, used as ``with lock:``. After a fork only the thread that forked may still hold it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner = 0
        self._depth = 0
        _locks.add(self)

    def __enter__(self) -> ForkSafeLock:
        self._lock.acquire()
        self._owner = threading.get_ident()
        self._depth += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = 0
        self._lock.release()

    def _renew(self) -> None:
        """Replace the lock in a child; the forking thread keeps its recursion depth."""
        self._lock = threading.RLock()
        if self._owner != threading.get_ident():
            self._owner = self._depth = 0
        for _ in range(self._depth):
            self._lock.acquire()


_locks: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


def _renew_all() -> None:
    for lock in list(_locks):
        lock._renew()


os.register_at_fork(after_in_child=_renew_all)
