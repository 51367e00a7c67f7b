"""What the W4 backends hand to the compiled kernels passes their own checks, which come before the first CUDA call.

On the CPU the last check, that tensors are on a GPU, is the one that fails: dtypes, shapes, strides and alignment were
accepted. Every number is tested with emulated kernels in tests/unit/test_backend_w4.py and on a GPU in tests/gpu.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fp4dispatch import formats
from fp4dispatch.backends.base import LinearWeights
from fp4dispatch.backends.own import compiled, launch_choice, scratch, w4
from fp4dispatch.machine import capture, libraries
from fp4dispatch.problem import Problem
from fp4dispatch.problem.arch import Arch
from tests import pdl_fake

pytest.importorskip("tvm_ffi")

pytestmark = [pytest.mark.compile, pytest.mark.skipif(libraries.nvcc()[0] is None, reason="needs nvcc")]

NO_GPU = r"is not on a CUDA device"


@pytest.fixture(autouse=True)
def seems_to_be_hopper(monkeypatch):
    for module in (compiled, launch_choice):
        monkeypatch.setattr(module, "gpu_of", lambda device: (Arch(9, 0), 132))
    pdl_fake.passes(monkeypatch)
    monkeypatch.setattr(capture, "stream_is_capturing", lambda: False)
    monkeypatch.setattr(scratch, "_stream", lambda index: 7)
    monkeypatch.setattr(scratch, "_arenas", {})


@pytest.mark.parametrize(
    ("backend", "m", "dtype"),
    [
        (w4.W4A16Backend(), 3, torch.bfloat16),
        (w4.W4A16Backend(), 300, torch.bfloat16),
        (w4.W4A8Backend(), 300, torch.bfloat16),
        pytest.param(w4.W4A8Backend(), 50, torch.float16, marks=pytest.mark.slow),
        pytest.param(w4.W4A16Backend(), 50, torch.float16, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
@pytest.mark.parametrize(("n", "shards"), [(128, (128,)), (101, (60, 41))])
def test_compiled_kernels_accept_what_the_backend_passes(backend, m, dtype, n, shards):
    k = 208
    q = formats.nvfp4_quantize(torch.randn(n, k))
    weights = LinearWeights("nvfp4_gemm", "nvfp4", n, k, q.data, q.sf, torch.ones(len(shards)), shards)
    prepared = backend.prepare(weights)
    activation = backend.activations["nvfp4_gemm"][0]
    problem = Problem("nvfp4_gemm", m, n, k, activation, out_dtype=str(dtype).removeprefix("torch."), bias=True)
    plan = backend.plan(problem, prepared)
    x, out = torch.randn(m, k).to(dtype), torch.empty(m, n, dtype=dtype)
    quantizes = plan.state.quantize is not compiled.no_quantizer
    assert quantizes == (backend.name == "w4a8")
    for quantize in (plan.state.quantize, lambda *operands: None):  # the quantiser's checks, then the GEMM's
        plan.state = replace(plan.state, quantize=quantize)
        with pytest.raises(ValueError, match=NO_GPU):
            backend.run(plan, prepared, x, out, torch.ones(n))
