"""FlashInfer's runners on a GPU: numbers, captured graphs, streams and threads, memory.

The first plan of flashinfer_deepgemm builds FlashInfer's SM90 module, about 100 s on 16 cores; each shape adds a kernel
of some seconds.
"""

from __future__ import annotations

import functools

import pytest
import torch

from fp4dispatch import formats
from fp4dispatch.backends import registry
from fp4dispatch.backends.libraries import flashinfer_package as package
from fp4dispatch.machine import system
from fp4dispatch.models.linear import FP8Linear
from fp4dispatch.run import routes
from tests import contract
from tests.gpu import backend_cases
from tests.gpu.backend_cases import K, N, tokens

pytestmark = pytest.mark.gpu

TOKENS = (1, 3, 64, 129, 1000)
KINDS = {"flashinfer_deepgemm": "block128", "flashinfer_cudnn": "tensor"}
"""What of FlashInfer's FP8 a Hopper GPU runs."""


def case_of(name, m, *, n=N, k=K, bias=False, raw="", static=False):
    """Return a case, or skip where this machine cannot run it."""
    case = contract.Case("fp8_gemm", KINDS[name], "fp8", m, n, k, "bfloat16", bias, static=static, raw=raw)
    why = contract.unsupported(registry.instance(name), case, system.current())
    if why:
        pytest.skip(f"{name}: {why}")
    return case


def layer_of(name, seed=0):
    case_of(name, 1)
    torch.manual_seed(seed)
    linear = torch.nn.Linear(K, N, device="cuda", dtype=torch.bfloat16)
    return FP8Linear.from_linear(linear, scaling=KINDS[name], backend=name)


def test_hopper_runs_what_it_should():
    """No skip below may hide that a runner does not run here: this fails where its parts are installed."""
    facts = system.current()
    if facts.flashinfer is None or facts.nvcc is None or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs flashinfer-python, nvcc and sm_90")
    for name, scaling in KINDS.items():
        if name == "flashinfer_cudnn" and facts.cudnn_frontend is None:
            continue
        case = contract.Case("fp8_gemm", scaling, "fp8", 16, N, K, "bfloat16", False)
        assert registry.instance(name).supports(case.problem(), facts) == ()


@pytest.mark.parametrize(("n", "k", "bias"), [(N, K, False), (1000, 1040, True)])
@pytest.mark.parametrize("m", TOKENS)
@pytest.mark.parametrize("name", KINDS)
def test_every_tile_is_right_and_every_run_the_same(name, m, n, k, bias):
    contract.check(registry.instance(name), case_of(name, m, n=n, k=k, bias=bias), "cuda")


@pytest.mark.parametrize("m", [3, 129])
@pytest.mark.parametrize("name", KINDS)
def test_activations_that_the_caller_quantised(name, m):
    contract.check(registry.instance(name), case_of(name, m, raw="linear"), "cuda")


def test_deepgemm_agrees_with_flashinfers_own_function():
    """Same weights, activations quantised by FlashInfer itself: they differ at ties, and no more."""
    name = "flashinfer_deepgemm"
    backend = registry.instance(name)
    weights = contract.make_weights(case_of(name, 1), "cuda", 1)
    prepared = backend.prepare(weights)
    for m in TOKENS:
        x, ours = tokens(m), torch.empty(m, N, device="cuda", dtype=torch.bfloat16)
        backend.run(routes.plan_for(backend, case_of(name, m).problem(), prepared), prepared, x, ours)
        theirs = torch.full_like(ours, float("nan"))
        package.gemm_module().fp8_blockscale_gemm_sm90(x, weights.weight, None, weights.scale, out=theirs)
        error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
        assert float(error) < 0.01, f"M={m}: {float(error):.3g}"


def test_deepgemm_needs_no_scratch_of_the_size_of_the_weight():
    layer = layer_of("flashinfer_deepgemm")
    x = tokens(64)
    with torch.inference_mode():
        layer(x)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        layer(x)
        torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < N * K / 2


@pytest.mark.parametrize("name", KINDS)
def test_replay_equals_eager_and_survives_what_is_planned_later(name):
    backend_cases.replay_equals_eager_and_survives_what_is_planned_later(
        functools.partial(layer_of, name), (1, 3, 64, 129), (33, 300), (1, 64)
    )


@pytest.mark.parametrize("name", KINDS)
def test_an_m_that_was_never_planned_is_refused_in_capture(name):
    backend_cases.an_m_that_was_never_planned_is_refused_in_capture(functools.partial(layer_of, name), 64)


@pytest.mark.parametrize("name", KINDS)
def test_many_threads_and_streams_at_once(name):
    backend_cases.many_threads_and_streams_at_once([layer_of(name, seed) for seed in range(2)], (1, 64, 129))


@pytest.mark.parametrize("name", KINDS)
def test_launches_go_to_the_current_stream(name):
    backend_cases.launches_go_to_the_current_stream(functools.partial(layer_of, name), 64)


@pytest.mark.parametrize("name", KINDS)
def test_no_call_costs_memory(name):
    backend_cases.no_call_costs_memory(functools.partial(layer_of, name), (3, 64))


def test_a_tail_of_n_gets_its_own_block_of_scales():
    """N = 192 has a half block: its scale must reach its 64 columns, and no others."""
    name = "flashinfer_deepgemm"
    backend, case = registry.instance(name), case_of(name, 7, n=192, k=384)
    weights = contract.make_weights(case, "cuda", 1)
    weights.scale[1] *= 1024
    prepared = backend.prepare(weights)
    x, a = contract.make_activation(case, weights, "cuda", 2)
    out = torch.full((7, 192), float("nan"), device="cuda", dtype=torch.bfloat16)
    backend.run(routes.plan_for(backend, case.problem(), prepared), prepared, x, out)
    expected = a @ contract.dequantised(weights).t()
    for columns in (slice(0, 128), slice(128, 192)):
        part = expected[:, columns]
        assert float((out[:, columns].double() - part).norm() / part.norm()) < 0.01
    assert weights.scale.shape == (formats.round_up(192, 128) // 128, 3)
