"""Loads a finished library. The bytes that are checked and hashed are the bytes that run.

A path may point to another file a moment after it was checked. So a library is opened once, checked and hashed by its
descriptor, and loaded through ``/proc/self/fd``. The descriptor stays open until the process ends: dlopen identifies
libraries by name, so a reused descriptor number would return the previous library
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
    """Return the exported functions of an entry's library, loaded once per process. Not safe during capture.

    Raises
    ------
    CacheError
        If the hash differs from the published one, another user could have written the library, or its file system is
        mounted noexec. OSError if it cannot be read.
    CompileError
        If the dynamic loader refuses it.
    """
    key = (str(entry.library), entry.library_sha256)
    with _lock:
        if key not in _modules:
            _modules[key] = _load(entry)
        return _modules[key]


def _load(entry: Entry) -> Any:
    import tvm_ffi  # before the check: importing runs other code

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
        with suppress(OSError):  # time of the last use, for pruning; fails on a read-only file system
            os.utime(descriptor)
        # tvm_ffi.load_module() takes the format from the suffix of the path, which this path lacks.
        try:
            loaded = tvm_ffi.get_global_func("ffi.Module.load_from_file.so")(f"/proc/self/fd/{descriptor}", "so")
        except RuntimeError as error:
            raise CompileError(f"{entry.library} (loaded by its descriptor) cannot be loaded: {error}") from error
        tvm_ffi.get_global_func("ffi.ModuleGlobalsAdd")(loaded)  # as load_module() does: never unloaded
    except BaseException:
        os.close(descriptor)
        raise
    return loaded
