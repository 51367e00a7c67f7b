"""The operators ``torch.ops.fp4dispatch.*``, as Python functions with defaults. Importing this module registers them.

An operator is opaque to ``torch.compile``. It does not synchronise the host. It is for inference: a backward raises
:class:`~fp4dispatch.errors.BackwardError`. Wrong operands raise :class:`~fp4dispatch.errors.InputError` before any
launch.
"""

from __future__ import annotations

from fp4dispatch.run.gemm_ops import fp8_gemm, nvfp4_gemm
from fp4dispatch.run.linear_ops import linear, linear_stored, run_bound, run_linear, run_swiglu, swiglu_linear
from fp4dispatch.run.quantize_ops import fp8_quantize, nvfp4_quantize

__all__ = [
    "fp8_gemm",
    "fp8_quantize",
    "linear",
    "linear_stored",
    "nvfp4_gemm",
    "nvfp4_quantize",
    "run_bound",
    "run_linear",
    "run_swiglu",
    "swiglu_linear",
]
