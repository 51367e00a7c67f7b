"""What one call of a model is, as plain facts, and the predicates that say when it must not run in CUDA graphs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from fp4dispatch.errors import InputError

MAX_PADDING = 2
"""A batch is padded to at most this many times its tokens."""


@dataclass(frozen=True)
class Batch:
    """Facts about one call of a model. Holds no tensor. The defaults describe a call that graphs can run.

    Parameters
    ----------
    num_tokens
        Tokens of the call, over all requests.
    buckets
        Captured numbers of tokens, ascending. Empty: nothing is captured.
    pays_from
        For each bucket, the smallest number of tokens whose replay is not slower than an eager call, as measured;
        larger than the bucket if there is none. Empty: not measured.
    training
        Whether the model is in training mode.
    grad_enabled
        Whether autograd records this call.
    decode_verify
        Whether the call verifies the draft tokens of speculative decoding.
    moved_inputs
        Names of static inputs that are at another address than at capture.
    input_logits
        Whether logits of input tokens are wanted. Logits of each request's last token alone are none of these.
    extra_inputs
        Names of encoder or multimodal inputs, e.g. ``pixel_values``.
    offloaded
        Names of weights that are on the CPU, or that a hook brings to the GPU for each call.
    idle_ranks
        Pipeline or data-parallel ranks that run no tokens in this step.
    compiled
        Whether the model, or a module around it, is wrapped by ``torch.compile``.
    adapters, captured_adapters
        Names of the LoRA adapters that are active now, and of those that were at capture.
    adapters_changed
        Whether a module has other active or merged adapters, or other scales, than at capture.
    deterministic
        Whether the request must give the same bits however many tokens share its batch.
    intermediates
        Names of outputs inside of the layers that are wanted, e.g. ``output_hidden_states``.
    autocast
        Whether autocast is on.
    hooked
        Names of captured modules that have forward hooks.
    recorded
        Whether a mode of PyTorch sees each operation, e.g. ``FlopCounterMode``.
    busy
        Whether another thread runs the model in its graphs.
    capturing
        Whether the caller captures a CUDA graph around this call.
    misfit
        What arguments of the layers differ from those at capture.
    disabled
        Why no graph of the model is used any more.
    vetoes
        Why backends that were named must not run in a graph: texts of
        :class:`~fp4dispatch.errors.CaptureDeniedError`.
    """

    num_tokens: int
    buckets: tuple[int, ...]
    pays_from: tuple[int, ...] = ()
    training: bool = False
    grad_enabled: bool = False
    decode_verify: bool = False
    moved_inputs: tuple[str, ...] = ()
    input_logits: bool = False
    extra_inputs: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    idle_ranks: tuple[int, ...] = ()
    compiled: bool = False
    adapters: tuple[str, ...] = ()
    captured_adapters: tuple[str, ...] = ()
    adapters_changed: bool = False
    deterministic: bool = False
    intermediates: tuple[str, ...] = ()
    autocast: bool = False
    hooked: tuple[str, ...] = ()
    recorded: bool = False
    busy: bool = False
    capturing: bool = False
    misfit: str = ""
    disabled: str = ""
    vetoes: tuple[str, ...] = ()

    @property
    def largest_bucket(self) -> int:
        """Largest captured number of tokens; 0 if nothing is captured."""
        return self.buckets[-1] if self.buckets else 0

    @property
    def bucket(self) -> int | None:
        """Smallest bucket that holds the tokens; None if there is none."""
        index = bisect_left(self.buckets, self.num_tokens)
        return self.buckets[index] if index < len(self.buckets) else None

    @property
    def threshold(self) -> int:
        """Smallest number of tokens for which the bucket of this call pays; 0 if that is not known."""
        index = bisect_left(self.buckets, self.num_tokens)
        return self.pays_from[index] if index < len(self.pays_from) else 0

    @property
    def pays(self) -> str:
        """The threshold in words."""
        if self.bucket is None or self.threshold <= self.bucket:
            return f"from {self.threshold} tokens on"
        return "for no number of tokens"


Predicate = Callable[[Batch], bool]

PREDICATES: dict[str, Predicate] = {
    "trains": lambda batch: batch.training or batch.grad_enabled,
    "verifies_drafts": lambda batch: batch.decode_verify,
    "inputs_moved": lambda batch: bool(batch.moved_inputs),
    "over_largest_bucket": lambda batch: bool(batch.buckets) and batch.num_tokens > batch.largest_bucket,
    "padded_too_much": lambda batch: batch.bucket is not None and batch.bucket > MAX_PADDING * batch.num_tokens,
    "eager_is_faster": lambda batch: batch.bucket is not None and batch.num_tokens < batch.threshold,
    "wants_input_logits": lambda batch: batch.input_logits,
    "has_extra_inputs": lambda batch: bool(batch.extra_inputs),
    "offloads_weights": lambda batch: bool(batch.offloaded),
    "has_idle_ranks": lambda batch: bool(batch.idle_ranks),
    "is_compiled": lambda batch: batch.compiled,
    "adapters_swapped": lambda batch: batch.adapters_changed or batch.adapters != batch.captured_adapters,
    "must_be_deterministic": lambda batch: batch.deterministic,
    "backend_vetoed": lambda batch: bool(batch.vetoes),
    "wants_intermediates": lambda batch: bool(batch.intermediates),
    "autocasts": lambda batch: batch.autocast,
    "has_hooks": lambda batch: bool(batch.hooked),
    "is_recorded": lambda batch: batch.recorded,
    "is_busy": lambda batch: batch.busy,
    "is_captured_by_caller": lambda batch: batch.capturing,
    "layers_get_other_arguments": lambda batch: bool(batch.misfit),
    "is_disabled": lambda batch: bool(batch.disabled),
}
"""By name, what ``when`` of a condition in ``conditions.toml`` means."""


def check_facts(facts: Mapping[str, Any]) -> None:
    """Refuse a fact that is not of a batch, or that cannot be told as it comes from the call and its graphs.

    Raises
    ------
    InputError
        With the names that are known.
    """
    own = {"num_tokens", "buckets", "pays_from"}
    known = {field.name for field in fields(Batch)} - own
    if told := sorted(facts.keys() & own):
        raise InputError(
            f"{told[0]!r} comes from the call and its graphs and cannot be told; known: {', '.join(sorted(known))}"
        )
    if unknown := sorted(facts.keys() - known):
        raise InputError(f"{unknown[0]!r} is no fact of a batch; known: {', '.join(sorted(known))}")


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
