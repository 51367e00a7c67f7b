"""Which modules a configuration's patterns name: globs, ``re:`` expressions, and names of fused layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from fp4dispatch.errors import CheckpointError, InputError
from fp4dispatch.name_patterns import NamePatterns, compile_pattern

FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Last component of a fused layer's name -> those of its shards, in row order, as vLLM and SGLang have them."""


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
    return method == "fp8" and _within(pattern, name)


def any_matches(patterns: Iterable[str], method: str) -> Callable[[str], bool]:
    """Return the function from a module's name to whether one of the patterns names it; raises as :func:`matches`.

    Made once for a configuration: exact names, which may be thousands, are then looked up and not tried one by one.
    """
    patterns = tuple(patterns)
    try:
        found = NamePatterns(patterns)
    except InputError as error:
        raise CheckpointError(str(error)) from None

    def match(name: str) -> bool:
        try:
            if found(name):
                return True
        except InputError as error:
            raise CheckpointError(str(error)) from None
        return method == "fp8" and any(run in found.names for run in _runs(name))

    return match


def _within(pattern: str, name: str) -> bool:
    return bool(pattern) and f".{pattern}." in f".{name}."


def _runs(name: str) -> Iterable[str]:
    """Yield every run of a name's components: ``a.b`` -> ``a``, ``a.b``, ``b``."""
    parts = name.split(".")
    for start in range(len(parts)):
        for end in range(start + 1, len(parts) + 1):
            if run := ".".join(parts[start:end]):
                yield run


def shard_names(name: str) -> tuple[str, ...]:
    """Return the names of the shards of a fused layer, ``a.qkv_proj`` -> ``a.q_proj ...``; empty for any other."""
    parent, _, last = name.rpartition(".")
    return tuple(f"{parent}.{shard}" if parent else shard for shard in FUSED.get(last, ()))
