"""``fp4dispatch doctor``: independent checks of this machine. Each failed check prints its fix.

Works if torch is broken or missing: torch and the plug-ins are imported in a child process, which may crash.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fp4dispatch.cli.answers import answer
from fp4dispatch.cli.checks import CHECKS, Check, Child, Facts, Kept
from fp4dispatch.jit import packages
from fp4dispatch.jit.store.cache import default_folder
from fp4dispatch.machine import system as machine
from fp4dispatch.settings import SETTINGS, settings
from fp4dispatch.trust import quarantine

if TYPE_CHECKING:
    from fp4dispatch.cli import Subparsers

_ANSWER = "fp4dispatch doctor: "
# Code of the child process. It tells all that it knows whenever that is more, as JSON on a line that starts with
# _ANSWER. Plug-ins are loaded there too: they may import anything, print anything, and end the process.
_CHILD = """
import importlib.metadata, json, sys
sys.path[:] = json.loads(sys.argv[1])
out = {"plugins": {}}
def tell():
    print("\\n" + sys.argv[2] + json.dumps(out), flush=True)
import torch
out["cuda"] = torch.version.cuda
out["archs"] = torch.cuda.get_arch_list() if torch.version.cuda else []
out["gpus"] = []
if torch.version.cuda:
    try:
        torch.cuda.init()
        out["gpus"] = ["%d.%d" % torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
    except Exception as error:
        out["cuda_error"] = str(error).strip().splitlines()[0]
from fp4dispatch.backends import registry
points = importlib.metadata.entry_points(group=registry.GROUP)
out["loading"] = sorted({point.name for point in points})
tell()
for name, backend in registry.plugins(points).items():
    broken = isinstance(backend, registry.BrokenBackend)
    out["plugins"][name] = backend.reason.text if broken else None
out["loading"] = []
tell()
try:
    import fp4dispatch.dispatch.here  # tells system.current() what is proven, on which verdicts depend
    from fp4dispatch.machine import system
    from fp4dispatch.trust import selfcheck
    out["verdicts"] = [{"text": v.text(), "findings": v.findings, "status": v.status, "backend": v.backend}
                       for v in selfcheck.results(system.current())]
except Exception as error:
    out["verdicts_error"] = f"{type(error).__name__}: {error}"
tell()
"""


def add_parser(subparsers: Subparsers) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser("doctor", help="check this machine", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Run every check and print the results; 1 if any failed."""
    checks = diagnose(gather())
    failed = any(check.status == "fail" for check in checks)
    if args.json:
        answer(json.dumps({"ok": not failed, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        _show(checks)
    return int(failed)


def diagnose(facts: Facts) -> list[Check]:
    """Run every check. A check that raises is reported as failed; the others still run."""
    checks: list[Check] = []
    for check in CHECKS:
        name = check.__name__.removeprefix("check_")
        try:
            checks += check(facts)
        except Exception as error:
            text = f"the check itself failed: {type(error).__name__}: {error}"
            checks.append(Check(name, "fail", text, "report this as a bug, with the output of `fp4dispatch env`"))
    return checks


def gather() -> Facts:
    """Collect the facts of this machine; starts one child process."""
    errors = settings.errors()
    names = (dist.metadata["Name"] for dist in importlib.metadata.distributions())
    with settings.ignoring(errors):
        values = {key: getattr(settings, key) for key in SETTINGS}
        environment = settings.environment()
        return Facts(
            system=machine.current(),
            child=ask_child(),
            python=sys.version_info[:3],
            settings_errors=(*errors.values(), *settings.unknown()),
            values=values,
            cache_dir=default_folder(),
            distributions=frozenset(name.lower() for name in names if name),
            selfcheck_folder=quarantine.store.folder(),
            selfcheck_off=values["selfcheck"] == "off",
            library_path=environment.get("LD_LIBRARY_PATH", ""),
            kernels=packages.reports(),
        )


def ask_child(timeout: float = 180) -> Child:
    """Import torch and load the plug-ins in a child process, which may crash. ``timeout`` in seconds."""
    try:
        child = subprocess.run(
            [sys.executable, "-c", _CHILD, json.dumps(sys.path), _ANSWER],
            env=settings.environment(),
            capture_output=True,
            timeout=timeout,
            check=False,
        )
    except OSError as error:
        return Child(error=f"the process that would do so cannot be started ({error})")
    except subprocess.TimeoutExpired as late:
        said, ended = _said(late.stdout or b""), f"did not finish within {timeout:.0f} s"
        if said is None:
            return Child(error=f"importing torch {ended}")
    else:
        said, ended = _said(child.stdout), f"ended the process with status {child.returncode}"
        if said is None:
            lines = child.stderr.decode(errors="replace").strip().splitlines()
            return Child(error=lines[-1] if lines and child.returncode else f"it {ended}")
    unloaded = f"{', '.join(said['loading'])}: loading them {ended}" if said["loading"] else ""
    unread = "" if unloaded or "verdicts" in said else f"reading them {ended}"
    return Child(
        cuda=said["cuda"],
        archs=tuple(said["archs"]),
        gpus=tuple(said["gpus"]),
        cuda_error=said.get("cuda_error", ""),
        plugins=said["plugins"],
        plugins_error=unloaded,
        verdicts=tuple(Kept(**{**kept, "findings": tuple(kept["findings"])}) for kept in said.get("verdicts", ())),
        verdicts_error=said.get("verdicts_error", unread),
    )


def _said(output: bytes) -> dict[str, Any] | None:
    """Return the last answer in what the child process printed; None where there is none."""
    lines = output.decode(errors="replace").splitlines()
    told = [line.removeprefix(_ANSWER) for line in lines if line.startswith(_ANSWER)]
    return json.loads(told[-1]) if told else None


def _show(checks: Iterable[Check]) -> None:
    """Print a table: with rich on a terminal; plain text elsewhere, with NO_COLOR, or without rich."""
    if sys.stdout.isatty() and not settings.no_color:
        try:
            _show_rich(checks)
            return
        except ImportError:
            pass
    for check in checks:
        print(f"{check.status:<4}  {check.name:<16} {check.text}")
        if check.fix:
            print(f"{'':<22} -> {check.fix}")


def _show_rich(checks: Iterable[Check]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colour = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        text = Text(check.text)
        if check.fix:
            text.append(f"\n-> {check.fix}", style="cyan")
        table.add_row(Text(check.status, style=colour[check.status]), check.name, text)
    Console().print(table)
