"""Graphs around one model: which calls are replayed, which run eagerly and why, and the way back."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fp4dispatch.errors import CaptureDeniedError, CaptureError, InputError
from fp4dispatch.graphs import batch as _batch
from fp4dispatch.graphs import fitness, measuring
from fp4dispatch.graphs.conditions import GraphReason, Said, reasons
from fp4dispatch.graphs.segments import decode
from fp4dispatch.graphs.segments.decode import DecodeStep
from fp4dispatch.graphs.segments.forwards import replace_forward, replaced_forward
from fp4dispatch.graphs.segments.hf_attention import CACHE
from fp4dispatch.graphs.segments.layers import Bucket, CapturedLayers, Passed, Spec, changed_between
from fp4dispatch.graphs.segments.program import Batch
from fp4dispatch.graphs.segments.verify import Verification
from fp4dispatch.graphs.stats import Stats
from fp4dispatch.graphs.watch import Watch
from fp4dispatch.machine import capture
from fp4dispatch.machine import log as _log
from fp4dispatch.machine.locks import ForkSafeLock
from fp4dispatch.models.quantized_linear import QuantizedLinear
from fp4dispatch.models.warming import warmup
from fp4dispatch.tune.agreement import Group, Ranks

_INTERMEDIATES = ("output_hidden_states", "output_attentions", "output_router_logits")
_EXTRA = ("pixel_values", "pixel_values_videos", "input_features", "encoder_hidden_states", "encoder_attention_mask")


@dataclass
class _Call:
    """One call of the inner module, as the forwards of its layers find it."""

    thread: int
    facts: dict[str, Any]
    """What is known about it without its number of tokens: fields of :class:`fp4dispatch.graphs.batch.Batch`."""
    eager: tuple[GraphReason, ...] = ()
    """Why it runs eagerly."""
    batch: Batch | None = None
    bucket: Bucket | None = None
    checks: Verification | None = None
    step: DecodeStep | None = None
    hidden: Tensor | None = None
    """Hidden states of a decode step that is captured or replayed."""
    passed: Passed | None = None
    """In a replayed call all layers but the last return the hidden states of the first: whether these are unchanged."""
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
        clock: measuring.Clock | None = None,
        tapes: Callable[[], Any] | None = None,
    ) -> None:
        self.spec = spec
        self.rows = sorted(set(tokens))
        self.decode_batches = frozenset(decode_batches)
        self.steps: dict[int, DecodeStep] = {}
        self.layers: CapturedLayers | None = None
        name = type(spec.inner).__name__
        self.stats, self.decode_stats = Stats(name), Stats(f"{name} decode")
        self.disabled = ""
        """Why every call runs eagerly; empty while graphs are in use."""
        self.vetoes: tuple[str, ...] = ()
        self._device_type = next(spec.inner.parameters()).device.type
        self._declared: list[dict[str, Any]] = []
        self._verify, self._checked = verify_replays, Counter[int]()
        self._group, self._agree, self._tapes = group, agree, tapes
        self._clock = clock
        self.measured: dict[int, measuring.Measured] = {}
        """By bucket, what was measured of it; empty without a clock."""
        self.measure_seconds = 0.0
        """Time that this took."""
        self._lock, self._runs = ForkSafeLock(), 0
        """``_runs``: the thread that runs the model in its graphs, 0 if none does."""
        self._call: _Call | None = None
        self._said = Said(name)
        self._lora, self._hooks = fitness.adapters(spec), fitness.Hooks(spec)
        self._adapters: tuple[str, ...] = ()
        self._adapter_state: object = None
        self._undo: list[Callable[[], None]] = []
        self._watch: Watch | None = None

    # --------------------------------------------------------------------------------------------------------- capture

    def capture(self) -> None:
        """Capture all buckets, and replace the forwards of the model. On a failure the model stays eager: a WARNING.

        All ranks of the group agree: if the capture fails on one, none replays. With a clock, the buckets are measured
        then, and calls that eager runs faster stay eager.
        """
        ranks = Ranks(self._group, alone=not self._agree)
        layers = CapturedLayers(self.spec, self.rows, self._tapes and self._tapes())
        fault = fitness.unfit(self.spec, self.rows, self._hooks)
        try:
            if fault:
                raise InputError(fault)
            # Autocast around this call says nothing about later ones: calls under it run eagerly.
            plain = torch.autocast(layers.device.type, enabled=False)
            with plain, capture.mode("piecewise", smallest_m=self.rows[0]):
                if any(isinstance(m, QuantizedLinear) for layer in self.spec.layers for m in layer.modules()):
                    warmup(self.spec.inner, self.rows, agree=False)
                layers.capture()
        except CaptureDeniedError as error:
            fault, self.vetoes = str(error), (str(error),)
        except Exception as error:  # whatever it is, the model itself still runs
            fault = f"{type(error).__name__}: {error}"
        faults = {rank: found for rank, found in enumerate(ranks.gather(fault)) if found}
        if faults:
            layers.release()
            where = "" if ranks.size == 1 else f" on ranks {sorted(faults)}"
            self.disabled = f"the capture failed{where}: {next(iter(faults.values()))}"
            _log.warning("%s runs without CUDA graphs: %s", type(self.spec.inner).__name__, self.disabled)
            return
        for rows, bucket in layers.buckets.items():
            self.stats.captured(rows, bucket.seconds, bucket.nbytes)
        self._adapters, self._adapter_state = fitness.active_adapters(self._lora), fitness.adapter_state(self._lora)
        self.layers = layers
        for index, layer in enumerate(self.spec.layers):
            self._undo.append(replace_forward(layer, self._layer(index, layers.forwards[index])))
        own = self.spec.inner.forward
        self._undo.append(replace_forward(self.spec.inner, self._inner(own)))  # may be a layer too
        self._watch = Watch(self.spec.layers)  # knows these forwards
        if self._clock is not None:
            self._measure(self._clock, own, ranks)

    def _measure(self, clock: measuring.Clock, own: Callable[..., Any], ranks: Ranks) -> None:
        """Find from how many tokens on each bucket pays. ``own``: the inner module's forward without graphs."""
        assert self.layers is not None
        began, stats, verify = time.perf_counter(), self.stats, self._verify
        self.stats, self._verify = Stats(), 0  # these calls are none of the user's

        def eager(tokens: int) -> None:
            with replaced_forward(self.spec.inner, own):
                self.spec.example(tokens)

        def replay(tokens: int) -> None:
            before = self.stats.as_dict()["replays"]
            self.spec.example(tokens)
            if self.stats.as_dict()["replays"] == before:
                raise CaptureError(f"it ran eagerly: {self.disabled or self.stats.as_dict()['reasons']}")

        try:
            with torch.no_grad(), torch.autocast(self.layers.device.type, enabled=False):
                self.measured = measuring.measure(sorted(self.layers.buckets), eager, replay, clock, ranks)
        except CaptureError as error:  # the graphs are right; only their speed is not known
            _log.warning("%s uses all its CUDA graphs, unmeasured: %s", type(self.spec.inner).__name__, error)
        except BaseException:  # a rank died, or an interrupt: nobody will hold these graphs
            self.release()
            raise
        finally:
            self.stats, self._verify = stats, verify
            if self.layers is not None and self.layers.device.type == "cuda":
                torch.cuda.empty_cache()  # activations of the eager calls
        for rows, measured in self.measured.items():
            self.layers.buckets[rows].pays_from = measured.pays_from
            stats.measured(rows, measured.pays_from)
        self.measure_seconds = time.perf_counter() - began

    def release(self) -> None:
        """Restore the model, and free all graphs. Waits for a call of another thread that replays them."""
        if self._runs == threading.get_ident():
            raise CaptureError("graphs cannot be disabled inside a call that they run: do it after the call")
        while not self._start():
            time.sleep(0.001)
        try:
            while self._undo:
                self._undo.pop()()
            self._drop("graphs were disabled")
        finally:
            self._runs = 0

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

        def run(*args: Any, **kwargs: Any) -> Any:
            if not self._start():
                self._reject(None, reasons(_batch.Batch(1, (), busy=True)))
                return self._without(forward, args, kwargs)
            try:
                self._drop_if_moved()
                call = self._call = _Call(threading.get_ident(), self._facts(kwargs))
                try:
                    found = forward(*args, **kwargs)
                finally:
                    self._call = None
                self._after(call)
                return found
            finally:
                self._runs = 0

        why = "CUDA graphs of fp4dispatch are replayed here"
        untraced = torch.compiler.disable(run, reason=why)  # type: ignore[no-untyped-call]

        def inner(*args: Any, **kwargs: Any) -> Any:
            if _traced():
                return forward(*args, **kwargs)
            if _in_a_mode():
                self._reject(None, reasons(_batch.Batch(1, (), recorded=True)))
                return self._without(forward, args, kwargs)
            return untraced(*args, **kwargs)

        return inner

    def _start(self) -> bool:
        """Take the graphs for this thread; False if a call of this or of another thread has them."""
        with self._lock:
            if self._runs:
                return False
            self._runs = threading.get_ident()
            return True

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
            if call is None or call.thread != threading.get_ident() or call.eager:
                return forward(hidden, *args, **kwargs)
            if index == 0:
                self._begin(call, hidden, args, kwargs)
                if call.eager:
                    return forward(hidden, *args, **kwargs)
                call.passed = Passed(hidden)
            elif (call.step or call.bucket) and not (call.passed and call.passed.arrived(hidden)):
                raise changed_between(index)  # layers have run and written their cache, so the call cannot run eagerly
            if call.step is not None and call.hidden is not None:
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
        batch = call.batch = Batch(*hidden.shape[:2]) if hidden.ndim == 3 else Batch(0, 0)
        step = batch.length == 1 and batch.sequences in self.decode_batches and not decode.why_not(kwargs.get(CACHE))
        if step and not reasons(_batch.Batch(batch.tokens, (batch.tokens,), **call.facts)):
            known = self.steps.get(batch.sequences)
            if known is None or not known.serves(kwargs[CACHE]):
                call.hidden = hidden.clone()  # runs eagerly, and is captured afterwards
                return
            if not known.fits(0, hidden, kwargs):
                call.step, call.hidden = known, hidden
                self.decode_stats.replayed(batch.sequences)
                return
        facts = _batch.Batch(batch.tokens, *self._captured(), **call.facts)
        bucket = None if self.layers is None or facts.bucket is None else self.layers.buckets[facts.bucket]
        if args or batch.tokens == 0:
            facts = replace(facts, misfit="no tokens" if batch.tokens == 0 else "arguments without a name")
        elif bucket is not None:
            facts = replace(facts, misfit=self._misfit(bucket, batch, hidden, kwargs))
        call.eager = reasons(facts)
        if call.eager or bucket is None or self.layers is None:
            self._reject(facts.bucket, call.eager)
            return
        call.bucket = bucket
        self.stats.replayed(bucket.rows)
        if self._checked[bucket.rows] < self._verify:
            call.checks = Verification(self.layers, bucket, batch, hidden)
        else:
            self.layers.start(bucket, hidden)

    def _misfit(self, bucket: Bucket, batch: Batch, hidden: Tensor, kwargs: Mapping[str, Any]) -> str:
        assert self.layers is not None
        return self.layers.misnamed(bucket, 0, kwargs) or self.layers.fits(bucket, 0, batch, hidden, kwargs)

    def _drop_if_moved(self) -> None:
        """Give the graphs up if they would read old addresses. Only while no other thread runs them."""
        if not self.disabled and self._watch is not None and (name := self._watch.moved()):
            self._drop(f"{name} moved or was replaced after the capture")
            _log.warning("%s runs without CUDA graphs: %s", type(self.spec.inner).__name__, self.disabled)

    def _facts(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the inner module's arguments and the process tell about a call."""
        config = getattr(self.spec.inner, "config", None)  # Transformers takes from it what the call does not say
        return {
            "training": self.spec.inner.training,
            "grad_enabled": torch.is_grad_enabled(),
            "extra_inputs": tuple(name for name in _EXTRA if kwargs.get(name) is not None),
            "intermediates": tuple(name for name in _INTERMEDIATES if kwargs.get(name, getattr(config, name, False))),
            "autocast": torch.is_autocast_enabled(self._device_type),
            "hooked": self._hooks.found(),
            "capturing": capture.is_capturing(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "adapters": fitness.active_adapters(self._lora) if self._lora else (),
            "captured_adapters": self._adapters,
            "adapters_changed": bool(self._lora) and fitness.adapter_state(self._lora) != self._adapter_state,
            "disabled": self.disabled,
            "vetoes": self.vetoes,
            **{name: value for declared in self._declared for name, value in declared.items()},
        }

    def _captured(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the buckets, ascending, and from how many tokens on each pays."""
        held = {} if self.layers is None else self.layers.buckets
        buckets = tuple(sorted(held))
        return buckets, tuple(held[rows].pays_from for rows in buckets)

    def why_not(self, num_tokens: int, facts: Mapping[str, Any]) -> tuple[GraphReason, ...]:
        """Return the reasons why a call of so many tokens would run eagerly now."""
        _batch.check_facts(facts)
        with self._lock:
            if not self._runs:
                self._drop_if_moved()
        now = {name: value for name, value in self._facts({}).items() if name not in ("training", "grad_enabled")}
        return reasons(_batch.Batch(num_tokens, *self._captured(), **(now | dict(facts))))

    @contextmanager
    def declare(self, facts: Mapping[str, Any]) -> Iterator[None]:
        """Add facts to all calls of the ``with`` block."""
        _batch.check_facts(facts)
        mine = dict(facts)
        with self._lock:
            self._declared = [*self._declared, mine]
        try:
            yield
        finally:  # blocks of several threads or tasks may end in any order
            with self._lock:
                self._declared = [each for each in self._declared if each is not mine]

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
            made = self.steps[batch.sequences]
            self.decode_stats.captured(batch.sequences, made.seconds, made.nbytes)
        except Exception as error:  # the call itself is done; later ones run in segments or eagerly
            self.decode_batches -= {batch.sequences}
            _log.warning("decode steps of %d sequences run without one graph: %s", batch.sequences, error)

    def _reject(self, bucket: int | None, found: tuple[GraphReason, ...]) -> None:
        self.stats.rejected(bucket, [reason.condition for reason in found])
        self._said.say(found)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _traced() -> bool:
    """Whether ``torch.export`` or ``torch.jit.trace`` records each operation: a replay has none to show."""
    return bool(torch.compiler.is_exporting() or torch._C._is_tracing())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _in_a_mode() -> bool:
    """Whether a mode of PyTorch sees each operation."""
    return bool(torch._C._len_torch_dispatch_stack())
