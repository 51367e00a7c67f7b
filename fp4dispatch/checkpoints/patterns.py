"""Which modules a configuration's patterns name: globs, ``re:`` expressions, and names of fused layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from fp4dispatch.errors import CheckpointError, InputError
from fp4dispatch.name_patterns import compile_pattern, is_name

FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Last component of a fused layer's name -> those of its shards, in row order, as vLLM and SGLang have them."""

MAX_TRIED = 1 << 16
"""Patterns of one list that are tried on every name."""


def matches(pattern: str, name: str, method: str) -> bool:
    """Return whether a configuration's pattern names a module, see :mod:`fp4dispatch.name_patterns`.

    In a Hugging Face fp8 configuration a name also stands for everything below it, and may leave leading components
    out.

    Raises
    ------
    CheckpointError
        A regular expression that is invalid, or that cannot be matched in linear time.
    """
    try:
        if compile_pattern(pattern)(name):
            return True
    except InputError as error:
        raise CheckpointError(str(error)) from None
    return method == "fp8" and bool(pattern) and f".{pattern}." in f".{name}."


def any_matches(patterns: Iterable[str], method: str) -> Callable[[str], bool]:
    """Return the function from a module's name to whether one of the patterns names it; raises as :func:`matches`.

    Exact names, which may be tens of thousands, are looked up first and not tried one by one.
    """
    patterns = tuple(patterns)
    exact = frozenset(pattern for pattern in patterns if is_name(pattern))
    tried = patterns if method == "fp8" else tuple(pattern for pattern in patterns if pattern not in exact)
    if len(tried) > MAX_TRIED:
        raise CheckpointError(f"{len(tried):,} patterns, expected at most {MAX_TRIED:,}: the configuration is damaged")
    return lambda name: name in exact or any(matches(pattern, name, method) for pattern in tried)


def shard_names(name: str) -> tuple[str, ...]:
    """Return the names of the shards of a fused layer, ``a.qkv_proj`` -> ``a.q_proj ...``; empty for any other."""
    parent, _, last = name.rpartition(".")
    return tuple(f"{parent}.{shard}" if parent else shard for shard in FUSED.get(last, ()))
