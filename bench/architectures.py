"""Whether architectures of Transformers keep their results: tiny models of classes drawn at random, on a CPU.

    python -m bench.architectures --json bench/results --seconds 480
    python -m bench.architectures --seed 3 --classes 40
    python -m bench.architectures --only llama bert

A class is built from its default configuration, made small by rules (``bench/shared/tiny_models.py``), and quantised to
NVFP4 and to FP8 by row. It must give the outputs of the same model with dequantised weights, replace or name every
``nn.Linear``, give the same with fused projections, and survive ``state_dict``, ``save_pretrained``, quantising while
loading, and ``generate`` (``bench/shared/model_checks.py``). A typed error counts as refused. Another error, or another
result, is wrong, and the script exits with 1. Each class runs in a process of its own.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from bench.shared import commandline, model_checks, tiny_models
from bench.shared.apart import quietly
from fp4dispatch.benchmark import machine
from fp4dispatch.benchmark.reports import records

CLASSES = 40
LIMIT = 120.0
"""Seconds that one class may take."""
LIBRARIES = ("transformers", "torch", "safetensors", "tokenizers", "accelerate")
Row = dict[str, Any]


def drawn(seed: int, count: int | None, only: Sequence[str]) -> list[tuple[str, str]]:
    """Return the classes to try, in their order: all of the types in ``only``, else ``count`` at random (None: all)."""
    every = tiny_models.classes()
    if only:
        return [each for each in every if each[0] in only]
    random.Random(seed).shuffle(every)
    return every[:count]


def rows(classes: Sequence[tuple[str, str]], seconds: float | None) -> Iterator[Row]:
    """Yield what came of each class; none starts after ``seconds``."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.shared.apart"])
    start = time.monotonic()
    for model_type, name in classes:
        if seconds is not None and time.monotonic() - start > seconds:
            return
        yield apart(context, quietly, model_type, name, LIMIT)


def apart(context: Any, work: Callable[[Connection, str, str], None], model_type: str, name: str, limit: float) -> Row:
    """Run one class in a process of its own and return its row; it is ended after ``limit`` seconds."""
    begun = time.monotonic()
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(there, model_type, name))
    process.start()
    there.close()
    row = model_checks.Outcome(model_type, name)
    try:
        found: Row = here.recv() if here.poll(limit) else _without(row, "stopped", f"took over {limit:.0f} s")
    except EOFError:
        process.join()
        found = _without(row, "wrong", f"the process ended with {process.exitcode}")
    process.join(0 if found["outcome"] == "stopped" else 10)
    process.kill()
    process.join()
    here.close()
    return found | {"seconds": round(time.monotonic() - begun, 1)}


def _without(row: model_checks.Outcome, outcome: str, why: str) -> Row:
    row.note(outcome, why)
    return row.row()


def _said(row: Row) -> str:
    errors = " ".join(f"{name} {error:.0e}" for name, error in row["errors"].items())
    return f"{row['outcome']:<10} {row['type']} {row['cls']} {row['layers']}/{row['linears']} {errors} {row['why']}"


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in LIBRARIES}


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = commandline.parser(__doc__)
    parser.add_argument("--seed", type=int, help="of the draw; by default a new one, which is printed and recorded")
    parser.add_argument("--classes", type=int, metavar="N", help=f"how many; {CLASSES}, or without end with --seconds")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="TYPE", help="all classes of these model types instead"
    )
    parser.add_argument("--seconds", type=float, metavar="S", help="start no class after this time")
    commandline.takes_record(parser)
    arguments = commandline.parse(parser, words)
    if unknown := set(arguments.only) - {model_type for model_type, _ in tiny_models.classes()}:
        parser.error(f"--only {' '.join(sorted(unknown))}: Transformers has no such model type")
    if arguments.seed is None:
        arguments.seed = random.SystemRandom().randrange(10**6)
    if arguments.classes is None and arguments.seconds is None:
        arguments.classes = CLASSES
    return arguments


def main(words: Sequence[str] | None = None) -> int:
    """Draw, check, print, and write the record; return 1 if anything is wrong."""
    arguments = _arguments(words)
    print(f"seed {arguments.seed}")
    found = []
    for row in rows(drawn(arguments.seed, arguments.classes, arguments.only), arguments.seconds):
        print(_said(row), flush=True)
        found.append(row)
    counts = Counter(row["outcome"] for row in found)
    print(", ".join(f"{counts[outcome]} {outcome}" for outcome in model_checks.OUTCOMES))
    if arguments.json:
        body = {"seed": arguments.seed, "of": len(tiny_models.classes()), "versions": _versions(), "rows": found}
        records.write(arguments.json, "architectures", machine.facts(machine.card("cpu"), arguments.commit), body)
    return int(bool(counts["wrong"]))


if __name__ == "__main__":
    raise SystemExit(main())
