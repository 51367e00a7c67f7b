"""Try the proof of the barriers on every shipped kernel and every mutant, and keep what it says. No GPU is needed.

    python -m bench.mutants --commit HASH                      # all that the record does not hold yet
    python -m bench.mutants --commit HASH --only sources --seconds 600

Three parts: ``small`` (small kernels with one fault each), ``builds`` (every library of the manifest with barriers, and
faults in its machine code), ``sources`` (faults in the sources of shipped kernels). All of it takes two hours on two
cores, most of it nvcc. A run that is stopped goes on where it was. Rows of another prover, or of other sources, are
made anew. Exits with 1 if a mutant was accepted or a shipped kernel refused.

docs/proof.md shows the tables: ``python -m tests.docs``.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

from bench.shared import commandline
from bench.shared.commandline import ROOT
from fp4dispatch.benchmark import machine
from fp4dispatch.benchmark.reports import records
from fp4dispatch.jit import kernels
from fp4dispatch.jit.catalog.manifest import installed
from fp4dispatch.jit.prove import prover_sha256
from fp4dispatch.jit.store.digests import sources_sha256
from tests.proof import cases

RESULTS = ROOT / "bench" / "results" / "mutants-x86_64.json"
PARTS = ("small", "builds", "sources")
Row = dict[str, Any]


def made_from() -> dict[str, str]:
    """Return the hashes that a row depends on: the prover's, and of everything that is compiled."""
    proof = ROOT / "tests" / "proof"
    read = [installed().csrc, ROOT / "jit_flags", *(proof / f"{name}.py" for name in ("small", "shipped", "listings"))]
    return {"prover_sha256": prover_sha256(), "sources_sha256": sources_sha256(read)}


def small_rows(target: str) -> list[Row]:
    """Return one row a class for a target; ``good`` kernels must be accepted."""
    with tempfile.TemporaryDirectory() as folder:
        found = cases.judge_small(target, Path(folder))
    rows: dict[str, Row] = {}
    for name, refused in found.items():
        kind = name.split("__")[0]
        row = rows.setdefault(
            kind, {"id": f"{kind}/{target}", "class": kind, "target": target, "tried": 0, "refused": 0, "wrong": []}
        )
        row["tried"] += 1
        row["refused"] += bool(refused)
        row["wrong"] += [name] if bool(refused) == (kind == "good") else []
    return list(rows.values())


def build_row(build: cases.Build) -> list[Row]:
    """Return the row of a shipped library."""
    found = cases.judge_shipped(build)
    wrong = [*found.accepted_mutants, *([] if found.accepted else ["refused"])]
    row = {"id": build.id, **build._asdict(), "accepted": found.accepted, "kernels": found.kernels}
    return [{**row, "tried": dict(found.mutants), "wrong": wrong}]


def source_row(case: cases.Planted) -> list[Row]:
    """Return the row of a fault in the sources; ``refused`` counts kernels of the library."""
    found = cases.judge_planted(case)
    reasons = [why for refused in found for why in refused]
    control = case.fault == cases.CONTROL
    row = {"id": case.id, "family": case.family, "class": case.kind, **case.build._asdict()}
    row |= {"kernels": len(found), "refused": sum(map(bool, found)), "why": reasons[0][:120] if reasons else ""}
    return [{**row, "wrong": [case.id] if bool(reasons) == control else []}]


def wanted(part: str, cached: bool) -> dict[str, Callable[[], list[Row]]]:
    """Return what makes the rows of a part, by the id of one of them. ``cached``: no build that must be compiled."""
    if part == "small":
        return {f"good/{target}": partial(small_rows, target) for target in cases.SMALL_TARGETS}
    if part == "builds":
        found = [build for build in cases.builds() if not cached or kernels.find(*build)]
        return {build.id: partial(build_row, build) for build in found}
    return {case.id: partial(source_row, case) for case in cases.spread(cases.planted())}


def stored(path: Path) -> dict[str, dict[str, Row]]:
    """Return the rows that are still valid, by part and id."""
    record = records.read(path) if path.exists() else {}
    if any(record.get(name) != value for name, value in made_from().items()):
        return {part: {} for part in PARTS}
    return {part: {row["id"]: row for row in record[part]} for part in PARTS}


def run(
    todo: Iterable[tuple[str, Callable[[], list[Row]]]],
    rows: dict[str, dict[str, Row]],
    commit: str,
    path: Path,
    seconds: float,
    jobs: int,
) -> None:
    """Make the rows of ``todo``, and write the record after each."""
    todo, facts = iter(todo), machine.facts(machine.card("cpu"), commit)
    end, running = time.monotonic() + seconds, dict[Future[list[Row]], str]()
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:  # the proof is work in Python
        while True:
            while len(running) < jobs and time.monotonic() < end and (following := next(todo, None)):
                running[pool.submit(following[1])] = following[0]
            if not running:
                return
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                part = running.pop(done)
                for row in done.result():
                    rows[part][row["id"]] = row
                    print(json.dumps(row), flush=True)
            body = {part: sorted(found.values(), key=lambda row: row["id"]) for part, found in rows.items()}
            records.write(path, "mutants", facts, {**made_from(), **body})


def main(words: Sequence[str] | None = None) -> None:
    """Parse the command line."""
    parser = commandline.parser(__doc__)
    commandline.takes_record(parser, default=RESULTS)
    parser.add_argument("--only", choices=PARTS, action="append", help="this part alone")
    parser.add_argument("--cached", action="store_true", help="of the libraries, those alone that a cache holds")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start nothing new after this time")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    arguments = commandline.parse(parser, words)
    rows = stored(arguments.json)
    todo = [
        (part, make)
        for part in arguments.only or PARTS
        for key, make in wanted(part, arguments.cached).items()
        if key not in rows[part]
    ]
    run(todo, rows, arguments.commit, arguments.json, arguments.seconds, arguments.jobs)
    wrong = [name for found in rows.values() for row in found.values() for name in row["wrong"]]
    sys.exit("judged wrongly:\n" + "\n".join(wrong) if wrong else 0)


if __name__ == "__main__":
    main()
