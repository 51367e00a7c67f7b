"""Exchange of values among the ranks of a job. An error names the rank that is dead, stuck or of another version.

If a rank is missing, a gloo or NCCL collective waits for half an hour, raises an error that names no rank, or ends the
process. So values go through the store of ``torch.distributed``, which every rank reads by itself. Each rank writes a
heartbeat to it every few seconds. The ranks of one job trust each other, as in ``torch.distributed``.

A session starts with the first shared value: rank 0 of the group opens it under a unique key, and all ranks compare
their versions. Ranks that missed each other in one session can meet in the next.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch

from fp4dispatch.errors import RankError
from fp4dispatch.machine import log as _log

PROTOCOL = 1
"""Version of the messages between ranks."""

DEAD_AFTER = 120.0
"""Seconds without a heartbeat after which a rank counts as dead."""

LATE_AFTER = 1800.0
"""Seconds to wait for a rank that is alive: it may still load weights, or compile."""

BEAT_EVERY = 5.0
WARN_AFTER = 60.0

_T = TypeVar("_T")

Group = Any
"""A ``torch.distributed.ProcessGroup``, or None for all ranks."""


class Ranks:
    """The ranks that must agree; only this one without ``torch.distributed`` or with ``alone``.

    Parameters
    ----------
    group
        The ranks; None for all.
    late_after
        Seconds to wait for a rank; None for ``LATE_AFTER``.
    """

    def __init__(self, group: Group = None, *, alone: bool = False, late_after: float | None = None) -> None:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.group = group
        self.size = torch.distributed.get_world_size(group) if distributed and not alone else 1
        self.rank = torch.distributed.get_rank(group) if self.size > 1 else 0
        self.late_after = late_after
        self._session: _Session | None = None

    def leave(self, why: str) -> None:
        """Tell the other ranks that this one takes no further part. They raise when they wait for it."""
        if self._session is not None:
            self._session.leave(why)

    def lost(self) -> str:
        """Return why another rank takes no further part; empty if all do, as far as they have said."""
        return "" if self._session is None else self._session.lost()

    def gather(self, value: _T) -> list[_T]:
        """Return the values of all ranks, in rank order. A collective call.

        Raises
        ------
        RankError
            If a rank has left, has sent no heartbeat for ``DEAD_AFTER`` seconds, does not take part within
            ``LATE_AFTER`` seconds, or runs another version of this package.
        """
        if self.size == 1:
            return [value]
        if self._session is None:
            self._session = _Session(self.group, self.rank, self.size, self.late_after)
            weakref.finalize(self, self._session.leave, "it has gone on without the others")
            _check_versions(self._session)
        return [pickle.loads(raw) for raw in self._session.share(pickle.dumps(value))]

    def attempt(self, what: str, work: Callable[[], _T]) -> _T:
        """Run ``work`` on every rank; return only if it succeeded on all. A collective call.

        Raises
        ------
        Exception
            What ``work`` raised here.
        RankError
            If it raised on another rank, or as :meth:`gather`.
        """
        if self.size == 1:
            return work()
        error: Exception | None = None
        try:
            result = work()
        except Exception as raised:  # any error: the other ranks must not wait for this one
            error = raised
        failed = [
            (rank, text)
            for rank, text in enumerate(self.gather("" if error is None else f"{type(error).__name__}: {error}"))
            if text
        ]
        if error is not None:
            raise error
        if failed:
            listed = "\n".join(f"  rank {rank}: {text}" for rank, text in failed)
            raise RankError(f"{what} failed on {len(failed)} of {self.size} ranks, so this one stops too:\n{listed}")
        return result


class _Session:
    """One series of exchanges, under its own keys in the store."""

    _joined: set[str] = set()  # noqa: RUF012 - per process: never join an old session again

    def __init__(self, group: Group, rank: int, size: int, late_after: float | None = None) -> None:
        self.rank, self.size = rank, size
        self._late_after = LATE_AFTER if late_after is None else late_after
        self._step = 0
        self._closed = threading.Event()
        self._store = _store()
        members = ",".join(map(str, torch.distributed.get_process_group_ranks(group)))
        self._base = f"fp4dispatch/{hashlib.sha256(members.encode()).hexdigest()[:16]}"
        self._prefix = self._open() if rank == 0 else self._join()
        self._joined.add(self._prefix)
        threading.Thread(target=self._beat, name="fp4dispatch-beat", daemon=True).start()

    def share(self, mine: bytes) -> list[bytes]:
        """Wait for the values of all ranks and return them."""
        self._step += 1
        try:
            self._set(f"{self._step}/{self.rank}", mine)
            keys = [f"{self._prefix}/{self._step}/{rank}" for rank in range(self.size)]
            self._wait(keys)
            values = [bytes(self._store.get(key)) for key in keys]
            if self._step > 1:  # all have come to this step, so all have read the last one
                self._store.delete_key(f"{self._prefix}/{self._step - 1}/{self.rank}")
        except RuntimeError as error:  # torch's DistError and DistNetworkError among them
            if not isinstance(error, RankError):
                self._store_lost(error)
            self.leave(f"it has stopped: {error}")
            raise
        return values

    def leave(self, why: str) -> None:
        """Tell the other ranks not to wait for this one."""
        if not self._closed.is_set():
            self._closed.set()
            try:
                self._set(f"left/{self.rank}", why.encode())
            except Exception as error:  # at the end of a process the store may be gone already
                _log.debug("leaving: %s", error)

    def lost(self) -> str:
        """Return why another rank has left, or that the store is gone; empty if neither."""
        try:
            for rank in range(self.size):
                key = f"{self._prefix}/left/{rank}"
                if rank != self.rank and self._store.check([key]):
                    return f"rank {rank} is gone: {bytes(self._store.get(key)).decode(errors='replace')}"
        except RuntimeError as error:
            return f"the store of the ranks cannot be reached ({str(error).splitlines()[0][:200]})"
        return ""

    def _open(self) -> str:
        prefix = f"{self._base}/{uuid.uuid4().hex}"
        try:
            self._store.set(f"{self._base}/current", prefix)
        except RuntimeError as error:
            self._store_lost(error)
        return prefix

    def _join(self) -> str:
        """Join the newest session of rank 0 that rank 0 has not left."""
        deadline = time.monotonic() + self._late_after
        current = f"{self._base}/current"
        while time.monotonic() < deadline:
            try:
                if self._store.check([current]):
                    prefix = bytes(self._store.get(current)).decode()
                    if prefix not in self._joined and not self._store.check([f"{prefix}/left/0"]):
                        return prefix
            except RuntimeError as error:
                self._store_lost(error)
            time.sleep(min(0.02, BEAT_EVERY))
        raise RankError(f"rank 0 has not begun within {self._late_after:.0f} s: it hangs, or never called this")

    def _wait(self, keys: list[str]) -> None:
        start = time.monotonic()
        missing = dict.fromkeys(range(self.size), (b"", start))  # last heartbeat, and when it came
        warned, pause = False, 0.001
        while True:
            missing = {rank: seen for rank, seen in missing.items() if not self._store.check([keys[rank]])}
            if not missing:
                return
            now = time.monotonic()
            for rank, (beat, since) in missing.items():
                missing[rank] = self._heartbeat_of(rank, keys[rank], (beat, since), now)
            listed = ", ".join(map(str, missing))
            if now - start > self._late_after:
                raise RankError(
                    f"rank {listed} has not come within {self._late_after:.0f} s: it hangs elsewhere, has ended before "
                    "it began, or never calls this"
                )
            if now - start > WARN_AFTER and not warned:
                warned = True
                _log.warning("waiting for rank %s, which works on", listed)
            time.sleep(pause)
            pause = min(2 * pause, 0.1)

    def _heartbeat_of(self, rank: int, key: str, seen: tuple[bytes, float], now: float) -> tuple[bytes, float]:
        """Return a missing rank's last heartbeat and when it came; raise if the rank is dead."""
        left, alive = f"{self._prefix}/left/{rank}", f"{self._prefix}/beat/{rank}"
        if self._store.check([left]) and not self._store.check([key]):  # it may have come and gone just now
            raise RankError(f"rank {rank} is gone: {bytes(self._store.get(left)).decode(errors='replace')}")
        new = bytes(self._store.get(alive)) if self._store.check([alive]) else b""
        beat, since = seen
        if new != beat:
            return new, now
        if beat and now - since > DEAD_AFTER:
            raise RankError(
                f"rank {rank} has shown no sign of life for {DEAD_AFTER:.0f} s: its process has ended, or hangs"
            )
        return seen

    def _beat(self) -> None:
        count = 0
        while not self._closed.is_set():
            try:
                self._set(f"beat/{self.rank}", str(count).encode())
            except Exception as error:  # the waiting rank will report it
                _log.debug("no heartbeat could be written: %s", error)
                return
            count += 1
            self._closed.wait(BEAT_EVERY)

    def _set(self, key: str, value: bytes) -> None:
        self._store.set(f"{self._prefix}/{key}", value)

    def _store_lost(self, error: Exception) -> NoReturn:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RankError(
            f"the store of the ranks cannot be reached: rank 0, whose process holds it, or the launcher has ended "
            f"({first[:200]})"
        ) from error


def _store() -> Any:
    """Return the default store of ``torch.distributed``."""
    store = torch.distributed.distributed_c10d._get_default_store()
    if store is None:
        raise RankError("torch.distributed has no store here (MPI): pass agree=False, or start with another backend")
    return store


def _check_versions(session: _Session) -> None:
    """Raise RankError if a rank runs another version, whose values could mean something else."""
    from fp4dispatch import __version__

    mine = {"protocol": PROTOCOL, "version": __version__}
    everyone = [raw.decode(errors="replace") for raw in session.share(json.dumps(mine).encode())]
    if len(set(everyone)) > 1:
        listed = "\n".join(f"  rank {rank}: {text[:200]}" for rank, text in enumerate(everyone))
        text = f"the ranks run different versions of fp4dispatch, expected one: install the same everywhere\n{listed}"
        session.leave(text)
        raise RankError(text)
