"""The golden table: kept as a file, compared row by row, and sensitive to every single rule."""

from __future__ import annotations

import pytest

from fp4dispatch.backends import registry
from fp4dispatch.policy.rules import rules
from tests.golden.regenerate import (
    ARCHS,
    CAPTURES,
    PROBLEMS,
    PROVEN,
    STACKS,
    TABLE,
    Cell,
    answer,
    compare,
    declared,
    read,
    table,
)

GOLDEN = read(TABLE.read_text())
RULES = [rule.id for rule in rules()]


def test_the_table_is_what_the_policy_says_now():
    differences = compare(GOLDEN, table())
    assert not differences, "python -m tests.golden.regenerate, then read the diff:\n" + "\n".join(differences[:20])


def test_the_table_has_every_arch_stack_and_mode():
    assert {row[0] for row in GOLDEN} == set(ARCHS) == {
        "none", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121"
    }  # fmt: skip
    assert {row[2] for row in GOLDEN} == set(STACKS)
    assert len({(row[0], row[1], row[2]) for row in GOLDEN}) == len(ARCHS) * len(PROBLEMS) * len(STACKS)


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_in_the_table_and_removing_it_changes_the_table(rule):
    rows = [row for row in GOLDEN if f"({rule})" in row[5] or rule in row[7].split()]
    assert rows, f"no golden row is hit by {rule}"
    arch, problem, stack, captures, proven = rows[0][:5]
    capture = next(c for c in CAPTURES if captures == "any" or captures.startswith(c))
    if "piecewise,M>=0" in captures.split():
        capture = "piecewise,M>=0"
    cell = Cell(arch, problem, stack, capture, next(p for p in PROVEN if proven in ("any", p)))
    without = [r for r in rules() if r.id != rule]
    assert answer(cell, rules(), declared(), registry.builtins()) == rows[0][5:]
    assert answer(cell, without, declared(), registry.builtins()) != rows[0][5:]


def test_today_chooses_only_what_exists():
    assert {row[6].split()[0] for row in GOLDEN} <= set(registry.BUILTINS)


def test_compare_sees_a_changed_row():
    changed = [(*GOLDEN[0][:5], "cutlass (made-up)", *GOLDEN[0][6:]), *GOLDEN[1:]]
    assert len(compare(changed, GOLDEN)) == 2
    assert compare(GOLDEN[1:], GOLDEN) == [f"      now: {' | '.join(GOLDEN[0])}"]
