"""Figures of rules: read strictly, found in the records that they came from, and shown by explain."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from fp4dispatch.errors import SettingsError
from fp4dispatch.machine.system import System
from fp4dispatch.policy.catalogue import catalogue
from fp4dispatch.policy.measured import Speedup, load
from fp4dispatch.policy.resolve import resolve
from fp4dispatch.policy.rules import rules
from fp4dispatch.problem import Problem
from tests import figures as recorded
from tests.declared import DeclaredBackend

FIGURES = [(rule, figures) for rule in rules() for figures in rule.measured]
ROW = {
    "backend": "w8a8",
    "record": "bench-x-h200",
    "method": "a",
    "over": "b",
    "m": [1, 16],
    "times": [1.25, 1.5],
}


def faults(figures: Speedup) -> list[str]:
    """What is wrong with figures, by their record."""
    if not (recorded.RESULTS / f"{figures.record}.json").is_file():
        return [f"there is no bench/results/{figures.record}.json"]
    found = [
        f"M={m}: {said}, the record has {has}"
        for m, said, has in zip(figures.m, figures.times, recorded.recomputed(figures), strict=True)
        if said != has
    ]
    for m, n, k, backend in recorded.ran(figures.record, figures.method):
        if m in figures.m and figures.nk in (None, (n, k)) and backend != figures.backend:
            found.append(f"M={m} N={n} K={k} ran {backend}, not {figures.backend}")
    return found


@pytest.mark.parametrize(("rule", "figures"), FIGURES, ids=[f"{r.id}-{f.backend}" for r, f in FIGURES])
def test_the_record_has_the_figures(rule, figures):
    assert faults(figures) == []


def test_wrong_figures_are_noticed():
    _, figures = FIGURES[0]
    assert "the record has" in faults(replace(figures, times=(9.99, *figures.times[1:])))[0]
    assert "the record has None" in faults(replace(figures, m=(3, *figures.m[1:])))[0]
    assert "the record has None" in faults(replace(figures, method="nobody/nothing"))[0]
    assert "there is no bench/results" in faults(replace(figures, record="nowhere"))[0]
    assert "ran w4a16, not cudnn" in faults(replace(figures, backend="cudnn"))[0]


def test_reasons_have_no_figures_of_time():
    """A reason says what and why; speed is in ``measured``, where it is checked."""
    said = {rule.id: " ".join((rule.because, *(why for _, why in rule.others))) for rule in rules()}
    speed = re.compile(r"\d ?(%|(us|ms|s|times)\b)")
    assert [rule for rule, text in said.items() if speed.search(text)] == []
    assert all(map(speed.search, ("4 % faster", "1.34 times", "takes 46 us", "45 s to compile")))


def test_good_figures_load_and_read_well():
    (figures,) = load("x", [ROW])
    assert (figures.m, figures.times, figures.nk) == ((1, 16), (1.25, 1.5), None)
    said = "w8a8, times as fast as b: 1.25 at M=1, 1.50 at M=16 (a in bench/results/bench-x-h200.json)"
    assert str(figures) == said
    (one,) = load("x", [ROW | {"nk": [4096, 1024]}])
    assert "(N=4096 K=1024, a in" in str(one)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ({}, "not a list of tables"),
        ([], "not a list of tables"),
        (["1.25 times"], "not a list of tables"),
        ([ROW | {"unit": "us"}], "unknown key"),
        ([{"backend": "w8a8"}], "is missing"),
        ([ROW | {"backend": "nobody"}], "must be a list of"),
        ([ROW | {"record": "x.json"}], "is not the name of a file in bench/results"),
        ([ROW | {"record": "../x"}], "is not the name of a file in bench/results"),
        ([ROW | {"record": 1}], "record must be str"),
        ([ROW | {"method": ""}], "method is empty"),
        ([ROW | {"over": 2}], "over must be str"),
        ([ROW | {"m": [1]}], "2 times for 1 m"),
        ([ROW | {"m": [1, True]}], "not a list of positive ints"),
        ([ROW | {"m": [0, 1]}], "not a list of positive ints"),
        ([ROW | {"times": [1, 2]}], "not a list of positive floats"),
        ([ROW | {"times": 1.5}], "times must be list"),
        ([ROW | {"times": [1.5, float("nan")]}], "not a list of positive floats"),
        ([ROW | {"nk": [4096]}], "is not N and K"),
    ],
)
def test_bad_figures_are_refused(rows, text):
    with pytest.raises(SettingsError, match=text):
        load("x", rows)


def test_explain_shows_the_figures_of_the_rule_that_chose():
    hopper = System.fake("9.0", cuda="13.0", torch="2.11", nvcc="13.0", cutlass="4.5")
    ours = {name: DeclaredBackend(name) for name in catalogue().backends}
    decision = resolve(Problem("fp8_gemm", 16, 4096, 4096, scaling="row"), hopper, ours)
    (rule,) = (rule for rule in rules() if rule.id == decision.rule.id)
    assert decision.rule.measured == tuple(map(str, rule.measured))
    for figures in rule.measured:
        assert f"  measured: {figures}" in decision.text().splitlines()
        assert "measured" not in decision.line()
    assert decision.to_dict()["rule"]["measured"] == decision.rule.measured
