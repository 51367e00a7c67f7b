"""What a quantised layer holds beside its stored tensors and options: all that it can make again from them.

A layer has one :class:`LayerState`, ``layer._state``. Dropping all layouts is a new one. A pickle does not hold it.
No frame may keep a state while the layer runs: weights that an old one references would not be dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

import torch

from fp4dispatch.backends.base import Prepared
from fp4dispatch.machine import capture
from fp4dispatch.models.seen_tensors import CANONICAL, Buffers, Seen, matcher, never, unwritten
from fp4dispatch.run import owners
from fp4dispatch.run.routes import Bound


@dataclass(eq=False)
class LayerState:
    """The backends that a layer is bound to, and the stored tensors that their layouts were prepared from."""

    # What :mod:`fp4dispatch.models.backend_binding` sets.
    prepared: dict[str, Prepared] = field(default_factory=dict)
    """Prepared weights by layout name."""
    bound: dict[torch.dtype, Bound] = field(default_factory=dict)
    """Bindings for the layer's own capture mode, by output dtype."""
    graph_bound: dict[capture.Declared, dict[torch.dtype, Bound]] = field(default_factory=dict)
    """Bindings that were made inside :func:`fp4dispatch.machine.capture.mode`. Each dtype is in ``bound`` too."""
    captured: list[Bound] = field(default_factory=list)
    """Bindings that were replaced. CUDA graphs may hold the addresses of their tensors, so they are kept."""
    names: dict[torch.dtype, tuple[list[str], list[str], str]] = field(default_factory=dict)
    """By dtype, for compiled calls: names of prepared buffers, names of stored buffers, and the spec text."""

    # What :mod:`fp4dispatch.models.stored_weights` sets.
    seen: dict[str, Seen | None] = field(default_factory=dict)
    """Stored tensors that the layouts were prepared from, by name. Without tensors that the layer dropped."""
    unchanged: Callable[[Buffers], bool] = never
    """Whether the stored tensors are unchanged since the layouts were prepared. On the eager fast path."""
    keys: list[owners.Key] = field(default_factory=list)
    """What the layer is registered under, for compiled calls."""

    # What :mod:`fp4dispatch.models.compact_weights` sets.
    dropped: str = ""
    """Name of the layout that holds the dropped tensors; empty if the layer holds all itself."""
    order: tuple[str, ...] = ()
    """Names of the buffers in their order before the last drop."""
    lent: dict[str, Seen] = field(default_factory=dict)
    """Weights that the layer dropped while other code held references. That code may write to them."""
    due: bool = True
    """Whether the layer has to look for weights that it can drop."""

    def copy(self) -> LayerState:
        """Return a state for a replica of the layer: it has the same tensors, and is registered under no key."""
        return replace(
            self,
            prepared=dict(self.prepared),
            bound=dict(self.bound),
            graph_bound={declared: dict(bounds) for declared, bounds in self.graph_bound.items()},
            captured=list(self.captured),
            names=dict(self.names),
            keys=[],
        )

    def bounds(self, declared: capture.Declared | None) -> dict[torch.dtype, Bound]:
        """Return what is bound for a declared capture mode, or for the layer's own mode."""
        return self.bound if declared is None else self.graph_bound.get(declared, {})

    def every_bound(self) -> list[Bound]:
        """Return what is bound, for the layer's own mode and for declared ones; not what was replaced."""
        declared = (bound for bounds in list(self.graph_bound.values()) for bound in list(bounds.values()))
        return [*self.bound.values(), *declared]

    def record(self, seen: dict[str, Seen | None]) -> None:
        """Set the record of stored tensors, and what compares them with it."""
        self.seen = seen
        self.unchanged = matcher(seen, CANONICAL if self.dropped else (), tuple(self.lent.values()))

    def matches(self, buffers: Buffers) -> bool:
        """Whether buffers are the recorded ones, whatever was done to tensors that the layer lent."""
        return matcher(self.seen, CANONICAL if self.dropped else ())(buffers)

    def lent_unwritten(self) -> bool:
        """Whether no tensor that the layer dropped, and other code held, was written since."""
        return all(map(unwritten, self.lent.values()))


PICKLED_BEFORE = frozenset(f"_{each.name}" for each in fields(LayerState))
"""Attributes that layers had before they had a state. Old pickles hold them."""
