"""The kernel that writes NVFP4 weights out as e4m3, and w4a8 on top of it, on a GPU."""

from __future__ import annotations

import pytest
import torch

from fp4dispatch import FP4Linear, jit, warmup
from fp4dispatch.backends import registry
from fp4dispatch.backends.own import launch_choice
from fp4dispatch.backends.own.tensors.folding import fold_e4m3
from fp4dispatch.backends.own.tensors.w4_layout import pack_w4p
from fp4dispatch.problem import Problem
from tests import contract
from tests.gpu.sm90 import SM90, needs_sm90

pytestmark = [pytest.mark.gpu, needs_sm90]


@pytest.fixture(autouse=True)
def bounds_alone(monkeypatch):
    """The bounds of ``w4_tiles.toml`` choose the build: predicted times of this GPU may choose another one."""
    monkeypatch.setattr(launch_choice, "speeds_on", lambda device: None)


@pytest.fixture(scope="module")
def kernel():
    return jit.load("w4_to_e4m3", "any", SM90).module.w4_to_e4m3


def every_value(n, k):
    """Return codes and scales in which each code meets each scale that a checkpoint may hold."""
    generator = torch.Generator("cuda").manual_seed(0)
    codes = torch.randint(256, (n, k // 2), device="cuda", dtype=torch.uint8, generator=generator)
    scales = torch.arange(n * k // 16, device="cuda").remainder(127).to(torch.uint8).reshape(n, k // 16)
    return codes, scales.view(torch.float8_e4m3fn)


@pytest.mark.parametrize(("n", "k"), [(16, 16), (64, 64), (80, 112), (200, 1040), (4096, 4096)])
def test_every_weight_is_what_folding_defines(kernel, n, k):
    codes, scales = every_value(n, k)
    guard = torch.full((n * k + 64,), 0x55, device="cuda", dtype=torch.uint8)
    out = guard[: n * k].view(torch.float8_e4m3fn).view(n, k)
    kernel(pack_w4p(codes, scales), out, False)
    assert torch.equal(out.view(torch.uint8), fold_e4m3(codes, scales).view(torch.uint8))
    assert (guard[n * k :] == 0x55).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w, out: (w[:1], out), "w: size of dimension 0"),
        (lambda w, out: (w, out.view(torch.uint8)), "out: dtype is uint8"),
        (lambda w, out: (w, out[:, :16]), "out: not contiguous|ceil"),
        (lambda w, out: (w.cpu(), out), "CUDA"),
    ],
)
def test_wrong_arguments_are_refused(kernel, change, message):
    w = pack_w4p(*every_value(80, 112))
    out = torch.full((80, 112), 1.0, device="cuda").to(torch.float8_e4m3fn)
    with pytest.raises((ValueError, TypeError), match=message):
        kernel(*change(w, out), False)
    assert (out.float() == 1).all()


def writes_weights_out(m, n, k):
    wanted = Problem("nvfp4_gemm", m, n, k, "fp8")
    return ("w4_to_e4m3", "any") in registry.instance("w4a8").builds(wanted, torch.device("cuda"))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(2049, 512, 1040), (3001, 1040, 512), (4096, 1024, 4096)])
def test_many_tokens_meet_the_contract(m, n, k, bias):
    assert writes_weights_out(m, n, k)
    case = contract.Case("nvfp4_gemm", "nvfp4", "fp8", m, n, k, "bfloat16", bias)
    contract.check(registry.instance("w4a8"), case, "cuda")


def test_capture_replays_what_eager_computes():
    torch.manual_seed(0)
    linear = torch.nn.Linear(1024, 2048, device="cuda", dtype=torch.bfloat16)
    layer = FP4Linear.from_linear(linear, activation="fp8")
    assert writes_weights_out(2100, 2048, 1024)
    x = torch.randn(2100, 1024, device="cuda", dtype=torch.bfloat16)
    warmup(layer, tokens=[2100])
    with torch.inference_mode():
        want = layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = layer(x)
        got.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(got, want)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("m", [8, 300, 2100])
def test_no_layer_multiplies_the_weights_of_another(m, captured):
    """Layers of one size write their weights out to the same memory, right after one another."""
    n, k, backend = 4096, 4096, registry.instance("w4a8")
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    case = contract.Case("nvfp4_gemm", "nvfp4", "fp8", m, n, k, "bfloat16", False)
    held = [backend.prepare(contract.make_weights(case, "cuda", seed)) for seed in range(6)]
    plan = backend.plan_with(case.problem(), held[0], ("w4_to_e4m3", "any"))
    want = []
    for prepared in held:
        want.append(torch.full((m, n), torch.nan, device="cuda", dtype=torch.bfloat16))
        backend.run(plan, prepared, x, want[-1])
        torch.cuda.synchronize()
    assert not any(torch.equal(one, want[0]) for one in want[1:])

    def run(outs):
        for prepared, out in zip(held, outs, strict=True):
            backend.run(plan, prepared, x, out)

    outs = [torch.empty_like(out) for out in want]
    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            run(outs)
    for _ in range(50):
        for out in outs:
            out.fill_(torch.nan)
        graph.replay() if captured else run(outs)
        torch.cuda.synchronize()
        assert all(torch.equal(got, out) for got, out in zip(outs, want, strict=True))
