"""w8a16 on the GPU that is here: layers that switch by M on one copy of the weight, graphs, PDL chains, NaN.

That every backend keeps the contract, tile by tile, is in test_backends.py.
"""

from __future__ import annotations

import functools

import pytest
import torch

from fp4dispatch import formats
from fp4dispatch.backends.base import LinearWeights
from fp4dispatch.backends.own.w8a16 import W8A16Backend
from fp4dispatch.errors import BackendUnsupportedError
from fp4dispatch.jit.proven import forget
from fp4dispatch.machine import system
from fp4dispatch.models.linear import FP8Linear
from fp4dispatch.problem import Problem
from fp4dispatch.run import ops
from tests.gpu import layers
from tests.gpu.layers import ERROR, K, N, error, exact, tokens
from tests.gpu.sm90 import needs_sm90

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def runs_here():
    reasons = W8A16Backend().supports(Problem("fp8_gemm", 1, N, K, scaling="row"), system.current())
    if reasons:
        pytest.skip("; ".join(map(str, reasons)))


def layer(k=K, n=N, dtype=torch.bfloat16, bias=True, seed=0, scaling="row", **options):
    return FP8Linear.from_linear(layers.dense(k, n, dtype, bias, seed), scaling=scaling, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ["any", "bf16"])
@pytest.mark.parametrize(("n", "k"), [(N, K), (517, 1000)])
def test_every_m_is_right(activation, dtype, n, k):
    lin = layer(k, n, dtype=dtype, activation=activation)
    for m in (1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 64, 65, 100, 1000):
        x = tokens(m, k, dtype=dtype)
        bound = lin.bind()
        route = bound.spec.routes[bound.spec.index(m)]
        assert activation == "any" or route.backend == "w8a16"
        assert error(lin(x), exact(lin, x)) < ERROR[route.activation], m


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_nan_among_the_weights_makes_its_column_nan_and_no_other(scaling):
    backend, q = W8A16Backend(), formats.fp8_quantize(torch.randn(N, K, device="cuda"), scaling)
    q.data.view(torch.uint8)[[3, 519], [7, 1039]] = torch.tensor([0x7F, 0xFF], dtype=torch.uint8, device="cuda")
    prepared = backend.prepare(LinearWeights("fp8_gemm", scaling, N, K, q.data, q.scale))
    out = torch.zeros(5, N, device="cuda", dtype=torch.bfloat16)
    backend.run(backend.plan(Problem("fp8_gemm", 5, N, K, "bf16", scaling), prepared), prepared, tokens(5), out)
    assert out.isnan().all(0).nonzero().flatten().tolist() == [3, 519]
    assert int(out.isnan().sum()) == 10


def test_the_same_bits_every_time():
    layers.the_same_bits_every_time(layer(4096, 4096, bias=False), (1, 16, 32))


def test_graphs_of_every_m_replay_what_eager_computes():
    layers.graphs_of_every_m_replay_what_eager_computes(layer, (1, 16, 32, 33, 100))


@pytest.mark.parametrize("m", [1, 9, 16])
def test_a_chain_under_pdl_gives_the_bits_of_one_without(m, monkeypatch):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("auto takes another backend here")
    pinned = functools.partial(layer, activation="bf16")
    layers.a_chain_under_pdl_gives_the_bits_of_one_without(monkeypatch, pinned, m, lambda plan: plan.state.gemm_pdl)


def test_a_layer_runs_right_after_its_weights_came():
    """The kernel reads weights before the kernel ahead of it has finished: what writes them must not be that one."""
    x = tokens(1, 4096)
    for seed in range(10):
        lin = layer(4096, 4096, seed=seed, bias=False, activation="bf16")
        assert error(lin(x), exact(lin, x)) < ERROR["bf16"]
    other = layer(4096, 4096, seed=20, bias=False).state_dict()
    for seed in range(5):
        lin = layer(4096, 4096, seed=seed, bias=False, activation="bf16")
        lin(x)
        lin.load_state_dict(other)
        assert error(lin(x), exact(lin, x)) < ERROR["bf16"]


def test_raw_operators_are_refused_by_name_and_go_elsewhere_by_policy():
    a, b = (formats.fp8_quantize(tokens(rows, 64), "row") for rows in (5, 48))
    with pytest.raises(BackendUnsupportedError, match="activation is fp8, needs bf16"):
        ops.fp8_gemm(a.data, b.data, a.scale, b.scale, scaling="row", backend="w8a16")
    assert ops.fp8_gemm(a.data, b.data, a.scale, b.scale, scaling="row").shape == (5, 48)


@needs_sm90
def test_finished_kernels_are_proven_and_used_with_pdl():
    lin = layer(activation="bf16")
    lin(tokens(1))
    forget()
    assert ("w8_gemm", "sm_90") in system.current().proven
    backend = W8A16Backend()
    assert backend.plan(Problem("fp8_gemm", 1, N, K, "bf16", "row"), backend.prepare(lin.weights())).state.gemm_pdl
