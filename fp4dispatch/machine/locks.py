"""A lock that a forked child finds open.

``fork`` copies a lock as it is, and not the thread that holds it: a child (a worker of a DataLoader, say) that is made
while a decision is being made would wait for that thread for ever. What our locks guard are caches, which change by
single assignments: a child goes on with what its parent had, and makes the rest anew. Every lock of this package is
one of these.
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
        """Make the lock anew in a child, held as often as the thread that forked held it."""
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
