"""Folders that live as long as the process that makes them: for what several tests share, outside of any fixture."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path


def folder(name: str) -> Path:
    """Return a new, empty folder, which is removed when this process ends."""
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=_root(os.getpid())))


@functools.cache
def _root(process: int) -> Path:
    """Return the folder of all folders of a process; a forked child has its own."""
    made = Path(tempfile.mkdtemp(prefix="fp4dispatch-tests-"))
    atexit.register(_remove, made, process)
    return made


def _remove(made: Path, process: int) -> None:
    """Remove it, unless this is a child that was forked."""
    if os.getpid() == process:
        shutil.rmtree(made, ignore_errors=True)
