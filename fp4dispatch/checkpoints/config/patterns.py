"""Match the patterns of a configuration with module names: globs, ``re:`` expressions, names of fused layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

from fp4dispatch.errors import CheckpointError, InputError
from fp4dispatch.models import projections
from fp4dispatch.models.name_patterns import compile_pattern, is_name

FUSED: Mapping[str, tuple[str, ...]] = {
    **projections.FUSED,
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""Last component of a fused layer's name -> those of its shards, in row order, as vLLM and SGLang have them."""

MAX_TRIED = 1 << 16
"""Maximum number of patterns in one list, without exact names."""
_REGEX_CHARACTERS = re.compile(r"[^\w.\-]")


def matches(pattern: str, name: str, method: str) -> bool:
    """Return whether a configuration's pattern names a module, see :mod:`fp4dispatch.models.name_patterns`.

    ``re:`` takes a regular expression. Anything else is the exact name in compressed-tensors (``utils/match.py``), and
    elsewhere a glob (ModelOpt). In a Hugging Face fp8 configuration it also matches all modules below it,
    and may omit leading name components.

    Raises
    ------
    CheckpointError
        A regular expression that is invalid, or that cannot be matched in linear time.
    """
    try:
        if pattern.startswith("re:"):
            return compile_pattern(pattern)(name)
        if method == "fp8":
            return _matches_huggingface(pattern, name)
        return pattern == name if method == "compressed-tensors" else compile_pattern(pattern)(name)
    except InputError as error:
        raise CheckpointError(str(error)) from None


def _matches_huggingface(pattern: str, name: str) -> bool:
    """Return whether an entry of ``modules_to_not_convert`` names a module, or one that contains it.

    transformers 5 (``quantizers_utils.should_convert_module``) takes an entry as a prefix or a regular expression up to
    a dot, or as a suffix; vLLM as a name that may leave leading components out. Any of them counts.
    """
    if not pattern:
        return False
    if name.endswith(pattern) or f".{pattern}." in f".{name}.":
        return True
    if not _REGEX_CHARACTERS.search(pattern):
        return False
    if not _is_regex(pattern):  # a glob such as *lm_head
        return compile_pattern(pattern)(name)
    ends = compile_pattern(f"re:(?:{pattern})$")
    dots = [i for i, character in enumerate(name) if character == "."]
    prefixes = [name, *(name[:i] for i in dots), *(name[: i + 1] for i in dots)]
    return any(map(ends, prefixes)) or compile_pattern(pattern)(name)


@lru_cache(maxsize=1024)
def _is_regex(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return False
    return True


def any_matches(patterns: Iterable[str], method: str) -> Callable[[str], bool]:
    """Return a function that tells whether any pattern matches a module's name. Raises as :func:`matches`.

    Exact names, which can be tens of thousands, need one lookup.
    """
    patterns = tuple(patterns)
    exact = frozenset(pattern for pattern in patterns if pattern and is_name(pattern))
    tried = patterns if method == "fp8" else tuple(pattern for pattern in patterns if pattern not in exact)
    if len(tried) > MAX_TRIED:
        raise CheckpointError(f"{len(tried):,} patterns, expected at most {MAX_TRIED:,}: the configuration is damaged")
    return lambda name: name in exact or any(matches(pattern, name, method) for pattern in tried)


def shard_names(name: str) -> tuple[str, ...]:
    """Return the names of the shards of a fused layer, ``a.qkv_proj`` -> ``a.q_proj ...``; empty for any other."""
    parent, _, last = name.rpartition(".")
    return tuple(f"{parent}.{shard}" if parent else shard for shard in FUSED.get(last, ()))
