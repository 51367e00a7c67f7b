"""Match the module names that configurations use: globs, ``re:`` expressions, and names of fused layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import lru_cache

from fp4dispatch.errors import CheckpointError

FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Last component of a fused layer's name -> those of its shards, in row order, as vLLM and SGLang have them."""

MAX_PATTERN = 512
_NESTED_REPEAT = re.compile(r"[*+}]\)[*+{]|[*+?}]\|[^()]*\)[*+{]|\|[^()]*\)[*+{]")
_MAX_REPEATS = 6


def matches(pattern: str, name: str, method: str) -> bool:
    """Return whether a configuration's pattern names a module.

    ``re:`` takes a regular expression that must match from the start (compressed-tensors, ``utils/match.py``). Anything
    else is a glob (ModelOpt) in which ``*`` also crosses dots; without a wildcard it is the exact name. In a Hugging
    Face fp8 configuration a name also stands for everything below it, and may leave leading components out.

    Raises
    ------
    CheckpointError
        A regular expression that is invalid, or whose matching time could explode.
    """
    if pattern.startswith("re:"):
        return _compiled(pattern).match(name) is not None
    if fnmatchcase(name, pattern):
        return True
    return method == "fp8" and bool(pattern) and f".{pattern}." in f".{name}."


def shard_names(name: str) -> tuple[str, ...]:
    """Return the names of the shards of a fused layer, ``a.qkv_proj`` -> ``a.q_proj ...``; empty for any other."""
    parent, _, last = name.rpartition(".")
    return tuple(f"{parent}.{shard}" if parent else shard for shard in FUSED.get(last, ()))


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    text = pattern.removeprefix("re:")
    # The configuration may be hostile, and `re` backtracks without a limit: (a+)+ takes forever on a 40-letter name.
    repeats = len(re.findall(r"[*+]|\{\d*,\d*\}", text))
    if len(text) > MAX_PATTERN or _NESTED_REPEAT.search(text) or repeats > _MAX_REPEATS:
        raise CheckpointError(
            f"pattern {pattern[:120]!r} is refused, matching it could take forever: expected at most {MAX_PATTERN} "
            f"characters, {_MAX_REPEATS} repeats, and no repeat of a group that repeats or branches"
        )
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(f"pattern {pattern[:120]!r} is not a regular expression: {error}") from None
