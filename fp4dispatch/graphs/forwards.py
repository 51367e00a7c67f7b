"""Replace the ``forward`` of single modules, and undo it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the ``forward`` of one module for the ``with`` block."""
    undo = replace_forward(module, forward)
    try:
        yield
    finally:
        undo()


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Replace the ``forward`` of one module. Return what undoes it."""
    own = module.__dict__.get("forward")
    module.forward = forward

    def undo() -> None:
        if own is None:
            module.__dict__.pop("forward", None)
        else:
            module.forward = own

    return undo
