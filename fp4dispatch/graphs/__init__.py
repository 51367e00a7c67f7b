"""Breakable CUDA graphs: capture the decoder layers of a model for some numbers of tokens, and replay them.

:func:`enable` captures; :func:`disable` undoes it wholly; :func:`graphed` does both around a ``with`` block.
:func:`can_run` says why a call would run eagerly, :func:`declare` tells facts that a model cannot see, and
:func:`stats` counts what ran. :func:`register_finder` says what to capture of a class of models.
"""

from fp4dispatch.graphs import huggingface as _huggingface
from fp4dispatch.graphs.enabling import can_run, declare, disable, enable, graphed, stats
from fp4dispatch.graphs.finder import by_attributes, register_finder

_huggingface.register()

__all__ = ["by_attributes", "can_run", "declare", "disable", "enable", "graphed", "register_finder", "stats"]
