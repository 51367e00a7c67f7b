"""Run a chain of layers once and record it: captured segments, with breaks that run eagerly between them.

A break ends the segment before it. Its inputs are copied into bridges by that segment. At replay the break runs eagerly
on the bridges, and writes its result to a bridge that the next segment reads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fp4dispatch.errors import CaptureError
from fp4dispatch.graphs.segments.bridges import Bridges
from fp4dispatch.graphs.segments.capturing import Segment, Tape


class Later:
    """Stands for an argument of a layer that only breaks may use: it has another value at each replay.

    Captured code that looks at it would freeze what it sees, so any use is refused.
    """

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "_name", name)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise _refusal(self)

    __getattr__ = __bool__ = __len__ = __iter__ = __getitem__ = __add__ = __radd__ = __mul__ = __rmul__ = _refuse
    __eq__ = __ne__ = __hash__ = _refuse  # what Python answers by itself would choose a branch

    @classmethod
    def __torch_function__(cls, _: object, __: object, args: Sequence[object] = (), ___: object = None) -> NoReturn:
        found = [arg for arg in pytree.tree_leaves(args) if isinstance(arg, cls)]
        raise AssertionError if not found else _refusal(found[0])


def _refusal(value: Later) -> CaptureError:
    return CaptureError(
        f"the captured part of a layer reads {name_of(value)}, which changes from call to call.\n"
        f"  fix: pass it in per_token if it has one row for each token, or break at the module that reads it"
    )


def name_of(value: object) -> str | None:
    """Return the argument that a :class:`Later` stands for; None for other values."""
    return object.__getattribute__(value, "_name") if type(value) is Later else None


@dataclass(frozen=True)
class Batch:
    """What one call runs: ``sequences`` of ``length`` tokens each, and the arguments of the current layer."""

    sequences: int
    length: int

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.sequences * self.length


RunBreak = Callable[[Batch, Sequence[Tensor], Mapping[str, Any]], Tensor]
"""(batch, inputs [tokens, ...] each, arguments of the layer) -> result [tokens, ...]."""

Results = Callable[[str, RunBreak, Sequence[Tensor], Tensor], Tensor]


@dataclass(frozen=True)
class Break:
    """Eager work between two segments. ``inputs`` and ``output`` are bridges of the bucket."""

    name: str
    run: RunBreak
    inputs: tuple[Tensor, ...]
    output: Tensor


@dataclass
class Program:
    """One bucket: for each layer its steps in order. ``output``: [rows, hidden], in the graphs' pool."""

    rows: int
    steps: list[list[Segment | Break]] = field(default_factory=list)
    output: Tensor | None = None

    def segments(self) -> Iterator[Segment]:
        """Yield all segments in order."""
        for steps in self.steps:
            yield from (step for step in steps if not isinstance(step, Break))

    def reset(self) -> None:
        """Free the segments."""
        for segment in self.segments():
            segment.reset()
        self.steps, self.output = [], None


class Recorder:
    """The chain that is being run: where its breaks go.

    Without a tape nothing is captured: a rehearsal. Breaks then return what ``results`` (name, work, inputs, bridge of
    the result) makes of them, or what the bridge of the result holds.
    """

    def __init__(
        self,
        bridges: Bridges,
        rows: int,
        layers: int,
        tape: Tape | None = None,
        results: Results | None = None,
    ) -> None:
        self.program = Program(rows, [[] for _ in range(layers)])
        self._bridges, self._rows, self._tape, self._results = bridges, rows, tape, results
        self._layer = 0

    def begin(self) -> None:
        """Start the first segment."""
        if self._tape is not None:
            self._tape.begin()

    def enter(self, layer: int) -> None:
        """Say which layer runs now: its steps are those until the next call."""
        self._layer = layer

    def at_break(
        self,
        name: str,
        role: str,
        run: RunBreak,
        inputs: Sequence[Tensor],
        row_shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Tensor:
        """End the segment here.

        Parameters
        ----------
        name
            Of the module, for messages.
        role
            Names the bridges: breaks of one role share them.
        run
            The eager work.
        inputs
            [rows, ...] each: what the work reads.
        row_shape, dtype
            Of the result, without rows.

        Returns
        -------
        Tensor
            Bridge [rows, *row_shape] that holds the result at replay.
        """
        output = self._bridges.take(f"{role} result", self._rows, row_shape, dtype)
        if self._results is not None:
            return self._results(name, run, inputs, output)
        held = tuple(
            self._bridges.take(f"{role} input {i}", self._rows, tuple(x.shape[1:]), x.dtype)
            for i, x in enumerate(inputs)
        )
        torch._foreach_copy_(held, list(inputs))  # one launch for all of them
        if self._tape is not None:
            steps = self.program.steps[self._layer]
            steps.append(self._tape.end())
            steps.append(Break(name, run, held, output))
            self._tape.begin()
        return output

    def finish(self, output: Tensor) -> Program:
        """End the last segment. Return the program; ``output`` [rows, ...] is held by it."""
        if self._tape is not None:
            self.program.steps[-1].append(self._tape.end())
        self.program.output = output
        return self.program


_current = threading.local()


@contextmanager
def recording(recorder: Recorder) -> Iterator[Recorder]:
    """Make a recorder the one that breaks of this thread find."""
    before = current()
    _current.recorder = recorder
    try:
        yield recorder
    finally:
        _current.recorder = before


def current() -> Recorder | None:
    """Return the recorder of this thread."""
    return getattr(_current, "recorder", None)
