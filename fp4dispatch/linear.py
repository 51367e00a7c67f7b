"""The public path of the layers. Pickles of layers name it. The code is in ``models/linear.py``."""

from __future__ import annotations

from fp4dispatch.models.linear import FP4Linear, FP8Linear

__all__ = ["FP4Linear", "FP8Linear"]
