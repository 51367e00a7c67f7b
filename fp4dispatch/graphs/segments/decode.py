"""Decode steps as one CUDA graph: attention and cache update included, for a static cache.

A graph reads the addresses of one cache, so there is one graph for each cache and batch size. It is captured at the
first step of a batch size that ``enable(decode=...)`` names, and freed when one for another cache takes its place. It
does not keep its cache alive.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fp4dispatch.errors import CaptureError
from fp4dispatch.graphs.segments.capturing import CudaTape, Segment, Tape
from fp4dispatch.graphs.segments.hf_attention import CACHE

_CAPTURABLE = {"StaticLayer"}
"""Cache layers whose ``update`` decides nothing on the host."""


def why_not(cache: object) -> str:
    """Return why a step with this cache cannot be one graph; empty if it can."""
    layers = getattr(cache, "layers", None)
    if not layers:
        return f"the cache is a {type(cache).__name__}; one graph for a step needs a StaticCache"
    for layer in layers:
        if type(layer).__name__ not in _CAPTURABLE:
            return f"the cache has a {type(layer).__name__}, which decides on the host; need a StaticLayer everywhere"
        if not layer.is_initialized:
            return "the cache holds no prompt yet"
    return ""


def addresses(cache: Any) -> tuple[int, ...]:
    """Return the addresses of what a static cache holds."""
    return tuple(t.data_ptr() for layer in cache.layers for t in (layer.keys, layer.values, layer.cumulative_length))


@dataclass(frozen=True)
class _Argument:
    """One argument of a layer: its tree, and for each leaf the static tensor that stands for it, or its value."""

    tree: pytree.TreeSpec
    leaves: tuple[Any, ...]

    def fits(self, value: Any) -> bool:
        """Whether a value has the form of the captured one: shapes and dtypes of tensors, and all else alike."""
        leaves, tree = _flat(value)
        return tree == self.tree and all(map(_alike, leaves, self.leaves))


class DecodeStep:
    """One captured step for one cache.

    Parameters
    ----------
    forwards
        Of the decoder layers.
    hidden
        [sequences, 1, hidden], of the step to capture.
    arguments
        What each layer gets by name.
    tape
        Makes the graph; CUDA's by default.

    Raises
    ------
    Exception
        Whatever stops the capture. The cache is as before then.
    """

    def __init__(
        self,
        forwards: Sequence[Any],
        hidden: Tensor,
        arguments: Sequence[Mapping[str, Any]],
        tape: Tape | None = None,
    ) -> None:
        began = time.perf_counter()
        cache = arguments[0][CACHE]
        self.cache, self.addresses = weakref.ref(cache), addresses(cache)
        with torch.inference_mode(mode=False):  # replays load them inside and outside of inference mode
            self._hidden = hidden.clone()
            sources: list[tuple[Tensor, Tensor]] = []
            self._arguments = [{name: _static(value, cache, sources) for name, value in a.items()} for a in arguments]
        given = [
            {name: cache if a is _CACHE else pytree.tree_unflatten(list(a.leaves), a.tree) for name, a in layer.items()}
            for layer in self._arguments
        ]
        self._as_before = [
            {name: i > 0 and _same(a, self._arguments[i - 1].get(name)) for name, a in layer.items()}
            for i, layer in enumerate(self._arguments)
        ]
        lengths = [layer.cumulative_length.clone() for layer in cache.layers]
        maker: Tape = CudaTape(hidden.device) if tape is None else tape
        try:
            with torch.no_grad(), maker.session():
                for _ in range(2):  # each writes the keys and values of this step where the replay writes them again
                    _chain(forwards, self._hidden, given)
                    _rewind(cache, lengths)
                try:
                    maker.begin()
                    self._output = _chain(forwards, self._hidden, given)
                    self._segment: Segment = maker.end()
                except BaseException:
                    maker.abandon()
                    raise
        finally:
            _rewind(cache, lengths)
        inputs = sum(copy.numel() * copy.element_size() for copy in (self._hidden, *(copy for copy, _ in sources)))
        self.seconds, self.nbytes = time.perf_counter() - began, maker.held() + inputs

    def serves(self, cache: object) -> bool:
        """Whether the graph is of this cache, with its tensors where they were."""
        return cache is self.cache() and addresses(cache) == self.addresses

    def fits(self, index: int, hidden: Tensor, arguments: Mapping[str, Any]) -> str:
        """Return why a layer's hidden states or arguments are not what was captured; empty if they are."""
        if not _alike(hidden, self._hidden):
            return "the hidden states are not what was captured"
        known = self._arguments[index]
        if arguments.keys() != known.keys():
            return f"other arguments: {', '.join(sorted(arguments.keys() ^ known.keys()))}"
        odd = (name for name, value in arguments.items() if not self._alike(known[name], value))
        return next((f"{name} is not what was captured" for name in odd), "")

    def _alike(self, known: _Argument, value: Any) -> bool:
        return value is self.cache() if known is _CACHE else known.fits(value)

    def load(self, index: int, arguments: Mapping[str, Any], loaded: dict[str, Any]) -> None:
        """Load a layer's arguments. ``loaded``: those of the layers before, by name; most get the same objects.

        Raises
        ------
        CaptureError
            If they are not what was captured. Nothing has run then: the graph runs at the last layer.
        """
        known = self._arguments[index]
        if arguments.keys() != known.keys():
            raise _misfit(index, self.fits(index, self._hidden, arguments))
        for name, value in arguments.items():
            if name in loaded and loaded[name] is value and self._as_before[index][name]:
                continue
            if index and not self._alike(known[name], value):
                raise _misfit(index, f"{name} is not what was captured")
            loaded[name] = value
            for leaf, static in zip(_flat(value)[0], known[name].leaves, strict=True):
                if isinstance(leaf, Tensor):
                    static.copy_(leaf)

    def replay(self, hidden: Tensor) -> Tensor:
        """Run the step on the loaded arguments; return [sequences, 1, hidden], a copy."""
        self._hidden.copy_(hidden)
        self._segment.replay()
        return self._output.clone()

    def reset(self) -> None:
        """Free the graph."""
        self._segment.reset()


def _misfit(index: int, fault: str) -> CaptureError:
    return CaptureError(
        f"decode step, layer {index}: {fault}: pass each layer the kinds of arguments that the captured step had, or "
        "disable the graphs for such calls"
    )


def _static(value: Any, cache: object, sources: list[tuple[Tensor, Tensor]]) -> _Argument:
    """Replace the tensors of an argument by copies at fixed addresses. One tensor has one copy in all layers."""
    if value is cache:
        return _CACHE
    leaves, tree = _flat(value)
    found = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            copy = next((static for source, static in sources if source is leaf), None)
            if copy is None:
                copy = leaf.clone()
                sources.append((leaf, copy))
            leaf = copy
        found.append(leaf)
    return _Argument(tree, tuple(found))


def _same(argument: _Argument, other: _Argument | None) -> bool:
    """Whether two layers read an argument at the same addresses."""
    return other is not None and all(a is b for a, b in zip(argument.leaves, other.leaves, strict=False))


def _flat(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    return pytree.tree_flatten(value) if isinstance(value, (tuple, list, dict)) else ([value], _LEAF)


_LEAF = pytree.tree_structure(0)
_CACHE = _Argument(_LEAF, (None,))
"""Stands for the cache itself, which the step does not hold."""


def _alike(value: object, known: object) -> bool:
    if isinstance(value, Tensor) and isinstance(known, Tensor):
        return value.shape == known.shape and value.dtype == known.dtype
    return value is known or (type(value) is type(known) and not isinstance(value, Tensor) and bool(value == known))


def _chain(forwards: Sequence[Any], hidden: Tensor, given: Sequence[Mapping[str, Any]]) -> Tensor:
    for forward, arguments in zip(forwards, given, strict=True):
        hidden = forward(hidden, **arguments)
    return hidden


def _rewind(cache: Any, lengths: Sequence[Tensor]) -> None:
    for layer, length in zip(cache.layers, lengths, strict=True):
        layer.cumulative_length.copy_(length)
