"""The parameters of a layer that an engine's loaders fill with the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp4dispatch.checkpoints.schemes import Scheme
from fp4dispatch.formats import FP8_BLOCK, NVFP4_BLOCK


def register_parameters(
    layer: nn.Module, kinds: Any, scheme: Scheme, rows: Sequence[int], k: int, loader: Callable[..., Any]
) -> None:
    """Register empty parameters for one rank's part of the stored tensors. Scales are NaN until they are loaded.

    Parameters
    ----------
    layer
        The engine's layer.
    kinds
        The engine's module of parameter classes. vLLM and SGLang have the same classes.
    scheme
        How the checkpoint stores the layer.
    rows, k
        Rows of each shard, and K, on this rank.
    loader
        The engine's ``weight_loader``.
    """
    n, nvfp4 = sum(rows), scheme.op == "nvfp4_gemm"
    dtype, width = (torch.uint8, k // 2) if nvfp4 else (torch.float8_e4m3fn, k)
    both = {"input_dim": 1, "output_dim": 0, "weight_loader": loader}
    layer.register_parameter(scheme.weight, kinds.ModelWeightParameter(data=torch.empty(n, width, dtype=dtype), **both))
    one_per_shard = [name for name in (scheme.global_scale, scheme.input_scale) if name is not None]
    if nvfp4:
        unset = torch.full((n, k // NVFP4_BLOCK), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)  # NaN
        layer.register_parameter(scheme.scale, kinds.GroupQuantScaleParameter(data=unset, **both))
    elif scheme.scaling == "block128":
        blocks = (sum(_blocks(size) for size in rows), _blocks(k))
        scales = kinds.BlockQuantScaleParameter(data=_nan(*blocks), **both | {"weight_loader": _matrix(loader)})
        layer.register_parameter(scheme.scale, scales)
        vars(layer)["weight_block_size"] = [FP8_BLOCK, FP8_BLOCK]  # the engines' loaders ask for it
    elif scheme.scaling == "row":
        scales = kinds.ChannelQuantScaleParameter(data=_nan(n, 1), output_dim=0, weight_loader=_column(loader))
        layer.register_parameter(scheme.scale, scales)
    else:
        one_per_shard.append(scheme.scale)
    for name in one_per_shard:
        parameter = kinds.PerTensorScaleParameter(data=_nan(len(rows)), weight_loader=loader)
        parameter.needs_scalar_to_array = True  # the engines' loaders of version 1 ask for it
        layer.register_parameter(name, parameter)


def loaded(layer: nn.Module, scheme: Scheme) -> dict[str, Tensor]:
    """Return the tensors of the scheme that a layer has, as plain tensors, by name."""
    return {name: getattr(layer, name).detach().as_subclass(Tensor) for name in scheme.names if hasattr(layer, name)}


def _blocks(size: int) -> int:
    return -(-size // FP8_BLOCK)


def _nan(*shape: int) -> Tensor:
    return torch.full(shape, torch.nan, dtype=torch.float32)


def _column(loader: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loader that takes one scale a row, [N] or [N, 1]."""

    def load(parameter: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return loader(parameter, tensor.reshape(-1, 1), *args, **kwargs)

    return load


def _matrix(loader: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loader that takes one scale a block: [N/128, K/128], or [N/128, 1, K/128, 1] as ModelOpt writes it."""

    def load(parameter: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return loader(parameter, tensor.reshape(tensor.shape[0], -1), *args, **kwargs)

    return load
