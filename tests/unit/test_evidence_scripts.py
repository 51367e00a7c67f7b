"""bench/host_cost.py, candidates.py, evidence.py and soak.py on a CPU: what they measure, refuse and print."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bench import candidates, evidence, host_cost, soak
from fp4dispatch.backends import registry
from fp4dispatch.benchmark import machine
from fp4dispatch.benchmark.reports import records
from fp4dispatch.dispatch import tuned
from fp4dispatch.problem import Problem
from fp4dispatch.run import ops
from fp4dispatch.trust import canary, quarantine
from fp4dispatch.trust.verdict import CheckResult
from fp4dispatch.tune.timing import WallEngine
from tests.planted import FAULTS, HONEST, Honest

CPU = torch.device("cpu")


# ----------------------------------------------------------------------------------------------------------- host cost


@pytest.fixture(scope="module")
def cost():
    *_, result = host_cost.run(machine.card("cpu"), 64, 64, (1, 3), calls=3, rounds=5, peers="none")
    return {"host_cost": result}


def test_every_method_is_timed_beside_nn_linear(cost):
    rows = {(row["what"], row["m"]): row for row in cost["host_cost"]["rows"]}
    for m in (1, 3):
        assert rows["nn.Linear", m]["ratio"] == 1
        for name in ("torch.mm", "an output", "FP8Linear row, reference", "FP4Linear", "FP8Linear block128"):
            assert rows[name, m]["us"] > 0
        assert rows["FP4Linear", m]["limited"]
        assert not rows["FP4Linear, reference", m]["limited"]
        assert rows["FP8Linear row, nothing launched", m]["us"] < rows["FP8Linear row, reference", m]["us"]
    assert json.loads(json.dumps(cost)) == cost


def test_the_table_and_the_limit(cost):
    text = host_cost.table(cost)
    assert "| nn.Linear | torch |" in text
    assert "M=3, us" in text
    for row in cost["host_cost"]["rows"]:
        row["ratio"] = 1.1
    assert host_cost.over(cost, 1.2) == []
    missed = host_cost.over(cost, 1.0)
    assert len(missed) == 8
    assert missed[0].startswith("FP8Linear row on reference (bf16) at M=1: 1.10 times")


def test_a_record_without_flashinfer_is_an_error_where_it_was_asked_for(cost, tmp_path, monkeypatch, capsys):
    assert host_cost.lacking(cost, "none") == []
    assert [line.split(",")[0] for line in host_cost.lacking(cost, "slow")] == [
        "no function of FlashInfer's at M=1",
        "no function of FlashInfer's at M=3",
    ]
    broken = "ImportError: no module named deep_gemm"

    def run(card, n, k, tokens, calls, rounds, peers):
        assert tokens == (1, 16, 128, 512)
        left_out = {"flashinfer.gemm, M=16": broken, "flashinfer.gemm, M=1": "other", "FP8Linear, M=16": "other"}
        row = {"us": 1.0, "spread": 0.0, "ratio": 1.0, "limited": False}
        rows = [row | {"m": m, "what": host_cost.BASELINE, "backend": "torch"} for m in tokens]
        have = [m for m in tokens if m != 16 or not asked["missing"]]
        rows += [row | {"m": m, "what": "flashinfer.gemm", "backend": host_cost.FLASHINFER} for m in have]
        asked["peers"] = peers
        known = {"n": n, "k": k, "left_out": left_out, "method": "", "calls": calls, "rounds": rounds}
        yield known | {"rows": rows[:1]}
        kept.append(json.loads((tmp_path / "cost.json").read_text())["host_cost"]["rows"])
        yield known | {"rows": rows}

    asked, kept = {"missing": True}, []
    monkeypatch.setattr(host_cost, "run", run)
    command = ["host_cost.py", "--commit", "0" * 7, "--device", "cpu", "--json", str(tmp_path / "cost.json")]
    monkeypatch.setattr("sys.argv", command)
    assert host_cost.main() == 1
    assert asked["peers"] == "slow", "the record's own run asks for DeepGEMM"
    assert [len(rows) for rows in kept] == [1], "what is known is kept before the next number of tokens"
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("no function")]
    assert line.startswith("no function of FlashInfer's at M=16, which --peers slow asks for")
    assert line.endswith(f": flashinfer.gemm, M=16: {broken}")
    monkeypatch.setattr("sys.argv", [*command, "--peers", "none"])
    assert host_cost.main() == 0
    asked["missing"] = False
    monkeypatch.setattr("sys.argv", command)
    assert host_cost.main() == 0


@pytest.mark.parametrize(
    ("peers", "names"),
    [
        ("none", ()),
        ("quick", ("bmm_fp8 (cublas)",)),
        ("deepgemm", ("fp8_blockscale_gemm_sm90",)),
        ("slow", ("bmm_fp8 (cublas)", "fp8_blockscale_gemm_sm90")),
    ],
)
def test_peers_are_those_that_were_asked_for(peers, names, monkeypatch):
    linear, x = torch.nn.Linear(256, 128, bias=False).bfloat16().requires_grad_(False), torch.randn(3, 256).bfloat16()
    gemm = SimpleNamespace(fp8_blockscale_gemm_sm90=lambda x, w, scale, w_scale: linear(x))
    package = SimpleNamespace(gemm=gemm, bmm_fp8=lambda a, b, *rest: linear(x).unsqueeze(0))
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.gemm", gemm)
    found, lacks = host_cost.flashinfer_methods(linear, x, peers)
    assert not lacks
    assert list(found) == [f"flashinfer.{name}" for name in names]
    assert all(method.backend == host_cost.FLASHINFER for method in found.values())


def test_blocks_start_with_calls_that_no_clock_sees(monkeypatch):
    called, clock = [], []
    method = host_cost.Method(lambda: called.append(1))
    monkeypatch.setattr(
        host_cost, "WallEngine", lambda: WallEngine(clock=lambda: clock.append(len(called)) or len(clock))
    )
    host_cost.measure({"one": method}, machine.card("cpu"), 3, 5)
    each = host_cost.UNTIMED + 3
    assert clock[:4] == [each - 3, each, 2 * each - 3, 2 * each]
    assert 2 * (host_cost.UNTIMED + host_cost.CALLS) < 1000


def test_a_wrong_method_gets_no_time(monkeypatch):
    linear = torch.nn.Linear(64, 64, bias=False).bfloat16().requires_grad_(False)
    real = ops.run_bound
    monkeypatch.setattr(ops, "run_bound", lambda *call: real(*call).zero_())
    found, lacks = host_cost.layer_methods(linear, torch.randn(2, 64).bfloat16())
    assert lacks["FP8Linear row"].startswith("WRONG")
    assert not any(row.limited for row in found.values())


# ---------------------------------------------------------------------------------------------------------- candidates


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    monkeypatch.setattr(quarantine.store, "folder", lambda: tmp_path / "selfcheck")
    monkeypatch.setattr(tuned.store, "folder", lambda: tmp_path / "tuning")
    monkeypatch.setattr(canary, "SHAPES", canary.SHAPES[:2])
    canary.canaries.cache_clear()
    yield
    canary.canaries.cache_clear()


def test_a_part_that_is_done_is_kept(tmp_path, monkeypatch):
    def ended(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(candidates, "candidates", lambda device: [{"op": "one"}])
    monkeypatch.setattr(candidates, "choices", lambda *_: [{"op": "two"}])
    monkeypatch.setattr(candidates, "planted", ended)
    record = tmp_path / "c.json"
    monkeypatch.setattr("sys.argv", ["candidates.py", "--commit", "0" * 7, "--device", "cpu", "--json", str(record)])
    with pytest.raises(KeyboardInterrupt):
        candidates.main()
    kept = json.loads(record.read_text())
    assert [kept[part] for part in ("candidates", "tuned", "planted")] == [[{"op": "one"}], [{"op": "two"}], []]


def test_candidates_are_judged_and_checked():
    rows = candidates.candidates(CPU)
    assert {(row["op"], row["scaling"]) for row in rows} == set(candidates.KINDS)
    by_name = {(row["op"], row["scaling"], row["backend"]): row for row in rows}
    reference = by_name["nvfp4_gemm", "nvfp4", "reference"]
    assert (reference["status"], reference["canaries"]) == ("passed", 2)
    assert any("no NVIDIA GPU" in reason for reason in by_name["fp8_gemm", "row", "cutlass"]["reasons"])
    head, _, *lines = candidates.candidate_table({"candidates": rows}).splitlines()
    assert head.endswith("| self-check | first: build, ms | check, ms | again: build, ms | check, ms |")
    assert {line.count("|") for line in lines} == {head.count("|")}
    times = " | ".join(str(reference[name]) for name in ("build_ms", "check_ms", "again_build_ms", "again_check_ms"))
    assert f"| nvfp4_gemm | nvfp4 | reference | bf16 | passed, 2 canaries | {times} |" in lines
    assert "| fp8_gemm | row | cutlass | | cannot run: ARCH | | | | |" in lines


def test_building_and_checking_are_told_apart_in_both_self_checks(monkeypatch):
    answers = iter([(900.2, 40.4), (0.3, 30.0)])
    verdict = CheckResult("reference", "fp8_gemm", "row", "fp8", "", "passed", ran=("one",))

    def answer(*_):
        build, check = next(answers)
        return replace(verdict, build_ms=build, check_ms=check, seconds=9.9)

    monkeypatch.setattr(candidates.selfcheck, "check", answer)
    problem = Problem("fp8_gemm", 16, 64, 64, scaling="row")
    row = candidates.check(registry.instance("reference"), problem, "fp8", CPU, None)
    times = {name: row[name] for name in candidates.TIMES}
    assert times == {"build_ms": 900, "check_ms": 40, "again_build_ms": 0, "again_check_ms": 30}
    row |= {"op": "fp8_gemm", "scaling": "row", "backend": "reference", "activation": "fp8", "denied": []}
    assert "built in 900 ms and checked in 40 ms, again in 0 and 30 ms" in candidates.describe(row)


def test_a_record_of_before_shows_what_it_has():
    row = {"op": "fp8_gemm", "scaling": "row", "backend": "cudnn", "activation": "fp8", "denied": [], "reasons": []}
    old = row | {"status": "passed", "canaries": 6, "findings": [], "first_ms": 730, "again_ms": 51}
    lacking = row | {"reasons": ["ARCH x"]}
    head, _, *lines = candidates.candidate_table({"candidates": [old, lacking]}).splitlines()
    assert head.endswith("| self-check | first, ms | again, ms |")
    assert lines[0].endswith("| passed, 6 canaries | 730 | 51 |")
    assert {line.count("|") for line in lines} == {head.count("|")}


@pytest.mark.parametrize("late", ["check_ms", "again_check_ms"])
def test_checking_that_takes_too_long_is_an_error_and_building_is_not(late):
    row = {"op": "fp8_gemm", "scaling": "row", "backend": "cudnn", "activation": "fp8", "denied": [], "reasons": []}
    row |= {"status": "passed", "canaries": 6, "findings": []}
    row |= dict.fromkeys(candidates.TIMES, 299) | {"build_ms": 5000}
    assert candidates.faults_in({"candidates": [row], "planted": []}) == []
    (wrong,) = candidates.faults_in({"candidates": [row | {late: 300}], "planted": []})
    assert wrong.startswith("checking takes 300 ms or more: fp8_gemm row")


def test_planted_faults_are_counted_and_a_missed_one_is_an_error(monkeypatch):
    kind = ("fp8_gemm", "row", "fp8")
    keep = ("WritesZeros_first", "NaNOnRaggedM", "IgnoresBias")
    monkeypatch.setattr(candidates, "FAULTS", {name: FAULTS[name] for name in keep} | {"Harmless": Honest})
    monkeypatch.setitem(candidates.ONLY_WITH, "Harmless", lambda *kind: True)
    monkeypatch.setattr(candidates, "HONEST", HONEST[:2])
    (row,) = candidates.planted(CPU, [kind])
    assert (row["faults"], row["honest"], row["accused"]) == (4, 2, [])
    assert row["missed"] == ["Harmless", "IgnoresBias"] or row["missed"] == ["IgnoresBias", "Harmless"]
    result = {"candidates": [], "planted": [row]}
    assert any("missed" in text for text in candidates.faults_in(result))
    assert "2 of 4" in candidates.planted_table(result)


def test_an_honest_backend_that_is_accused_is_an_error(monkeypatch):
    monkeypatch.setattr(candidates, "FAULTS", {})
    monkeypatch.setattr(candidates, "HONEST", (FAULTS["WritesOnlyZeros"],))
    (row,) = candidates.planted(CPU, [("fp8_gemm", "row", "fp8")])
    assert len(row["accused"]) == 1
    assert candidates.faults_in({"candidates": [], "planted": [row]})


def test_a_candidate_that_fails_is_an_error():
    row = {"op": "fp8_gemm", "scaling": "row", "backend": "cutlass", "activation": "fp8", "denied": [], "reasons": []}
    row |= {"status": "failed", "canaries": 1, "findings": ["a tile is NaN"]} | dict.fromkeys(candidates.TIMES, 1)
    assert "a tile is NaN" in candidates.faults_in({"candidates": [row], "planted": []})[0]
    assert candidates.faults_in({"candidates": [row | {"denied": ["a-rule"]}], "planted": []}) == []


def test_tuned_choices_on_a_cpu_are_the_reference():
    rows = candidates.choices(CPU, [(64, 64)], (1,))
    assert len(rows) == len(candidates.KINDS)
    assert {row["auto"] for row in rows} == {"reference (bf16)"}
    table = candidates.choice_table({"tuned": rows})
    assert "| fp8_gemm | row | 64x64 | 1 | reference (bf16) |" in table


# ------------------------------------------------------------------------------------------------------------ evidence


def test_a_group_without_files_runs_nothing(monkeypatch):
    """pytest without a file takes every test there is."""
    monkeypatch.setattr(evidence.subprocess, "Popen", None)
    assert evidence.run_tests([]) == ([], 0)
    assert evidence.run_tests(["-n", "4"]) == ([], 0)


TESTS = """
import time
import pytest

def test_passes(): pass
def test_fails(): assert False
@pytest.mark.skip
def test_is_skipped(): pass
def test_takes_long(): time.sleep({seconds})
"""


@pytest.mark.parametrize(("seconds", "limit_s", "codes"), [(0, 60, {1}), (60, 30, {evidence.INTERRUPTED})])
def test_outcomes_are_kept_and_a_limit_keeps_those_of_what_has_run(tmp_path, seconds, limit_s, codes):
    path = tmp_path / "test_some.py"
    path.write_text(TESTS.format(seconds=seconds))
    rows, code = evidence.run_tests([str(path)], limit_s)
    assert code in codes
    whole = seconds == 0
    want = [("test_passes", "passed"), ("test_fails", "failed"), ("test_is_skipped", "skipped")]
    assert [(test, outcome) for _, test, outcome in rows][:3] == want
    assert {file for file, _, _ in rows} == {"test_some"}
    assert (len(rows) == 4 and rows[3][2] == "passed") == whole
    assert evidence.run_tests(["-k", "passes", str(path)]) == ([("test_some", "test_passes", "passed")], 0)


def test_a_second_run_joins_the_record_of_the_first():
    facts = {"commit": "abc", "date": "2026-11-22", "device": "NVIDIA H200", "torch": "2.11", "flashinfer": "0.7"}
    new = facts | {"commit": "def", "date": "2026-11-23", "flashinfer": None}
    ran = {"op": "nvfp4_gemm", "scaling": "nvfp4", "device": "NVIDIA H200", "cases": 3}
    first = {
        "tests": {"test_a": {"failed": 1}, "test_b": {"failed": 1, "skipped": 1}},
        "failed": ["test_a::test_x", "test_b::test_y"],
        "skipped": ["test_b::test_z"],
        "ran": [ran | {"backend": "w4a16"}, ran | {"backend": "w4a8"}],
        "ended_by_limit": True,
    }
    second = {
        "tests": {"test_b": {"passed": 2}, "test_c": {"skipped": 1}},
        "failed": [],
        "skipped": ["test_c::test_w"],
        "ran": [ran | {"backend": "w4a16", "cases": 5}],
        "ended_by_limit": False,
    }
    before = {"facts": facts} | evidence.joined(None, first, facts)
    old, later = ({key: each[key] for key in ("commit", "date")} for each in (facts, new))
    assert before["tests"]["test_a"] == {"failed": 1, **old}
    assert evidence.joined(before, second, new) == {
        "tests": {
            "test_a": {"failed": 1, **old},
            "test_b": {"passed": 2, **later},
            "test_c": {"skipped": 1, **later},
        },
        "failed": ["test_a::test_x"],
        "skipped": ["test_c::test_w"],
        "ran": [ran | {"backend": "w4a16", "cases": 5} | later, ran | {"backend": "w4a8"} | old],
        "ended_by_limit": False,
    }
    with pytest.raises(SystemExit, match=r"another machine: .*2\.12"):
        evidence.joined(before, second, new | {"torch": "2.12"})


def test_a_file_that_the_limit_cut_keeps_its_last_whole_run(capsys):
    facts = dict.fromkeys(evidence.SAME, "same") | {"commit": "old", "date": "1"}
    whole = {"tests": {"test_a": {"passed": 3, "skipped": 1}}, "failed": [], "skipped": ["test_a::test_s"], "ran": []}
    before = {"facts": facts} | evidence.joined(None, whole | {"ended_by_limit": False}, facts)
    cut = {"tests": {"test_a": {"passed": 2}, "test_b": {"passed": 1}}, "failed": [], "skipped": [], "ran": []}
    later = facts | {"commit": "new", "date": "2"}
    found = evidence.joined(before, cut | {"ended_by_limit": True}, later)
    assert found["tests"]["test_a"] == before["tests"]["test_a"]
    assert found["tests"]["test_b"] == {"passed": 1, "commit": "new", "date": "2"}
    assert (found["skipped"], found["ended_by_limit"]) == (["test_a::test_s"], True)  # of test_b nobody knows
    assert (
        evidence.joined(before, cut | {"tests": {"test_a": {}}, "ended_by_limit": True}, later)["ended_by_limit"]
        is False
    )
    assert "cut by the limit, the run before stands: test_a" in capsys.readouterr().out
    failed = cut | {"tests": {"test_a": {"failed": 1}}, "failed": ["test_a::test_x"], "ended_by_limit": True}
    found = evidence.joined(before, failed, later)
    assert (found["tests"]["test_a"]["commit"], found["ended_by_limit"]) == ("new", True)
    assert evidence.joined(before, cut | {"ended_by_limit": False}, later)["tests"]["test_a"]["commit"] == "new"


# ---------------------------------------------------------------------------------------------------------------- soak


def run_soak(folder, monkeypatch, **forms):
    monkeypatch.setattr(soak, "LAYERS", 1)
    monkeypatch.setattr(soak, "FORMATS", soak.FORMATS | forms)
    arguments = ["soak", "--commit", "abc", "--device", "cpu", "--json", str(folder), "--launches", "20"]
    arguments += ["--formats", "nvfp4", "fp8_row"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--largest", "256", "--tokens", "9", "--seed", "1"])
    code = soak.main()
    (path,) = folder.glob("*.json")
    return code, records.read(path)["soak"]


def test_a_soak_counts_launches_and_finds_nothing_in_the_reference(tmp_path, monkeypatch):
    code, rows = run_soak(tmp_path, monkeypatch)
    assert code == 0
    assert [(row["format"], row["eager"], row["cases"], row["wrong"], row["first_wrong"]) for row in rows] == [
        ("nvfp4", 20, 6, 0, 0),
        ("fp8_row", 20, 6, 0, 0),
    ]


class Spoiled(nn.Module):
    """A layer that is wrong from its third call on, or always."""

    def __init__(self, linear, good_calls):
        super().__init__()
        self.linear, self.left = linear, good_calls

    def forward(self, x):
        self.left -= 1
        out = self.linear(x)
        return out if self.left >= 0 else out.clone().index_fill_(1, torch.tensor([3]), 1.0)


@pytest.mark.parametrize(("good_calls", "key"), [(10, "wrong"), (0, "first_wrong")])
def test_a_soak_finds_what_is_planted(good_calls, key, tmp_path, monkeypatch, capsys):
    code, rows = run_soak(tmp_path, monkeypatch, nvfp4=lambda linear: Spoiled(linear, good_calls))
    assert code == 1
    assert rows[0][key] > 0
    assert rows[1]["wrong"] == rows[1]["first_wrong"] == 0
    assert "nvfp4 N=" in capsys.readouterr().out
