"""``fp4dispatch tune --model-shapes``: time the layers of the models in shapes.toml; write the table of this GPU model.

The table ships as ``fp4dispatch/dispatch/tuned_tables/<GPU model>.json``. The same command again goes on where the last
one ended, if GPU model and sources of the kernels are the same. Several processes, each on a GPU of its own, may fill
one table at once: who measures a layer holds its lock, which ends with the process.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path

import filelock
import torch

from fp4dispatch.benchmark.problems import shapes
from fp4dispatch.cli import FAILED, OK
from fp4dispatch.cli.answers import answer
from fp4dispatch.cli.output import write_file
from fp4dispatch.dispatch import choose, shipped
from fp4dispatch.dispatch.launches import MOST_TOKENS
from fp4dispatch.dispatch.shipped import Layer, Table
from fp4dispatch.errors import InputError
from fp4dispatch.machine import gpu_models
from fp4dispatch.machine.progress import Progress
from fp4dispatch.machine.system import System
from fp4dispatch.problem import Op, Problem, Scaling, m_bucket
from fp4dispatch.problem.measurement import Measurement
from fp4dispatch.settings import did_you_mean, settings
from fp4dispatch.trust import facts
from fp4dispatch.tune import tuning
from fp4dispatch.tune.agreement import Ranks
from fp4dispatch.tune.copies import Copies
from fp4dispatch.tune.session import WRONG
from fp4dispatch.tune.timing import gpu

FORMATS: tuple[tuple[Op, Scaling], ...] = (("nvfp4_gemm", "nvfp4"), ("fp8_gemm", "row"), ("fp8_gemm", "block128"))
"""What is measured unless an op or a scaling is given."""
FACTS = ("driver", "cuda", "torch", "cublas", "cudnn", "flashinfer", "fp4dispatch")


def run(args: argparse.Namespace) -> int:
    """Measure what the table lacks, writing after every layer; 1 if a candidate gave wrong results."""
    device = gpu()
    if settings.tuned == "off":
        raise InputError("FP4DISPATCH_TUNED=off: times would not be kept\n  fix: unset it")
    system = choose.facts(device.index)
    todo = layers(args.model_shapes, args.op, args.scaling)
    path: Path = args.out / shipped.file_name(model_of(system))
    table = begun(path, system, args.commit)
    left = [key for key in todo if args.force or key not in table.layers]
    ends, wrong, done, elsewhere = time.monotonic() + args.seconds, [], 0, []
    with Progress("tuning", len(left), unit="layers", announce=True, quiet=args.json) as progress:
        for key in left:
            if time.monotonic() >= ends:
                break
            with claimed(path, key) as mine:
                if not mine or changed(begun(path, system, args.commit), table, key):
                    elsewhere.append(key)
                    continue
                op, scaling, n, k = key
                progress.note(f"{op} {scaling} N={n} K={k}")
                found = measure(key, args.m or tokens(), device.index, args.force)
                wrong += [why for each in found for _, why in each.left_out if why.startswith(WRONG)]
                with filelock.FileLock(locks(path) / "table.lock"):
                    now = begun(path, system, args.commit)
                    write(path, shipped.with_layer(now, key, [each for each in found if each.timings]), found)
                done += 1
                progress.step()
    now = begun(path, system, args.commit)
    said = {
        "ok": not wrong,
        "table": str(path),
        "layers": len(now.layers),
        "measured": done,
        "left": len(left) - done - sum(changed(now, table, key) for key in elsewhere),
    }
    answer(json.dumps(said) if args.json else f"{path}: {done} layers measured, {said['left']} left")
    for why in wrong:
        print(f"WRONG {why}", file=sys.stderr)
    return FAILED if wrong else OK


def layers(names: list[str], op: Op | None, scaling: Scaling | None) -> list[Layer]:
    """Return the layers of these models, or of all, at each tensor-parallel size, in each format.

    Raises
    ------
    InputError
        For a model that is not in shapes.toml, or an op and a scaling that do not go together.
    """
    models = {model.name: model for model in shapes.catalogue().models}
    for name in names:
        if name not in models:
            raise InputError(f"{name!r} is not in shapes.toml.{did_you_mean(name, models)} Known: {', '.join(models)}")
    formats = [(o, s) for o, s in _formats(scaling) if op in (None, o)]
    if not formats:
        raise InputError(f"{op} has no weights of scaling {scaling}")
    sizes = dict.fromkeys(
        layer.shard(tp) for name in names or models for layer in models[name].layers for tp in models[name].tp
    )
    return [(o, s, n, k) for o, s in formats for n, k in sizes]


def _formats(scaling: Scaling | None) -> tuple[tuple[Op, Scaling], ...]:
    if scaling is None:
        return FORMATS
    return (("nvfp4_gemm" if scaling == "nvfp4" else "fp8_gemm", scaling),)


def tokens() -> tuple[int, ...]:
    """Return every number of tokens at which launches are timed, up to ``MOST_TOKENS``."""
    found, m = [], 0
    while m < MOST_TOKENS:
        m = m_bucket(m + 1)
        found.append(m)
    return tuple(found)


def model_of(system: System) -> str:
    """Return the name of the GPU model; InputError where its facts are not known."""
    model = gpu_models.named(system.gpus[0].name) if system.gpus else None
    if model is None:
        name = system.gpus[0].name if system.gpus else "no GPU"
        raise InputError(f"{name} is not in gpu_models.toml, so that nobody could find its table\n  fix: add it there")
    return model.name


def begun(path: Path, system: System, commit: str) -> Table:
    """Return the table of an earlier run, or a new one.

    Raises
    ------
    InputError
        If a file is there that this run cannot add to.
    SettingsError
        If it is no table.
    """
    of = facts.of_machine(system)
    held = {name: of[name] for name in FACTS} | ({"commit": commit} if commit else {})
    new = Table(model_of(system), facts.kernel_sources(), date.today().isoformat(), "", held, {})
    if not path.exists():
        return new
    old = shipped.load(path)
    if (old.gpu, old.kernels, old.facts) != (new.gpu, new.kernels, new.facts):
        raise InputError(
            f"{path} was measured with other kernels or libraries: it cannot be continued\n  fix: another --out"
        )
    return old


def changed(now: Table, before: Table, key: Layer) -> bool:
    """Whether another process has measured a layer meanwhile."""
    return now.layers.get(key) != before.layers.get(key)


def locks(path: Path) -> Path:
    """Return the folder of a table's lock files; made if it is not there.

    Raises
    ------
    InputError
        If it cannot be made.
    """
    folder = path.with_suffix(".locks")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--out {path.parent}: no table can be written there: {error}\n  fix: another --out"
        ) from error
    return folder


@contextmanager
def claimed(path: Path, key: Layer) -> Iterator[bool]:
    """Hold the lock of a layer; False where another process holds it."""
    lock = filelock.FileLock(locks(path) / f"{'-'.join(map(str, key))}.lock")
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def measure(key: Layer, ms: Iterable[int], gpu: int, force: bool) -> list[Measurement]:
    """Return the measurements of a layer, by ascending M."""
    op, scaling, n, k = key
    problem = Problem(op, 1, n, k, scaling=scaling)
    all_m = {choose.bucket(m, op, gpu) for m in ms}
    device = torch.device("cuda", gpu)
    copies = Copies(tuning.make_weights(problem, device), tuning.engine_of(device))
    alone = Ranks(alone=True)
    return [
        tuning.tune_at(Problem(op, m, n, k, scaling=scaling), copies, gpu=gpu, ranks=alone, force=force)
        for m in sorted(all_m)
    ]


def write(path: Path, table: Table, found: list[Measurement]) -> None:
    """Publish the table by a rename, so that a run that is stopped leaves a whole one."""
    method = next((each.method for each in found if each.method), table.method)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file("out", str(path), shipped.to_json(replace(table, method=method)))
