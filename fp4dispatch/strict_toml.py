"""The strict TOML reader: a key that is missing, unknown or of the wrong type is an error that names it.

Every data file of the package is read here: rules, capabilities, flags, kernels, tiles, shapes. ``error`` is the
exception that a caller documents; FlagsError by default.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

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


def keys_of(kind: type, **others: type) -> tuple[dict[str, type], dict[str, type]]:
    """Return the keys of a table that becomes a dataclass: the required and the optional ones, as :func:`check` takes.

    A field with a default is optional. Tuples are lists in a file, mappings are tables, literals are texts.

    Parameters
    ----------
    kind
        The dataclass.
    **others
        Fields that a file has in another type.
    """
    hints = get_type_hints(kind)
    required: dict[str, type] = {}
    optional: dict[str, type] = {}
    for each in fields(kind):
        keys = required if each.default is MISSING and each.default_factory is MISSING else optional
        keys[each.name] = others.get(each.name) or _in_a_file(hints[each.name])
    return required, optional


def _in_a_file(hint: Any) -> type:
    origin = get_origin(hint)
    if origin is UnionType:  # a value, or None where the key is missing
        return _in_a_file(get_args(hint)[0])
    found: type = {tuple: list, Mapping: dict, Literal: str}.get(origin, hint)
    return found


def unique(where: str, names: Iterable[str], *, error: type[Fp4DispatchError] = FlagsError) -> None:
    """Raise ``error`` for a name that is there twice; ``where`` starts its message."""
    each = list(names)
    if twice := sorted({name for name in each if each.count(name) > 1}):
        raise error(f"{where} {', '.join(twice)} is there twice")


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
