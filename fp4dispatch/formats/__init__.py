"""NVFP4 and FP8: codes, block scales and their layouts, checks, the dequantised reference."""

from __future__ import annotations

from fp4dispatch.formats.amax import E4M3_MAX
from fp4dispatch.formats.e2m1 import E2M1_MAX, E2M1_VALUES, decode_e2m1, encode_e2m1, pack_e2m1, unpack_e2m1
from fp4dispatch.formats.fp8 import (
    FP8_BLOCK,
    FP8_SCALINGS,
    FP8Scaling,
    FP8Tensor,
    check_fp8,
    check_fp8_input,
    check_fp8_meta,
    fp8_dequantize,
    fp8_quantize,
)
from fp4dispatch.formats.nvfp4 import (
    NVFP4_MAX,
    NVFP4Tensor,
    check_nvfp4,
    check_nvfp4_input,
    check_nvfp4_meta,
    nvfp4_dequantize,
    nvfp4_global_scale,
    nvfp4_quantize,
)
from fp4dispatch.formats.nvfp4_mse import (
    CALIBRATIONS,
    Calibration,
    check_calibration,
    nvfp4_quantize_calibrated,
    nvfp4_quantize_mse,
)
from fp4dispatch.formats.sf_layout import expand_shards, from_128x4, to_128x4, zero_pad
from fp4dispatch.problem import NVFP4_BLOCK
from fp4dispatch.problem.integers import round_up

__all__ = [
    "CALIBRATIONS",
    "E2M1_MAX",
    "E2M1_VALUES",
    "E4M3_MAX",
    "FP8_BLOCK",
    "FP8_SCALINGS",
    "NVFP4_BLOCK",
    "NVFP4_MAX",
    "Calibration",
    "FP8Scaling",
    "FP8Tensor",
    "NVFP4Tensor",
    "check_calibration",
    "check_fp8",
    "check_fp8_input",
    "check_fp8_meta",
    "check_nvfp4",
    "check_nvfp4_input",
    "check_nvfp4_meta",
    "decode_e2m1",
    "encode_e2m1",
    "expand_shards",
    "fp8_dequantize",
    "fp8_quantize",
    "from_128x4",
    "nvfp4_dequantize",
    "nvfp4_global_scale",
    "nvfp4_quantize",
    "nvfp4_quantize_calibrated",
    "nvfp4_quantize_mse",
    "pack_e2m1",
    "round_up",
    "to_128x4",
    "unpack_e2m1",
    "zero_pad",
]
