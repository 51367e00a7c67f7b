"""The command line as a page: every command with its arguments and examples, from the parsers themselves."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

from fp4dispatch import cli
from fp4dispatch.cli import help_text


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield each command and its parser, in the order of ``fp4dispatch --help``."""
    (actions,) = (a for a in cli._parser(cli.HELP)._actions if isinstance(a, argparse._SubParsersAction))
    yield from actions.choices.items()


def groups(parser: argparse.ArgumentParser) -> Iterator[tuple[str, list[argparse.Action]]]:
    """Yield the arguments of a command, without ``--help``: those without a dash first, then each titled group."""
    plain, own = parser._action_groups[:2], parser._action_groups[2:]
    parts = [("", [action for group in plain for action in group._group_actions])]
    parts += [(str(group.title), group._group_actions) for group in own]
    for title, actions in parts:
        if shown := [a for a in actions if not isinstance(a, argparse._HelpAction) and a.help != argparse.SUPPRESS]:
            yield title, shown


def value(action: argparse.Action) -> str:
    """Return what stands behind an option, as ``--help`` says it; empty for a switch."""
    if action.nargs == 0:
        return ""
    one = f"{{{','.join(map(str, action.choices))}}}" if action.choices else str(action.metavar or action.dest.upper())
    return {None: one, "?": f"[{one}]", "*": f"[{one} ...]", "+": f"{one} ..."}.get(action.nargs, one)


def row(action: argparse.Action, prog: str) -> str:
    """Return one argument as a row of the table."""
    shown = [f"{name} {value(action)}".rstrip() for name in action.option_strings] or [value(action)]
    if len(shown) > 1:  # the value once, behind the last name
        shown = [*action.option_strings[:-1], shown[-1]]
    said = (action.help or "") % dict(vars(action), prog=prog)
    if action.required and action.option_strings:
        said = f"needed; {said}".removesuffix("; ")
    if isinstance(action.default, str) and action.choices and "default" not in said:
        said = f"{said}; default: {action.default}".removeprefix("; ")
    names = ", ".join(f"`{name}`" for name in shown)
    if "|" in names + said:
        raise SystemExit(f"{names}: a | would end the cell of the table")
    return f"| {names} | {prose(said)} |"


def prose(text: str) -> str:
    """Return a text of ``--help`` as Markdown: patterns are no emphasis, and what a user types is code."""
    text = " ".join(text.split()).replace("*", "\\*").replace("<", "&lt;")
    return re.sub(r"(?<![\w`-])(--[a-z][\w-]*|FP4DISPATCH_[A-Z0-9_]+(?:=\w+)?)", r"`\1`", text)


def section(name: str, parser: argparse.ArgumentParser) -> str:
    """Return one command: what it does, examples, arguments."""
    lines = [f"## {name}", "", prose(parser.description or ""), "", "```bash", *help_text.EXAMPLES[name], "```"]
    for title, actions in groups(parser):
        lines += ["", f"With `{title}`:"] if title else []
        lines += ["", "| argument | meaning |", "|---|---|", *(row(action, parser.prog) for action in actions)]
    return "\n".join(lines)


def commands() -> str:
    """Return the table of commands, then each."""
    found = dict(parsers())
    lines = ["| command | what it does |", "|---|---|"]
    lines += [f"| [`{name}`](#{name}) | {cli.HELP[name]} |" for name in found]
    return "\n\n".join(["\n".join(lines), *(section(name, parser) for name, parser in found.items())])
