"""One problem while it is measured: operands, reference outputs, and the launches that are checked and timed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4dispatch import jit
from fp4dispatch.backends import registry
from fp4dispatch.backends.base import Backend, Plan
from fp4dispatch.dispatch import choose
from fp4dispatch.errors import CaptureError
from fp4dispatch.policy.resolve import REFERENCE
from fp4dispatch.problem import Activation, Problem
from fp4dispatch.problem.measurement import LaunchConfig, Timing
from fp4dispatch.trust import selfcheck
from fp4dispatch.trust.canary import DTYPE
from fp4dispatch.trust.tilecheck import Finding, worst_tile
from fp4dispatch.tune import timing
from fp4dispatch.tune.copies import Copies
from fp4dispatch.tune.timing import Call, Recording

TILE_ERROR = 0.03
"""Largest relative error of a 128x128 tile against the reference: FP8 tensor cores lose up to 0.6 % on long sums, the
output's rounding is 0.4 %; a lost, stale or twice scaled tile is off by 100 %."""

ROUNDS = 9
SIEVE_ROUNDS = 3
FINALISTS = 4
"""Launches of a candidate that a sieve of a few rounds leaves for the rounds that count."""
LIMIT_US = 4e5
"""Limit for the rounds of the sieve, and for those that count: rounds are fewer where calls take long."""
LONG_US = 1500.0
"""From so long a replay on, fewer copies of the weights rotate. Calls that take so long have more activations than the
cache holds, so weights stay cold with two copies too."""
HOPELESS, SHORT_US = 3.0, 100.0
"""A launch that takes so many times the candidate's fastest, and longer than this, is not timed further."""
WRONG = "wrong"
"""How a reason begins that is about numbers."""

Candidate = tuple[str, Activation]


class Contender(NamedTuple):
    """A backend with an activation format, in one launch; ``launch`` None: what its plan chooses, with no other."""

    backend: str
    activation: Activation
    launch: LaunchConfig | None = None

    def __str__(self) -> str:
        return f"{self.backend} ({self.activation})" + (f", {self.launch}" if self.launch else "")


@dataclass
class _Entry:
    """A contender during its measurement."""

    backend: Backend
    plan: Plan
    calls: int
    recording: Recording
    call: Call  # keeps the memory alive that the graph reads


class Session:
    """Measures the candidates of one problem. Close it: plans then give back what they hold.

    Parameters
    ----------
    problem, gpu
        As of :func:`fp4dispatch.tune.tuning.tune`; M is what is measured.
    copies
        Of the layer's weights.
    """

    def __init__(self, problem: Problem, copies: Copies, gpu: int) -> None:
        self.problem, self.copies, self.gpu, self.engine = problem, copies, gpu, copies.engine
        device, dtype = copies.weights.weight.device, DTYPE[problem.out_dtype]
        generator = torch.Generator(device=device).manual_seed(0)
        f32: dict[str, Any] = {"device": device, "dtype": torch.float32, "generator": generator}
        self.x = torch.randn(problem.m, problem.k, **f32).to(dtype)
        self.out = torch.empty(problem.m, problem.n, device=device, dtype=dtype)
        self.bias = torch.randn(problem.n, **f32).to(dtype) if problem.bias else None
        self.left_out: list[tuple[str, str]] = []
        self._answers: dict[Activation, Tensor] = {}
        self._entries: dict[Contender, _Entry] = {}
        self._once: dict[Candidate, float] = {}

    def close(self) -> None:
        """Give back what plans hold."""
        for entry in self._entries.values():
            entry.backend.release(entry.plan)
        self._entries.clear()

    def enter(self, names: Sequence[Candidate]) -> tuple[Contender, ...]:
        """Check every launch of the candidates and record it. What is wrong or cannot run is left out, with a reason.

        Returns
        -------
        tuple
            Those that may be timed. The first one of a candidate is what its plan chooses without tuned times.
        """
        contenders = [(name, self._launches(*name, rivals=len(names))) for name in names]
        if sum(max(len(launches), 1) for _, launches in contenders) < 2:
            return ()
        self._build(launch for _, launches in contenders for launch in launches)
        for name, launches in contenders:
            for launch in launches or (None,):
                usual = launch in (None, *launches[:1])
                if self._enter(Contender(*name, launch), usual=usual) == WRONG and usual:
                    break
        return tuple(self._entries)

    def _launches(self, name: str, activation: Activation, rivals: int) -> tuple[LaunchConfig, ...]:
        try:
            prepared = self.copies.of(registry.instance(name), rivals)[0]
            problem = replace(self.problem, activation=activation)
            return registry.instance(name).launches(problem, prepared)
        except CaptureError:
            raise
        except Exception:  # entering the candidate meets it again, and says why
            return ()

    def _build(self, launches: Iterable[LaunchConfig | None]) -> None:
        """Compile in parallel what is not compiled yet."""
        arch = choose.facts(self.gpu).arch
        names = dict.fromkeys(launch.gemm for launch in launches if launch is not None)
        if names and arch is not None:
            jit.build_together(names, arch)

    def _enter(self, contender: Contender, *, usual: bool) -> str:
        """Check and record one contender; return :data:`WRONG` if its numbers are."""
        try:
            entry = self._recorded(contender, usual=usual)
        except CaptureError:
            raise
        except Exception as error:  # a candidate may raise anything; the others are still measured
            entry = f"{type(error).__name__}: {error}"
        if isinstance(entry, _Entry):
            self._entries[contender] = entry
            return ""
        which = f" (launch {contender.launch})" if contender.launch and not usual else ""
        self.left_out.append((contender.backend, f"{entry}{which}"))
        return WRONG if entry.startswith(WRONG) else ""

    def _recorded(self, contender: Contender, *, usual: bool) -> _Entry | str:
        """Plan, check and record one contender; return a text where its numbers are wrong."""
        backend, engine = registry.instance(contender.backend), self.engine
        problem = replace(self.problem, activation=contender.activation)
        copies = self.copies.of(backend, 1)
        if contender.launch is None:
            plan = backend.plan(problem, copies[0])
        else:
            plan = backend.plan_launch(problem, copies[0], contender.launch)
        out = self.out
        out.fill_(torch.nan)
        engine.finish()
        backend.run(plan, copies[0], self.x, out, self.bias)
        if fault := self._fault(backend, problem, condemn=usual):
            return fault

        def call(i: int) -> object:
            backend.run(plan, copies[i], self.x, out, self.bias)
            return out

        call(0)
        took = engine.once(call)
        if self._hopeless(contender, took):
            took = min(took, engine.once(call))  # a host that was busy for a moment is no reason
            if self._hopeless(contender, took):
                return f"one call takes {took:.0f} us, another launch {self._once[contender[:2]]:.0f} us"
        self._once[contender[:2]] = min(self._once.get(contender[:2], took), took)
        rotating = min(len(copies), max(2, int(LONG_US / max(took, 0.1))))
        calls = timing.calls_for(rotating, None, took, engine.replay_us)
        return _Entry(backend, plan, calls, engine.record(call, calls, rotating), call)

    def _hopeless(self, contender: Contender, took: float) -> bool:
        """Whether one call takes so long that the launch cannot be its candidate's fastest."""
        return took > max(SHORT_US, HOPELESS * self._once.get(contender[:2], took))

    def _fault(self, backend: Backend, problem: Problem, *, condemn: bool) -> str:
        """Return what is wrong with the output, tile by tile; empty if nothing is.

        A backend whose own choice of a launch is wrong goes into quarantine. Another launch is only left out.
        """
        worst = worst_tile(self.out, self._answer(problem.activation))
        if worst.error <= TILE_ERROR:
            return ""
        size = f"M={problem.m} N={problem.n} K={problem.k}"
        kind = "NaN" if worst.error == float("inf") else "wrong values"
        finding = Finding(size, kind, f"is off by {worst.error:.0%} of the reference", worst.tile)
        if condemn:
            selfcheck.condemn(backend, problem, choose.facts(self.gpu), finding)
        return f"{WRONG} at this size: {finding}"

    def _answer(self, activation: Activation) -> Tensor:
        """Return the reference output for an activation format, f32 [M, N]; computed once."""
        if activation not in self._answers:
            oracle = registry.instance(REFERENCE)
            problem = replace(self.problem, activation=activation, out_dtype="float32")
            prepared = oracle.prepare(self.copies.weights)
            out = self.x.new_empty(problem.m, problem.n, dtype=torch.float32)
            oracle.run(oracle.plan(problem, prepared), prepared, self.x, out, self.bias)
            self._answers[activation] = out
        return self._answers[activation]

    def sieve(self, contenders: Iterable[Contender]) -> dict[Contender, float]:
        """Return rough times of the candidates that have more launches than may go on; empty where none has."""
        of: dict[Candidate, list[Contender]] = {}
        for each in contenders:
            of.setdefault(each[:2], []).append(each)
        many = [each for launches in of.values() if len(launches) > FINALISTS for each in launches]
        return {each: t.us for each, t in self._times(many, SIEVE_ROUNDS, SIEVE_ROUNDS, warmup=1).items()}

    def time(self, contenders: Iterable[Contender]) -> tuple[Timing, ...]:
        """Return the times of these contenders, taken in turns."""
        found = self._times(list(contenders), ROUNDS, least=5, warmup=2)
        return tuple(Timing(*each[:2], s.us, s.spread * s.us, s.rounds, each.launch) for each, s in found.items())

    def _times(self, names: list[Contender], rounds: int, least: int, warmup: int) -> Mapping[Contender, timing.Sample]:
        entries = {name: self._entries[name] for name in names}
        if not entries:
            return {}
        return timing.take_turns(
            {name: entry.recording.replay for name, entry in entries.items()},
            {name: entry.calls for name, entry in entries.items()},
            rounds=rounds,
            least=least,
            warmup=warmup,
            limit_us=min(self.engine.limit_us, LIMIT_US),
        )


def finalists(contenders: Sequence[Contender], rough: Mapping[Contender, float]) -> tuple[Contender, ...]:
    """Return the contenders that go on: all of a candidate without rough times, the fastest few of another one."""
    found: list[Contender] = []
    for candidate in dict.fromkeys(each[:2] for each in contenders):
        launches = [each for each in contenders if each[:2] == candidate]
        if all(each in rough for each in launches):
            launches = sorted(launches, key=lambda each: rough[each])[:FINALISTS]
        found += launches
    return tuple(found)
