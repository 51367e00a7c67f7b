"""Hashes of files. The inputs of a build, and the code that a stored result depends on, are identified by content.

``mtime`` can be set to any value; the change time of an inode (``st_ctime``) cannot. A write to a file, or a new file
in its place, changes device, inode, size or ``st_ctime``. So a hash is reused as long as these four are the same.
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from fp4dispatch.errors import CacheError

Identity = tuple[int, int, int, int]
"""Device, inode, ``st_ctime`` in nanoseconds, size in bytes."""

_BLOCK = 1 << 20
_SETTLED = 2.0
"""Seconds within which two changes may have the same time stamp: file systems have ticks, FAT of 2 s."""


def digest(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return digest_of(descriptor)
    finally:
        os.close(descriptor)


def digest_of(descriptor: int) -> str:
    """Return the SHA-256 of an open file's whole content, whatever its position."""
    state, offset = hashlib.sha256(), 0
    while block := os.pread(descriptor, _BLOCK, offset):
        state.update(block)
        offset += len(block)
    return state.hexdigest()


def sources_sha256(roots: Iterable[Path]) -> str:
    """Return the SHA-256 over files, and over folders with all that is in them: names relative to the root, and bytes.

    ``__pycache__`` does not count. What is stored under such a hash holds only for the code that it was made with.

    Raises
    ------
    CacheError
        If a root is missing, holds no file, or cannot be read: a hash without it would stand for other code.
    """
    state = hashlib.sha256()
    for root in roots:
        try:
            files = [root] if root.is_file() else sorted(path for path in root.rglob("*") if _is_source(path, root))
            if not files:
                raise FileNotFoundError("it is missing, or an empty folder")
            for path in files:
                name = f"{root.name}/{path.relative_to(root).as_posix()}"
                state.update(f"{len(name)} {name}".encode() + hashlib.sha256(path.read_bytes()).digest())
        except OSError as error:
            raise CacheError(
                f"proofs of kernels and verdicts on them are stored under a hash of {root}, which cannot be read: "
                f"{error}. Install the package again"
            ) from error
    return state.hexdigest()


def _is_source(path: Path, root: Path) -> bool:
    """Whether a path is a source file, not a cache file of Python."""
    return path.is_file() and "__pycache__" not in path.relative_to(root).parts


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
    """Return values that change whenever the file at a path changes."""
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_ctime_ns, status.st_size


def snapshot(roots: Mapping[str, Path]) -> dict[tuple[str, str], Identity]:
    """Return the identity of every file below some folders, by the root's name and the path below it.

    A link to a folder is followed once. Folders that cannot be listed are skipped.
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
