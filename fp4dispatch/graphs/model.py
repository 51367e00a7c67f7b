"""Graphs around one model: which calls are replayed, which run eagerly and why, and the way back."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fp4dispatch.errors import InputError
from fp4dispatch.graphs import decode
from fp4dispatch.graphs.decode import DecodeStep
from fp4dispatch.graphs.hf_attention import CACHE, VARLEN
from fp4dispatch.graphs.layers import Bucket, CapturedLayers, Spec, replace_forward
from fp4dispatch.graphs.program import Batch
from fp4dispatch.graphs.verify import Verification
from fp4dispatch.graphs.watch import Watch
from fp4dispatch.machine import capture
from fp4dispatch.models.quantized_linear import QuantizedLinear
from fp4dispatch.models.warming import warmup
from fp4dispatch.tune.agreement import Group, Ranks

_log = logging.getLogger("fp4dispatch")

MOST_PADDING = 2
"""A bucket may be at most so many times as large as the batch. Larger ones cost more than they save."""
_NEUTRAL = {"attention_mask", "position_ids", "cache_position", "use_cache", CACHE, *VARLEN}
"""Arguments of layers that may differ from call to call: only breaks use them."""


@dataclass
class _Call:
    """One call of the inner module, as the forwards of its layers find it."""

    thread: int
    inputs: Mapping[str, Any]
    reason: str = ""
    """Name of the condition why it runs eagerly."""
    batch: Batch | None = None
    bucket: Bucket | None = None
    checks: Verification | None = None
    step: DecodeStep | None = None
    hidden: Tensor | None = None
    arguments: list[Mapping[str, Any]] = field(default_factory=list)
    loaded: dict[str, Any] = field(default_factory=dict)


class Graphs:
    """Captured graphs of one model. :func:`fp4dispatch.graphs.enable` makes it.

    Thread-safe: while one thread runs the model, calls of other threads run eagerly.
    """

    def __init__(
        self,
        spec: Spec,
        tokens: Sequence[int],
        *,
        decode_batches: Iterable[int] = (),
        verify_replays: int = 0,
        group: Group = None,
        agree: bool = True,
        tapes: Callable[[], Any] | None = None,
    ) -> None:
        self.spec = spec
        self.rows = sorted(set(tokens))
        self.decode_batches = frozenset(decode_batches)
        self.steps: dict[int, DecodeStep] = {}
        self.layers: CapturedLayers | None = None
        self.counts: Counter[tuple[str, str]] = Counter()
        self.disabled = ""
        """Why every call runs eagerly; empty while graphs are in use."""
        self._verify, self._checked = verify_replays, Counter[int]()
        self._group, self._agree, self._tapes = group, agree, tapes
        self._lock = threading.Lock()
        self._call: _Call | None = None
        self._said: set[str] = set()
        self._undo: list[Callable[[], None]] = []
        self._watch: Watch | None = None

    # --------------------------------------------------------------------------------------------------------- capture

    def capture(self) -> None:
        """Capture all buckets, and replace the forwards of the model. On a failure the model stays eager: a WARNING.

        All ranks of the group agree: if the capture fails on one, none replays.
        """
        ranks = Ranks(self._group, alone=not self._agree)
        layers = CapturedLayers(self.spec, self.rows, self._tapes and self._tapes())
        fault = ""
        try:
            with capture.mode("piecewise", smallest_m=self.rows[0]):
                if any(isinstance(m, QuantizedLinear) for layer in self.spec.layers for m in layer.modules()):
                    warmup(self.spec.inner, self.rows, agree=False)
                layers.capture()
        except Exception as error:  # whatever it is, the model itself still runs
            fault = f"{type(error).__name__}: {error}"
        faults = {rank: found for rank, found in enumerate(ranks.gather(fault)) if found}
        if faults:
            layers.release()
            where = "" if ranks.size == 1 else f" on ranks {sorted(faults)}"
            self.disabled = f"the capture failed{where}: {next(iter(faults.values()))}"
            _log.warning("%s runs without CUDA graphs: %s", type(self.spec.inner).__name__, self.disabled)
            return
        for rows in layers.buckets:
            self.counts["captures", str(rows)] += 1
        self.layers, self._watch = layers, Watch(self.spec.layers)
        self._undo.append(replace_forward(self.spec.inner, self._inner(self.spec.inner.forward)))
        for index, layer in enumerate(self.spec.layers):
            self._undo.append(replace_forward(layer, self._layer(index, layers.forwards[index])))

    def release(self) -> None:
        """Restore the model, and free all graphs."""
        with self._lock:
            while self._undo:
                self._undo.pop()()
            self._drop("graphs were disabled")

    def _drop(self, why: str) -> None:
        self.disabled = why
        for step in self.steps.values():
            step.reset()
        self.steps = {}
        if self.layers is not None:
            self.layers.release()
            self.layers = None

    # ------------------------------------------------------------------------------------------------------------ calls

    def _inner(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the inner module's forward: it decides what the layers' forwards do."""

        def inner(*args: Any, **kwargs: Any) -> Any:
            if not self._lock.acquire(blocking=False):
                self._reject("busy")
                return self._without(forward, args, kwargs)
            try:
                call = self._call = _Call(threading.get_ident(), kwargs, self._reason_before(kwargs))
                try:
                    found = forward(*args, **kwargs)
                finally:
                    self._call = None
                if call.reason:
                    self._reject(call.reason)
                self._after(call)
                return found
            finally:
                self._lock.release()

        return inner

    def _without(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run eagerly, also inside a call of this thread."""
        call = self._call
        if call is None or call.thread != threading.get_ident():
            return forward(*args, **kwargs)
        self._call = None
        try:
            return forward(*args, **kwargs)
        finally:
            self._call = call

    def _layer(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward of one layer."""
        last = len(self.spec.layers) - 1

        def layer(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            call = self._call
            if call is None or call.thread != threading.get_ident() or call.reason:
                return forward(hidden, *args, **kwargs)
            if index == 0:
                self._begin(call, hidden, args, kwargs)
                if call.reason:
                    return forward(hidden, *args, **kwargs)
            if call.step is not None:
                call.step.load(index, kwargs, call.loaded)
                return call.step.replay(call.hidden) if index == last else hidden
            if call.bucket is None or call.batch is None or self.layers is None:  # a step to capture afterwards
                call.arguments.append(dict(kwargs))
                return forward(hidden, *args, **kwargs)
            if call.checks is not None:
                with capture.mode("piecewise", smallest_m=self.rows[0]):
                    call.checks.layer(index, kwargs)
                return call.checks.result() if index == last else hidden
            self.layers.replay(call.bucket, index, call.batch, kwargs)
            return self.layers.result(call.bucket, call.batch) if index == last else hidden

        return layer

    def _begin(self, call: _Call, hidden: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Decide how this call runs. Nothing has run in the layers yet, so everything can still run eagerly."""
        assert self.layers is not None
        if args or hidden.ndim != 3:
            call.reason = "arguments"
            return
        batch = call.batch = Batch(hidden.shape[0], hidden.shape[1])
        if batch.tokens == 0:
            call.reason = "empty"
            return
        if batch.length == 1 and batch.sequences in self.decode_batches and not decode.why_not(kwargs.get(CACHE)):
            step = self.steps.get(batch.sequences)
            if step is not None and step.serves(kwargs[CACHE]) and not step.fits(0, kwargs):
                call.step, call.hidden = step, hidden
                self.counts["decode replays", str(batch.sequences)] += 1
                return
            if step is None or not step.serves(kwargs[CACHE]):
                call.hidden = hidden.clone()  # run eagerly; captured afterwards
                return
        bucket = self.layers.bucket_of(batch.tokens)
        if bucket is None:
            call.reason = "too_many_tokens"
        elif bucket.rows > MOST_PADDING * batch.tokens:
            call.reason = "padding"
        elif wrong := self._other_arguments(bucket, batch, kwargs):
            call.reason = "arguments"
            _log.debug("not replayed: %s", wrong)
        else:
            call.bucket = bucket
            self.counts["replays", str(bucket.rows)] += 1
            if self._checked[bucket.rows] < self._verify:
                call.checks = Verification(self.layers, bucket, batch, hidden)
            else:
                self.layers.start(bucket, hidden)

    def _other_arguments(self, bucket: Bucket, batch: Batch, kwargs: Mapping[str, Any]) -> str:
        assert self.layers is not None
        known = bucket.given[0].keys()
        for name in kwargs.keys() - known - _NEUTRAL:
            if kwargs[name] is None or kwargs[name] is False:
                continue
            return f"the layers get {name}, which was not captured"
        for name in known - kwargs.keys() - _NEUTRAL:
            return f"the layers do not get {name}, which was captured"
        return self.layers.fits(bucket, 0, batch, kwargs)

    def _reason_before(self, kwargs: Mapping[str, Any]) -> str:
        """Return why a call must run eagerly, as far as the inner module's arguments tell."""
        if self.disabled:
            return "disabled"
        if torch.is_grad_enabled():
            return "grad"
        if self.spec.inner.training:
            return "training"
        if any(kwargs.get(name) for name in ("output_hidden_states", "output_attentions", "output_router_logits")):
            return "outputs"
        if torch.is_autocast_enabled("cuda"):
            return "autocast"
        if capture.is_capturing():
            return "captured_by_caller"
        assert self._watch is not None
        if name := self._watch.moved():
            self._drop(f"{name} moved or was replaced after the capture")
            _log.warning("%s runs without CUDA graphs: %s", type(self.spec.inner).__name__, self.disabled)
            return "weights_moved"
        return ""

    def _after(self, call: _Call) -> None:
        """Do what must wait until the call is over: compare, or capture a decode step."""
        if call.checks is not None and call.bucket is not None:
            self._checked[call.bucket.rows] += 1
            if faults := call.checks.faults():
                self._drop(f"replays of {call.bucket.rows} tokens differ from eager: {'; '.join(faults[:3])}")
                _log.warning("%s runs without CUDA graphs: %s", type(self.spec.inner).__name__, self.disabled)
        elif call.arguments and call.hidden is not None and self.layers is not None and call.batch is not None:
            self._capture_step(call, call.hidden, call.batch)

    def _capture_step(self, call: _Call, hidden: Tensor, batch: Batch) -> None:
        cache = call.arguments[0][CACHE]
        if any(int(layer.cumulative_length) >= layer.max_cache_len for layer in cache.layers):
            return  # no room for the warm-ups
        old = self.steps.pop(batch.sequences, None)
        if old is not None:
            old.reset()
        try:
            with capture.mode("full", smallest_m=min(self.decode_batches)):
                if any(isinstance(m, QuantizedLinear) for m in self.spec.inner.modules()):
                    warmup(self.spec.inner, [batch.sequences], agree=False)
                assert self.layers is not None
                self.steps[batch.sequences] = DecodeStep(
                    self.layers.forwards, hidden, call.arguments, self._tapes and self._tapes()
                )
            self.counts["decode captures", str(batch.sequences)] += 1
        except Exception as error:  # the call itself is done; later ones run in segments or eagerly
            self.decode_batches -= {batch.sequences}
            _log.warning("decode steps of %d sequences run without one graph: %s", batch.sequences, error)

    def _reject(self, reason: str) -> None:
        self.counts["rejects", reason] += 1
        if reason not in self._said:
            self._said.add(reason)
            _log.info("%s runs eagerly: %s", type(self.spec.inner).__name__, reason)


def check_tokens(name: str, values: Iterable[int]) -> list[int]:
    """Return numbers of tokens or sequences, sorted.

    Raises
    ------
    InputError
        If there is none, or one is not a whole number of at least 1.
    """
    found = list(values) if isinstance(values, Iterable) else [values]
    if not found or any(type(m) is not int or m < 1 for m in found):
        raise InputError(f"{name}={values!r:.80}: need whole numbers of at least 1")
    return sorted(set(found))


