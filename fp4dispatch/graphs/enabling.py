"""Enable CUDA graphs for a model, ask about them, and undo them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fp4dispatch.errors import InputError
from fp4dispatch.graphs.batch import check_tokens
from fp4dispatch.graphs.conditions import GraphReason
from fp4dispatch.graphs.finder import Inner, Marked, find_inner
from fp4dispatch.graphs.measuring import device_clock
from fp4dispatch.graphs.model import Graphs
from fp4dispatch.graphs.segments import hf_attention
from fp4dispatch.graphs.segments.layers import Spec
from fp4dispatch.graphs.stats import Stats
from fp4dispatch.models.parallel.layers import group_of
from fp4dispatch.tune.agreement import Group

HF_PER_TOKEN = ("position_embeddings",)
"""What captured code of Hugging Face decoders reads beside hidden states."""

_ATTRIBUTE = "_fp4dispatch_graphs"


class _Held:
    """The graphs of a model, as its attribute. A copy of the model has none."""

    def __init__(self, graphs: Graphs | None = None) -> None:
        self.graphs = graphs

    def __deepcopy__(self, _: object) -> _Held:
        return _Held()

    def __reduce__(self) -> tuple[type[_Held], tuple[()]]:
        return _Held, ()


def enable(
    model: nn.Module,
    tokens: Iterable[int],
    *,
    decode: Iterable[int] = (),
    inner: nn.Module | str | None = None,
    layers: Sequence[Marked] | None = None,
    breaks: Sequence[Marked] | None = None,
    per_token: Sequence[str] | None = None,
    example: Callable[[int], object] | None = None,
    measure: bool = True,
    verify_replays: int = 0,
    group: Group = None,
    agree: bool = True,
) -> Graphs:
    """Capture the decoder layers of a model for some numbers of tokens. Later calls replay them.

    Embedding, masks, final norm, LM head and logits run eagerly, and so does what is marked as a break: attention, by
    default. So captured segments depend on the number of tokens alone, and serve any batch: one request or many, with
    or without a cache. A call of n tokens runs in the smallest bucket of at least n; see :func:`can_run` for what runs
    eagerly. A call's result is a copy, and stays valid.

    Each bucket is then measured beside eager calls. Calls that eager runs faster, because their padding costs more than
    launches do, stay eager.

    If the capture fails, the model stays as it was and runs eagerly; one WARNING says why. In a process group, all
    ranks must make this call, and none replays if the capture fails on one.

    Parameters
    ----------
    model
        A decoder of Hugging Face (Llama, Qwen2, Qwen3, Qwen3-MoE, Mistral, Phi-3, Gemma-3 text), a class with a
        registered finder (:func:`~fp4dispatch.graphs.finder.register_finder`), or any module with ``inner`` and
        ``breaks``. On its GPU, in ``eval`` mode.
    tokens
        The buckets: numbers of tokens, over all requests of a call.
    decode
        Batch sizes whose decode steps are one graph, attention included, where the cache is a ``StaticCache``. The
        step is captured the first time that such a batch size runs with a cache. Other decode steps run in buckets.
    inner, layers, breaks
        As in :func:`~fp4dispatch.graphs.finder.find_inner`. ``inner`` calls each layer once, in order, with hidden
        states [sequences, length, hidden] first and all else by name; a layer returns hidden states, which the next one
        gets as they are. A break gets and returns tensors with one row for each token: [tokens, ...] or
        [sequences, length, ...].
    per_token
        Names of further arguments of layers that captured code reads: tensors [sequences or 1, length, ...], also in
        tuples. By default ``position_embeddings`` for Hugging Face, and none for others.
    example
        Runs ``inner`` eagerly on one sequence of so many tokens, without a cache. By default ``inner`` is called with
        zeros as ``inputs_embeds``, as Hugging Face models take them.
    measure
        Measure each bucket: at most 4 eager calls and 4 replays with the fewest tokens that it serves, and as many with
        a full bucket where these do not pay. ``False``: replay every call that fits.
    verify_replays
        Run the first so many calls of each bucket eagerly too, and compare, tile by tile, every tensor that leaves a
        segment. On a mismatch the graphs are given up, with the evidence in a WARNING. These calls return the eager
        result.
    group, agree
        The ranks that run this model together. By default those that its layers are cut among, if they are; else all.
        ``agree=False``: a call that not all of them make.

    Returns
    -------
    Graphs
        ``disabled`` says why there are none, or is empty.

    Raises
    ------
    InputError
        For buckets that are no numbers of tokens, a model that is not on a GPU or has graphs already, or marks that
        name nothing.
    InnerNotFoundError
        If it is not known what to capture of this class of models.
    RankError
        If another rank failed or died.

    Notes
    -----
    Takes memory: the activations of the largest bucket, and its bridges (``stats(model).table()``). Not for use during
    a capture. Thread-safe; calls from a second thread meanwhile run eagerly.
    """
    rows = check_tokens("tokens", tokens)
    batches = check_tokens("decode", decode) if (decode := tuple(decode)) else []
    if type(measure) is not bool:
        raise InputError(f"measure={measure!r}: need True or False")
    if type(verify_replays) is not int or verify_replays < 0:
        raise InputError(f"verify_replays={verify_replays!r}: need a whole number of calls, 0 for none")
    found = find_inner(model, inner=inner, layers=layers, breaks=breaks)
    if _held(model) is not None:
        raise InputError(f"{type(model).__name__} has graphs already: call disable(model) first")
    parameter = next(found.module.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    if device.type != "cuda":
        raise InputError(f"{type(model).__name__} is on {device}: CUDA graphs need it on a GPU, e.g. model.to('cuda')")
    graphs = Graphs(
        spec_of(found, per_token, example),
        rows,
        decode_batches=batches,
        clock=device_clock(device) if measure else None,
        verify_replays=verify_replays,
        group=group_of(model) if group is None else group,
        agree=agree,
    )
    graphs.capture()
    model.__dict__[_ATTRIBUTE] = _Held(graphs)
    return graphs


def _held(model: nn.Module) -> Graphs | None:
    held = model.__dict__.get(_ATTRIBUTE)
    return held.graphs if isinstance(held, _Held) else None


def spec_of(
    found: Inner, per_token: Sequence[str] | None = None, example: Callable[[int], object] | None = None
) -> Spec:
    """Return what to capture of an inner stack.

    Raises
    ------
    InputError
        If it is not a Hugging Face model and no example is given.
    """
    attention = tuple(module for module in found.breaks if hf_attention.supported(module))
    others = tuple(module for module in found.breaks if module not in attention)
    if per_token is None:
        per_token = HF_PER_TOKEN if attention else ()
    return Spec(
        found.module,
        found.layers or (found.module,),
        attention,
        others,
        tuple(per_token),
        example or _embeddings(found.module),
    )


def _embeddings(inner: nn.Module) -> Callable[[int], object]:
    width = getattr(getattr(inner, "config", None), "hidden_size", None)
    if not isinstance(width, int) or "inputs_embeds" not in inspect.signature(inner.forward).parameters:
        raise InputError(
            f"{type(inner).__name__} does not take inputs_embeds: pass example=, a function that runs it on one "
            "sequence of so many tokens"
        )
    embedding = next(inner.parameters())

    def example(tokens: int) -> object:
        embeds = torch.zeros(1, tokens, width, dtype=embedding.dtype, device=embedding.device)
        return inner(inputs_embeds=embeds, use_cache=False)

    return example


def disable(model: nn.Module) -> None:
    """Undo :func:`enable`: restore the model's forwards and free all graphs. Nothing happens if there are none."""
    graphs = _held(model)
    model.__dict__.pop(_ATTRIBUTE, None)
    if graphs is not None:
        graphs.release()


@contextmanager
def graphed(model: nn.Module, tokens: Iterable[int], **options: Any) -> Iterator[Graphs]:
    """Have graphs for a ``with`` block. Arguments and errors as :func:`enable`."""
    graphs = enable(model, tokens, **options)
    try:
        yield graphs
    finally:
        disable(model)


def can_run(model: nn.Module, num_tokens: int, **facts: Any) -> tuple[GraphReason, ...]:
    """Return why a call of so many tokens would run eagerly; empty if it would be replayed.

    Parameters
    ----------
    model
        A model for which :func:`enable` was called.
    num_tokens
        Tokens of all requests of the call.
    facts
        What is known about the call: fields of :class:`fp4dispatch.graphs.batch.Batch`, e.g. ``decode_verify=True``.

    Raises
    ------
    InputError
        If the model has no graphs, or a fact is unknown.
    """
    (rows,) = check_tokens("num_tokens", [num_tokens])
    return _of(model).why_not(rows, facts)


@contextmanager
def declare(model: nn.Module, **facts: Any) -> Iterator[None]:
    """Tell facts about the calls of a ``with`` block that a model cannot see, e.g. ``idle_ranks=(3,)``.

    Raises
    ------
    InputError
        As :func:`can_run`.
    """
    with _of(model).declare(facts):
        yield


def stats(model: nn.Module, *, decode: bool = False) -> Stats:
    """Return the counters of captures, replays and rejects by bucket; ``decode``: of decode steps, by batch size.

    Raises
    ------
    InputError
        If the model has no graphs.
    """
    graphs = _of(model)
    return graphs.decode_stats if decode else graphs.stats


def _of(model: nn.Module) -> Graphs:
    graphs = _held(model)
    if graphs is None:
        raise InputError(f"{type(model).__name__} has no graphs: call fp4dispatch.graphs.enable(model, tokens=[...])")
    return graphs
