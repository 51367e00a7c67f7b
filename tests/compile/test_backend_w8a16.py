"""What w8a16 hands to the compiled kernel passes its own checks, which come before the first CUDA call.

On the CPU the last check, that tensors are on a GPU, is the one that fails: dtypes, shapes, strides and alignment were
accepted. Every number is tested with an emulated kernel in tests/unit/test_backend_w8a16.py and on a GPU in tests/gpu.
"""

from __future__ import annotations

import pytest
import torch

from fp4dispatch import formats
from fp4dispatch.backends.base import LinearWeights
from fp4dispatch.backends.own import compiled, launch_choice, w8a16
from fp4dispatch.machine import libraries
from fp4dispatch.problem import Problem
from fp4dispatch.problem.arch import SM90
from tests import pdl_fake

pytest.importorskip("tvm_ffi")

pytestmark = [pytest.mark.compile, pytest.mark.skipif(libraries.nvcc()[0] is None, reason="needs nvcc")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize(("n", "k"), [(128, 208), (101, 208), (104, 100)])
def test_the_compiled_kernel_accepts_what_the_backend_passes(monkeypatch, n, k, scaling, dtype):
    for module in (compiled, launch_choice):
        monkeypatch.setattr(module, "gpu_of", lambda device: (SM90, 132))
    pdl_fake.passes(monkeypatch)
    backend = w8a16.W8A16Backend()
    q = formats.fp8_quantize(torch.randn(n, k), scaling)
    prepared = backend.prepare(LinearWeights("fp8_gemm", scaling, n, k, q.data, q.scale))
    problem = Problem("fp8_gemm", 3, n, k, "bf16", scaling, str(dtype).removeprefix("torch."), bias=True)
    plan = backend.plan(problem, prepared)
    for bias in (None, torch.ones(n), torch.ones(n, dtype=dtype)):
        with pytest.raises(ValueError, match="is not on a CUDA device"):
            backend.run(plan, prepared, torch.randn(3, k).to(dtype), torch.empty(3, n, dtype=dtype), bias)
