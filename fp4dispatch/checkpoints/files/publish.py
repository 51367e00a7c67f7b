"""Write a directory atomically: it appears complete or not at all. No data of other processes is lost."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fp4dispatch.checkpoints.files.paths import CONFIG_FILE
from fp4dispatch.checkpoints.files.rename import beside, exchange, rename_new
from fp4dispatch.errors import CheckpointError
from fp4dispatch.machine import log as _log

_ATTEMPTS = 8
"""Number of tries if other processes create and remove the target."""


@contextmanager
def atomic_directory(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a new directory beside ``out`` which takes the name ``out`` when the block ends without an error.

    The files in it are flushed to the disk first. On an error it is removed and ``out`` is as it was; a killed process
    leaves ``.<name>.tmp-*`` beside ``out``, which nothing reads. Without ``overwrite``, what has appeared at ``out`` in
    the meantime stays, and this is an error. With it, old and new exchange their places in one step, and then the old
    one is removed, so that there is a whole checkpoint at ``out`` at every moment. Two that write to one ``out`` do not
    disturb each other: without ``overwrite`` the first wins, with it the last.

    A file system without ``renameat2`` (NFS) gives less, and loses nothing either: a kill in the middle of the exchange
    leaves the old directory whole as ``<name>.old-*``, and a kill before a new name is taken may leave it as an empty
    directory, see :mod:`fp4dispatch.checkpoints.files.rename`. A directory of a container's image cannot be renamed:
    it is removed first, and a kill before the new one has its name leaves that whole as ``<name>.new-*``.

    Raises
    ------
    CheckpointError
        ``out`` exists (without ``overwrite``), is not a checkpoint directory, or cannot be written.
    """
    out = Path(os.path.abspath(out))  # noqa: PTH100 - resolve() would follow a link that is to be replaced
    _check_target(out, overwrite)
    temporary = beside(out.with_name(f".{out.name}"), f"tmp-{os.getpid()}")
    own = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        own = _identity(temporary)
        yield temporary
        for file in [*temporary.rglob("*"), temporary]:
            _fsync(file)
        _publish(temporary, out, overwrite)
    except OSError as error:
        raise CheckpointError(f"{out}: cannot be written: {error}: nothing was changed there") from error
    finally:
        if own is not None and _identity(temporary) == own:
            shutil.rmtree(temporary, ignore_errors=True)
    with suppress(OSError):
        _fsync(out.parent)  # it is published already


def _check_target(out: Path, overwrite: bool) -> None:
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise CheckpointError(f"{out}: already exists: choose another directory, or pass overwrite (--overwrite)")
    if os.path.ismount(out):
        raise CheckpointError(f"{out}: is a mount point, which cannot be replaced: choose a directory below it")
    if not _replaceable(out) and os.path.lexists(out):
        raise CheckpointError(
            f"{out}: is not a checkpoint directory (no *.safetensors in it, or a link), expected one to overwrite: "
            "refused, because overwriting removes everything in it; remove it yourself or choose another directory"
        )


def _replaceable(out: Path) -> bool:
    """Whether overwriting may remove this: an empty directory, or one with safetensors files in it.

    Another process may exchange it while it is listed, and remove what lay there. Then the new one is listed.
    """
    for _ in range(_ATTEMPTS):
        before = _identity(out)
        if _looks_replaceable(out):
            return True
        if _identity(out) == before:
            break
    return False


def _looks_replaceable(out: Path) -> bool:
    if out.is_symlink() or not out.is_dir():
        return False
    try:
        names = os.listdir(out)  # noqa: PTH208 - one look: two could see two directories
    except FileNotFoundError:
        return False
    return not names or any(name.endswith(".safetensors") for name in names)


def _publish(temporary: Path, out: Path, overwrite: bool) -> None:
    """Rename the finished directory to ``out``. Check ``out`` again: it may have appeared meanwhile."""
    for _ in range(_ATTEMPTS):
        _check_target(out, overwrite)
        try:
            rename_new(temporary, out)
            return
        except FileExistsError:
            if not overwrite:
                continue  # and the check says so
        try:
            old = exchange(temporary, out)
        except FileNotFoundError:
            continue  # it has gone since
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            _replace_unmovable(temporary, out)
            return
        if _replaceable(old):
            shutil.rmtree(old, ignore_errors=True)
            if old.exists():
                _log.warning("%s is written; what it replaces cannot be removed and lies in %s: remove it", out, old)
            return
        _put_back(old, out, temporary)
    raise CheckpointError(f"{out}: appears and disappears while it is to be written: nothing was changed there")


def _replace_unmovable(temporary: Path, out: Path) -> None:
    """Remove a checkpoint that cannot be renamed, and give its name to the finished directory.

    As overlayfs has it for directories of a container's image
    (https://docs.kernel.org/filesystems/overlayfs.html#renaming-directories). The finished one gets a name that says
    what it is first, which also shows that it can be renamed.
    """
    new = beside(out, "new")
    rename_new(temporary, new)
    try:
        _remove_weights_last(out)
        rename_new(new, out)
    except OSError as error:
        raise CheckpointError(
            f"{out}: cannot be replaced: {error}: the new checkpoint lies whole in {new}: remove what is left of the "
            "old one and rename it"
        ) from error


def _remove_weights_last(out: Path) -> None:
    """Remove a checkpoint; what a kill leaves has no configuration to be loaded with, and may be overwritten again."""
    with suppress(FileNotFoundError):  # another saver may remove it too
        files = sorted(out.iterdir(), key=lambda path: (path.name.endswith(".safetensors"), path.name != CONFIG_FILE))
        for path in files:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        out.rmdir()


def _put_back(other: Path, out: Path, temporary: Path) -> None:
    """Put back a directory that appeared at ``out`` between check and exchange, and must not be removed."""
    try:
        ours = exchange(other, out)
        if ours != temporary:
            rename_new(ours, temporary)
    except OSError as error:
        raise CheckpointError(
            f"{out}: what appeared there while we were writing is not a checkpoint, and lies in {other} now, because "
            f"it cannot be put back: {error}"
        ) from error


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
