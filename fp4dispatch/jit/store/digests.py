"""Hashes of files: what a build read is known by its content, never by its date.

A date can be set to anything. The time of the last change of an inode (``st_ctime``) cannot be set, so it tells whether
a file that was hashed must be hashed again: any write, and any file put in its place, has another device, inode, size
or ``st_ctime``.
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

Identity = tuple[int, int, int, int]
"""Device, inode, nanoseconds of the last change, size."""

_BLOCK = 1 << 20
_SETTLED = 2.0
"""Seconds after a change within which a second one may bear the same time; file systems count in ticks, FAT in 2 s."""


def digest(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return digest_of(descriptor)
    finally:
        os.close(descriptor)


def digest_of(descriptor: int) -> str:
    """Return the SHA-256 of all that an open file holds, whatever its position."""
    state, offset = hashlib.sha256(), 0
    while block := os.pread(descriptor, _BLOCK, offset):
        state.update(block)
        offset += len(block)
    return state.hexdigest()


def digest_once(path: Path) -> str:
    """Return the SHA-256 of a file that many entries share, hashing it again only when it has changed."""
    found = identity(path)
    if abs(time.time() - found[2] / 1e9) < _SETTLED:
        return digest(path)
    return _digest(str(path), found)


@functools.lru_cache(maxsize=8192)
def _digest(path: str, _identity: Identity) -> str:
    return digest(Path(path))


def identity(path: Path) -> Identity:
    """Return what changes whenever the file at a path does."""
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_ctime_ns, status.st_size


def snapshot(roots: Mapping[str, Path]) -> dict[tuple[str, str], Identity]:
    """Return the identity of every file below some folders, by the root's name and the path below it.

    A link to a folder is followed once. Of what cannot be listed there is nothing.
    """
    found: dict[tuple[str, str], Identity] = {}
    for root, top in roots.items():
        seen: set[str] = set()
        todo = [""]
        while todo:
            below = todo.pop()
            folder = os.path.realpath(top / below)
            if folder in seen:
                continue
            seen.add(folder)
            with suppress(OSError), os.scandir(folder) as rows:
                for row in rows:
                    path = f"{below}/{row.name}" if below else row.name
                    if row.is_dir():
                        todo.append(path)
                    elif row.is_file():
                        status = row.stat()
                        found[root, path] = (status.st_dev, status.st_ino, status.st_ctime_ns, status.st_size)
    return found
