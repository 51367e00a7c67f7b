"""Reads TOML tables strictly: a key that is missing, unknown or of the wrong type is an error that names it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp4dispatch.errors import FlagsError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def load(path: Path) -> dict[str, Any]:
    """Parse a file; FlagsError where it is missing or is not TOML."""
    try:
        with path.open("rb") as file:
            table: dict[str, Any] = tomllib.load(file)
            return table
    except OSError as error:
        raise FlagsError(f"{path}: cannot be read ({error.strerror}); reinstall fp4dispatch") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FlagsError(f"{path}: is not TOML: {error}") from error


def check(where: str, table: Any, required: Mapping[str, type], optional: Mapping[str, type] | None = None) -> None:
    """Require exactly these keys with exactly these types (``float`` also takes an integer).

    Raises
    ------
    FlagsError
        Naming ``where`` and every key that is missing, unknown or of the wrong type.
    """
    if not isinstance(table, dict):
        raise FlagsError(f"{where}: need a table, found {type(table).__name__}")
    known = {**required, **(optional or {})}
    faults = [f"unknown key {key!r} (known: {', '.join(known)})" for key in table if key not in known]
    faults += [f"key {key!r} is missing" for key in required if key not in table]
    for key, kind in known.items():
        value = table.get(key)
        fits = type(value) is kind or (kind is float and type(value) is int)
        if key in table and not fits:
            faults.append(f"{key} must be {kind.__name__}, found {type(value).__name__}")
    if faults:
        raise FlagsError(f"{where}: {'; '.join(faults)}")


def texts(where: str, value: Any) -> tuple[str, ...]:
    """Return a list of non-empty strings as a tuple; FlagsError for anything else."""
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise FlagsError(f"{where}: need a list of non-empty strings, found {value!r}")
    return tuple(value)
