"""bench/carry_tables.py: what keeps shipped tables true, and what does not."""

from __future__ import annotations

import json

import pytest

from bench import carry_tables
from fp4dispatch.dispatch import shipped
from fp4dispatch.jit.store.digests import digest
from fp4dispatch.problem.measurement import LaunchConfig, Timing
from fp4dispatch.trust import facts
from tests import machine_code as mc

NAMED = "w4a8_small/bf16-90a"
SAME = mc.Row(NAMED, "kernel", mc.EQUAL)


@pytest.fixture
def case(tmp_path, monkeypatch):
    """Two checkouts that differ in a comment, finished kernels of both, a table, and a comparer that says: equal."""
    for name, text in (("old", "code"), ("here", "code  // why")):
        for part in ("csrc", "jit_flags"):
            (tmp_path / name / part).mkdir(parents=True)
        (tmp_path / name / "csrc" / "k.cu").write_text(text)
        (tmp_path / name / "jit_flags" / "f.toml").write_text("a = 1")
        entry = tmp_path / f"{name}-built" / "kernels" / "k"
        entry.mkdir(parents=True)
        files = [["src", "k.cu", digest(tmp_path / name / "csrc" / "k.cu")], ["/", "usr/x.h", "0"]]
        (entry / "entry.json").write_text(json.dumps({"files": files}))
    timing = Timing("w4a8", "fp8", 5.0, 0.1, 9, LaunchConfig("w4a8_small", "bf16", (16, 1, 2, 1, 1, 2, 2)))
    layers = {("nvfp4_gemm", "nvfp4", 64, 128): {1: (timing,)}}
    table = shipped.Table(
        "H200 SXM", facts.kernel_sources_in(tmp_path / "old"), "2026-11-25", "replays", {"driver": "1"}, layers
    )
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "h200-sxm.json").write_text(shipped.to_json(table))
    rows = [SAME, mc.Row("w4a8_small/new-90a", "(all)", mc.NEW)]
    monkeypatch.setattr(mc, "compare_paths", lambda before, after: rows)

    def carry():
        paths = (tmp_path / name for name in ("old", "old-built", "here-built", "tables", "here"))
        return carry_tables.carry(*paths)

    return tmp_path, rows, carry


def test_a_table_is_carried_over_where_no_code_changed(case):
    folder, _, carry = case
    was = shipped.load(folder / "tables" / "h200-sxm.json")
    (line,) = carry()
    now = shipped.load(folder / "tables" / "h200-sxm.json")
    assert now.kernels == facts.kernel_sources_in(folder / "here") != was.kernels
    assert (now.layers, now.facts, now.date) == (was.layers, was.facts, was.date)
    assert line.endswith("1 kernels are the same")
    with pytest.raises(carry_tables.Refused, match="was measured with sources"):
        carry()


def other_code(folder, rows):
    rows[0] = mc.Row(NAMED, "kernel", mc.DIFFERENT, "line 3")


def gone(folder, rows):
    rows[0] = mc.Row(NAMED, "(all)", mc.MISSING, "only in BEFORE")


def not_compared(folder, rows):
    rows[0] = mc.Row("w8a8_small/bf16-90a", "kernel", mc.EQUAL)


def built_from_other_sources(folder, rows):
    (folder / "here" / "csrc" / "k.cu").write_text("code 2")


def nothing_built(folder, rows):
    next((folder / "old-built").rglob("entry.json")).unlink()


def no_table(folder, rows):
    (folder / "tables" / "h200-sxm.json").unlink()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (other_code, f"{NAMED}, kernel: DIFFERENT line 3"),
        (gone, f"{NAMED}, \\(all\\): MISSING"),
        (not_compared, f"lacks {NAMED}, which the tables name"),
        (built_from_other_sources, "was made from another k.cu than"),
        (nothing_built, "holds no finished kernels"),
        (no_table, "holds no table"),
    ],
)
def test_else_nothing_is_written(case, change, why):
    folder, rows, carry = case
    change(folder, rows)
    before = [path.read_text() for path in (folder / "tables").glob("*")]
    with pytest.raises(carry_tables.Refused, match=why):
        carry()
    assert [path.read_text() for path in (folder / "tables").glob("*")] == before
