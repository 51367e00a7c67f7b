"""Our quantisers as the plans of cuDNN, FlashInfer and cuBLASLt call them, on a GPU: the bits of formats, graphs.

NVFP4's needs no Blackwell; the GEMMs behind it do. The numbers of whole layers: tests/gpu/test_backends.py.
"""

from __future__ import annotations

import pytest
import torch

from fp4dispatch import formats
from fp4dispatch.backends.libraries.cudnn import m_bucket
from fp4dispatch.backends.own.tensors import quantizers
from fp4dispatch.backends.own.tensors.quantizers import ToScratch
from fp4dispatch.machine import system
from tests import quantizer_fake

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
KINDS = (("tensor", False), ("tensor", True), ("row", False), ("block128", False), ("nvfp4", False), ("nvfp4", True))
TOKENS = (1, 3, 64, 129, 1000, 2049)
KP = 2048
kinds = pytest.mark.parametrize(("scaling", "static"), KINDS)


def pair(scaling, static, rows, monkeypatch):
    """Return what quantises with our kernels, and what does with torch's operations."""
    ours = ToScratch(CUDA, scaling, KP, static=static, rows=rows)
    if ours.note and system.current().nvcc is None:
        pytest.skip(ours.note)
    assert ours.note == ""
    assert (ours._fp8 or ours._nvfp4) is not None
    with monkeypatch.context() as patch:
        quantizer_fake.without(patch, "off")
        return ours, ToScratch(CUDA, scaling, KP, static=static, rows=rows)


def tokens(m, k=KP, dtype=torch.bfloat16, seed=0):
    x = torch.randn(m, k, device="cuda", generator=torch.Generator("cuda").manual_seed(m + seed)).to(dtype)
    x[m // 2, : k // 2] = 0
    return x


def scale_for(scaling, static, x):
    if static:
        return torch.tensor(0.01, device="cuda")
    return formats.nvfp4_global_scale(x) if scaling == "nvfp4" else None


def assert_same(got, want, m, scaling, static):
    assert got.data.shape == want.data.shape
    assert torch.equal(got.data[:m].view(torch.uint8), want.data[:m].view(torch.uint8))
    if scaling == "nvfp4":
        assert torch.equal(got.scale.view(torch.uint8), want.scale.view(torch.uint8))  # its padding too
    else:
        assert torch.equal(got.scale if static else got.scale[:m], want.scale if static else want.scale[:m])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [lambda m: m, lambda m: formats.round_up(m, 4), m_bucket], ids=["m", "4", "bucket"])
@kinds
def test_the_bits_are_those_of_formats(scaling, static, rows, dtype, monkeypatch):
    ours, plain = pair(scaling, static, rows, monkeypatch)
    for m in TOKENS:
        for k in (KP, KP - 16):
            x = tokens(m, k, dtype)
            scale = scale_for(scaling, static, x)
            assert_same(ours(x, scale), plain(x, scale), m, scaling, static)


@kinds
def test_non_finite_values_and_odd_strides(scaling, static, monkeypatch):
    ours, plain = pair(scaling, static, m_bucket, monkeypatch)
    wide = tokens(129, 2 * KP + 1)
    wide[3, 5], wide[128, 7] = float("nan"), float("inf")
    for x in (wide[:, 1 : KP + 1], wide[:, :-1:2]):
        scale = scale_for(scaling, static, x)
        assert_same(ours(x, scale), plain(x, scale), 129, scaling, static)


@kinds
def test_a_graph_has_scratch_of_its_own(scaling, static, monkeypatch):
    ours, plain = pair(scaling, static, m_bucket, monkeypatch)
    x = tokens(64)
    scale = torch.tensor(0.01, device="cuda") if static or scaling == "nvfp4" else None
    ours(x, scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = ours(x, scale)
    eager = ours(tokens(64, seed=5), scale)
    assert eager.data.data_ptr() != held.data.data_ptr()
    for seed in range(3):
        x.copy_(tokens(64, seed=seed))
        held.data.view(torch.uint8).fill_(0xA5)
        graph.replay()
        other = ours(tokens(64, seed=9), scale)  # eager work may not touch what a graph holds
        assert_same(held, plain(x, scale), 64, scaling, static)
        assert not torch.equal(other.data.view(torch.uint8), held.data.view(torch.uint8))


def test_the_kernel_for_nvfp4_runs_on_every_gpu_that_has_a_target():
    found, why = quantizers.load_nvfp4(CUDA)
    if found is None and system.current().nvcc is None:
        pytest.skip(why)
    assert found is not None, why
