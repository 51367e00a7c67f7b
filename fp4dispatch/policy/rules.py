"""The rules of the policy: typed, and loaded strictly from ``policy/rules.toml``. No torch, no decisions."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

from packaging.version import Version

from fp4dispatch import strict_toml
from fp4dispatch.errors import SettingsError
from fp4dispatch.machine.system import System
from fp4dispatch.policy.capability import version_of
from fp4dispatch.policy.catalogue import (
    FACTS,
    PROPERTIES,
    SM,
    catalogue,
    check,
    having,
    parse_version,
    provenance,
    subset,
)
from fp4dispatch.policy.measured import Speedup
from fp4dispatch.policy.measured import load as load_measured
from fp4dispatch.problem import CAPTURE_MODES, OPS, SCALINGS, Op, Problem
from fp4dispatch.problem import m_bucket as end_of_range
from fp4dispatch.problem.arch import Arch
from fp4dispatch.problem.decision import ReasonCode, RuleHit

FILE = Path(__file__).with_name("rules.toml")
DENY_CODES: tuple[str, ...] = ("DENIED", "UNPROVEN", "CAPTURE")

_COMPARE: dict[str, Callable[[Version, Version], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
_SWITCHES = ("proven", "fp8_copy")
_SIZES = {"m_max": 1, "m_min_max": 0}
"""The smallest value of each bound."""
_BOUND = re.compile(r"\s*(>=|<=|==|>|<)\s*([0-9][0-9A-Za-z.+-]*)\s*")


@dataclass(frozen=True)
class When:
    """The condition of a rule: every field that is set must hold."""

    archs: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    scalings: tuple[str, ...] = ()
    captures: tuple[str, ...] = ()
    m_max: int | None = None
    m_min_max: int | None = None
    proven: bool | None = None
    fp8_copy: bool | None = None
    versions: tuple[tuple[str, str], ...] = ()

    def holds(self, problem: Problem, system: System) -> bool:
        """Whether the condition is true of a problem on a machine."""
        arch = system.arch.sm if system.arch else ""
        return (
            (not self.archs or arch in self.archs)
            and (not self.ops or problem.op in self.ops)
            and (not self.scalings or problem.scaling in self.scalings)
            and (not self.captures or problem.capture in self.captures)
            and (self.m_max is None or problem.m <= self.m_max)
            and (self.m_min_max is None or problem.m_min <= self.m_min_max)
            and (self.proven is None or ((problem.op, arch) in system.proven) == self.proven)
            and (self.fp8_copy is None or system.fp8_copy == self.fp8_copy)
            and all(in_range(version_of(system, what), bounds) for what, bounds in self.versions)
        )


@dataclass(frozen=True)
class Rule:
    """One row of the policy; ``backends`` is a set for deny and an order for prefer.

    ``because`` says why the first of ``backends`` is preferred, or why all of them are denied. ``others`` says why each
    other one comes where it does. ``having`` names a property instead of backends: ``backends`` are then all that have
    it for any op. ``measured`` are the figures that the rule rests on. ``worth`` is how much longer its backends may
    take than coarser activations, which would run without it, as a share; None: any time.
    """

    id: str
    verb: Literal["deny", "prefer"]
    when: When
    backends: tuple[str, ...]
    because: str
    source: str
    checked: str
    code: ReasonCode = "DENIED"
    fix: str = ""
    others: tuple[tuple[str, str], ...] = ()
    having: str = ""
    measured: tuple[Speedup, ...] = ()
    worth: float | None = None

    def hit(self, backend: str) -> RuleHit:
        """Return what a decision about a backend says of this rule."""
        because = dict(self.others).get(backend, self.because)
        measured = tuple(map(str, self.measured))
        return RuleHit(self.id, self.verb, because, self.source, self.checked, self.code, self.fix, measured)

    def names(self, backend: str, problem: Problem, system: System) -> bool:
        """Whether the rule is about a backend, for a problem on a machine."""
        if self.having:
            sm = system.arch.sm if system.arch else "none"
            return backend in having(self.having, problem.op, problem.scaling, sm)
        return backend in self.backends


def in_range(version: str | None, bounds: str) -> bool:
    """Whether a version lies in a range such as ``>=0.5.3,<0.6.7``.

    None (not installed) is in no range. A text that is no version is in every range: nobody knows whether such a build
    has the fix. Bounds are plain comparisons, so ``0.6.7rc1`` is below ``0.6.7``.
    """
    if version is None:
        return False
    found = parse_version(version)
    return found is None or all(compare(found, bound) for compare, bound in parse_range(bounds))


@functools.cache
def parse_range(bounds: str) -> tuple[tuple[Callable[[Version, Version], bool], Version], ...]:
    """Read a range such as ``>=0.5.3,<0.6.7``.

    Raises
    ------
    SettingsError
        If it is not one.
    """
    parts = []
    for part in bounds.split(","):
        match = _BOUND.fullmatch(part)
        version = parse_version(match[2]) if match else None
        if match is None or version is None:
            raise SettingsError(f"{bounds!r} is not a version range; write it like >=0.5.3,<0.6.7")
        parts.append((_COMPARE[match[1]], version))
    return tuple(parts)


@functools.cache
def bounds(op: Op, arch: Arch | None) -> tuple[int, ...]:
    """Return each ``m_max`` of the packaged rules that may hold for this op and arch."""
    sm = arch.sm if arch else ""
    found = (
        when.m_max
        for when in (rule.when for rule in rules())
        if when.m_max is not None and (not when.ops or op in when.ops) and (not when.archs or sm in when.archs)
    )
    return tuple(sorted(set(found)))


def m_bucket(m: int, op: Op, arch: Arch | None) -> int:
    """Return the largest M with the same decision as ``m``: the end of its range, or the next ``m_max`` of a rule."""
    return min([end_of_range(m), *(bound for bound in bounds(op, arch) if bound >= m)])


@functools.cache
def rules() -> tuple[Rule, ...]:
    """Return the packaged rules, read once, in the file's order."""
    return load(strict_toml.load(FILE, error=SettingsError))


def load(data: dict[str, Any]) -> tuple[Rule, ...]:
    """Check the parsed file strictly and return it typed.

    Raises
    ------
    SettingsError
        For a key that is missing, unknown or of the wrong type, an unknown verb, arch, op or backend, an unreadable
        version range, a bound that is no size, a duplicate id, or an empty reason.
    """
    check("policy/rules.toml", data, {"rule": list})
    found = tuple(_rule(row) for row in data["rule"])
    ids = [rule.id for rule in found]
    if len(set(ids)) != len(ids):
        raise SettingsError(
            f"policy/rules.toml: an id is used twice: {sorted(i for i in set(ids) if ids.count(i) > 1)}"
        )
    return found


def _rule(row: dict[str, Any]) -> Rule:
    where = f"policy/rules.toml: rule {row.get('id')!r}"
    check(
        where,
        row,
        {**dict.fromkeys(("id", "verb", "because", "source"), str), "checked": date, "when": dict},
        {"backends": list, "having": str, "others": dict, "measured": list, "code": str, "fix": str, "worth": float},
    )
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", row["id"]):
        raise SettingsError(f"{where}: the id must be lower-case words joined by -")
    if row["verb"] not in ("deny", "prefer"):
        raise SettingsError(f"{where}: verb {row['verb']!r} is neither deny nor prefer")
    if not row["because"].strip():
        raise SettingsError(f"{where}: because is empty")
    if row["verb"] == "prefer" and "code" in row:
        raise SettingsError(f"{where}: code belongs to deny rules")
    if "worth" in row and (row["verb"] != "prefer" or not 0 < row["worth"] < 1):
        raise SettingsError(f"{where}: worth {row['worth']!r}: it is a share between 0 and 1, of a prefer rule")
    backends = _whom(where, row)
    source, checked = provenance(where, row)
    return Rule(
        id=row["id"],
        verb=row["verb"],
        when=_when(where, row["when"]),
        backends=backends,
        because=row["because"],
        source=source,
        checked=checked,
        code=subset(where, [row.get("code", "DENIED")], DENY_CODES)[0],  # type: ignore[arg-type]  # checked
        fix=row.get("fix", ""),
        others=tuple(row.get("others", {}).items()),
        having=row.get("having", ""),
        measured=load_measured(where, row["measured"]) if "measured" in row else (),
        worth=row.get("worth"),
    )


def _whom(where: str, row: dict[str, Any]) -> tuple[str, ...]:
    """Return the backends of a rule. A prefer rule must give a reason for each of them."""
    if ("backends" in row) == ("having" in row):
        raise SettingsError(f"{where}: needs either backends or having")
    if "having" in row:
        if row["verb"] != "deny":
            raise SettingsError(f"{where}: having belongs to deny rules; an order names its backends")
        return having(subset(where, [row["having"]], PROPERTIES)[0])
    backends = subset(where, row["backends"], catalogue().backends)
    others = row.get("others", {})
    needed = backends[1:] if row["verb"] == "prefer" else ()
    if set(others) != set(needed) or not all(isinstance(why, str) and why.strip() for why in others.values()):
        raise SettingsError(
            f"{where}: others needs a reason for each of {', '.join(needed) or 'nothing'}, has {', '.join(others)}: "
            "because speaks of the first preferred backend alone"
        )
    return backends


def _when(where: str, row: dict[str, Any]) -> When:
    names = {"archs": SM, "ops": OPS, "scalings": SCALINGS, "captures": CAPTURE_MODES}
    kinds = {**dict.fromkeys(names, list), **dict.fromkeys(_SIZES, int), **dict.fromkeys(_SWITCHES, bool)}
    check(where, row, {}, {**kinds, **dict.fromkeys(FACTS, str)})
    if not row:
        raise SettingsError(f"{where}: when is empty; a rule that always holds is a default, not a rule")
    for bound, least in _SIZES.items():
        size = row.get(bound, least)
        if size < least:
            raise SettingsError(f"{where}: {bound} {size!r} is not {'a positive integer' if least else 'a size'}")
    for what in FACTS:
        if what in row:
            parse_range(row[what])
    return When(
        **{key: subset(where, row[key], allowed) for key, allowed in names.items() if key in row},
        m_max=row.get("m_max"),
        m_min_max=row.get("m_min_max"),
        proven=row.get("proven"),
        fp8_copy=row.get("fp8_copy"),
        versions=tuple((what, row[what]) for what in FACTS if what in row),
    )
