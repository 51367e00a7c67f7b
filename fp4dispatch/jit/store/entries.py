"""One finished kernel on disk: what it was made from, and whether it is still current and undamaged."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp4dispatch.errors import CacheError
from fp4dispatch.jit.store import private
from fp4dispatch.jit.store.digests import digest_of, digest_once

SCHEMA = 1
LIBRARY, MANIFEST, PROOF, LOG = "kernel.so", "entry.json", "proof.json", "build.log"
OWN = "src"
SYSTEM = "/"


@dataclass(frozen=True)
class Entry:
    """One finished kernel in a cache.

    ``request`` is what was requested (names, flags, package version), ``files`` the SHA-256 of every file that was
    read, by ``(root, path below it)``, ``compilers`` the versions that made it.
    ``installed`` entries are part of this package. They are trusted like its code.
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


def stale(entry: Entry, roots: Mapping[str, Path], compilers: Mapping[str, str] | None) -> str:
    """Return why an entry does not match its inputs; empty if it does.

    Without ``compilers`` nothing can be rebuilt, so only the package's own sources are compared.
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
    """Return what is wrong with the library; empty if it is private, readable and has the published hash."""
    try:
        if not entry.installed:
            private.check(entry.folder)
        os.close(open_library(entry))
    except (CacheError, OSError) as error:
        return f"damaged cache entry {entry.folder}: {first_line(error)}"
    return ""


def open_library(entry: Entry) -> int:
    """Open a library, compare its content with the published hash, and return the descriptor.

    Raises
    ------
    CacheError
        If the content differs, or another user could have written it. OSError if it cannot be read.
    """
    descriptor = private.opened(entry.library, trusted=entry.installed)
    try:
        if digest_of(descriptor) != entry.library_sha256:
            raise CacheError(f"the hash of {entry.library} is not the one published\n  fix: build it again")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def verify(entry: Entry) -> None:
    """Raise CacheError if :func:`damage` finds a fault."""
    if fault := damage(entry):
        raise CacheError(f"{fault}\n  fix: build it again with `fp4dispatch build`")


def read_entry(folder: Path, *, installed: bool = False) -> Entry:
    """Read the record of an entry.

    Raises
    ------
    Exception
        One of :data:`fp4dispatch.jit.store.guard.UNREADABLE`, where the record is absent, malformed or not private.
    """
    record = json.loads(private.read(folder / MANIFEST, trusted=installed))
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


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its class."""
    return str(error).partition("\n")[0] or type(error).__name__
