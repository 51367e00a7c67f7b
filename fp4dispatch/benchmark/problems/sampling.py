"""Random problems: linear layers of the models in ``models.toml``, tensor-parallel, with log-uniform numbers of tokens.

A draw is a model, a degree of tensor parallelism that its heads and sizes allow, and one of its four layers, each with
equal chance. Each (N, K) is drawn once and gets :data:`TOKENS_EACH` numbers of tokens, so that a run can compare them.
The same seed gives the same problems, in the same order; fewer problems are the first of them.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

from fp4dispatch.benchmark.problems.models import Dense, Drawn, models
from fp4dispatch.errors import InputError

TP = (1, 2, 4, 8)
MOST_TOKENS = 8192
TOKENS_EACH = 4
SMALL = 8_000_000
"""Weights with fewer elements are listed apart."""


@dataclass(frozen=True)
class Sample:
    """The problems of a seed: ``shapes`` in the order drawn, each with its numbers of tokens, ascending."""

    seed: int
    shapes: tuple[tuple[Drawn, tuple[int, ...]], ...]

    @property
    def problems(self) -> int:
        """Return how many there are."""
        return sum(len(ms) for _, ms in self.shapes)


def sample(seed: int, problems: int, *, least_m: int = 1, most_m: int = MOST_TOKENS, each: int = TOKENS_EACH) -> Sample:
    """Draw problems.

    Parameters
    ----------
    seed
        Of the random numbers.
    problems
        How many; the last (N, K) gets fewer numbers of tokens if this is no multiple of ``each``.
    least_m, most_m
        The range of M.
    each
        Numbers of tokens of one (N, K).

    Raises
    ------
    InputError
        If ``problems`` is below 1 or above what the models give, or the range of M holds too few numbers.
    """
    if not 1 <= least_m <= most_m or most_m - least_m + 1 < each:
        raise InputError(f"M from {least_m} to {most_m}: need at least {each} numbers of tokens")
    every = {(d.n, d.k) for model in models() for tp in TP for d in model.layers(tp)}
    if not 1 <= problems <= each * len(every):
        raise InputError(f"problems={problems}: need 1 to {each * len(every)}")
    random_ = random.Random(seed)
    shapes: dict[tuple[int, int], tuple[Drawn, tuple[int, ...]]] = {}
    left = problems
    while left > 0:
        layer = random_.choice(random_.choice(_by_tp(random_.choice(models()))))
        if (layer.n, layer.k) in shapes:
            continue
        ms = _tokens(random_, least_m, most_m, each)[: min(left, each)]
        shapes[layer.n, layer.k] = (layer, tuple(sorted(ms)))
        left -= len(ms)
    return Sample(seed, tuple(shapes.values()))


@functools.cache
def _by_tp(model: Dense) -> tuple[tuple[Drawn, ...], ...]:
    """Return the layers of each degree of tensor parallelism that the model allows."""
    return tuple(layers for tp in TP if (layers := model.layers(tp)))


def _tokens(random_: random.Random, least: int, most: int, count: int) -> list[int]:
    """Return distinct numbers of tokens: m with probability in proportion to log((m + 1) / m)."""
    found: dict[int, None] = {}
    while len(found) < count:
        found[min(int(least * ((most + 1) / least) ** random_.random()), most)] = None
    return list(found)
