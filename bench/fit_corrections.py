"""Fit what the formulas of the launch models leave: tiling/corrections.json. Needs numpy, no GPU.

Samples come from bench/launch_samples.py, of all GPUs that speeds.toml has constants of; fit these first. For each
group of builds, boosted trees learn the logarithm of the measured over the predicted time. All nodes of a level ask the
same question, so a tree is six questions and 64 numbers.

    python -m bench.fit_corrections --few FILES --many FILES [--suites FILES] [--only GROUP ...]
        [--judge FILES] [--write]

``--suites``: records of ``fp4dispatch bench --suite random``. They timed, for each problem, the launches that the
models put first, so they have most of what a choice is made from. Layers run there among other data than in samples:
all launches of a problem are faster or slower together. So trees are fitted to samples alone first, and then again to
samples and suites, where the times of a suite's problem are levelled (:func:`levelled`).
Trees for cuBLASLt's FP8 GEMM are fitted to the samples of ``--many``, and to nothing but the problem.
``--only GROUP ...``: fit these groups; the trees of the others stay, as long as their constants do.
``--judge``: samples that were not fitted to. It prints what choices cost without and with corrections: the time of the
launch that is predicted fastest over that of the best of those that were timed, and the spread of predictions.
Of few tokens with FP8 activations only samples with their quantiser count, as for bench/fit_speeds.py, and only those
of :data:`SINCE` and later are fitted to.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench import fit_speeds
from bench.shared import commandline
from fp4dispatch import strict_toml
from fp4dispatch.backends.own.tiling import corrections, predict, speeds
from fp4dispatch.backends.own.tiling.corrections import Tree
from fp4dispatch.backends.own.tiling.few_tokens import KERNELS, FewTokensShape
from fp4dispatch.backends.own.tiling.launch_model import LaunchShape
from fp4dispatch.backends.own.tiling.speeds import Speeds
from fp4dispatch.backends.own.tiling.tiles import speed_of
from fp4dispatch.benchmark.methods.launches import FAMILIES, PREFIX
from fp4dispatch.benchmark.reports import random_report, records
from fp4dispatch.benchmark.reports.standing import RANGES, quantile
from fp4dispatch.machine import gpu_models
from fp4dispatch.problem import Problem

TREES, RATE, HELD, BOUNDS = 600, 0.25, 5.0, 40
"""Trees of a group; the share of what is left that each takes; launches that a leaf must have before it moves by half
of that; bounds of a feature. Chosen for choices on samples that were not fitted to (bench/notes/corrections.md)."""
TREES_OF = {"w4a16_small": 1500, "w8a16_small": 1500, "w8a8_small": 1500}
"""Groups with more trees: better choices, which take longer (bench/notes/corrections.md)."""
SINCE = "2026-11-26"
"""Day from which on samples of FP8 activations and few tokens are fitted to. Kernels before 870755e found less room
beside what ran before them, so their times mislead (bench/notes/corrections.md)."""
OF_SUITE = 3.0
"""Weight of a launch that a random suite timed, judged on other suites (bench/notes/corrections.md)."""
NEAR, FAR = (1.15, 1.0), (1.4, 0.5)
"""(Times the best launch of the problem, weight), as of bench/fit_speeds.py, but nearer."""
CLOSE = 1.3
"""Times the best launch of the problem: launches whose spread is printed."""


class Timed(NamedTuple):
    """A launch of a sample. ``of`` tells problems apart, also of several records."""

    of: tuple[Any, ...]
    kernel: str
    build: str
    shape: tuple[int, ...]
    problem: Problem
    us: float


def timed(record: Mapping[str, Any], plain: Speeds, *, few: bool) -> Iterator[Timed]:
    """Yield the launches of a record that have a model, without their quantisers: for few tokens, or for many."""
    quantised = {kind: asdict(each) for kind, each in plain.quantisers.items()}
    for p in (fit_speeds.gemms_alone(p, quantised) for p in record["problems"]):
        of = record["subject"], record["facts"]["device"], p["n"], p["k"], p["m"]
        for family in FAMILIES:
            blocks = family.format == "block128"
            problem = family.problem(p["m"], p["n"], p["k"])
            for name, launches in p["launches"].items():
                backend, _, rest = name.partition(" ")
                kernel, _, build = rest.partition("/")
                if backend != family.backend or build.startswith("block_") != blocks or (kernel in KERNELS) != few:
                    continue
                if few and not fit_speeds.serves(p, kernel):
                    continue
                for shape, us in launches:
                    if shape is not None and is_launched(kernel, build, shape, blocks=blocks):
                        yield Timed(of, kernel, build, tuple(shape), problem, us)


def timed_cublaslt(record: Mapping[str, Any]) -> Iterator[tuple[Problem, float]]:
    """Yield each problem of a record on which cuBLASLt's FP8 GEMM was timed, with its microseconds."""
    for p in record["problems"]:
        if (us := p.get("scaled_mm")) is not None:
            yield Problem("fp8_gemm", p["m"], p["n"], p["k"], "fp8", "row"), us


def is_launched(kernel: str, build: str, shape: Sequence[int], *, blocks: bool) -> bool:
    """Whether a launch is one that layers may choose."""
    if (about := KERNELS.get(kernel)) is None:
        return speed_of(kernel, build) is not None
    return fit_speeds.is_launched(about, FewTokensShape(*shape), blocks=blocks)


def predicted(launch: Timed, known: Speeds) -> float | None:
    """Return the predicted microseconds of a launch."""
    tile = speed_of(launch.kernel, launch.build)
    return predict.launch(launch.kernel, launch.build, tile, launch.shape, launch.problem, known)


def features(launch: Timed, known: Speeds) -> tuple[float, ...]:
    """Return what trees may ask of a launch."""
    p, gpu = launch.problem, known.many_tokens
    tile = speed_of(launch.kernel, launch.build)
    if tile is not None:
        return corrections.of_many_tokens(tile, LaunchShape(*launch.shape), p.m, p.n, p.k, gpu)
    shape, blocks = FewTokensShape(*launch.shape), p.scaling == speeds.BLOCKS
    return corrections.of_few_tokens(launch.kernel, shape, p.m, p.n, p.k, gpu, blocks=blocks)


def group_of(launch: Timed) -> str:
    """Return the group of builds of a launch."""
    return corrections.group(launch.kernel, launch.build, blocks=launch.problem.scaling == speeds.BLOCKS)


# ---- Trees ----


def bounds_of(column: np.ndarray) -> np.ndarray:
    """Return bounds between values of a feature, at most :data:`BOUNDS`, with as many values between as can be."""
    values = np.unique(column)
    if len(values) < 2:
        return np.empty(0)
    wanted = np.unique(np.quantile(column, np.linspace(0, 1, BOUNDS + 2)[1:-1], method="lower"))
    at = np.unique(np.minimum(np.searchsorted(values, wanted), len(values) - 2))
    return np.unique([float(f"{each:.6g}") for each in (values[at] + values[at + 1]) / 2])


def grown(rows: np.ndarray, left: np.ndarray, weights: np.ndarray, count: int) -> list[Tree]:
    """Fit ``count`` trees to what is ``left``: logarithms of measured over predicted times, of each row of features."""
    bounds = [bounds_of(column) for column in rows.T]
    above = [np.searchsorted(each, column, side="left") for each, column in zip(bounds, rows.T, strict=True)]
    left, trees, places = left.copy(), [], BOUNDS + 1
    for _ in range(count):
        leaf = np.zeros(len(left), np.int64)
        asked: list[int] = []
        at: list[float] = []
        for level in range(corrections.DEPTH):
            gains = []
            for j, each in enumerate(bounds):
                if not len(each):
                    continue
                place, leaves = leaf * places + above[j], 1 << level
                weight = np.bincount(place, weights, leaves * places).reshape(leaves, places)
                moved = np.bincount(place, weights * left, leaves * places).reshape(leaves, places)
                below, low = (np.cumsum(part, 1)[:, : len(each)] for part in (weight, moved))
                rest, high = weight.sum(1, keepdims=True) - below, moved.sum(1, keepdims=True) - low
                gain = (low**2 / (below + HELD) + high**2 / (rest + HELD)).sum(0)
                best = int(gain.argmax())
                gains.append((float(gain[best]), -j, best))
            _, j, best = max(gains)
            asked.append(-j)
            at.append(float(bounds[-j][best]))
            leaf = 2 * leaf + (above[-j] > best)
        leaves = 1 << corrections.DEPTH
        held = np.bincount(leaf, weights, leaves) + HELD
        units = np.rint(RATE * np.bincount(leaf, weights * left, leaves) / held / corrections.UNIT).astype(int)
        left -= units[leaf] * corrections.UNIT
        trees.append(Tree(asked, at, units.tolist()))
    return trees


def fit(
    launches: Sequence[tuple[Timed, Speeds]],
    only: Sequence[str] | None = None,
    of_suites: Sequence[tuple[Timed, Speeds]] = (),
) -> dict[str, list[Tree]]:
    """Return the trees of each group that samples have, or of some. ``of_suites``: launches of suites, levelled."""
    sampled, timed_by_suites = by_group(launches, only), by_group(of_suites, only)
    found = {}
    for name, samples in sorted(sampled.items()):
        us = np.array([each.us for each, *_ in samples])
        weights = fit_speeds.weights_of([each.of for each, *_ in samples], us, NEAR, FAR)
        added = timed_by_suites.get(name, [])
        some = [*samples, *added]
        rows = np.array([features(each, known) for each, known, _ in some])
        left = np.array([math.log(each.us / us) for each, _, us in some])
        weights = np.concatenate([weights, np.full(len(added), OF_SUITE)])
        found[name] = grown(rows, left, weights, TREES_OF.get(name, TREES))
    return found


def by_group(
    launches: Sequence[tuple[Timed, Speeds]], only: Sequence[str] | None = None
) -> dict[str, list[tuple[Timed, Speeds, float]]]:
    """Return launches by the group of their build, of all or of some, each with its predicted microseconds."""
    groups: dict[str, list[tuple[Timed, Speeds, float]]] = {}
    for each, known in launches:
        if only is not None and group_of(each) not in only:
            continue
        if (us := predicted(each, known)) is not None:
            groups.setdefault(group_of(each), []).append((each, known, us))
    return groups


def levelled(
    launches: Sequence[tuple[Timed, Speeds]], found: Mapping[str, corrections.Correction]
) -> list[tuple[Timed, Speeds]]:
    """Return launches with the times of a problem divided by what these corrections are off by on it, in the median."""
    off: dict[Any, list[float]] = {}
    for each, known in launches:
        if (us := predicted(each, replace(known, corrections=found))) is not None:
            off.setdefault(each.of, []).append(each.us / us)
    level = {of: statistics.median(some) for of, some in off.items()}
    return [(each._replace(us=each.us / level[each.of]), known) for each, known in launches if each.of in level]


def fit_cublaslt(some: Sequence[tuple[Problem, float, Speeds]]) -> list[Tree]:
    """Return the trees of cuBLASLt's FP8 GEMM."""
    rows = np.array([corrections.of_cublaslt(p.m, p.n, p.k, known.many_tokens) for p, _, known in some])
    left = np.array([math.log(us / predict.cublaslt(p, known)) for p, us, known in some])
    return grown(rows, left, np.ones(len(some)), TREES)


# ---- Judge ----


def tokens_of(first: int, last: int) -> str:
    """Return the words for a range of M."""
    return f"{first}-{last}" if last < 1 << 20 else f"from {first}"


def judged(launches: Sequence[tuple[Timed, Speeds]], found: Mapping[str, corrections.Correction]) -> list[str]:
    """Return, as lines of a table, what choices cost by group and range of M, without corrections and with them."""
    problems: dict[tuple[str, int], dict[Any, list[tuple[Timed, float, float]]]] = {}
    for each, known in launches:
        pair = [predicted(each, some) for some in (known, replace(known, corrections=found))]
        if pair[0] is None or pair[1] is None:
            continue
        range_ = next(i for i, (first, last) in enumerate(RANGES) if first <= each.problem.m <= last)
        problems.setdefault((group_of(each), range_), {}).setdefault(each.of, []).append((each, pair[0], pair[1]))
    lines = ["| builds | tokens | problems | a choice costs, mean, 95 % | with corrections | spread | with |"]
    lines.append("|---|---|---:|---|---|---:|---:|")
    for (name, range_), by_problem in sorted(problems.items()):
        cells, spreads = [], []
        for i in (0, 1):
            cost, errors = [], []
            for some in by_problem.values():
                pairs = [(row[0].us, (row[1], row[2])[i]) for row in some]
                best = min(us for us, _ in pairs)
                cost.append(min(pairs, key=lambda pair: pair[1])[0] / best)
                near = [math.log(us / said) for us, said in pairs if us <= CLOSE * best]
                errors += [each - statistics.fmean(near) for each in near]
            cells.append(f"{statistics.fmean(cost):.3f}, {quantile(cost, 0.95):.3f}")
            spreads.append(f"{statistics.pstdev(errors):.3f}")
        tokens = tokens_of(*RANGES[range_])
        lines.append(f"| {name} | {tokens} | {len(by_problem)} | {' | '.join(cells)} | {' | '.join(spreads)} |")
    return lines


def judged_cublaslt(
    some: Sequence[tuple[Problem, float, Speeds]], found: Mapping[str, corrections.Correction]
) -> list[str]:
    """Return, as lines of a table, by how much cuBLASLt's predictions are off, by range of M, without and with them.

    The root mean square of logarithms: it competes with other kernels, so its mean counts too.
    """
    lines = ["| cuBLASLt, tokens | problems | off by | with corrections |", "|---|---:|---:|---:|"]
    for first, last in RANGES:
        within = [each for each in some if first <= each[0].m <= last]
        if not within:
            continue
        cells = []
        for added in ({}, found):
            errors = [math.log(us / predict.cublaslt(p, replace(known, corrections=added))) for p, us, known in within]
            cells.append(f"{math.sqrt(statistics.fmean(e * e for e in errors)):.3f}")
        lines.append(f"| {tokens_of(first, last)} | {len(within)} | {' | '.join(cells)} |")
    return lines


# ---- The file ----


def text(trees: Mapping[str, Sequence[Tree]], records: Sequence[str]) -> str:
    """Return the file: a line for each tree."""
    about = "Made by bench/fit_corrections.py; corrections.py says what it means."
    head: dict[str, Any] = {"about": about, "speeds": digest_of_speeds(), "records": list(records)}
    head |= {"depth": corrections.DEPTH, "few": list(corrections.FEW), "many": list(corrections.MANY)}
    head |= {corrections.CUBLASLT: list(corrections.LT)}
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    groups = []
    for name, some in trees.items():
        rows = ",\n".join(f"   {json.dumps(each, separators=(',', ':'))}" for each in some)
        groups.append(f"  {json.dumps(name)}: [\n{rows}\n  ]")
    return "\n".join(["{", *lines, ' "trees": {', ",\n".join(groups), " }", "}", ""])


def digest_of_speeds(path: Path = speeds.FILE) -> str:
    """Return the SHA-256 of the constants that the corrections are for, and of the records that these were fitted to.

    Neither the quantiser before cuBLASLt's GEMM, nor that GEMM under block scales, nor the writing out of weights is
    corrected: they may change.
    """
    others = ("before_cublaslt", "cublaslt_block", "block_records", "unfold")
    rows = [{key: value for key, value in row.items() if key not in others} for row in strict_toml.load(path)["gpu"]]
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def with_corrections(trees: Mapping[str, Sequence[Tree]]) -> dict[str, corrections.Correction]:
    """Return trees as the package reads them."""
    return corrections.load(json.loads(text(trees, ())))


def launches_of(paths: Sequence[Path], *, few: bool, since: str = "") -> list[tuple[Timed, Speeds]]:
    """Return the launches of records, each with its GPU's constants, without corrections.

    ``since``: for few tokens with FP8 activations, those of records of that day and later.
    """
    return [
        (each, known)
        for record, known in records_of(paths)
        for each in timed(record, known, few=few)
        if not few or KERNELS[each.kernel].x_bytes > 1 or record["facts"]["date"] >= since
    ]


def cublaslt_of(paths: Sequence[Path]) -> list[tuple[Problem, float, Speeds]]:
    """Return what records say of cuBLASLt's FP8 GEMM, with the GPU's constants as of :func:`launches_of`."""
    return [(*each, known) for record, known in records_of(paths) for each in timed_cublaslt(record)]


def records_of(paths: Sequence[Path]) -> Iterator[tuple[dict[str, Any], Speeds]]:
    """Yield records, each with its GPU's constants, without corrections."""
    plain = speeds.load(strict_toml.load(speeds.FILE))
    for path in paths:
        record = json.loads(records.unpacked(path))
        model = gpu_models.named(record["facts"]["device"])
        if model is None or model.name not in plain:
            raise SystemExit(
                f"{path}: {record['facts']['device']} has no constants in {speeds.FILE.name}: fit them first"
            )
        yield as_samples(record), plain[model.name]


def as_samples(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record of samples as it is, and of a random suite the launches of a shape, as samples have them.

    Those that take turns with layers, and those that layers ran, each once.
    """
    if record.get("kind") != random_report.KIND:
        return record
    formats = {each.format for each in FAMILIES}
    by_layers = [row for row in record["measured"] if record["methods"][row["method"]]["format"] in formats]
    named = [(row["method"].removeprefix(PREFIX), row) for row in record["launches"]]
    named += [(row.get("ran", ""), row) for row in by_layers]  # older records do not say it
    problems: dict[tuple[int, ...], dict[str, Any]] = {}
    seen = set()
    for name, row in named:
        backend, gemm, shape = (*name.split(), "", "", "")[:3]
        size = {key: row[key] for key in ("n", "k", "m")}
        if row["us"] is None or not shape or (name, *size.values()) in seen:
            continue
        seen.add((name, *size.values()))
        problem = problems.setdefault(tuple(size.values()), {**size, "whole": True, "launches": {}})
        numbers = [int(each) for each in shape.split(",")]
        problem["launches"].setdefault(f"{backend} {gemm}", []).append([numbers, row["us"]])
    return {**record, "problems": list(problems.values())}


def main(words: Sequence[str] | None = None) -> None:
    """Fit, judge, and write."""
    parser = commandline.parser(__doc__)
    for name, about in (
        ("few", "samples of kernels for few tokens"),
        ("many", "samples of kernels for many tokens"),
        ("suites", "records of random suites"),
    ):
        parser.add_argument(f"--{name}", type=Path, nargs="+", default=[], help=about)
    parser.add_argument("--judge", type=Path, nargs="+", default=[], help="samples that are not fitted to")
    parser.add_argument("--only", nargs="+", metavar="GROUP", help="fit these; the others stay as the file has them")
    parser.add_argument("--write", action="store_true", help=f"into {corrections.FILE.name}")
    args = commandline.parse(parser, words)
    if not args.only and not (args.few and args.many):
        parser.error("needs --few and --many, or --only")
    if twice := set(args.judge) & {*args.few, *args.many, *args.suites}:
        parser.error(f"{', '.join(map(str, sorted(twice)))}: judged on what it is fitted to")
    paths = sorted({*args.few, *args.many, *args.suites}, key=lambda path: path.name)
    named = {fit_speeds.cited(path, as_samples(json.loads(records.unpacked(path)))) for path in paths}
    launches = [*launches_of(args.few, few=True, since=SINCE), *launches_of(args.many, few=False)]
    if args.only:
        held = json.loads(corrections.FILE.read_text("utf-8"))
        groups = {*held["trees"]} | {group_of(each) for each, _ in launches}
        if unknown := sorted({*args.only} - groups):
            parser.error(f"--only {' '.join(unknown)}: groups are {', '.join(sorted(groups))}")
        trees = {name: [Tree(*each) for each in some] for name, some in held["trees"].items()}
        named |= {*held["records"]}
    else:
        trees = {}
    if not args.only or corrections.CUBLASLT in args.only:
        trees[corrections.CUBLASLT] = fit_cublaslt(cublaslt_of(args.many))
    trees |= fit(launches, args.only)
    if args.suites:
        suites = [each for few in (True, False) for each in launches_of(args.suites, few=few, since=SINCE)]
        trees |= fit(launches, args.only, levelled(suites, with_corrections(trees)))
    found = with_corrections(trees)
    if args.judge:
        some = [*launches_of(args.judge, few=True), *launches_of(args.judge, few=False)]
        print("\n".join([*judged(some, found), "", *judged_cublaslt(cublaslt_of(args.judge), found)]))
    if args.write:
        corrections.FILE.write_text(text(trees, sorted(named)), "utf-8")


if __name__ == "__main__":
    main()
