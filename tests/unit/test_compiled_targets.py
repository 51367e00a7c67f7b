"""The published table of Blackwell builds is complete, in step with the manifest and says what the text claims."""

from __future__ import annotations

import pytest

from bench import compile_targets
from fp4dispatch.benchmark.reports import records

ROWS = {row["id"]: row for row in records.read(compile_targets.RESULTS)["rows"]}


def test_every_row_is_a_build_of_the_manifest() -> None:
    """fp16 builds differ from bf16 ones in one conversion; those without a row are listed on the page by name."""
    known = [build.id for build in compile_targets.blackwell_builds()]
    assert [key for key in ROWS if key not in known] == []
    assert [key for key in known if "bf16" in key and key not in ROWS] == []


def test_the_page_is_generated_from_the_results() -> None:
    document = records.read(compile_targets.RESULTS)
    assert compile_targets.TABLE.read_text() == "\n".join(compile_targets.table(document)) + "\n"


@pytest.mark.parametrize("row", ROWS.values(), ids=list(ROWS))
def test_a_row_holds_what_the_page_promises(row) -> None:
    assert row["acqbulk"] > 0
    assert row["unguarded"] == 0
    assert sum(row["mma"].values()) > 0
    assert row["spills"] == row["stack_bytes"] == 0
