"""w8a8 on the GPU that is here: layers on one copy of the weight, static scales, graphs, PDL chains, raw calls.

That every backend keeps the contract, tile by tile, is in test_backends.py.
"""

from __future__ import annotations

import functools

import pytest
import torch

from fp4dispatch import formats
from fp4dispatch.backends.base import LinearWeights
from fp4dispatch.backends.own.w8a8 import W8A8Backend
from fp4dispatch.errors import BackendUnsupportedError
from fp4dispatch.jit.proven import forget
from fp4dispatch.machine import libraries, system
from fp4dispatch.models.linear import FP8Linear
from fp4dispatch.problem import Problem
from fp4dispatch.run import ops, routes
from tests import bounds
from tests.gpu import backend_cases, layers
from tests.gpu.layers import ERROR, K, N, error, exact, tokens
from tests.gpu.sm90 import needs_sm90

pytestmark = [pytest.mark.gpu, needs_sm90, pytest.mark.usefixtures("rules_alone")]

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


blocks = functools.partial(layer, scaling="block128")
both = pytest.mark.parametrize("made", [layer, blocks], ids=["row", "block128"])
"""Each has builds of its own."""


def case(seed, backend="w8a8"):
    return layer(backend_cases.K, backend_cases.N, seed=seed, backend=backend)


def case_of_blocks(seed):
    return blocks(backend_cases.K, backend_cases.N, seed=seed, backend="w8a8")


cases = pytest.mark.parametrize("made", [case, case_of_blocks], ids=["row", "block128"])


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


FEW, REST = (bounds.W8A16, "w8a16", "bf16"), routes.LARGEST_M
WANTED = {
    "rules_alone": [FEW, (bounds.W8A8_BY_RULES, "w8a8", "fp8"), (REST, "cublaslt", "fp8")],
    "cublaslt_for_many": [FEW, (bounds.W8A8, "w8a8", "fp8"), (REST, "cublaslt", "fp8")],
}


@pytest.mark.parametrize("choices", WANTED)
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_a_layer_changes_with_m_and_holds_its_weight_once(scaling, choices, request):
    request.getfixturevalue(choices)
    lin = layer(scaling=scaling, n=528, activation="any")
    assert [(r.m_max, r.backend, r.activation) for r in lin.bind().spec.routes] == WANTED[choices]
    held = {t.data_ptr() for t in lin.bind().tensors if t.dtype == torch.float8_e4m3fn}
    assert held == {lin.weight.data_ptr()}
    assert lin.nbytes() < lin.weight.numel() + 16 * 528 + 64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ["any", "fp8"])
@pytest.mark.parametrize(("n", "k"), [(N, K), (517, 1000), (72, 80)])
def test_every_m_is_right(activation, dtype, n, k, cublaslt_for_many):
    lin = layer(k, n, dtype=dtype, activation=activation)
    for m in (1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 300, 1000, bounds.W8A8, bounds.W8A8 + 1, 4096):
        x = tokens(m, k, dtype=dtype)
        spec = lin.bind().spec
        route = spec.routes[spec.index(m)]
        if bounds.W8A16 < m <= bounds.W8A8 or (activation == "fp8" and m <= bounds.W8A16):
            assert route.backend == "w8a8"
        assert error(lin(x), exact(lin, x)) < ERROR[route.activation], m


def test_a_layer_with_block_scales_has_it_for_any_number_of_tokens_and_holds_its_weight_once():
    lin = blocks(n=528, activation="any")
    found = lin.bind().spec.routes
    assert [(r.backend, r.activation) for r in found] == [("w8a8", "fp8")]
    held = lin.bind().tensors
    assert {t.data_ptr() for t in held if t.dtype == torch.float8_e4m3fn} == {lin.weight.data_ptr()}
    assert {t.data_ptr() for t in held if t.dtype == torch.float32} == {lin.weight_scale_inv.data_ptr()}
    for m in (1, 64, 65, 128, 129, 1000):
        x = tokens(m)
        assert error(lin(x), exact(lin, x)) < ERROR["fp8"], m


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(N, K), (517, 1000), (72, 80), (128, 128)])
def test_every_m_is_right_under_block_scales(dtype, n, k):
    lin = blocks(k, n, dtype=dtype, backend="w8a8")
    for m in (1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 300, 1000):
        x = tokens(m, k, dtype=dtype)
        assert error(lin(x), exact(lin, x)) < ERROR["fp8"], m


@pytest.mark.skipif(libraries.cutlass() is None, reason="needs the CUTLASS headers")
@pytest.mark.parametrize("m", [1, 64, 65, 128])
@pytest.mark.parametrize("n", [N, 136])
def test_results_under_block_scales_are_those_of_cutlass_but_for_sums(n, m):
    """The same codes by the same scales."""
    ours, theirs = (blocks(n=n, backend=backend) for backend in ("w8a8", "cutlass"))
    x = tokens(m)
    assert error(ours(x), theirs(x).double()) < 0.004


@pytest.mark.parametrize("m", [1, 17, 64, 65, 97, 130, 193, 4096])
@pytest.mark.parametrize("scaling", ["tensor", "row", "block128"])
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
@pytest.mark.parametrize("scaling", ["tensor", "row", "block128"])
def test_nan_among_the_weights_makes_its_column_nan_and_no_other(scaling, m):
    w = weights(scaling)
    w.weight.view(torch.uint8)[[3, 519], [7, 1039]] = torch.tensor([0x7F, 0xFF], dtype=torch.uint8, device="cuda")
    out = run(w, tokens(m))
    assert out.isnan().all(0).nonzero().flatten().tolist() == [3, 519]
    assert int(out.isnan().sum()) == 2 * m


@pytest.mark.parametrize("m", [40, 140])
@pytest.mark.parametrize("scaling", ["row", "block128"])
def test_non_finite_activations_stay_in_their_token(scaling, m):
    w, x = weights(scaling), tokens(m)
    want = run(w, x)
    x[3, 5], x[38, 7] = float("nan"), float("inf")
    got = run(w, x)
    others = [i for i in range(m) if i not in (3, 38)]
    assert torch.equal(got[others], want[others])
    assert got[[3, 38]].isnan().all()


@both
def test_the_same_bits_every_time(made):
    layers.the_same_bits_every_time(made(4096, 4096, bias=False), SIZES)


# ------------------------------------------------------------------------------------------------------ graphs and PDL


@both
def test_graphs_of_every_m_replay_what_eager_computes(made):
    layers.graphs_of_every_m_replay_what_eager_computes(made, SIZES)


@cases
def test_a_replay_equals_eager_and_survives_what_is_planned_later(made):
    backend_cases.replay_equals_eager_and_survives_what_is_planned_later(made, SIZES, (9, 63, 100), (5, 40, 300))


@cases
def test_an_m_that_was_never_planned_is_refused_in_capture(made):
    backend_cases.an_m_that_was_never_planned_is_refused_in_capture(made, 40, 130)


@cases
def test_many_threads_and_streams_at_once(made):
    backend_cases.many_threads_and_streams_at_once([made(0), made(1)], (1, 17, 64, 65, 200))


@cases
@pytest.mark.parametrize("m", [33, 130])
def test_launches_go_to_the_current_stream(m, made):
    backend_cases.launches_go_to_the_current_stream(made, m)


@cases
def test_no_call_costs_memory(made):
    backend_cases.no_call_costs_memory(made, SIZES)


@both
@pytest.mark.parametrize("m", [1, 17, 32, 64, 65, 200, 512])
def test_a_chain_under_pdl_gives_the_bits_of_one_without(m, made, monkeypatch):
    layers.a_chain_under_pdl_gives_the_bits_of_one_without(
        monkeypatch,
        functools.partial(made, backend="w8a8"),
        m,
        lambda plan: plan.state.gemm_pdl and plan.state.quantize_pdl if plan.backend == "w8a8" else None,
    )


@both
@pytest.mark.parametrize("m", [17, 130])
def test_a_layer_runs_right_after_its_weights_came(m, made):
    """The kernels read weights before the kernel ahead has finished: what writes them must not be that one."""
    x = tokens(m, 4096)
    for seed in range(10):
        lin = made(4096, 4096, seed=seed, bias=False)
        assert error(lin(x), exact(lin, x)) < ERROR["fp8"]
    other = made(4096, 4096, seed=20, bias=False).state_dict()
    for seed in range(5):
        lin = made(4096, 4096, seed=seed, bias=False)
        lin(x)
        lin.load_state_dict(other)
        assert error(lin(x), exact(lin, x)) < ERROR["fp8"]


# ---------------------------------------------------------------------------------------------------------- the policy


def test_raw_operators_are_refused_by_name_and_go_elsewhere_by_policy():
    a, b = (formats.fp8_quantize(tokens(rows, 64), scaling) for rows, scaling in ((5, "1x128"), (48, "block128")))
    with pytest.raises(BackendUnsupportedError, match="quantised already"):
        ops.fp8_gemm(a.data, b.data, a.scale, b.scale, scaling="block128", backend="w8a8")
    a, b = (formats.fp8_quantize(tokens(rows, 64), "row") for rows in (5, 48))
    with pytest.raises(BackendUnsupportedError, match="quantised already"):
        ops.fp8_gemm(a.data, b.data, a.scale, b.scale, scaling="row", backend="w8a8")
    assert ops.fp8_gemm(a.data, b.data, a.scale, b.scale, scaling="row").shape == (5, 48)


@both
@pytest.mark.parametrize("m", [17, 130])
def test_finished_kernels_are_proven_and_used_with_pdl(m, made):
    lin = made(backend="w8a8")
    lin(tokens(m))
    forget()
    assert ("w8_gemm", "sm_90") in system.current().proven
    backend = W8A8Backend()
    state = backend.plan(Problem("fp8_gemm", m, N, K, "fp8", lin.scaling), backend.prepare(lin.weights())).state
    assert state.gemm_pdl
    assert state.quantize_pdl
