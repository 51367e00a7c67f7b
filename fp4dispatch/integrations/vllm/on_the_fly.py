"""Checkpoints that are not quantised: each layer is quantised when vLLM has loaded it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.parameter import ModelWeightParameter

from fp4dispatch.errors import InputError
from fp4dispatch.formats import NVFP4_BLOCK
from fp4dispatch.integrations.vllm.engine import Engine
from fp4dispatch.integrations.vllm.linear_method import EngineLinearMethod
from fp4dispatch.models.choose_layers import EXCLUDE, FORMATS, picker
from fp4dispatch.models.quantized_linear import QuantizedLinear
from fp4dispatch.problem import ACTIVATIONS, Activation, one_of

_FIELDS = ("format", "include", "exclude", "activation")


class Request:
    """What to quantise while a model is loaded, and how.

    Parameters
    ----------
    format, include, exclude
        As ``config``, ``include`` and ``exclude`` of :func:`fp4dispatch.replace_linears`. Patterns match the names of
        the checkpoint, and those of vLLM's fused layers.
    activation
        Pins the activation format of all layers.

    Raises
    ------
    InputError
        An unknown format, activation format or pattern.
    """

    def __init__(
        self,
        format: str | Mapping[str, str | None] = "nvfp4",
        include: Sequence[str] | str = ("*",),
        exclude: Sequence[str] | str = EXCLUDE,
        activation: Activation = "any",
    ) -> None:
        one_of("activation", activation, ACTIVATIONS)
        self.format, self.include, self.exclude, self.activation = format, include, exclude, activation
        picker(format, include, exclude)  # raises for what is wrong

    @classmethod
    def from_dict(cls, block: Mapping[str, Any]) -> Request:
        """Read ``quantization_config`` with ``quant_method: fp4dispatch``.

        Raises
        ------
        InputError
            As the class; or a key that is not known.
        """
        unknown = block.keys() - {"quant_method", *_FIELDS}
        if unknown:
            raise InputError(f"quantization_config: {sorted(unknown)[:4]} are not known; use {', '.join(_FIELDS)}")
        return cls(**{key: block[key] for key in _FIELDS if key in block})

    def format_of(self, names: Sequence[str], fused: str) -> str | None:
        """Return the format of a layer; None: do not quantise.

        Parameters
        ----------
        names
            Its shards, by their names in the checkpoint.
        fused
            Its name in vLLM.

        Raises
        ------
        InputError
            Shards of one layer that would have different formats.
        """
        pick = picker(self.format, self.include, self.exclude)
        found = {pick(name) for name in names}
        if len(found) > 1:
            kinds = ", ".join(f"{name}: {pick(name) or 'not quantised'}" for name in names)
            raise InputError(f"{fused}: vLLM fuses {len(names)} layers, which need one format; asked for {kinds}")
        return None if pick(fused) is None else found.pop()


@register_weight_loader_v2_supported_method
class Fp4DispatchOnlineLinearMethod(EngineLinearMethod):
    """Quantises a layer that vLLM loads in 16 or 32 bits. The whole 16-bit model is never in memory.

    The shards of a fused layer share one scale. With tensor parallelism each rank computes it from its own part.

    Parameters
    ----------
    engine, prefix
        As for checkpoints that are quantised.
    format
        One of :data:`fp4dispatch.models.choose_layers.FORMATS`.
    activation
        Pins the activation format.
    """

    uses_meta_device = True  # vLLM puts the weight on the device when all of it was read, and then calls us

    def __init__(self, engine: Engine, prefix: str, format: str, activation: Activation) -> None:
        super().__init__(engine, prefix, activation)
        self.format = format

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
        """Register an empty weight for this rank's part.

        Raises
        ------
        InputError
            NVFP4 with a K, or a part of K on each rank, that is not a multiple of 16.
        """
        block = NVFP4_BLOCK if self.format == "nvfp4" else 1
        self.expect(layer, output_partition_sizes, input_size_per_partition, input_size, params_dtype, block)
        shape = (sum(output_partition_sizes), input_size_per_partition)
        empty = torch.empty(shape, dtype=params_dtype, device="meta")
        loader = extra_weight_attrs["weight_loader"]
        layer.register_parameter(
            "weight", ModelWeightParameter(data=empty, input_dim=1, output_dim=0, weight_loader=loader)
        )
        initialize_online_processing(layer)

    def loaded(self) -> tuple[str, ...]:
        """Return the name of the weight."""
        return ("weight",)

    def make(self, layer: Any, bias: Tensor | None) -> QuantizedLinear:
        """Quantise the weight."""
        weight = layer.weight.detach().as_subclass(Tensor)
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        for name, tensor in (("weight", weight), ("bias", bias)):
            parameter = None if tensor is None else nn.Parameter(tensor, requires_grad=False)
            linear.register_parameter(name, parameter)
        options = {"activation": self.activation, "dtype": layer.orig_dtype, "name": self.prefix}
        return FORMATS[self.format](linear, **options)
