"""Docstrings as Markdown, for mkdocstrings: Sphinx roles become code, parameters that share a text get one each."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":[a-z]+:`(?:~(?:[\w.]+\.)?|)([\w.]+)`")
SHARED = re.compile(r"^(?P<names>\w+(?:, \w+)+)\n(?P<text>(?:(?: {4}.*)?(?:\n|$))+)", re.MULTILINE)


def markdown(docstring: str) -> str:
    """Return a docstring as the site shows it.

    griffe gives all names of one entry the default of the first.
    """

    def apart(match: re.Match[str]) -> str:
        return "".join(f"{name}\n{match['text'].rstrip()}\n" for name in match["names"].split(", ")) + "\n"

    return SHARED.sub(apart, ROLE.sub(r"`\1`", docstring)).rstrip()


class Docstrings(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite that of one object."""
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)
