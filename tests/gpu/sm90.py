"""What the SM90 kernel tests share: modules from the JIT, the variants of the manifest, and when to skip."""

from __future__ import annotations

import functools

import pytest
import torch

from fp4dispatch import jit
from fp4dispatch.jit.catalog.manifest import installed
from fp4dispatch.problem.arch import Arch

SM90 = Arch(9, 0)
OUT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
VARIANTS = tuple(installed().kernel("fp8_gemm_sm90").variants)

needs_sm90 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an SM90 GPU"
)


def variants_of(family):
    return [variant for variant in VARIANTS if variant.startswith(family)]


def promoted_every(variant):
    """Elements of K between promotions to fp32."""
    defines = installed().kernel("fp8_gemm_sm90").variant(variant).defines
    return int(next(d for d in defines if d.startswith("FP4D_PROMOTE_K=")).split("=")[1])


@functools.cache
def gemm_module(variant):
    return jit.load("fp8_gemm_sm90", variant, SM90).module
