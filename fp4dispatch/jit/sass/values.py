"""What is known of a register: which words of constant memory flow into it, and its offset where that is exact."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_MASK = (1 << 32) - 1


@dataclass(frozen=True)
class Value:
    """A 32-bit value.

    ``words`` are the byte offsets of the words of constant bank 0 that it was computed from. ``exact`` is set where it
    is a constant (no word), or one word plus that constant. ``traced`` is false where anything else flowed in, such as
    memory: then nothing is known.
    """

    words: frozenset[int] = frozenset()
    exact: int | None = None
    traced: bool = True


UNKNOWN = Value(traced=False)
NUMBER = Value()
"""Computed from literals and special registers such as the thread's index alone."""
ZERO = Value(exact=0)


def constant(number: int) -> Value:
    """Return the value of a literal."""
    return Value(exact=number & _MASK)


def word(offset: int) -> Value:
    """Return the value of a whole word of constant bank 0."""
    return Value(frozenset((offset,)), 0)


def combined(values: Iterable[Value]) -> Value:
    """Return what is known of any function of these values."""
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
    """Return what is known where it may be the one or the other."""
    if one == other:
        return one
    exact = one.exact if one.exact == other.exact and one.words == other.words else None
    return Value(one.words | other.words, exact, one.traced and other.traced)
