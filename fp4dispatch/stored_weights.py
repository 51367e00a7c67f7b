"""A path that pickles of layers name. The code is in ``models/stored_weights.py``."""

from __future__ import annotations

from fp4dispatch.models.stored_weights import never

__all__ = ["never"]
