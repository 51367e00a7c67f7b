"""Rename a directory without removing anything at the target name.

``rename(2)`` replaces an empty directory in silence, and two renames in a row leave nothing at the name in between.
Linux has both done right in one system call (https://man7.org/linux/man-pages/man2/renameat2.2.html). Not every file
system knows it (NFS and some FUSE file systems do not); what is done there instead is said at each function.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

_AT_FDCWD = -100
_NOREPLACE, _EXCHANGE = 1, 2
_LONGEST = 255
"""Bytes of a name on Linux's file systems (NAME_MAX)."""
_UNKNOWN = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)
"""What old kernels, file systems without the flags, and sandboxes that filter system calls answer."""


def beside(path: Path, kind: str) -> Path:
    """Return a new name beside a path: its own and ``.<kind>-*``; its own is cut where it would be too long."""
    tail = f".{kind}-{secrets.token_hex(4)}"
    return path.with_name(os.fsencode(path.name)[: _LONGEST - len(tail)].decode(errors="ignore") + tail)


def rename_new(source: Path, target: Path) -> None:
    """Rename a directory to a name that must not exist.

    Where the file system has no such call, an empty directory claims the name first, and the rename replaces it: a kill
    in between leaves that empty directory. In neither case is anything of somebody else's replaced or removed.

    Raises
    ------
    FileExistsError
        Something has that name; both are as they were.
    OSError
        The rename failed; both are as they were.
    """
    if _renameat2(source, target, _NOREPLACE):
        return
    target.mkdir()
    try:
        source.rename(target)
    except OSError as error:
        with suppress(OSError):
            target.rmdir()  # ours, unless somebody has put something into it, and then it stays
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from error
        raise


def exchange(source: Path, target: Path) -> Path:
    """Put a directory in another's place, and return where that one is now.

    Where the file system has no such call, the other is moved aside first, to ``<name>.old-*`` beside it: a kill in
    between leaves nothing at ``target``, and both directories whole beside it.

    Raises
    ------
    OSError
        Nothing has that name, or a rename failed; both are as they were.
    """
    if _renameat2(source, target, _EXCHANGE):
        return source
    aside = beside(target, "old")
    rename_new(target, aside)
    try:
        rename_new(source, target)
    except BaseException:
        rename_new(aside, target)
        raise
    return aside


@cache
def _libc() -> Any:
    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):  # a C library older than the call, or none that can be opened
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    function.restype = ctypes.c_int
    return function


def _renameat2(source: Path, target: Path, flag: int) -> bool:
    """Rename; False where this is not possible here, so that another way has to be found."""
    function = _libc()
    if function is None:
        return False
    sys.audit("os.rename", str(source), str(target), -1, -1)
    if function(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flag) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNKNOWN:
        return False
    raise OSError(code, os.strerror(code), str(source), None, str(target))
