"""A wheel of finished kernels on a GPU: the first answer of a fresh process with an empty cache and no compiler."""

from __future__ import annotations

import pytest

from tests import kernel_wheel
from tests.gpu.sm90 import needs_sm90

pytestmark = [pytest.mark.gpu, pytest.mark.compile, needs_sm90]

PROGRAM = """
import torch, fp4dispatch
from fp4dispatch.jit import kernels, packages
torch.manual_seed(0)
linear = torch.nn.Linear(1024, 512, bias=False, device="cuda", dtype=torch.bfloat16)
ours = fp4dispatch.FP8Linear.from_linear(linear, scaling="row", activation="bf16", backend="w8a16")
reference = fp4dispatch.FP8Linear.from_linear(linear, scaling="row", activation="bf16", backend="reference")
x = torch.randn(4, 1024, device="cuda", dtype=torch.bfloat16)
with torch.inference_mode():
    got, wanted = ours(x).float(), reference(x).float()
error = ((got - wanted).norm() / wanted.norm()).item()
assert error < 4e-3, error  # one rounding to bfloat16
print(kernels.builds_done(), len(packages.reports()[0].usable))
"""


def test_a_layer_runs_from_a_wheel_without_a_compiler(tmp_path):
    site = kernel_wheel.install(tmp_path, "--ops", "w8_gemm,race_chain", "--variant", "bf16", "--variant", "any")
    built, usable = kernel_wheel.run(site, PROGRAM, tmp_path / "empty").split()[-2:]
    assert built == "0"
    assert int(usable) >= 3
