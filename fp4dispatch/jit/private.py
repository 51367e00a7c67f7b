"""Folders that only their owner can write: loading a library runs its code, so nobody else may place one.

An item passes when it is no symbolic link, belongs to this user or to root (who can do anything anyway, and makes
container images) and can be written by nobody else. Everything is created with its final mode, never opened up later.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fp4dispatch.errors import CacheError

_ELSEWHERE = "or set FP4DISPATCH_CACHE_DIR to a folder of your own"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM)


def check(path: Path) -> None:
    """Refuse a file or folder that another user owns or can write.

    Raises
    ------
    CacheError
        With the command that makes it private. FileNotFoundError where it does not exist.
    """
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise CacheError(
            f"{path} is a symbolic link; kernels are not loaded through one\n  fix: remove it, {_ELSEWHERE}"
        )
    if status.st_uid not in (os.geteuid(), 0):
        raise CacheError(
            f"{path} belongs to user {status.st_uid}, not to you (user {os.geteuid()}): code from it is not run\n"
            f"  fix: remove it, {_ELSEWHERE}"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CacheError(
            f"{path} can be written by other users (mode {stat.S_IMODE(status.st_mode):04o}): code from it is not run\n"
            f"  fix: clear it and run chmod go-w {path}, {_ELSEWHERE}"
        )


def check_parent(path: Path) -> None:
    """Refuse a folder whose parent lets anybody replace it (world-writable without the sticky bit)."""
    mode = path.parent.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise CacheError(
            f"{path.parent} can be written by everybody, who could replace {path}\n  fix: chmod o-w it, {_ELSEWHERE}"
        )


def make_folder(path: Path, mode: int) -> None:
    """Create a folder and its missing parents with ``mode``, whatever the umask; check it where it exists already."""
    try:
        with explained(path):
            check(path)
    except FileNotFoundError:
        pass
    else:
        return
    if not path.parent.exists():
        make_folder(path.parent, mode)
    try:
        with explained(path):
            try:
                path.mkdir(mode=mode)
            except FileExistsError:  # another process was first
                check(path)
            else:
                path.chmod(mode)
    except OSError as error:  # whatever a file system answers: /proc says that the folder is not there
        raise CacheError(
            f"the kernel cache cannot be at {path} ({error.strerror or error})\n"
            "  fix: name another folder: FP4DISPATCH_CACHE_DIR, or --out of fp4dispatch build"
        ) from error


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn errors of a full, read-only or forbidden file system into a CacheError with the fix."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise full(path) from error
        if error.errno in _REFUSED:
            raise CacheError(
                f"the kernel cache at {path} cannot be written ({error.strerror})\n"
                f"  fix: make it writable, {_ELSEWHERE}; kernels that are finished still load"
            ) from error
        if error.errno in (errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP):
            raise CacheError(
                f"the kernel cache cannot be at {path} ({error.strerror})\n  fix: {_ELSEWHERE[3:]}"
            ) from error
        raise


def full(path: Path) -> CacheError:
    """Return the error for a file system without room."""
    return CacheError(
        f"no space is left for the kernel cache at {path}\n"
        f"  fix: free some space (`fp4dispatch cache clear` removes all compiled kernels), {_ELSEWHERE}"
    )


def write_synced(path: Path, data: bytes, mode: int) -> None:
    """Write a new file and force it to disk."""
    with explained(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Force a file or the listing of a folder to disk."""
    with explained(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
