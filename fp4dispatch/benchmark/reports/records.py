"""Records of measurements: one form, and one file for each kind, subject and card, checked when written and read.

``bench/results`` of the repository holds the newest. A new record replaces the older one of its name. Kinds with many
long records are stored packed (``xz -dc FILE`` shows one).
"""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FACTS = ("commit", "date", "device", "driver", "torch", "cuda")
"""What every record says about its origin; ``driver``, ``torch`` and ``cuda`` are None where there was none."""
KINDS: Mapping[str, tuple[str, ...]] = {
    "accuracy": ("model", "versions", "texts", "rows"),
    "activations": ("method", "problems"),
    "architectures": ("seed", "of", "versions", "rows"),
    "bench": ("schema", "suite", "peaks", "methods", "measured"),
    "breakable graphs": ("models",),
    "candidates": ("candidates", "tuned", "planted"),
    "cold jit": ("cold_jit", "cores", "jobs"),
    "cold model": ("cold_model", "cores", "shapes", "tokens"),
    "compiled targets": ("rows",),
    "decoder": ("formats", "prompt", "tiny"),
    "demo": ("demo",),
    "few tokens": ("method", "problems"),
    "first command": ("first_command", "cores", "memory_gb"),
    "generated text": ("model", "formats"),
    "gpu tests": ("tests", "failed", "skipped", "ran", "ended_by_limit"),
    "host cost": ("host_cost",),
    "many tokens": ("method", "problems"),
    "mutants": ("prover_sha256", "sources_sha256", "small", "builds", "sources"),
    "ncu": ("profiles", "failed"),
    "new tokens": ("new_tokens",),
    "launch samples": ("seed", "method", "gpu", "problems"),
    "proof cost": ("rows",),
    "race": ("ours", "control", "trials"),
    "random suite": ("schema", "seed", "problems", "methods", "measured", "launches"),
    "sanitizer": ("controls", "sanitizer"),
    "soak": ("seed", "soak"),
    "sm90 kernels": ("method", "gemm", "quantise"),
    "sweep": ("about", "method", "problems"),
    "tensor parallel": ("depth", "layers", "ranks"),
    "two gpus": ("two_gpus",),
    "w4 error": ("w4_error",),
}
"""Kind -> what its records hold beside ``kind``, ``facts`` and, where a kind has several, ``subject``."""
PACKED = frozenset({"launch samples", "random suite"})
"""Kinds that are stored as ``.json.xz``: their records are a tenth as large."""
_DATE = re.compile(r"\d{4}-\d\d-\d\d")


def name(record: Mapping[str, Any]) -> str:
    """Return the file name of a record: kind, subject and card, e.g. ``race-h200.json``, or ``.json.xz`` if packed."""
    device = re.sub(r"nvidia|geforce|(\d+gb.*$)", "", record["facts"]["device"].lower())
    return f"{_words(record['kind'], record.get('subject', ''), device)}{_suffix(record['kind'])}"


def _words(*parts: str) -> str:
    return re.sub(r"[^a-z0-9_]+", "-", " ".join(parts)).strip("-")


def _suffix(kind: str) -> str:
    return ".json.xz" if kind in PACKED else ".json"


def stem(path: Path) -> str:
    """Return the name of a record's file without ``.json`` or ``.json.xz``: how data files cite it."""
    return path.name.removesuffix(".xz").removesuffix(".json")


def faults(record: Mapping[str, Any]) -> list[str]:
    """Return what keeps a document from being a record."""
    kind, facts = record.get("kind"), record.get("facts")
    if not isinstance(kind, str) or kind not in KINDS:
        return [f"kind is {kind!r}, needs one of: {', '.join(KINDS)}"]
    if not isinstance(facts, Mapping):
        return ["has no facts"]
    found = [f"facts lack {key}" for key in FACTS if key not in facts]
    found += [f"facts: {key} is empty" for key in ("commit", "date", "device") if not facts.get(key)]
    found += [f"lacks {key}" for key in KINDS[kind] if key not in record]
    if not found and not _DATE.fullmatch(facts["date"]):
        found.append(f"date is {facts['date']!r}, needs YYYY-MM-DD")
    if not found and "nvidia" in facts["device"].lower():
        found += [f"facts: {key} is empty" for key in ("driver", "torch", "cuda") if not facts[key]]
    return found


def unpacked(path: Path) -> bytes:
    """Return the text of a record's file, unpacked if it is packed.

    Raises
    ------
    ValueError
        If the file is packed, and is cut off or damaged.
    """
    data = path.read_bytes()
    if path.suffix != ".xz":
        return data
    try:
        return lzma.decompress(data)
    except lzma.LZMAError as error:
        raise ValueError(f"{path.name}: {error}; it is cut off or damaged, take it from git again") from error


def read(path: Path) -> dict[str, Any]:
    """Return one record.

    Raises
    ------
    ValueError
        If it is damaged, does not have the form of its kind, or has another name than it should.
    """
    record: dict[str, Any] = json.loads(unpacked(path))
    if wrong := faults(record):
        raise ValueError(f"{path.name}: {'; '.join(wrong)}")
    if path.name != name(record):
        raise ValueError(f"{path.name}: its kind, subject and card make it {name(record)}")
    return record


def kept(folder: Path, kind: str, subject: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the records of a kind, by file name: one for each card, and for each subject if none is given.

    Raises
    ------
    ValueError
        For an unknown kind, or a file that is named like a record of this kind and is none.
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}, needs one of: {', '.join(KINDS)}")
    for path in sorted(folder.glob(f"{_words(kind)}-*{_suffix(kind)}")):
        record = read(path)
        if record["kind"] == kind and subject in (None, record.get("subject", "")):
            yield record


def one(folder: Path, kind: str, subject: str | None = None) -> dict[str, Any]:
    """Return the only record of a kind and subject.

    Raises
    ------
    LookupError
        If there is none, or one for each of several cards.
    """
    found = list(kept(folder, kind, subject))
    if len(found) != 1:
        raise LookupError(f"{len(found)} records of {kind!r} {subject or ''}, needs 1")
    return found[0]


def write(path: Path, kind: str, facts: Mapping[str, Any], body: Mapping[str, Any], subject: str = "") -> None:
    """Write a record. ``facts`` are those of :func:`fp4dispatch.benchmark.machine.facts`.

    If ``path`` is a folder, the file in it is named by :func:`name`.

    Raises
    ------
    ValueError
        If it lacks something.
    """
    made = {"kind": kind, **({"subject": subject} if subject else {}), "facts": dict(facts), **body}
    record = json.loads(json.dumps(made))  # as it is read: a tuple becomes a list
    if wrong := faults(record):
        raise ValueError(f"not a record: {'; '.join(wrong)}")
    if path.is_dir():
        keep(path, record)
    else:
        _store(path, record)


def keep(folder: Path, record: Mapping[str, Any]) -> None:
    """Write a record into a folder, under its name and packed if its kind is."""
    _store(folder / name(record), record)


def _store(path: Path, record: Mapping[str, Any]) -> None:
    data = text(record).encode()
    path.write_bytes(lzma.compress(data) if path.suffix == ".xz" else data)


def text(record: Mapping[str, Any]) -> str:
    """Return a record as it is stored, before it is packed: rows of plain values take a line each, to read a diff."""
    return _text(record, 0) + "\n"


def _text(value: Any, depth: int) -> str:
    flat = json.dumps(value)
    if not isinstance(value, (Mapping, list)) or (depth > 1 and len(flat) < 1500) or len(flat) < 100:
        return flat
    pad = " " * (depth + 1)
    if isinstance(value, Mapping):
        rows = [f"{pad}{json.dumps(key)}: {_text(item, depth + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(rows) + "\n" + pad[1:] + "}"
    return "[\n" + ",\n".join(pad + _text(item, depth + 1) for item in value) + "\n" + pad[1:] + "]"
