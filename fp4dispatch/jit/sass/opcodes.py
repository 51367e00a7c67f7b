"""The allow-list of what may run before the grid barrier: ``opcodes.toml``, loaded strictly."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fp4dispatch import strict_toml

DATA = Path(__file__).with_name("opcodes.toml")


@dataclass(frozen=True)
class Access:
    """Full opcodes of a memory access, and the index of the operand that holds the address."""

    spellings: frozenset[str]
    address: int


@dataclass(frozen=True)
class Opcodes:
    """The allow-list; comments in the file explain each table. ``spelled`` holds full opcodes, others base names."""

    computes: frozenset[str]
    loads: frozenset[str]
    multiplies: frozenset[str]
    acts: frozenset[str]
    spelled: frozenset[str]
    flow: frozenset[str]
    declared: Mapping[str, Access]
    of_arguments: Access
    window: Mapping[int, int]


@functools.cache
def installed() -> Opcodes:
    """Return the allow-list of this installation, loaded once; FlagsError if the file is damaged."""
    table = strict_toml.load(DATA)
    lists = ("computes", "loads", "multiplies", "acts", "spelled", "flow")
    strict_toml.check(str(DATA), table, dict.fromkeys((*lists, "declared", "of_arguments", "window"), dict))
    for name in lists:
        strict_toml.check(f"{DATA} {name}", table[name], dict.fromkeys(table[name], str))
    return Opcodes(
        **{name: frozenset(table[name]) for name in lists},
        declared={name: _access(f"declared.{name}", row) for name, row in table["declared"].items()},
        of_arguments=_access("of_arguments", table["of_arguments"]),
        window={int(base, 16): word for base, word in table["window"].items()},
    )


def _access(where: str, row: object) -> Access:
    strict_toml.check(f"{DATA} {where}", row, {"spellings": list, "address": int})
    assert isinstance(row, dict)
    return Access(frozenset(strict_toml.texts(f"{DATA} {where}", row["spellings"])), row["address"])
