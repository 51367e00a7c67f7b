"""Layers that a checkpoint stores quantised: SGLang loads and shards the tensors, this package runs the layer."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers import parameter
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from torch import Tensor, nn

from fp4dispatch.checkpoints.schemes import Scheme
from fp4dispatch.formats import NVFP4_BLOCK
from fp4dispatch.integrations.engines.parameters import loaded, register_parameters
from fp4dispatch.integrations.engines.refusals import other_weights
from fp4dispatch.integrations.engines.shards import check_split, weights_of_shards
from fp4dispatch.integrations.sglang import layers
from fp4dispatch.problem import Activation


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
        check_split(self.prefix, input_size, k, NVFP4_BLOCK if scheme.op == "nvfp4_gemm" else 1)
        layer.logical_widths = rows  # type: ignore[assignment]
        layer.params_dtype = params_dtype  # type: ignore[assignment]
        layer.input_size_per_partition = k  # type: ignore[assignment]
        layer.output_size_per_partition = sum(rows)  # type: ignore[assignment]
        register_parameters(layer, parameter, scheme, rows, k, extra_weight_attrs["weight_loader"])

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
        tensors, rows = loaded(layer, self.scheme), layer.logical_widths
        weights = weights_of_shards(self.scheme, tensors, rows, static=self.static, layer=self.prefix)
        layers.put(layer, tuple(tensors), weights, self.activation, self.prefix)

    def restore_weights_before_loading(self, layer: Any) -> None:
        """Refuse other weights in a running engine: the tensors of the checkpoint are gone."""
        if getattr(layer, "fp4dispatch", None) is not None:
            raise other_weights(self.prefix)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``x @ W^T + bias``. Safe to capture for numbers of tokens that have plans."""
        return layers.run(layer, x, bias)
