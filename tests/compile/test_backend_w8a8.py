"""What w8a8 hands to the compiled kernels passes their own checks, which come before the first CUDA call.

On the CPU the last check, that tensors are on a GPU, is the one that fails: dtypes, shapes, strides and alignment were
accepted. Every number is tested with emulated kernels in tests/unit/test_backend_w8a8.py and on a GPU in tests/gpu.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from fp4dispatch import formats
from fp4dispatch.backends.base import LinearWeights
from fp4dispatch.backends.own import compiled, launch_choice, scratch, w8a8
from fp4dispatch.machine import capture, libraries
from fp4dispatch.problem import Problem
from fp4dispatch.problem.arch import SM90
from tests import pdl_fake

pytest.importorskip("tvm_ffi")

pytestmark = [pytest.mark.compile, pytest.mark.skipif(libraries.nvcc()[0] is None, reason="needs nvcc")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("scaling", "static"),
    [
        *itertools.product(("tensor", "row"), (None, 0.02)),
        pytest.param("block128", None, marks=pytest.mark.slow),  # builds of its own
    ],
)
@pytest.mark.parametrize(("n", "k"), [(128, 208), (101, 208), (104, 100), (264, 400)])
def test_the_compiled_kernels_accept_what_the_backend_passes(monkeypatch, n, k, scaling, static, dtype):
    for module in (compiled, launch_choice):
        monkeypatch.setattr(module, "gpu_of", lambda device: (SM90, 132))
    pdl_fake.passes(monkeypatch)
    monkeypatch.setattr(capture, "stream_is_capturing", lambda: False)
    monkeypatch.setattr(scratch, "_stream", lambda index: 7)
    monkeypatch.setattr(scratch, "_arenas", {})
    backend = w8a8.W8A8Backend()
    q = formats.fp8_quantize(torch.randn(n, k), scaling)
    input_scale = None if static is None else torch.tensor(static)
    prepared = backend.prepare(LinearWeights("fp8_gemm", scaling, n, k, q.data, q.scale, input_scale=input_scale))
    for m in (1, 19, 64, 65, 300):
        problem = Problem("fp8_gemm", m, n, k, "fp8", scaling, str(dtype).removeprefix("torch."), bias=True)
        plan = backend.plan(problem, prepared)
        quantised = replace(plan.state, quantize=lambda *_: None)
        for state in (plan.state, quantised):  # the second comes to the GEMM
            plan.state = state
            for bias in (None, torch.ones(n), torch.ones(n, dtype=dtype)):
                with pytest.raises(ValueError, match="x: is not on a CUDA device"):
                    backend.run(plan, prepared, torch.randn(m, k).to(dtype), torch.empty(m, n, dtype=dtype), bias)
