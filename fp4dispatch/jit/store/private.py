"""Files and folders that only their owner can write. Loading a library runs its code, so no other user may place one.

The rules are those of ``StrictModes`` in sshd (https://man.openbsd.org/sshd_config#StrictModes). A file or folder must
belong to this user or to root (who makes container images), and no other user may write it. The same holds for every
folder above it, up to ``/``. There are two exceptions. A folder above may be writable if it is sticky (``/tmp``):
there, nobody can rename files of others. A symbolic link above is followed if it belongs to this user or root.

Files are opened once and checked by their descriptor, so the checked file is the one that is read. Everything is
created with its final mode.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
from pathlib import Path

from fp4dispatch.errors import CacheError

ELSEWHERE = "or set FP4DISPATCH_CACHE_DIR to a folder of your own"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM)
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MOST_LINKS = 40  # as the kernel
_LARGEST = 64 << 20


def check(path: Path) -> None:
    """Refuse a file or folder that is a link, or that another user owns or can write.

    Raises
    ------
    CacheError
        With the command that makes it private. FileNotFoundError if it does not exist.
    """
    _judge(path, path.lstat(), (os.geteuid(), 0))


def check_above(path: Path) -> None:
    """Refuse a path that another user could replace. Checks every folder above it, through symbolic links.

    Missing folders are not checked: they can only be created below a checked one.

    Raises
    ------
    CacheError
        With the folder that others can write and the command that fixes it. OSError if a folder cannot be read.
    """
    owners = _owners_above()
    done, todo, links = Path("/"), list(path.parent.parts[:0:-1]), 0
    _judge_above(done, done.lstat(), owners)
    while todo:
        name = todo.pop()
        step = done.parent if name == ".." else done / name
        try:
            status = step.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISLNK(status.st_mode):
            _judge_above(step, status, owners)
            done = step
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        if status.st_uid not in owners:
            raise _of_another(step, status.st_uid, "who could replace what is below", ELSEWHERE[3:])
        target = step.readlink()
        done = Path("/") if target.is_absolute() else done
        todo += [part for part in reversed(target.parts) if part != "/"]


def check_place(folder: Path) -> None:
    """Refuse a folder of ours that another user could write or replace. Raises as :func:`check`."""
    check_above(folder)
    check(folder)
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise CacheError(f"{folder} is not a folder\n  fix: remove it, {ELSEWHERE}")


def opened(path: Path, *, trusted: bool = False) -> int:
    """Open a file for reading and check it by its descriptor: regular, ours, not writable by other users.

    Parameters
    ----------
    path
        The file. :func:`check_above` checks who may replace it.
    trusted
        Skip the check of the owner: the file is part of this installation.

    Returns
    -------
    int
        A descriptor; the caller closes it. Opening never blocks, not even on a FIFO.

    Raises
    ------
    CacheError
        As :func:`check`, and if it is not a regular file. OSError if it cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise _link(path) from error
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CacheError(f"{path} is not a regular file\n  fix: remove it, {ELSEWHERE}")
        if not trusted:
            _judge(path, status, (os.geteuid(), 0))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read(path: Path, *, trusted: bool = False, largest: int = _LARGEST) -> bytes:
    """Return the content of a file that :func:`opened` accepts; CacheError for one of more than ``largest`` bytes."""
    with os.fdopen(opened(path, trusted=trusted), "rb") as file:
        data = file.read(largest + 1)
    if len(data) > largest:
        raise CacheError(f"{path} is larger than {largest} bytes, so it is none of ours\n  fix: remove it, {ELSEWHERE}")
    return data


def _judge(path: Path, status: os.stat_result, owners: tuple[int, ...]) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise _link(path)
    if status.st_uid not in owners:
        raise _of_another(path, status.st_uid, "code from it is not run", f"remove it, {ELSEWHERE}")
    if status.st_mode & _OTHERS_WRITE:
        raise CacheError(
            f"{path} can be written by other users (mode {stat.S_IMODE(status.st_mode):04o}): code from it is not run\n"
            f"  fix: clear it and run chmod go-w {path}, {ELSEWHERE}"
        )


def _judge_above(folder: Path, status: os.stat_result, owners: tuple[int, ...]) -> None:
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    if status.st_uid not in owners:
        raise _of_another(folder, status.st_uid, "who could replace what is below", ELSEWHERE[3:])
    if status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX:
        raise CacheError(
            f"{folder} can be written by other users (mode {stat.S_IMODE(status.st_mode):04o}), "
            f"who could replace what is below\n  fix: chmod go-w {folder}, {ELSEWHERE}"
        )


def _of_another(path: Path, owner: int, consequence: str, fix: str) -> CacheError:
    return CacheError(f"{path} belongs to user {owner}, not to you (user {os.geteuid()}): {consequence}\n  fix: {fix}")


def _link(path: Path) -> CacheError:
    return CacheError(f"{path} is a symbolic link; kernels are not loaded through one\n  fix: remove it, {ELSEWHERE}")


def _owners_above() -> tuple[int, ...]:
    return (os.geteuid(), 0, *_unmapped())


@functools.cache
def _unmapped() -> tuple[int, ...]:
    """The overflow user, which a user namespace shows as owner of files of users outside, such as the host's root.

    Unprivileged containers (Apptainer, rootless podman) see the host's ``/home`` that way. It may own folders above the
    cache, never files in it (https://man7.org/linux/man-pages/man7/user_namespaces.7.html).
    """
    try:
        if Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]:
            return ()
        return (int(Path("/proc/sys/kernel/overflowuid").read_text()),)
    except (OSError, ValueError):
        return ()


def make_folder(path: Path, mode: int) -> None:
    """Create a folder and its missing parents with ``mode``, whatever the umask; check it if it exists.

    Raises
    ------
    CacheError
        If it cannot be made, or another user could write or replace it.
    """
    with explained(path):
        try:
            check_place(path)
        except FileNotFoundError:
            pass
        else:
            return
        if not path.parent.exists():
            make_folder(path.parent, mode)
        try:
            path.mkdir(mode=mode)
        except FileExistsError:  # another process was first
            check(path)
        else:
            path.chmod(mode)


class explained:  # noqa: N801 - used like a function
    """Convert OSError in the body into a CacheError with the fix.

    No generator: since Python 3.12 an exception that a generator's body converts keeps the frames of all callers, and
    so the tensors in them, until the garbage collector runs.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, OSError):
            return
        if error.errno in _FULL:
            raise full(self._path) from error
        if error.errno in _REFUSED:
            raise CacheError(
                f"the kernel cache at {self._path} cannot be written or read ({error.strerror})\n"
                f"  fix: make it yours, {ELSEWHERE}; kernels that are finished and can be read still load"
            ) from error
        raise CacheError(
            f"the kernel cache cannot be at {self._path} ({error.strerror or error})\n  fix: {ELSEWHERE[3:]}"
        ) from error


def full(path: Path) -> CacheError:
    """Return the error for a full file system."""
    return CacheError(
        f"no space is left for the kernel cache at {path}\n"
        f"  fix: free some space (`fp4dispatch cache prune --max-size 1GB`), {ELSEWHERE}"
    )


def write_synced(path: Path, data: bytes, mode: int) -> None:
    """Write a new file and fsync it."""
    with explained(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Fsync a file or folder."""
    with explained(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
