"""Records on disk: one JSON file each, named by the hash of what it is about. No torch.

Published by rename, so processes never see half a file and never wait for each other. Only private files are read
(:mod:`fp4dispatch.jit.store.private`); what cannot be read does not exist (:mod:`fp4dispatch.jit.store.guard`).
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from fp4dispatch.jit.store import guard, private

_LARGEST = 1 << 20


def name_of(subject: list[Any]) -> str:
    """Return the name of a record: the hash of plain data."""
    return hashlib.sha256(json.dumps(subject).encode()).hexdigest()[:40]


def write(path: Path, data: dict[str, Any]) -> None:
    """Publish a record.

    Raises
    ------
    CacheError
        Where that is not possible; nothing half written stays behind.
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
    """Return a record's data; None where there is none that can be trusted, with a warning where one cannot be."""
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
    """Return the files of a folder that are named like records."""
    found: list[Path] = []
    with guard.optional(f"the records in {folder}"), private.explained(folder), suppress(FileNotFoundError):
        _check(folder)
        found = sorted(folder.glob("[0-9a-f]*.json"))
    yield from found


def _check(folder: Path) -> None:
    private.check_place(folder.parent)  # the cache, so that all stores say its fault alike
    private.check(folder)
