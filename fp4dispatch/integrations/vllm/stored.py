"""Layers that a checkpoint stores quantised: vLLM loads and shards the tensors, this package runs the layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor import parameter
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method

from fp4dispatch.checkpoints.schemes import Scheme
from fp4dispatch.formats import NVFP4_BLOCK
from fp4dispatch.integrations.engines.parameters import loaded, register_parameters
from fp4dispatch.integrations.engines.shards import check_blocks, weights_of_shards
from fp4dispatch.integrations.vllm.engine import Engine
from fp4dispatch.integrations.vllm.linear_method import EngineLinearMethod
from fp4dispatch.models.linear import layer_of
from fp4dispatch.models.quantized_linear import QuantizedLinear
from fp4dispatch.problem import Activation


@register_weight_loader_v2_supported_method
class Fp4DispatchLinearMethod(EngineLinearMethod):
    """Loads a layer of a checkpoint. Each shard of a fused layer keeps its own global scale.

    Parameters
    ----------
    engine
        Of the model.
    prefix
        Name of the layer.
    scheme, activation, static
        How the checkpoint stores it, as in :class:`~fp4dispatch.checkpoints.config.readers.Group`.
    """

    def __init__(
        self, engine: Engine, prefix: str, scheme: Scheme, activation: Activation, static: bool | None
    ) -> None:
        super().__init__(engine, prefix, activation)
        self.scheme, self.static = scheme, static

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register empty parameters for this rank's part of the stored tensors.

        Raises
        ------
        InputError
            As :meth:`expect`; or parts that split a block of 128x128.
        """
        rows, k, scheme = output_partition_sizes, input_size_per_partition, self.scheme
        if scheme.scaling == "block128":
            check_blocks(self.prefix, rows, output_size, input_size, k)
        self.expect(layer, rows, k, input_size, params_dtype, NVFP4_BLOCK if scheme.op == "nvfp4_gemm" else 1)
        register_parameters(layer, parameter, scheme, rows, k, extra_weight_attrs["weight_loader"])

    def loaded(self) -> tuple[str, ...]:
        """Return the names of the stored tensors."""
        return self.scheme.names

    def make(self, layer: Any, bias: Tensor | None) -> QuantizedLinear:
        """Make the layer of the stored tensors, without a copy."""
        tensors, rows = loaded(layer, self.scheme), layer.logical_widths
        weights = weights_of_shards(self.scheme, tensors, rows, static=self.static, layer=self.prefix)
        return layer_of(weights, bias, activation=self.activation, dtype=layer.orig_dtype, name=self.prefix)
