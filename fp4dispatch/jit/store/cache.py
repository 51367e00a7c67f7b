"""Compiled kernels on disk: found by content, published atomically.

Layout below the cache folder::

    kernels/<kernel>/<variant>-<target>/<key>/kernel.so    the library
                                              entry.json   what it was made from, with the hash of every file
                                              proof.json   what the disassembler saw (fp4dispatch.jit.prove)
                                              build.log
    building/   unfinished builds, each locked by the process that makes it
    locks/      one per kernel, variant and target; they save work, correctness does not depend on them
    logs/       logs of failed builds
    CACHEDIR.TAG    marks the folder as our cache; nothing is removed from a folder without it

The key is the hash of all inputs: sources, every header that the compiler read, flags, compiler versions and package
version. An entry lists its inputs, so it is found without a toolchain. It is current if the package's own sources and
flags match and, if a toolchain is installed, its compilers and headers match too. A *pinned* entry (made ahead of time)
is meant for other machines: only the package's own sources and flags are compared.

Publishing is one rename of a synced folder. A build that is killed at any moment leaves nothing that can be loaded.

Any fault of the folder is a CacheError; :mod:`fp4dispatch.jit.store.guard` decides how to go on. An entry that is
damaged, or that another user could have written, is skipped with a warning and rebuilt.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import filelock

from fp4dispatch.errors import CacheError
from fp4dispatch.jit.store import guard, private
from fp4dispatch.jit.store.digests import digest
from fp4dispatch.jit.store.entries import (
    LIBRARY,
    MANIFEST,
    PROOF,
    SCHEMA,
    Entry,
    damage,
    first_line,
    read_entry,
    slot,
    stale,
)
from fp4dispatch.machine import log as _log
from fp4dispatch.settings import settings

KERNELS, BUILDING, LOCKS, LOGS = "kernels", "building", "locks", "logs"
MARKER = "CACHEDIR.TAG"
SIGNATURE = b"""Signature: 8a477f597d28d172789f06886806bc55
# Compiled kernels and records of fp4dispatch, made again when they are missing.
# Backups may leave this folder out: https://bford.info/cachedir/
"""
_NOTE_EVERY = 10.0
_LEFT = re.compile(r"(build|old)-[0-9a-f]{16}")
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def default_folder() -> Path:
    """Return ``FP4DISPATCH_CACHE_DIR``, else the user cache folder. Never a shared temporary folder.

    For a user without a home (no ``HOME``, no entry in ``passwd``) it is a private temporary folder of this process.
    """
    import platformdirs

    chosen = settings.cache_dir
    if chosen:
        return Path(chosen)
    try:
        folder = platformdirs.user_cache_path("fp4dispatch", appauthor=False)
    except RuntimeError:  # newer releases of platformdirs; older ones return the tilde
        folder = Path("~")
    if folder.parts[:1] == ("~",):
        guard.warn(
            "going on without a cache: the user has no home folder, so kernels are built for this process only\n"
            f"  fix: {private.ELSEWHERE[3:]}"
        )
        return guard.temporary()
    return folder


class Cache:
    """The entries below one folder.

    Parameters
    ----------
    root
        The folder. Created at the first build, private to this user.
    portable
        Make folders and files readable for all users, for a container image.
    installed
        The folder is part of this package and trusted like its code, whoever owns it.
    """

    def __init__(self, root: Path, *, portable: bool = False, installed: bool = False) -> None:
        self.installed = installed
        self.root = Path(os.path.abspath(root))  # noqa: PTH100  (resolve() would follow a planted link)
        self._folder_mode, self._file_mode = (0o755, 0o644) if portable else (0o700, 0o600)

    def entries(self, below: str = "*/*") -> Iterator[Entry]:
        """Yield the entries whose record is readable and private, newest first. Others are skipped with a warning.

        Raises
        ------
        CacheError
            If another user could have written the cache, or it cannot be read.
        """
        found = []
        for parent in self._slots(below):
            try:
                self._private(parent.parent, parent)
                found += [(_changed(folder), folder) for folder in _folders(parent) if (folder / MANIFEST).exists()]
            except (CacheError, OSError) as error:
                guard.warn(f"{parent} is ignored: {error}")
        for _, folder in sorted(found, reverse=True):
            try:
                self._private(folder)
                yield self._entry(folder)
            except guard.UNREADABLE as error:
                guard.warn(f"damaged cache entry {folder} is ignored and will be rebuilt: {first_line(error)}")

    def _slots(self, below: str) -> list[Path]:
        """Folders of the entries of one kernel, variant and target, or (``*/*``) of all."""
        kernels = self.root / KERNELS
        with private.explained(self.root):
            try:
                if not self.installed:
                    private.check_place(self.root)
                self._private(kernels)
            except FileNotFoundError:
                return []
            if not kernels.exists():
                return []
            if below == "*/*":
                return [folder for kernel in _folders(kernels) for folder in _folders(kernel)]
            return [kernels / below] if (kernels / below).is_dir() else []

    def _private(self, *folders: Path) -> None:
        for folder in () if self.installed else folders:
            private.check(folder)

    def _entry(self, folder: Path) -> Entry:
        return read_entry(folder, installed=self.installed)

    def find(
        self, request: Mapping[str, Any], roots: Mapping[str, Path], compilers: Mapping[str, str] | None
    ) -> Entry | None:
        """Return the newest entry that is current and undamaged.

        Parameters
        ----------
        request
            The build request; must equal that of the entry.
        roots
            Folder of each root name; ``src`` (the package's own sources) is always needed, the header folders and
            ``/`` only with ``compilers``.
        compilers
            Versions of the toolchain that could rebuild the entry; None without a toolchain.
        """
        for entry in self.entries(slot(request)):
            if entry.request != request:
                continue
            if stale(entry, roots, None if entry.pinned else compilers):
                continue
            if fault := damage(entry):
                guard.warn(f"{fault}; it will be rebuilt")
                continue
            return entry
        return None

    def publish(
        self,
        built: Path,
        request: Mapping[str, Any],
        files: Mapping[tuple[str, str], str],
        compilers: Mapping[str, str],
        *,
        pinned: bool,
    ) -> Entry:
        """Make a finished build visible: sync its files, then rename its folder into place.

        If another process published the same content first, its entry is kept if sound, else replaced.
        """
        library = digest(built / LIBRARY)
        listed = [[root, path, sha] for (root, path), sha in sorted(files.items())]
        made_from = {"request": dict(request), "compilers": dict(compilers), "files": listed}
        key = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:32]
        record = {"schema": SCHEMA, **made_from, "library_sha256": library, "pinned": pinned}
        private.write_synced(built / MANIFEST, json.dumps(record, indent=1).encode(), self._file_mode)
        final = self.root / KERNELS / slot(request) / key
        private.make_folder(final.parent, self._folder_mode)
        with private.explained(final):
            for path in built.iterdir():
                path.chmod(self._file_mode)
                private.sync(path)
            built.chmod(self._folder_mode)
            private.sync(built)
            self._rename(built, final)
            private.sync(final.parent)
        return read_entry(final)

    def _rename(self, built: Path, final: Path) -> None:
        for _ in range(3):
            try:
                built.rename(final)
            except OSError:
                if not final.is_dir():
                    raise
                with suppress(*guard.UNREADABLE):
                    private.check(final)
                    if not damage(read_entry(final)):
                        return
                with suppress(OSError):  # damaged: move it away; a process that has it mapped keeps its inode
                    left = taken_away(final, self.root / BUILDING / f"old-{secrets.token_hex(8)}")
                    if left == final:
                        shutil.rmtree(final, ignore_errors=True)
            else:
                return
        raise CacheError(f"{final} cannot be replaced\n  fix: remove it")

    @contextmanager
    def building(self) -> Iterator[Path]:
        """Provide a private folder for one build, removed afterwards. First remove the folders of killed builds."""
        parent = self.root / BUILDING
        self.made(BUILDING)
        with private.explained(parent):
            sweep(parent)
            folder = parent / f"build-{secrets.token_hex(8)}"
            lock = filelock.FileLock(f"{folder}.lock", mode=0o600)
            try:
                lock.acquire()
            except (OSError, NotImplementedError) as error:
                _unless_lockless(error)
            try:
                folder.mkdir(mode=0o700)
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
                Path(lock.lock_file).unlink(missing_ok=True)
                lock.release()

    @contextmanager
    def locked(self, names: list[str]) -> Iterator[None]:
        """Hold the locks of several slots, always taken in the same order. Log every ten seconds while waiting.

        A file system without locks gets a warning: work may be repeated, results stay correct.
        """
        folder = self.made(LOCKS)
        with ExitStack() as held:
            for name in sorted(names):
                self._lock(held, folder / f"{name.replace('/', '-')}.lock")
            yield

    def _lock(self, held: ExitStack, path: Path) -> None:
        lock = filelock.FileLock(path, mode=0o600)
        holder = path.with_suffix(".pid")
        started = time.monotonic()
        while True:
            try:
                held.enter_context(lock.acquire(timeout=_NOTE_EVERY if time.monotonic() - started > 1 else 1))
            except filelock.Timeout:
                owner = _read_text(holder)
                waited = time.monotonic() - started
                _log.warning("waiting for %s, which is building %s (%.0f s so far)", owner, path.stem, waited)
            except (OSError, NotImplementedError) as error:
                with private.explained(path):
                    _unless_lockless(error)
                _log.warning("%s cannot be locked (%s); another process may build the same kernel", path, error)
                return
            else:
                with suppress(CacheError, OSError):  # only tells waiting processes who holds the lock
                    holder.unlink(missing_ok=True)
                    private.write_synced(holder, f"process {os.getpid()}".encode(), 0o600)
                return

    def keep_log(self, name: str, text: str) -> Path:
        """Store the log of a failed build and return its path."""
        path = self.made(LOGS) / f"{name.replace('/', '-')}.log"
        with private.explained(path):
            path.unlink(missing_ok=True)
        private.write_synced(path, text.encode(), self._file_mode)
        return path

    def add_proof(self, entry: Entry, proof: bytes) -> None:
        """Write a proof into an entry, atomically."""
        temporary = entry.folder / f".proof-{secrets.token_hex(8)}"
        try:
            private.write_synced(temporary, proof, self._file_mode)
            temporary.replace(entry.folder / PROOF)
        finally:
            temporary.unlink(missing_ok=True)

    def made(self, name: str) -> Path:
        """Return a folder below the root. Create it, the root and the marker if they are missing."""
        private.make_folder(self.root, self._folder_mode)
        marker = self.root / MARKER
        if not marker.exists():
            with suppress(
                CacheError
            ):  # another process was first, or the disk is full: without a marker nothing is removed
                private.write_synced(marker, SIGNATURE, self._file_mode)
        folder = self.root / name
        private.make_folder(folder, self._folder_mode)
        return folder


def _unless_lockless(error: OSError | NotImplementedError) -> None:
    """Re-raise an error unless it means that the file system has no locks."""
    if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
        raise error


def taken_away(folder: Path, away: Path) -> Path:
    """Take an entry out of its place by a rename, and return where its files are now.

    In a container, a folder of the image cannot be renamed (EXDEV,
    https://docs.kernel.org/filesystems/overlayfs.html#renaming-directories). Its files then stay where they are, but
    without the record, so that they are no entry any more.
    """
    try:
        folder.rename(away)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        (folder / MANIFEST).unlink(missing_ok=True)
        return folder
    return away


def sweep(parent: Path) -> int:
    """Remove builds whose process has ended (their lock is free) and entries moved away. Return the bytes freed."""
    freed = 0
    for lock_file in parent.glob("build-*.lock"):
        lock = filelock.FileLock(lock_file, timeout=0)
        with suppress(filelock.Timeout, OSError, NotImplementedError), lock:
            freed += _removed(lock_file.with_suffix(""))
            lock_file.unlink(missing_ok=True)
    for folder in parent.iterdir():
        if _LEFT.fullmatch(folder.name) and not folder.with_name(f"{folder.name}.lock").exists():
            freed += _removed(folder)
    return freed


def _removed(folder: Path) -> int:
    size = sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
    shutil.rmtree(folder, ignore_errors=True)
    return size


def _folders(parent: Path) -> list[Path]:
    with os.scandir(parent) as rows:
        return [Path(row.path) for row in rows if row.is_dir(follow_symlinks=False)]


def _changed(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:  # removed meanwhile
        return 0.0


def _read_text(path: Path) -> str:
    try:
        return private.read(path).decode(errors="replace")
    except (CacheError, OSError):
        return "another process"
