"""bench/carry_tables.py: what keeps shipped tables true, and what does not."""

from __future__ import annotations

import json
from dataclasses import replace

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
    monkeypatch.setattr(mc, "compare_paths", lambda before, after, renamed: rows if renamed else [])

    def carry(fresh=None):
        paths = (tmp_path / name for name in ("old", "old-built", "here-built", "tables", "here"))
        return carry_tables.carry(*paths, fresh)

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


def test_the_kernel_that_no_timing_runs_may_change(case):
    _, rows, carry = case
    rows.append(mc.Row("swiglu_activations/any-90a", "kernel", mc.DIFFERENT, "line 3"))
    (line,) = carry()
    assert line.endswith("1 kernels are the same")


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


FP8 = "w8a8_small/bf16-90a"


@pytest.fixture
def measured_anew(case):
    """NVFP4 kernels changed, FP8 ones did not; a second table has new times of the NVFP4 layer."""
    folder, rows, carry = case
    rows[:] = [mc.Row(NAMED, "kernel", mc.DIFFERENT, "line 3"), mc.Row(FP8, "kernel", mc.EQUAL)]
    path = folder / "tables" / "h200-sxm.json"
    old = shipped.load(path)
    timing = Timing("w8a8", "fp8", 7.0, 0.1, 9, LaunchConfig("w8a8_small", "bf16", (16, 1, 2, 1, 1, 2, 2)))
    both = {**old.layers, ("fp8_gemm", "row", 64, 128): {1: (timing,)}}
    path.write_text(shipped.to_json(replace(old, layers=both, facts={"driver": "1", "commit": "aaaaaaa"})))
    faster = {key: {1: (replace(by_m[1][0], us=4.0),)} for key, by_m in old.layers.items()}
    new = replace(
        old,
        kernels=facts.kernel_sources_in(folder / "here"),
        date="2026-11-26",
        layers=faster,
        facts={"driver": "1", "commit": "bbbbbbb"},
    )
    fresh = folder / "fresh"
    fresh.mkdir()

    def write(table):
        (fresh / "h200-sxm.json").write_text(shipped.to_json(table))

    write(new)
    return path, rows, lambda: carry(fresh), new, write


def test_new_times_of_one_format_join_what_is_carried_over(measured_anew):
    path, _, carry, new, _ = measured_anew
    (line,) = carry()
    now = shipped.load(path)
    assert now.kernels == new.kernels
    assert now.layers["nvfp4_gemm", "nvfp4", 64, 128][1][0].us == 4.0
    assert now.layers["fp8_gemm", "row", 64, 128][1][0].us == 7.0
    assert now.date == "2026-11-26"
    assert now.facts["commit"] == "aaaaaaa, nvfp4 bbbbbbb"
    assert line.endswith("1 kernels are the same")


def test_new_times_of_rows_leave_those_of_blocks(measured_anew):
    path, rows, carry, new, write = measured_anew
    rows[:] = [SAME, mc.Row(FP8, "kernel", mc.EQUAL)]
    old = shipped.load(path)
    row, block = ("fp8_gemm", "row", 64, 128), ("fp8_gemm", "block128", 64, 128)
    path.write_text(shipped.to_json(replace(old, layers={**old.layers, block: old.layers[row]})))
    write(replace(new, layers={row: {1: (replace(old.layers[row][1][0], us=6.0),)}}))
    carry()
    now = shipped.load(path)
    assert [now.layers[key][1][0].us for key in (row, block)] == [6.0, 7.0]
    assert now.layers.keys() == {*old.layers, block}


@pytest.mark.parametrize(
    ("text", "scalings", "want"),
    [
        ("aaaaaaa", {"row"}, "aaaaaaa, row ccccccc"),
        ("aaaaaaa, row bbbbbbb", {"row", "nvfp4"}, "aaaaaaa, nvfp4 ccccccc, row ccccccc"),
        ("aaaaaaa, nvfp4 bbbbbbb", {"row"}, "aaaaaaa, nvfp4 bbbbbbb, row ccccccc"),
    ],
)
def test_a_table_names_the_commit_of_each_format_that_was_measured_apart(text, scalings, want):
    assert carry_tables.commits(text, scalings, "ccccccc") == want


def carried_layer_changed(rows, new, write):
    rows[1] = mc.Row(FP8, "kernel", mc.DIFFERENT, "line 3")


def quantiser_changed(rows, new, write):
    rows.append(mc.Row("w4_activations/any-90a", "kernel", mc.DIFFERENT, "line 3"))


def other_sources(rows, new, write):
    write(replace(new, kernels="0" * 32))


def not_all_tokens(rows, new, write):
    ((key, by_m),) = new.layers.items()
    write(replace(new, layers={key: {2: by_m[1]}}))


def another_driver(rows, new, write):
    write(replace(new, facts={**new.facts, "driver": "2"}))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (another_driver, "has driver 2, the old 1"),
        (carried_layer_changed, f"{FP8}, kernel: DIFFERENT"),
        (quantiser_changed, "w4_activations/any-90a, kernel: DIFFERENT"),
        (other_sources, "was measured with sources 000000000000"),
        (not_all_tokens, "has no times of .* at M=1"),
    ],
)
def test_new_times_that_do_not_fit_change_nothing(measured_anew, change, why):
    path, rows, carry, new, write = measured_anew
    change(rows, new, write)
    before = path.read_text()
    with pytest.raises(carry_tables.Refused, match=why):
        carry()
    assert path.read_text() == before
