"""The command line: ``fp4dispatch`` and ``python -m fp4dispatch``, one file per subcommand.

A subcommand is a module of this package, named like the command, with two functions::

    def add_parser(subparsers) -> None:   # subparsers.add_parser("name", help=HELP["name"]) and its arguments
    def run(args: argparse.Namespace) -> int:   # the exit code: 0 ok, 1 failed check

one line in ``HELP``, and examples in :mod:`fp4dispatch.cli.help_text`. It prints JSON by
:func:`fp4dispatch.cli.answers.answer`: with ``--json``, all else that is printed goes to standard error. Only the
module of the given command is imported, so ``doctor`` and ``env`` work even if torch is broken. Wrong usage exits with
2 (argparse). An error of this package prints its text and exits with 1. If standard output cannot be written, the exit
code is 1 too.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from fp4dispatch.cli import answers, help_text, output
from fp4dispatch.errors import Fp4DispatchError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

OK, FAILED, USAGE = 0, 1, 2
COMPLETION = "--print-completion"

HELP: dict[str, str] = {
    "bench": "check and time our layers beside their peers",
    "build": "compile kernels ahead of time, for any GPU",
    "cache": "list, prune or clear the compiled kernels",
    "demo": "quantise a real language model: answer, quality, memory, speed, and who runs each layer and why",
    "doctor": "check this machine: every failing check says how to fix it",
    "env": "print versions, GPUs and settings, ready to paste into an issue",
    "explain": "show which backend would run a GEMM, on this machine or any other, and why",
    "quantize": "quantise a model directory to NVFP4 or FP8",
    "tune": "time the backends of a GEMM on this GPU, so that auto uses the fastest",
    "verify": "prove the barriers of the compiled kernels again",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Parameters
    ----------
    argv
        Arguments without the program name; ``sys.argv[1:]`` by default.

    Raises
    ------
    SystemExit
        From argparse: 0 after ``--help`` or ``--version``, 2 after wrong usage.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with output.checked():
            return _run(words, for_good=argv is None)
    except output.OutputLost as lost:
        if not isinstance(lost.__cause__, BrokenPipeError):  # `fp4dispatch env | head` is no error
            with output.checked():
                print(f"fp4dispatch: standard output cannot be written: {lost}", file=sys.stderr)
        return FAILED


def _run(words: list[str], *, for_good: bool) -> int:
    """Run a command; ``for_good``: it is the last thing that this process does."""
    if not words:
        _parser(()).print_help()
        return OK
    if words[0] == COMPLETION:
        return _print_completion(words[1:])
    command = words[0] if words[0] in HELP else None
    try:
        args = _parser((command,) if command else ()).parse_args(words)
        command_module = importlib.import_module(f"{__name__}.{args.command}")
        with answers.kept(for_good=for_good) if output.prints_data(args) else nullcontext():
            code = command_module.run(args)
    except Fp4DispatchError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return FAILED
    except ImportError as error:
        print(f"{error}\n  run `fp4dispatch doctor` to see what is missing or broken", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT, as shells do
    return int(code)


def _parser(commands: Collection[str]) -> argparse.ArgumentParser:
    """Build the parser; only ``commands`` get their own arguments, the others stay one line of help."""
    from fp4dispatch import __version__

    parser = argparse.ArgumentParser(
        prog="fp4dispatch", description="NVFP4 and FP8 linear layers for PyTorch: correct first, then fast."
    )
    parser.add_argument("--version", action="version", version=f"fp4dispatch {__version__}")
    parser.add_argument(COMPLETION, metavar="SHELL", help="print a completion script for bash, zsh or tcsh")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, line in HELP.items():
        if name in commands:
            with answers.kept():  # some import torch, and that what is registered with it
                command_module = importlib.import_module(f"{__name__}.{name}")
            command_module.add_parser(subparsers)
            help_text.complete(subparsers.choices[name], name)
        else:
            subparsers.add_parser(name, help=line)
    return parser


def _print_completion(words: list[str]) -> int:
    """Print the completion script of a shell, made by shtab (https://docs.iterative.ai/shtab)."""
    try:
        import shtab
    except ImportError:
        print(f"{COMPLETION} needs shtab\n  fix: pip install 'shtab>=1.7'", file=sys.stderr)
        return FAILED
    if len(words) != 1 or words[0] not in shtab.SUPPORTED_SHELLS:
        print(f"usage: fp4dispatch {COMPLETION} {{{','.join(shtab.SUPPORTED_SHELLS)}}}", file=sys.stderr)
        return USAGE
    print(shtab.complete(_parser(HELP), shell=words[0]))
    return OK
