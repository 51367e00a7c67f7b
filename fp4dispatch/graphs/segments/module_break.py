"""Break at any module: it runs eagerly between two segments, on the tokens of the batch.

Its tensor arguments have one row for each token, [tokens, ...] or [1, tokens, ...]. They cross the break in bridges.
At replay the module gets [tokens of the batch, ...], or [sequences, length, ...]. Its result is one tensor of that
form, or a tuple whose first item is one and whose other items are None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fp4dispatch.errors import CaptureError
from fp4dispatch.graphs.segments import program
from fp4dispatch.graphs.segments.program import Batch, name_of


@dataclass(frozen=True)
class Form:
    """The form of a module's result. ``items``: of the tuple, 0 for a tensor. ``flat``: [tokens, ...]."""

    items: int
    flat: bool
    row_shape: tuple[int, ...]
    dtype: torch.dtype


def watching(module: nn.Module, forms: MutableMapping[nn.Module, Form], rows: int) -> Callable[..., Any]:
    """Return a forward that runs the module, and records the form of its result for one sequence of ``rows``."""
    forward = module.forward

    def watch(*args: Any, **kwargs: Any) -> Any:
        found = forward(*args, **kwargs)
        items = len(found) if isinstance(found, tuple) else 0
        first = found[0] if items else found
        if not isinstance(first, Tensor) or (items and any(other is not None for other in found[1:])):
            raise CaptureError(
                f"the break {_name(module)} returns {_text(found)}; need one tensor, or a tuple of one and None"
            )
        flat = first.shape[0] == rows and tuple(first.shape[:2]) != (1, rows)
        if not flat and tuple(first.shape[:2]) != (1, rows):
            raise CaptureError(
                f"the break {_name(module)} returns {_text(first)}; need one row for each of {rows} tokens"
            )
        forms[module] = Form(items, flat, tuple(first.shape[1 if flat else 2 :]), first.dtype)
        return found

    return watch


def breaking(module: nn.Module, forward: Callable[..., Any], form: Form) -> Callable[..., Any]:
    """Return a forward that breaks under a recorder, and otherwise runs ``forward``."""

    def at_break(*args: Any, **kwargs: Any) -> Any:
        recorder = program.current()
        if recorder is None:  # another thread runs the model meanwhile
            return forward(*args, **kwargs)
        leaves, tree = pytree.tree_flatten((args, kwargs))
        flat = [_is_flat(module, leaf, recorder.program.rows) if isinstance(leaf, Tensor) else None for leaf in leaves]
        inputs = [leaf if one else leaf[0] for leaf, one in zip(leaves, flat, strict=True) if one is not None]
        fixed = [None if one is not None else leaf for leaf, one in zip(leaves, flat, strict=True)]
        work = _Work(_name(module), forward, tree, fixed, flat, form)
        out = recorder.at_break(_name(module), type(module).__name__, work, inputs, form.row_shape, form.dtype)
        out = (out if form.flat else out.unsqueeze(0)).clone()  # the layer may keep it past the next such break
        return (out, *[None] * (form.items - 1)) if form.items else out

    return at_break


class _Work:
    """The eager work. ``flat``: by argument, whether it is [tokens, ...]; None if it is no tensor."""

    def __init__(
        self,
        name: str,
        forward: Callable[..., Any],
        tree: pytree.TreeSpec,
        fixed: Sequence[Any],
        flat: Sequence[bool | None],
        form: Form,
    ) -> None:
        self._name, self._forward, self._tree, self._form = name, forward, tree, form
        self._fixed, self._flat = fixed, flat

    def __call__(self, batch: Batch, inputs: Sequence[Tensor], arguments: Mapping[str, Any]) -> Tensor:
        rows = iter(inputs)
        leaves = []
        for value, flat in zip(self._fixed, self._flat, strict=True):
            if flat is None:
                later = name_of(value)
                leaves.append(arguments.get(later) if later else value)
            else:
                x = next(rows)[: batch.tokens]
                leaves.append(x if flat else x.view(batch.sequences, batch.length, *x.shape[1:]))
        args, kwargs = pytree.tree_unflatten(leaves, self._tree)
        found = self._forward(*args, **kwargs)
        out = found[0] if self._form.items else found
        lead = (batch.tokens,) if self._form.flat else (batch.sequences, batch.length)
        if not isinstance(out, Tensor) or tuple(out.shape) != (*lead, *self._form.row_shape):
            raise CaptureError(f"the break {self._name} returns {_text(out)}; need {[*lead, *self._form.row_shape]}")
        return out.reshape(batch.tokens, *self._form.row_shape)


def _is_flat(module: nn.Module, x: Tensor, rows: int) -> bool:
    if tuple(x.shape[:2]) == (1, rows):
        return False
    if x.ndim and x.shape[0] == rows:
        return True
    raise CaptureError(f"the break {_name(module)} gets {_text(x)}; need one row for each of {rows} tokens")


def _name(module: nn.Module) -> str:
    return type(module).__name__


def _text(value: object) -> str:
    return f"{list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
