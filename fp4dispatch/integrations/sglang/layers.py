"""A linear layer of SGLang that this package runs: made of the loaded tensors, called, planned for CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.distributed.utils import get_group_rank_size
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.runtime_context import get_exec
from torch import Tensor, nn

from fp4dispatch.backends.base import LinearWeights
from fp4dispatch.errors import InputError
from fp4dispatch.models.linear import FP4Linear, layer_of
from fp4dispatch.models.quantized_linear import QuantizedLinear
from fp4dispatch.models.warming import warmup
from fp4dispatch.problem import Activation, CaptureMode


def put(layer: Any, names: tuple[str, ...], weights: LinearWeights, activation: Activation, prefix: str) -> None:
    """Put a quantised layer in place of the loaded parameters. Host work.

    With tensor parallelism and CUDA graphs a collective call of the layer's group: the ranks agree on the choice.

    Parameters
    ----------
    layer
        SGLang's layer.
    names
        Its parameters to remove. An empty ``weight`` stays for code that asks for its dtype or device: models cast what
        they compute to it (Gemma 3n, the images of Gemma 4).
    weights, activation
        What to run.
    prefix
        Name of the layer.

    Raises
    ------
    InputError, FormatError
        Tensors that do not fit the format.
    BackendUnsupportedError, NoBackendError, UnknownBackendError, SettingsError, RankError
        As :func:`fp4dispatch.warmup`.
    """
    inner = layer_of(weights, _bias_to_add(layer), activation=activation, dtype=layer.params_dtype, name=prefix)
    if inner.bias is not None:
        inner.bias = layer.bias  # the same object, which is how a call knows it
    for name in names:
        delattr(layer, name)
    _prepare(inner, layer)
    if isinstance(inner, FP4Linear):
        inner.compact()
    layer.fp4dispatch = inner
    empty = torch.empty(weights.n, 0, dtype=inner.dtype, device=inner.device)
    layer.register_parameter("weight", nn.Parameter(empty, requires_grad=False))


def run(layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x @ W^T + bias``. Safe to capture for numbers of tokens that have plans.

    Raises
    ------
    InputError
        Activations that SGLang has quantised already.
    """
    if not isinstance(x, Tensor):
        raise InputError(
            f"{layer.fp4dispatch.name}: got quantised activations; need bfloat16, float16 or float32: fused "
            "quantisation of SGLang is not supported"
        )
    inner: QuantizedLinear = layer.fp4dispatch
    out: Tensor = inner(x)
    if bias is inner.bias:
        return out
    if inner.bias is not None:
        raise InputError(f"{inner.name}: called with another bias than it was loaded with")
    return out if bias is None else out + bias


def _bias_to_add(layer: Any) -> Tensor | None:
    """Return the bias that SGLang will pass to ``apply``; of a row-parallel layer only the first rank adds it."""
    bias = getattr(layer, "bias", None)
    if bias is None or layer.skip_bias_add:
        return None
    rank, _ = get_group_rank_size(layer.tp_group)
    return None if hasattr(layer, "input_is_parallel") and rank > 0 else bias.detach()


def _prepare(inner: QuantizedLinear, layer: Any) -> None:
    capture, tokens = graphs()
    if capture == "none":
        inner.bind()  # raises what refuses the layer now, not at the first request
        return
    _, size = get_group_rank_size(layer.tp_group)
    group = getattr(layer.tp_group, "cpu_group", None) if size > 1 else None
    inner.choose_for(capture)
    warmup(inner, tokens, capture=capture, group=group, agree=group is not None)


def graphs() -> tuple[CaptureMode, list[int]]:
    """Return how SGLang captures CUDA graphs, and the numbers of tokens to make plans for.

    SGLang runs each size twice before it captures it, which makes the plans of other sizes. A graph that is captured in
    pieces runs with at least one token.
    """
    try:
        config: Any = get_exec().graph.cuda_graph_config
    except ValueError:  # no server: nothing is published
        config = None
    if config is None or not torch.cuda.is_available():
        return "none", []
    phases = [phase for phase in (config.decode, config.prefill) if phase.backend != Backend.DISABLED]
    if not phases:
        return "none", []
    capture: CaptureMode = "piecewise" if any(phase.backend == Backend.BREAKABLE for phase in phases) else "full"
    return capture, sorted({1, *(size for phase in phases for size in phase.bs or ())})
