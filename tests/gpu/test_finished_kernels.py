"""A GPU without a compiler and with a few finished kernels: layers run on these, the rest runs on libraries."""

from __future__ import annotations

import shutil

import pytest

from fp4dispatch import jit
from tests import kernel_wheel
from tests.gpu.sm90 import needs_sm90

pytestmark = [pytest.mark.gpu, needs_sm90]

LAYER = """
import torch, fp4dispatch
from fp4dispatch.jit import kernels
torch.manual_seed(0)
linear = torch.nn.Linear(1024, 512, bias=False, device="cuda", dtype=torch.bfloat16)
ours, reference = (
    fp4dispatch.FP4Linear.from_linear(linear, activation=a, backend=b) for a, b in (("any", None), ("fp8", "reference"))
)
print({route.backend for route in ours.bind().spec.routes})
for m in (1, 48, 300, 5000):
    x = torch.randn(m, 1024, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        got, wanted = ours(x).float(), reference(x).float()
    error = ((got - wanted).norm() / wanted.norm()).item()
    assert error < 0.03, (m, error)  # w4a8 rounds weights to e4m3 once more
print(kernels.builds_done(), sorted(b.entry.name for b in kernels.loaded()))
"""

RAW = """
import torch, fp4dispatch
torch.manual_seed(0)
(a, a_scale), (b, b_scale) = (
    fp4dispatch.fp8_quantize(torch.randn(rows, 512, device="cuda"), "row") for rows in (8, 256)
)
wanted = (a.float() * a_scale.reshape(-1, 1)) @ (b.float() * b_scale.reshape(-1, 1)).T
for dtype in (torch.bfloat16, torch.float16):
    out = fp4dispatch.fp8_gemm(a, b, a_scale, b_scale, scaling="row", out_dtype=dtype)
    assert ((out.float() - wanted).norm() / wanted.norm()).item() < 4e-3, dtype  # one rounding
    name = str(dtype).removeprefix("torch.")
    choice = fp4dispatch.explain("fp8_gemm", 8, 256, 512, scaling="row", out_dtype=name, raw=True)
    print(choice.verdict("cutlass").can_run)
"""


def carried(folder, *builds):
    """Return a cache that has these kernels alone."""
    for kernel, build in builds:
        entry = jit.build(kernel, build, "90a").entry
        shutil.copytree(entry.folder, folder / "kernels" / entry.name / entry.folder.name)
    return folder


def test_a_layer_runs_every_m_on_one_finished_gemm(tmp_path):
    cache = carried(tmp_path / "cache", ("w4_gemm_sm90", "a8_bf16_128"), ("w4_activations", "any"), jit.kernels.CHAIN)
    backends, loaded = kernel_wheel.run(tmp_path, LAYER, cache).splitlines()[-2:]
    assert backends == "{'w4a8'}"
    assert loaded.startswith("0 ")
    assert "w4_gemm_sm90/a8_bf16_128-90a" in loaded
    assert "w4a8_small" not in loaded


def test_a_raw_gemm_runs_on_a_library_where_its_build_is_not_there(tmp_path):
    """float16 needs another build of the CUTLASS kernel than bfloat16."""
    cache = carried(tmp_path / "cache", ("fp8_gemm_sm90", "row_bf16_swap_64x16"), ("fp8_quantize", "any"))
    assert kernel_wheel.run(tmp_path, RAW, cache).split() == ["True", "False"]
