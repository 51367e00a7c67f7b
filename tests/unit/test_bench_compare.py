"""``--compare``: a regression beyond the noise fails, noise does not, and nothing else is compared."""

from __future__ import annotations

import copy

import pytest

from fp4dispatch.benchmark.methods.base import BASELINE
from fp4dispatch.benchmark.reports.compare import THRESHOLD, compare
from fp4dispatch.errors import InputError
from tests.bench_cases import document, row


def scaled(doc, factor, method=None, m=None):
    """Return a document whose times of a method (of all) are scaled."""
    doc = copy.deepcopy(doc)
    for each in doc["measured"]:
        if method in (None, each["method"]) and m in (None, each["m"]):
            each["us"] *= factor
    return doc


OLD = document()
NOISE = THRESHOLD + 4 * 0.01  # four spreads: the row's and the baseline's, then and now


def test_the_same_run_is_no_regression():
    found = compare(OLD, OLD)
    assert found.ok
    assert found.worse == found.better == found.peers == ()
    assert found.shared == len(OLD["measured"])
    assert "noise: 5%" in found.text()
    assert found.text().endswith("no regression")


@pytest.mark.parametrize(
    ("factor", "ok"), [(1.05, True), (1 + NOISE - 0.005, True), (1 + NOISE + 0.005, False), (2.0, False)]
)
def test_slower_than_the_noise_is_a_regression(factor, ok):
    found = compare(OLD, scaled(OLD, factor, "FP4Linear", 64))
    assert found.ok == ok
    assert len(found.worse) == (0 if ok else 6)
    if not ok:
        assert "WORSE: N=4096 K=4096 M=64 FP4Linear: 12.5 us ->" in found.text()
        assert found.text().endswith("6 regressions")


def test_a_noisier_row_is_allowed_more():
    new = scaled(OLD, 1.15, "FP4Linear")
    assert not compare(OLD, new).ok
    for each in new["measured"]:
        each["spread"] = 0.08 if each["method"] == "FP4Linear" else 0.01
    assert compare(OLD, new).ok


def test_the_threshold_is_the_callers():
    new = scaled(OLD, 1.2, "FP4Linear")
    assert compare(OLD, new, 0.2).ok
    assert not compare(OLD, new, 0.0).ok
    with pytest.raises(InputError, match="threshold=-1"):
        compare(OLD, new, -1)


def test_a_card_that_is_slower_as_a_whole_is_no_regression():
    assert compare(OLD, scaled(OLD, 1.5)).ok


def test_where_only_the_baseline_slowed_down_ours_did_not():
    found = compare(OLD, scaled(OLD, 1.3, BASELINE))
    assert found.ok
    assert {change.method for change in found.better} == {"FP4Linear", "FP8Linear/row"}


def test_a_faster_row_is_told():
    found = compare(OLD, scaled(OLD, 0.5, "FP4Linear"))
    assert found.ok
    assert len(found.better) == 18
    assert "better: N=4096 K=4096 M=1 FP4Linear: 12.5 us -> 6.2 us, 0.500 times" in found.text()


def test_peers_do_not_fail_the_command():
    found = compare(OLD, scaled(OLD, 3.0, "torch/row+q"))
    assert found.ok
    assert len(found.peers) == 18


@pytest.mark.parametrize("status", ["WRONG", "failed"])
def test_what_was_right_and_is_not_is_a_regression(status):
    new = copy.deepcopy(OLD)
    bad = next(each for each in new["measured"] if each["method"] == "FP4Linear")
    bad |= {"status": status, "us": None, "spread": None, "detail": "tile (0, 0)"}
    found = compare(OLD, new)
    assert not found.ok
    assert f"was ok, is {status} (tile (0, 0))" in found.text()
    back = compare(new, OLD)
    assert back.ok
    assert len(back.better) == 1


def test_what_stays_wrong_is_no_news():
    both = document([row(64, 64, 1, "FP4Linear", 1.0) | {"status": "WRONG", "us": None, "spread": None}])
    assert compare(both, both).ok


def test_rows_that_are_gone_are_counted():
    fewer = copy.deepcopy(OLD)
    fewer["measured"] = [each for each in fewer["measured"] if each["m"] == 1]
    found = compare(OLD, fewer)
    assert found.gone == 24
    assert "24 rows of the old run were not measured" in found.text()
    assert compare(fewer, OLD).gone == 0


def test_without_a_baseline_times_are_compared_as_they_are():
    old = document([row(64, 64, 1, "FP4Linear", 10.0)])
    new = document([row(64, 64, 1, "FP4Linear", 12.0)])
    assert "1.200 times (noise 7%)" in compare(old, new).text()


def test_two_kinds_of_card_are_not_compared():
    new = copy.deepcopy(OLD)
    new["facts"]["device"] = "NVIDIA H100"
    with pytest.raises(InputError, match="of NVIDIA H200, this one of NVIDIA H100"):
        compare(OLD, new)


def test_runs_without_a_common_row_are_not_compared():
    with pytest.raises(InputError, match="no row of ours in common"):
        compare(OLD, document([row(64, 64, 7, "FP4Linear", 1.0)]))


def test_without_a_row_of_ours_nothing_could_be_worse():
    peers = copy.deepcopy(OLD)
    peers["measured"] = [each for each in peers["measured"] if not peers["methods"][each["method"]]["ours"]]
    for old, new in ((OLD, peers), (peers, OLD)):
        with pytest.raises(InputError, match="no row of ours in common"):
            compare(old, new)
