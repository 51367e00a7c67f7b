"""Compiled kernels on disk: looked up by content, published whole or not at all.

Layout below the cache folder::

    kernels/<kernel>/<variant>-<target>/<key>/kernel.so    the library
                                              entry.json   what it was made from, with the hash of every file
                                              proof.json   what the disassembler saw (fp4dispatch.jit.prove)
                                              build.log
    building/   unfinished builds, each locked by the process that makes it
    locks/      one per kernel, variant and target; a lock saves work, correctness never depends on it
    logs/       logs of failed builds

The key is the hash of all that went in: sources, every header that the compiler read, flags, compiler versions and
package version. An entry is found without a toolchain: it lists its inputs, and is current when the package's own
sources and flags match and, where a toolchain is there to rebuild with, its compilers and headers match too. A *pinned*
entry (made ahead of time) is meant to travel, so it is held to the package's own sources and flags alone.

Publishing is one rename of a synced folder, so a build that is killed at any moment leaves nothing that can be loaded.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from fp4dispatch.errors import CacheError
from fp4dispatch.jit import private
from fp4dispatch.settings import settings

SCHEMA = 1
LIBRARY, MANIFEST, PROOF, LOG = "kernel.so", "entry.json", "proof.json", "build.log"
OWN = "src"
SYSTEM = "/"
_NOTE_EVERY = 10.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_log = logging.getLogger("fp4dispatch")


@dataclass(frozen=True)
class Entry:
    """One finished kernel in a cache.

    ``request`` is what was asked for (names, flags, package version), ``files`` the SHA-256 of every file that was
    read, by ``(root, path below it)``, ``compilers`` the versions that made it.
    ``installed`` entries lie inside this package, whose code runs already, whoever owns it.
    """

    folder: Path
    request: Mapping[str, Any]
    files: Mapping[tuple[str, str], str]
    compilers: Mapping[str, str]
    library_sha256: str
    pinned: bool
    installed: bool = False

    @property
    def library(self) -> Path:
        """The shared library."""
        return self.folder / LIBRARY

    @property
    def name(self) -> str:
        """``kernel/variant-target``, as in the folder."""
        return slot(self.request)


def slot(request: Mapping[str, Any]) -> str:
    """Return ``kernel/variant-target``: the folder of all entries for one request."""
    return f"{request['kernel']}/{request['variant']}-{request['target']}"


def digest(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with path.open("rb") as file:
        state = hashlib.sha256()
        while block := file.read(1 << 20):
            state.update(block)
    return state.hexdigest()


def digest_once(path: Path) -> str:
    """Return the SHA-256 of a file that many entries share, hashing it again only when it has changed."""
    status = path.stat()
    return _digest(str(path), status.st_mtime_ns, status.st_size, status.st_ino)


@functools.lru_cache(maxsize=8192)
def _digest(path: str, _mtime: int, _size: int, _inode: int) -> str:
    return digest(Path(path))


def default_folder() -> Path:
    """Return ``FP4DISPATCH_CACHE_DIR``, else the user cache folder. Never a shared temporary folder."""
    import platformdirs

    chosen = settings.cache_dir
    return Path(chosen) if chosen else platformdirs.user_cache_path("fp4dispatch", appauthor=False)


class Cache:
    """The entries below one folder.

    Parameters
    ----------
    root
        The folder; created at the first build, private to this user.
    portable
        Make folders and files readable for everybody, for a container image that another user will run.
    installed
        The folder is part of this package, so its owner is trusted like the package's own.
    """

    def __init__(self, root: Path, *, portable: bool = False, installed: bool = False) -> None:
        self.installed = installed
        self.root = Path(os.path.abspath(root))  # noqa: PTH100  (resolve() would follow a planted link)
        self._folder_mode, self._file_mode = (0o755, 0o644) if portable else (0o700, 0o600)

    def entries(self, below: str = "*/*") -> Iterator[Entry]:
        """Yield the entries whose record can be read, newest first; a damaged one is skipped with a warning.

        Raises
        ------
        CacheError
            Where the cache or an entry could have been written by someone else.
        """
        kernels = self.root / "kernels"
        if not kernels.is_dir():
            return
        if not self.installed:
            private.check_parent(self.root)
            for folder in (self.root, kernels):
                private.check(folder)
        found = [path for path in kernels.glob(f"{below}/*") if (path / MANIFEST).exists()]
        for folder in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True):
            parts = (folder.parent.parent, folder.parent, folder, folder / MANIFEST)
            for part in () if self.installed else parts:
                private.check(part)
            try:
                yield _read_entry(folder, installed=self.installed)
            except (OSError, ValueError, KeyError, TypeError) as error:
                _log.warning("damaged cache entry %s is ignored and will be rebuilt: %s", folder, error)

    def find(
        self, request: Mapping[str, Any], roots: Mapping[str, Path], compilers: Mapping[str, str] | None
    ) -> Entry | None:
        """Return the newest entry that is current and undamaged.

        Parameters
        ----------
        request
            What is asked for; must equal what the entry was asked for.
        roots
            Folder of each root name; ``src`` (the package's own sources) is always needed, the header folders and
            ``/`` only with ``compilers``.
        compilers
            Versions of the toolchain that could rebuild the entry; None where there is none.
        """
        for entry in self.entries(slot(request)):
            if entry.request != request:
                continue
            if stale(entry, roots, None if entry.pinned else compilers):
                continue
            if fault := damage(entry):
                _log.warning("%s; it will be rebuilt", fault)
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

        Where another process published the same content first, that entry is kept if it is sound and replaced if not.
        """
        library = digest(built / LIBRARY)
        listed = [[root, path, sha] for (root, path), sha in sorted(files.items())]
        made_from = {"request": dict(request), "compilers": dict(compilers), "files": listed}
        key = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:32]
        record = {"schema": SCHEMA, **made_from, "library_sha256": library, "pinned": pinned}
        private.write_synced(built / MANIFEST, json.dumps(record, indent=1).encode(), self._file_mode)
        final = self.root / "kernels" / slot(request) / key
        private.make_folder(final.parent, self._folder_mode)
        with private.explained(final):
            for path in built.iterdir():
                path.chmod(self._file_mode)
                private.sync(path)
            built.chmod(self._folder_mode)
            private.sync(built)
            self._rename(built, final)
            private.sync(final.parent)
        return _read_entry(final)

    def _rename(self, built: Path, final: Path) -> None:
        for _ in range(3):
            try:
                built.rename(final)
            except OSError:
                if not final.is_dir():
                    raise
                with suppress(OSError, ValueError, KeyError, TypeError):
                    if not damage(_read_entry(final)):
                        return
                with suppress(OSError):  # damaged: out of the way first; a process that has it mapped keeps its inode
                    final.rename(self.root / "building" / f"old-{secrets.token_hex(8)}")
            else:
                return
        raise CacheError(f"{final} cannot be replaced\n  fix: remove it")

    @contextmanager
    def building(self) -> Iterator[Path]:
        """Give a private folder for one build and remove it afterwards; first remove what killed builds left."""
        parent = self.root / "building"
        private.make_folder(self.root, self._folder_mode)
        private.check_parent(self.root)
        private.make_folder(parent, self._folder_mode)
        with private.explained(parent):
            _sweep(parent)
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
        """Hold the locks of several slots (always taken in the same order); waiting is said every ten seconds.

        A file system without locks costs repeated work, not correctness, so it is only a warning.
        """
        folder = self.root / "locks"
        private.make_folder(folder, self._folder_mode)
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
                owner = _read_text(holder) or "another process"
                waited = time.monotonic() - started
                _log.warning("waiting for %s, which is building %s (%.0f s so far)", owner, path.stem, waited)
            except (OSError, NotImplementedError) as error:
                with private.explained(path):
                    _unless_lockless(error)
                _log.warning("%s cannot be locked (%s); another process may build the same kernel", path, error)
                return
            else:
                with private.explained(holder):
                    holder.unlink(missing_ok=True)
                    holder.touch(mode=0o600)
                    holder.write_text(f"process {os.getpid()}")
                return

    def keep_log(self, name: str, text: str) -> Path:
        """Store the log of a failed build and return where it is."""
        folder = self.root / "logs"
        private.make_folder(folder, self._folder_mode)
        path = folder / f"{name.replace('/', '-')}.log"
        path.unlink(missing_ok=True)
        private.write_synced(path, text.encode(), self._file_mode)
        return path

    def add_proof(self, entry: Entry, proof: bytes) -> None:
        """Put a proof into an entry, atomically."""
        temporary = entry.folder / f".proof-{secrets.token_hex(8)}"
        try:
            private.write_synced(temporary, proof, self._file_mode)
            temporary.replace(entry.folder / PROOF)
        finally:
            temporary.unlink(missing_ok=True)

    def clear(self) -> int:
        """Remove every entry, unfinished build, log and lock; return the bytes freed."""
        freed = 0
        for name in ("kernels", "building", "logs", "locks"):
            folder = self.root / name
            if folder.is_dir():
                private.check(folder)
                freed += sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
                with private.explained(folder):
                    shutil.rmtree(folder)
        return freed


def stale(entry: Entry, roots: Mapping[str, Path], compilers: Mapping[str, str] | None) -> str:
    """Return why an entry no longer matches its inputs; empty where it does.

    Without ``compilers`` nothing could be rebuilt, so only the package's own sources are compared.
    """
    if compilers is not None and dict(entry.compilers) != dict(compilers):
        return f"compiled by {dict(entry.compilers)}, here is {dict(compilers)}"
    for (root, path), sha in entry.files.items():
        if root != OWN and compilers is None:
            continue
        folder = roots.get(root)
        if folder is None:
            return f"the header folder {root} is gone"
        try:
            same = digest_once(folder / path) == sha
        except OSError:
            same = False
        if not same:
            return f"{folder / path} has changed"
    return ""


def damage(entry: Entry) -> str:
    """Return what is wrong with the library's content; empty where it is the one that was published.

    Raises
    ------
    CacheError
        Where someone else could have written it: that is never answered by a rebuild.
    """
    try:
        for path in () if entry.installed else (entry.folder, entry.library):
            private.check(path)
        same = digest(entry.library) == entry.library_sha256
    except FileNotFoundError as error:
        return f"damaged cache entry {entry.folder}: {error.filename} is missing"
    return "" if same else f"damaged cache entry {entry.folder}: the hash of {LIBRARY} is not the one published"


def verify(entry: Entry) -> None:
    """Raise CacheError where :func:`damage` finds any."""
    if fault := damage(entry):
        raise CacheError(f"{fault}\n  fix: build it again with `fp4dispatch build`")


def _read_entry(folder: Path, *, installed: bool = False) -> Entry:
    record = json.loads((folder / MANIFEST).read_bytes())
    if record["schema"] != SCHEMA:
        raise ValueError(f"schema {record['schema']}, this version reads {SCHEMA}")
    slot(record["request"])
    return Entry(
        folder=folder,
        request=record["request"],
        files={(str(root), str(path)): str(sha) for root, path, sha in record["files"]},
        compilers=dict(record["compilers"]),
        library_sha256=str(record["library_sha256"]),
        pinned=record["pinned"] is True,
        installed=installed,
    )


def _unless_lockless(error: OSError | NotImplementedError) -> None:
    """Raise an error again unless it says that the file system has no locks."""
    if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
        raise error


def _sweep(parent: Path) -> None:
    """Remove builds whose process is gone: their lock is free. Folders without a lock are leftovers of a sweep."""
    for lock_file in parent.glob("build-*.lock"):
        lock = filelock.FileLock(lock_file, timeout=0)
        with suppress(filelock.Timeout, OSError, NotImplementedError), lock:
            shutil.rmtree(lock_file.with_suffix(""), ignore_errors=True)
            lock_file.unlink(missing_ok=True)
    for folder in parent.iterdir():
        if folder.suffix != ".lock" and not folder.with_name(f"{folder.name}.lock").exists():
            shutil.rmtree(folder, ignore_errors=True)


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
