"""The self-check catches every planted fault and lets every legitimate rounding pass; what its evidence says."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from fp4dispatch.backends.reference import ReferenceBackend
from fp4dispatch.errors import CaptureError, SelfCheckFailed
from fp4dispatch.machine import capture
from fp4dispatch.machine.system import System
from fp4dispatch.problem.decision import Reason
from fp4dispatch.trust import canary, selfcheck, threads, trial
from fp4dispatch.trust.verdict import CheckResult
from tests import planted
from tests.planted import FAULTS, HONEST, ONLY_WITH, TRUNCATING, Honest

CPU = torch.device("cpu")
KINDS = list(canary.kinds(planted.EVERYTHING))
NVFP4 = ("nvfp4_gemm", "nvfp4", "nvfp4")
ROW = ("fp8_gemm", "row", "fp8")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small matrices: threads that wait for each other cost more than they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(backend, kind, **options) -> CheckResult:
    return selfcheck.check(backend, *kind, options.pop("system", System.fake()), CPU, **options)


# ------------------------------------------------------------------------------------------------------------- caught


@pytest.mark.parametrize("half", [None, "bfloat16", "float16"])
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_caught(name, half):
    """In canaries of one 16-bit dtype alone, as ``auto`` asks for, and in some of each."""
    kinds = [kind for kind in KINDS if ONLY_WITH[name](*kind)]
    assert kinds
    missed = [kind for kind in kinds if run(FAULTS[name](), kind, half=half).status != "failed"]
    assert missed == []


@pytest.mark.parametrize("seed", [1, 2])
def test_the_swap_of_any_two_row_scales_is_caught(seed):
    draw = torch.Generator().manual_seed(seed)
    for n, make in ((208, planted.weight_swap), (200, planted.activation_swap)):
        for _ in range(12):
            i, j = torch.randperm(n, generator=draw)[:2].tolist()
            assert run(make(i, j)(), ROW, seed=seed).status == "failed", (i, j)


def test_neighbouring_scales_are_the_hardest_swap():
    """The two most similar scales of the largest canary, whichever rows they are of."""
    big = next(c for c in canary.canaries(*ROW) if c.problem.m == 200)
    order = big.weights.scale.argsort()
    ratios = big.weights.scale[order][1:] / big.weights.scale[order][:-1]
    i, j = order[ratios.argmin() :][:2].tolist()
    assert run(planted.weight_swap(i, j)(), ROW).status == "failed"


def test_rows_off_by_little_need_the_gain():
    for name, kind in (("ScalesRow_1.045", "row gain"), ("ScalesColumn_0.95", "column gain")):
        found = run(FAULTS[name](), ("fp8_gemm", "tensor", "fp8")).evidence
        assert kind in {finding["kind"] for finding in found}, name


# ------------------------------------------------------------------------------------------------------------- passed


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_the_reference_passes(kind):
    for seed, half in itertools.product(range(3), (None, "bfloat16", "float16")):
        result = run(ReferenceBackend(), kind, seed=seed, half=half)
        assert (result.status, result.findings, result.notes, result.half) == ("passed", (), (), half or "")
        assert len(result.ran) >= 5


@pytest.mark.parametrize("cls", HONEST)
def test_legitimate_rounding_passes(cls):
    for kind in canary.kinds(cls.activations):
        for seed in range(4):
            result = run(cls(), kind, seed=seed)
            assert result.status == "passed", (kind, seed, result.findings)


@pytest.mark.parametrize("cls", TRUNCATING)
def test_fourteen_bit_accumulation_passes(cls):
    for kind in canary.kinds(cls.activations):
        result = run(cls(), kind, seed=3)
        assert result.status == "passed", (kind, result.findings)


def test_a_row_that_vanishes_beside_the_bias_passes():
    """With this seed nearly all products of one row are below half an ulp of the bias, and round away together."""
    each = next(c for c in canary.canaries(*ROW, 100) if c.problem.bias and c.problem.out_dtype == "bfloat16")
    results = [(item.product + each.bias.double()).bfloat16() for item in each.inputs]
    assert max((result == each.bias).double().mean(1).max() for result in results) > 0.95
    assert run(Honest(), ROW, seed=100).status == "passed"


def test_the_bounds_leave_room_and_have_teeth():
    """No product's bound may swallow its typical size; rounding to the output alone must fit with both roundings."""
    for kind in KINDS:
        for each in canary.canaries(*kind):
            for item in each.inputs:
                assert (item.allowed / item.size).median() < 0.45
                got = item.product if each.bias is None else item.product + each.bias.double()
                rounded = got.to(canary.DTYPE[each.problem.out_dtype]).double()
                assert ((rounded - got).abs() <= item.allowed).all()


@pytest.mark.parametrize("kind", [k for k in KINDS if k[2] != "bf16"], ids="-".join)
def test_canary_activations_are_quantised_exactly(kind):
    """Whatever the package's quantiser makes of x is x again, bit for bit: the answer does not depend on it."""
    honest = Honest()
    for each in canary.canaries(*kind):
        prepared = honest.prepare(each.weights)
        for item in each.inputs:
            a, scale = honest.activation(each.problem, item.x, prepared.tensors[3])
            values = a.double() * scale.double().reshape(-1, 1)
            if isinstance(item.x, torch.Tensor):
                assert torch.equal(values, item.x.double())
            b, b_scale = honest.weight(each.problem, prepared)
            product = values @ (b.double() * b_scale.double().reshape(-1, 1)).t()
            torch.testing.assert_close(product, item.product, rtol=1e-6, atol=1e-6 * item.size.max().item())


# ----------------------------------------------------------------------------------------------------------- evidence


def test_a_lost_tile_reads_like_the_incident():
    result = run(FAULTS["NeverWrites_last"](), NVFP4)
    assert result.kind == "never written"
    lost = next(f for f in result.evidence if "M=200" in f["canary"])
    assert (lost["kind"], tuple(lost["tile"]), lost["agree"], lost["tiles"]) == ("never written", (1, 2), 5, 6)
    text = next(f for f in result.findings if "M=200" in f)
    assert text == "M=200 N=264 K=208: tile (1, 2) was never written; 5 of 6 tiles agree"
    assert str(result.error()).startswith("planted nvfp4_gemm M=")
    assert str(result).endswith("Signature of a launch race. GDC proven: not known. Quarantined.")
    assert isinstance(result.error(), SelfCheckFailed)


def test_wrong_values_name_the_element_and_its_bound():
    class OneElement(Honest):
        def write(self, plan, out, result):
            if out.shape[0] == 200:
                result[150, 130] += 1e9
            out.copy_(result)

    result = run(OneElement(), ROW)
    (finding,) = result.evidence
    assert (finding["tile"], finding["element"], finding["agree"]) == ((1, 1), (150, 130), 5)
    assert float(finding["got"]) > 9e8
    assert "is wrong in 1 of 9216 elements (element (150, 130) is " in str(result)
    assert "race" not in str(result)


def test_poison_is_told_from_nan():
    assert run(FAULTS["NaNOnRaggedM"](), ROW).kind == "NaN"
    assert run(FAULTS["NeverWritesAnything"](), ROW).kind == "never written"
    assert run(FAULTS["AccumulatesIntoTheOutput"](), ROW).kind == "NaN"
    assert run(FAULTS["WritesOnlyZeros"](), ROW).kind == "zero"


@pytest.mark.parametrize("name", ["ReturnsLastCall", "ReturnsFirstCall"])
def test_stale_output(name):
    result = run(FAULTS[name](), ROW)
    assert result.kind == "stale"
    assert "the result of the call before" in result.text()


def test_gdc_is_stated_for_kernels_of_ours():
    class Cutlass(FAULTS["NeverWrites_first"]):
        name = "cutlass"

    proven = System.fake("12.0", proven=[("nvfp4_gemm", "sm_120")])
    assert "GDC proven: yes." in str(run(Cutlass(), NVFP4, system=proven))
    assert "GDC proven: no." in str(run(Cutlass(), NVFP4, system=System.fake("12.0")))
    assert run(Cutlass(), NVFP4, system=System.fake("12.0")).arch == "sm_120"


# ------------------------------------------------------------------------------------------------ what is no verdict


class Supports(Honest):
    def __init__(self, reject):
        self.reject = reject

    def supports(self, problem, system):
        return (Reason("SHAPE", "not this one"),) if self.reject(problem) else ()


def test_unsupported_canaries_are_left_out_and_said():
    result = run(Supports(lambda p: p.out_dtype == "float32"), ROW)
    assert (result.status, len(result.ran)) == ("passed", 5)
    assert result.notes == ("M=128 N=128 K=256: SHAPE not this one",)


def test_nothing_run_is_not_a_pass():
    result = run(Supports(lambda p: True), ROW)
    assert (result.status, result.ran) == ("unchecked", ())
    assert "not checked: M=1" in str(result)


def test_quarantine_does_not_keep_a_backend_from_being_checked():
    seen = []

    class Looks(Honest):
        def supports(self, problem, system):
            seen.append(system.quarantined)
            return ()

    assert run(Looks(), ROW, system=System.fake("9.0", quarantined=[("planted", "fp8_gemm", "sm_90")])).usable
    assert set(seen) == {frozenset()}


def raising(error):
    class RaisesThat(Honest):
        def plan(self, problem, prepared):
            raise error

    return RaisesThat()


def test_an_exception_is_a_failure_of_this_process_and_a_dead_device_of_the_next_too():
    result = run(raising(RuntimeError("no kernel image")), ROW)
    assert (result.status, result.kind, result.lasting) == ("failed", "raised", False)
    assert "raised RuntimeError: no kernel image" in str(result)
    assert run(raising(RuntimeError("CUDA error: an illegal memory access was encountered")), ROW).lasting


def test_wrong_numbers_last_even_if_a_later_canary_raises():
    class WrongThenRaises(FAULTS["WritesZeros_first"]):
        def plan(self, problem, prepared):
            if problem.m == 130:
                raise RuntimeError("no")
            return super().plan(problem, prepared)

    result = run(WrongThenRaises(), ROW)
    assert result.status == "failed"
    assert (result.kind, result.lasting, result.evidence[-1]["kind"]) == ("zero", True, "raised")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_out_of_memory_is_no_verdict(error):
    result = run(raising(error), ROW)
    assert (result.status, result.lasting) == ("unchecked", False)
    assert "memory ran out" in str(result)


def test_refused_during_capture(monkeypatch):
    monkeypatch.setattr(capture, "is_capturing", lambda: True)
    with pytest.raises(CaptureError, match="self-check of planted"):
        run(Honest(), ROW)


# --------------------------------------------------------------------------------------------------------- side effects


def test_callers_switches_do_not_matter_and_are_left_alone():
    state = torch.get_rng_state()
    with torch.inference_mode(), torch.device("meta"):
        canary.canaries.cache_clear()
        assert run(ReferenceBackend(), NVFP4).status == "passed"
    assert run(ReferenceBackend(), NVFP4).status == "passed"
    assert torch.equal(torch.get_rng_state(), state)


def test_the_callers_autocast_condemns_nobody():
    with torch.autocast("cpu", torch.float16):
        verdicts = {kind: run(backend(), kind).status for backend in (Honest, ReferenceBackend) for kind in KINDS}
        assert torch.is_autocast_enabled("cpu")
    assert set(verdicts.values()) == {"passed"}, verdicts


def test_a_backend_cannot_spoil_the_canaries():
    class Scribbles(Honest):
        def run(self, plan, prepared, x, out, bias=None):
            super().run(plan, prepared, x, out, bias)
            prepared.tensors[0].zero_()
            if isinstance(x, torch.Tensor):
                x.zero_()

    assert run(Scribbles(), ROW).status == "failed"
    assert run(Honest(), ROW).status == "passed"


def test_the_same_operands_in_every_run():
    first = canary.canaries(*NVFP4)
    canary.canaries.cache_clear()
    for a, b in zip(first, canary.canaries(*NVFP4), strict=True):
        assert torch.equal(a.weights.weight, b.weights.weight)
        assert torch.equal(a.inputs[1].product, b.inputs[1].product)
        assert not torch.equal(a.inputs[0].product, a.inputs[1].product)


def test_it_is_quick():
    run(ReferenceBackend(), NVFP4)
    canary.canaries.cache_clear()
    used = []
    for _ in range(3):
        started = time.thread_time()
        run(ReferenceBackend(), NVFP4)
        used.append(time.thread_time() - started)
    assert min(used) < 0.3


# ------------------------------------------------------------------------------------------------------------ threads


@pytest.fixture
def two_threads(one_thread):
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def test_canaries_and_verdicts_take_one_thread(two_threads, monkeypatch):
    """On a CPU with other work, threads that wait for each other take ten times as long."""
    seen = set()

    def watched(module, name):
        inner = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: seen.add((name, torch.get_num_threads())) or inner(*args))

    watched(canary, "_canary")
    watched(trial, "_judge")
    canary.canaries.cache_clear()
    assert run(ReferenceBackend(), ROW).status == "passed"
    assert seen == {("_canary", 1), ("_judge", 1)}
    assert torch.get_num_threads() == 2


def fail_on_one_thread():
    with threads.one_thread():
        assert torch.get_num_threads() == 1
        raise ValueError("inside")


def test_the_number_of_threads_comes_back_after_an_error(two_threads):
    with pytest.raises(ValueError, match="inside"):
        fail_on_one_thread()
    assert torch.get_num_threads() == 2
