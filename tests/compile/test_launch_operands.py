"""The table of launches against the host code that is shipped: every function takes what its row says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fp4dispatch.backends.own.pdl_trial import launch_operands
from fp4dispatch.backends.own.pdl_trial.launch_operands import ROLES, Sizes
from fp4dispatch.backends.own.pdl_trial.pdl import _SIZES
from fp4dispatch.backends.own.tiling import launch_model
from fp4dispatch.backends.own.tiling.launch_model import TileSpeed
from fp4dispatch.jit.catalog.manifest import installed
from tests.compile.test_host_calls import launches, pytestmark, runtime

__all__ = ["pytestmark", "runtime"]

KINDS = {
    torch.bfloat16: (4, 16),
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.uint8: (1, 8),
    torch.float8_e4m3fn: (10, 8),
}
"""DLPack's code and bits."""
QUICK = {("w4a16_small", "bf16"), ("w4_activations", "any"), ("fp8_quantize", "any"), ("nvfp4_quantize", "any")}
QUICK |= {
    ("swiglu_activations", "any"),
    ("swiglu_rows", "any"),
    ("w8a8_small", "bf16"),
    ("w8_gemm_sm90", "bf16_128"),
    ("w4_gemm_sm90", "a16_bf16_128x128"),
}
"""As far as may be, builds that test_host_calls.py needs as well."""


def builds() -> list[Any]:
    """Each build for Hopper; slow but for one a family, as CUTLASS takes most of a minute."""
    return [
        pytest.param(name, variant, marks=() if (name, variant) in QUICK else pytest.mark.slow)
        for name, known in installed().kernels.items()
        if known.pdl and known.op != "race_chain" and "90a" in known.targets
        for variant in known.variants
    ]


def argument(name: str, sizes: Sizes, tile: TileSpeed | None) -> list[Any] | dict[str, Any] | None:
    if name == "none":
        return None
    if name == "shape":
        assert tile is not None
        return {"numbers": launch_model.best(tile, *sizes[:3], launch_model.H200).shape}
    if name == "workspace":
        return [*KINDS[torch.uint8], [0], [1]]
    role = ROLES[name]
    tensor = role.view(torch.empty(role.shape(sizes), dtype=role.dtype or sizes.dtype, device="meta"), sizes)
    return [*KINDS[tensor.dtype], list(tensor.shape), list(tensor.stride())]


@pytest.mark.parametrize(("kernel", "variant"), builds())
def test_every_function_takes_the_operands_of_the_table(kernel: str, variant: str, runtime: Path) -> None:
    known = installed().kernel(kernel)
    build = known.variant(variant)
    for entry in launch_operands.entries(known, build):
        for m, n, k in _SIZES:
            sizes = Sizes(m, n, k, launch_operands.dtype_of(build))
            arguments = [*(argument(name, sizes, entry.tile) for name in entry.arguments), True]
            (row,) = launches(runtime, (kernel, variant, entry.function, arguments, 0), ())
            assert row["error"] == "", (entry, sizes)
            assert sum(row["calls"].get(name, 0) for name in ("cudaLaunchKernelExC", "<<<>>>")) == 1
