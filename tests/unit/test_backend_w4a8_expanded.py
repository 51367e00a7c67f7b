"""w4a8_expanded without a GPU: the values of w4a8, who multiplies, the contract on both, what is allowed."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from fp4dispatch import cli, formats
from fp4dispatch.backends import w4a8_expanded
from fp4dispatch.backends.base import LinearWeights, QuantizedActivation
from fp4dispatch.backends.libraries import cublaslt, cublaslt_gemms
from fp4dispatch.backends.own import compiled, w4
from fp4dispatch.backends.own.tensors.folding import fold_e4m3
from fp4dispatch.backends.own.w8a8 import W8A8Backend
from fp4dispatch.backends.w4a8_expanded import W4A8ExpandedBackend
from fp4dispatch.dispatch import choose
from fp4dispatch.dispatch.explain import explain
from fp4dispatch.errors import BackendUnsupportedError, CaptureError, InputError, SettingsError
from fp4dispatch.machine import capture, gpu_models, system
from fp4dispatch.machine.system import System
from fp4dispatch.models.linear import FP4Linear
from fp4dispatch.models.replace import replace_linears
from fp4dispatch.models.warming import warmup
from fp4dispatch.policy.catalogue import catalogue
from fp4dispatch.problem import Problem
from fp4dispatch.problem.arch import SM90
from fp4dispatch.run import routes
from fp4dispatch.trust import selfcheck
from tests import bounds, contract, quantizer_fake, w4_fake, w8_fake
from tests.hopper import H200, HOPPER, seems_to_be_here

BACKEND = W4A8ExpandedBackend()
(RECORD,) = (c for c in catalogue().capabilities if c.backend == BACKEND.name)
E4M3 = torch.float8_e4m3fn
COPY = "FP4DISPATCH_FP8_COPY"
N, K = 96, 208
NO_COMPILER = System.fake("9.0", cuda="13.0", torch="2.11")
ADA = System.fake("8.9", cuda="13.0", torch="2.11", nvcc="13.0", cutlass="4.5")
FEW, MANY, PACKER = "w8a8_small", "w8_gemm", ("w4_activations", "any")
"""w8a8's kernels."""


def problem(m, n=N, k=K, **options):
    return Problem("nvfp4_gemm", m, n, k, options.pop("activation", "fp8"), **options)


def weights(n=N, k=K, shards=(), layout="linear", seed=0, static=None):
    return w4_fake.weights(n, k, shards, layout, seed, static)


def run(w, x, bias=None):
    prepared = BACKEND.prepare(w)
    plan = BACKEND.plan(problem(x.shape[0], w.n, w.k, out_dtype=str(x.dtype).removeprefix("torch.")), prepared)
    out = torch.full((x.shape[0], w.n), torch.nan, dtype=x.dtype)
    BACKEND.run(plan, prepared, x, out, bias)
    return out


def on(monkeypatch, machine):
    monkeypatch.setattr(w4a8_expanded, "_facts", lambda device: machine)


@pytest.fixture
def kernels(monkeypatch):
    """An H200 where nothing can be compiled but our quantiser, which is torch; the GEMM is torch's own for CPUs."""
    on(monkeypatch, NO_COMPILER)
    monkeypatch.setattr(cublaslt, "_arch_of", lambda tensor: SM90)
    return quantizer_fake.install(monkeypatch)


@pytest.fixture
def ours(kernels, monkeypatch):
    """An H200 with a compiler: w8a8's kernels too."""
    on(monkeypatch, HOPPER)
    return w8_fake.install(monkeypatch)


@pytest.fixture
def both(ours, monkeypatch):
    """As ``ours``, with predicted times: w8a8 multiplies for up to bounds.W8A8 tokens, then cublaslt."""
    on(monkeypatch, H200)
    bounds.cublaslt_for_many(monkeypatch)
    return ours


def planned(m, n=N, k=K, **options):
    prepared = BACKEND.prepare(weights(n, k))
    return BACKEND.plan(problem(m, n, k, **options), prepared), prepared


# ------------------------------------------------------------------------------------------------------------ contract


@pytest.mark.parametrize("case", contract.cases(BACKEND), ids=str)
def test_the_contract_holds_on_w8a8(case, ours, kernels):
    contract.check(BACKEND, case)
    assert [launch[0] for launch in ours.launched] == ["w8_quantize_row", FEW if case.m <= 64 else MANY] * 2
    assert kernels.calls == []


@pytest.mark.parametrize("case", contract.cases(BACKEND), ids=str)
def test_the_contract_holds_on_cublaslt_with_our_quantiser(case, kernels):
    contract.check(BACKEND, case)
    assert [call[0] for call in kernels.calls] == ["row", "row"]


@pytest.mark.parametrize("machine", [NO_COMPILER, ADA], ids=["hopper", "ada"])
@pytest.mark.parametrize("case", contract.cases(BACKEND)[::3], ids=str)
def test_the_contract_holds_without_our_quantiser(case, machine, monkeypatch):
    on(monkeypatch, machine)
    contract.check(BACKEND, case)


def test_a_plan_says_why_it_goes_without_our_quantiser(monkeypatch):
    on(monkeypatch, NO_COMPILER)
    quantizer_fake.without(monkeypatch, "by torch's operations: no nvcc")
    assert "by torch's operations: no nvcc" in BACKEND.plan(problem(4), BACKEND.prepare(weights())).note


@pytest.mark.parametrize(("dtype", "rows"), [("bfloat16", 5), ("float16", 1)])
def test_on_ada_scales_per_row_are_left_to_the_epilogue_for_float16(dtype, rows, monkeypatch):
    on(monkeypatch, ADA)
    quantizer_fake.install(monkeypatch)
    calls, real = [], torch._scaled_mm
    monkeypatch.setattr(
        torch, "_scaled_mm", lambda a, b, sa, *r, **k: calls.append(sa.numel()) or real(a, b, sa, *r, **k)
    )
    x = torch.randn(5, K).to(getattr(torch, dtype))
    w = weights(shards=(40, 56))
    want = x.double() @ contract.dequantised(w, "fp8").t()
    assert float((run(w, x).double() - want).norm() / want.norm()) < 0.04
    assert calls == [rows]


# ------------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("layout", ["linear", "128x4"])
@pytest.mark.parametrize(
    ("n", "k", "shards"), [(64, 64, ()), (100, 48, (60, 40)), (80, 48, (60, 20)), (1, 16, ()), (200, 1040, ())]
)
@pytest.mark.parametrize("step", [1 << 25, 100])
def test_the_values_are_those_of_w4a8_bit_by_bit(n, k, shards, layout, step, monkeypatch):
    monkeypatch.setattr(w4a8_expanded, "_STEP_ELEMENTS", step)
    w = weights(n, k, shards, layout)
    data, scale = BACKEND.prepare(w).tensors
    np = formats.round_up(n, 16)
    assert (data.shape, data.dtype, scale.shape) == ((np, k), E4M3, (1, np))
    assert data.is_contiguous()
    folded = fold_e4m3(w.weight, w.scale, sf_layout=layout).view(torch.uint8)
    assert torch.equal(data[:n].view(torch.uint8), folded)
    unpacked = w4_fake.folded_weights(w4.W4A8Backend().prepare(w).tensors[0])[:n, :k]
    assert torch.equal(data[:n].float(), unpacked.float())
    assert torch.equal(scale[0, :n], 8 * formats.expand_shards(w.global_scale, w.shard_rows))
    assert not data[n:].view(torch.uint8).any()
    assert not scale[0, n:].any()


def test_every_e2m1_by_every_block_scale_is_folded_to_nearest():
    scale = torch.arange(127, dtype=torch.uint8).view(127, 1).view(E4M3)
    codes = torch.arange(16, dtype=torch.uint8)
    data = (codes[::2] | codes[1::2] << 4).expand(127, 8).contiguous()
    w = LinearWeights("nvfp4_gemm", "nvfp4", 127, 16, data, scale, torch.ones(1), (127,))
    found = BACKEND.prepare(w).tensors[0][:127]
    exact = formats.decode_e2m1(codes).double() * scale.double() / 8
    assert torch.equal(found.view(torch.uint8), exact.to(E4M3).view(torch.uint8))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shards", [(), (40, 56)])
def test_results_are_those_of_w4a8_but_for_the_order_of_sums(kernels, monkeypatch, shards, bias):
    w, x = weights(shards=shards), torch.randn(300, K).bfloat16()
    b = torch.randn(N).bfloat16() if bias else None
    got = run(w, x, b)
    with monkeypatch.context() as patch:
        on(patch, HOPPER)
        w8_fake.install(patch)
        torch.testing.assert_close(run(w, x, b), got, rtol=2**-7, atol=1e-3)  # whoever multiplies
    w4_fake.install(monkeypatch)
    other, want = w4.W4A8Backend(), torch.empty(300, N, dtype=torch.bfloat16)
    prepared = other.prepare(w)
    other.run(other.plan(problem(300), prepared), prepared, x, want, b)
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-3)
    assert float((got == want).float().mean()) > 0.99


def test_a_static_input_scale_is_not_used(kernels):
    x = torch.randn(5, K).bfloat16()
    assert torch.equal(run(weights(), x), run(weights(static=torch.tensor(1e-6)), x))


def test_bytes_are_eight_bits_a_weight_and_the_scales():
    assert BACKEND.prepare(weights()).nbytes() == N * K + 4 * N
    assert BACKEND.prepare(weights(n=100)).nbytes() == 112 * K + 4 * 112
    assert BACKEND.layout_name == "w4a8_expanded"


# ----------------------------------------------------------------------------------------------------- who multiplies


def test_who_multiplies_is_who_the_policy_has_for_an_fp8_layer(monkeypatch):
    """Without tuned times, which are of a whole layer."""
    monkeypatch.setenv("FP4DISPATCH_TUNED", "off")
    on(monkeypatch, HOPPER)
    tokens = (1, 9, 64, 65, 128, 129, 256, 300, 512, 513, 768, 769, 1024, 1025, 2048, 2049, 4096)

    def agreed(machine):
        on(monkeypatch, machine)
        monkeypatch.setattr(system, "current", lambda: machine)
        found = [w4a8_expanded._backend_for(problem(m, 8192, 8192), torch.device("cpu")).name for m in tokens]
        assert found == [explain("fp8_gemm", m, 8192, 8192, activation="fp8", scaling="row").backend for m in tokens]
        return found

    without = System.fake("9.0", cuda="13.0", torch="2.11", nvcc="13.0", quarantined=[("w8a8", "fp8_gemm", "sm_90")])
    assert agreed(HOPPER) == ["w8a8" if m <= bounds.W8A8_BY_RULES else "cublaslt" for m in tokens]
    assert agreed(without) == ["cublaslt"] * len(tokens)
    bounds.cublaslt_for_many(monkeypatch)
    assert agreed(H200) == ["w8a8" if m <= bounds.W8A8 else "cublaslt" for m in tokens]


def test_predicted_times_choose_who_multiplies(monkeypatch):
    on(monkeypatch, H200)
    few, many = (w4a8_expanded._backend_for(problem(m, 7168, 12288), torch.device("cpu")).name for m in (64, 1024))
    assert few == many == "w8a8"
    for name, us in (("w8a8", 100.0), ("cublaslt", 50.0)):
        monkeypatch.setattr(w4a8_expanded._FP8[name], "predict", lambda problem, gpu, us=us: us, raising=False)
    assert w4a8_expanded._backend_for(problem(64, 7168, 12288), torch.device("cpu")).name == "cublaslt"
    assert BACKEND.predict(problem(64), gpu_models.named("H200 SXM")) == 50.0


def test_without_a_compiler_and_away_from_hopper_it_is_cublaslt(monkeypatch):
    proven = System.fake("9.0", cuda="13.0", torch="2.11", proven=[("w8_gemm", "sm_90")])
    for machine, name in ((NO_COMPILER, "cublaslt"), (ADA, "cublaslt"), (HOPPER, "w8a8"), (proven, "w8a8")):
        on(monkeypatch, machine)
        assert w4a8_expanded._backend_for(problem(64), torch.device("cpu")).name == name


def test_one_that_failed_its_self_check_does_not_multiply(monkeypatch):
    def machine(*names):
        return System.fake(
            "9.0", cuda="13.0", torch="2.11", nvcc="13.0", quarantined=[(n, "fp8_gemm", "sm_90") for n in names]
        )

    for failed, other in (("w8a8", "cublaslt"), ("cublaslt", "w8a8")):
        on(monkeypatch, machine(failed))
        found = {w4a8_expanded._backend_for(problem(m), torch.device("cpu")).name for m in (64, 4096)}
        assert found == {other}
        assert BACKEND.supports(problem(64), machine(failed)) == ()
    both = machine("w8a8", "cublaslt")
    reasons = BACKEND.supports(problem(64), both)
    assert [r.code for r in reasons] == ["QUARANTINED", "QUARANTINED"]
    assert {r.text.split()[0] for r in reasons} == {"w8a8", "cublaslt"}
    on(monkeypatch, both)
    with pytest.raises(InputError, match="nothing can run the FP8 copy of the weights of nvfp4_gemm M=64"):
        BACKEND.builds(problem(64), torch.device("cpu"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("arch", ["8.9", "9.0"])
@pytest.mark.parametrize("nvcc", [None, "13.0"])
@pytest.mark.parametrize("cuda", ["12.4", "13.0"])
def test_where_it_can_run_somebody_can_multiply(cuda, nvcc, arch, dtype):
    machine = System.fake(arch, cuda=cuda, torch="2.11", nvcc=nvcc)
    asked = problem(300, out_dtype=dtype, bias=True)
    assert BACKEND.supports(asked, machine) == check_of_its_own(asked, machine)


def check_of_its_own(asked, machine):
    return w4a8_expanded.check("w4a8_expanded", asked, machine)


def test_the_gpu_that_is_asked_about_is_that_of_the_weights(monkeypatch):
    here = System.fake(gpus=["9.0", "8.9"], cuda="13.0", torch="2.11", nvcc="13.0")
    monkeypatch.setattr(system, "current", lambda: here)
    found = [w4a8_expanded._facts(torch.device(d)).arch for d in ("cuda", "cuda:0", "cuda:1", "cpu")]
    assert [arch and arch.sm for arch in found] == ["sm_90", "sm_90", "sm_89", None]


@pytest.mark.parametrize("n", [96, 104, 100])
def test_both_read_the_one_copy(n, both, monkeypatch):
    held, seen, multiplied = BACKEND.prepare(weights(n)), [], []
    for m in (64, 65, bounds.W8A8 + 1):
        plan = BACKEND.plan(problem(m, n), held)
        inner = plan.state.backend
        multiplied.append(inner.name)
        real = inner.run
        with monkeypatch.context() as patch:
            patch.setattr(
                inner, "run", lambda p, prepared, *rest, real=real: (seen.append(prepared), real(p, prepared, *rest))
            )
            BACKEND.run(plan, held, torch.randn(m, K).bfloat16(), torch.empty(m, n, dtype=torch.bfloat16))
        other = w4a8_expanded._held_by(inner, held)
        assert [t.data_ptr() for t in other.tensors] == [t.data_ptr() for t in held.tensors]
        if n % 16 == 0:
            assert other.layout == inner.prepare(of_fp8(weights(n))).layout
    assert multiplied == ["w8a8", "w8a8", "cublaslt"]
    assert [prepared.tensors[0].data_ptr() for prepared in seen] == [held.tensors[0].data_ptr()] * 3
    assert [name for name, *_ in both.launched] == ["w8_quantize_row", FEW, "w8_quantize_row", MANY]


def of_fp8(w):
    """The FP8 layer that the copy is."""
    scale = torch.ones(w.n)
    return LinearWeights("fp8_gemm", "row", w.n, w.k, fold_e4m3(w.weight, w.scale), scale)


def test_the_copy_is_written_before_a_kernel_may_read_it_ahead_of_its_turn(monkeypatch):
    awaited = []
    monkeypatch.setattr(w4a8_expanded, "await_writes", awaited.append)
    (weight, _), (seen,) = BACKEND.prepare(weights()).tensors, awaited
    assert seen is weight


# ------------------------------------------------------------------------------------------------------- plan and runs


def test_operands_that_fit_go_straight_to_two_launches(kernels, monkeypatch):
    prepared = BACKEND.prepare(weights())
    plan = BACKEND.plan(problem(4), prepared)
    x, out = torch.randn(4, K).bfloat16(), torch.empty(4, N, dtype=torch.bfloat16)
    BACKEND.run(plan, prepared, x, out)
    kernels.calls.clear()
    for slow in ("quantized", "zero_pad"):
        monkeypatch.setattr(cublaslt_gemms, slow, lambda *args: pytest.fail("the long way"))
    monkeypatch.setattr(cublaslt, "zero_pad", lambda *args: pytest.fail("the long way"))
    for made in ("empty", "zeros", "ones"):
        monkeypatch.setattr(torch, made, lambda *args, **kw: pytest.fail("memory was taken"))
    BACKEND.run(plan, prepared, x, out)
    BACKEND.run(plan, prepared, x, out)
    first, second = kernels.calls
    assert first == second  # the addresses too: the arena
    assert (first[0], first[3]) == ("row", True)


@pytest.mark.parametrize("m", [4, 100])
def test_operands_that_fit_go_straight_to_w8a8s_two_launches(m, ours, monkeypatch):
    plan, prepared = planned(m)
    x, out = torch.randn(m, K).bfloat16(), torch.empty(m, N, dtype=torch.bfloat16)
    ready = BACKEND.ready(plan, prepared)
    with monkeypatch.context() as patch:
        for slow in ("aligned", "bias_row", "direct"):
            patch.setattr(compiled, slow, lambda *args: pytest.fail("the long way"))
        BACKEND.run(plan, prepared, x, out)
        patch.setattr(W8A8Backend, "run", lambda *args: pytest.fail("not ready"))
        patch.setattr(W4A8ExpandedBackend, "run", lambda *args: pytest.fail("not ready"))
        again = torch.full_like(out, torch.nan)
        ready(x, again, None)
    assert torch.equal(out, again)
    assert [launch[0] for launch in ours.launched] == ["w8_quantize_row", FEW if m == 4 else MANY] * 2
    assert {launch[-1] for launch in ours.launched} == {True}


def test_during_capture_scratch_is_the_graphs_and_nothing_is_planned(kernels, monkeypatch):
    plan, prepared = planned(4)
    x, out = torch.randn(4, K).bfloat16(), torch.empty(4, N, dtype=torch.bfloat16)
    BACKEND.run(plan, prepared, x, out)
    monkeypatch.setattr(capture, "stream_is_capturing", lambda: True)
    monkeypatch.setattr(capture, "is_capturing", lambda: True)
    again = torch.full_like(out, torch.nan)
    BACKEND.run(plan, prepared, x, again)
    assert torch.equal(again, out)
    arena, own = kernels.calls
    assert arena[1] != own[1]
    with pytest.raises(CaptureError, match=r"warmup\(model, tokens=\[5\]\)"):
        BACKEND.plan(problem(5), prepared)


def test_nothing_is_planned_in_a_capture_for_w8a8_either(ours, monkeypatch):
    plan, prepared = planned(4)
    monkeypatch.setattr(capture, "is_capturing", lambda: True)
    monkeypatch.setattr(capture, "stream_is_capturing", lambda: True)
    with pytest.raises(CaptureError, match=r"warmup\(model, tokens=\[5\]\)"):
        BACKEND.plan(problem(5), prepared)
    BACKEND.run(plan, prepared, torch.randn(4, K).bfloat16(), torch.empty(4, N, dtype=torch.bfloat16))
    assert [launch[0] for launch in ours.launched] == ["w8_quantize_row", FEW]


def test_plans_are_by_m_and_cublaslt_needs_but_one(both, monkeypatch):
    monkeypatch.setattr(routes, "_plans", {})
    prepared = BACKEND.prepare(weights())
    tokens = (1, 2, 64, 65, bounds.W8A8, bounds.W8A8 + 1, 2000, 9000)
    plans = [routes.plan_for(BACKEND, problem(m), prepared) for m in tokens]
    assert BACKEND.plans_by_m
    assert len({id(plan) for plan in plans[:5]}) == 5
    assert len({id(plan) for plan in plans[5:]}) == 1 == len(set(map(id, plans)) - set(map(id, plans[:5])))
    assert routes.plan_for(BACKEND, problem(2), prepared) is plans[1]
    assert routes.plan_for(BACKEND, problem(bounds.W8A8 + 1, bias=True), prepared) is not plans[5]
    for m, plan in zip(tokens, plans, strict=True):
        x, out = torch.randn(m, K).bfloat16(), torch.empty(m, N, dtype=torch.bfloat16)
        BACKEND.run(plan, prepared, x, out)
        assert torch.equal(out, run(weights(), x)), m
    with pytest.raises(InputError, match="out has 3 rows, the plan is for M=2"):
        BACKEND.run(plans[1], prepared, torch.randn(3, K).bfloat16(), torch.empty(3, N, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_is_compiled_is_what_an_m_needs(dtype, both):
    half, loaded, most = {"bfloat16": "bf16", "float16": "fp16"}[dtype], both.loaded, bounds.W8A8
    few, many = {("w8a8_small", half), PACKER}, {("w8_gemm_sm90", f"{half}_96"), PACKER}
    for m, names in ((1, few), (64, few), (65, many), (most, many), (most + 1, {("fp8_quantize", "any")})):
        assert set(BACKEND.builds(problem(m, out_dtype=dtype), torch.device("cpu"))) == names
        loaded.clear()
        planned(m, out_dtype=dtype)
        assert set(loaded) == (names if m <= most else set())  # that quantiser is not loaded through jit here


def test_what_is_quantised_already_is_refused(kernels):
    prepared = BACKEND.prepare(weights())
    raw = QuantizedActivation(torch.zeros(1, K).to(E4M3), torch.ones(1))
    with pytest.raises(InputError, match="w4a8_expanded takes 16-bit activations"):
        BACKEND.run(BACKEND.plan(problem(1), prepared), prepared, raw, torch.empty(1, N, dtype=torch.bfloat16))
    assert kernels.calls == []
    reasons = BACKEND.supports(problem(16, 128, 128, activation="nvfp4", sf_layout="128x4"), HOPPER)
    assert [r.code for r in reasons] == ["DTYPE", "LAYOUT"]
    assert "operands are quantised already (raw operator, b_sf 128x4)" in reasons[1].text


def test_what_it_supports():
    assert set(RECORD.archs) == {"sm_89", "sm_90"}
    assert BACKEND.supports(problem(1), HOPPER) == ()
    assert BACKEND.supports(problem(1), System.fake("9.0", cuda="13.0", torch="2.11")) == ()  # nothing must be compiled
    for asked, facts, text in (
        (problem(1, activation="bf16"), HOPPER, "activation is bf16, needs fp8"),
        (problem(1, out_dtype="float32"), HOPPER, "output is float32, needs bfloat16 or float16"),
        (problem(1), System.fake("8.0", cuda="13.0", torch="2.11"), "GPU is sm_80, needs sm_89 or sm_90"),
        (problem(1), System.fake("9.0", cuda="13.0", torch="2.10"), "torch 2.10 (needs 2.11)"),
    ):
        (reason,) = BACKEND.supports(asked, facts)
        assert reason.text == text


def test_the_self_check_passes_it_and_sees_wrong_weights(kernels, monkeypatch):
    def status():
        return selfcheck.check(BACKEND, "nvfp4_gemm", "nvfp4", "fp8", HOPPER, "cpu").status

    assert status() == "passed"
    real = w4a8_expanded.fold_e4m3
    for spoil in (
        lambda w: w.view(torch.uint8).roll(1, 0).view(E4M3),
        lambda w: w.view(torch.uint8).roll(16, 1).view(E4M3),
        lambda w: (w.float() * 0.5).to(E4M3),
        lambda w: torch.cat([w.view(torch.uint8)[:, :-16], w.view(torch.uint8)[:, -16:] * 0], 1).view(E4M3),
    ):
        monkeypatch.setattr(w4a8_expanded, "fold_e4m3", lambda data, scale, spoil=spoil: spoil(real(data, scale)))
        assert status() == "failed"


# ----------------------------------------------------------------------------------------------------- the user's word


@pytest.fixture
def hopper(monkeypatch):
    """A machine that seems to have an H200, with our kernels; nothing is allowed yet."""
    launches = w4_fake.install(monkeypatch)
    quantizer_fake.install(monkeypatch)
    launches.w8 = w8_fake.install(monkeypatch, beside=launches)
    on(monkeypatch, HOPPER)
    monkeypatch.setattr(cublaslt, "_arch_of", lambda tensor: SM90)
    with seems_to_be_here(monkeypatch):
        yield launches


def test_the_setting_is_read_when_a_choice_is_made(hopper, monkeypatch):
    asked = problem(4096, activation="any")
    assert choose.select(asked).backend == "w4a8"
    monkeypatch.setenv(COPY, "1")
    assert choose.select(asked).backend == "w4a8_expanded"
    assert choose.select(problem(128, activation="any")).backend == "w4a8"
    assert choose.select(problem(129, activation="any")).backend == "w4a8_expanded"
    monkeypatch.setenv(COPY, "0")
    assert choose.select(asked).backend == "w4a8"
    monkeypatch.setenv(COPY, "perhaps")
    with pytest.raises(SettingsError, match="FP4DISPATCH_FP8_COPY='perhaps' is not a switch"):
        choose.select(asked)


def test_it_is_allowed_on_every_gpu_that_can_run_it(monkeypatch):
    here = System.fake(gpus=["9.0", "8.9", "12.0"], cuda="13.0", torch="2.11", nvcc="13.0", cutlass="4.5")
    monkeypatch.setattr(system, "current", lambda: here)
    choose.reset()
    try:
        for value, allowed in (("1", True), ("0", False), ("1", True)):
            monkeypatch.setenv(COPY, value)
            assert [choose.facts(gpu).fp8_copy for gpu in (0, 1, 2, None)] == [allowed] * 4
            chosen = [choose.select(problem(4096, activation="any"), gpu=gpu).backend for gpu in (0, 1)]
            assert chosen == (["w4a8_expanded"] * 2 if allowed else ["w4a8", "w4a16"])
            assert choose.select(problem(4096, activation="any"), gpu=None).backend == "reference"
    finally:
        choose.reset()


def test_who_names_it_needs_no_setting(hopper, monkeypatch, caplog):
    assert choose.select(problem(1, activation="any"), backend="w4a8_expanded").backend == "w4a8_expanded"
    assert "8 bits each" in "".join(r.message for r in caplog.records if r.levelname == "WARNING")
    monkeypatch.setenv("FP4_GEMM_BACKEND", "w4a8-expanded")
    assert choose.select(problem(1, activation="any")).backend == "w4a8_expanded"
    monkeypatch.setenv("FP4DISPATCH_DISABLE", "w4a8_expanded")
    with pytest.raises(BackendUnsupportedError, match="disabled"):
        choose.select(problem(1, activation="any"))


def test_explain_says_why_it_is_no_candidate_and_what_would_make_it_one(monkeypatch, capsys):
    facts = {"arch": "9.0", "cuda": "13.0", "nvcc": "13.0"}
    monkeypatch.setenv(COPY, "1")  # of this machine, not of the one that is asked about
    plain = explain("nvfp4_gemm", 4096, N, K, **facts)
    assert plain.backend == "w4a8"
    assert "FP4DISPATCH_FP8_COPY=1" in plain.text()
    assert explain("nvfp4_gemm", 4096, N, K, **facts, fp8_copy=True).backend == "w4a8_expanded"
    words = ["explain", "nvfp4_gemm", "-m4096", f"-n{N}", f"-k{K}", "--arch=9.0", "--cuda=13.0", "--nvcc=13.0"]
    assert cli.main([*words, "--fp8-copy"]) == 0
    said = capsys.readouterr().out
    assert "FP8 copy allowed" in said.splitlines()[0]
    assert said.startswith("w4a8_expanded, with fp8 activations, runs nvfp4_gemm M=4096")
    monkeypatch.setattr(system, "current", lambda: HOPPER)
    assert explain("nvfp4_gemm", 4096, N, K).backend == "w4a8_expanded"
    assert explain("nvfp4_gemm", 4096, N, K, fp8_copy=False).backend == "w4a8"


def test_a_refusal_can_be_reproduced_with_what_was_allowed(hopper, monkeypatch):
    for allowed in ("1", "0"):
        monkeypatch.setenv(COPY, allowed)
        with pytest.raises(BackendUnsupportedError) as error:
            choose.select(problem(1, activation="bf16"), backend="w4a8_expanded")
        assert ("--fp8-copy" in str(error.value)) is (allowed == "1")


def test_what_is_allowed_is_no_fact_of_the_machine():
    assert "fp8_copy" not in System.fake("9.0", fp8_copy=True).to_dict()


# -------------------------------------------------------------------------------------------------------------- layers


def layer(shards=(), **options):
    options.setdefault("keep_stored", True)
    return FP4Linear.from_weights(weights(shards=shards), torch.randn(N).bfloat16(), **options)


@pytest.mark.parametrize("shards", [(), (40, 56)])
def test_a_layer_holds_two_layouts_and_counts_both(hopper, monkeypatch, shards):
    on(monkeypatch, H200)
    bounds.cublaslt_for_many(monkeypatch)
    plain = layer(shards)
    monkeypatch.setenv(COPY, "1")
    made = layer(shards)
    few, more, many = made.bind().spec.routes
    assert [(r.m_max, r.backend) for r in (few, more)] == [(8, "w4a16"), (128, "w4a8")]
    assert (many.backend, many.activation) == ("w4a8_expanded", "fp8")
    assert (few.start, few.stop) == (more.start, more.stop) != (many.start, many.stop)
    assert made.nbytes() - plain.nbytes() == N * K + 4 * N
    assert list(made.state_dict()) == list(plain.state_dict())
    dense = contract.dequantised(made.weights())
    for m in (1, 8, 9, 16, 17, 128, 129, bounds.W8A8, bounds.W8A8 + 1):
        x = torch.randn(m, K).bfloat16()
        want = x.double() @ dense.t() + made.bias.double()
        assert float((made(x).double() - want).norm() / want.norm()) < (0.003 if m <= 8 else 0.05)
    multiplied = [name for name, *_ in (*hopper.w8.launched, *hopper.launched) if name in (FEW, MANY, "scaled_mm")]
    assert multiplied == [MANY, MANY, "scaled_mm"]
    assert "then w4a8 (fp8) up to M=128, then w4a8_expanded (fp8)" in repr(made)


def test_an_m_that_was_never_planned_is_not_captured(hopper, monkeypatch):
    on(monkeypatch, H200)
    bounds.cublaslt_for_many(monkeypatch)  # w8a8 for 200 tokens, cublaslt for 2000
    monkeypatch.setenv(COPY, "1")
    made = layer()
    warmup(made, tokens=[200, 2000])
    monkeypatch.setattr(capture, "is_capturing", lambda: True)
    monkeypatch.setattr(capture, "stream_is_capturing", lambda: True)
    for m in (200, 2000):
        made(torch.randn(m, K).bfloat16())
    for m in (201, 2001):
        with pytest.raises(CaptureError, match=rf"no plan for M={m} .*(\n.*)*warmup\(model, tokens=\[{m}\]\)"):
            made(torch.randn(m, K).bfloat16())


def test_without_the_setting_no_layer_holds_a_copy(hopper):
    made = layer()
    assert [r.backend for r in made.bind().spec.routes] == ["w4a16", "w4a8"]
    assert [t for t in made.bind().tensors if t.dtype == E4M3] == []


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_and_state_dicts_are_those_of_the_checkpoint(hopper, monkeypatch, clone):
    monkeypatch.setenv(COPY, "1")
    made, x = layer((40, 56)), torch.randn(300, K).bfloat16()
    want = made(x)
    twin = clone(made)
    assert torch.equal(twin(x), want)
    held = {t.data_ptr() for t in made.bind().tensors}
    assert not held & {t.data_ptr() for t in twin.bind().tensors}
    monkeypatch.delenv(COPY)
    other = layer((40, 56))
    other.load_state_dict(made.state_dict())
    assert [r.backend for r in other.bind().spec.routes] == ["w4a16", "w4a8"]
    torch.testing.assert_close(other(x), want, rtol=2**-7, atol=1e-3)


def test_the_checkpoints_own_tensors_can_still_be_dropped(hopper, monkeypatch):
    monkeypatch.setenv(COPY, "1")
    kept, made, x = layer(), layer(keep_stored=False), torch.randn(300, K).bfloat16()
    made.bias = kept.bias
    want = kept(x)
    assert torch.equal(made(x), want)
    assert kept.nbytes() - made.nbytes() == N * K // 2 + N * K // 16 == made.dropped_nbytes()
    assert kept.compact() == made.dropped_nbytes()
    assert torch.equal(kept(x), want)
    assert layer(backend="w4a8_expanded").compact() == 0  # e4m3 does not hold them


def test_the_report_counts_the_copy_and_says_what_it_is(hopper, monkeypatch):
    def replaced():
        return replace_linears(nn.Sequential(nn.Linear(K, N).bfloat16()), "nvfp4")

    plain = replaced()
    monkeypatch.setenv(COPY, "1")
    report = replaced()
    assert report.bytes_after - plain.bytes_after == N * K + 4 * N
    (row,) = report.layers
    assert (row.rule, plain.layers[0].rule) == ("nvfp4-fp8-copy", "nvfp4-sm90-w4a8")
    assert "an FP8 copy of the weights, 8 bits each" in str(report)
    assert "w4a8_expanded (fp8)" in row.backend
