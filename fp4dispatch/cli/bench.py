"""``fp4dispatch bench``: check and time our layers and their peers on this GPU.

Every method is checked tile by tile before it is timed. A wrong one prints WRONG and no time. Without a GPU, the
command runs the reference backend on small layers, measures the host time of a call, and lists what it cannot measure.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp4dispatch.cli import bench_random, options
from fp4dispatch.cli.numbers import seconds, share
from fp4dispatch.cli.output import STDOUT, check_files, formats_to_print, write, write_file
from fp4dispatch.errors import InputError
from fp4dispatch.machine.progress import Progress

if TYPE_CHECKING:
    from fp4dispatch.benchmark.methods.base import Card, Method
    from fp4dispatch.benchmark.problems.shapes import Suite
    from fp4dispatch.cli import Subparsers

QUICK_S = 45.0
"""Seconds after which --quick starts no new problem."""
CPU_SUITE = "cpu"
SLOW = "compiles for minutes on first use: ask for it with --methods, e.g. --methods '*'"
CPU_NOTE = (
    "no GPU: kernel times, speed-ups over cuBLAS and rooflines cannot be measured here.\n"
    "Below: the reference backend on this CPU, and the host time of a call."
)


def add_parser(subparsers: Subparsers) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser(
        "bench",
        help="check and time our layers beside their peers",
        description="Exits with 1 if a method of ours is wrong, or, with --compare, slower by more than noise.",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--quick", action="store_true", help="three shapes, in under a minute (the default; cpu without a GPU)"
    )
    what.add_argument(
        "--suite",
        help="quick, targets, full or cpu (fp4dispatch/benchmark/problems/shapes.toml), or random: layers of published "
        "models (models.toml) with random numbers of tokens; --shape and -m replace its own",
    )
    bench_random.add_arguments(parser)
    parser.add_argument("--shape", action="append", metavar="NxK", help="this shape instead; may be repeated")
    parser.add_argument("-m", action="append", type=int, metavar="M", help="these tokens instead; may be repeated")
    parser.add_argument("--methods", action="append", metavar="GLOB", help="these methods beside torch/bf16")
    parser.add_argument(
        "--list", action="store_true", help="list suites and methods, and what each method lacks here; measure nothing"
    )
    parser.add_argument("--device", help="cuda, cuda:1 or cpu; the GPU where torch sees one, by default")
    parser.add_argument(
        "--rounds",
        type=int,
        default=15,
        help="timed replays of each method (default: %(default)s); fewer, but at least 5, if they would take over 2 s",
    )
    parser.add_argument(
        "--budget-s",
        "--seconds",
        type=seconds,
        metavar="S",
        help=f"start no new problem after S seconds (--quick: {QUICK_S:.0f})",
    )
    for name, of in (("json", "everything"), ("csv", "the rows"), ("md", "the tables")):
        said = f"write {of} as {name.upper()} to FILE; without FILE, print it instead of the table"
        parser.add_argument(f"--{name}", nargs="?", const=STDOUT, metavar="FILE", help=said)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw speed-ups by tokens (png, svg, pdf)")
    parser.add_argument(
        "--compare", type=Path, metavar="OLD.json", help="exit with 1 if ours is slower than in OLD.json"
    )
    parser.add_argument(
        "--threshold", type=share, metavar="SHARE", help="noise of --compare beside the spreads (default: 0.05)"
    )
    parser.add_argument("--commit", default="", help="recorded in the result")
    options.know_defaults(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and report; 1 if a method of ours is wrong, the device failed, or --compare finds a regression."""
    from fp4dispatch.benchmark import machine
    from fp4dispatch.benchmark.reports import compare, report

    if args.plot:  # before a run is wasted on it
        from fp4dispatch.benchmark.reports import plot

        plot.check(args.plot)
    check_files(args)
    streams = formats_to_print(args)
    bench_random.check(args)
    if args.threshold is not None and not args.compare:
        raise InputError("--threshold is the noise of --compare: add --compare OLD.json, or leave it out")
    if args.suite == bench_random.SUITE:
        return bench_random.run(args, streams)
    old = report.read(args.compare) if args.compare else None  # read first: a bad file must not waste a run
    card = machine.card(args.device)
    suite, methods, budget = plan(args, card)
    if args.list:
        bench_random.write_listing(args, listing(methods, card), listing_text)
        return 0
    if old is not None:
        problems = [(n, k, m) for n, k in suite.shapes for m in suite.m]
        compare.check(old, machine.facts(card, args.commit)["device"], problems, methods)
    if card.arch is None and not streams:
        print(CPU_NOTE, "\n", flush=True)
    doc = measure(args, card, suite, methods, budget, quiet=bool(streams))
    _write(args, doc, streams)
    failed = bool(doc["stopped"]) or any(
        row["status"] != "ok" and doc["methods"][row["method"]]["ours"] for row in doc["measured"]
    )
    if old is not None:
        comparison = compare.compare(old, doc, compare.THRESHOLD if args.threshold is None else args.threshold)
        print(comparison.text(), file=sys.stderr if streams else sys.stdout)
        failed = failed or not comparison.ok
    return 1 if failed else 0


def plan(args: argparse.Namespace, card: Card) -> tuple[Suite, Sequence[Method], float | None]:
    """Return the problems, the methods and the time budget in seconds."""
    from dataclasses import replace

    from fp4dispatch.benchmark.methods import base as methods
    from fp4dispatch.benchmark.methods import roster
    from fp4dispatch.benchmark.problems import shapes

    named = args.suite or ("quick" if card.arch else CPU_SUITE)
    suite = shapes.catalogue().suite(named)
    if card.arch is None and named != CPU_SUITE and not args.list:
        raise InputError(
            f"the suite {named} is for a GPU, and this is a CPU: run `fp4dispatch bench` here (suite {CPU_SUITE}), or "
            "name single shapes with --shape"
        )
    if args.shape:
        suite = replace(suite, shapes=tuple(parse_shape(text) for text in args.shape))
    if args.m:
        suite = replace(suite, m=tuple(sorted(set(args.m))))
    if min(suite.m) < 1 or args.rounds < 2:
        raise InputError(f"-m {min(suite.m)} --rounds {args.rounds}: need at least one token and two rounds")
    every = roster.everything()
    chosen = methods.choose(every, args.methods) if args.methods else tuple(m for m in every if not m.slow_start)
    budget = args.budget_s if args.budget_s is not None else QUICK_S if suite.name == "quick" else None
    return suite, chosen, budget


def parse_shape(text: str) -> tuple[int, int]:
    """Return (N, K) of e.g. ``4096x14336``."""
    found = re.fullmatch(r"([1-9]\d{0,6})[x,]([1-9]\d{0,6})", text.strip().lower())
    if not found:
        raise InputError(f"--shape {text!r}: need NxK, e.g. 4096x14336")
    n, k = int(found[1]), int(found[2])
    if k % 16:
        raise InputError(f"--shape {text!r}: K={k} is not a multiple of 16, the NVFP4 block")
    return n, k


def measure(
    args: argparse.Namespace, card: Card, suite: Suite, methods: Sequence[Method], budget: float | None, quiet: bool
) -> dict[str, Any]:
    """Run everything and return the document; also write it to ``--json`` after each shape."""
    from dataclasses import replace

    from fp4dispatch.benchmark import host, machine, roofline
    from fp4dispatch.benchmark import run as runs
    from fp4dispatch.benchmark.methods.roster import everything
    from fp4dispatch.benchmark.reports import report

    engine = machine.engine_for(card)
    with Progress("measuring", len(suite.shapes) * len(suite.m), unit="problems", quiet=quiet) as progress:

        def say(done: int, text: str) -> None:
            progress.update(done, note=text)

        def keep(outcome: runs.Outcome) -> None:
            """Write the rows so far, so that a killed run leaves its results."""
            if args.json not in (None, STDOUT):
                done = len(suite.shapes) * len(suite.m) - len(outcome.left)
                part = replace(outcome, stopped=outcome.stopped or f"after {done} problems this run had not ended yet")
                write_file("json", args.json, report.json_text(made(part, [])))

        def made(outcome: runs.Outcome, calls: Sequence[host.HostRow]) -> dict[str, Any]:
            return report.document(suite, machine.facts(card, args.commit), runner.peaks, methods, outcome, calls)

        runner = runs.Runner(card, engine, methods, budget_s=budget, say=say, keep=keep, rounds=args.rounds)
        say(0, "what the card can do at best")
        runner.peaks = roofline.measure(card, engine)
        outcome = runner.run(suite.shapes, suite.m)
        calls = [] if outcome.stopped else host.measure(card, engine)
    if not args.methods:
        slow = [method for method in everything() if method.slow_start]
        outcome.absent |= {method.name: method.lacks(card) or SLOW for method in slow}
    return made(outcome, calls)


def _write(args: argparse.Namespace, doc: dict[str, Any], streams: Sequence[str]) -> None:
    from fp4dispatch.benchmark.reports import plot, report

    write(args, {"json": report.json_text, "csv": report.csv_text, "md": report.markdown}, doc)
    if not streams:
        print(report.text(doc))
    if args.plot:
        plot.draw(doc, args.plot)


def listing(methods: Sequence[Method], card: Card) -> dict[str, Any]:
    """Return the suites, and the methods with what each one lacks on this GPU."""
    from fp4dispatch.benchmark.problems import shapes

    suites = [
        {"name": s.name, "shapes": len(s.shapes), "m": len(s.m), "why": s.why}
        for s in shapes.catalogue().suites.values()
    ]
    return {"suites": suites, "methods": bench_random.listed(methods, card)}


def listing_text(found: dict[str, Any]) -> str:
    """Return a listing as lines."""
    lines = [f"{s['name']:<24}{s['shapes']} shapes, {s['m']} M: {s['why']}" for s in found["suites"]]
    return "\n".join([*lines, *bench_random.listed_text(found)])
