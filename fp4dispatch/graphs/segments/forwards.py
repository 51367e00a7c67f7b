"""Replace the ``forward`` of single modules, and undo it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn


class Replaced:
    """What stands in for the ``forward`` of one module.

    It belongs to this module alone: a copied or unpickled module has the ``forward`` of its class again. A plain
    function would be shared, and the copy would run the graphs of the original.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._module, self._forward = module, forward
        self.__wrapped__ = module.forward  # inspect.signature shows what callers know

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the replacement."""
        return self._forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """Return the class's forward of the copy."""
        return of_class(memo.get(id(self._module), self._module))

    def __reduce__(self) -> tuple[Callable[[nn.Module], Callable[..., Any]], tuple[nn.Module]]:
        """Pickle the class's forward."""
        return of_class, (self._module,)


def of_class(module: nn.Module) -> Callable[..., Any]:
    """Return the ``forward`` that a module has by its class."""
    return MethodType(type(module).forward, module)


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the ``forward`` of one module for the ``with`` block."""
    undo = replace_forward(module, forward)
    try:
        yield
    finally:
        undo()


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Replace the ``forward`` of one module. Return what undoes it.

    A wrapper that came after stays, and what it wraps: that is the replacement, which has to pass calls on then.
    """
    own = module.__dict__.get("forward")
    placed = module.forward = Replaced(module, forward)

    def undo() -> None:
        if module.__dict__.get("forward") is not placed:
            return
        if own is None:
            module.__dict__.pop("forward", None)
        else:
            module.forward = own

    return undo
