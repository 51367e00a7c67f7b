"""One hash over the content of source files: verdicts on disk hold only for the code they were made with. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from fp4dispatch.errors import CacheError


def code_hash(roots: Iterable[Path]) -> str:
    """Hash files, and folders with all that is in them: names relative to the root, and bytes.

    ``__pycache__`` does not count.

    Returns
    -------
    str
        32 hexadecimal digits.

    Raises
    ------
    CacheError
        If a root is missing, holds no file, or cannot be read: a hash without it would stand for other code.
    """
    state = hashlib.sha256()
    for root in roots:
        try:
            files = [root] if root.is_file() else sorted(path for path in root.rglob("*") if _counts(path, root))
            if not files:
                raise FileNotFoundError("it is missing, or an empty folder")
            for path in files:
                name = f"{root.name}/{path.relative_to(root).as_posix()}"
                state.update(f"{len(name)} {name}".encode() + hashlib.sha256(path.read_bytes()).digest())
        except OSError as error:
            raise CacheError(
                f"verdicts on kernels are stored under a hash of {root}, which cannot be read: {error}. "
                "Install the package again"
            ) from error
    return state.hexdigest()[:32]


def _counts(path: Path, root: Path) -> bool:
    """Whether a path is a source file: not what Python itself leaves beside it."""
    return path.is_file() and "__pycache__" not in path.relative_to(root).parts
