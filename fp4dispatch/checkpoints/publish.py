"""Write a directory so that it appears whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fp4dispatch.errors import CheckpointError


@contextmanager
def atomic_directory(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a new directory beside ``out`` which is renamed to ``out`` when the block ends without an error.

    The files in it are flushed to the disk first. On an error it is removed and ``out`` is as it was; a killed process
    leaves ``.<name>.tmp-*`` beside ``out``, which nothing reads. With ``overwrite`` the old directory is moved aside,
    the new one takes its place, and then the old one is removed.

    Raises
    ------
    CheckpointError
        ``out`` exists (without ``overwrite``), is not a checkpoint directory, or cannot be written.
    """
    out = Path(os.path.abspath(out))  # noqa: PTH100 - resolve() would follow a link that is to be replaced
    _check_target(out, overwrite)
    temporary = out.parent / f".{out.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        yield temporary
        for file in [*temporary.rglob("*"), temporary]:
            _fsync(file)
        _move(temporary, out)
        _fsync(out.parent)
    except OSError as error:
        raise CheckpointError(f"{out}: cannot be written: {error}: nothing was changed there") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_target(out: Path, overwrite: bool) -> None:
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise CheckpointError(f"{out}: already exists: choose another directory, or pass overwrite (--overwrite)")
    if out.is_symlink() or not out.is_dir() or (any(out.iterdir()) and not any(out.glob("*.safetensors"))):
        raise CheckpointError(
            f"{out}: is not a checkpoint directory (no *.safetensors in it, or a link), expected one to overwrite: "
            "refused, because overwriting removes everything in it; remove it yourself or choose another directory"
        )


def _move(temporary: Path, out: Path) -> None:
    if not out.exists():
        temporary.rename(out)
        return
    aside = out.parent / f"{temporary.name}.old"
    out.rename(aside)
    try:
        temporary.rename(out)
    except BaseException:
        aside.rename(out)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
