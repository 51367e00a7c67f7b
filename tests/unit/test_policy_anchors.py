"""The rows that must never move, written out by hand; nothing here is generated."""

from __future__ import annotations

import pytest

from fp4dispatch.backends import registry
from fp4dispatch.dispatch import predicted
from fp4dispatch.machine.system import System
from fp4dispatch.policy.catalogue import catalogue
from fp4dispatch.policy.resolve import resolve
from fp4dispatch.policy.rules import m_bucket
from fp4dispatch.problem import Problem
from fp4dispatch.problem.decision import Decision
from fp4dispatch.problem.prediction import PredictedTime, Predictions
from tests import bounds
from tests.declared import DeclaredBackend
from tests.hopper import H200

CUDA = {"cuda": "13.0", "torch": "2.11"}
NVCC = {"nvcc": "13.0", "cutlass": "4.5"}
CUDNN = {"cudnn": "9.19.0", "cudnn_frontend": "1.14"}
FULL = CUDA | NVCC | CUDNN
FIXED = FULL | {"cudnn": "9.23.1"}

# name: (op, scaling, arch, facts, proven, capture, m_min, chosen)
ANCHORS: dict[str, tuple[str, str, str | None, dict[str, str], bool, str, int, str]] = {
    "sm_120 with cuDNN": ("nvfp4_gemm", "nvfp4", "12.0", FULL, False, "none", 1, "cudnn"),
    "sm_120 with cuDNN, proven": ("nvfp4_gemm", "nvfp4", "12.0", FULL, True, "none", 1, "cudnn"),
    "sm_121 with cuDNN": ("nvfp4_gemm", "nvfp4", "12.1", FULL, False, "none", 1, "cudnn"),
    "sm_120 without cuDNN, proven": ("nvfp4_gemm", "nvfp4", "12.0", CUDA | NVCC, True, "none", 1, "cutlass"),
    "sm_120 without cuDNN, unproven": ("nvfp4_gemm", "nvfp4", "12.0", CUDA | NVCC, False, "none", 1, "cublaslt"),
    "sm_120 with nothing": ("nvfp4_gemm", "nvfp4", "12.0", {}, False, "none", 1, "reference"),
    "sm_100": ("nvfp4_gemm", "nvfp4", "10.0", FULL, False, "none", 1, "cutlass"),
    "sm_103": ("nvfp4_gemm", "nvfp4", "10.3", FULL, False, "none", 1, "cutlass"),
    "sm_100, full capture": ("nvfp4_gemm", "nvfp4", "10.0", FULL, False, "full", 0, "cutlass"),
    "sm_100, piecewise, M >= 1": ("nvfp4_gemm", "nvfp4", "10.0", FULL, False, "piecewise", 1, "cutlass"),
    "sm_100, piecewise, M >= 0": ("nvfp4_gemm", "nvfp4", "10.0", FULL, False, "piecewise", 0, "cudnn"),
    "sm_103, piecewise, M >= 0": ("nvfp4_gemm", "nvfp4", "10.3", FULL, False, "piecewise", 0, "cudnn"),
    "sm_120, piecewise, M >= 0": ("nvfp4_gemm", "nvfp4", "12.0", FIXED, True, "piecewise", 0, "cudnn"),
    "sm_120, piecewise, M >= 0, cuDNN 9.19": ("nvfp4_gemm", "nvfp4", "12.0", FULL, True, "piecewise", 0, "cublaslt"),
    "sm_120, full capture": ("nvfp4_gemm", "nvfp4", "12.0", FIXED, False, "full", 1, "cudnn"),
    "sm_120, full capture, cuDNN 9.19": ("nvfp4_gemm", "nvfp4", "12.0", FULL, False, "full", 1, "cublaslt"),
    "sm_120, full capture, cuDNN 9.19, proven": ("nvfp4_gemm", "nvfp4", "12.0", FULL, True, "full", 1, "cutlass"),
    "sm_100, full capture, cuDNN 9.19, no nvcc": (
        "nvfp4_gemm",
        "nvfp4",
        "10.0",
        CUDA | CUDNN,
        False,
        "full",
        1,
        "cudnn",
    ),
    "sm_90, piecewise, M >= 0": ("nvfp4_gemm", "nvfp4", "9.0", FULL, False, "piecewise", 0, "w4a16"),
    "sm_110": ("nvfp4_gemm", "nvfp4", "11.0", FULL, False, "none", 1, "cudnn"),
    "sm_90": ("nvfp4_gemm", "nvfp4", "9.0", FULL, False, "none", 1, "w4a16"),
    "sm_89": ("nvfp4_gemm", "nvfp4", "8.9", FULL, False, "none", 1, "w4a16"),
    "sm_86": ("nvfp4_gemm", "nvfp4", "8.6", FULL, False, "none", 1, "w4a16"),
    "sm_80": ("nvfp4_gemm", "nvfp4", "8.0", FULL, False, "none", 1, "w4a16"),
    "sm_75": ("nvfp4_gemm", "nvfp4", "7.5", FULL, False, "none", 1, "reference"),
    "no GPU": ("nvfp4_gemm", "nvfp4", None, FULL, False, "none", 1, "reference"),
    "fp8 on sm_89": ("fp8_gemm", "tensor", "8.9", FULL, False, "none", 1, "cublaslt"),
    "fp8 on sm_90, few tokens": ("fp8_gemm", "row", "9.0", FULL, False, "none", 1, "w8a16"),
    "fp8 on sm_100": ("fp8_gemm", "tensor", "10.0", FULL, False, "none", 1, "cublaslt"),
    "fp8 on sm_120": ("fp8_gemm", "tensor", "12.0", FULL, False, "none", 1, "cublaslt"),
    "fp8 on sm_80": ("fp8_gemm", "tensor", "8.0", FULL, False, "none", 1, "w8a16"),
    "fp8 block128 on sm_80": ("fp8_gemm", "block128", "8.0", FULL, False, "none", 1, "reference"),
    "fp8 block128 on sm_90": ("fp8_gemm", "block128", "9.0", FULL, False, "none", 1, "w8a8"),
    "fp8 block128 on sm_120, unproven": ("fp8_gemm", "block128", "12.0", FULL, False, "none", 1, "reference"),
}


def ask(
    op, scaling, arch, facts, proven=False, capture="none", m_min=1, *, m=8, activation="any", copy=False, **kwargs
) -> Decision:
    sm = System.fake(arch).arch
    system = System.fake(arch, **facts, proven=[(op, sm.sm)] if proven else [], fp8_copy=copy)
    problem = Problem(op, m, 4096, 4096, activation, scaling, capture=capture, m_min=m_min)
    return resolve(problem, system, {n: DeclaredBackend(n) for n in catalogue().backends}, **kwargs)


def mismatches(anchors) -> list[str]:
    return [name for name, (*question, chosen) in anchors.items() if ask(*question).backend != chosen]


def test_anchor_rows():
    assert mismatches(ANCHORS) == []


@pytest.mark.parametrize("name", ANCHORS)
def test_a_flipped_anchor_row_is_noticed(name):
    (*question, chosen) = ANCHORS[name]
    flipped = ANCHORS | {name: (*question, "cublaslt" if chosen != "cublaslt" else "cudnn")}
    assert mismatches(flipped) == [name]


def test_unproven_cutlass_on_sm120_says_unproven():
    verdict = ask("nvfp4_gemm", "nvfp4", "12.0", CUDA | NVCC).verdict("cutlass")
    assert verdict.can_run
    assert not verdict.accepted
    assert [hit.code for hit in verdict.denied] == ["UNPROVEN"]
    assert "no proof" in verdict.denied[0].because


def test_proven_cutlass_on_sm120_needs_no_compiler():
    assert ask("nvfp4_gemm", "nvfp4", "12.0", CUDA, True).backend == "cutlass"
    assert ask("nvfp4_gemm", "nvfp4", "12.0", CUDA, False).verdict("cutlass").reasons[0].code == "TOOLCHAIN"


def test_proof_of_another_op_or_arch_does_not_count():
    problem = Problem("nvfp4_gemm", 8, 4096, 4096)
    backends = {n: DeclaredBackend(n) for n in catalogue().backends}
    for pair in (("fp8_gemm", "sm_120"), ("nvfp4_gemm", "sm_121")):
        system = System.fake("12.0", **CUDA, **NVCC, proven=[pair])
        assert resolve(problem, system, backends).backend == "cublaslt"


def test_flashinfer_0_6_4_cutlass_is_denied_and_0_6_7_is_not():
    old = ask("nvfp4_gemm", "nvfp4", "12.0", FULL | {"flashinfer": "0.6.4"}).verdict("flashinfer_cutlass")
    new = ask("nvfp4_gemm", "nvfp4", "12.0", FULL | {"flashinfer": "0.6.7"}).verdict("flashinfer_cutlass")
    assert [hit.source for hit in old.denied] == ["https://github.com/flashinfer-ai/flashinfer/issues/2708"]
    assert old.denied[0].code == "DENIED"
    assert new.denied == ()
    assert new.accepted


@pytest.mark.parametrize("flashinfer", ["0.5.3", "0.6.6", "0.6.6.post1", "0.6.7rc1", "0.6.6+cu130"])
def test_every_affected_flashinfer_cutlass_is_denied(flashinfer):
    verdict = ask("nvfp4_gemm", "nvfp4", "10.0", FULL | {"flashinfer": flashinfer}).verdict("flashinfer_cutlass")
    assert "fi-cutlass-pdl-no-gdc" in [hit.id for hit in verdict.denied]


def test_piecewise_warns_once_and_only_where_it_changes_the_choice():
    piecewise = ask("nvfp4_gemm", "nvfp4", "10.0", FULL, capture="piecewise", m_min=0)
    assert len(piecewise.warnings) == 1
    for part in ("runs on cudnn", "cutlass: CAPTURE", "M may be 0", "piecewise-live-m", "sglang/pull/12067"):
        assert part in piecewise.warnings[0]
    assert ask("nvfp4_gemm", "nvfp4", "10.0", FULL).warnings == ()
    assert ask("nvfp4_gemm", "nvfp4", "10.0", FULL, capture="piecewise", m_min=1).warnings == ()
    assert ask("nvfp4_gemm", "nvfp4", "12.0", FIXED, capture="piecewise", m_min=0).warnings == ()


def test_cutlass_named_on_sm120_is_honoured_with_one_warning():
    decision = ask("nvfp4_gemm", "nvfp4", "12.0", FULL, requested="cutlass", requested_by="FP4_GEMM_BACKEND")
    assert decision.backend == "cutlass"
    assert len(decision.warnings) == 1
    assert "FP4_GEMM_BACKEND" in decision.warnings[0]
    assert "UNPROVEN" in decision.warnings[0]
    proven = ask("nvfp4_gemm", "nvfp4", "12.0", FULL, True, requested="cutlass", requested_by="argument")
    assert (proven.backend, proven.warnings) == ("cutlass", ())


@pytest.mark.parametrize("arch", ["10.0", "10.3", "11.0", "12.0", "12.1"])
def test_cudnn_is_refused_where_its_planner_does_not_know_every_arch_yet(arch):
    assert ask("nvfp4_gemm", "nvfp4", arch, FULL | {"cudnn": "9.19.0"}).verdict("cudnn").accepted
    refused = ask("nvfp4_gemm", "nvfp4", arch, FULL | {"cudnn": "9.18.1"}).verdict("cudnn")
    assert [r.code for r in refused.reasons] == ["LIBRARY"]
    assert refused.reasons[0].text == "cuDNN 9.18.1 (needs 9.19)"


def test_trtllm_is_denied_up_to_m_32_only():
    facts = FULL | {"flashinfer": "0.7.2.post1"}
    for m, denied in ((1, True), (32, True), (33, False)):
        verdict = ask("nvfp4_gemm", "nvfp4", "10.0", facts, m=m).verdict("flashinfer_trtllm")
        assert ("fi-trtllm-8x4-padding" in [hit.id for hit in verdict.denied]) is denied


def test_cudnn_fp8_on_sm120_is_denied_below_9_23_1():
    old = ask("fp8_gemm", "tensor", "12.0", FULL).verdict("cudnn")
    new = ask("fp8_gemm", "tensor", "12.0", FULL | {"cudnn": "9.23.1"}).verdict("cudnn")
    assert [hit.id for hit in old.denied] == ["cudnn-fp8-sm12x-fault"]
    assert new.accepted
    assert ask("fp8_gemm", "tensor", "9.0", FULL).verdict("cudnn").accepted


def test_nvfp4_on_sm_90_changes_to_fp8_activations_with_m():
    decode, more = "nvfp4-sm90-decode-w4a16", "nvfp4-sm90-w4a8"
    for n, k, m, rule in (
        *((n, k, m, decode) for n, k in ((64, 64), (4096, 4096), (57344, 8192)) for m in (1, 8)),
        *((n, k, m, more) for n, k in ((64, 64), (4096, 4096), (57344, 8192)) for m in (9, 17, 8192)),
    ):
        problem = Problem("nvfp4_gemm", m, n, k, scaling="nvfp4")
        decision = resolve(problem, System.fake("9.0", **FULL), registry.backends())
        chosen = ("w4a8", "fp8") if rule == more else ("w4a16", "bf16")
        assert ((decision.backend, decision.activation), decision.rule.id) == (chosen, rule), (n, k, m)


@pytest.mark.parametrize(("activation", "chosen"), [("bf16", "w4a16"), ("fp8", "w4a8"), ("nvfp4", "reference")])
def test_a_pinned_activation_holds_for_every_m_on_sm_90(activation, chosen):
    for m in (1, 32, 33, 8192):
        decision = ask("nvfp4_gemm", "nvfp4", "9.0", FULL, m=m, activation=activation)
        assert (decision.backend, decision.activation) == (chosen, activation)


@pytest.mark.parametrize(("arch", "few", "most"), [("9.0", "w4a8", 128), ("8.9", "w4a16", 191)])
def test_an_fp8_copy_that_is_allowed_serves_many_tokens(arch, few, most):
    for m, chosen in ((17, few), (most, few), (most + 1, "w4a8_expanded"), (8192, "w4a8_expanded")):
        decision = ask("nvfp4_gemm", "nvfp4", arch, FULL, m=m, copy=True)
        assert (decision.backend, decision.warnings) == (chosen, ())
    assert (decision.activation, decision.rule.id) == ("fp8", "nvfp4-fp8-copy")
    assert "8 bits each: it holds the values that w4a8 multiplies" in str(decision)
    assert "FP8 copy allowed" in decision.machine
    assert ask("nvfp4_gemm", "nvfp4", arch, FULL, m=8, copy=True).backend == "w4a16"
    assert ask("nvfp4_gemm", "nvfp4", arch, FULL, m=4096, activation="bf16", copy=True).backend == "w4a16"


@pytest.mark.parametrize(("arch", "instead"), [("9.0", "w4a8"), ("8.9", "w4a16")])
def test_an_fp8_copy_that_nobody_allows_is_refused_and_says_what_to_set(arch, instead):
    for m in (1, 191, 192, 8192):
        decision = ask("nvfp4_gemm", "nvfp4", arch, FULL, m=m)
        assert decision.backend in ("w4a16", instead)
        verdict = decision.verdict("w4a8_expanded")
        assert verdict.can_run
        assert not verdict.accepted
        (hit,) = verdict.denied
        assert (hit.id, hit.code) == ("nvfp4-fp8-copy-not-allowed", "DENIED")
        assert "8 bits each" in hit.because
        assert hit.fix.startswith("FP4DISPATCH_FP8_COPY=1")
        assert decision.warnings == ()  # nothing was fallen back from
    alone = ask("nvfp4_gemm", "nvfp4", "8.9", FULL, m=4096, activation="fp8")
    assert alone.backend == "reference"
    assert "for w4a8_expanded: FP4DISPATCH_FP8_COPY=1" in alone.warnings[0]


def test_who_names_the_fp8_copy_gets_it_with_one_warning_about_its_memory():
    named = ask("nvfp4_gemm", "nvfp4", "9.0", FULL, m=1, requested="w4a8_expanded", requested_by="FP4_GEMM_BACKEND")
    assert named.backend == "w4a8_expanded"
    (warning,) = named.warnings
    assert "8 bits each" in warning
    allowed = ask("nvfp4_gemm", "nvfp4", "9.0", FULL, m=1, copy=True, requested="w4a8_expanded", requested_by="x")
    assert (allowed.backend, allowed.warnings) == ("w4a8_expanded", ())
    assert ask("nvfp4_gemm", "nvfp4", "12.0", FULL, requested="w4a8_expanded", requested_by="x").backend is None


@pytest.mark.parametrize("arch", ["8.0", "8.6", "8.9"])
def test_before_hopper_nvfp4_is_weight_only_for_every_m(arch):
    for m in (1, 49, 8192):
        decision = ask("nvfp4_gemm", "nvfp4", arch, FULL, m=m)
        assert (decision.backend, decision.rule.id) == ("w4a16", "nvfp4-weight-only")


@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("m", [9, 512, 769, 2048])
def test_fp8_on_sm_90_is_our_kernel_unless_predicted_times_say_otherwise(scaling, m):
    problem = Problem("fp8_gemm", m, 8192, 8192, scaling=scaling)

    def asked(ours, theirs):
        times = (PredictedTime("w8a8", "fp8", ours), PredictedTime("cublaslt", "fp8", theirs))
        predicted = Predictions(times, "fitted on X", ("record",))
        return resolve(problem, System.fake("9.0", **FULL), registry.backends(), predicted=predicted)

    assert resolve(problem, System.fake("9.0", **FULL), registry.backends()).rule.id == "fp8-sm90-w8a8"
    assert [asked(100.0, theirs).backend for theirs in (90.0, 96.9, 97.1, 120.0)] == [
        *("cublaslt", "cublaslt", "w8a8", "w8a8")
    ]


@pytest.mark.parametrize("m", [2049, 32768])
def test_fp8_on_sm_90_is_cublaslt_for_many_tokens_unless_predicted_times_say_otherwise(m):
    problem = Problem("fp8_gemm", m, 8192, 8192, scaling="row")

    def asked(ours, theirs):
        times = (PredictedTime("w8a8", "fp8", ours), PredictedTime("cublaslt", "fp8", theirs))
        predicted = Predictions(times, "fitted on X", ("record",))
        return resolve(problem, System.fake("9.0", **FULL), registry.backends(), predicted=predicted)

    assert resolve(problem, System.fake("9.0", **FULL), registry.backends()).rule.id == "fp8-cublaslt-first"
    assert ask("fp8_gemm", "row", "9.0", FULL, m=m, disabled=["cublaslt"]).backend == "w8a8"
    assert [asked(ours, 100.0).backend for ours in (90.0, 96.9, 97.1, 120.0)] == [
        *("w8a8", "w8a8", "cublaslt", "cublaslt")
    ]


def test_fp8_on_sm_90_leaves_the_activations_of_few_tokens_as_they_are():
    for scaling in ("tensor", "row"):
        for m, chosen, activation in ((1, "w8a16", "bf16"), (8, "w8a16", "bf16"), (9, "w8a8", "fp8")):
            decision = ask("fp8_gemm", scaling, "9.0", FULL, m=m)
            assert (decision.backend, decision.activation) == (chosen, activation)
        assert "activations stay 16-bit and are NOT quantised" in str(ask("fp8_gemm", scaling, "9.0", FULL, m=1))
        for m, chosen in ((1, "w8a8"), (2048, "w8a8"), (2049, "cublaslt"), (32768, "cublaslt")):
            assert ask("fp8_gemm", scaling, "9.0", FULL, m=m, activation="fp8").backend == chosen
        assert [ask("fp8_gemm", scaling, "9.0", FULL, m=m, activation="bf16").backend for m in (17, 8192)] == [
            "w8a16",
            "w8a16",
        ]


@pytest.mark.parametrize("activation", ["any", "fp8"])
def test_block_scales_on_sm_90_are_our_own_kernels(activation):
    for m in (1, 64, 65, 128, 385, 1024, 32768):
        decision = ask("fp8_gemm", "block128", "9.0", FULL, m=m, activation=activation)
        found = (decision.backend, decision.activation, decision.rule.id)
        assert found == ("w8a8", "fp8", "fp8-sm90-block128-w8a8")
    raw = Problem("fp8_gemm", 1, 4096, 4096, "fp8", "block128", raw=True)
    for decision in (
        ask("fp8_gemm", "block128", "9.0", FULL, m=17, disabled=["w8a8"]),
        resolve(raw, System.fake("9.0", **FULL), registry.backends()),
    ):
        assert (decision.backend, decision.rule.id) == ("cutlass", "fp8-block128-cutlass")


def test_fp8_on_sm_90_few_tokens_go_to_cutlass_where_w8a8_cannot_run():
    raw = Problem("fp8_gemm", 1, 4096, 4096, "fp8", "row", raw=True)
    for decision in (
        ask("fp8_gemm", "row", "9.0", FULL, m=17, disabled=["w8a8"]),
        resolve(raw, System.fake("9.0", **FULL), registry.backends()),
    ):
        assert (decision.backend, decision.rule.id) == ("cutlass", "fp8-sm90-decode-cutlass")
    many = ask("fp8_gemm", "row", "9.0", FULL, m=65, disabled=["w8a8"])
    assert (many.backend, many.rule.id) == ("cublaslt", "fp8-cublaslt-first")


@pytest.mark.parametrize("arch", ["8.0", "8.6"])
def test_before_fp8_tensor_cores_fp8_is_weight_only_for_every_m(arch):
    for m in (1, 33, 8192):
        decision = ask("fp8_gemm", "row", arch, FULL, m=m)
        assert (decision.backend, decision.activation, decision.rule.id) == ("w8a16", "bf16", "fp8-weight-only")
        assert "NOT quantised" in str(decision)


@pytest.mark.parametrize(("n", "k"), [(72, 80), (520, 1040), (528, 1040), (4096, 4096)])
@pytest.mark.parametrize(
    ("scaling", "copy", "most", "few", "more"),
    [
        ("tensor", False, bounds.W8A16, "w8a16", "w8a8"),
        ("row", False, bounds.W8A16, "w8a16", "w8a8"),
        ("nvfp4", False, bounds.W4A16, "w4a16", "w4a8"),
        ("nvfp4", True, bounds.W4A16, "w4a16", "w4a8"),
        ("nvfp4", True, bounds.W4A8_BESIDE_A_COPY, "w4a8", "w4a8_expanded"),
    ],
)
def test_small_layers_on_sm_90_change_where_gpu_tests_expect_it(scaling, copy, most, few, more, n, k):
    def asked(m):
        problem = Problem("nvfp4_gemm" if scaling == "nvfp4" else "fp8_gemm", m, n, k, scaling=scaling)
        return resolve(problem, System.fake("9.0", **FULL, fp8_copy=copy), registry.backends()).backend

    assert [asked(m) for m in (most, most + 1)] == [few, more]


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_cublaslt_has_many_tokens_on_sm_90_where_gpu_tests_are_told_so(monkeypatch, scaling):
    def asked(m):
        problem = Problem("fp8_gemm", m, 520, 1040, scaling=scaling)
        times = predicted.find(problem, H200, registry.backends()) if told else None
        return resolve(problem, H200, registry.backends(), predicted=times).backend

    few, most = bounds.W8A16, bounds.W8A8
    told = False
    rules = bounds.W8A8_BY_RULES
    assert [asked(m) for m in (few, few + 1, most + 1, rules, rules + 1)] == ["w8a16", *["w8a8"] * 3, "cublaslt"]
    assert m_bucket(rules, "fp8_gemm", H200.arch) == rules, "a decision is for a whole range of M"
    told = True
    bounds.cublaslt_for_many(monkeypatch)
    assert [asked(m) for m in (few, few + 1, most, most + 1)] == ["w8a16", "w8a8", "w8a8", "cublaslt"]
    assert m_bucket(most, "fp8_gemm", H200.arch) == most, "a decision is for a whole range of M"
