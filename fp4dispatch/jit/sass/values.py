"""Abstract value of a register: the words of constant memory it depends on, and its exact offset if known."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_MASK = (1 << 32) - 1


@dataclass(frozen=True)
class Value:
    """A 32-bit value.

    ``words``: byte offsets of the words of constant bank 0 that it was computed from. ``exact``: set if the value is
    this constant (no word), or one word plus this constant. ``traced``: false if it depends on anything else, such as
    memory.
    """

    words: frozenset[int] = frozenset()
    exact: int | None = None
    traced: bool = True


UNKNOWN = Value(traced=False)
NUMBER = Value()
"""Computed only from literals and special registers such as the thread index."""
ZERO = Value(exact=0)


def constant(number: int) -> Value:
    """Return the value of a literal."""
    return Value(exact=number & _MASK)


def word(offset: int) -> Value:
    """Return the value of a whole word of constant bank 0."""
    return Value(frozenset((offset,)), 0)


def combined(values: Iterable[Value]) -> Value:
    """Return the value of an arbitrary function of these values."""
    found = list(values)
    return Value(frozenset().union(*(value.words for value in found)), None, all(value.traced for value in found))


def added(values: Iterable[Value]) -> Value:
    """Return the sum; exact where all parts are and at most one of them is a word."""
    found = list(values)
    known = combined(found)
    exacts = [value.exact for value in found if value.exact is not None]
    if not known.traced or len(exacts) < len(found) or sum(bool(value.words) for value in found) > 1:
        return known
    return Value(known.words, sum(exacts) & _MASK)


def either(one: Value, other: Value) -> Value:
    """Return the join of two values: what holds for both."""
    if one == other:
        return one
    exact = one.exact if one.exact == other.exact and one.words == other.words else None
    return Value(one.words | other.words, exact, one.traced and other.traced)
