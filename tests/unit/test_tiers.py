"""The list of the longest tests: made from a measured run, and never stale."""

from types import SimpleNamespace

import pytest

from tests import conftest, tiers

REPORT = """<testsuites><testsuite>
<testcase classname="tests.unit.test_a" name="test_long[x-1]" time="4.0"/>
<testcase classname="tests.unit.test_a" name="test_long[x-2]" time="5.0"/>
<testcase classname="tests.unit.test_a.TestIt" name="test_short" time="1.0"/>
<testcase classname="tests.compile.test_b" name="test_middle" time="3.0"/>
<testcase classname="tests.compile.test_b" name="test_that_shares_its_kernel" time="0.5"/>
</testsuite></testsuites>"""
LONG, SHORT = "tests/unit/test_a.py::test_long", "tests/unit/test_a.py::TestIt::test_short"
TESTPATHS, ARGS = pytest.Config.ArgsSource.TESTPATHS, pytest.Config.ArgsSource.ARGS


def item(node: str) -> SimpleNamespace:
    """One collected test, which keeps the names of its markers."""
    made = SimpleNamespace(nodeid=node, marks=[])
    made.add_marker = lambda mark: made.marks.append(mark if isinstance(mark, str) else mark.name)
    return made


def marks(monkeypatch, source, expression=""):
    monkeypatch.setattr(tiers, "thorough", lambda: frozenset({LONG}))
    items = [item(f"{LONG}[x-1]"), item(SHORT)]
    conftest._mark_thorough(SimpleNamespace(args_source=source, option=SimpleNamespace(markexpr=expression)), items)
    return [each.marks for each in items]


def test_the_longest_functions_are_listed(tmp_path):
    path = tmp_path / "times.xml"
    path.write_text(REPORT)
    found = tiers.times(path)
    compiled = [f"tests/compile/test_b.py::{name}" for name in ("test_middle", "test_that_shares_its_kernel")]
    assert found == {LONG: 9.0, compiled[0]: 3.0, compiled[1]: 0.5, SHORT: 1.0}
    assert tiers.longest(found, 4.5) == [LONG]
    assert tiers.longest(found, 4.4) == [*compiled, LONG]
    assert tiers.longest(found, 13.5) == []


def test_listed_tests_are_skipped_where_everything_runs_and_are_not_asked_for(monkeypatch):
    assert marks(monkeypatch, TESTPATHS) == [["thorough", "skip"], []]
    for expression in ("thorough", "slow or not slow", "not gpu and thorough"):
        assert marks(monkeypatch, TESTPATHS, expression) == [["thorough"], []]
    assert marks(monkeypatch, ARGS) == [["thorough"], []]


def test_a_listed_test_that_is_gone_is_an_error(monkeypatch):
    monkeypatch.setattr(tiers, "thorough", lambda: frozenset({"tests/unit/test_gone.py::test_x"}))
    config = SimpleNamespace(args_source=TESTPATHS, option=SimpleNamespace(markexpr=""))
    with pytest.raises(pytest.UsageError, match=r"test_gone\.py::test_x"):
        conftest._mark_thorough(config, [item(SHORT)])
