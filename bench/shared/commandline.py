"""Command lines of the scripts: what all of them take, in one form. Imports nothing that is large."""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
UNKNOWN = "unknown"
NAME = re.compile(r"python -m (bench\.\w+)")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of a script whose docstring this is: it names the command, and is its help."""
    found = NAME.search(doc or "")
    assert found, "the docstring of a script says how to run it: python -m bench.NAME"
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(f"python -m {found[1]}", description=doc, formatter_class=form)


def takes_record(
    of: argparse.ArgumentParser, *, default: Path | None = None, needed: bool = False, folder: bool = False
) -> None:
    """Add ``--json`` and ``--commit``: where the record goes, and what it says was measured.

    ``needed``: it must be given; ``folder``: it is one.
    """
    where = "folder of the record" if folder else "the record: a file, or a folder, in which kind and card name it"
    of.add_argument("--json", type=Path, metavar="PATH", default=default, required=needed, help=where)
    takes_commit(of)


def takes_commit(of: argparse.ArgumentParser) -> None:
    """Add ``--commit``."""
    of.add_argument("--commit", metavar="HASH", help="what is measured; by default what git has checked out here")


def parse(of: argparse.ArgumentParser, words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read a command line; where a record is to be written and nobody knows the commit, the script ends here."""
    arguments = of.parse_args(words)
    if "commit" in arguments:
        arguments.commit = arguments.commit or checked_out(ROOT) or UNKNOWN
    if getattr(arguments, "json", None) is not None:
        needs_commit(of, arguments)
    return arguments


def needs_commit(of: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End the script where the commit is not known."""
    if arguments.commit == UNKNOWN:
        of.error("--commit HASH is needed: a record says what was measured, and git knows no commit here")


def checked_out(folder: Path) -> str | None:
    """Return the commit of a folder as git names it, with ``-dirty`` where tracked files differ; None where unknown.

    Records are no part of what is measured: the one that a script before this one wrote does not count.
    """
    commit = _git(folder, "describe", "--always", "--exclude=*", "--abbrev=7")
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)bench/results")
    return f"{commit}-dirty" if commit and changed else commit


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None
