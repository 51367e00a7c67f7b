"""Layers that a checkpoint stores quantised: vLLM loads and shards the tensors, this package runs the layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method
from vllm.model_executor.parameter import (
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    ModelWeightParameter,
    PerTensorScaleParameter,
)

from fp4dispatch.checkpoints.schemes import Scheme
from fp4dispatch.formats import NVFP4_BLOCK
from fp4dispatch.integrations.engines.shards import weights_of_shards
from fp4dispatch.integrations.vllm.engine import Engine
from fp4dispatch.integrations.vllm.linear_method import EngineLinearMethod
from fp4dispatch.models.linear import FP4Linear, FP8Linear
from fp4dispatch.models.quantized_linear import QuantizedLinear
from fp4dispatch.problem import Activation

READABLE = ("modelopt-nvfp4", "nvfp4-pack-quantized", "fp8-tensor", "fp8-channel")
"""Schemes of :mod:`fp4dispatch.checkpoints.schemes` that layers can have here."""


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
            As :meth:`expect`.
        """
        rows, k, scheme = output_partition_sizes, input_size_per_partition, self.scheme
        self.expect(layer, rows, k, input_size, params_dtype, NVFP4_BLOCK if scheme.op == "nvfp4_gemm" else 1)
        n, loader = sum(rows), extra_weight_attrs["weight_loader"]
        nvfp4 = scheme.op == "nvfp4_gemm"
        kind, width = (torch.uint8, k // 2) if nvfp4 else (torch.float8_e4m3fn, k)
        both = {"input_dim": 1, "output_dim": 0, "weight_loader": loader}
        one = _nan(len(rows))
        layer.register_parameter(scheme.weight, ModelWeightParameter(data=torch.empty(n, width, dtype=kind), **both))
        if nvfp4:
            empty = torch.full((n, k // NVFP4_BLOCK), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)  # NaN
            layer.register_parameter(scheme.scale, GroupQuantScaleParameter(data=empty, **both))
        elif scheme.scaling == "row":
            scales = ChannelQuantScaleParameter(data=_nan(n, 1), output_dim=0, weight_loader=_column(loader))
            layer.register_parameter(scheme.scale, scales)
        else:
            layer.register_parameter(scheme.scale, PerTensorScaleParameter(data=one, weight_loader=loader))
        for name in (scheme.global_scale, scheme.input_scale):
            if name is not None:
                layer.register_parameter(name, PerTensorScaleParameter(data=one.clone(), weight_loader=loader))

    def loaded(self) -> tuple[str, ...]:
        """Return the names of the stored tensors."""
        scheme = self.scheme
        names = (scheme.weight, scheme.scale, scheme.global_scale, scheme.input_scale)
        return tuple(name for name in names if name is not None)

    def make(self, layer: Any, bias: Tensor | None) -> QuantizedLinear:
        """Make the layer of the stored tensors, without a copy."""
        tensors = {name: getattr(layer, name).detach().as_subclass(Tensor) for name in self.loaded()}
        weights = weights_of_shards(self.scheme, tensors, layer.logical_widths, static=self.static, layer=self.prefix)
        options = {"activation": self.activation, "dtype": layer.orig_dtype, "name": self.prefix}
        kind = FP4Linear if self.scheme.op == "nvfp4_gemm" else FP8Linear
        return kind.from_weights(weights, bias, **options)


def _nan(*shape: int) -> Tensor:
    return torch.full(shape, torch.nan, dtype=torch.float32)


def _column(loader: Any) -> Any:
    """Return a loader that takes one scale a row, [N] or [N, 1]."""

    def load(parameter: Any, loaded: Tensor, *args: Any, **kwargs: Any) -> Any:
        return loader(parameter, loaded.reshape(-1, 1), *args, **kwargs)

    return load
