"""When a measurement replaces the choice of the rules, and that it can never make anything acceptable."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fp4dispatch.machine.system import System
from fp4dispatch.policy.catalogue import catalogue
from fp4dispatch.policy.resolve import resolve
from fp4dispatch.policy.rules import Rule, When
from fp4dispatch.problem import Problem
from fp4dispatch.problem.decision import Reason
from fp4dispatch.problem.measurement import FLOOR, Measurement, Timing, name_of
from tests.declared import DeclaredBackend

ALL = {name: DeclaredBackend(name) for name in catalogue().backends}
NVFP4 = Problem("nvfp4_gemm", 16, 4096, 4096)
B200 = System.fake("10.0", cuda="13.0", torch="2.11", nvcc="13.0", cutlass="4.5", cudnn="9.19.0", cudnn_frontend="1.14")


def timing(backend, us, noise=0.1, activation="nvfp4"):
    return Timing(backend, activation, us, noise, 15)


def measured(*timings, **more):
    return Measurement(NVFP4, timings, date="2026-11-21", method="replays", facts={"gpu": "B200"}, **more)


def choice(measurement, problem=NVFP4, system=B200, **options):
    return resolve(problem, system, ALL, measured=measurement, **options)


def test_the_rules_alone():
    assert choice(None).backend == "cutlass"
    assert all(v.measured == "" for v in choice(None).verdicts)


def test_a_faster_candidate_is_chosen_and_the_decision_cites_the_measurement():
    m = measured(timing("cudnn", 10.0), timing("cutlass", 12.0))
    decision = choice(m)
    assert (decision.backend, decision.rule.id, decision.rule.verb) == ("cudnn", "tuned", "prefer")
    assert decision.rule.checked == "2026-11-21"
    assert m.name[:12] in decision.rule.source
    for part in ("10.0 us", "cutlass (nvfp4), preferred by nvfp4-sm10x-cutlass-first, 12.0 us", "15 repeats"):
        assert part in decision.rule.because
    assert decision.verdict("cudnn").measured.startswith("10.0 us")
    text = decision.text()
    assert "tuned: 10.0 us" in text
    assert "tuned: 12.0 us" in text
    assert "tuned: measured here: 10.0 us" in decision.line()
    assert json.loads(json.dumps(decision.to_dict()))["rule"]["id"] == "tuned"
    assert decision.warnings == ()


@pytest.mark.parametrize(
    ("new", "new_noise", "old_noise", "replaced"),
    [
        (10.0, 0.1, 0.1, True),
        (11.5, 0.6, 0.1, False),  # within the noise of the new one
        (11.5, 0.1, 0.6, False),  # within the noise of the old one
        (11.5, 0.4, 0.4, True),
        (12.0 * (1 - FLOOR) + 0.001, 0.0, 0.0, False),  # within the floor
        (12.0 * (1 - FLOOR) - 0.001, 0.0, 0.0, True),
        (12.0, 0.0, 0.0, False),
        (13.0, 0.0, 0.0, False),
    ],
)
def test_only_a_gain_above_the_noise_counts(new, new_noise, old_noise, replaced):
    decision = choice(measured(timing("cudnn", new, new_noise), timing("cutlass", 12.0, old_noise)))
    assert (decision.backend == "cudnn") is replaced
    assert (decision.rule.id == "tuned") is replaced
    assert decision.verdict("cutlass").measured


def test_without_a_time_of_the_default_nothing_is_replaced():
    assert choice(measured(timing("cudnn", 1.0))).backend == "cutlass"


def test_denied_quarantined_disabled_absent_and_elsewhere_win_over_any_time():
    fast = measured(timing("cudnn", 1.0), timing("cutlass", 12.0))
    deny = Rule("no-cudnn", "deny", When(ops=("nvfp4_gemm",)), ("cudnn",), "bad", "https://example.org", "2026-11-21")
    prefer = Rule(
        "cutlass", "prefer", When(ops=("nvfp4_gemm",)), ("cutlass",), "x", "https://example.org", "2026-11-21"
    )
    assert choice(fast, rules=[prefer]).backend == "cudnn"
    assert choice(fast, rules=[prefer, deny]).backend == "cutlass"
    shut = replace(B200, quarantined=frozenset({("cudnn", "nvfp4_gemm", "sm_100")}))
    assert choice(fast, system=shut).backend == "cutlass"
    assert choice(fast, disabled=("cudnn",)).backend == "cutlass"
    assert choice(fast, system=replace(B200, cudnn=None)).backend == "cutlass"
    decision = choice(fast, elsewhere={"cudnn": Reason("LIBRARY", "cuDNN not found (on rank 3)")})
    assert decision.backend == "cutlass"
    assert "rank 3" in decision.text()


def test_a_measurement_of_the_default_that_was_quarantined_moves_on_among_the_rest():
    m = measured(timing("cutlass", 1.0), timing("cublaslt", 5.0), timing("cudnn", 12.0))
    shut = replace(B200, quarantined=frozenset({("cutlass", "nvfp4_gemm", "sm_100")}))
    decision = choice(m, system=shut)
    assert (decision.backend, decision.rule.id) == ("cublaslt", "tuned")
    (warning,) = decision.warnings
    assert "runs on cublaslt" in warning
    assert "cutlass: QUARANTINED" in warning
    assert "cudnn" not in warning


def test_speed_does_not_make_a_layer_coarser():
    base = timing("w4a16", 30.0, activation="bf16")
    coarse, fine = timing("cudnn", 1.0), timing("w4a8", 20.0, activation="fp8")
    m = measured(coarse, fine, base)
    every = [("cudnn", "nvfp4"), ("w4a8", "fp8"), ("w4a16", "bf16")]
    assert m.faster(("w4a16", "bf16"), every) is None
    assert m.faster(("w4a8", "fp8"), every) is None
    assert measured(timing("cudnn", 30.0), replace(fine, us=2.0)).faster(("cudnn", "nvfp4"), every)[0].backend == "w4a8"


def test_a_request_by_name_is_not_moved():
    m = measured(timing("cudnn", 1.0), timing("cutlass", 12.0))
    named = choice(m, requested="cutlass", requested_by="argument")
    assert (named.backend, named.rule) == ("cutlass", None)


def test_it_survives_json_and_wrong_data_is_refused():
    m = measured(timing("cudnn", 10.0), left_out=(("cutlass", "it raised"),), ranks=2)
    data = json.loads(json.dumps(m.to_dict()))
    assert Measurement.from_dict(data) == m
    row = data["timings"][0]
    for bad in (
        {"timings": [row | {"us": 0}]},
        {"timings": [row | {"us": float("nan")}]},
        {"timings": [row | {"us": "1"}]},
        {"timings": [row | {"noise_us": -1}]},
        {"timings": [row | {"activation": "int4"}]},
        {"timings": [row | {"backend": 3}]},
        {"timings": [row | {"extra": 3}]},
        {"date": 3},
        {"ranks": "2"},
        {"facts": {"gpu": 3}},
        {"problem": data["problem"] | {"op": "int4_gemm"}},
        {"left_out": 3},
    ):
        with pytest.raises((TypeError, ValueError, KeyError)):
            Measurement.from_dict(data | bad)
    with pytest.raises(KeyError):
        Measurement.from_dict({k: v for k, v in data.items() if k != "ranks"})


def test_the_name_is_about_problem_and_facts_not_about_times_or_capture():
    m = measured(timing("cudnn", 10.0))
    assert m.name == replace(m, timings=(), date="", ranks=3).name
    assert m.name == replace(m, problem=replace(NVFP4, capture="piecewise", m_min=0)).name
    others = [replace(NVFP4, **change) for change in ({"m": 32}, {"n": 8}, {"k": 16}, {"bias": True})]
    others += [replace(NVFP4, activation="bf16"), replace(NVFP4, out_dtype="float16")]
    names = {name_of(problem, m.facts) for problem in others} | {name_of(NVFP4, {"gpu": "H200"})}
    assert len(names | {m.name}) == 8
    text = replace(m, left_out=(("cutlass", "it raised"),), ranks=2).text()
    assert "on 2 ranks" in text
    assert "cutlass: not timed: it raised" in text
