"""What choices cost: what a layer runs with and without time models, beside the best launch of the samples. No GPU.

For each problem of the samples and each format of weights: the time of the backend, build and launch shape that
``auto`` chooses, over that of the best of ours that it may choose: the same weights, activations as the rules allow for
this M, quantiser included. cuBLASLt counts as ours for FP8 by row. Times of parts are added. ``as run`` is the whole
layer as it was timed, by the code that took the samples. Judge on samples that nothing was fitted to.

    python -m bench.judge_choices samples/launch-samples-seed-12-h200.json ... [--speeds FILE] [--worst 5]
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.shared import commandline
from fp4dispatch import strict_toml
from fp4dispatch.backends import registry
from fp4dispatch.backends.own.compiled import CompiledBackend
from fp4dispatch.backends.own.launch_choice import Layout
from fp4dispatch.backends.own.tiling import predict, search, speeds
from fp4dispatch.backends.own.tiling.speeds import Speeds
from fp4dispatch.backends.predictions import predictions
from fp4dispatch.benchmark.methods.launches import FAMILIES
from fp4dispatch.benchmark.reports import records
from fp4dispatch.benchmark.reports.standing import RANGES, geometric_mean, quantile
from fp4dispatch.machine import gpu_models
from fp4dispatch.machine.gpu_models import GpuModel
from fp4dispatch.machine.system import System
from fp4dispatch.policy import resolve
from fp4dispatch.policy.rules import m_bucket
from fp4dispatch.problem import Op, Problem, Scaling
from fp4dispatch.problem.arch import SM90
from fp4dispatch.problem.measurement import EXACTNESS, LaunchConfig

FORMATS: dict[Scaling, Op] = {"nvfp4": "nvfp4_gemm", "row": "fp8_gemm", "block128": "fp8_gemm"}
LAYERS = {"nvfp4": "FP4Linear", "row": "FP8Linear/row", "block128": "FP8Linear/block128"}
SLOWER = 1.03
"""Times of bf16 cuBLAS from which on a layer counts as slower."""
INVERSION = 1.05
EVERY = 1, 1 << 40


@dataclass(frozen=True)
class Judge:
    """Decides as a layer on one GPU model would; ``speeds`` None: without time models."""

    model: GpuModel
    speeds: Speeds | None
    system: System

    def backend(self, problem: Problem) -> str:
        """Return the backend that ``auto`` chooses."""
        bucket = _at(problem)
        times = None if self.speeds is None else predictions(bucket, self.model, registry.backends())
        decision = resolve.resolve(bucket, self.system, registry.backends(), predicted=times)
        return str(decision.backend)

    def launch(self, backend: str, problem: Problem) -> LaunchConfig:
        """Return the launch of one of our backends; without a shape it is the kernel's own."""
        found = registry.instance(backend)
        assert isinstance(found, CompiledBackend)
        layout = Layout(problem.n, problem.k, problem.n, problem.k)
        alike = problem if self.speeds is None else search.representative(problem)
        chosen = found.choice_without_times(alike, layout, SM90, self.model.sms, self.speeds, ())
        assert chosen is not None
        return chosen


def _at(problem: Problem) -> Problem:
    """Return the problem that a decision is made for: the largest M of the bucket."""
    return replace(problem, m=m_bucket(problem.m, problem.op, SM90))


@dataclass(frozen=True)
class Sample:
    """The times of one problem of the samples."""

    record: dict[str, Any]
    beside: Speeds

    def problem(self, fmt: Scaling, activation: Any = "any") -> Problem:
        """Return the problem of a layer."""
        r = self.record
        return Problem(FORMATS[fmt], r["m"], r["n"], r["k"], activation, fmt)

    def quantiser(self, backend: str, fmt: Scaling, kernel: str) -> float:
        """Return the time of a quantiser, as measured; modelled where it was not, and before cuBLASLt's GEMM.

        That one costs its GEMM more than the quantiser takes alone (bench/notes/quantisers.md).
        """
        entering = "1x128" if fmt == "block128" else "row"
        found = self.record["quantise"].get(f"{backend} {entering} {kernel}")
        packed = kernel != predict.UNFOLD
        if found is not None and packed:
            return float(found)
        return predict.quantiser(self.problem(fmt, "fp8"), self.beside, packed=packed)

    def launches(self, backend: str, fmt: Scaling) -> Iterator[tuple[LaunchConfig, float]]:
        """Yield (launch, microseconds with the quantiser) for all launches of a backend."""
        for name, found in self.record["launches"].items():
            family, _, rest = name.partition(" ")
            kernel, _, build = rest.partition("/")
            if family != backend or build.startswith("block_") != (fmt == "block128"):
                continue
            alone = backend not in ("w4a16", "w8a16") and not self.record.get("whole")
            before = self.quantiser(backend, fmt, kernel) if alone else 0.0
            for shape, us in found:
                yield LaunchConfig(kernel, build, None if shape is None else tuple(shape)), us + before

    def cublaslt(self) -> float | None:
        """Return the time of cuBLASLt by row with its quantiser; None where it was not timed."""
        gemm = self.record.get("scaled_mm")
        return None if gemm is None else gemm + self.quantiser("w4a8", "row", predict.UNFOLD)

    def covers(self, fmt: Scaling) -> bool:
        """Whether any launch of a format was timed."""
        return any(True for family in FAMILIES if family.format == fmt for _ in self.launches(family.backend, fmt))

    def time(self, judge: Judge, fmt: Scaling) -> tuple[str, float] | None:
        """Return the backend that is chosen, and its time; None where it was not measured."""
        backend = judge.backend(self.problem(fmt))
        if backend == "cublaslt":
            us = self.cublaslt() if fmt == "row" else None
            return None if us is None else (backend, us)
        if backend not in {family.backend for family in FAMILIES if family.format == fmt}:
            return None
        activation = registry.instance(backend).activation_for(self.problem(fmt))
        wanted = judge.launch(backend, self.problem(fmt, activation))
        found = [us for launch, us in self.launches(backend, fmt) if launch == wanted]
        return (backend, found[0]) if found else None

    def best(self, fmt: Scaling, least: int) -> tuple[str, float] | None:
        """Return the backend and time of the fastest launch whose activations are at least so exact.

        None where none was timed: samples may be of some families.
        """
        found = []
        for backend in {family.backend for family in FAMILIES if family.format == fmt}:
            activation = registry.instance(backend).activation_for(self.problem(fmt))
            if activation is not None and EXACTNESS[activation] >= least:
                found += [(us, backend) for _, us in self.launches(backend, fmt)]
        if fmt == "row" and least <= EXACTNESS["fp8"] and (us := self.cublaslt()) is not None:
            found.append((us, "cublaslt"))
        if not found:
            return None
        us, backend = min(found)
        return backend, us


def least_exact(problem: Problem, system: System) -> int:
    """Return how exact activations must be: as those of the rules' choice.

    Models may choose coarser ones where a rule says what its own are worth. The regret of such a choice may be under 1.
    """
    decision = resolve.resolve(_at(problem), system, registry.backends())
    return EXACTNESS[decision.activation] if decision.activation != "any" else EXACTNESS["bf16"]


def judged(samples: Sequence[Sample], judges: dict[str, Judge], fmt: Scaling) -> list[dict[str, Any]]:
    """Return a row for each sample: the best, and what each judge chooses."""
    rows = []
    for sample in samples:
        r = sample.record
        system = next(iter(judges.values())).system
        least = least_exact(sample.problem(fmt), system)
        if (best := sample.best(fmt, least)) is None:
            continue
        row = {"n": r["n"], "k": r["k"], "m": r["m"], "bf16": r["bf16"], "best": best}
        us = r["layers"].get(LAYERS[fmt])
        row |= {"as run": None if us is None else ("layer", us)}
        row |= {name: sample.time(j, fmt) for name, j in judges.items()}
        rows.append(row)
    return rows


def report(rows: Sequence[dict[str, Any]], names: Sequence[str], worst: int) -> list[str]:
    """Return the table of one format as lines."""
    lines = []
    for first, last in (*RANGES, EVERY):
        some = [row for row in rows if first <= row["m"] <= last]
        if not some:
            continue
        title = f"M {first}-{last} ({len(some)})" if last < EVERY[1] else f"M from {first} ({len(some)})"
        best = geometric_mean(row["bf16"] / row["best"][1] for row in some)
        lines.append(f"{title}: bf16 time over best {best:.2f}")
        for name in names:
            known = [row for row in some if row[name] is not None]
            if not known:
                continue
            regret = [row[name][1] / row["best"][1] for row in known]
            speed = geometric_mean(row["bf16"] / row[name][1] for row in known)
            slow = sum(row[name][1] > SLOWER * row["bf16"] for row in known)
            chosen = Counter(f"{row[name][0]}>{row['best'][0]}" for row in known)
            lines.append(
                f"  {name}: over it {speed:.2f}; regret mean {statistics.fmean(regret):.3f}, median "
                f"{statistics.median(regret):.3f}, 95 % {quantile(regret, 0.95):.3f}, worst {max(regret):.3f}; slower "
                f"than bf16 {slow} of {len(known)}; not measured {len(some) - len(known)}; chosen>best "
                + ", ".join(f"{key} {count}" for key, count in chosen.most_common())
            )
    for name in names:
        known = sorted((row for row in rows if row[name] is not None), key=lambda row: row["best"][1] / row[name][1])
        lines.append(f"  worst of {name}:")
        lines += [
            f"    {row['n']}x{row['k']} M={row['m']}: {row[name][0]} {row[name][1]:.1f} us, best {row['best'][0]} "
            f"{row['best'][1]:.1f}, bf16 {row['bf16']:.1f}"
            for row in known[:worst]
        ]
    return lines


def inversions(judge: Judge, shapes: Sequence[tuple[int, int]], fmt: Scaling) -> tuple[int, int]:
    """Return how many pairs of M have fewer tokens that are predicted to take over 5 % longer, and how many pairs."""
    tokens = (1, 2, 4, 8, 12, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 129, 192, 256, 257, 384, 512, 769, 1024, 2048)
    bad = pairs = 0
    for n, k in shapes:
        found = []
        for m in tokens:
            problem = Problem(FORMATS[fmt], m, n, k, "any", fmt)
            backend = registry.instance(judge.backend(problem))
            activation = backend.activation_for(problem)
            us = None if activation is None else backend.predict(replace(problem, activation=activation), judge.model)
            if us is not None:
                found.append(us)
        for few, more in itertools.combinations(found, 2):
            pairs += 1
            bad += few > INVERSION * more
    return bad, pairs


def main(words: Sequence[str] | None = None) -> None:
    """Judge and print."""
    parser = commandline.parser(__doc__)
    parser.add_argument("samples", type=Path, nargs="+")
    parser.add_argument("--speeds", type=Path, help="constants in place of the packaged ones")
    parser.add_argument("--worst", type=int, default=5)
    args = commandline.parse(parser, words)
    kept = [json.loads(records.unpacked(path)) for path in args.samples]
    devices = {record["facts"]["device"] for record in kept}
    model = gpu_models.named(next(iter(devices)))
    if len(devices) != 1 or model is None:
        parser.error(f"samples of {', '.join(devices)}: need one GPU model of gpu_models.toml")
    if args.speeds:
        given = speeds.load(strict_toml.load(args.speeds))
        speeds.fitted = lambda: given  # type: ignore[assignment]
        speeds.of.cache_clear()
    found = speeds.of(model)
    assert found is not None
    facts = kept[0]["facts"]
    system = System.fake("9.0", cuda=facts["cuda"], torch="2.11.0", nvcc="13.0", cutlass=facts.get("cutlass"))
    system = System(
        **(vars(system) | {"proven": frozenset((op, "sm_90") for op in ("w4_gemm", "w8_gemm", "fp8_gemm"))})
    )
    judges = {"rules": Judge(model, None, system), "models": Judge(model, found, system)}
    samples = [Sample(p, found) for record in kept for p in record["problems"]]
    print(f"{len(samples)} problems on {model.name}; models {found}")
    for fmt in FORMATS:
        some = [sample for sample in samples if sample.covers(fmt)]
        print(f"\n{fmt}: launches of it were timed in {len(some)} of {len(samples)} problems")
        if not some:
            continue
        print("\n".join(report(judged(some, judges, fmt), ["as run", *judges], args.worst)))
        shapes = sorted({(s.record["n"], s.record["k"]) for s in some})
        bad, pairs = inversions(judges["models"], shapes, fmt)
        print(f"  predicted inversions over 5 %: {bad} of {pairs} pairs of M")


if __name__ == "__main__":
    main()
