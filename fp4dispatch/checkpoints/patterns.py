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
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""Last component of a fused layer's name -> those of its shards, in row order, as vLLM and SGLang have them."""

MAX_PATTERN = 512
_NESTED_REPEAT = re.compile(r"[*+}]\)[*+{]|[*+?}]\|[^()]*\)[*+{]|\|[^()]*\)[*+{]")
_MAX_REPEATS = 6
_REGEX_CHARACTERS = re.compile(r"[^\w.\-]")


class _NotARegexError(CheckpointError):
    pass


def matches(pattern: str, name: str, method: str) -> bool:
    """Return whether a configuration's pattern names a module.

    ``re:`` takes a regular expression that must match from the start. Anything else is the exact name in compressed-
    tensors (``utils/match.py``), and elsewhere a glob (ModelOpt) in which ``*`` also crosses dots. In a Hugging Face
    fp8 configuration it stands for everything below it, too, and may leave leading components out.

    Raises
    ------
    CheckpointError
        A regular expression that is invalid, or whose matching time could explode.
    """
    if pattern.startswith("re:"):
        return _compiled(pattern).match(name) is not None
    if method == "fp8":
        return _matches_huggingface(pattern, name)
    return pattern == name if method == "compressed-tensors" else fnmatchcase(name, pattern)


def _matches_huggingface(pattern: str, name: str) -> bool:
    """Return whether an entry of ``modules_to_not_convert`` names a module, or one that contains it.

    transformers 5 (``quantizers_utils.should_convert_module``) takes an entry as a prefix or a regular expression up to
    a dot, or as a suffix; vLLM as a name that may leave leading components out. Any of them counts.
    """
    if not pattern:
        return False
    if name.endswith(pattern) or f".{pattern}." in f".{name}." or fnmatchcase(name, pattern):
        return True
    if not _REGEX_CHARACTERS.search(pattern):
        return False
    try:
        _compiled(f"re:{pattern}")
    except _NotARegexError:
        return False  # a glob such as *lm_head*, which was tried above
    return re.match(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", name) is not None


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
        raise _NotARegexError(f"pattern {pattern[:120]!r} is not a regular expression: {error}") from None
