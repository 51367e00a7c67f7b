"""Ranks come to one choice, or all stop: real processes over gloo, one of them with a fault."""

from __future__ import annotations

import json
import multiprocessing

import pytest

from fp4dispatch.backends import registry
from fp4dispatch.dispatch import predicted
from fp4dispatch.machine.nvml import Gpu
from fp4dispatch.machine.system import System
from fp4dispatch.policy.resolve import resolve
from fp4dispatch.problem import Problem
from fp4dispatch.problem.arch import SM90
from fp4dispatch.problem.prediction import PredictedTime, Predictions
from fp4dispatch.tune import agreement
from tests import rank_scenarios

SHUT = ("first", "fp8_gemm", "sm_90")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By scenario, what each rank came to."""
    folder = tmp_path_factory.mktemp("ranks")
    folder.chmod(0o755)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    workers = [
        context.Process(target=rank_scenarios.main, args=(rank, 2, str(folder), answers), daemon=True)
        for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    by_rank = dict(answers.get(timeout=300) for _ in workers)
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    return {name: [by_rank[rank][name] for rank in range(2)] for name in by_rank[0]}


def same(pair, key):
    assert pair[0][key] == pair[1][key]
    return pair[0][key]


def test_nothing_is_wrong(found):
    pair = found["nothing_is_wrong"]
    assert same(pair, "backend") == "first (fp8)"
    assert same(pair, "total")
    assert same(pair, "warnings") == []


def test_one_rank_computes_garbage_and_all_use_another_backend(found):
    pair = found["one_rank_computes_garbage"]
    assert same(pair, "backend") == "second (fp8)"
    assert same(pair, "quarantined") == [SHUT]
    assert same(pair, "planned") == ["second"]  # agreed before any plan was built
    assert "(on rank 1)" in pair[0]["verdicts"][0]
    assert "(on rank 1)" not in pair[1]["verdicts"][0]
    assert same(pair, "total") == found["nothing_is_wrong"][0]["total"]


def test_one_rank_fails_on_its_layer_and_all_use_another_backend(found):
    pair = found["one_rank_is_wrong_on_the_layer_alone"]
    assert same(pair, "backend") == "second (fp8)"
    assert same(pair, "quarantined") == [SHUT]
    assert same(pair, "planned") == ["second"]
    assert "layer M=1 N=64 K=96: tile (0, 0) is wrong" in pair[1]["verdicts"][0]
    assert "(on rank 1)" in pair[0]["verdicts"][0]


def test_the_check_can_fail(found):
    """Without agreement the ranks do differ: that is what the others would show."""
    pair = found["one_rank_computes_garbage_and_nobody_asks"]
    assert [rank["backend"] for rank in pair] == ["first (fp8)", "second (fp8)"]


def test_faults_of_several_ranks_add_up(found):
    pair = found["each_rank_has_its_own_fault"]
    assert same(pair, "backend") == "third (fp8)"
    assert same(pair, "planned") == ["third"]
    assert [shut[0] for shut in same(pair, "quarantined")] == ["first", "second"]


def test_what_one_rank_lacks_none_uses(found):
    pair = found["one_rank_lacks_a_library"]
    assert same(pair, "backend") == "second (fp8)"
    assert same(pair, "planned") == ["second"]
    assert "libfirst not found (on rank 0)" in pair[1]["reasons"]["first"][0]
    assert same(pair, "quarantined") == []


def test_backends_that_another_rank_does_not_even_have(found):
    pair = found["a_plugin_is_installed_on_one_rank"]
    assert same(pair, "backend") == "second (fp8)"
    assert same(pair, "planned") == ["second"]
    assert "not installed (on rank 0)" in pair[1]["reasons"]["plugin"][0]
    assert "not installed (on rank 1)" in pair[0]["reasons"]["first"][0]
    pair = found["a_faulty_plugin_is_installed_on_one_rank"]
    assert same(pair, "backend") == "first (fp8)"
    assert ("plugin", "fp8_gemm", "sm_90") in same(pair, "quarantined")


def test_an_error_of_one_rank_is_an_error_of_all(found):
    mine, other = found["one_rank_cannot_plan"][::-1]
    assert mine == "RuntimeError: no kernel image is available"
    assert other.startswith("RankError: warming up failed on 1 of 2 ranks")
    assert "rank 1: RuntimeError: no kernel image is available" in other
    assert found["one_rank_has_no_layers"][1].startswith("InputError: Sequential contains no FP4Linear")
    assert "rank 1: InputError" in found["one_rank_has_no_layers"][0]


def test_what_one_rank_cannot_plan_for_the_layer_none_uses(found):
    pair = found["one_rank_cannot_plan_the_layer"]
    assert same(pair, "backend") == "second (fp8)"
    assert same(pair, "planned") == ["second"]
    assert all("raised RuntimeError: no kernel image is available" in rank["verdicts"][0] for rank in pair)


def test_ranks_with_other_layers_share_verdicts_and_nothing_else(found):
    pair = found["ranks_have_other_layers"]
    assert same(pair, "backend") == "second (fp8)"
    assert same(pair, "warnings") == []


def test_tuned_times_are_the_median_and_everyone_stores_the_same(found):
    pair = found["tuned_times_differ"]
    assert "third (fp8)" in same(pair, "backend")
    assert same(pair, "planned") == ["third"]
    (stored,) = same(pair, "stored")
    data = json.loads(stored)["record"]
    assert data["ranks"] == 2
    assert [(t["backend"], t["us"]) for t in data["timings"]] == [("third", 4.5), ("second", 5.95), ("first", 10.0)]


@pytest.mark.parametrize("what", ["missing", "wrong"])
def test_a_candidate_that_is_not_good_everywhere_is_no_candidate(found, what):
    pair = found[f"a_candidate_is_{what}_on_one_rank_when_tuning"]
    assert "third (fp8)" in same(pair, "backend")
    assert "second" not in same(pair, "planned")


def test_times_that_only_one_rank_has_are_not_used(found):
    pair = found["only_one_rank_has_tuned_times"]
    assert same(pair, "backend") == "first (fp8)"
    assert same(pair, "planned") == ["first"]
    (warning,) = same(pair, "warnings")
    assert "are there on rank 0 only, or differ, and are not used" in warning


def test_times_that_differ_are_measured_anew(found):
    assert "second (fp8)" in same(found["ranks_have_different_tuned_times"], "backend")


def test_ranks_that_tune_different_things_are_told_so(found):
    for text in found["ranks_tune_different_tokens"]:
        assert text.startswith("InputError: ranks tune different shapes or numbers of tokens: pass group=")


def test_ranks_with_other_gpus_do_not_use_predicted_times():
    system = System.fake("9.0", cuda="13.0", torch="2.11", nvcc="13.0", cutlass="4.5")
    system = System(**(vars(system) | {"gpus": (Gpu(0, "NVIDIA H200", "GPU-1", SM90),)}))
    problem = Problem("nvfp4_gemm", 64, 4096, 4096)
    times = Predictions((PredictedTime("w4a8", "fp8", 9.0), PredictedTime("w4a16", "bf16", 1.0)), "fitted on X")
    here, there = (resolve(problem, system, registry.backends(), predicted=found) for found in (times, None))
    assert (here.backend, there.backend) == ("w4a16", "w4a8")
    mine = {"layer": ((64, here),)}
    everyone = [agreement._summary(each) for each in (mine, {"layer": ((64, there),)})]
    assert predicted.find(problem, system, registry.backends()) is not None
    try:
        assert agreement._take_over(agreement.Ranks(alone=True), mine, everyone)
        assert predicted.find(problem, system, registry.backends()) is None
        assert predicted.find(Problem("nvfp4_gemm", 64, 4096, 8192), system, registry.backends()) is not None
    finally:
        predicted.reset()
