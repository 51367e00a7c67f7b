"""The decoder layers of a model, captured for one number of tokens after the other.

Only the layers are captured. Embedding, masks, rotary angles, final norm and head are the model's own eager code around
them, so that a segment depends on the number of tokens alone. The tokens of all sequences form one row of tokens.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fp4dispatch.errors import CaptureError
from fp4dispatch.graphs.segments import hf_attention, module_break, program
from fp4dispatch.graphs.segments.bridges import Bridges
from fp4dispatch.graphs.segments.capturing import CudaTape, Tape
from fp4dispatch.graphs.segments.forwards import replaced_forward
from fp4dispatch.graphs.segments.module_break import Form
from fp4dispatch.graphs.segments.program import Batch, Break, Later, Program, Recorder, Results

_WITHHELD = {hf_attention.CACHE: None, "use_cache": False}
"""What captured code gets for these arguments. Breaks get the real ones."""


_NEUTRAL = {
    *("attention_mask", "position_ids", "cache_position", "use_cache"),
    *(hf_attention.CACHE, *hf_attention.VARLEN),
}
"""Arguments of layers that may differ from call to call: only breaks use them."""

_LATER = (
    "layer {index}: {fault}. Layers before it have run in this call, so it cannot run eagerly: pass each layer the "
    "kinds of arguments that the example of the capture had, or disable the graphs for such calls"
)


@dataclass(frozen=True)
class Spec:
    """What to capture.

    Attributes
    ----------
    inner
        The module whose ``forward`` runs the layers.
    layers
        Its decoder layers. It calls each once, in this order, with hidden states [sequences, length, hidden] and
        otherwise arguments by name; a layer returns hidden states.
    attention
        Attention modules of Hugging Face models: see :mod:`fp4dispatch.graphs.segments.hf_attention`.
    breaks
        Further modules to run eagerly: see :mod:`fp4dispatch.graphs.segments.module_break`.
    per_token
        Arguments of the layers that captured code reads. All their tensors are [sequences or 1, length, ...].
    example
        Runs ``inner`` eagerly on one sequence of so many tokens, without a cache.
    """

    inner: nn.Module
    layers: tuple[nn.Module, ...]
    attention: tuple[nn.Module, ...]
    breaks: tuple[nn.Module, ...]
    per_token: tuple[str, ...]
    example: Callable[[int], object]


@dataclass
class Bucket:
    """One captured number of tokens.

    ``hidden``: bridge [rows, hidden]. ``per_token``: layer -> name -> bridges. ``given``: what captured code gets, by
    layer. ``pays_from``: the smallest number of tokens whose replay pays, as measured; 0 if it was not.
    ``loaded``: per-token arguments of the current call, as the last layer that loaded them got them.
    """

    rows: int
    program: Program
    hidden: Tensor
    per_token: list[dict[str, list[Tensor]]]
    given: list[dict[str, Any]]
    seconds: float = 0.0
    nbytes: int = 0
    pays_from: int = 0
    loaded: dict[str, Any] = field(default_factory=dict)


class CapturedLayers:
    """Segments of all buckets, and the bridges between them.

    Parameters
    ----------
    spec
        What to capture.
    rows
        The buckets: numbers of tokens.
    tape
        Makes the graphs; CUDA's by default.
    """

    def __init__(self, spec: Spec, rows: Sequence[int], tape: Tape | None = None) -> None:
        self.spec, self.rows = spec, tuple(sorted(set(rows)))
        self.device = next(spec.inner.parameters()).device
        self.bridges = Bridges(self.device, self.rows[-1])
        self.forwards = [layer.forward for layer in spec.layers]
        self.buckets: dict[int, Bucket] = {}
        self._forms: dict[nn.Module, Form] = {}
        self._tape: Tape = CudaTape(self.device) if tape is None else tape

    # --------------------------------------------------------------------------------------------------------- capture

    def capture(self) -> None:
        """Capture every bucket, the largest first: the smaller ones then fit into its memory.

        Raises
        ------
        Exception
            Whatever stops it. Nothing is captured then, and the memory is returned.
        """
        try:
            for rows in reversed(self.rows):
                began, before = time.perf_counter(), self.nbytes()
                bucket = self.buckets[rows] = self._capture(rows)
                bucket.seconds, bucket.nbytes = time.perf_counter() - began, self.nbytes() - before
        except BaseException:
            self.release()
            raise

    def nbytes(self) -> int:
        """Return the bytes that all buckets hold: what segments share, and bridges."""
        return self._tape.held() + self.bridges.nbytes()

    def release(self) -> None:
        """Free all segments and bridges."""
        for bucket in self.buckets.values():
            bucket.program.reset()
        self.buckets = {}
        self.bridges = Bridges(self.device, self.rows[-1])
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def _capture(self, rows: int) -> Bucket:
        with torch.no_grad():
            named, width, dtype = self._watched(rows)  # the first warm-up: as the model runs, metadata included
            hidden = self.bridges.take("hidden", rows, (width,), dtype)
            per_token, given = self._given(named, rows)
            with self._tape.session():
                self.run(self.recorder(rows), hidden, given)  # the second, on the stream of the capture
                recorder = self.recorder(rows, self._tape)
                try:
                    recorder.begin()
                    output = self.run(recorder, hidden, given)
                    captured = recorder.finish(output)
                except BaseException:
                    self._tape.abandon()
                    recorder.program.reset()
                    raise
        return Bucket(rows, captured, hidden, per_token, given)

    def recorder(self, rows: int, tape: Tape | None = None, results: Results | None = None) -> Recorder:
        """Return a recorder for a bucket."""
        return Recorder(self.bridges, rows, len(self.forwards), tape, results)

    def _watched(self, rows: int) -> tuple[list[dict[str, Any]], int, torch.dtype]:
        """Run the inner module eagerly. Return what each layer got by name; width and dtype of hidden states."""
        found: dict[int, dict[str, Any]] = {}
        states: list[Tensor] = []
        passed: list[Passed] = []

        def watching(index: int) -> Callable[..., Any]:
            def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
                if args or index != len(found):
                    raise CaptureError(
                        f"layer {index} is called with {len(args)} arguments without a name, as number {len(found)}; "
                        "need hidden states, the others by name, and each layer once in order"
                    )
                if hidden.ndim != 3 or tuple(hidden.shape[:2]) != (1, rows):
                    raise CaptureError(f"layer {index} gets {list(hidden.shape)}; need [1, {rows}, hidden]")
                if passed and not passed[-1].arrived(hidden):
                    raise changed_between(index)
                found[index] = kwargs
                states[:] = [hidden]
                out = _like(hidden, index, self.forwards[index](hidden, **kwargs))
                passed[:] = [Passed(out)]
                return out

            return forward

        with ExitStack() as undo:
            for module in self.spec.breaks:
                undo.enter_context(replaced_forward(module, module_break.watching(module, self._forms, rows)))
            for i, layer in enumerate(self.spec.layers):
                undo.enter_context(replaced_forward(layer, watching(i)))
            with torch.inference_mode(mode=False), torch.no_grad():  # so that writes to hidden states are seen
                self.spec.example(rows)
        if len(found) != len(self.forwards):
            raise CaptureError(
                f"the inner module called {len(found)} of {len(self.forwards)} layers; need all of them: "
                "name those that run in layers="
            )
        return [found[i] for i in range(len(found))], states[0].shape[2], states[0].dtype

    def _given(
        self, named: Sequence[Mapping[str, Any]], rows: int
    ) -> tuple[list[dict[str, list[Tensor]]], list[dict[str, Any]]]:
        """Return the bridges of per-token arguments, and what captured code gets, for each layer.

        A tensor that several layers get has one bridge.
        """
        sources: list[tuple[Tensor, Tensor]] = []
        bridges: list[dict[str, list[Tensor]]] = []
        given: list[dict[str, Any]] = []
        for arguments in named:
            mine: dict[str, list[Tensor]] = {}
            gets: dict[str, Any] = {}
            for name, value in arguments.items():
                if name in self.spec.per_token:
                    leaves, tree = pytree.tree_flatten(value)
                    mine[name] = [self._per_token(sources, leaf, rows, name) for leaf in leaves]
                    gets[name] = pytree.tree_unflatten([bridge.unsqueeze(0) for bridge in mine[name]], tree)
                else:
                    gets[name] = _WITHHELD[name] if name in _WITHHELD else Later(name)
            bridges.append(mine)
            given.append(gets)
        return bridges, given

    def _per_token(self, sources: list[tuple[Tensor, Tensor]], leaf: Any, rows: int, name: str) -> Tensor:
        if not isinstance(leaf, Tensor) or leaf.ndim < 2 or leaf.shape[:2] != (1, rows):
            shape = list(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
            raise CaptureError(f"{name} is {shape}; an argument with one row for each token needs [1, {rows}, ...]")
        for other, bridge in sources:
            if other is leaf:
                return bridge
        bridge = self.bridges.take(f"argument {len(sources)}", rows, tuple(leaf.shape[2:]), leaf.dtype)
        self.bridges.fill(bridge, leaf[0])
        sources.append((leaf, bridge))
        return bridge

    def run(self, recorder: Recorder, hidden: Tensor, given: Sequence[Mapping[str, Any]]) -> Tensor:
        """Run all layers on [rows, hidden] under a recorder; return the same shape."""
        states = hidden.unsqueeze(0)
        with self._breaking(recorder):
            for index, arguments in enumerate(given):
                states = self._layer(recorder, index, states, arguments)
        return states[0]

    def run_layer(self, recorder: Recorder, index: int, states: Tensor, given: Mapping[str, Any]) -> Tensor:
        """Run one layer on [1, rows, hidden] under a recorder."""
        with self._breaking(recorder):
            return self._layer(recorder, index, states, given)

    @contextmanager
    def _breaking(self, recorder: Recorder) -> Iterator[None]:
        with program.recording(recorder), ExitStack() as undo:
            undo.enter_context(hf_attention.breaking(self.spec.attention))
            for module, form in self._forms.items():
                undo.enter_context(replaced_forward(module, module_break.breaking(module, module.forward, form)))
            yield

    def _layer(self, recorder: Recorder, index: int, states: Tensor, given: Mapping[str, Any]) -> Tensor:
        recorder.enter(index)
        return _like(states, index, self.forwards[index](states, **given))

    # ---------------------------------------------------------------------------------------------------------- replay

    def start(self, bucket: Bucket, hidden: Tensor) -> None:
        """Load hidden states [sequences, length, hidden]."""
        bucket.loaded.clear()
        self.bridges.fill(bucket.hidden, hidden.reshape(-1, hidden.shape[-1]))

    def load(self, bucket: Bucket, index: int, batch: Batch, arguments: Mapping[str, Any]) -> None:
        """Load the per-token arguments of one layer, unless the layer before has the same ones.

        Raises
        ------
        CaptureError
            If the layer's arguments are not what was captured. Layer 0 was checked when the call began.
        """
        if arguments.keys() != bucket.given[index].keys() and (fault := self.misnamed(bucket, index, arguments)):
            raise CaptureError(_LATER.format(index=index, fault=fault))
        for name, bridges in bucket.per_token[index].items():
            value = arguments[name]
            if bucket.loaded.get(name) is value and all(map(operator.is_, bridges, bucket.per_token[index - 1][name])):
                continue
            if fault := self._unlike(name, bridges, batch, value):
                raise CaptureError(_LATER.format(index=index, fault=fault))
            bucket.loaded[name] = value
            for bridge, leaf in zip(bridges, pytree.tree_leaves(value), strict=True):
                self._load(bridge, leaf, batch)

    def replay(self, bucket: Bucket, index: int, batch: Batch, arguments: Mapping[str, Any]) -> None:
        """Run the steps of one layer."""
        self.load(bucket, index, batch, arguments)
        for step in bucket.program.steps[index]:
            if isinstance(step, Break):
                self.bridges.fill(step.output, step.run(batch, step.inputs, arguments))
            else:
                step.replay()

    def _load(self, bridge: Tensor, leaf: Tensor, batch: Batch) -> None:
        rows = bridge[: batch.tokens].view(batch.sequences, batch.length, *bridge.shape[1:])
        rows.copy_(leaf)  # one row of angles may serve all sequences
        self.bridges.rest(bridge, batch.tokens)

    def result(self, bucket: Bucket, batch: Batch) -> Tensor:
        """Return a copy of what the layers computed, [sequences, length, hidden]: the next replay overwrites it."""
        output = bucket.program.output
        assert output is not None
        return output[: batch.tokens].clone().view(batch.sequences, batch.length, output.shape[-1])

    def fits(self, bucket: Bucket, index: int, batch: Batch, hidden: Tensor, arguments: Mapping[str, Any]) -> str:
        """Return why a layer's hidden states or arguments are not what was captured; empty if they are."""
        need = (batch.sequences, batch.length, *bucket.hidden.shape[1:])
        if tuple(hidden.shape) != need or hidden.dtype != bucket.hidden.dtype:
            return f"hidden states are {_text(hidden)}, need {list(need)} of {bucket.hidden.dtype}"
        for name, bridges in bucket.per_token[index].items():
            if fault := self._unlike(name, bridges, batch, arguments.get(name)):
                return fault
        return ""

    def misnamed(self, bucket: Bucket, index: int, arguments: Mapping[str, Any]) -> str:
        """Return which of a layer's arguments was not captured, or is missing; empty if there is none."""
        known = bucket.given[index].keys()
        for name in arguments.keys() - known - _NEUTRAL:
            if arguments[name] is None or arguments[name] is False:
                continue
            return f"the layers get {name}, which was not captured"
        for name in known - arguments.keys() - _NEUTRAL:
            return f"the layers do not get {name}, which was captured"
        return ""

    @staticmethod
    def _unlike(name: str, bridges: Sequence[Tensor], batch: Batch, value: Any) -> str:
        """Return why a per-token argument is not what was captured; empty if it is."""
        leaves = pytree.tree_leaves(value)
        if len(leaves) != len(bridges):
            return f"{name} has {len(leaves)} tensors, {len(bridges)} were captured"
        for leaf, bridge in zip(leaves, bridges, strict=True):
            need = (batch.sequences, batch.length, *bridge.shape[1:])
            one = (1, *need[1:])
            if not isinstance(leaf, Tensor) or tuple(leaf.shape) not in (need, one) or leaf.dtype != bridge.dtype:
                return f"{name} is {_text(leaf)}, needs {list(need)} of {bridge.dtype}"
        return ""


class Passed:
    """Remembers hidden states that one layer returned, to see whether the next one gets them unchanged.

    It cannot see writes to inference tensors, which count none.
    """

    def __init__(self, states: Tensor) -> None:
        self._states, self._version = states, _version(states)

    def arrived(self, states: object) -> bool:
        """Whether these are the same hidden states, or a view of all of them, and not written since."""
        if not isinstance(states, Tensor):
            return False
        return (states is self._states or states.is_set_to(self._states)) and _version(states) == self._version


def _version(states: Tensor) -> int:
    return 0 if states.is_inference() else states._version


def changed_between(index: int) -> CaptureError:
    """Return the error for hidden states that change on their way to a layer."""
    return CaptureError(
        f"hidden states change between layer {index - 1} and layer {index}: the module that runs the layers, or a "
        "hook, does something with them there, which a replay would leave out: do it inside a layer, or capture only "
        "layers between which nothing happens"
    )


def _like(states: Tensor, index: int, found: object) -> Tensor:
    """Return what a layer gave; CaptureError if these are no hidden states."""
    if not isinstance(found, Tensor) or found.shape != states.shape:
        raise CaptureError(f"layer {index} returns {_text(found)}; need hidden states {list(states.shape)}")
    return found


def _text(value: object) -> str:
    return f"{list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
