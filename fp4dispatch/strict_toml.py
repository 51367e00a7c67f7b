"""The strict TOML reader: a key that is missing, unknown or of the wrong type is an error that names it.

Every data file of the package is read here: rules, capabilities, flags, kernels, tiles, shapes. ``error`` is the
exception that a caller documents; FlagsError by default.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fp4dispatch.errors import FlagsError, Fp4DispatchError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def load(path: Path, *, error: type[Fp4DispatchError] = FlagsError) -> dict[str, Any]:
    """Parse a file; ``error`` where it is missing or is not TOML."""
    try:
        with path.open("rb") as file:
            table: dict[str, Any] = tomllib.load(file)
            return table
    except OSError as fault:
        raise error(f"{path}: cannot be read ({fault.strerror}); reinstall fp4dispatch") from fault
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as fault:
        raise error(f"{path}: is not TOML: {fault}") from fault


def check(
    where: str,
    table: Any,
    required: Mapping[str, type],
    optional: Mapping[str, type] | None = None,
    *,
    error: type[Fp4DispatchError] = FlagsError,
) -> None:
    """Require exactly these keys with exactly these types (``float`` also takes an integer).

    Raises
    ------
    error
        Names ``where`` and every key that is missing, unknown or of the wrong type.
    """
    if not isinstance(table, dict):
        raise error(f"{where}: need a table, found {type(table).__name__}")
    known = {**required, **(optional or {})}
    faults = [f"unknown key {key!r} (known: {', '.join(known)})" for key in table if key not in known]
    faults += [f"key {key!r} is missing" for key in required if key not in table]
    for key, kind in known.items():
        value = table.get(key)
        fits = type(value) is kind or (kind is float and type(value) is int)
        if key in table and not fits:
            faults.append(f"{key} must be {kind.__name__}, found {type(value).__name__} {value!r}")
    if faults:
        raise error(f"{where}: {'; '.join(faults)}")


def texts(where: str, value: Any) -> tuple[str, ...]:
    """Return a list of non-empty strings as a tuple; FlagsError for anything else."""
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise FlagsError(f"{where}: need a list of non-empty strings, found {value!r}")
    return tuple(value)


def names(
    where: str, value: Any, allowed: Iterable[str], *, error: type[Fp4DispatchError] = FlagsError
) -> tuple[str, ...]:
    """Return a list of known names as a tuple; ``error`` where it is no list, is empty or holds another name."""
    known = tuple(allowed)
    if not isinstance(value, list) or not value or any(name not in known for name in value):
        raise error(f"{where}: {value!r} must be a list of {', '.join(known)}")
    return tuple(value)
