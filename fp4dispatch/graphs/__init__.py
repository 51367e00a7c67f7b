"""Breakable CUDA graphs: capture the decoder layers of a model for some numbers of tokens, and replay them.

:func:`enable` captures; :func:`disable` undoes it wholly; :func:`graphed` does both around a ``with`` block.
:func:`can_run` says why a batch would run eagerly, and :func:`stats` what ran.
"""

from fp4dispatch.graphs.enabling import can_run, disable, enable, graphed, stats

__all__ = ["can_run", "disable", "enable", "graphed", "stats"]
