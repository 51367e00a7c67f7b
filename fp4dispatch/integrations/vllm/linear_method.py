"""The base of the methods that vLLM calls for a layer: hold a layer of this package, and run it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearMethodBase

from fp4dispatch.errors import IntegrationError
from fp4dispatch.integrations.engines.refusals import other_weights
from fp4dispatch.integrations.engines.shards import check_split
from fp4dispatch.integrations.vllm import operator
from fp4dispatch.integrations.vllm.engine import Engine, graphs, log_through_vllm
from fp4dispatch.integrations.vllm.reloading import seal
from fp4dispatch.models.linear import FP4Linear
from fp4dispatch.models.quantized_linear import QuantizedLinear
from fp4dispatch.problem import Activation


class EngineLinearMethod(LinearMethodBase):  # type: ignore[misc,unused-ignore]
    """Base of the methods: holds the layer of this package, and runs it."""

    def __init__(self, engine: Engine, prefix: str, activation: Activation) -> None:
        self.engine, self.prefix, self.activation = engine, prefix, activation
        self.capture, self.tokens = graphs()

    def expect(self, layer: Any, rows: list[int], k: int, input_size: int, dtype: torch.dtype, block: int) -> None:
        """Note the sizes of this rank's part of a layer. Refuse a part that splits a scale block.

        Raises
        ------
        InputError
            The layer's K, or the part of it on each rank, is not a multiple of the block.
        """
        check_split(self.prefix, input_size, k, block)
        layer.logical_widths, layer.orig_dtype = rows, dtype
        layer.input_size_per_partition, layer.output_size_per_partition = k, sum(rows)

    def loaded(self) -> tuple[str, ...]:
        """Return the names of the parameters that vLLM loads."""
        raise NotImplementedError

    def make(self, layer: Any, bias: Tensor | None) -> QuantizedLinear:
        """Make the quantised layer of what vLLM has loaded. ``bias``: what each call adds."""
        raise NotImplementedError

    def process_weights_after_loading(self, layer: Any) -> None:
        """Put the quantised layer in place of the loaded parameters, and prepare it for CUDA graphs. Host work.

        Raises
        ------
        CheckpointError
            A tensor that the checkpoint did not have.
        FormatError
            Values that are not of the format, NaN or Inf.
        IntegrationError
            Other weights were loaded into a layer that runs.
        BackendUnsupportedError, NoBackendError, UnknownBackendError, SettingsError
            As :meth:`fp4dispatch.models.quantized_linear.QuantizedLinear.bind`.
        """
        if self._done(layer):
            return
        log_through_vllm()
        inner = self.make(layer, _bias_to_add(layer))
        if inner.bias is not None:
            inner.bias = layer.bias  # the same object, which is how a call knows it
        for name in self.loaded():
            delattr(layer, name)
        self.engine.prepare(inner, self.capture, self.tokens, layer.tp_size)
        inner.bind()  # raises what refuses the layer now, not at the first request
        if isinstance(inner, FP4Linear):
            inner.compact()
        layer.fp4dispatch = inner
        layer.register_parameter("weight", operator.make_key(inner))
        seal(layer.weight, layer, self.prefix)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``x @ W^T + bias``. Safe to capture for numbers of tokens that have plans."""
        if torch.compiler.is_compiling():
            out: Tensor = torch.ops.fp4dispatch.engine_linear.default(
                x, layer.weight, bias, layer.output_size_per_partition
            )
            return out
        return operator.run(layer.fp4dispatch, x, bias)

    def tie_weights(self, layer: nn.Module, embed_tokens: nn.Module) -> Any:
        """Refuse to tie a quantised head to the embedding."""
        raise IntegrationError(
            f"{self.prefix}: the model ties its head to the embedding, and the checkpoint says that the head is "
            "quantised: add it to the layers that are not, in ignore of quantization_config"
        )

    def _done(self, layer: Any) -> bool:
        """Whether the layer is made already. vLLM may call twice.

        Raises
        ------
        IntegrationError
            Other weights were loaded since.
        """
        inner = getattr(layer, "fp4dispatch", None)
        if inner is None:
            return False
        key = getattr(layer, "weight", None)  # a reload has removed it where the checkpoint has another name for it
        if key is None or not operator.names(key, inner):
            raise other_weights(self.prefix)
        return True


def _bias_to_add(layer: Any) -> Tensor | None:
    """Return the bias that vLLM will pass to ``apply``; of a row-parallel layer only the first rank adds it."""
    bias = getattr(layer, "bias", None)
    if bias is None or getattr(layer, "skip_bias_add", False):
        return None
    rows_only = layer.input_size_per_partition != layer.input_size
    return None if rows_only and layer.tp_rank > 0 else bias.detach().as_subclass(Tensor)
