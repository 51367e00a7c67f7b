"""Time from an empty kernel cache to a model that is warmed up, and of the slowest kernel file alone on two cores.

    python -m bench.cold_model --commit HASH --json bench/results/cold-model-CARD.json
    python -m bench.cold_model --commit HASH --json FILE --wheel --kernels-in build/kernels --wheel-limit 5

A model of nn.Linear in bfloat16, with the sizes of Llama-3.1-8B's layers, is quantised by ``replace_linears`` and
warmed up for the numbers of tokens that a server captures, 1 to 4096: in a fresh process with an empty cache, then in
another with what the first has left. ``cold`` is what both calls take together in the first, self-checks included; the
difference to ``again`` is what compiling and checking cost. Each kernel is listed with its own compile seconds; how
many compiled at once is their sum over the time. A kernel of another output dtype than the model's is an error.

``--wheel`` measures each format once more on a machine without a compiler: the same fresh process and empty cache, a
wheel of finished kernels installed, no nvcc to be found. If the wheel is not given, the documented command makes it
first. It is an error if such a start compiles anything, loads a kernel from elsewhere, or loads none.

``one_file`` compiles the slowest of them again, alone, in a process that may use two cores, proof included.

Without a GPU there is no model to warm up; ``one_file`` needs only nvcc, and takes the kernels of ``--kernels``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.shared import commandline, finished_kernels
from bench.shared.commandline import ROOT

AGAIN = ("-m", "bench.cold_model")
"""What runs this script once more, in a process of its own."""

FORMATS = ("nvfp4", "fp8_row", "fp8_block")
SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
"""N x K of a block: qkv, out, gate and up, down."""
TOKENS = (1, 2, 4, *range(8, 513, 8), 1024, 2048, 4096)
KERNELS = ("w4_gemm_sm90/a8_bf16_176-90a", "fp8_gemm_sm90/row_bf16_128x128-90a")
"""What is compiled alone where no model says what it needs."""
OTHER = {"bfloat16": "fp16", "float16": "bf16"}

_START = time.perf_counter()


# ----------------------------------------------------------------------------------------- in processes of their own


def model(shapes: Sequence[tuple[int, int]], device: str, blocks: int = 1) -> Any:
    """Return blocks of linear layers, random, in bfloat16."""
    import torch

    every = [*shapes] * blocks
    layers = [torch.nn.Linear(k, n, bias=False, device=device, dtype=torch.bfloat16) for n, k in every]
    return torch.nn.ModuleList(layers)


def warm(
    fmt: str, shapes: Sequence[tuple[int, int]], tokens: Sequence[int], device: str, blocks: int = 1
) -> dict[str, Any]:
    """Quantise the model, warm it up and say how long that took; with what was compiled meanwhile."""
    import torch

    from fp4dispatch import replace_linears, warmup
    from fp4dispatch.jit import kernels

    net = model(shapes, device, blocks)
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    started = time.perf_counter()
    report = replace_linears(net, fmt)
    replaced = time.perf_counter()
    warmup(net, tokens=tokens)
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    done = time.perf_counter()
    return {
        "total_s": done - started,
        "replace_s": replaced - started,
        "warmup_s": done - replaced,
        "before_s": started - _START,
        "backends": sorted({layer.backend for layer in report.layers}),
        "kernels": dict(sorted(kernels.compiled(), key=lambda row: -row[1])),
    }


def one(name: str) -> dict[str, Any]:
    """Compile one kernel, ``kernel/variant-target``, and prove it."""
    from fp4dispatch.jit import kernels

    kernel, _, rest = name.partition("/")
    variant, _, target = rest.rpartition("-")
    started = time.perf_counter()
    built = kernels.build(kernel, variant, target)
    seconds = time.perf_counter() - started
    return {"total_s": seconds, "kernels": dict(kernels.compiled()), "proven": built.proven}


# ------------------------------------------------------------------------------------------------------ from outside


def fresh(
    folder: str,
    arguments: Sequence[str],
    cores: int | None = None,
    *,
    limit_s: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run this file in a process of its own with a cache folder; return what it reports.

    Parameters
    ----------
    folder
        The cache.
    arguments
        What to do there.
    cores
        How many it may use, compilers included; all by default.
    limit_s
        Seconds after which it is ended, and its compilers with it.
    environment
        Its environment, instead of this one's.

    Raises
    ------
    RuntimeError
        With the end of its output, if it failed or was ended.
    """
    base = os.environ if environment is None else environment
    path = os.pathsep.join(filter(None, (str(ROOT), base.get("PYTHONPATH"))))
    env = dict(base, FP4DISPATCH_CACHE_DIR=folder, PYTHONPATH=path)
    command = [sys.executable, *AGAIN, *arguments]
    allowed = sorted(os.sched_getaffinity(0))
    few = None if cores is None else set(allowed[:cores])
    if cores is not None:
        env["MAX_JOBS"] = str(cores)

    def limit() -> None:
        if few is not None:
            os.sched_setaffinity(0, few)

    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=env, preexec_fn=limit, start_new_session=True, **pipes) as process:
        try:
            out, err = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            err += f"\nended after {limit_s:.0f} s"
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{out[-2000:]}\n{err[-4000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def measure_model(
    fmt: str, asked: Sequence[str], limit_s: float | None = None, *, site: Path | None = None
) -> dict[str, Any]:
    """Return one format's cold and repeated start, and the kernels that the cold one compiled.

    ``site`` is the folder that a wheel of finished kernels is installed into; then no nvcc can be found.
    """
    words = ["--warm", fmt, *asked, *(["--site", str(site)] if site else [])]
    environment = finished_kernels.without_nvcc(site) if site else None
    with tempfile.TemporaryDirectory() as folder:
        cold = fresh(folder, words, limit_s=limit_s, environment=environment)
        again = fresh(folder, words, limit_s=limit_s, environment=environment)
    compiled = cold["kernels"]
    return {
        "format": fmt,
        **({"wheel": True} | {name: cold[name] for name in ("from_wheel", "from_elsewhere", "nvcc")} if site else {}),
        "cold_s": round(cold["total_s"], 2),
        "again_s": round(again["total_s"], 2),
        "replace_s": round(cold["replace_s"], 2),
        "warmup_s": round(cold["warmup_s"], 2),
        "backends": cold["backends"],
        "kernels": {name: round(seconds, 2) for name, seconds in compiled.items()},
        "compile_s": round(sum(compiled.values()), 2),
        "compiled_again": sorted(again["kernels"]),
    }


def measure_one(names: Sequence[str], cores: int, limit_s: float | None = None) -> dict[str, Any]:
    """Compile each kernel alone; return the slowest."""
    rows = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            found = fresh(folder, ["--one", name], cores, limit_s=limit_s)
        rows.append({"kernel": name, "wall_s": round(found["total_s"], 2), "proven": found["proven"]})
        print(f"{name}: {rows[-1]['wall_s']} s on {cores} cores", flush=True)
    return {"jobs": cores, **max(rows, key=lambda row: float(row["wall_s"])), "each": rows}


def faults(
    result: dict[str, Any], limit: float | None, one_limit: float | None, wheel_limit: float | None = None
) -> list[str]:
    """Return a sentence for all that is not as it should be."""
    found = list(result["failed"])
    for row in result["models"]:
        if row.get("wheel"):
            found += finished_kernels.faults(row)
            if wheel_limit is not None and row["cold_s"] > wheel_limit:
                found.append(f"{label(row)}: {row['cold_s']} s from an empty cache, limit {wheel_limit}")
            continue
        wrong = [name for name in row["kernels"] if OTHER["bfloat16"] in name]
        if wrong:
            found.append(f"{row['format']}: compiled for float16, which this model does not use: {', '.join(wrong)}")
        if row["compiled_again"]:
            found.append(f"{row['format']}: compiled again with a full cache: {', '.join(row['compiled_again'])}")
        if limit is not None and row["cold_s"] > limit:
            found.append(f"{row['format']}: {row['cold_s']} s from an empty cache, limit {limit}")
    one_file = result["one_file"]
    if one_limit is not None and one_file and one_file["wall_s"] > one_limit:
        found.append(f"{one_file['kernel']}: {one_file['wall_s']} s on {one_file['jobs']} cores, limit {one_limit}")
    return found


def label(row: dict[str, Any]) -> str:
    """Return what a row is about."""
    return f"{row['format']} with wheel" if row.get("wheel") else str(row["format"])


def table(result: dict[str, Any]) -> str:
    """Return the record as markdown."""
    lines = []
    if result["models"]:
        lines += [
            "| format | cold s | again s | in `replace_linears` | in `warmup` | kernels | their compile s | at once |",
            "|---|---|---|---|---|---|---|---|",
        ]
    for row in result["models"]:
        at_once = row["compile_s"] / row["cold_s"] if row["cold_s"] else 0.0
        needed = len(row["from_wheel"] if row.get("wheel") else row["kernels"])
        cells = [label(row), row["cold_s"], row["again_s"], row["replace_s"], row["warmup_s"], needed]
        lines.append(f"| {' | '.join(map(str, [*cells, row['compile_s'], f'{at_once:.1f}']))} |")
    if result.get("wheel"):
        said = "With wheel: finished kernels are installed, no nvcc can be found, and nothing was compiled."
        lines += ["", f"{said} {finished_kernels.sentence(result['wheel'])}"]
    slowest: dict[str, float] = {}
    for row in result["models"]:
        slowest |= row["kernels"]
    if slowest:
        lines += ["", "| kernel | compile s beside the others |", "|---|---|"]
        lines += [f"| {name} | {seconds} |" for name, seconds in sorted(slowest.items(), key=lambda each: -each[1])]
    if result["one_file"]:
        one_file = result["one_file"]
        text = f"Slowest file alone on {one_file['jobs']} cores: {one_file['kernel']}, {one_file['wall_s']} s."
        lines += ["", text] if lines else [text]
    return "\n".join(lines)


def measure(arguments: argparse.Namespace, gpu: str | None, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Return all that this machine can measure; ``keep`` is given what there is after each step, failures included.

    ``gpu`` is the GPU's compute capability.
    """
    result: dict[str, Any] = {"models": [], "one_file": None, "failed": []}

    def step(work: Callable[[], None]) -> None:
        try:
            work()
        except RuntimeError as error:
            result["failed"].append(str(error))
            print(error, flush=True)
        keep(result)

    def start(fmt: str, site: Path | None = None) -> None:
        row = measure_model(fmt, asked, arguments.step_limit, **({"site": site} if site else {}))
        result["models"].append(row)
        print(f"{label(row)}: {row['cold_s']} s, {len(row['kernels'])} kernels compiled", flush=True)

    def wheel(site: Path) -> None:
        result["wheel"] = finished_kernels.made(
            arguments.wheel, str(gpu), arguments.kernels_in, site, arguments.step_limit
        )
        print(finished_kernels.sentence(result["wheel"]), flush=True)

    def alone() -> None:
        result["one_file"] = measure_one(slowest, arguments.jobs, arguments.step_limit)

    asked = ["--tokens", *map(str, arguments.tokens), "--shapes", *arguments.shapes, "--blocks", str(arguments.blocks)]
    if gpu:
        for fmt in arguments.formats:
            step(lambda: start(fmt))  # noqa: B023  (run at once)
        if arguments.wheel is not None:
            with tempfile.TemporaryDirectory(prefix="fp4dispatch-") as site:
                step(lambda: wheel(Path(site)))
                for fmt in arguments.formats if result.get("wheel") else ():
                    step(lambda: start(fmt, Path(site)))  # noqa: B023
    else:
        print("No GPU: a model that is warmed up from an empty cache cannot be measured here, single files can.")
    seconds = {name: s for row in result["models"] for name, s in row["kernels"].items()}
    slowest = sorted(seconds, key=lambda name: -seconds[name])[: arguments.alone] if gpu else arguments.kernels
    if slowest:
        step(alone)
    return result


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the record."""
    parser = commandline.parser(__doc__)
    commandline.takes_record(parser)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=("nvfp4", "fp8", "fp8_row", "fp8_block"))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--shapes", nargs="+", default=[f"{n}x{k}" for n, k in SHAPES], help="NxK")
    parser.add_argument("--blocks", type=int, default=1, help="how often the shapes are there; 32 make the whole model")
    parser.add_argument("--wheel", nargs="?", const="", metavar="FILE", help="also start with it; made if not given")
    parser.add_argument("--kernels-in", type=Path, metavar="DIR", help="keep the wheel's kernels, and use them again")
    parser.add_argument("--wheel-limit", type=float, metavar="S", help="seconds of a model with it; exit with 1 beyond")
    parser.add_argument("--jobs", type=int, default=2, help="cores of one_file")
    parser.add_argument("--alone", type=int, default=2, help="how many of the slowest files are compiled alone")
    parser.add_argument("--kernels", nargs="*", default=list(KERNELS), help="kernel/variant-target, without a GPU")
    parser.add_argument("--step-limit", type=float, metavar="S", help="seconds after which a start or a file is ended")
    parser.add_argument("--limit", type=float, help="seconds of a model; exit with 1 beyond")
    parser.add_argument("--one-limit", type=float, help="seconds of one file; exit with 1 beyond")
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--site", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda")
    arguments = commandline.parse(parser, words)
    shapes = [(int(n), int(k)) for n, _, k in (text.partition("x") for text in arguments.shapes)]
    if arguments.warm:
        found = warm(arguments.warm, shapes, arguments.tokens, arguments.device, arguments.blocks)
        print(json.dumps(found | (finished_kernels.used(arguments.site) if arguments.site else {})))
        return 0
    if arguments.one:
        print(json.dumps(one(arguments.one)))
        return 0
    if not arguments.json:
        parser.error("--json is needed")
    if arguments.wheel is None and (arguments.wheel_limit is not None or arguments.kernels_in):
        parser.error("--wheel-limit and --kernels-in need --wheel")
    if arguments.wheel and (arguments.kernels_in or not Path(arguments.wheel).is_file()):
        parser.error(f"--wheel {arguments.wheel}: needs a file, and no --kernels-in, as nothing is built")
    from fp4dispatch.benchmark import machine
    from fp4dispatch.benchmark.reports import records

    card = machine.card()
    if arguments.wheel is not None and card.arch is None:
        parser.error("--wheel: torch sees no GPU here, so no kernel of a wheel would run")
    facts = machine.facts(card, arguments.commit)
    cores = len(os.sched_getaffinity(0))
    result = {"cores": cores, "shapes": shapes, "blocks": arguments.blocks, "tokens": arguments.tokens}

    def keep(found: dict[str, Any]) -> None:
        result["cold_model"] = found
        records.write(arguments.json, "cold model", facts, result)

    keep(measure(arguments, card.arch.capability if card.arch else None, keep))
    print(table(result["cold_model"]))
    wrong = faults(result["cold_model"], arguments.limit, arguments.one_limit, arguments.wheel_limit)
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
