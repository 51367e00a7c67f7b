"""The kept record of mutants: everything shipped is accepted, every mutant is refused, and the classes are complete."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fp4dispatch.benchmark.reports import records
from tests.proof import cases, small, tables

RESULTS = Path(__file__).parents[2] / "bench" / "results"
RECORD = records.one(RESULTS, "mutants")


def test_nothing_was_judged_wrongly() -> None:
    assert [name for part in ("small", "builds", "sources") for row in RECORD[part] for name in row["wrong"]] == []


def test_every_build_that_was_tried_is_accepted() -> None:
    known = cases.builds()
    assert {row["id"] for row in RECORD["builds"]} <= {build.id for build in known}
    assert [row["id"] for row in RECORD["builds"] if not row["accepted"]] == []
    assert {row["target"] for row in RECORD["builds"]} == {build.target for build in known}
    for row in RECORD["builds"]:
        assert set(row["tried"]) >= set(small.MUTANTS) - {"pointer"}


def test_the_small_mutants_are_those_of_the_tests() -> None:
    for kind, rows in small.MUTANTS.items():
        count = len(rows) + len(small.MAP_MUTANTS.get(kind, ()))
        found = {row["target"]: (row["refused"], row["tried"]) for row in RECORD["small"] if row["class"] == kind}
        assert found == dict.fromkeys(cases.SMALL_TARGETS, (count, count)), kind
    good = {row["target"]: (row["refused"], row["tried"]) for row in RECORD["small"] if row["class"] == "good"}
    assert good == dict.fromkeys(cases.SMALL_TARGETS, (0, len(small.GOOD) + len(small.GOOD_MAPS)))


def test_every_class_has_faults_in_sources_for_every_target() -> None:
    known, tried = cases.planted(), {row["id"] for row in RECORD["sources"]}
    assert tried <= {case.id for case in known}
    found = {(case.kind, case.build.target) for case in known if case.id in tried}
    assert {(case.kind, case.build.target) for case in known} == found
    assert {case.family for case in known} == {row["family"] for row in RECORD["sources"]}


@pytest.mark.parametrize(("part", "change", "says"), [
    ("small", {"refused": 7}, "| moved | 7 of 8 |"),
    ("builds", {"accepted": False}, "| builds accepted | 0 of 1 |"),
    ("builds", {"wrong": ["kernel: moved"]}, "| moved | 0 of 1 |"),
    ("sources", {"refused": 0}, "| moved | 0 of 1 |"),
])  # fmt: skip
def test_the_tables_show_what_is_wrong(part: str, change: dict[str, Any], says: str) -> None:
    rows = {
        "small": {"class": "moved", "target": "90a", "refused": 8, "tried": 8},
        "builds": {"id": "one", "target": "90a", "accepted": True, "tried": {"moved": 1}, "wrong": []},
        "sources": {"class": "moved", "family": "few_tokens", "target": "90a", "refused": 1},
    }
    table = {"small": tables.small_kernels, "builds": tables.machine_code, "sources": tables.sources}[part]
    assert says not in table({part: [rows[part]]})
    assert says in table({part: [rows[part] | change]})


def test_the_first_cases_hold_every_class_with_every_target_and_family() -> None:
    ordered = cases.spread(cases.planted())
    assert len(ordered) == len(cases.planted()) == len({case.id for case in ordered})
    targets = {(case.kind, case.build.target) for case in ordered}
    families = {(case.kind, case.family) for case in ordered}
    assert {(case.kind, case.build.target) for case in ordered[: len(targets)]} == targets
    assert {(case.kind, case.family) for case in ordered[: len(targets) + len(families)]} == families
