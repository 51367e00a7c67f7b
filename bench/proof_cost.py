"""What the proof and the strict checks add to a build: CPU seconds of each family of kernels, cold. No GPU is needed.

    python -m bench.proof_cost --commit HASH                        # all that the record does not hold yet
    python -m bench.proof_cost --commit HASH --only w4a16_small     # ids that start with this, again

Each build runs in a process of its own, into an empty cache. Counted are CPU seconds of it and of all that it starts:
other work on the machine matters little. ``compile``: the compiler, and nothing else. ``proof``: disassembly and
judgement. ``checks``: everything else between the call and the published kernel, such as hashes of all files that the
compiler read, owners and modes of folders, versions of tools. Some of that any cache would need, so the share is an
upper bound. Per call both cost nothing (tests/unit/test_proof_cost.py).
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from bench.shared import commandline
from bench.shared.commandline import ROOT
from fp4dispatch.benchmark import machine
from fp4dispatch.benchmark.reports import records
from fp4dispatch.jit import building, kernels, prove
from fp4dispatch.jit.catalog.manifest import installed
from fp4dispatch.jit.store.cache import Cache

RESULTS = ROOT / "bench" / "results" / "proof-cost-x86_64.json"
TARGETS = ("90a", "120f")


def builds() -> list[tuple[str, str, str]]:
    """Return the first variant of every kernel that compiles in seconds, for each of two targets that it has."""
    return [
        (kernel.name, next(iter(kernel.variants)), target)
        for kernel in installed().kernels.values()
        if not kernel.cutlass
        for target in TARGETS
        if target in kernel.targets
    ]


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its ended children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def facts(kernel: str, variant: str, target: str, cache: Path) -> dict[str, Any]:
    """Build one kernel into an empty cache; return the CPU seconds of its parts."""
    spent = {"compile": 0.0, "proof": 0.0}

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            started = cpu_seconds()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] += cpu_seconds() - started

        return run

    started = cpu_seconds()
    with (
        mock.patch.object(building, "compile_jobs", counted("compile", building.compile_jobs)),
        mock.patch.object(prove, "prove", counted("proof", prove.prove)),
    ):
        built = kernels.build(kernel, variant, target, cache=Cache(cache))
    total = cpu_seconds() - started
    if built.cached or built.proof is None or min(spent.values()) <= 0:
        raise SystemExit(f"{built.entry.name}: this counts nothing unless it is built and proved now")
    return {
        "id": f"{kernel}/{variant}/{target}",
        "kernels": len(built.proof.kernels),
        "total_s": round(total, 2),
        "compile_s": round(spent["compile"], 2),
        "proof_s": round(spent["proof"], 2),
        "checks_s": round(total - sum(spent.values()), 2),
        "share": round(1 - spent["compile"] / total, 4),
    }


def run(only: str, commit: str, folder: Path, out: Path) -> None:
    """Measure the chosen builds and write the record after each, so that a long run can be stopped."""
    rows = {row["id"]: row for row in records.read(out)["rows"]} if out.exists() else {}
    for build in builds():
        key = "/".join(build)
        if not key.startswith(only) or (not only and key in rows):
            continue
        command = [sys.executable, "-m", "bench.proof_cost", "--commit", commit, "--facts", *build]
        command.append(str(folder.resolve() / key.replace("/", "-")))
        answer = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
        rows[key] = json.loads(answer.stdout.splitlines()[-1])
        print(json.dumps(rows[key]), flush=True)
        ordered = [rows[name] for name in sorted(rows)]
        records.write(out, "proof cost", machine.facts(machine.card("cpu"), commit), {"rows": ordered})


def main(words: Sequence[str] | None = None) -> None:
    """Parse the command line."""
    parser = commandline.parser(__doc__)
    commandline.takes_record(parser, default=RESULTS)
    parser.add_argument("--only", default="", help="ids that start with this, measured again")
    parser.add_argument("--keep", type=Path, help="folder for the caches, one a build (default: a temporary one)")
    parser.add_argument("--facts", nargs=4, help=argparse.SUPPRESS)
    arguments = commandline.parse(parser, words)
    if arguments.facts:
        kernel, variant, target, cache = arguments.facts
        print(json.dumps(facts(kernel, variant, target, Path(cache))))
    else:
        with tempfile.TemporaryDirectory() as folder:
            run(arguments.only, arguments.commit, arguments.keep or Path(folder), arguments.json)


if __name__ == "__main__":
    main()
