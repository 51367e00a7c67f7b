"""Loads a finished library: the bytes that were judged and hashed are the bytes that run.

A path can lead elsewhere a moment after it was checked. So a library is opened once, judged and hashed by its
descriptor, and loaded through ``/proc/self/fd``. The descriptor stays open for as long as the process lives: dlopen
knows what it has loaded by name, so a number that was used again would give the library before
(https://man7.org/linux/man-pages/man3/dlopen.3.html). A shared lock on it tells ``fp4dispatch cache prune`` that the
library is in use.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from typing import Any

from fp4dispatch.errors import CacheError, CompileError
from fp4dispatch.jit.store import private
from fp4dispatch.jit.store.entries import Entry, open_library
from fp4dispatch.machine.locks import ForkSafeLock

_lock = ForkSafeLock()
_modules: dict[tuple[str, str], Any] = {}


def module(entry: Entry) -> Any:
    """Return the exported functions of an entry's library, which is loaded once a process. Never during capture.

    Raises
    ------
    CacheError
        Where the library is not the one published, could have been written by someone else, or lies on a file system
        that runs no code. OSError where it cannot be read.
    CompileError
        Where the dynamic loader refuses it.
    """
    key = (str(entry.library), entry.library_sha256)
    with _lock:
        if key not in _modules:
            _modules[key] = _load(entry)
        return _modules[key]


def _load(entry: Entry) -> Any:
    import tvm_ffi  # before the library is judged: importing runs code of others

    if not entry.installed:
        private.check_above(entry.library)
    descriptor = open_library(entry)
    try:
        if os.fstatvfs(descriptor).f_flag & os.ST_NOEXEC:
            raise CacheError(
                f"{entry.library} is on a file system that runs no code (noexec)\n  fix: {private.ELSEWHERE[3:]}"
            )
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        with suppress(OSError):  # the date of the last use, for pruning; none on a read-only file system
            os.utime(descriptor)
        # tvm_ffi.load_module() tells the format by the suffix of a path, and this path has none.
        try:
            loaded = tvm_ffi.get_global_func("ffi.Module.load_from_file.so")(f"/proc/self/fd/{descriptor}", "so")
        except RuntimeError as error:
            raise CompileError(f"{entry.library} (loaded by its descriptor) cannot be loaded: {error}") from error
        tvm_ffi.get_global_func("ffi.ModuleGlobalsAdd")(loaded)  # as load_module() does: never unloaded
    except BaseException:
        os.close(descriptor)
        raise
    return loaded
