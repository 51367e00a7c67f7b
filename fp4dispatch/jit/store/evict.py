"""Removes entries of a cache: all, or the old ones, or until it is small enough. Never files of the user.

A user may have chosen the folder and keep other files in it. So nothing is removed without the marker that the cache
writes (``CACHEDIR.TAG``), and only files with the names that the cache uses.

A loaded library is locked (:mod:`fp4dispatch.jit.store.loading`) and is not pruned. If locks do not work across
machines it may be unlinked; the process that has loaded it keeps it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fp4dispatch.errors import CacheError
from fp4dispatch.jit.store import private
from fp4dispatch.jit.store.cache import BUILDING, KERNELS, LOCKS, LOGS, MARKER, SIGNATURE, Cache, sweep, taken_away
from fp4dispatch.jit.store.entries import LIBRARY, LOG, MANIFEST, PROOF

_KERNEL = r"[a-z0-9][a-z0-9_]*"
_SLOT = _KERNEL + r"-\d{2,3}[af]?"
_KEY = re.compile(r"[0-9a-f]{32}")
_LOG_NAME = re.compile(rf"{_KERNEL}-{_SLOT}\.log")
_LOCK_NAME = re.compile(rf"{_KERNEL}-{_SLOT}\.(lock|pid)")
_OURS = re.compile("|".join(map(re.escape, (LIBRARY, MANIFEST, PROOF, LOG))) + r"|\.proof-[0-9a-f]{16}")


@dataclass(frozen=True)
class Kept:
    """One entry on disk: size in bytes, last use (seconds since the epoch), and whether it was made ahead of time."""

    folder: Path
    size: int
    used: float
    pinned: bool


def clear(cache: Cache) -> int:
    """Remove every entry, log, lock and unfinished build; return the bytes freed.

    Raises
    ------
    CacheError
        If the folder has no marker of ours, or a file cannot be removed.
    """
    if not _marked(cache):
        return 0
    with private.explained(cache.root):
        freed = sum(_drop(folder) for folder in list(_entries(cache.root)))
        freed += sweep(cache.root / BUILDING) if (cache.root / BUILDING).is_dir() else 0
        freed += sum(_unlink(path) for path in _files(cache.root / LOGS, _LOG_NAME) if _is_log(path))
        freed += sum(_unlink(path) for path in _files(cache.root / LOCKS, _LOCK_NAME))
        slots = [*(cache.root / KERNELS).glob("*/*"), *(cache.root / KERNELS).glob("*")]
        for folder in (*slots, *(cache.root / name for name in (BUILDING, LOGS, LOCKS, KERNELS))):
            with suppress(OSError):  # it holds something that is not ours, or is no folder
                folder.rmdir()
    return freed


def prune(cache: Cache, *, max_age: float | None = None, max_size: int | None = None) -> tuple[int, int]:
    """Remove entries that are older than ``max_age``, then the least recently used until the rest fits ``max_size``.

    Entries that a process has loaded stay, and so do entries made ahead of time (``fp4dispatch build --out``).

    Parameters
    ----------
    cache
        The cache.
    max_age
        Seconds since the last use.
    max_size
        Total bytes of all entries.

    Returns
    -------
    tuple of int
        Number of removed entries, and their bytes.

    Raises
    ------
    CacheError
        As :func:`clear`.
    """
    if not _marked(cache):
        return 0, 0
    removed = freed = 0
    with private.explained(cache.root):
        if (cache.root / BUILDING).is_dir():
            sweep(cache.root / BUILDING)
        found = sorted((kept for kept in map(_kept, _entries(cache.root)) if kept), key=lambda kept: kept.used)
        total, now = sum(kept.size for kept in found), time.time()
        for kept in found:
            old = max_age is not None and now - kept.used > max_age
            much = max_size is not None and total > max_size
            if (old or much) and not kept.pinned and _evict(cache, kept.folder):
                removed, freed, total = removed + 1, freed + kept.size, total - kept.size
    return removed, freed


def _marked(cache: Cache) -> bool:
    """Whether the folder holds a cache of ours; CacheError if it looks like one but has no marker."""
    marker = cache.root / MARKER
    with private.explained(cache.root):
        if not any((cache.root / name).exists() for name in (KERNELS, BUILDING, LOCKS, LOGS)):
            return False
        private.check_place(cache.root)
        with suppress(FileNotFoundError):
            if private.read(marker) == SIGNATURE:
                return True
    raise CacheError(
        f"{cache.root} holds no {MARKER} of fp4dispatch, so nothing in it is removed: it may be somebody else's\n"
        "  fix: check FP4DISPATCH_CACHE_DIR, and remove by hand what is yours"
    )


def _entries(root: Path) -> Iterator[Path]:
    for kernel in _folders(root / KERNELS, re.compile(_KERNEL)):
        for slot in _folders(kernel, re.compile(_SLOT)):
            yield from _folders(slot, _KEY)


def _folders(parent: Path, name: re.Pattern[str]) -> list[Path]:
    return [path for path in _listed(parent, name) if path.is_dir() and not path.is_symlink()]


def _files(parent: Path, name: re.Pattern[str]) -> list[Path]:
    return [path for path in _listed(parent, name) if not path.is_dir()]


def _listed(parent: Path, name: re.Pattern[str]) -> list[Path]:
    if parent.is_symlink() or not parent.is_dir():
        return []
    return [path for path in parent.iterdir() if name.fullmatch(path.name)]


def _is_log(path: Path) -> bool:
    """Whether the first line names the same kernel as the file name."""
    try:
        first = private.read(path).partition(b"\n")[0].decode(errors="replace")
    except (CacheError, OSError):
        return False
    return first.startswith("# ") and first[2:].replace("/", "-") == path.stem


def _kept(folder: Path) -> Kept | None:
    try:
        files = [path.lstat() for path in folder.iterdir()]
        used = max((status.st_mtime for status in files), default=0.0)
        return Kept(folder, sum(status.st_size for status in files), used, _pinned(folder))
    except FileNotFoundError:  # removed meanwhile
        return None


def _pinned(folder: Path) -> bool:
    try:
        return b'"pinned": true' in private.read(folder / MANIFEST)
    except (CacheError, OSError):
        return False


def _evict(cache: Cache, folder: Path) -> bool:
    """Remove an entry unless a process has it loaded. Atomic: the entry is complete or gone."""
    try:
        descriptor = os.open(folder / LIBRARY, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # an entry without a library is useless
        descriptor = None
    try:
        if descriptor is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
    finally:
        if descriptor is not None:
            os.close(descriptor)
    away = cache.made(BUILDING) / f"old-{secrets.token_hex(8)}"
    with suppress(FileNotFoundError):  # another process removed it
        _drop(taken_away(folder, away))
    return True


def _drop(folder: Path) -> int:
    """Remove the files of an entry that have our names, and the folder if it is then empty."""
    freed = sum(_unlink(path) for path in folder.iterdir() if _OURS.fullmatch(path.name) and not path.is_dir())
    with suppress(OSError):
        folder.rmdir()
    return freed


def _unlink(path: Path) -> int:
    size = path.lstat().st_size
    path.unlink(missing_ok=True)
    return size
