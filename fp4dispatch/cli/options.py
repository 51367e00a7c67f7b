"""Which options of a command were given: those that have another value than the parser's default."""

from __future__ import annotations

import argparse
from collections.abc import Iterable


def know_defaults(parser: argparse.ArgumentParser) -> None:
    """Let :func:`given` compare with what this parser sets where nothing is given."""
    parser.set_defaults(default_of=parser.get_default)


def given(args: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Return the options with these attributes of ``args`` that were given, as a user writes them."""
    return [_flag(name) for name in names if getattr(args, name) != args.default_of(name)]


def _flag(name: str) -> str:
    """Return how a user writes the option of an attribute: ``--out-dtype``, ``-m``."""
    return f"--{name.replace('_', '-')}" if len(name) > 1 else f"-{name}"
