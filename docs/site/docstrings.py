"""Docstrings as Markdown, for mkdocstrings: Sphinx roles become links, parameters that share a text get one each."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import griffe

ROLE = re.compile(r":[a-z]+:`(?P<short>~?)(?P<path>[\w.]+)`")
SHARED = re.compile(r"^(?P<names>\w+(?:, \w+)+)\n(?P<text>(?:(?: {4}.*)?(?:\n|$))+)", re.MULTILINE)
LITERAL = re.compile(r"::$", re.MULTILINE)


def markdown(docstring: str, whole: Callable[[str], str] = str) -> str:
    """Return a docstring as the site shows it. ``whole`` returns the whole path of a name.

    What is not on the site is no link. griffe gives all names of one entry the default of the first.
    """

    def link(match: re.Match[str]) -> str:
        shown = match["path"].rpartition(".")[2] if match["short"] else match["path"]
        return f'<autoref optional identifier="{whole(match["path"])}"><code>{shown}</code></autoref>'

    def apart(match: re.Match[str]) -> str:
        return "".join(f"{name}\n{match['text'].rstrip()}\n" for name in match["names"].split(", ")) + "\n"

    return SHARED.sub(apart, ROLE.sub(link, LITERAL.sub(":", docstring))).rstrip()


class Docstrings(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite that of one object."""

        def whole(name: str) -> str:
            try:
                return obj.resolve(name)
            except griffe.NameResolutionError:
                return name

        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value, whole)
