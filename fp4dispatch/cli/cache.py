"""``fp4dispatch cache``: list the compiled kernels, print their folder, or remove them.

``clear`` removes all. ``prune`` removes those not used for a time (``--max-age``), then the least recently used until
the rest fits (``--max-size``). Both remove only files of fp4dispatch. ``prune`` keeps kernels that a process has
loaded, and kernels made ahead of time.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp4dispatch.cli.answers import answer
from fp4dispatch.errors import CacheError
from fp4dispatch.jit import prove
from fp4dispatch.jit.kernels import caches
from fp4dispatch.jit.store import evict
from fp4dispatch.jit.store.cache import Cache, default_folder
from fp4dispatch.jit.store.entries import Entry, damage

if TYPE_CHECKING:
    from fp4dispatch.cli import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser("cache", help="list, prune or clear the compiled kernels", description=__doc__)
    parser.add_argument("action", choices=("list", "prune", "clear", "path"), help="what to do; path: print the folder")
    parser.add_argument("--max-age", type=_age, metavar="TIME", help="prune: not used for longer, such as 12h or 30d")
    parser.add_argument("--max-size", type=_size, metavar="SIZE", help="prune: all together, such as 500MB or 2GB")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(wrong_usage=parser.error)


def run(args: argparse.Namespace) -> int:
    """Run the action; 1 if ``list`` finds a damaged entry."""
    limits = (args.max_age, args.max_size)
    if (args.action == "prune") == (limits == (None, None)):
        args.wrong_usage("prune needs --max-age, --max-size or both; no other action takes them")
    if args.action == "path":
        folder = str(default_folder())
        answer(json.dumps({"path": folder}) if args.json else folder)
        return 0
    if args.action == "prune":
        removed, freed = evict.prune(Cache(default_folder()), max_age=args.max_age, max_size=args.max_size)
        if args.json:
            answer(json.dumps({"removed": removed, "freed_bytes": freed}))
        else:
            print(f"{removed} compiled kernels removed, {freed / 1e6:.1f} MB freed in {default_folder()}")
        return 0
    if args.action == "clear":
        freed = evict.clear(Cache(default_folder()))
        answer(json.dumps({"freed_bytes": freed}) if args.json else f"{freed / 1e6:.1f} MB freed in {default_folder()}")
        return 0
    rows = [row for cache in caches() for entry in cache.entries() if (row := _row(entry))]
    if args.json:
        answer(json.dumps({"path": str(default_folder()), "entries": rows}, indent=2))
    else:
        for row in rows:
            print(
                f"{row['name']}  {row['state']}  {row['bytes'] / 1e6:.1f} MB  {row['age_days']} days  {row['folder']}"
            )
        print(f"{len(rows)} compiled kernels in {default_folder()}")
    return 1 if any(row["state"] == "damaged" for row in rows) else 0


def _age(text: str) -> float:
    return _amount(text, {"m": 60, "h": 3600, "d": 86400, "w": 604800}, "a time, such as 12h or 30d")


def _size(text: str) -> int:
    return int(_amount(text, {"kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}, "a size, such as 500MB or 2GB"))


def _amount(text: str, units: dict[str, float], what: str) -> float:
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)\s*([a-z]+)", text.strip().lower())
    if match is None or match[2] not in units:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}; units: {', '.join(units)}")
    return float(match[1]) * units[match[2]]


def _row(entry: Entry) -> dict[str, Any] | None:
    """Return what is shown of an entry; None where another process has removed it meanwhile."""
    state = _state(entry)
    try:
        changed = entry.folder.stat().st_mtime
        size = sum(map(_size_of, entry.folder.iterdir()))
    except FileNotFoundError:
        return None
    return {
        "name": entry.name,
        "state": state,
        "bytes": size,
        "age_days": int((time.time() - changed) // 86400),
        "folder": str(entry.folder),
    }


def _size_of(file: Path) -> int:
    try:
        return file.lstat().st_size
    except FileNotFoundError:  # a proof that is being replaced, for example
        return 0


def _state(entry: Entry) -> str:
    try:
        proof = prove.read(entry)
    except (CacheError, OSError):
        return "damaged"
    if damage(entry):
        return "damaged"
    return "proven" if proof and not proof.faults(entry.request) else "unproven"
