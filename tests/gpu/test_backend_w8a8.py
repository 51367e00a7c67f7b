"""w8a8 on the GPU that is here: layers on one copy of the weight, static scales, graphs, PDL chains, raw calls.

That every backend keeps the contract, tile by tile, is in test_backends.py.
"""

from __future__ import annotations

import pytest
import torch

from fp4dispatch import formats, ops, system
from fp4dispatch.backends.base import LinearWeights
from fp4dispatch.backends.w8a8 import W8A8Backend
from fp4dispatch.errors import BackendUnsupportedError
from fp4dispatch.jit.proven import forget
from fp4dispatch.linear import FP8Linear
from fp4dispatch.problem import Problem
from tests.gpu import backend_cases, layers
from tests.gpu.layers import ERROR, K, N, error, exact, tokens
from tests.gpu.sm90 import needs_sm90

pytestmark = [pytest.mark.gpu, needs_sm90]

SIZES = (1, 16, 17, 33, 64, 65, 128, 200)
"""Tokens of both kernels."""


@pytest.fixture(autouse=True)
def runs_here():
    reasons = W8A8Backend().supports(Problem("fp8_gemm", 17, N, K, "fp8", "row"), system.current())
    if reasons:
        pytest.skip("; ".join(map(str, reasons)))


def layer(k=K, n=N, dtype=torch.bfloat16, bias=True, seed=0, scaling="row", **options):
    return FP8Linear.from_linear(
        layers.dense(k, n, dtype, bias, seed), scaling=scaling, **({"activation": "fp8"} | options)
    )


def case(seed, backend="w8a8"):
    return layer(backend_cases.K, backend_cases.N, seed=seed, backend=backend)


def weights(scaling="row", static=None, n=N, k=K, seed=0):
    torch.manual_seed(seed)
    q = formats.fp8_quantize(torch.randn(n, k, device="cuda"), scaling)
    return LinearWeights("fp8_gemm", scaling, n, k, q.data, q.scale, input_scale=static)


def run(w, x, bias=None):
    backend = W8A8Backend()
    prepared = backend.prepare(w)
    dtype = str(x.dtype).removeprefix("torch.")
    out = torch.full((x.shape[0], w.n), torch.nan, device="cuda", dtype=x.dtype)
    asked = Problem("fp8_gemm", x.shape[0], w.n, w.k, "fp8", w.scaling, dtype, bias is not None)
    backend.run(backend.plan(asked, prepared), prepared, x, out, bias)
    return out


# -------------------------------------------------------------------------------------------------------------- layers


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_a_layer_changes_with_m_and_holds_its_weight_once(scaling):
    lin = layer(scaling=scaling, n=528, activation="any")
    found = lin.bind().spec.routes
    assert [(r.m_max, r.backend, r.activation) for r in found[:2]] == [(8, "w8a16", "bf16"), (1024, "w8a8", "fp8")]
    assert [(r.backend, r.activation) for r in found[2:]] == [("cublaslt", "fp8")]
    held = {t.data_ptr() for t in lin.bind().tensors if t.dtype == torch.float8_e4m3fn}
    assert held == {lin.weight.data_ptr()}
    assert lin.nbytes() < lin.weight.numel() + 16 * 528 + 64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ["any", "fp8"])
@pytest.mark.parametrize(("n", "k"), [(N, K), (517, 1000), (72, 80)])
def test_every_m_is_right(activation, dtype, n, k):
    lin = layer(k, n, dtype=dtype, activation=activation)
    for m in (1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 300, 1000, 1025):
        x = tokens(m, k, dtype=dtype)
        spec = lin.bind().spec
        route = spec.routes[spec.index(m)]
        if 8 < m <= 1024 or (activation == "fp8" and m <= 8):
            assert route.backend == "w8a8"
        assert error(lin(x), exact(lin, x)) < ERROR[route.activation], m


@pytest.mark.parametrize("m", [1, 17, 64, 65, 130, 4096])
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_who_names_it_gets_it_for_every_m(scaling, m):
    lin = layer(scaling=scaling, backend="w8a8")
    assert {route.backend for route in lin.bind().spec.routes} == {"w8a8"}
    x = tokens(m)
    assert error(lin(x), exact(lin, x)) < ERROR["fp8"]


@pytest.mark.parametrize("m", [33, 140])
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_a_static_scale_is_used_and_saturates(scaling, m):
    static = torch.tensor(0.01, device="cuda")
    w = weights(scaling, static)
    x = tokens(m)
    x[4] *= 100
    q = formats.fp8_quantize(x, "tensor", static)
    want = (q.data.double() * static.double()) @ (w.weight.double() * w.scale.double().reshape(-1, 1)).t()
    assert error(run(w, x), want) < 0.004
    rows = [i for i in range(m) if i != 4]
    assert error(run(w, x)[4], want[4]) < 0.004
    assert error(run(weights(scaling), x)[rows], want[rows]) < 0.06  # scaled on their own: other roundings, same values


@pytest.mark.parametrize("m", [20, 130])
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_nan_among_the_weights_makes_its_column_nan_and_no_other(scaling, m):
    w = weights(scaling)
    w.weight.view(torch.uint8)[[3, 519], [7, 1039]] = torch.tensor([0x7F, 0xFF], dtype=torch.uint8, device="cuda")
    out = run(w, tokens(m))
    assert out.isnan().all(0).nonzero().flatten().tolist() == [3, 519]
    assert int(out.isnan().sum()) == 2 * m


@pytest.mark.parametrize("m", [40, 140])
def test_non_finite_activations_stay_in_their_token(m):
    w, x = weights(), tokens(m)
    want = run(w, x)
    x[3, 5], x[38, 7] = float("nan"), float("inf")
    got = run(w, x)
    others = [i for i in range(m) if i not in (3, 38)]
    assert torch.equal(got[others], want[others])
    assert got[[3, 38]].isnan().all()


def test_the_same_bits_every_time():
    layers.the_same_bits_every_time(layer(4096, 4096, bias=False), SIZES)


# ------------------------------------------------------------------------------------------------------ graphs and PDL


def test_graphs_of_every_m_replay_what_eager_computes():
    layers.graphs_of_every_m_replay_what_eager_computes(layer, SIZES)


def test_a_replay_equals_eager_and_survives_what_is_planned_later():
    backend_cases.replay_equals_eager_and_survives_what_is_planned_later(case, SIZES, (9, 63, 100), (5, 40, 300))


def test_an_m_that_was_never_planned_is_refused_in_capture():
    backend_cases.an_m_that_was_never_planned_is_refused_in_capture(case, 40, 130)


def test_many_threads_and_streams_at_once():
    backend_cases.many_threads_and_streams_at_once([case(0), case(1)], (1, 17, 64, 65, 200))


@pytest.mark.parametrize("m", [33, 130])
def test_launches_go_to_the_current_stream(m):
    backend_cases.launches_go_to_the_current_stream(case, m)


def test_no_call_costs_memory():
    backend_cases.no_call_costs_memory(case, SIZES)


@pytest.mark.parametrize("m", [1, 17, 32, 64, 65, 200, 512])
def test_a_chain_under_pdl_gives_the_bits_of_one_without(m, monkeypatch):
    layers.a_chain_under_pdl_gives_the_bits_of_one_without(
        monkeypatch,
        layer,
        m,
        lambda plan: plan.state.gemm_pdl and plan.state.quantize_pdl if plan.backend == "w8a8" else None,
    )


@pytest.mark.parametrize("m", [17, 130])
def test_a_layer_runs_right_after_its_weights_came(m):
    """The kernels read weights before the kernel ahead has finished: what writes them must not be that one."""
    x = tokens(m, 4096)
    for seed in range(10):
        lin = layer(4096, 4096, seed=seed, bias=False)
        assert error(lin(x), exact(lin, x)) < ERROR["fp8"]
    other = layer(4096, 4096, seed=20, bias=False).state_dict()
    for seed in range(5):
        lin = layer(4096, 4096, seed=seed, bias=False)
        lin(x)
        lin.load_state_dict(other)
        assert error(lin(x), exact(lin, x)) < ERROR["fp8"]


# ---------------------------------------------------------------------------------------------------------- the policy


def test_raw_operators_are_refused_by_name_and_go_elsewhere_by_policy():
    a, b = (formats.fp8_quantize(tokens(rows, 64), "row") for rows in (5, 48))
    with pytest.raises(BackendUnsupportedError, match="quantised already"):
        ops.fp8_gemm(a.data, b.data, a.scale, b.scale, scaling="row", backend="w8a8")
    assert ops.fp8_gemm(a.data, b.data, a.scale, b.scale, scaling="row").shape == (5, 48)


@pytest.mark.parametrize("m", [17, 130])
def test_finished_kernels_are_proven_and_used_with_pdl(m):
    lin = layer()
    lin(tokens(m))
    forget()
    assert ("w8_gemm", "sm_90") in system.current().proven
    backend = W8A8Backend()
    state = backend.plan(Problem("fp8_gemm", m, N, K, "fp8", "row"), backend.prepare(lin.weights())).state
    assert state.gemm_pdl
    assert state.quantize_pdl
