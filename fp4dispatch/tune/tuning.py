"""Measure the candidates of a problem, so that ``auto`` can choose by time, and plans launch what was fastest.

``warmup(..., tune=True)`` and ``fp4dispatch tune`` do this.

A candidate is a backend that ``auto`` may choose: no reason and no deny rule against it, and its self-check passed. Our
own ones are measured in several launches (:meth:`fp4dispatch.backends.base.Backend.launches`). Each is first compared
with the reference backend at the size that is timed, tile by tile. If what a plan would choose is wrong, the backend
goes into quarantine; another launch is left out. The others are timed as a layer runs them, with activation
quantisation, by :mod:`fp4dispatch.tune.timing`: all in a few rounds, then the fastest few of each candidate.
:meth:`fp4dispatch.problem.measurement.Measurement.faster` decides, at each choice, what follows from the times.

With several ranks, all measure at once. Each time is the median over ranks, and all store the same.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import date
from typing import Any

import torch

from fp4dispatch.backends import registry
from fp4dispatch.backends.base import Backend, LinearWeights
from fp4dispatch.dispatch import choose, tuned
from fp4dispatch.errors import InputError
from fp4dispatch.machine import capture
from fp4dispatch.policy.capability import offered
from fp4dispatch.policy.resolve import REFERENCE
from fp4dispatch.problem import Problem
from fp4dispatch.problem.measurement import Measurement, Timing
from fp4dispatch.trust import selfcheck
from fp4dispatch.trust.trial import plain_torch
from fp4dispatch.trust.verdict import CheckResult
from fp4dispatch.tune import timing
from fp4dispatch.tune.agreement import Ranks, Subject, agree_on
from fp4dispatch.tune.copies import Copies
from fp4dispatch.tune.session import ROUNDS as ROUNDS
from fp4dispatch.tune.session import Candidate, Session, finalists
from fp4dispatch.tune.timing import Engine, GraphEngine, WallEngine


def tune(
    problem: Problem,
    weights: LinearWeights,
    *,
    gpu: int | None,
    ranks: Ranks | None = None,
    force: bool = False,
    engine: Engine | None = None,
) -> Measurement:
    """Measure the candidates of a problem and store their times, unless they are stored. Frees its memory.

    Where the launch of a problem is timed at another M than its choice of a backend (33 tokens: 48 and 64), both are.

    Parameters
    ----------
    problem
        What to tune. M is rounded up as said; ``activation`` is the one that the layer asks for.
    weights
        Weights of these sizes, on the device.
    gpu
        Index of the device, as in :func:`fp4dispatch.dispatch.choose.select`; None on a CPU, where nothing is measured.
    ranks
        The ranks that need the same times; by default this one only. With several this is a collective call.
    force
        Measure again, also where times are stored.
    engine
        What takes the times; CUDA graphs on a GPU.

    Returns
    -------
    Measurement
        At the largest M that shares its decision. Without timings where there are fewer than two candidates or
        launches; then it is not stored.

    Raises
    ------
    CaptureError
        During CUDA graph capture.
    RankError
        If another rank failed.
    NoBackendError
        If nothing can run the problem.
    """
    return tune_each([problem], weights, gpu=gpu, ranks=ranks, force=force, engine=engine)[0]


def tune_each(
    problems: Iterable[Problem],
    weights: LinearWeights,
    *,
    gpu: int | None,
    ranks: Ranks | None = None,
    force: bool = False,
    engine: Engine | None = None,
) -> list[Measurement]:
    """As :func:`tune`, of several problems of one layer. They share its copies, which are freed at the end."""
    problems = list(problems)
    for problem in problems:
        capture.forbid_in_capture(
            f"tuning {problem}", f"fp4dispatch.warmup(model, tokens=[{problem.m}], tune=True), or fp4dispatch tune"
        )
    ranks = Ranks(alone=True) if ranks is None else ranks
    copies = Copies(weights, engine or engine_of(weights.weight.device))
    try:
        return [
            tune_at(replace(each, m=choose.bucket(each.m, each.op, gpu)), copies, gpu=gpu, ranks=ranks, force=force)
            for each in problems
        ]
    finally:
        del copies
        _free(weights.weight.device)


def tune_at(
    problem: Problem,
    copies: Copies,
    *,
    gpu: int | None,
    ranks: Ranks,
    force: bool = False,
) -> Measurement:
    """Measure a problem at its very M, the last of a range of decisions. Else as :func:`tune`.

    ``copies`` of the layer's weights serve every M, so whoever measures several should share them.
    """
    weights = copies.weights
    if weights.op != problem.op or (weights.n, weights.k, weights.scaling) != (problem.n, problem.k, problem.scaling):
        raise InputError(f"weights are {weights.op} {weights.scaling} [{weights.n}, {weights.k}], not of {problem}")
    kept = tuned.own(problem, choose.facts(gpu), registry.backends()) if gpu is not None and not force else None
    same = ranks.gather(kept.to_dict() if kept is not None else None)
    if kept is not None and all(other == same[0] for other in same):
        return kept
    try:
        return _measure(problem, copies, gpu, ranks)
    finally:
        _free(weights.weight.device)


def _measure(problem: Problem, copies: Copies, gpu: int | None, ranks: Ranks) -> Measurement:
    weights, engine = copies.weights, copies.engine
    with plain_torch(weights.weight.device):
        names, left_out = _candidates(problem, weights, gpu, ranks)
        blank = Measurement(problem, (), tuple(left_out), date.today().isoformat(), _method(engine), ranks.size)
        if gpu is None or not names:
            return blank
        session = ranks.attempt(f"tuning {problem}", lambda: Session(problem, copies, gpu))
        try:
            timings = _timed(session, names, ranks)
        finally:
            session.close()
    everyone = ranks.gather((timings, session.left_out))
    whole = replace(
        blank,
        timings=_combined([found for found, _ in everyone]),
        left_out=(*left_out, *dict.fromkeys(pair for _, found in everyone for pair in found)),
        facts=tuned.facts(choose.facts(gpu), registry.backends()),
    )
    if len(whole.timings) < 2:
        return whole
    tuned.store.save(whole)
    tuned.remember(whole)
    choose.decide_anew()
    return whole


def _timed(session: Session, names: Sequence[Candidate], ranks: Ranks) -> tuple[Timing, ...]:
    """Return the times of the candidates; on every rank of the same launches, where all ranks can run them."""
    what = f"tuning {session.problem}"
    mine = ranks.attempt(what, lambda: session.enter(names))
    everyone = ranks.gather(mine)
    contenders = [each for each in mine if all(each in other for other in everyone)]
    if len(contenders) < 2:
        return ()
    rough = ranks.gather(ranks.attempt(what, lambda: session.sieve(contenders)))
    median = {each: statistics.median(found[each] for found in rough) for each in rough[0]}
    return ranks.attempt(what, lambda: session.time(finalists(contenders, median)))


# ---------------------------------------------------------------------------------------------------------- candidates


def _candidates(
    problem: Problem, weights: LinearWeights, gpu: int | None, ranks: Ranks
) -> tuple[list[Candidate], list[tuple[str, str]]]:
    """Return the candidates that every rank can use, and the others with this rank's reasons."""
    if gpu is None:
        return [], [(REFERENCE, "there is nothing to choose from on a CPU")]
    verdicts, left_out = ranks.attempt(f"checking candidates of {problem}", lambda: _checked(problem, weights, gpu))
    failed = agree_on(ranks, verdicts)
    fit = [s for s, verdict in verdicts.items() if s not in failed and verdict.status in ("passed", "off")]
    everyone = ranks.gather(fit)
    here = [s for s in fit if all(s in other for other in everyone)]
    left_out += [(s[0], "not usable on every rank") for s in fit if s not in here]
    return sorted({(s[0], s[3]) for s in here}), left_out


def _checked(
    problem: Problem, weights: LinearWeights, gpu: int
) -> tuple[dict[Subject, CheckResult], list[tuple[str, str]]]:
    """Self-check the backends that the rules accept."""
    backends, system = registry.backends(), choose.facts(gpu)
    decision = choose.select(problem, backend=registry.AUTO, gpu=gpu)
    verdicts: dict[Subject, CheckResult] = {}
    left_out = []
    for verdict in decision.verdicts:
        backend = backends.get(verdict.backend)
        if not isinstance(backend, Backend) or not offered(verdict.backend, backend):
            continue
        if not verdict.accepted:
            hit = (verdict.reasons or verdict.denied)[0]
            left_out.append((verdict.backend, str(hit).split("   ->")[0].strip()))
            continue
        asked = replace(problem, activation=verdict.activation)
        result = selfcheck.trusted(verdict.backend, asked, system, weights.weight.device)
        verdicts[verdict.backend, problem.op, problem.scaling, verdict.activation] = result
        if result.status not in ("passed", "off"):
            left_out.append((verdict.backend, result.text()))
    return verdicts, left_out


def _combined(everyone: Sequence[tuple[Timing, ...]]) -> tuple[Timing, ...]:
    """Return, for candidates that all ranks timed, the median over ranks with the largest noise; fastest first."""
    by_rank = [{(t.backend, t.activation, t.launch): t for t in found} for found in everyone]
    common = [name for name in by_rank[0] if all(name in other for other in by_rank)]
    rows = [[found[name] for found in by_rank] for name in common]
    merged = [
        Timing(
            row[0].backend,
            row[0].activation,
            statistics.median(t.us for t in row),
            max(t.noise_us for t in row),
            min(t.repeats for t in row),
            row[0].launch,
        )
        for row in rows
    ]
    return tuple(sorted(merged, key=lambda t: t.us))


# -------------------------------------------------------------------------------------------------------------- around


_engines: dict[torch.device, Engine] = {}


def engine_of(device: torch.device) -> Engine:
    """Return the engine of a device, always the same one: cuBLAS keeps a workspace for each stream that it sees."""
    if device not in _engines:
        cuda = device.type == "cuda"
        cache = float(torch.cuda.get_device_properties(device).L2_cache_size) if cuda else 0.0
        _engines[device] = GraphEngine(device, cache) if cuda else WallEngine()
    return _engines[device]


def _method(engine: Engine) -> str:
    if isinstance(engine, GraphEngine):
        cache = engine.cache_bytes / 1e6
        return (
            f"CUDA graph replays in turns, weights rotated over {timing.COLD:g} x {cache:.0f} MB of L2, "
            "which other data fills before each"
        )
    return "calls in turns"


def _free(device: torch.device) -> None:
    """Free the memory of copies, graphs and workspaces (vllm#56553: an autotuner that keeps 7 GiB).

    Nothing of a measurement refers to itself, so no garbage collection: it takes 0.1 s, a third of a measurement.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def make_weights(problem: Problem, device: torch.device | str) -> LinearWeights:
    """Return random canonical weights of a problem's sizes, for tuning without a model."""
    from fp4dispatch import formats

    n, k = problem.n, problem.k
    generator = torch.Generator(device=device).manual_seed(0)
    dense: Any = torch.randn(n, k, generator=generator, device=device, dtype=torch.float32) * 0.05
    if problem.scaling == "nvfp4":
        q = formats.nvfp4_quantize(dense)
        return LinearWeights("nvfp4_gemm", "nvfp4", n, k, q.data, q.sf, q.global_scale.reshape(1), (n,))
    made = formats.fp8_quantize(dense, problem.scaling)
    return LinearWeights("fp8_gemm", problem.scaling, n, k, made.data, made.scale)
