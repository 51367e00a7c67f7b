"""Run a call eagerly and compare the captured segments with it, break by break and tile by tile.

The model's own layers run on the padded tokens of the bucket, so that the same kernels serve both. Their breaks run for
real, once. Then the segments replay with the results of these breaks. So the cache is written once, and the result of
the call is that of the eager run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fp4dispatch.graphs.segments.layers import Bucket, CapturedLayers
from fp4dispatch.graphs.segments.program import Batch, Break, RunBreak

TILE = 128
TOLERANCE = 0.02
"""Largest error of a tile: the norm of its difference, relative to its norm. Segments run the kernels of the eager run,
and most are equal in every bit."""


class Verification:
    """One call that runs eagerly and is then compared.

    Parameters
    ----------
    captured, bucket, batch
        What is called.
    hidden
        [sequences, length, hidden].
    """

    def __init__(self, captured: CapturedLayers, bucket: Bucket, batch: Batch, hidden: Tensor) -> None:
        self._captured, self._bucket, self._batch = captured, bucket, batch
        captured.start(bucket, hidden)
        self._first = bucket.hidden.clone()
        self._states = self._first.clone().unsqueeze(0)
        self._recorder = captured.recorder(bucket.rows, results=self._at_break)
        self._arguments: list[Mapping[str, Any]] = []
        self._seen: list[tuple[str, list[Tensor], Tensor]] = []

    def layer(self, index: int, arguments: Mapping[str, Any]) -> None:
        """Run one layer eagerly."""
        self._arguments.append(arguments)
        self._captured.load(self._bucket, index, self._batch, arguments)
        self._states = self._captured.run_layer(self._recorder, index, self._states, self._bucket.given[index])

    def _at_break(self, name: str, run: RunBreak, inputs: Sequence[Tensor], output: Tensor) -> Tensor:
        result = run(self._batch, inputs, self._arguments[-1])
        self._captured.bridges.fill(output, result)
        held = output.clone()
        self._seen.append((name, [x.clone() for x in inputs], held))
        return held

    def result(self) -> Tensor:
        """Return what the layers computed eagerly, [sequences, length, hidden]."""
        batch, width = self._batch, self._states.shape[2]
        return self._states[0, : batch.tokens].reshape(batch.sequences, batch.length, width)

    def faults(self) -> list[str]:
        """Replay the segments with the same breaks. Return what differs, first things first. Synchronises."""
        found: list[str] = []
        seen = iter(self._seen)
        self._bucket.hidden.copy_(self._first)
        self._bucket.loaded.clear()
        for index, steps in enumerate(self._bucket.program.steps):
            self._captured.load(self._bucket, index, self._batch, self._arguments[index])
            for step in steps:
                if not isinstance(step, Break):
                    step.replay()
                    continue
                name, inputs, result = next(seen)
                for i, (mine, want) in enumerate(zip(step.inputs, inputs, strict=True)):
                    found += difference(f"{name}, input {i}", mine, want)
                step.output.copy_(result)
        output = self._bucket.program.output
        assert output is not None
        return found + difference("the last layer", output, self._states[0])


def difference(what: str, mine: Tensor, want: Tensor) -> list[str]:
    """Compare two tensors [rows, ...] in tiles; return one line if a tile is wrong."""
    a, b = (x.reshape(x.shape[0], -1).float() for x in (mine, want))
    if torch.equal(a, b):
        return []
    worst, place = 0.0, (0, 0)
    for i in range(0, a.shape[0], TILE):
        for j in range(0, a.shape[1], TILE):
            x, y = a[i : i + TILE, j : j + TILE], b[i : i + TILE, j : j + TILE]
            error = float((x - y).norm() / y.norm().clamp(min=1e-20))
            error = error if error == error else float("inf")  # NaN
            if error > worst:
                worst, place = error, (i, j)
    if worst <= TOLERANCE:
        return []
    return [f"{what}: the tile at {place} is off by {worst:.3g} of its norm; {TOLERANCE} is allowed"]
