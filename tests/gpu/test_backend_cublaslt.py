"""cuBLASLt behind our quantisers on a GPU: the bits of the path without them, graphs, PDL, threads and streams.

The numbers of single calls are held to the reference by tests/gpu/test_backends.py, for every backend.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fp4dispatch import formats
from fp4dispatch.backends import registry
from fp4dispatch.backends.base import QuantizedActivation
from fp4dispatch.backends.libraries import cublaslt_gemms
from fp4dispatch.backends.libraries.cublaslt_direct import DirectGemms
from fp4dispatch.machine import system
from fp4dispatch.models.linear import FP4Linear, FP8Linear
from fp4dispatch.models.replace import warmup
from fp4dispatch.run import ops, routes
from tests import contract, quantizer_fake
from tests.gpu import backend_cases
from tests.gpu.backend_cases import K, N, captured, tokens

pytestmark = pytest.mark.gpu

KINDS = (
    ("tensor", False), ("tensor", True), ("row", False), ("row", True), ("block128", False),
    ("nvfp4", False), ("nvfp4", True),
)  # fmt: skip
TOKENS = (1, 3, 4, 64, 129, 1000)
kinds = pytest.mark.parametrize(("scaling", "static"), KINDS)


def case_of(scaling, m, *, dtype="bfloat16", n=N, k=K, bias=False, static=False):
    """Return a case, or skip where this machine's cuBLASLt cannot run it."""
    op, activation = ("nvfp4_gemm", "nvfp4") if scaling == "nvfp4" else ("fp8_gemm", "fp8")
    case = contract.Case(op, scaling, activation, m, n, k, dtype, bias, static=static)
    why = contract.unsupported(registry.instance("cublaslt"), case, system.current())
    if why:
        pytest.skip(f"cublaslt: {why}")
    return case


def layer_of(scaling, static=False, seed=0, k=K, n=N):
    case_of(scaling, 1)
    torch.manual_seed(seed)
    linear = torch.nn.Linear(k, n, device="cuda", dtype=torch.bfloat16)
    if scaling == "nvfp4":
        layer = FP4Linear.from_linear(linear, backend="cublaslt")
    else:
        layer = FP8Linear.from_linear(linear, scaling=scaling, backend="cublaslt")
    if static:
        layer.input_scale = torch.tensor(0.01, device="cuda")
        layer._refresh()
    return layer


@pytest.mark.parametrize("scaling", ["row", "nvfp4"])
def test_our_kernels_are_used_where_they_can_be_compiled(scaling):
    case = case_of(scaling, 1)
    backend = registry.instance("cublaslt")
    plan = backend.plan(case.problem(), backend.prepare(contract.make_weights(case, "cuda", 1)))
    if plan.note and system.current().nvcc is None:
        pytest.skip(plan.note)
    assert plan.note == ""
    assert (plan.state.quantizers or plan.state.nvfp4) is not None
    assert plan.state.launch is not None


@pytest.mark.parametrize(("n", "k", "bias"), [(N, K, False), (N, K, True), (1000, 1040, True), (136, 72, False)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@kinds
def test_the_bits_are_those_of_the_path_without_our_kernels(scaling, static, dtype, n, k, bias, monkeypatch):
    if scaling == "nvfp4":
        k = k // 16 * 16  # whole blocks
    backend = registry.instance("cublaslt")
    case = case_of(scaling, 1, dtype=dtype, n=n, k=k, bias=bias, static=static)
    weights = contract.make_weights(case, "cuda", 1)
    prepared = backend.prepare(weights)
    ours = backend.plan(case.problem(), prepared)
    with monkeypatch.context() as patch:
        quantizer_fake.without(patch, "off")
        plain = backend.plan(case.problem(), prepared)
    assert (ours.state.quantizers or ours.state.nvfp4) is not None
    assert (plain.state.quantizers or plain.state.nvfp4) is None
    out_dtype = getattr(torch, dtype)
    bias_row = torch.randn(n, device="cuda", dtype=out_dtype) if bias else None
    for m in TOKENS:
        x = tokens(m, m, k, out_dtype)
        x[m // 2, : k // 2] = 0
        x[-1] = x[-1] * 3
        outs = []
        for plan in (ours, plain):
            out = torch.full((m, n), torch.nan, device="cuda", dtype=out_dtype)
            backend.run(plan, prepared, x, out, bias_row)
            outs.append(out)
        assert outs[0].isfinite().all()
        assert torch.equal(*outs), f"M={m}: {int((outs[0] != outs[1]).sum())} of {out.numel()} differ"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("scaling", "static"), [kind for kind in KINDS if kind[0] != "nvfp4"])
def test_on_hopper_it_is_called_without_torchs_operator_for_the_same_bits(scaling, static, dtype, bias, monkeypatch):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    if scaling == "block128" and (bias or dtype == "float16"):
        pytest.skip("rounded after the GEMM")
    n, k = 4096, 2048
    backend = registry.instance("cublaslt")
    case = case_of(scaling, 1, dtype=dtype, n=n, k=k, bias=bias, static=static)
    prepared = backend.prepare(contract.make_weights(case, "cuda", 1))
    plan = backend.plan(case.problem(), prepared)
    assert plan.note == ""
    assert isinstance(plan.state.launch.__self__, DirectGemms)
    operator = dataclasses.replace(plan, state=plan.state._replace(launch=None))
    bias_row = torch.randn(n, device="cuda", dtype=getattr(torch, dtype)) if bias else None
    for m in (1, 2, 16, 65, 128, 200, 256, 1000, 4096):
        x, rows = tokens(m, m, k, getattr(torch, dtype)), backend.out_rows(plan, m)
        want, out = (torch.full((rows, n), torch.nan, device="cuda", dtype=x.dtype) for _ in range(2))
        backend.run(operator, prepared, x, want, bias_row)
        with monkeypatch.context() as patch:
            for module, name in ((torch, "_scaled_mm"), (cublaslt_gemms, "_block128_gemm")):
                patch.setattr(module, name, lambda *args, **options: pytest.fail("torch's operator"))
            for _ in range(2):
                backend.run(plan, prepared, x, out.fill_(torch.nan), bias_row)
                differ = int((out[:m] != want[:m]).sum())
                assert not differ, f"M={m}: {differ} of {m * n} differ"


@pytest.mark.parametrize("m", [1, 5, 130, 999, 4099])
def test_ragged_tokens_under_block_scales_are_multiplied_in_place(m, monkeypatch):
    backend, case = registry.instance("cublaslt"), case_of("block128", m)
    prepared = backend.prepare(contract.make_weights(case, "cuda", 1))
    plan, x = backend.plan(case.problem(), prepared), tokens(m, m)
    rows = backend.out_rows(plan, m)
    assert rows == formats.round_up(m, 4)
    want = torch.full((m, N), torch.nan, device="cuda", dtype=torch.bfloat16)
    backend.run(plan, prepared, x, want)
    poison = torch.full((1 << 24,), float("nan"), device="cuda")  # scratch rows beyond M then hold NaN
    del poison
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", lambda *_: pytest.fail("copied"))
        out = routes.launch_into_new(backend, plan, prepared, x, N, None)
    assert out.isfinite().all()
    assert torch.equal(out, want)
    linear = torch.nn.Linear(K, N, bias=False, device="cuda", dtype=torch.bfloat16)
    made = FP8Linear.from_linear(linear, scaling="block128", backend="cublaslt")(x.view(1, m, K))
    assert made.shape == (1, m, N)
    assert made.is_contiguous()
    assert made.untyped_storage().nbytes() == rows * N * 2


@pytest.mark.parametrize("scaling", ["tensor", "row", "block128"])
def test_non_finite_activations_stay_in_their_token(scaling):
    layer = layer_of(scaling)
    x = tokens(66)
    want = layer(x)
    x[3, 5], x[65, 7] = float("nan"), float("inf")
    got = layer(x)
    others = [i for i in range(66) if i not in (3, 65)]
    assert torch.equal(got[others], want[others])
    assert got[[3, 65]].isnan().all()


@kinds
def test_one_warm_up_serves_graphs_of_every_m(scaling, static):
    layer = layer_of(scaling, static)
    warmup(layer, tokens=[16])
    xs = [tokens(m, m) for m in TOKENS]
    graphs = [captured(lambda x=x: layer(x)) for x in xs]
    with torch.inference_mode():
        for seed in (1, 99):
            for (graph, out), x in zip(graphs, xs, strict=True):
                x.copy_(tokens(x.shape[0], seed))
                out.fill_(float("nan"))
                graph.replay()
                other = layer(tokens(x.shape[0], 7))  # eager work may not touch what a graph holds
                assert torch.equal(out, layer(x))
                assert not torch.equal(out, other)
            poison = [torch.full((1 << 24,), float("nan"), device="cuda") for _ in range(4)]
            del poison


@kinds
def test_a_chain_gives_the_same_bits_with_and_without_pdl(scaling, static, monkeypatch):
    """The quantiser starts before the GEMM ahead of it has finished, and must not read or write until it has."""
    backend = registry.instance("cublaslt")
    case = case_of(scaling, 64, n=K, static=static)
    layers = [backend.prepare(contract.make_weights(case, "cuda", seed)) for seed in range(6)]
    plans = []
    for setting in ("off", "auto"):
        monkeypatch.setenv("FP4DISPATCH_PDL", setting)
        plans.append(backend.plan(case.problem(), layers[0]))
    used = [plan.state.quantizers or plan.state.nvfp4 for plan in plans]
    assert not used[0].pdl
    assert used[1].pdl == (torch.cuda.get_device_capability() >= (9, 0))

    def chain(plan, x):
        for prepared in layers * 4:
            out = torch.empty(64, K, device="cuda", dtype=torch.bfloat16)
            backend.run(plan, prepared, x, out)
            x = out * (1 / 64)
        return x

    x = tokens(64)
    want = chain(plans[0], x)
    for _ in range(20):
        assert torch.equal(chain(plans[1], x), want)
    graph, out = captured(lambda: chain(plans[1], x))
    for _ in range(20):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, want)


def test_many_threads_and_streams_at_once():
    layers = [layer_of("row", seed=0), layer_of("row", True, seed=1), layer_of("tensor", True, seed=2)]
    backend_cases.many_threads_and_streams_at_once(layers, (1, 64, 129, 1000))


def test_raw_operands_with_one_scale_each_are_right():
    case_of("tensor", 1)
    a, b = (formats.fp8_quantize(tokens(m, m), "tensor") for m in (33, 144))
    exact = formats.fp8_dequantize(a.data, a.scale, "tensor").double()
    exact = exact @ formats.fp8_dequantize(b.data, b.scale, "tensor").double().t()
    got = ops.fp8_gemm(a.data, b.data, a.scale, b.scale, scaling="tensor", backend="cublaslt")
    assert float((got.double() - exact).norm() / exact.norm()) < 0.003
    backend, case = registry.instance("cublaslt"), case_of("tensor", 33, n=144)
    weights = contract.make_weights(case, "cuda", 1)
    prepared = backend.prepare(weights)
    out = torch.empty(33, 144, device="cuda", dtype=torch.bfloat16)
    backend.run(backend.plan(case.problem(), prepared), prepared, QuantizedActivation(a.data, a.scale), out)
    exact = formats.fp8_dequantize(a.data, a.scale, "tensor").double() @ contract.dequantised(weights).t()
    assert float((out.double() - exact).norm() / exact.norm()) < 0.003
