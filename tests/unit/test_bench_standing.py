"""What the random suite concludes, from times that are made up."""

from __future__ import annotations

import math

import pytest

from fp4dispatch.benchmark.methods.base import BASELINE
from fp4dispatch.benchmark.reports import random_report, random_runs, records, standing
from fp4dispatch.benchmark.reports.standing import Loss
from tests.bench_cases import FACTS

BIG, LESS = (4096, 4096), (1024, 1024)
METHODS = {
    BASELINE: ("bf16", None, False),
    "torch/row+q": ("row", None, False),
    "FP4Linear": ("nvfp4", None, True),
    "FP4Linear/bf16": ("nvfp4", None, True),
    "FP4Linear/w4a8_expanded": ("nvfp4", "row", True),
    "FP8Linear/row": ("row", None, True),
}
FORMAT = {name: about[0] for name, about in METHODS.items()}


def row(method, us, m=16, nk=BIG, entering="bf16", **more):
    made = {"n": nk[0], "k": nk[1], "m": m, "method": method, "status": "ok", "us": us, "entering": entering}
    made["detail"] = ""
    if method.startswith("launch"):
        made["launch"] = {"format": more.pop("format"), "ours": True, "copied": None}
    return made | more


def document(*rows, **more):
    about = {
        name: {
            "what": name,
            "format": fmt,
            "copied": copied,
            "ours": ours,
            "rivals": [o for o, (f, _, mine) in METHODS.items() if not mine and f in (fmt, "bf16")] if ours else [],
        }
        for name, (fmt, copied, ours) in METHODS.items()
    }
    doc = {"kind": "random suite", "subject": "seed 1", "schema": 1, "facts": FACTS, "seed": 1, "problems": 4}
    doc |= {"owners": {}, "peaks": {"copy": None, "bf16": None, "fp8": None}, "methods": about, "absent": {}}
    doc |= {"left": [], "stopped": "", "seconds": 1.0, "tried": [], "refused": {}}
    doc["measured"] = [each for each in rows if "launch" not in each]
    doc["launches"] = [each for each in rows if "launch" in each]
    return doc | more


def test_means_by_range_of_m_and_small_weights_apart():
    doc = document(
        *(row(BASELINE, 12.0, m) for m in (1, 16, 17)),
        *(row("FP4Linear", us, m) for m, us in ((1, 4.0), (16, 12.0), (17, 6.0))),
        row(BASELINE, 5.0, 1, LESS),
        row("FP4Linear", 10.0, 1, LESS),
        row(BASELINE, 5.0, 300),
        row("FP4Linear", None, 300, status="WRONG"),
    )
    found = standing.means(doc, "FP4Linear", small=False)
    assert found[:2] == [(pytest.approx(math.sqrt(3)), 2), (2.0, 1)]
    assert [count for _, count in found] == [2, 1, 0, 0, 0]
    assert standing.means(doc, "FP4Linear", small=True)[0] == (0.5, 1)


def test_losses_are_to_the_fastest_peer_of_the_format_or_bf16():
    doc = document(
        row(BASELINE, 10.0),
        row("torch/row+q", 8.0),
        row("FP8Linear/row", 8.1),
        row("FP4Linear", 9.0),
        row("FP8Linear/row", 12.0, 17),
        row(BASELINE, 10.0, 17),
    )
    assert standing.to_peers(doc, "FP8Linear/row") == [
        Loss(8.1 / 8.0, (*BIG, 16), "torch/row+q"),
        Loss(1.2, (*BIG, 17), BASELINE),
    ]
    assert standing.to_peers(doc, "FP4Linear") == [Loss(0.9, (*BIG, 16), BASELINE)], "FP8 weights are no peer of NVFP4"
    found = standing.standing(doc, "FP8Linear/row")
    assert found.slower == 0.5, "1.0125 is a tie"
    assert (found.worst.ratio, found.problems, found.small) == (1.2, 2, 0)
    assert math.isnan(found.small_slower)


def test_small_weights_are_listed_apart():
    doc = document(
        row(BASELINE, 5.0, nk=LESS), row("FP4Linear", 6.0, nk=LESS), row(BASELINE, 9.0), row("FP4Linear", 9.0)
    )
    found = standing.standing(doc, "FP4Linear")
    assert (found.slower, found.small_slower) == (0.0, 1.0)
    assert found.small_worst == Loss(1.2, (*LESS, 16), BASELINE)


def test_inversions():
    doc = document(
        *(row("FP4Linear", us, m) for m, us in ((1, 10.8), (8, 9.0), (16, 8.9), (64, 10.4), (65, 10.0))),
        row("FP4Linear", 20.0, 1, LESS),
    )
    found, compared = standing.inversions(doc, "FP4Linear")
    assert found == [Loss(10.8 / 8.9, (*BIG, 1), "M=16")], "4 % is none, and another weight is not compared"
    assert compared == 4


def test_regret_counts_what_could_have_run_instead():
    fast = "launch w4a8 fast"
    doc = document(
        row("FP4Linear", 10.0),
        row("FP4Linear/bf16", 9.5),
        row("FP4Linear/w4a8_expanded", 5.0, entering="row"),
        row("launch w4a16 a", 8.0, format="nvfp4"),
        row(fast, 4.0, format="nvfp4", entering="row"),
        row("launch w8a16 b", 2.0, format="row"),
        row(BASELINE, 1.0),
        row("FP4Linear", 10.0, 64, entering="row"),
        row(fast, 8.0, 64, format="nvfp4", entering="row"),
        row("FP4Linear/w4a8_expanded", 6.0, 64, entering="row"),
        row("launch w4a8 wrong", None, 64, format="nvfp4", entering="row", status="WRONG"),
        row("FP4Linear", 10.0, 65),
    )
    assert standing.regrets(doc, "FP4Linear") == [
        Loss(1.25, (*BIG, 16), "launch w4a16 a"),  # not with coarser activations, copies, other weights, or peers
        Loss(1.25, (*BIG, 64), fast),
    ]
    assert standing.regrets(doc, "FP8Linear/row") == []
    assert standing.regrets(doc, "FP4Linear/w4a8_expanded") == [
        Loss(1.25, (*BIG, 16), fast),
        Loss(1.0, (*BIG, 64), "FP4Linear/w4a8_expanded"),
    ]
    assert standing.standing(doc, "FP4Linear").regret(0.95) == pytest.approx(1.25)


def test_the_best_choice_has_no_regret():
    doc = document(row("FP4Linear", 7.0), row("launch w4a16 a", 8.0, format="nvfp4"))
    assert standing.regrets(doc, "FP4Linear") == [Loss(1.0, (*BIG, 16), "FP4Linear")]


def test_quantiles():
    assert standing.quantile([1.0, 3.0, 2.0], 0.5) == 2.0
    assert standing.quantile([1.0, 2.0], 0.95) == pytest.approx(1.95)
    assert standing.quantile([4.0], 0.95) == 4.0
    assert math.isnan(standing.quantile([], 0.5))


def test_tables_say_what_is_missing_and_what_was_wrong():
    doc = document(
        row(BASELINE, 10.0, 1),
        row("FP4Linear", 5.0, 1),
        row(BASELINE, 20.0, 300),
        row("FP4Linear", 5.0, 300),
        row("FP8Linear/row", None, 1, status="WRONG", detail="tile (0, 1) is off by 1"),
        row("launch w4a16 a", None, 1, format="nvfp4", status="WRONG", detail="tile (0, 0) is off by nan"),
        left=[[64, 64, 1], [64, 64, 2]],
        refused={"launch w4a16 b": "ValueError: shape: needs more"},
        tried=[[64, 64, 1, 12], [64, 64, 2, 30]],
    )
    text = random_report.text(doc)
    assert "PARTIAL: 2 of 4 random problems of seed 1" in text
    assert "not measured: 2 problems: the time ended" in text
    (line,) = [line for line in text.splitlines() if line.startswith("FP4Linear") and "(1)" in line]
    assert line.split() == ["FP4Linear", "2.00", "(1)", "4.00", "(1)"]
    (line,) = [line for line in text.splitlines() if line.startswith("FP4Linear ") and " of " in line]
    assert line.split() == ["FP4Linear", "2", "0.0%", "0.500", "0", "0", "of", "1"]
    assert "WRONG: FP8Linear/row: tile (0, 1) is off by 1 (1: 4096x4096 M=1)" in text
    assert "WRONG: launch w4a16 a: tile (0, 0)" in text
    assert "42 launches of ours were checked and timed; 1 do not fit this GPU, e.g. launch w4a16 b: ValueError" in text
    assert "| FP4Linear | 2.00 (1) |" in random_report.markdown(doc)
    assert "PARTIAL" not in random_report.text(document(row(BASELINE, 1.0), row("FP4Linear", 1.0)))
    assert records.faults(doc) == []
    assert records.name(doc) == "random-suite-seed-1-h200.json.xz"


def test_losses_are_listed_worst_first():
    rows = [r for m in range(1, 9) for r in (row(BASELINE, 10.0, m), row("FP4Linear", 20.0 - m, m))]
    text = random_report.text(document(*rows, row("launch w4a16 a", 5.0, 1, format="nvfp4")))
    (line,) = [line for line in text.splitlines() if line.startswith("FP4Linear, inversions")]
    assert line.startswith("FP4Linear, inversions: 1.583 (4096x4096 M=1, M=8); 1.500 (4096x4096 M=2, M=8)")
    assert "FP4Linear, worst beside a peer: 1.900 (4096x4096 M=1, torch/bf16)" in text
    assert "FP4Linear, regret: 3.800 (4096x4096 M=1, launch w4a16 a)" in text


def test_runs_of_one_gpu_model_are_one_table():
    """Of a size that two runs have, the newer one counts: an inversion across machines would be none."""
    old = document(
        row(BASELINE, 10.0, 8),
        row("FP4Linear", 9.0, 8),
        row(BASELINE, 4.0, 1, LESS),
        row("FP4Linear", 2.0, 1, LESS),
        row("launch w4a16 a", 1.0, 1, LESS, format="nvfp4"),
        tried=[[*BIG, 8, 5], [*LESS, 1, 7]],
        left=[[64, 64, 1]],
    )
    new = document(row(BASELINE, 10.0, 16), row("FP4Linear", 5.0, 16), row("FP4Linear", 4.0, 300))
    new |= {"seed": 12, "seconds": 2.0, "facts": FACTS | {"commit": "bbb"}, "tried": [[*BIG, 16, 3]]}
    other = document(row(BASELINE, 1.0), row("FP4Linear", 1.0), facts=FACTS | {"device": "another"})
    mine, apart = random_runs.by_model([old, other, new])
    assert apart is other
    assert {(r["n"], r["k"], r["m"]) for r in mine["measured"]} == {(*BIG, 16), (*BIG, 300), (*LESS, 1)}
    assert len(mine["launches"]) == 1
    assert mine["tried"] == [[*BIG, 16, 3], [*LESS, 1, 7]]
    text = random_report.text(mine)
    assert f"commit {FACTS['commit']}, bbb" in text
    assert "PARTIAL: 3 of 4 random problems of seeds 1, 12, 3 s" in text
    assert "10 launches of ours were checked and timed" in text
    found = standing.standing(mine, "FP4Linear")
    assert (found.problems, found.small, found.compared) == (1, 1, 1)
    assert [each.ratio for each in found.regrets] == [2.0]
    with pytest.raises(ValueError, match=r"runs are of \['.*another.*'\], needed one GPU model"):
        random_runs.together([old, other])


def test_what_a_newer_run_replaces_is_neither_drawn_nor_left():
    """Each run has measured all that it drew, or its rest is replaced too: the whole is not short of anything."""
    old = document(row(BASELINE, 10.0, 8), row(BASELINE, 4.0, 1, LESS), problems=3, left=[[*BIG, 77]])
    new = document(row(BASELINE, 9.0, 16), problems=1) | {"seed": 12}
    whole = random_runs.together([old, new])
    assert (whole["problems"], whole["left"]) == (2, [])
    assert "\n2 of 2 random problems of seeds 1, 12" in random_report.text(whole)
    new["left"] = [[*LESS, 1], [*LESS, 5]]  # the first of them the old run has measured
    whole = random_runs.together([old, new])
    assert (whole["problems"], whole["left"]) == (3, [[*LESS, 5]])
    assert "PARTIAL: 2 of 3 random problems" in random_report.text(whole)
