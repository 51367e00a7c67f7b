"""The golden decisions: kept as a file, compared row by row, and sensitive to every single rule."""

from __future__ import annotations

import pytest

from fp4dispatch.backends import registry
from fp4dispatch.policy.catalogue import catalogue
from fp4dispatch.policy.rules import rules
from tests.golden.regenerate import ARCHS, PROBLEMS, TABLE, Cell, answer, compare, declared, read, table

GOLDEN = read(TABLE.read_text())
RULES = [rule.id for rule in rules()]


def asked(row, some, backends):
    return answer(Cell(*row[:5]).ask(backends, some))


def changed_without(rule):
    """Rows that name a rule and change when it is dropped."""
    without = [each for each in rules() if each.id != rule]
    named = [row for row in GOLDEN if f"({rule})" in row[5] or rule in row[6].split()]
    return [row for row in named if asked(row, without, declared()) != row[5:]]


def test_the_table_is_what_the_policy_says_now():
    differences = compare(GOLDEN, table())
    assert not differences, "python -m tests.golden.regenerate, then read the diff:\n" + "\n".join(differences[:20])


def test_the_table_has_every_arch_and_op():
    assert {row[0] for row in GOLDEN} == set(ARCHS) == {
        "none", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121"
    }  # fmt: skip
    ops = {op for op, _, _ in PROBLEMS.values()}
    assert {(row[0], PROBLEMS[row[1]][0]) for row in GOLDEN} == {(arch, op) for arch in ARCHS for op in ops}


@pytest.mark.parametrize("rule", RULES)
def test_a_row_changes_where_a_rule_is_dropped(rule):
    assert changed_without(rule), f"no golden row shows {rule}: add a problem or software that does"


def test_a_rule_that_no_row_shows_is_noticed(monkeypatch):
    hidden = [row for row in GOLDEN if "nvfp4-sm90-decode-w4a16" not in row[5]]
    assert len(hidden) < len(GOLDEN)
    monkeypatch.setitem(globals(), "GOLDEN", hidden)
    assert changed_without("nvfp4-sm90-decode-w4a16") == []


def test_backends_decide_as_their_records_say():
    """``declared`` asks the records of capabilities.toml, ``builtins`` the classes themselves."""
    assert set(catalogue().backends) == set(registry.BUILTINS)
    ours = registry.builtins()
    assert [row for row in GOLDEN if asked(row, rules(), ours) != row[5:]] == []


def test_compare_sees_a_changed_row():
    changed = [(*GOLDEN[0][:5], "cutlass (made-up)", *GOLDEN[0][6:]), *GOLDEN[1:]]
    assert len(compare(changed, GOLDEN)) == 2
    assert compare(GOLDEN[1:], GOLDEN) == [f"      now: {' | '.join(GOLDEN[0])}"]
