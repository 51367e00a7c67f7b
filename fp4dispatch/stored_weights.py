"""A path that pickles of layers name. The code is in ``models/seen_tensors.py``."""

from __future__ import annotations

from fp4dispatch.models.seen_tensors import never

__all__ = ["never"]
