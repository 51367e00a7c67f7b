"""Records on disk: one JSON file each, named by the hash of its subject and facts. No torch.

A rename publishes a file, so other processes never see half of it and never wait. Only private files are read
(:mod:`fp4dispatch.jit.store.private`). A file that cannot be read counts as absent, with a warning
(:mod:`fp4dispatch.jit.store.guard`). :class:`Store` is what verdicts and tuned times use.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from fp4dispatch.jit.store import cache, guard, private

FOLDERS = ("selfcheck", "tuning", "pdl")
"""The folders of all stores, below the cache folder."""

_LARGEST = 1 << 20


class Record(Protocol):
    """What a store keeps: a value with a name, and as plain data."""

    @property
    def name(self) -> str:
        """:func:`name_of` its subject and the facts under which it holds. Other facts are another name."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""


R = TypeVar("R", bound=Record)


class Store(Generic[R]):
    """Records of one type in one folder.

    Parameters
    ----------
    folder
        One of :data:`FOLDERS`.
    schema
        Version of the plain data. A record of another version counts as absent.
    what
        What is kept, for warnings, e.g. ``tuned times``.
    from_dict
        Reads ``to_dict`` back. Raises ValueError, TypeError, KeyError or AttributeError where the data is not that.
    """

    def __init__(self, folder: str, schema: int, what: str, from_dict: Callable[[dict[str, Any]], R]) -> None:
        if folder not in FOLDERS:
            raise ValueError(f"{folder!r} is not in FOLDERS: {', '.join(FOLDERS)}")
        self._folder, self._schema, self._what, self._from_dict = folder, schema, what, from_dict
        self._listed: tuple[Path, int, frozenset[str]] = (Path(), 0, frozenset())

    def folder(self) -> Path:
        """Return where the records are."""
        return cache.default_folder() / self._folder

    def save(self, record: R) -> None:
        """Keep a record. Where that fails, it holds for this process only, with one warning."""
        with guard.optional(f"keeping {self._what} beyond this process"):
            data = {"schema": self._schema, "record": record.to_dict()}
            write(self.folder() / f"{record.name}.json", data)

    def find(self, name: str) -> R | None:
        """Return the record of a name; None where there is none that can be trusted."""
        return self.load(self.folder() / f"{name}.json")

    def load(self, path: Path) -> R | None:
        """Read a file; None where it is absent, damaged, of another schema, or not named after what it holds."""
        data = read(path)
        try:
            if data is None or data["schema"] != self._schema:
                return None
            record = self._from_dict(data["record"])
            return record if record.name == path.stem else None
        except guard.UNREADABLE:
            return None

    def names(self) -> frozenset[str]:
        """Return the names of what may be there: one look at the folder, until something changes in it."""
        folder = self.folder()
        try:
            changed = folder.stat().st_mtime_ns
        except OSError:
            return frozenset()
        if self._listed[:2] != (folder, changed):
            self._listed = folder, changed, frozenset(path.stem for path in paths(folder))
        return self._listed[2]

    def all(self) -> Iterator[R]:
        """Yield every readable record, of any machine and version."""
        for path in paths(self.folder()):
            record = self.load(path)
            if record is not None:
                yield record

    def clear(self) -> int:
        """Remove every record, of any machine and version; return how many.

        Raises
        ------
        CacheError
            Where a file cannot be removed.
        """
        count = 0
        for path in paths(self.folder()):
            with private.explained(path):
                path.unlink(missing_ok=True)
            count += 1
        return count


def name_of(subject: list[Any]) -> str:
    """Return a record's name: the hash of plain data."""
    return hashlib.sha256(json.dumps(subject).encode()).hexdigest()[:40]


def write(path: Path, data: dict[str, Any]) -> None:
    """Publish a record.

    Raises
    ------
    CacheError
        Where that is not possible. No partial file stays behind.
    """
    text = json.dumps(data, indent=1, sort_keys=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    for folder in (path.parents[1], path.parent):
        private.make_folder(folder, 0o700)
    try:
        private.write_synced(partial, text.encode(), 0o600)
        with private.explained(path.parent):
            partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def read(path: Path) -> Any:
    """Return a record's data; None where it is absent. Also None, with a warning, where it cannot be trusted."""
    try:
        with private.explained(path.parent):
            _check(path.parent)
            text = private.read(path, largest=_LARGEST)
        return json.loads(text)
    except guard.UNREADABLE as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            guard.fault(str(path), error)
        return None


def paths(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder that are named like records."""
    found: list[Path] = []
    with guard.optional(f"the records in {folder}"), private.explained(folder), suppress(FileNotFoundError):
        _check(folder)
        found = sorted(folder.glob("[0-9a-f]*.json"))
    yield from found


def _check(folder: Path) -> None:
    private.check_place(folder.parent)  # the cache folder first, so that every store reports the same fault
    private.check(folder)
