"""The operator of layers in an engine: a key in place of the weights.

vLLM stores compiled graphs between runs, and its key of the store does not cover what this package chooses. So the
graph must not depend on the choice. ``torch.ops.fp4dispatch.linear`` holds the choice as text and takes the tensors of
the backend. ``engine_linear`` takes a tensor of one element, which names the layer, and finds the choice when it runs.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from fp4dispatch.errors import InputError
from fp4dispatch.models.quantized_linear import QuantizedLinear
from fp4dispatch.run import ops
from fp4dispatch.run.register import define

_layers: WeakValueDictionary[int, QuantizedLinear] = WeakValueDictionary()
"""Address of a key -> its layer."""


def make_key(layer: QuantizedLinear) -> nn.Parameter:
    """Return a parameter that names a layer for as long as both exist: [1] on its device, in the layer's dtype.

    Models cast what they compute to the dtype of a layer's weight (Gemma 4, Isaac), or of a module's first parameter.
    """
    key = nn.Parameter(torch.zeros(1, dtype=layer.dtype, device=layer.device), requires_grad=False)
    _layers[key.data_ptr()] = layer
    return key


def names(key: Tensor, layer: QuantizedLinear) -> bool:
    """Whether a tensor is the key of a layer."""
    return _layers.get(key.data_ptr()) is layer


def run(layer: QuantizedLinear, x: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x @ W^T + bias``, with this bias in place of the layer's own."""
    if bias is layer.bias:
        output: Tensor = layer(x)
        return output
    return ops.run_bound(x, layer.bound_to(x.dtype), bias)


def _implementation(x: Tensor, key: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    layer = _layers.get(key.data_ptr())
    if layer is None:
        raise InputError(
            f"engine_linear: no layer has the key at {key.data_ptr():#x}: the engine moved or replaced the weights of "
            "a running model, which is not supported: start it again"
        )
    return run(layer, x, bias)


def _fake(x: Tensor, key: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


define("engine_linear(Tensor x, Tensor key, Tensor? bias, SymInt out_features) -> Tensor", _implementation, _fake)
