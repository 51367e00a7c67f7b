"""``fp4dispatch cache``: where compiled kernels are kept, what is there, and removing it."""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING, Any

from fp4dispatch.jit import prove
from fp4dispatch.jit.cache import Cache, Entry, damage, default_folder
from fp4dispatch.jit.kernels import caches

if TYPE_CHECKING:
    from fp4dispatch.cli import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser("cache", help="list or clear the compiled kernels", description=__doc__)
    parser.add_argument("action", choices=("list", "clear", "path"))
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Carry the action out; 1 where ``list`` finds a damaged entry."""
    if args.action == "path":
        folder = str(default_folder())
        print(json.dumps({"path": folder}) if args.json else folder)
        return 0
    if args.action == "clear":
        freed = Cache(default_folder()).clear()
        print(json.dumps({"freed_bytes": freed}) if args.json else f"{freed / 1e6:.1f} MB freed in {default_folder()}")
        return 0
    rows = [_row(entry) for cache in caches() for entry in cache.entries()]
    if args.json:
        print(json.dumps({"path": str(default_folder()), "entries": rows}, indent=2))
    else:
        for row in rows:
            print(
                f"{row['name']}  {row['state']}  {row['bytes'] / 1e6:.1f} MB  {row['age_days']} days  {row['folder']}"
            )
        print(f"{len(rows)} compiled kernels in {default_folder()}")
    return 1 if any(row["state"] == "damaged" for row in rows) else 0


def _row(entry: Entry) -> dict[str, Any]:
    proof = prove.read(entry)
    state = "proven" if proof and not proof.faults(entry.request) else "unproven"
    if damage(entry):
        state = "damaged"
    return {
        "name": entry.name,
        "state": state,
        "bytes": sum(path.stat().st_size for path in entry.folder.iterdir()),
        "age_days": int((time.time() - entry.folder.stat().st_mtime) // 86400),
        "folder": str(entry.folder),
    }
