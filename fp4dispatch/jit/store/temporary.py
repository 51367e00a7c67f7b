"""A private temporary folder that lasts as long as its process, also where that is killed.

A process that ends removes its own folder. One that is killed cannot: the next one that makes such a folder removes
those whose lock is free. The lock is on the folder itself, so that there is none without it. Forked children hold it
too. Other machines may not see it: names have the machine's boot in them, and only folders of this boot are removed.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_held: list[int] = []
"""Descriptors of the folders that this process has locked; they stay open until it ends."""


def make() -> Path:
    """Make a folder, and remove those of processes that were killed; OSError where none can be made."""
    while True:
        made = Path(tempfile.mkdtemp(prefix=_prefix())).resolve()
        with suppress(OSError):  # a file system without locks: nobody takes it for one that was left
            _held.append(_locked(made))
        if made.exists():  # else another process has found it before it was locked
            break
    atexit.register(_remove, made, os.getpid())
    _sweep(made)
    return made


def _prefix() -> str:
    """Return how the names of folders of this boot begin; a folder is nobody else's where the boot is not known."""
    try:
        boot = _BOOT.read_text("ascii").strip()
    except (OSError, ValueError):
        boot = secrets.token_hex(8)
    return f"fp4dispatch-cache-{boot}-"


def _locked(folder: Path, *, wait: bool = True) -> int:
    """Return a descriptor that holds the lock of a folder; OSError where another one does, and ``wait`` is False."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _sweep(own: Path) -> None:
    for folder in own.parent.glob(f"{_prefix()}*"):
        with suppress(OSError):  # it has gone, or is in use
            status = folder.lstat()
            if folder == own or status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode):
                continue
            descriptor = _locked(folder, wait=False)
            try:
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
