"""``fp4dispatch verify --race``: tests that the barriers work, with a control that shows the test can fail.

Runs the chain of :mod:`fp4dispatch.trust.race` twice. With our builds no launch may be wrong. With the same kernels
compiled without barriers (the control), every case must show wrong launches; otherwise the test cannot see the race
and fails.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from fp4dispatch.cli.answers import answer

if TYPE_CHECKING:
    from fp4dispatch.trust.race import RaceReport

ROUNDS, REQUESTS = 50, 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the race."""
    parser.add_argument("--race", action="store_true", help="run the race test and its control instead (SM90 GPU)")
    parser.add_argument("--rounds", type=_count, metavar="N", help=f"of the race (default: {ROUNDS})")
    parser.add_argument("--requests", type=_count, metavar="N", help=f"in flight in a round (default: {REQUESTS})")
    parser.set_defaults(wrong_usage=parser.error)


def run(args: argparse.Namespace) -> int:
    """Run both and print the counts; 0 if ours has no wrong launch and the control shows the race in every case."""
    from fp4dispatch.trust.race import run_race

    rounds, requests = args.rounds or ROUNDS, args.requests or REQUESTS
    ours = run_race(rounds=rounds, requests=requests)
    control = run_race(rounds=rounds, requests=requests, control=True)
    faults = found(ours, control)
    if args.json:
        both = {"ours": ours.to_dict(), "control": control.to_dict()}
        answer(json.dumps({"ok": not faults, "faults": faults, **both}, indent=2))
        return 1 if faults else 0
    print(f"{ours.gpu}: {ours.rounds} rounds of {ours.requests} requests on {ours.streams} streams, under PDL")
    for title, report in (("with barriers", ours), ("control, without barriers", control)):
        print(f"{title}: {report.bad_launches} of {report.launches} launches wrong, in {report.bad_rounds} rounds")
        for case in report.cases:
            print(f"    {case.name}: {case.bad_launches} of {case.launches}")
    for fault in faults:
        print(f"FAULT {fault}")
    if not faults:
        print("the barriers work: the race is there without them and gone with them")
    return 1 if faults else 0


def found(ours: RaceReport, control: RaceReport) -> list[str]:
    """Return the faults of the barriers or of the test; empty if the control races and our builds do not."""
    faults = [f"{case.name}: not run, use more --requests" for case in ours.cases if not case.launches]
    faults += [
        f"{case.name}: {case.bad_launches} wrong launches although it has its barriers: do not use PDL on this machine "
        "(FP4DISPATCH_PDL=off), and report it"
        for case in ours.cases
        if case.bad_launches
    ]
    faults += [
        f"{case.name}: the build without barriers was not caught. A check that cannot see the race proves nothing: "
        "repeat with more --rounds or --requests"
        for case in control.cases
        if not case.bad_launches
    ]
    return faults


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)
