"""How resolve treats requests, plug-ins, disabled backends and the last resort."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fp4dispatch.machine.system import System
from fp4dispatch.policy.catalogue import catalogue
from fp4dispatch.policy.resolve import resolve
from fp4dispatch.policy.rules import rules
from fp4dispatch.problem import Problem
from fp4dispatch.problem.decision import Reason, RuleHit, Verdict
from tests.declared import DeclaredBackend

ALL = {name: DeclaredBackend(name) for name in catalogue().backends}
NVFP4 = Problem("nvfp4_gemm", 16, 4096, 4096)
B200 = System.fake("10.0", cuda="13.0", torch="2.11", nvcc="13.0", cutlass="4.5", cudnn="9.19.0", cudnn_frontend="1.14")


class Toy:
    def __init__(self, name="toy", *reasons, auto=True):
        self.name, self.auto, self.reasons = name, auto, reasons

    def supports(self, problem, system):
        return self.reasons

    def activation_for(self, problem):
        return "bf16"


class Exploding(Toy):
    def supports(self, problem, system):
        raise RuntimeError("boom")


def test_every_backend_gets_a_verdict_in_order_and_reference_is_last():
    decision = resolve(NVFP4, B200, ALL)
    names = [v.backend for v in decision.verdicts]
    assert names[:2] == ["cutlass", "cudnn"]
    assert names[-1] == "reference"
    assert sorted(names) == sorted(ALL)
    assert decision.rule.id == "nvfp4-sm10x-cutlass-first"
    assert (decision.activation, decision.requested, decision.requested_by) == ("nvfp4", "auto", "auto")


def test_all_reasons_are_kept_not_the_first():
    raw = Problem("nvfp4_gemm", 16, 7168, 7152, out_dtype="float32", sf_layout="linear")
    system = System.fake("12.0", cuda="12.8", nvcc="12.8", cudnn="9.7.1", cudnn_frontend="1.14")
    reasons = resolve(raw, system, ALL).verdict("cutlass").reasons
    assert [r.code for r in reasons] == ["DTYPE", "SHAPE", "LAYOUT", "TOOLCHAIN", "TOOLCHAIN"]
    assert "nvcc 12.8 (needs 12.9 for sm_120)" in [r.text for r in reasons]
    assert all(r.fix for r in reasons)


def test_a_named_backend_is_never_replaced():
    refused = resolve(NVFP4, System.fake("9.0"), ALL, requested="cudnn", requested_by="argument")
    assert refused.backend is None
    assert refused.warnings == ()
    assert [r.code for r in refused.verdicts[0].reasons] == ["ARCH"]
    assert refused.verdicts[0].backend == "cudnn"
    honoured = resolve(NVFP4, B200, ALL, requested="cublaslt", requested_by="argument")
    assert (honoured.backend, honoured.rule, honoured.warnings) == ("cublaslt", None, ())


def test_reference_by_name_has_no_warning():
    decision = resolve(NVFP4, System.fake(), ALL, requested="reference", requested_by="argument")
    assert (decision.backend, decision.warnings) == ("reference", ())


def test_absent_backends_are_unavailable_and_never_chosen():
    decision = resolve(NVFP4, B200, {"reference": ALL["reference"]})
    assert decision.backend == "reference"
    assert decision.verdict("cutlass").reasons == (Reason("UNAVAILABLE", "not part of this fp4dispatch"),)
    named = resolve(NVFP4, B200, {"reference": ALL["reference"]}, requested="cutlass", requested_by="argument")
    assert named.backend is None


def test_absent_backends_still_show_the_rules_against_them():
    old = System.fake("12.0", flashinfer="0.6.4")
    verdict = resolve(NVFP4, old, {"reference": ALL["reference"]}).verdict("flashinfer_cutlass")
    assert "fi-cutlass-pdl-no-gdc" in [hit.id for hit in verdict.denied]


def test_disabled_is_never_used_not_even_by_name():
    auto = resolve(NVFP4, B200, ALL, disabled=("cutlass",))
    assert auto.backend == "cudnn"
    assert auto.verdict("cutlass").reasons[0].code == "DENIED"
    assert "FP4DISPATCH_DISABLE" in auto.verdict("cutlass").reasons[0].fix
    assert (
        resolve(NVFP4, B200, ALL, requested="cutlass", requested_by="argument", disabled=("cutlass",)).backend is None
    )
    assert resolve(NVFP4, System.fake(), ALL, disabled=("reference",)).backend is None


def test_a_pinned_activation_is_no_fallback():
    """What the caller ruled out is not a candidate that something stood in the way of."""
    hopper = System.fake("9.0", cuda="13.0", torch="2.11", nvcc="13.0", cutlass="4.5")
    for m, activation, chosen in ((4096, "bf16", "w4a16"), (1, "fp8", "w4a8"), (1, "any", "w4a16")):
        decision = resolve(Problem("nvfp4_gemm", m, 4096, 4096, activation), hopper, ALL)
        assert (decision.backend, decision.warnings) == (chosen, ())
    (warning,) = resolve(Problem("nvfp4_gemm", 4096, 4096, 4096), hopper, ALL, disabled=("w4a8",)).warnings
    assert "w4a8: DENIED disabled" in warning
    (warning,) = resolve(Problem("nvfp4_gemm", 1, 64, 64, "fp8"), System.fake("9.0"), ALL).warnings
    assert "for w4a8: pip install" in warning


def test_nothing_at_all():
    decision = resolve(NVFP4, System.fake(), {})
    assert (decision.backend, decision.warnings) == (None, ())
    assert decision.line().endswith("nothing, auto")


def test_a_plugin_comes_after_what_the_rules_prefer():
    assert resolve(NVFP4, B200, ALL | {"toy": Toy()}).backend == "cutlass"
    decision = resolve(NVFP4, System.fake("7.5"), ALL | {"toy": Toy()})
    assert (decision.backend, decision.rule, decision.activation) == ("toy", None, "bf16")
    assert resolve(NVFP4, System.fake("7.5"), ALL | {"toy": Toy(auto=False)}).backend == "reference"


def test_a_plugin_that_raises_is_rejected_with_its_exception():
    decision = resolve(NVFP4, System.fake("7.5"), {"bad": Exploding(), "reference": ALL["reference"]})
    assert decision.backend == "reference"
    (reason,) = decision.verdict("bad").reasons
    assert reason.code == "UNAVAILABLE"
    assert "RuntimeError: boom" in reason.text


def test_fallback_is_one_warning_with_the_reasons():
    no_nvcc = System.fake("10.0", cuda="13.0", torch="2.11", cudnn="9.19.0", cudnn_frontend="1.14")
    (warning,) = resolve(NVFP4, no_nvcc, ALL).warnings
    assert "runs on cudnn, not on what is preferred there: cutlass: TOOLCHAIN nvcc not found" in warning
    assert "M=" not in warning


def test_no_warning_for_what_this_version_does_not_have():
    only = {name: ALL[name] for name in ("cublaslt", "reference")}
    decision = resolve(NVFP4, B200, only)
    assert (decision.backend, decision.warnings) == ("cublaslt", ())


def test_the_last_resort_says_what_to_install():
    (warning,) = resolve(NVFP4, System.fake("9.0"), ALL).warnings
    assert "slow reference backend" in warning
    assert "pip install -U" in warning
    assert "nvidia-cuda-nvcc>=13.0" in warning
    (no_gpu,) = resolve(NVFP4, System.fake(), ALL).warnings
    assert "no NVIDIA GPU is visible" in no_gpu
    (hopeless,) = resolve(NVFP4, System.fake("7.5"), ALL).warnings
    assert "no other backend of this fp4dispatch runs it on sm_75" in hopeless


def test_activation_pins_the_format():
    hopper = System.fake("9.0", cuda="13.0", nvcc="13.0", cutlass="4.5")
    assert resolve(replace(NVFP4, m=8), hopper, ALL).activation == "bf16"
    w4a8 = resolve(Problem("nvfp4_gemm", 8, 4096, 4096, activation="fp8"), hopper, ALL)
    assert (w4a8.backend, w4a8.activation) == ("w4a8", "fp8")


def test_quarantined_backends_are_passed_over_and_refused_by_name():
    system = replace(B200, quarantined=frozenset({("cutlass", "nvfp4_gemm", "sm_100")}))
    decision = resolve(NVFP4, system, ALL)
    assert decision.verdict("cutlass").reasons[0].code == "QUARANTINED"
    assert decision.backend == "cudnn"
    assert resolve(NVFP4, system, ALL, requested="cutlass", requested_by="argument").backend is None


def test_resolve_is_pure():
    before = (rules(), catalogue())
    assert resolve(NVFP4, B200, ALL) == resolve(NVFP4, B200, ALL)
    assert (rules(), catalogue()) == before


def test_text_and_json_tell_everything():
    decision = resolve(NVFP4, System.fake("12.0", nvcc="13.0", cutlass="4.5"), ALL)
    text = str(decision)
    assert text.splitlines()[0] == decision.line()
    for verdict in decision.verdicts:
        assert verdict.backend in text
        for reason in verdict.reasons:
            assert reason.text in text
        for hit in verdict.denied:
            assert hit.because in text
            assert hit.code in text
    assert sum("chosen" in line for line in text.splitlines()) == 1
    assert "warning: " in text
    data = json.loads(json.dumps(decision.to_dict()))
    assert data["arch"] == "12.0"
    assert {v["backend"] for v in data["verdicts"]} == set(ALL)
    assert resolve(NVFP4, System.fake(), ALL).to_dict()["arch"] is None


def test_verdict_lookup():
    decision = resolve(NVFP4, B200, ALL)
    assert decision.verdict("cudnn").backend == "cudnn"
    with pytest.raises(KeyError):
        decision.verdict("nope")


def test_a_rule_hit_prints_its_code_and_fix():
    hit = RuleHit("r", "deny", "it races", "https://x", "2026-01-01", "UNPROVEN", "prove it")
    assert str(hit) == "UNPROVEN    it races [r; https://x, checked 2026-01-01]   -> prove it"
    assert str(Reason("ARCH", "GPU is sm_75")) == "ARCH        GPU is sm_75"
    assert not Verdict("b", "any", (), (hit,)).accepted
