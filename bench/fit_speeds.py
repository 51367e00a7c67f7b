"""Fit the constants of all time models to samples of a GPU: a row of tiling/speeds.toml. Needs scipy, no GPU.

Samples come from bench/launch_samples.py. Each of the GPU's facts, kernels for few tokens, quantisers, cuBLASLt and the
writing out of weights has a few constants; all are fitted by least squares of logarithms in which outliers count less.
Those of kernels for few tokens are then moved a little, so that the launches that they put first cost less.

    python -m bench.fit_speeds --fit samples/launch-samples-seed-11-h200.json ... --many FILE --few FILE [--write]

Few samples: ``--near-scaled`` starts the kernels for few tokens from another GPU's constants, ``--few-before`` from
what samples of older builds say; the fit then stays near.
Kernels for few tokens are fitted to the samples of ``--few``, those for many to ``--many``, libraries to ``--fit``. Of
few tokens with FP8 activations only samples with their quantiser (``--whole``) count. Of such samples, what a quantiser
adds is taken off: layers run both.
``--few-of KERNEL FILE ...``: where one of them has changed since ``--few``. It is fitted to these samples, and stays
near what the older ones say.
``--young BUILD ...``: fit only the factors of these builds, to ``--many``; everything else stays as speeds.toml has it.
``--block FILE ...``: fit only cuBLASLt under block scales, to samples of the layer on it; everything else stays.
``--write`` puts the GPU's constants into speeds.toml, in place of those it has. bench/judge_choices.py judges them.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from bench import fit_launch_model
from bench.shared import commandline
from fp4dispatch import strict_toml
from fp4dispatch.backends.own.tiling import few_tokens_model, launch_model, other_models, predict, speeds
from fp4dispatch.backends.own.tiling.few_tokens import KERNELS, SM90, FewTokensKernel, FewTokensShape
from fp4dispatch.backends.own.tiling.few_tokens_model import FewTokensSpeed, Wave, Work
from fp4dispatch.benchmark.reports import records
from fp4dispatch.machine import gpu_models

PRIOR, KNOWN_PRIOR = 0.01, 2.0
"""Weights of what a constant is before the fit. The first decides only where the samples say nothing. The second is for
constants of another GPU, scaled, or of kernels as they were: on an H100, with 136 problems, choices on other sizes were
better than with the scaled constants or with the samples alone."""
OUTLIER = 0.1
NEAR, FAR = (1.3, 1.0), (2.0, 0.4)
"""(Times the best launch of the problem, weight): launches that nobody will choose weigh less."""
FAR_WEIGHT = 0.15
TEMPERATURE, CHOICE_PRIOR = 0.01, 0.1
"""Of kernels for few tokens. With launches of a problem weighed by exp(-log(predicted time) / TEMPERATURE) what a
choice costs has a slope. The prior holds the constants near those that predict best. bench/notes/random-problems.md
says what choices cost with and without this step."""
FEW_START = {
    "start": 1.5,
    "wave": 1.2,
    "crowd": 0.1,
    "cluster": 1.0,
    "doubling": 0.3,
    "sums": 20e3,
    "sent": 20e3,
    "latency": 0.8,
    "latency_sync": 0.8,
    "memory": 4.3e6,
    "l2": 12e6,
    "overlap": 0.3,
    "late": 0.5,
    "late_stage": 0.05,
    "early": 0.6,
    "gather": 0.2,
    "tokens": 50e3,
    "beside": 0.2,
}
GONE = 0.1
"""Of its start. A constant that was fitted to less says nothing by its logarithm: it is fitted anew, not held near."""
TILE_START = (0.2, 0.08)
REACHED, BANDWIDTH_PRIOR = 0.9, 3.0
"""Of the GPU's memory bandwidth, and the weight of that start: else other constants take its place, and none of them is
scaled by the bandwidth of another GPU."""
LT_START, LT_MEMORY, LT_END, LT_SLOWING, LT_STAGE = 4.0, 4.3e6, 2.0, 0.05, 0.36
BLOCK_LAYER = "FP8Linear/block128/cublaslt"
BLOCK_START = (3.0, 3e6, 4.0, 0.05, 0.37, 1e-4, 8e-7)
FEW = 8
"""Up to so many tokens only kernels for few tokens run: the others are not fitted to these."""
DIGITS = 4
LEAST_SHARE = 0.2
"""Of a launch and its quantiser, at least, is the launch's."""


def least(
    function: Callable[[np.ndarray], np.ndarray], start: Sequence[float], prior: float | np.ndarray = PRIOR
) -> np.ndarray:
    """Return the positive constants that make logarithms smallest, from where they start."""
    first = np.log(np.array(start))

    def residuals(x: np.ndarray) -> np.ndarray:
        return np.concatenate([function(np.exp(x)), prior * (x - first)])

    return np.exp(least_squares(residuals, first, loss="soft_l1", f_scale=OUTLIER, max_nfev=200).x)


# ---- Few tokens ----

Launch = tuple[tuple[int, int, int], FewTokensShape, float]


def few_launches(problems: Iterable[dict[str, Any]], kernel: str, *, blocks: bool) -> list[Launch]:
    """Return the timed launches of a kernel for few tokens: (n, k, m), shape, microseconds.

    Those of tiles that are built, with rings that leave room for the next quantiser: others are not launched.
    """
    about = KERNELS[kernel]
    some = [
        ((p["n"], p["k"], p["m"]), FewTokensShape(*shape), us)
        for p in problems
        for shape, us in timed(p, kernel, blocks=blocks)
        if shape is not None
    ]
    return [each for each in some if is_launched(about, each[1], blocks=blocks)]


def is_launched(about: FewTokensKernel, shape: FewTokensShape, *, blocks: bool) -> bool:
    """Whether a launch is one that layers may choose."""
    return shape[:4] in about.instances and about.leaves_room(shape, SM90, block_scales=blocks)


def gemms_alone(p: dict[str, Any], quantised: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Return a problem whose launches were timed with their quantisers as one of GEMMs: less what a quantiser adds."""
    if not p.get("whole"):
        return p
    launches = {}
    for name, some in p["launches"].items():
        # Weights that are written out are fitted together with their quantiser: fit_unfold().
        kind = None if predict.UNFOLD in name else KINDS.get(f"{name.split()[0]} {format_of(name)}")
        added = other_models.QuantiserSpeed(**quantised[kind]).microseconds(p["m"], p["k"]) if kind else 0.0
        launches[name] = [[shape, max(us - added, LEAST_SHARE * us)] for shape, us in some]
    return p | {"launches": launches}


def serves(p: dict[str, Any], kernel: str) -> bool:
    """Whether a kernel is fitted to a problem: FP8 activations to launches that were timed with their quantiser."""
    return KERNELS[kernel].x_bytes > 1 or bool(p.get("whole"))


def timed(p: dict[str, Any], kernel: str, *, blocks: bool) -> Iterator[tuple[Sequence[int] | None, float]]:
    """Yield the launches of a kernel that were timed for a problem: shape, or None for its own; microseconds."""
    for name, launches in p["launches"].items():
        launched, _, build = name.partition(" ")[2].partition("/")
        if launched == kernel and build.startswith("block_") == blocks:
            yield from launches


def fit_few(
    kernel: str,
    some: Sequence[Launch],
    usable: tuple[int, ...],
    *,
    blocks: bool,
    known: FewTokensSpeed | None,
    bandwidth: float | None = None,
) -> FewTokensSpeed:
    """Fit a kernel's constants, near those that are ``known``. Tiles that were never launched are left out.

    ``bandwidth``: of the GPU's memory, in bytes per microsecond.
    """
    tiles = sorted({shape[:4] for _, shape, _ in some})
    work = stacked([few_tokens_model.work(KERNELS[kernel], s, m, n, k, usable, blocks) for (n, k, m), s, _ in some])
    which = np.array([tiles.index(shape[:4]) for _, shape, _ in some])
    us = np.array([each for *_, each in some])
    weights = weights_of([problem for problem, *_ in some], us)
    count = len(FEW_START)

    def at(x: np.ndarray) -> np.ndarray:
        speed = FewTokensSpeed(*x[:count], tiles=())
        alone, full = x[count : count + len(tiles)], x[count + len(tiles) :]
        found: np.ndarray = few_tokens_model.time_of(speed, alone[which], full[which], work)
        return found

    before = {} if known is None else {name: getattr(known, name) for name in FEW_START}
    kept = {name: value for name, value in before.items() if value > GONE * FEW_START[name]}
    first = FEW_START | kept
    if known is None and bandwidth is not None:
        first["memory"] = REACHED * bandwidth
    held = [None if known is None else known.of_tile.get(tile) for tile in tiles]
    times = [TILE_START if each is None else each for each in held]
    start = [*first.values(), *(alone for alone, _ in times), *(full for _, full in times)]
    of_tiles = [PRIOR if each is None else KNOWN_PRIOR for each in held]
    prior = np.array([*(KNOWN_PRIOR if name in kept else PRIOR for name in FEW_START), *of_tiles, *of_tiles])
    if bandwidth is not None:
        prior[list(first).index("memory")] = BANDWIDTH_PRIOR
    x = least(lambda x: weights * np.log(at(x) / us), start, prior)
    x = for_choices(at, x, [problem for problem, *_ in some], us, weights, np.maximum(prior, CHOICE_PRIOR))
    alone, full = x[count : count + len(tiles)], x[count + len(tiles) :]
    rows = zip(tiles, map(rounded, alone), map(rounded, full), strict=True)
    return FewTokensSpeed(*map(rounded, x[:count]), tiles=tuple(rows))


def for_choices(
    predicted: Callable[[np.ndarray], np.ndarray],
    start: np.ndarray,
    problems: Sequence[tuple[int, int, int]],
    us: np.ndarray,
    weights: np.ndarray,
    prior: np.ndarray,
) -> np.ndarray:
    """Return constants near ``start`` with which choices cost less: the launch predicted fastest of each problem."""
    order = np.array(sorted(range(len(us)), key=problems.__getitem__))
    firsts = np.array([i for i, at in enumerate(order) if i == 0 or problems[order[i - 1]] != problems[at]])
    of = np.repeat(np.arange(len(firsts)), np.diff([*firsts, len(us)]))
    measured, first = np.log(us[order]), np.log(start)
    lost = measured - np.minimum.reduceat(measured, firsts)[of]
    share = math.sqrt(len(firsts) / len(us))

    def residuals(x: np.ndarray) -> np.ndarray:
        logs = np.log(predicted(np.exp(x)))[order]
        chances = np.exp((np.minimum.reduceat(logs, firsts)[of] - logs) / TEMPERATURE)
        cost = np.add.reduceat(chances * lost, firsts) / np.add.reduceat(chances, firsts)
        errors = weights[order] * (logs - measured) * share
        return np.concatenate([np.sqrt(cost + 1e-6), errors, prior * (x - first)])

    return np.exp(least_squares(residuals, first, max_nfev=60).x)


Regrets = dict[int, list[tuple[float, float]]]
"""By tokens of the tile that is chosen: times over the best with any ring, with the shallowest."""


def held_out(
    problems: Sequence[dict[str, Any]],
    kernel: str,
    usable: tuple[int, ...],
    *,
    blocks: bool,
    known: FewTokensSpeed | None,
    bandwidth: float | None = None,
) -> Regrets:
    """Return what choices cost. Fitted to every other (N, K), judged on the others, and the other way round."""
    problems = [p for p in problems if few_launches([p], kernel, blocks=blocks)]
    sizes = sorted({(p["n"], p["k"]) for p in problems})
    found: Regrets = {}
    for half in (0, 1):
        fitted = [p for p in problems if sizes.index((p["n"], p["k"])) % 2 == half]
        others = [p for p in problems if sizes.index((p["n"], p["k"])) % 2 != half]
        some = few_launches(fitted, kernel, blocks=blocks)
        if not some:
            continue
        speed = fit_few(kernel, some, usable, blocks=blocks, known=known, bandwidth=bandwidth)
        shallow = replace(speed, shallow=tuple({tile[0] for tile, *_ in speed.tiles}))
        for p in others:
            launches = few_launches([p], kernel, blocks=blocks)
            any_ring, two = (chosen(kernel, each, launches, usable, blocks=blocks) for each in (speed, shallow))
            if any_ring is not None and two is not None:
                best = min(us for *_, us in launches)
                found.setdefault(any_ring[1], []).append((any_ring[0] / best, two[0] / best))
    return found


def few_tokens(
    problems: Sequence[dict[str, Any]],
    kernel: str,
    usable: tuple[int, ...],
    *,
    blocks: bool,
    known: FewTokensSpeed | None = None,
    bandwidth: float | None = None,
) -> dict[str, Any] | None:
    """Fit a kernel for few tokens; None if it was never launched."""
    problems = [p for p in problems if serves(p, kernel)]
    some = few_launches(problems, kernel, blocks=blocks)
    if not some:
        return None
    speed = fit_few(kernel, some, usable, blocks=blocks, known=known, bandwidth=bandwidth)
    skipped = ("tiles", "shallow")
    found: dict[str, Any] = {each.name: getattr(speed, each.name) for each in fields(speed) if each.name not in skipped}
    found["shallow"] = []
    regrets = held_out(problems, kernel, usable, blocks=blocks, known=known, bandwidth=bandwidth)
    for tokens, each in sorted(regrets.items()):
        any_ring, two = map(statistics.fmean, zip(*each, strict=True))
        found["shallow"] += [tokens] if two < any_ring else []
    found["tiles"] = [[*tile, alone, full] for tile, alone, full in speed.tiles]
    return found


def chosen(
    kernel: str, speed: FewTokensSpeed, launches: Sequence[Launch], usable: tuple[int, ...], *, blocks: bool
) -> tuple[float, int] | None:
    """Return the time of the launch that the model chooses, and the tokens of its tile."""
    times = [
        (few_tokens_model.microseconds(kernel, speed, s, m, n, k, usable, blocks), us, s.tokens)
        for (n, k, m), s, us in launches
        if speed.covers(s)
    ]
    return min(times)[1:] if times else None


def stacked(works: Sequence[Work]) -> Work:
    """Return many works as one of arrays."""
    columns: list[Any] = []
    for name, column in zip(Work._fields, zip(*works, strict=True), strict=True):
        if name in ("full", "last"):
            columns.append(Wave(*(np.array(each, float) for each in zip(*column, strict=True))))
        else:
            columns.append(np.array(column, float))
    return Work(*columns)


def weights_of(
    problems: Sequence[Hashable],
    us: np.ndarray,
    near: tuple[float, float] = NEAR,
    far: tuple[float, float] = FAR,
) -> np.ndarray:
    """Return the weight of each launch: less for those that are far from the best of their problem."""
    best: dict[Hashable, float] = {}
    for problem, each in zip(problems, us, strict=True):
        best[problem] = min(each, best.get(problem, math.inf))
    times = us / np.array([best[problem] for problem in problems])
    return np.where(times <= near[0], near[1], np.where(times <= far[0], far[1], FAR_WEIGHT))


# ---- Everything else ----


Added = tuple[int, int, float, float]
"""M, K, the microseconds that a quantiser adds, and those of it and its GEMM together."""


def fit_quantiser(samples: Sequence[Added]) -> dict[str, float]:
    """Fit what a quantiser adds; errors are shares of the whole, because that is what choices compare."""
    m, k, us, whole = np.array(samples, float).T
    x = least(lambda x: (other_models.QuantiserSpeed(*x).microseconds(m, k) - us) / whole, [1.2, 1e-4, 1e-6])
    return {"start": rounded(x[0]), "row": rounded(x[1]), "element": rounded(x[2])}


def quantisers(problems: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Fit the quantisers before our GEMMs to what a GEMM takes with it and without.

    That is more than a quantiser alone takes: without it, the next GEMM starts while this one ends.
    """
    of: dict[str, list[Added]] = {name: [] for name in speeds.QUANTISERS}
    for p in problems:
        if p.get("whole"):
            continue
        for family, kind in KINDS.items():
            whole, alone = p["with_quantiser"].get(family), fastest_of(p, *family.split())
            if whole is not None and alone is not None:
                of[kind].append((p["m"], p["k"], whole - alone, whole))
    return {kind: fit_quantiser(samples or of["w4_row"]) for kind, samples in of.items()}


KINDS = {"w4a8 nvfp4": "w4_row", "w8a8 row": "w8_row", "w8a8 block128": "w8_block"}
"""Quantisers by the families of launches whose activations they quantise."""


def format_of(name: str) -> str:
    """Return the format of the weights of launches, by their name in a record."""
    backend, build = name.split()
    return "nvfp4" if backend.startswith("w4") else "block128" if "block_" in build else "row"


def fastest_of(p: dict[str, Any], backend: str, fmt: str) -> float | None:
    """Return the time of a family's fastest GEMM alone; None if it was not launched, or is not a kernel of ours."""
    found = [
        (launches[0][1], each)
        for each, launches in p["launches"].items()
        if each.split()[0] == backend and format_of(each) == fmt
    ]
    us, name = min(found, default=(None, ""))
    return None if predict.UNFOLD in name else us


def fit_cublaslt(problems: Sequence[dict[str, Any]], sms: int) -> dict[str, Any]:
    """Fit cuBLASLt's FP8 GEMM."""
    some = [(p["n"], p["k"], p["m"], p["scaled_mm"]) for p in problems if "scaled_mm" in p]
    n, k, m, us = np.array(some, float).T
    tiles = other_models.LT_TILES
    waves = [np.ceil(np.ceil(m / tokens) * np.ceil(n / rows) / sms) for tokens, rows in tiles]

    def at(x: np.ndarray) -> np.ndarray:
        each = [w * t for w, t in zip(waves, x[4:], strict=True)]
        found: np.ndarray = other_models.lt_time(*x[:4], each, n, k)
        return found

    start = [LT_START, LT_MEMORY, LT_END, LT_SLOWING, *(LT_STAGE * (a * b / 128**2) ** 0.9 for a, b in tiles)]
    x = least(lambda x: np.log(at(x) / us), start)
    numbers = dict(zip(("start", "memory", "end", "slowing"), map(rounded, x[:4]), strict=True))
    return {**numbers, "tiles": [rounded(each) for each in x[4:]]}


def fit_cublaslt_block(problems: Sequence[dict[str, Any]], sms: int) -> dict[str, float]:
    """Fit cuBLASLt's FP8 GEMM under block scales with its quantiser, to the layer on it."""
    some = [
        (p["n"], p["k"], p["m"], p["layers"][BLOCK_LAYER])
        for p in problems
        if BLOCK_LAYER in p.get("layers", ()) and not p["k"] % predict.BLOCK_K and not p["n"] % predict.BLOCK_N
    ]
    if not some:
        raise SystemExit(f"no sample has {BLOCK_LAYER}: add some of bench/launch_samples.py on sm_90")
    n, k, m, us = np.array(some, float).T
    names = [each.name for each in fields(other_models.BlockScaledSpeed)]

    def error(x: np.ndarray) -> np.ndarray:
        found: np.ndarray = np.log(other_models.BlockScaledSpeed(*x).microseconds(m, n, k, sms) / us)
        return found

    return dict(zip(names, map(rounded, least(error, BLOCK_START)), strict=True))


def fit_unfold(problems: Sequence[dict[str, Any]]) -> tuple[dict[str, float], dict[str, float]]:
    """Fit the writing out of weights and the quantiser before cuBLASLt's GEMM, to what they take beside that GEMM.

    Only samples with the quantiser (``--whole``) say what it adds: with many tokens up to 1.8 times what it takes alone
    (bench/notes/quantisers.md). Errors are shares of the whole, because that is what choices compare.
    """
    some = [
        (p["n"], p["k"], p["m"], bool(p.get("whole")), p["scaled_mm"], found[0][1])
        for p in problems
        if "scaled_mm" in p and (found := p["launches"].get(f"w4a8 {predict.UNFOLD}/any"))
    ]
    n, k, m, whole, alone, us = np.array(some, float).T
    if not whole.any():
        raise SystemExit("no sample has cuBLASLt's GEMM with its quantiser: add some of launch_samples.py --whole")

    def at(x: np.ndarray) -> np.ndarray:
        added = whole * other_models.RowsQuantiserSpeed(*x[2:]).microseconds(m, k)
        found: np.ndarray = alone + other_models.UnfoldSpeed(*x[:2]).microseconds(n, k) + added
        return found

    x = least(lambda x: np.log(at(x) / us), [2.0, 3.5e6, 1.2, 1e-4, 1e-6, 1e-6])
    unfold = dict(zip(("start", "memory"), map(rounded, x[:2]), strict=True))
    return unfold, dict(zip(("start", "token", "element", "far"), map(rounded, x[2:]), strict=True))


def many_tokens(problems: Sequence[dict[str, Any]], sms: int) -> tuple[dict[str, float], dict[str, float]]:
    """Fit the launch model's constants of the GPU, then how many times as long as it says each build takes."""
    some = fit_launch_model.points([{"problems": problems}])
    start = fit_launch_model.in_use(launch_model.gpu_with(sms), some)
    model = fit_launch_model.fitted(start, some, builds=False)
    gpu = {name: rounded(getattr(model.gpu, name)) for name in speeds.GPU_CONSTANTS}
    return gpu, build_factors(model, some)


def build_factors(model: fit_launch_model.Model, some: Iterable[fit_launch_model.Point]) -> dict[str, float]:
    """Return how many times as long as a model says the launches take that it chooses: medians, by build."""
    ratios: dict[str, list[float]] = {}
    groups: dict[Any, list[fit_launch_model.Point]] = {}
    for point in filter(fit_launch_model.modelled, some):
        groups.setdefault((point.problem, point.build), []).append(point)
    for (_, build), group in groups.items():
        chosen = min(group, key=lambda point: point.predicted(model))
        ratios.setdefault("/".join(build), []).append(math.log(chosen.us / chosen.predicted(model)))
    return {build: rounded(math.exp(statistics.median(found))) for build, found in sorted(ratios.items())}


def with_young(
    row: dict[str, Any], problems: Sequence[dict[str, Any]], young: Sequence[str], named: Sequence[str]
) -> dict[str, Any]:
    """Return the [[gpu]] of speeds.toml with the factors of builds that are younger than its constants.

    Parameters
    ----------
    row
        The [[gpu]] as it is.
    problems
        Samples of these builds.
    young
        The builds: ``kernel/build``.
    named
        The records of the samples, as the file names them.
    """
    some = fit_launch_model.points([{"problems": [gemms_alone(p, row["quantisers"]) for p in problems]}])
    facts = replace(launch_model.H200, **row["many_tokens"])
    found = build_factors(fit_launch_model.in_use(facts, some), some)
    if missing := sorted({*young} - {*found}):
        raise SystemExit(f"{', '.join(missing)}: not in the samples, which have {', '.join(found)}")
    builds = dict(sorted((row["builds"] | {build: found[build] for build in young}).items()))
    return row | {"records": sorted({*row["records"], *named}), "builds": builds}


def with_block(row: dict[str, Any], problems: Sequence[dict[str, Any]], named: Sequence[str]) -> dict[str, Any]:
    """Return the [[gpu]] of speeds.toml with cuBLASLt under block scales fitted anew, and the records that it cites.

    Arguments as of :func:`with_young`. Nothing else is fitted to these records, so corrections hold (fit_corrections).
    """
    model = gpu_models.named(row["name"])
    assert model is not None
    fitted = fit_cublaslt_block(problems, model.sms)
    return row | {"block_records": list(named), "cublaslt_block": fitted}


Records = Sequence[dict[str, Any]]


def fit(
    records: Records,
    many_records: Records,
    few_records: Records,
    before: Records,
    named: Sequence[str],
    *,
    near_scaled: bool = False,
    few_of: Mapping[str, Records] | None = None,
) -> dict[str, Any]:
    """Return the [[gpu]] of speeds.toml as plain data. ``few_of``: samples of one kernel, by its name there."""
    problems = [p for record in (*records, *many_records) for p in record["problems"]]
    of_many_tokens = [p for record in many_records for p in record["problems"]]
    of_few_tokens = [p for record in few_records for p in record["problems"]]
    more = [p for p in problems if p["m"] > FEW]
    device = records[0]["facts"]["device"]
    model = gpu_models.named(device)
    if model is None:
        raise SystemExit(f"{device} is not in gpu_models.toml: add it first")
    usable, bandwidth = launch_model.gpu_with(model.sms).usable, model.memory_gbs * 1e3
    scaled = speeds.scaled_to(model) if near_scaled else None
    if near_scaled and scaled is None:
        raise SystemExit(f"no other GPU of {model.arch} is in {speeds.FILE.name}: leave --near-scaled out")
    few: dict[str, Any] = {}
    if any(BLOCK_LAYER in p.get("layers", ()) for p in problems):
        block, block_records = fit_cublaslt_block(problems, model.sms), list(named)
    else:
        block, block_records = (row_of(records[0])[key] for key in ("cublaslt_block", "block_records"))
    quantised = quantisers([*of_few_tokens, *of_many_tokens])
    unfold, before_cublaslt = fit_unfold(more)
    gpu, builds = many_tokens([gemms_alone(p, quantised) for p in of_many_tokens], model.sms)

    def alone(some: Records) -> list[dict[str, Any]]:
        return [gemms_alone(p, quantised) for record in some for p in record["problems"]]

    as_it_was = alone(before)
    for kernel in KERNELS:
        for blocks in (False, True):
            name = f"{kernel} {speeds.BLOCKS}" if blocks else kernel
            known = scaled.few_tokens.get(name) if scaled is not None else None
            changed = few_of is not None and name in few_of
            older = alone(few_records) if changed else as_it_was
            if some := few_launches([p for p in older if serves(p, kernel)], kernel, blocks=blocks):
                known = fit_few(kernel, some, usable, blocks=blocks, known=known, bandwidth=bandwidth)
            sampled = alone((few_of or {}).get(name, few_records))
            row = few_tokens(sampled, kernel, usable, blocks=blocks, known=known, bandwidth=bandwidth)
            if row is not None:
                few[name] = row
    return {
        "name": model.name,
        "records": list(named),
        "block_records": block_records,
        "many_tokens": gpu,
        "builds": builds,
        "quantisers": quantised,
        "before_cublaslt": before_cublaslt,
        "cublaslt": fit_cublaslt(more, model.sms),
        "cublaslt_block": block,
        "unfold": unfold,
        "few_tokens": few,
    }


# ---- The file ----

HEADER = """\
# Constants of time models, by GPU model. Made by bench/fit_speeds.py from records of bench/launch_samples.py: `records`
# has name, problems and SHA-256 of each, and `block_records` those of `cublaslt_block`; the same command on the same
# records writes the same numbers. speeds.py says what they mean. A GPU that is not here gets those of the GPU of its
# arch with the nearest memory bandwidth, scaled by its facts.
"""


def text(rows: Iterable[dict[str, Any]]) -> str:
    """Return rows as the file."""
    lines = [HEADER]
    for row in rows:
        lines += ["[[gpu]]", f"name = {json.dumps(row['name'])}"]
        for key in ("records", "block_records"):
            lines += [f"{key} = [", *(f"  {json.dumps(each)}," for each in row[key]), "]"]
        lines += [f"many_tokens = {inline(row['many_tokens'])}"]
        lines += [f"{key} = {inline(row[key])}" for key in ("before_cublaslt", "cublaslt", "cublaslt_block", "unfold")]
        lines += ["", "[gpu.builds]"]
        lines += [f"{json.dumps(key)} = {value}" for key, value in row["builds"].items()]
        lines += ["", "[gpu.quantisers]"]
        lines += [f"{key} = {inline(value)}" for key, value in row["quantisers"].items()]
        for name, few in row["few_tokens"].items():
            lines += ["", f"[gpu.few_tokens.{json.dumps(name)}]"]
            lines += [f"{key} = {value}" for key, value in few.items() if key != "tiles"]
            lines += ["tiles = [", *(f"  {tile}," for tile in few["tiles"]), "]"]
        lines.append("")
    return "\n".join(lines)


def inline(row: dict[str, Any]) -> str:
    """Return a table in one line."""
    return "{ " + ", ".join(f"{key} = {value}" for key, value in row.items()) + " }"


def rounded(value: float) -> float:
    """Return a number with a few digits, so that the file does not depend on the machine that fits."""
    return float(f"{value:.{DIGITS}g}")


def cited(path: Path, record: dict[str, Any]) -> str:
    """Return how the file names a record."""
    sha256 = hashlib.sha256(records.unpacked(path)).hexdigest()
    return f"{records.stem(path)}, {len(record['problems'])} problems, sha256 {sha256}"


def row_of(record: dict[str, Any]) -> dict[str, Any]:
    """Return the [[gpu]] that the file has of a record's GPU."""
    model = gpu_models.named(record["facts"]["device"])
    found = [row for row in strict_toml.load(speeds.FILE)["gpu"] if model is not None and row["name"] == model.name]
    if not found:
        raise SystemExit(f"{record['facts']['device']} is not in {speeds.FILE.name}: fit all of it first")
    row: dict[str, Any] = found[0]
    return row


def written(path: Path, row: dict[str, Any]) -> None:
    """Put a GPU's constants into the file."""
    rows = strict_toml.load(path)["gpu"] if path.exists() else []
    at = next((i for i, each in enumerate(rows) if each["name"] == row["name"]), len(rows))
    path.write_text(text([*rows[:at], row, *rows[at + 1 :]]), "utf-8")


def main(words: Sequence[str] | None = None) -> None:
    """Fit, and print or write."""
    parser = commandline.parser(__doc__)
    parser.add_argument("--fit", type=Path, nargs="+", default=[])
    parser.add_argument("--many", type=Path, nargs="+", default=[], help="samples of kernels for many tokens")
    parser.add_argument("--few", type=Path, nargs="+", default=[], help="samples of kernels for few tokens")
    parser.add_argument(
        "--few-of", nargs="+", action="append", default=[], metavar="KERNEL", help="a kernel, and newer samples of it"
    )
    parser.add_argument(
        "--few-before", type=Path, nargs="+", default=[], help="of kernels for few tokens as they were; fitted first"
    )
    parser.add_argument(
        "--near-scaled",
        action="store_true",
        help="few tokens: stay near the constants of another GPU of this arch, scaled",
    )
    parser.add_argument("--young", nargs="+", default=[], metavar="BUILD", help="kernel/build: fit only their factors")
    parser.add_argument(
        "--block", type=Path, nargs="+", default=[], help="samples of the layer on cuBLASLt: fit only that"
    )
    parser.add_argument("--write", action="store_true", help=f"into {speeds.FILE.name}")
    parser.add_argument("--to", type=Path, default=speeds.FILE, help="another file to write")
    args = commandline.parse(parser, words)
    others = args.fit, args.few, args.few_of, args.few_before, args.near_scaled
    if args.block and (args.many or args.young or any(others)):
        parser.error("--block leaves all else as it is: it takes no other samples")
    if args.young and any(others):
        parser.error("--young leaves all else as it is: it takes --many alone")
    if not args.block and not (args.many and (args.young or (args.fit and args.few))):
        parser.error("needs --many with --fit and --few, or with --young; or --block")
    known = {f"{kernel}{kind}" for kernel in KERNELS for kind in ("", f" {speeds.BLOCKS}")}
    for name, *files in args.few_of:
        if name not in known or not files:
            parser.error(f"--few-of {name}: needs one of {', '.join(sorted(known))}, and files")
    few_of = {name: [Path(file) for file in files] for name, *files in args.few_of}
    asked = args.fit, args.many, args.few, args.few_before, args.block
    paths = sorted({path for some in (*asked, *few_of.values()) for path in some}, key=lambda path: path.name)
    read = {path: json.loads(records.unpacked(path)) for path in paths}
    if len({record["facts"]["device"] for record in read.values()}) != 1:
        parser.error("samples of several GPU models: fit each alone")
    samples, many, few, before, block = ([read[path] for path in paths if path in some] for some in asked)
    named = [cited(path, record) for path, record in read.items()]
    of = {name: [read[path] for path in some] for name, some in few_of.items()}
    if args.block:
        row = with_block(row_of(block[0]), [p for record in block for p in record["problems"]], named)
    elif args.young:
        row = with_young(row_of(many[0]), [p for record in many for p in record["problems"]], args.young, named)
    else:
        row = fit(samples, many, few, before, named, near_scaled=args.near_scaled, few_of=of)
    if args.write or args.to != speeds.FILE:
        written(args.to, row)
    else:
        print(text([row]))


if __name__ == "__main__":
    main()
