"""Finer activations up to 8 tokens on sm_90, and when they give way: rules with ``worth``."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp4dispatch.backends import registry
from fp4dispatch.machine.system import System
from fp4dispatch.policy.resolve import resolve
from fp4dispatch.policy.rules import Rule, When, rules
from fp4dispatch.problem import Problem
from fp4dispatch.problem.measurement import Measurement, Timing, Worth
from fp4dispatch.problem.prediction import PredictedTime, Predictions
from tests.unit.test_policy_anchors import FULL

FORMATS = [
    ("nvfp4_gemm", "nvfp4", "w4a16", "w4a8"),
    ("fp8_gemm", "row", "w8a16", "w8a8"),
    ("fp8_gemm", "tensor", "w8a16", "w8a8"),
]
HOPPER = System.fake("9.0", **FULL)


def predictions(*times):
    return Predictions(tuple(PredictedTime(*each) for each in times), "fitted on X", ("record",))


def ask(op, scaling, times=(), tuned=(), m=8, activation="any", system=HOPPER, **options):
    problem = Problem(op, m, 8192, 8192, activation, scaling)
    measured = None
    if tuned:
        measured = Measurement(problem, tuple(Timing(*each, 15) for each in tuned), date="2026-11-26")
    predicted = predictions(*times) if times else None
    return resolve(problem, system, registry.backends(), predicted=predicted, measured=measured, **options)


def test_the_rules_that_say_what_they_are_worth():
    found = {rule.id: rule.worth for rule in rules() if rule.worth is not None}
    assert found == {"nvfp4-sm90-decode-w4a16": 0.05, "fp8-sm90-decode-w8a16": 0.05}


@pytest.mark.parametrize(("op", "scaling", "fine", "coarse"), FORMATS)
def test_finer_activations_give_way_where_they_cost_more_than_they_are_worth(op, scaling, fine, coarse):
    for us, chosen in ((90.0, fine), (104.9, fine), (105.1, coarse), (130.0, coarse)):
        decision = ask(op, scaling, [(fine, "bf16", us), (coarse, "fp8", 100.0)])
        assert decision.backend == chosen, us
    rule = {"w4a16": "nvfp4-sm90-decode-w4a16", "w8a16": "fp8-sm90-decode-w8a16"}[fine]
    assert decision.rule.id == "predicted"
    assert decision.rule.because == (
        f"predicted 100.0 us; {fine} (bf16), preferred by {rule} while it takes at most 5% longer than fp8 "
        "activations, 130.0 us; fitted on X"
    )
    assert decision.warnings == ()


@pytest.mark.parametrize(("op", "scaling", "fine", "coarse"), FORMATS)
def test_whoever_asks_for_16_bits_keeps_them(op, scaling, fine, coarse):
    times = [(fine, "bf16", 200.0), (coarse, "fp8", 100.0)]
    assert ask(op, scaling, times).backend == coarse
    assert ask(op, scaling, times, activation="bf16").backend == fine
    assert ask(op, scaling, times, requested=fine).backend == fine
    assert ask(op, scaling, times, disabled=[coarse]).backend == fine


def test_a_backend_that_may_not_run_takes_nobodys_place():
    times = [("w4a16", "bf16", 200.0), ("w4a8", "fp8", 100.0), ("w4a8_expanded", "fp8", 50.0)]
    assert ask("nvfp4_gemm", "nvfp4", times).backend == "w4a8"  # nobody allows the copy
    assert ask("nvfp4_gemm", "nvfp4", times, system=replace(HOPPER, fp8_copy=True)).backend == "w4a8_expanded"
    shut = replace(HOPPER, quarantined=frozenset({("w4a8", "nvfp4_gemm", "sm_90")}))
    assert ask("nvfp4_gemm", "nvfp4", times, system=shut).backend == "w4a16"


def test_what_would_run_without_the_rule_is_what_may_run():
    """Without the rule w4a8 would come next, but may not run, and then w4a16: FP8 is nobody's choice."""
    about = {"when": When(ops=("nvfp4_gemm",)), "source": "https://example.org", "checked": "2026-11-26"}
    only = [
        Rule("first", "prefer", backends=("w4a16",), because="x", worth=0.05, **about),
        Rule("next", "prefer", backends=("w4a8", "w4a16"), because="x", others=(("w4a16", "x"),), **about),
    ]
    times = [("w4a16", "bf16", 200.0), ("w4a8", "fp8", 100.0), ("w4a8_expanded", "fp8", 50.0)]
    assert ask("nvfp4_gemm", "nvfp4", times, rules=only).backend == "w4a8_expanded"
    assert ask("nvfp4_gemm", "nvfp4", times, rules=only, disabled=["w4a8"]).backend == "w4a16"


def test_no_format_below_that_of_the_choice_without_the_rule():
    times = [("w4a16", "bf16", 200.0), ("w4a8", "fp8", 190.0), ("cudnn", "nvfp4", 10.0)]
    fake = predictions(*times)
    accepted = [(backend, activation) for backend, activation, _ in times]
    assert fake.faster(("w4a16", "bf16"), accepted) is None
    assert fake.faster(("w4a16", "bf16"), accepted, Worth("fp8", 0.05))[0].backend == "w4a8"
    assert fake.faster(("w4a16", "bf16"), accepted[:1], Worth("fp8", 0.05)) is None


def test_a_faster_candidate_of_the_finer_format_counts_first():
    times = predictions(("slow", "bf16", 120.0), ("quick", "bf16", 104.0), ("coarse", "fp8", 100.0))
    accepted = [("slow", "bf16"), ("quick", "bf16"), ("coarse", "fp8")]
    assert times.faster(("slow", "bf16"), accepted, Worth("fp8", 0.05))[0].backend == "quick"
    assert times.faster(("slow", "bf16"), accepted, Worth("fp8", 0.03))[0].backend == "coarse"


@pytest.mark.parametrize(
    ("fine", "noise", "chosen"), [(104.0, 0.0, "w4a16"), (106.0, 0.0, "w4a8"), (106.0, 7.0, "w4a16")]
)
def test_tuned_times_decide_over_predicted_ones(fine, noise, chosen):
    tuned = [("w4a16", "bf16", fine, noise), ("w4a8", "fp8", 100.0, noise)]
    for predicted in (
        [],
        [("w4a16", "bf16", 10.0), ("w4a8", "fp8", 100.0)],
        [("w4a16", "bf16", 200.0), ("w4a8", "fp8", 1.0)],
    ):
        decision = ask("nvfp4_gemm", "nvfp4", predicted, tuned)
        assert decision.backend == chosen
    if chosen == "w4a8":
        assert "while it takes at most 5% longer than fp8 activations" in decision.rule.because


def test_more_tokens_and_other_gpus_are_as_before():
    times = [("w4a16", "bf16", 200.0), ("w4a8", "fp8", 100.0)]
    assert ask("nvfp4_gemm", "nvfp4", times, m=9).rule.id == "nvfp4-sm90-w4a8"
    ada = System.fake("8.9", **FULL)
    assert ask("nvfp4_gemm", "nvfp4", times, system=ada).backend == "w4a16"
