"""Every launch of our kernels that can run a problem: all builds of the tile tables, each in many launch shapes.

A layer uses one of them. Timing the others shows what its choice costs (``fp4dispatch bench --suite random``) and gives
the launch model what it is fitted to (``bench/launch_samples.py``). Left out are launches that cannot be near the best:
tiles of over four times the tokens, kernels for few tokens beyond eight tiles, and written-out weights for few tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fp4dispatch.backends import registry
from fp4dispatch.backends.base import Plan, Prepared
from fp4dispatch.backends.own.compiled import CompiledBackend
from fp4dispatch.backends.own.launch_choice import Build
from fp4dispatch.backends.own.tiling import few_tokens, launch_model, predict, speeds
from fp4dispatch.backends.own.tiling.speeds import Speeds
from fp4dispatch.backends.own.tiling.tiles import speed_of
from fp4dispatch.benchmark.methods.base import Card, Launch
from fp4dispatch.benchmark.problems.operands import WEIGHT_BYTES, Entering, Format, Operands
from fp4dispatch.machine import gpu_models
from fp4dispatch.problem import Activation, Op, Problem, Scaling
from fp4dispatch.problem.arch import SM90
from fp4dispatch.tune import timing

PREFIX = "launch "
"""Of the names of launches, beside those of methods."""
LEAST_TILE, WIDE_TILE = 32, 128
UNFOLD_FROM = 256
FIRST = 8
"""Launches of a kernel, of all its builds, that the random suite times. In samples of an H200 the best of these took at
most 0.2 % longer, on average, than the best of all that were timed (bench/notes/random-problems.md)."""


class Family(NamedTuple):
    """Kernels that multiply one weight format by one activation format, and the backend that launches them."""

    backend: str
    format: Format
    activation: Activation
    entering: Entering

    @property
    def op(self) -> Op:
        """Return the operator."""
        return "nvfp4_gemm" if self.format == "nvfp4" else "fp8_gemm"

    @property
    def scaling(self) -> Scaling:
        """Return the scaling of the weight."""
        assert self.format != "bf16"
        return self.format

    def problem(self, m: int, n: int, k: int) -> Problem:
        """Return the problem of its backend."""
        return Problem(self.op, m, n, k, self.activation, self.scaling)


FAMILIES = (
    Family("w4a16", "nvfp4", "bf16", "bf16"),
    Family("w4a8", "nvfp4", "fp8", "row"),
    Family("w8a16", "row", "bf16", "bf16"),
    Family("w8a8", "row", "fp8", "row"),
    Family("w8a8", "block128", "fp8", "1x128"),
)


class OwnLaunch(NamedTuple):
    """A build with a launch shape. ``shape`` is None for the one that the kernel chooses, or that has no choice."""

    family: Family
    build: Build
    shape: tuple[int, ...] | None

    @property
    def name(self) -> str:
        """Return a name that is unique within a problem."""
        numbers = " " + ",".join(map(str, self.shape)) if self.shape else ""
        return f"{PREFIX}{self.family.backend} {'/'.join(self.build)}{numbers}"


def builds(families: Iterable[Family] = FAMILIES) -> tuple[Build, ...]:
    """Return every build that launches use on sm_90, quantisers included: compile them before a run, in parallel."""
    found: dict[Build, None] = {}
    for family in families:
        backend, problem = _backend(family), family.problem(1, 4096, 4096)
        for gemm in backend.gemms(problem, SM90, 1):
            found.update(dict.fromkeys(backend.with_quantizer(problem, gemm)))
    return tuple(found)


def launches(
    m: int, n: int, k: int, card: Card, families: Iterable[Family] = FAMILIES, *, first: int | None = None
) -> Iterator[OwnLaunch]:
    """Yield the launches of [m, k] by [n, k] that may be near the best.

    ``first``: of each kernel only so many, those that its launch model puts first; None: all. What a model does not
    cover, and what a kernel chooses itself, comes on top. Where the GPU has no constants it is all.
    """
    gpu = gpu_models.named(card.name) if first is not None else None
    known = speeds.of(gpu) if gpu is not None else None
    for family in families:
        backend, problem = _backend(family), family.problem(m, n, k)
        found = [
            OwnLaunch(family, gemm, shape)
            for gemm in backend.gemms(problem, card.arch, card.sms)
            for shape in _shapes(gemm, m, n, k, card.sms, family.format == "block128")
        ]
        yield from found if first is None or known is None else _put_first(found, problem, known, first)


def _put_first(found: list[OwnLaunch], problem: Problem, known: Speeds, first: int) -> Iterator[OwnLaunch]:
    timed: dict[str, list[tuple[float, int]]] = {}
    kept = set()
    for i, (_, build, shape) in enumerate(found):
        tile = speed_of(*build)
        us = None if shape is None else predict.launch(*build, tile, shape, problem, known)
        if us is None:
            if tile is None or not tile.even:  # not all shapes of builds that nobody has measured here
                kept.add(i)
        else:
            timed.setdefault(build[0], []).append((us, i))
    kept.update(i for each in timed.values() for _, i in sorted(each)[:first])
    return (launch for i, launch in enumerate(found) if i in kept)


def _shapes(gemm: Build, m: int, n: int, k: int, sms: int, blocks: bool) -> Iterator[tuple[int, ...] | None]:
    kernel = gemm[0]
    if (tile := speed_of(*gemm)) is not None:
        if tile.tokens <= 4 * max(m, LEAST_TILE) and (tile.tokens >= WIDE_TILE or m <= 8 * tile.tokens):
            yield from launch_model.candidates(tile, m, n, k, launch_model.gpu_with(sms))
    elif (small := few_tokens.KERNELS.get(kernel)) is not None:
        if m <= small.most_tokens():
            yield None
            yield from few_tokens.candidates(kernel, m, n, k, sms, block_scales=blocks)
    elif m >= UNFOLD_FROM:
        yield None


class Launcher:
    """Prepares one weight for all families, and makes the calls.

    Parameters
    ----------
    operands
        The weight.
    cache_bytes
        Size of the cache that rotating copies must exceed.
    card
        The device.
    families
        Those to prepare for.
    """

    def __init__(
        self, operands: Operands, cache_bytes: float, card: Card, families: Iterable[Family] = FAMILIES
    ) -> None:
        self.operands, self.card, self.families = operands, card, tuple(families)
        held: dict[Format, tuple[Prepared, ...]] = {}
        for family in self.families:
            if family.format not in held:
                held[family.format] = self._copies(family, cache_bytes)
        self._held = held

    def copies(self, family: Family) -> int:
        """Return how many copies of the weight rotate."""
        return len(self._held[family.format])

    def _copies(self, family: Family, cache_bytes: float) -> tuple[Prepared, ...]:
        count = timing.copies_for(self.operands.n * self.operands.k * WEIGHT_BYTES[family.format], cache_bytes)
        first = _backend(family).prepare(self.operands.weights(family.format))
        clones = (tuple(t.clone() for t in first.tensors) for _ in range(count - 1))
        return first, *(Prepared(first.backend, tensors, first.layout) for tensors in clones)

    def all(self, m: int, first: int | None = None) -> Iterator[OwnLaunch]:
        """Yield the launches for M tokens; ``first`` as of :func:`launches`."""
        return launches(m, self.operands.n, self.operands.k, self.card, self.families, first=first)

    def plan(self, launch: OwnLaunch, m: int) -> tuple[Plan, tuple[Prepared, ...]]:
        """Return the plan of a launch, and the weights that it runs on."""
        family = launch.family
        backend, held = _backend(family), self._held[family.format]
        problem = family.problem(m, self.operands.n, self.operands.k)
        return backend.plan_with(problem, held[0], launch.build, launch.shape), held

    def at(self, launch: OwnLaunch, x: Tensor, out: Tensor | None = None) -> Launch:
        """Return a launch on an activation, as a layer would run it: the activation is quantised in the call."""
        plan, held = self.plan(launch, x.shape[0])
        target = torch.empty(x.shape[0], self.operands.n, dtype=x.dtype, device=x.device) if out is None else out
        return Launch(
            _call(_backend(launch.family), plan, held, x, target), launch.family.entering, launch.family.backend, target
        )


def _call(
    backend: CompiledBackend, plan: Plan, held: tuple[Prepared, ...], x: Tensor, out: Tensor
) -> Callable[[int], Tensor]:
    def call(i: int) -> Tensor:
        backend.run(plan, held[i], x, out)
        return out

    return call


def _backend(family: Family) -> CompiledBackend:
    found = registry.instance(family.backend)
    assert isinstance(found, CompiledBackend)
    return found
