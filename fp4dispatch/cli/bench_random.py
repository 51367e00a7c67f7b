"""``fp4dispatch bench --suite random``: layers of published models with random numbers of tokens.

What is drawn depends on the seed only. A new seed each time shows speed on problems that nothing was fitted to.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fp4dispatch.cli import options
from fp4dispatch.cli.output import STDOUT, write, write_file
from fp4dispatch.errors import InputError
from fp4dispatch.machine.progress import Progress

if TYPE_CHECKING:
    from fp4dispatch.benchmark.methods.base import Card, Method
    from fp4dispatch.benchmark.methods.launches import Family
    from fp4dispatch.benchmark.problems.sampling import Sample

SUITE = "random"
PROBLEMS, SECONDS = 200, 480.0
FORMATS = ("nvfp4", "tensor", "row", "block128")
SLOW = "compiles for minutes on first use: ask for it with --methods, e.g. --methods '*'"
_ONLY_HERE = ("seed", "problems", "formats", "no_regret")
_NOT_HERE = ("shape", "m", "compare", "plot", "threshold", "csv")
_OF_MEASURING = ("shape", "m", "budget_s", "compare", "threshold", "rounds", "commit", "no_regret")
"""Options that ``--list`` has no use for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that only this suite has."""
    group = parser.add_argument_group("--suite random")
    group.add_argument("--seed", type=int, help="of the problems; needed")
    group.add_argument("--problems", type=int, metavar="N", help=f"how many (default: {PROBLEMS})")
    group.add_argument("--formats", metavar="NAME,...", help=f"of weights (default: {','.join(FORMATS)})")
    group.add_argument(
        "--no-regret", action="store_true", help="time no other builds and launch shapes of ours beside the layers"
    )


def check(args: argparse.Namespace) -> None:
    """Refuse arguments that do not go with the suite.

    Raises
    ------
    InputError
        For an argument of the random suite without it, or another suite's with it.
    """
    names = _NOT_HERE if args.suite == SUITE else _ONLY_HERE
    given = options.given(args, names)
    if args.suite == SUITE and given:
        raise InputError(f"{', '.join(given)}: not with --suite random, which draws its problems from --seed")
    if given:
        raise InputError(f"{', '.join(given)}: only with --suite random")


def run(args: argparse.Namespace, streams: Sequence[str]) -> int:
    """Measure and report; 1 if something of ours is wrong, or the device failed."""
    from fp4dispatch.benchmark import machine
    from fp4dispatch.benchmark.reports import random_report, records

    card = machine.card(args.device)
    sample, methods, families = plan(args, card)
    if args.list:
        write_listing(args, listing(sample, methods, card), listing_text)
        return 0
    doc = measure(args, card, sample, methods, families, quiet=bool(streams))
    write(args, {"json": records.text, "md": random_report.markdown}, doc)
    if not streams:
        print(random_report.text(doc))
    rows = (*doc["measured"], *doc["launches"])
    ours = (row for row in rows if "launch" in row or doc["methods"][row["method"]]["ours"])
    return 1 if doc["stopped"] or any(row["status"] != "ok" for row in ours) else 0


def plan(args: argparse.Namespace, card: Card) -> tuple[Sample, Sequence[Method], tuple[Family, ...]]:
    """Return the problems, the methods, and the families of launches.

    Raises
    ------
    InputError
        Without a GPU or a seed, for an unknown format, or a number of problems or rounds that is too low.
    """
    from fp4dispatch.benchmark.methods import base, launches, roster
    from fp4dispatch.benchmark.problems import sampling
    from fp4dispatch.problem.arch import SM90

    if card.arch is None and not args.list:
        raise InputError("the suite random is for a GPU, and this is a CPU: run `fp4dispatch bench` here")
    if args.seed is None:
        raise InputError("--suite random needs --seed S; take a new one, nothing was fitted to")
    if args.rounds < 2:
        raise InputError(f"--rounds {args.rounds}: need at least two rounds")
    formats = FORMATS if args.formats is None else tuple(args.formats.split(","))
    if unknown := [name for name in formats if name not in FORMATS]:
        raise InputError(f"--formats {','.join(unknown)}: need some of {','.join(FORMATS)}")
    every = [method for method in roster.for_random() if method.format in (*formats, "bf16")]
    quick = [method for method in every if not method.slow_start or method.name == roster.HUMMING]
    methods = base.choose(every, args.methods) if args.methods else quick
    sample = sampling.sample(args.seed, PROBLEMS if args.problems is None else args.problems)
    timed = card.arch == SM90 and not args.no_regret
    return sample, methods, tuple(f for f in launches.FAMILIES if timed and f.format in formats)


def listing(sample: Sample, methods: Sequence[Method], card: Card) -> dict[str, Any]:
    """Return the problems of a seed, and the methods with what each one lacks on this GPU."""
    problems = [{"n": layer.n, "k": layer.k, "m": list(ms), "owner": layer.owner} for layer, ms in sample.shapes]
    return {"problems": problems, "methods": listed(methods, card)}


def listing_text(found: dict[str, Any]) -> str:
    """Return a listing as lines."""
    lines = [f"{p['n']}x{p['k']} M={','.join(map(str, p['m']))}: {p['owner']}" for p in found["problems"]]
    return "\n".join([*lines, *listed_text(found)])


def listed(methods: Sequence[Method], card: Card) -> list[dict[str, str]]:
    """Return the methods with what each one lacks on this GPU."""
    return [{"name": method.name, "what": method.what, "lacks": method.lacks(card)} for method in methods]


def listed_text(found: dict[str, Any]) -> list[str]:
    """Return the methods of a listing as lines."""
    return [
        f"{m['name']:<24}{m['what']}" + (f"; not here: {m['lacks']}" if m["lacks"] else "") for m in found["methods"]
    ]


def write_listing(args: argparse.Namespace, found: dict[str, Any], text: Callable[[dict[str, Any]], str]) -> None:
    """Print what ``--list`` found, and write it as ``--json`` says. Nothing is measured, so no other file is written.

    Raises
    ------
    InputError
        Where another format is to be printed.
    """
    if STDOUT in (args.csv, args.md):
        raise InputError("--list goes with --json alone: there are no rows for --csv and --md")
    if args.json != STDOUT:
        print(text(found))
    write(args, {"json": lambda document: json.dumps(document, indent=2) + "\n"}, found)
    for name in ("csv", "md", "plot"):
        if (target := getattr(args, name)) is not None:
            print(f"--{name} {target}: not written, as --list measures nothing", file=sys.stderr)
    if unused := options.given(args, _OF_MEASURING):
        print(f"{', '.join(unused)}: not used, as --list measures nothing", file=sys.stderr)


def measure(
    args: argparse.Namespace,
    card: Card,
    sample: Sample,
    methods: Sequence[Method],
    families: Sequence[Family],
    quiet: bool,
) -> dict[str, Any]:
    """Run everything and return the document; also write it to ``--json`` after each shape."""
    from dataclasses import replace

    from fp4dispatch import jit
    from fp4dispatch.benchmark import machine, random_run, roofline
    from fp4dispatch.benchmark.methods import launches, roster
    from fp4dispatch.benchmark.reports import random_report, records
    from fp4dispatch.benchmark.run import Outcome

    engine = machine.engine_for(card)
    if card.device.type == "cuda" and families and card.arch:
        jit.build_together(launches.builds(families), card.arch)
    seconds = SECONDS if args.budget_s is None else args.budget_s
    with Progress("measuring", sample.problems, unit="problems", quiet=quiet) as progress:

        def say(done: int, text: str) -> None:
            progress.update(done, note=text)

        def made(outcome: Outcome) -> dict[str, Any]:
            facts = machine.facts(card, args.commit)
            return random_report.document(
                sample, facts, runner.peaks, methods, outcome, runner.tried, runner.formats, runner.refused
            )

        def keep(outcome: Outcome) -> None:
            """Write the rows so far, so that a killed run leaves its results."""
            if args.json not in (None, STDOUT):
                done = sample.problems - len(outcome.left)
                part = replace(outcome, stopped=outcome.stopped or f"after {done} problems this run had not ended yet")
                write_file("json", args.json, records.text(made(part)))

        runner = random_run.RandomRunner(
            card, engine, methods, budget_s=seconds, say=say, keep=keep, rounds=args.rounds
        )
        with runner.ahead(sample) as ahead:
            say(0, "what the card can do at best")
            runner.peaks = roofline.measure(card, engine)
            outcome = runner.run_sample(sample, families)
    for lost in ahead.lost:
        print(f"{lost}; the run waited for what was missing", file=sys.stderr)
    if not args.methods:
        left_out = [method for method in roster.for_random() if method.slow_start and method not in methods]
        known = {method.name for method in methods}
        outcome.absent |= {m.name: m.lacks(card) or SLOW for m in left_out if m.name not in known}
    return made(outcome)
