"""``fp4dispatch env``: versions, GPUs and settings, ready to paste into an issue; needs neither torch nor rich."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from typing import TYPE_CHECKING, Any

from fp4dispatch import __version__
from fp4dispatch.cli.answers import answer
from fp4dispatch.machine import system as machine
from fp4dispatch.machine.system import System
from fp4dispatch.settings import SETTINGS, settings

if TYPE_CHECKING:
    from fp4dispatch.cli import Subparsers

_LIBRARIES = ("torch", "cudnn", "cudnn_frontend", "flashinfer", "cutlass", "nvcc")


def add_parser(subparsers: Subparsers) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser("env", help="print versions, GPUs and settings", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the report; always 0."""
    data = collect(machine.current())
    answer(json.dumps(data, indent=2) if args.json else text(data))
    return 0


def collect(system: System) -> dict[str, Any]:
    """Collect the report as plain data. It shows only settings of this package, not the whole environment."""
    environment = settings.environment()
    names = [setting.name for setting in SETTINGS.values()]
    return {
        "fp4dispatch": __version__,
        "os": platform.platform(),
        "libc": " ".join(platform.libc_ver()).strip(),
        "python": f"{platform.python_version()} ({platform.python_implementation()}, {sys.executable})",
        "system": system.to_dict(),
        "settings": {name: environment[name] for name in names if name in environment},
        "unknown_settings": list(settings.unknown()),
    }


def text(data: dict[str, Any]) -> str:
    """Return the report as plain text, one fact per line."""
    system = data["system"]
    rows = [(key, data[key]) for key in ("fp4dispatch", "os", "libc", "python")]
    rows += [("driver", _driver(system)), ("torch CUDA", system["cuda"] or "none (CPU build, or no torch)")]
    rows += [(name, _library(system[name])) for name in _LIBRARIES]
    for gpu in system["gpus"]:
        memory = f", {gpu['memory'] / 2**30:.0f} GiB" if gpu["memory"] else ""
        rows.append((f"GPU {gpu['index']}", f"{gpu['name']}, capability {gpu['arch']}{memory}, {gpu['uuid']}"))
    if not system["gpus"]:
        rows.append(("GPU", "none visible"))
    rows += [("proven", ", ".join(" ".join(pair) for pair in system["proven"]) or "none")]
    rows += [("quarantined", "; ".join(" ".join(map(str, entry)) for entry in system["quarantined"]) or "none")]
    rows += [("note", note) for note in system["notes"]]
    rows += [(name, repr(value)) for name, value in data["settings"].items()]
    rows += [("unknown", sentence) for sentence in data["unknown_settings"]]
    width = max(len(key) for key, _ in rows)
    return "\n".join(f"{key:<{width}}  {value}" for key, value in rows)


def _driver(system: dict[str, Any]) -> str:
    if system["driver"] is None:
        return "none"
    return f"{system['driver']} (runs CUDA up to {system['driver_cuda'] or 'unknown'})"


def _library(found: dict[str, str] | None) -> str:
    return "none" if found is None else f"{found['version'] or 'unknown version'} {found['path']}".rstrip()
