"""Measure the candidates of a problem, so that ``auto`` can choose by time.

``warmup(..., tune=True)`` and ``fp4dispatch tune`` do this.

A candidate is a backend that ``auto`` may choose: no reason and no deny rule against it, and its self-check passed. It
is first compared with the reference backend at the size that is timed, tile by tile. If it is wrong, it goes into
quarantine. Else it is timed as a layer runs it, with activation quantisation, by :mod:`fp4dispatch.tune.timing`.
:meth:`fp4dispatch.problem.measurement.Measurement.faster` decides, at each choice, what follows from the times.

With several ranks, all measure at once. Each time is the median over ranks, and all store the same.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

import torch
from torch import Tensor

from fp4dispatch.backends import registry
from fp4dispatch.backends.base import Backend, LinearWeights, Plan, Prepared
from fp4dispatch.dispatch import choose, tuned
from fp4dispatch.errors import CaptureError, InputError
from fp4dispatch.machine import capture
from fp4dispatch.policy.capability import offered
from fp4dispatch.policy.resolve import REFERENCE
from fp4dispatch.problem import Activation, Problem
from fp4dispatch.problem.measurement import Measurement, Timing
from fp4dispatch.trust import selfcheck
from fp4dispatch.trust.canary import DTYPE
from fp4dispatch.trust.tilecheck import Finding, worst_tile
from fp4dispatch.trust.trial import plain_torch
from fp4dispatch.trust.verdict import CheckResult
from fp4dispatch.tune import timing
from fp4dispatch.tune.agreement import Ranks, Subject, agree_on
from fp4dispatch.tune.timing import Call, Engine, GraphEngine, Recording, WallEngine

TILE_ERROR = 0.03
"""Largest relative error of a 128x128 tile against the reference: FP8 tensor cores lose up to 0.6 % on long sums, the
output's rounding is 0.4 %; a lost, stale or twice scaled tile is off by 100 %."""

ROUNDS = 15
SHARE_OF_FREE_MEMORY = 0.5

Candidate = tuple[str, Activation]


@dataclass
class _Entry:
    """One candidate during its measurement."""

    backend: Backend
    plan: Plan
    calls: int
    recording: Recording
    call: Call  # keeps the memory alive that the graph reads


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

    Parameters
    ----------
    problem
        What to tune. M is rounded up to its bucket; ``activation`` is the one that the layer asks for.
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
        Without timings where there are fewer than two candidates; then it is not stored.

    Raises
    ------
    CaptureError
        During CUDA graph capture.
    RankError
        If another rank failed.
    NoBackendError
        If nothing can run the problem.
    """
    capture.forbid_in_capture(
        f"tuning {problem}", f"fp4dispatch.warmup(model, tokens=[{problem.m}], tune=True), or fp4dispatch tune"
    )
    ranks = Ranks(alone=True) if ranks is None else ranks
    problem = replace(problem, m=choose.bucket(problem.m, problem.op, gpu))
    if weights.op != problem.op or (weights.n, weights.k, weights.scaling) != (problem.n, problem.k, problem.scaling):
        raise InputError(f"weights are {weights.op} {weights.scaling} [{weights.n}, {weights.k}], not of {problem}")
    kept = tuned.find(problem, choose.facts(gpu), registry.backends()) if gpu is not None and not force else None
    same = ranks.gather(kept.to_dict() if kept is not None else None)
    if kept is not None and all(other == same[0] for other in same):
        return kept
    try:
        return _measure(problem, weights, gpu, ranks, engine or _engine(weights.weight.device))
    finally:
        _free(weights.weight.device)


def _measure(problem: Problem, weights: LinearWeights, gpu: int | None, ranks: Ranks, engine: Engine) -> Measurement:
    with plain_torch(weights.weight.device):
        names, left_out = _candidates(problem, weights, gpu, ranks)
        blank = Measurement(problem, (), tuple(left_out), date.today().isoformat(), _method(engine), ranks.size)
        if gpu is None or len(names) < 2:
            return blank
        timings, problems = ranks.attempt(f"tuning {problem}", lambda: _time(problem, weights, gpu, names, engine))
    everyone = ranks.gather((timings, problems))
    whole = replace(
        blank,
        timings=_combined([found for found, _ in everyone]),
        left_out=(*left_out, *dict.fromkeys(pair for _, found in everyone for pair in found)),
        facts=tuned.facts(choose.facts(gpu), registry.backends()),
    )
    tuned.store.save(whole)
    tuned.remember(whole)
    choose.decide_anew()
    return whole


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


# ---------------------------------------------------------------------------------------------------------------- time


def _time(
    problem: Problem, weights: LinearWeights, gpu: int, names: Sequence[Candidate], engine: Engine
) -> tuple[tuple[Timing, ...], list[tuple[str, str]]]:
    """Check and time the candidates; one that cannot run is left out, with its reason."""
    session = _Session(problem, weights, gpu, engine, len(names))
    entries: dict[Candidate, _Entry] = {}
    left_out = []
    try:
        for name in names:
            try:
                entry = session.enter(*name)
            except CaptureError:
                raise
            except Exception as error:  # a candidate may raise anything; the others are still measured
                left_out.append((name[0], f"{type(error).__name__}: {error}"))
            else:
                if isinstance(entry, _Entry):
                    entries[name] = entry
                else:
                    left_out.append((name[0], entry))
        keys = {" ".join(name): name for name in entries}
        samples = timing.take_turns(
            {key: entries[name].recording.replay for key, name in keys.items()},
            {key: entries[name].calls for key, name in keys.items()},
            rounds=ROUNDS,
            limit_us=engine.limit_us,
        )
    finally:
        for entry in entries.values():
            entry.backend.release(entry.plan)
    return tuple(Timing(*keys[key], s.us, s.spread * s.us, s.rounds) for key, s in samples.items()), left_out


class _Session:
    """Operands of one problem, and the reference outputs."""

    def __init__(self, problem: Problem, weights: LinearWeights, gpu: int, engine: Engine, rivals: int) -> None:
        self.problem, self.weights, self.gpu, self.engine, self.rivals = problem, weights, gpu, engine, rivals
        device, dtype = weights.weight.device, DTYPE[problem.out_dtype]
        generator = torch.Generator(device=device).manual_seed(0)
        f32: dict[str, Any] = {"device": device, "dtype": torch.float32, "generator": generator}
        self.x = torch.randn(problem.m, problem.k, **f32).to(dtype)
        self.bias = torch.randn(problem.n, **f32).to(dtype) if problem.bias else None
        self._answers: dict[Activation, Tensor] = {}

    def answer(self, activation: Activation) -> Tensor:
        """Return the reference output for an activation format, f32 [M, N]; computed once."""
        if activation not in self._answers:
            oracle = registry.instance(REFERENCE)
            problem = replace(self.problem, activation=activation, out_dtype="float32")
            prepared = oracle.prepare(self.weights)
            out = self.x.new_empty(problem.m, problem.n, dtype=torch.float32)
            oracle.run(oracle.plan(problem, prepared), prepared, self.x, out, self.bias)
            self._answers[activation] = out
        return self._answers[activation]

    def enter(self, name: str, activation: Activation) -> _Entry | str:
        """Plan, check and record one candidate; return a text where its numbers are wrong."""
        backend, engine = registry.instance(name), self.engine
        problem = replace(self.problem, activation=activation)
        prepared = backend.prepare(self.weights)
        plan = backend.plan(problem, prepared)
        out = torch.full((problem.m, problem.n), torch.nan, device=self.x.device, dtype=self.x.dtype)
        engine.finish()
        backend.run(plan, prepared, self.x, out, self.bias)
        worst = worst_tile(out, self.answer(activation))
        if not worst.error <= TILE_ERROR:
            size = f"M={problem.m} N={problem.n} K={problem.k}"
            kind = "NaN" if worst.error == float("inf") else "wrong values"
            finding = Finding(size, kind, f"is off by {worst.error:.0%} of the reference", worst.tile)
            selfcheck.condemn(backend, problem, choose.facts(self.gpu), finding)
            return f"wrong at this size: {finding}"
        copies = _copies(prepared, engine, self.rivals)
        engine.finish()  # a PDL kernel may read weights before this stream has copied them

        def call(i: int) -> object:
            backend.run(plan, copies[i], self.x, out, self.bias)
            return out

        call(0)
        calls = timing.calls_for(len(copies), None, engine.once(call), engine.replay_us)
        return _Entry(backend, plan, calls, engine.record(call, calls, len(copies)), call)


def _copies(prepared: Prepared, engine: Engine, rivals: int) -> list[Prepared]:
    """Return the weights, and enough copies to keep them out of the cache, as far as memory allows for all rivals."""
    size = max(prepared.nbytes(), 1)
    count = timing.copies_for(size, engine.cache_bytes)
    if prepared.tensors[0].is_cuda:
        free, _ = torch.cuda.mem_get_info(prepared.tensors[0].device)
        count = max(1, min(count, int(SHARE_OF_FREE_MEMORY * free / rivals / size)))
    clones = [replace(prepared, tensors=tuple(t.clone() for t in prepared.tensors)) for _ in range(count - 1)]
    return [prepared, *clones]


def _combined(everyone: Sequence[tuple[Timing, ...]]) -> tuple[Timing, ...]:
    """Return, for candidates that all ranks timed, the median over ranks with the largest noise; fastest first."""
    by_rank = [{(t.backend, t.activation): t for t in found} for found in everyone]
    common = [name for name in by_rank[0] if all(name in other for other in by_rank)]
    rows = [[found[name] for found in by_rank] for name in common]
    merged = [
        Timing(
            row[0].backend,
            row[0].activation,
            statistics.median(t.us for t in row),
            max(t.noise_us for t in row),
            min(t.repeats for t in row),
        )
        for row in rows
    ]
    return tuple(sorted(merged, key=lambda t: t.us))


# -------------------------------------------------------------------------------------------------------------- around


_engines: dict[torch.device, Engine] = {}


def _engine(device: torch.device) -> Engine:
    """Return the engine of a device, always the same one: cuBLAS keeps a workspace for each stream that it sees."""
    if device not in _engines:
        cuda = device.type == "cuda"
        cache = float(torch.cuda.get_device_properties(device).L2_cache_size) if cuda else 0.0
        _engines[device] = GraphEngine(device, cache) if cuda else WallEngine()
    return _engines[device]


def _method(engine: Engine) -> str:
    if isinstance(engine, GraphEngine):
        cache = engine.cache_bytes / 1e6
        return f"CUDA graph replays in turns, weights rotated over {timing.COLD:g} x {cache:.0f} MB of L2"
    return "calls in turns"


def _free(device: torch.device) -> None:
    """Free the memory of copies, graphs and workspaces (vllm#56553: an autotuner that keeps 7 GiB)."""
    gc.collect()
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
