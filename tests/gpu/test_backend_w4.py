"""w4a16 and w4a8 on the GPU that is here: layers that switch by M, graphs, PDL chains, packed activations, raw calls.

That every backend keeps the contract, tile by tile, is in test_backends.py.
"""

from __future__ import annotations

import pytest
import torch

from fp4dispatch import formats, jit
from fp4dispatch.backends.base import LinearWeights
from fp4dispatch.backends.own.w4 import W4A8Backend, W4A16Backend
from fp4dispatch.errors import BackendUnsupportedError, CaptureError
from fp4dispatch.jit.proven import forget
from fp4dispatch.machine import system
from fp4dispatch.models.linear import FP4Linear
from fp4dispatch.models.replace import warmup
from fp4dispatch.problem import Problem
from fp4dispatch.problem.arch import Arch
from fp4dispatch.run import ops
from tests import w4_fake
from tests.gpu import layers
from tests.gpu.layers import ERROR, K, N, error, exact, tokens
from tests.gpu.layers import nvfp4_layer as layer
from tests.gpu.sm90 import needs_sm90

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def runs_here():
    reasons = W4A16Backend().supports(Problem("nvfp4_gemm", 1, N, K), system.current())
    if reasons:
        pytest.skip("; ".join(map(str, reasons)))


# -------------------------------------------------------------------------------------------------------------- layers


@needs_sm90
def test_a_layer_changes_with_m_and_holds_its_packed_weights_once(rules_alone):
    lin = layer()
    few, many = lin.bind().spec.routes
    assert [(r.backend, r.activation) for r in (few, many)] == [("w4a16", "bf16"), ("w4a8", "fp8")]
    assert (few.start, few.stop) == (many.start, many.stop)
    canonical = sum(t.numel() * t.element_size() for t in lin.state_dict().values())
    packed = (-(-N // 64)) * (-(-K // 64)) * 2304
    assert lin.nbytes() == canonical + packed - lin.dropped_nbytes()
    assert lin.dropped_nbytes() == N * K // 2 + N * K // 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ["any", "bf16", "fp8"])
def test_every_m_is_right(activation, dtype):
    if activation == "fp8" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("w4a8 needs an SM90 GPU")
    lin = layer(dtype=dtype, activation=activation)
    for m in (
        1,
        2,
        7,
        8,
        9,
        16,
        17,
        31,
        32,
        33,
        48,
        49,
        63,
        64,
        65,
        127,
        128,
        129,
        176,
        177,
        255,
        256,
        257,
        1000,
        2048,
        2049,
    ):
        x = tokens(m, dtype=dtype)
        route = lin.bind().spec.routes[lin.bind().spec.index(m)]
        assert route.backend.startswith("w4")
        assert error(lin(x), exact(lin, x)) < ERROR[route.activation], m


def test_fused_shards_keep_their_own_global_scales():
    fused = layers.fused_shards()
    spec = fused.bind().spec
    layers.shards_keep_their_own_global_scales(fused, lambda m: ERROR[spec.routes[spec.index(m)].activation])


def test_all_e4m3_scales_are_exact_subnormals_too():
    """One row per finite scale: Marlin's bfloat16 trick loses the smallest ones."""
    codes = torch.randint(256, (127, 128), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scale = torch.arange(127, dtype=torch.uint8).view(127, 1).expand(127, 16).contiguous().view(torch.float8_e4m3fn)
    ones = torch.ones(1)
    lin = FP4Linear.from_weights(
        LinearWeights("nvfp4_gemm", "nvfp4", 127, 256, codes.cuda(), scale.cuda(), ones.cuda(), (127,)),
        activation="bf16",
    )
    x = torch.zeros(64, 256, device="cuda", dtype=torch.bfloat16)
    x[torch.arange(64), torch.arange(0, 256, 4)] = 1  # one weight a product: nothing is rounded
    for m in (64, 8):
        assert torch.equal(lin(x[:m]).double(), exact(lin, x[:m]))


def test_the_same_bits_every_time():
    layers.the_same_bits_every_time(layer(4096, 4096, bias=False), (1, 16, 33, 200))


# ------------------------------------------------------------------------------------------------------ graphs and PDL


def test_graphs_of_every_m_replay_what_eager_computes():
    layers.graphs_of_every_m_replay_what_eager_computes(layer, (1, 16, 33, 64, 200))


@pytest.mark.parametrize(("activation", "n", "m"), [("any", 536, 16), ("bf16", 544, 100), ("fp8", 552, 100)])
def test_an_m_that_was_never_planned_is_refused_during_capture(activation, n, m):
    """Layers of one shape share their plans: nothing but ``warmup`` here has planned this one."""
    if activation == "fp8" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("w4a8 needs an SM90 GPU")
    lin = layer(n=n, activation=activation)
    warmup(lin, tokens=[m])
    spec = lin.bind().spec
    assert spec.planned() == [m]
    x = tokens(m + 1)
    with (
        pytest.raises(CaptureError, match=rf"warmup\(model, tokens=\[{m + 1}\]\)"),
        torch.no_grad(),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        lin(x)
    assert spec.planned() == [m]
    assert error(lin(x), exact(lin, x)) < ERROR[spec.routes[spec.index(m + 1)].activation]


@pytest.mark.parametrize("m", [1, 16, 33, 200])
def test_a_chain_under_pdl_gives_the_bits_of_one_without(m, monkeypatch):
    layers.a_chain_under_pdl_gives_the_bits_of_one_without(
        monkeypatch,
        layer,
        m,
        lambda plan: plan.state.gemm_pdl,
        expected=torch.cuda.get_device_capability() >= (9, 0),
    )


def test_a_layer_runs_right_after_its_weights_were_packed():
    """Kernels read weights before the kernel ahead of them has finished: preparation must not be that one."""
    x = tokens(1, 4096)
    for seed in range(10):
        lin = layer(4096, 4096, seed=seed, bias=False)
        y = lin(x)
        assert error(y, exact(lin, x)) < ERROR["bf16"]


# ------------------------------------------------------------------------------------------------- packed activations


@needs_sm90
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "k"), [(1, 16), (7, 80), (8, 128), (65, 1040), (300, 4096), (4, 20000)])
def test_packed_activations_are_the_documented_bytes(m, k, dtype):
    module = jit.load("w4_activations", "any", Arch(9, 0)).module
    x = tokens(m, k, dtype)
    x[0, 0] = 0
    packed = torch.full((-(-k // 128), -(-m // 8), 1024), 0xEE, dtype=torch.uint8, device="cuda")
    scale = torch.full((m,), torch.nan, device="cuda")
    module.w4_quantize_row(x, packed, scale, False)
    q = formats.fp8_quantize(x, "row")
    assert torch.equal(scale, q.scale)
    assert torch.equal(packed, w4_fake.pack_activation(q.data))


@needs_sm90
def test_non_finite_activations_stay_in_their_token():
    lin = layer(activation="fp8")
    x = tokens(70)
    want = lin(x)
    x[3, 5], x[68, 7] = float("nan"), float("inf")
    got = lin(x)
    others = [i for i in range(70) if i not in (3, 68)]
    assert torch.equal(got[others], want[others])
    assert got[[3, 68]].isnan().all()


# ---------------------------------------------------------------------------------------------------------- the policy


@needs_sm90
def test_pinned_activations_pin_the_backend_for_every_m():
    for activation, name in (("bf16", "w4a16"), ("fp8", "w4a8")):
        lin = layer(activation=activation)
        assert [route.backend for route in lin.bind().spec.routes] == [name]


def test_raw_operators_are_refused_by_name_and_go_elsewhere_by_policy():
    x, w = tokens(5, 64), tokens(48, 64)
    a, b = (formats.nvfp4_quantize(t, sf_layout="128x4") for t in (x, w))
    alpha = a.global_scale * b.global_scale
    with pytest.raises(BackendUnsupportedError, match="quantised already"):
        ops.nvfp4_gemm(a.data, b.data, a.sf, b.sf, alpha, backend="w4a16")
    assert ops.nvfp4_gemm(a.data, b.data, a.sf, b.sf, alpha).shape == (5, 48)


def test_marlin_means_w4a16():
    assert {route.backend for route in layer(backend="marlin").bind().spec.routes} == {"w4a16"}


@needs_sm90
def test_finished_kernels_are_proven_and_used_with_pdl():
    layer()(tokens(1))
    layer()(tokens(200))
    forget()
    assert ("w4_gemm", "sm_90") in system.current().proven
    for backend, m, activation in (
        (W4A16Backend(), 1, "bf16"),
        (W4A16Backend(), 200, "bf16"),
        (W4A8Backend(), 200, "fp8"),
    ):
        lin = layer(activation=activation)
        state = backend.plan(Problem("nvfp4_gemm", m, N, K, activation), backend.prepare(lin.weights())).state
        assert state.gemm_pdl
        assert state.quantize_pdl == (activation == "fp8")
