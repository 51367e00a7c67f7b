"""The formats on a GPU: the same bits as on the CPU, no synchronisation, safe in CUDA graph capture."""

from __future__ import annotations

import pytest
import torch

from fp4dispatch import formats as f

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def inputs(dtype):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(300, 1040, generator=generator)
    x = x * torch.exp(3 * torch.randn(300, 1, generator=generator))
    x[0] = 0.0
    x[1, ::2] = -0.0
    x[2, 5], x[3, 40], x[4, 77] = float("nan"), float("inf"), -float("inf")
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    x[5:40] = ties[torch.randint(8, (35, 1040), generator=generator)]
    return x.to(dtype)


def everything(x, gs):
    q = f.nvfp4_quantize(x)
    s = f.nvfp4_quantize(x, gs, sf_layout="128x4")
    rows = f.expand_shards(torch.stack((gs, gs * 3)), (100, 200))
    return [
        *q,
        *s,
        *f.nvfp4_quantize_mse(x),
        f.nvfp4_dequantize(*q),
        f.nvfp4_dequantize(s.data, s.sf, rows, sf_layout="128x4", dtype=torch.bfloat16),
        *(part for scaling in f.FP8_SCALINGS for part in f.fp8_quantize(x, scaling)),
        *(f.fp8_dequantize(*f.fp8_quantize(x, scaling), scaling) for scaling in f.FP8_SCALINGS),
    ]


def raw(x):
    return x.contiguous().reshape(-1).view(torch.uint8)


def assert_same(got, want):
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape, i
        assert a.dtype == b.dtype, i
        a, b = a.cpu(), b.cpu()
        if a.is_floating_point() and a.element_size() > 1:  # the payload of a NaN is not part of the promise
            assert torch.equal(a.isnan(), b.isnan()), i
            a, b = a.nan_to_num(nan=0.0), b.nan_to_num(nan=0.0)
        assert torch.equal(raw(a), raw(b)), f"output {i}: {(raw(a) != raw(b)).sum()} bytes differ"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cuda_gives_the_bits_of_the_cpu(dtype):
    x, gs = inputs(dtype), torch.tensor(0.0123)
    assert_same(everything(x.cuda(), gs.cuda()), everything(x, gs))


def test_cuda_never_synchronises():
    x, gs = inputs(torch.bfloat16).cuda(), torch.tensor(0.0123).cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything(x, gs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_cuda_graph_replay_equals_eager():
    x, gs = inputs(torch.bfloat16).cuda(), torch.tensor(0.0123).cuda()
    everything(x, gs)  # kernels are loaded lazily, which capture does not allow
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = everything(x, gs)
    for factor in (1.0, 0.25):
        x.copy_(inputs(torch.bfloat16) * factor)
        graph.replay()
        torch.cuda.synchronize()
        assert_same(captured, everything(x, gs))


def test_more_than_two_to_the_31_elements():
    """flashinfer#4263: 32-bit addresses wrap in the last rows of a large matrix."""
    rows, cols = 2**17 + 3, 2**14 + 16
    if torch.cuda.get_device_properties(0).total_memory < 100e9:
        pytest.skip("needs a GPU with 100 GB of memory")
    x = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
    gs = torch.tensor(0.002, device="cuda")
    q, tail = f.nvfp4_quantize(x, gs), f.nvfp4_quantize(x[-200:], gs)
    assert torch.equal(q.data[-200:], tail.data)
    assert torch.equal(raw(q.sf[-200:]), raw(tail.sf))
    whole = f.nvfp4_dequantize(*q, dtype=torch.bfloat16)
    assert torch.equal(whole[-200:], f.nvfp4_dequantize(*tail, dtype=torch.bfloat16))
    del q, whole
    assert torch.equal(raw(f.fp8_quantize(x, "1x128").data[-200:]), raw(f.fp8_quantize(x[-200:], "1x128").data))
