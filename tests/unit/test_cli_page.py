"""The page about the command line: current, complete, and without what a table cannot hold."""

from __future__ import annotations

import argparse

import pytest

from fp4dispatch.cli import HELP
from tests import docs
from tests.site import cli

PAGE = docs.ROOT / "docs" / "reference" / "cli.md"
PARSERS = dict(cli.parsers())


def section(name: str) -> str:
    """What the page says about a command."""
    return PAGE.read_text("utf-8").split(f"\n## {name}\n", 1)[1].split("\n## ", 1)[0]


def test_the_page_is_current():
    for path, text in docs.filled("docs/reference/cli.md", commands=cli.commands()).items():
        assert path.read_text("utf-8") == text, "run `python -m tests.docs`"


@pytest.mark.parametrize("name", sorted(HELP))
def test_every_argument_is_on_the_page_and_has_a_help(name):
    text = section(name)
    for action in PARSERS[name]._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        assert action.help, f"{name} {action.option_strings or action.dest} has no help"
        for word in action.option_strings or [cli.value(action)]:
            assert f"| `{word}" in text or f", `{word}" in text, word
    assert f"fp4dispatch {name}" in text


def made(*names, **options):
    parser = argparse.ArgumentParser(prog="x")
    return cli.row(parser.add_argument(*names, **options), "x")


def test_rows():
    row = made("-s", "--size", metavar="N", default=3, help="of *.gate, as --big (default: %(default)s)")
    assert row == "| `-s`, `--size N` | of \\*.gate, as `--big` (default: 3) |"
    assert made("--on", action="store_true", help="x") == "| `--on` | x |"
    assert made("op", nargs="?", choices=("a", "b"), help="what") == "| `[{a,b}]` | what |"
    assert made("--way", choices=("a", "b"), default="a", help="how") == "| `--way {a,b}` | how; default: a |"
    assert made("--size", required=True, help="how many") == "| `--size SIZE` | needed; how many |"
    with pytest.raises(SystemExit, match="would end the cell"):
        made("--x", help="a|b")


def test_groups_have_their_title():
    parser = argparse.ArgumentParser()
    parser.add_argument("--a")
    parser.add_argument("--hidden", help=argparse.SUPPRESS)
    parser.add_argument_group("--suite random").add_argument("--b")
    found = {title: [action.dest for action in actions] for title, actions in cli.groups(parser)}
    assert found == {"": ["a"], "--suite random": ["b"]}
