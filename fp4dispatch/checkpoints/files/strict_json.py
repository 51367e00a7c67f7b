"""Read untrusted JSON: limited in size, strict, with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fp4dispatch.errors import CheckpointError


def parse_object(raw: bytes, what: str) -> dict[str, Any]:
    """Parse UTF-8 JSON whose top level is an object.

    Parameters
    ----------
    raw
        The bytes, already bounded in size by the caller.
    what
        What is being read, for the error text, such as ``header of model.safetensors``.

    Raises
    ------
    CheckpointError
        Not UTF-8, not JSON, a repeated key, NaN or Infinity, nesting too deep, or a top level that is not an object.
    """
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError:
        raise CheckpointError(f"{what}: JSON is nested too deeply: {_DAMAGED}") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise CheckpointError(f"{what}: not valid JSON ({error}): {_DAMAGED}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{what}: found a JSON {type(value).__name__}, expected an object: {_DAMAGED}")
    return value


def read_object(path: Path, *, max_bytes: int) -> dict[str, Any]:
    """Read a JSON file of at most ``max_bytes`` bytes; raises as :func:`parse_object`, and for an unreadable file."""
    try:
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(raw) > max_bytes:
        raise CheckpointError(f"{path}: larger than the {max_bytes:,} bytes allowed for this file: {_DAMAGED}")
    return parse_object(raw, str(path))


_DAMAGED = "the file is damaged or is not what its name says; fetch it again"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object, refusing a repeated key: two readers could otherwise see two different files."""
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise ValueError(f"key {key[:200]!r} occurs twice")
        out[key] = value
    return out


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")
