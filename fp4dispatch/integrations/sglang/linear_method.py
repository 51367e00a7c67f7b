"""Layers that a checkpoint stores quantised: SGLang loads and shards the tensors, this package runs the layer."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.parameter import (
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    ModelWeightParameter,
    PerTensorScaleParameter,
)
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from torch import Tensor, nn

from fp4dispatch.checkpoints.schemes import Scheme
from fp4dispatch.errors import IntegrationError
from fp4dispatch.formats import NVFP4_BLOCK
from fp4dispatch.integrations.engines.shards import check_split, weights_of_shards
from fp4dispatch.integrations.sglang import layers
from fp4dispatch.problem import Activation

READABLE = ("modelopt-nvfp4", "nvfp4-pack-quantized", "fp8-tensor", "fp8-channel")
"""Schemes of :mod:`fp4dispatch.checkpoints.schemes` that layers can have here."""


class Fp4DispatchLinearMethod(LinearMethodBase):  # type: ignore[misc,unused-ignore]
    """Loads a layer of a checkpoint. Each shard of a fused layer keeps its own global scale.

    Parameters
    ----------
    prefix
        Name of the layer.
    scheme, activation, static
        How the checkpoint stores it, as in :class:`~fp4dispatch.checkpoints.config.readers.Group`.
    """

    def __init__(self, prefix: str, scheme: Scheme, activation: Activation, static: bool | None) -> None:
        self.prefix, self.scheme, self.activation, self.static = prefix, scheme, activation, static

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
            The layer's K, or the part of it on each rank, is not a multiple of the scale block.
        """
        rows, k, scheme = output_partition_sizes, input_size_per_partition, self.scheme
        nvfp4 = scheme.op == "nvfp4_gemm"
        check_split(self.prefix, input_size, k, NVFP4_BLOCK if nvfp4 else 1)
        layer.logical_widths = rows  # type: ignore[assignment]
        layer.params_dtype = params_dtype  # type: ignore[assignment]
        layer.input_size_per_partition = k  # type: ignore[assignment]
        layer.output_size_per_partition = sum(rows)  # type: ignore[assignment]
        n, loader = sum(rows), extra_weight_attrs["weight_loader"]
        kind, width = (torch.uint8, k // 2) if nvfp4 else (torch.float8_e4m3fn, k)
        both = {"input_dim": 1, "output_dim": 0, "weight_loader": loader}
        layer.register_parameter(scheme.weight, ModelWeightParameter(data=torch.empty(n, width, dtype=kind), **both))
        if nvfp4:
            unset = torch.full((n, k // NVFP4_BLOCK), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)  # NaN
            layer.register_parameter(scheme.scale, GroupQuantScaleParameter(data=unset, **both))
        elif scheme.scaling == "row":
            scales = ChannelQuantScaleParameter(data=_nan(n, 1), output_dim=0, weight_loader=_column(loader))
            layer.register_parameter(scheme.scale, scales)
        else:
            layer.register_parameter(scheme.scale, _per_shard(len(rows), loader))
        for name in (scheme.global_scale, scheme.input_scale):
            if name is not None:
                layer.register_parameter(name, _per_shard(len(rows), loader))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Make the quantised layer of the loaded tensors. Host work. A second call is harmless.

        Raises
        ------
        CheckpointError
            A tensor that the checkpoint did not have.
        FormatError
            Values that are not of the format.
        BackendUnsupportedError, NoBackendError, UnknownBackendError, SettingsError
            As :meth:`fp4dispatch.models.quantized_linear.QuantizedLinear.bind`.
        """
        if getattr(layer, "fp4dispatch", None) is not None:
            return
        scheme = self.scheme
        names = tuple(n for n in (scheme.weight, scheme.scale, scheme.global_scale, scheme.input_scale) if n)
        tensors = {name: getattr(layer, name).detach().as_subclass(Tensor) for name in names}
        weights = weights_of_shards(scheme, tensors, layer.logical_widths, static=self.static, layer=self.prefix)
        layers.put(layer, names, weights, self.activation, self.prefix)

    def restore_weights_before_loading(self, layer: Any) -> None:
        """Refuse other weights in a running engine: the tensors of the checkpoint are gone."""
        if getattr(layer, "fp4dispatch", None) is not None:
            raise IntegrationError(
                f"{self.prefix}: loading other weights into a running engine is not supported: start it again"
            )

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``x @ W^T + bias``. Safe to capture for numbers of tokens that have plans."""
        return layers.run(layer, x, bias)


def _nan(*shape: int) -> Tensor:
    return torch.full(shape, torch.nan, dtype=torch.float32)


def _per_shard(shards: int, loader: Any) -> Any:
    """Return a parameter of one value a shard. Both of SGLang's loaders fill it: v1 asks for the attribute."""
    parameter = PerTensorScaleParameter(data=_nan(shards), weight_loader=loader)
    parameter.needs_scalar_to_array = True
    return parameter


def _column(loader: Any) -> Any:
    """Return a loader that takes one scale a row, [N] or [N, 1]."""

    def load(parameter: Any, loaded: Tensor, *args: Any, **kwargs: Any) -> Any:
        return loader(parameter, loaded.reshape(-1, 1), *args, **kwargs)

    return load
