"""What is asked and what is answered: problems, archs, reasons, decisions. Values without torch."""

from __future__ import annotations

from fp4dispatch.problem.problem import (
    ACTIVATIONS,
    CAPTURE_MODES,
    NVFP4_BLOCK,
    OPS,
    OUT_DTYPES,
    SCALINGS,
    SF_LAYOUTS,
    Activation,
    CaptureMode,
    Op,
    OutDtype,
    Problem,
    Scaling,
    SfLayout,
    m_before,
    m_bucket,
    one_of,
)

__all__ = [
    "ACTIVATIONS",
    "CAPTURE_MODES",
    "NVFP4_BLOCK",
    "OPS",
    "OUT_DTYPES",
    "SCALINGS",
    "SF_LAYOUTS",
    "Activation",
    "CaptureMode",
    "Op",
    "OutDtype",
    "Problem",
    "Scaling",
    "SfLayout",
    "m_before",
    "m_bucket",
    "one_of",
]
