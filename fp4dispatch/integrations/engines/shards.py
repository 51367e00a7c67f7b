"""The tensors of a fused layer, as an engine loaded them, become canonical weights: each shard keeps its scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fp4dispatch.backends.base import LinearWeights
from fp4dispatch.checkpoints.schemes import Scheme, logical_k
from fp4dispatch.errors import CheckpointError, InputError
from fp4dispatch.formats import FP8_BLOCK, NVFP4_BLOCK

MAX_SIZE = 64
"""Largest tensor-parallel size that an error names."""


def check_split(layer: str, k: int, part: int, block: int) -> None:
    """Refuse a layer whose K, or whose part of K on each rank, is not a multiple of the scale block.

    A part that splits a block would need one scale on two ranks. Engines load such a part with the scales of other
    values (https://github.com/vllm-project/vllm/issues/48898).

    Parameters
    ----------
    layer
        Name for the error.
    k, part
        K of the whole layer, and of each rank's part.
    block
        Values along K that share a scale.

    Raises
    ------
    InputError
        With the tensor-parallel sizes that work.
    """
    if part % block == 0:
        return
    works = [size for size in range(1, MAX_SIZE + 1) if k % (size * block) == 0]
    if not works:
        raise InputError(
            f"{layer}: K={k} is not a multiple of {block}, the {'NVFP4' if block == NVFP4_BLOCK else 'FP8'} block: "
            "leave this layer unquantised in the checkpoint"
        )
    raise InputError(
        f"{layer}: K={k} on {k // part} ranks is {part} a rank, which splits a block of {block} values that share a "
        f"scale: use a tensor-parallel size of {', '.join(map(str, works))}"
    )


def check_blocks(layer: str, rows: Sequence[int], n: int, k: int, part: int) -> None:
    """Refuse a layer in FP8 blocks of 128x128 whose shards, or parts on the ranks, do not begin and end at a block.

    Parameters
    ----------
    layer
        Name for the error.
    rows
        Rows of each shard on this rank.
    n, k
        Of the whole layer.
    part
        This rank's part of K.

    Raises
    ------
    InputError
        With the sizes that were found and needed.
    """
    inner = rows if sum(rows) != n else rows[:-1]  # only the last rows of a whole layer may be part of a block
    odd = next((size for size in inner if size % FP8_BLOCK), None)
    if odd is not None:
        raise InputError(
            f"{layer}: a shard has {odd} rows on each rank ({', '.join(map(str, rows))} of N={n}), which splits a "
            f"block of {FP8_BLOCK} rows that share a scale: need a multiple of {FP8_BLOCK}: use fewer ranks, or leave "
            "this layer unquantised in the checkpoint"
        )
    if part != k:
        check_split(layer, k, part, FP8_BLOCK)


def weights_of_shards(
    scheme: Scheme, tensors: Mapping[str, Tensor], rows: Sequence[int], *, static: bool | None, layer: str
) -> LinearWeights:
    """Put the tensors of a layer together, exactly.

    NVFP4 keeps the global scale of each shard. Shards in blocks of 128x128 keep their scales (:func:`check_blocks`).
    Other FP8 shards with different scales get one scale a row, and dynamic activation scales. Static activation scales
    of the shards describe one input: the largest is kept, so no more values saturate than before.

    Parameters
    ----------
    scheme
        How the checkpoint stores the layer.
    tensors
        By the names of the scheme: the weight and scales of all rows; per-tensor scales f32 [S], one a shard. NaN
        stands for what was not in the checkpoint.
    rows
        Rows of each shard.
    static
        Whether there are static activation scales; None: if they were loaded.
    layer
        Name for errors.

    Raises
    ------
    CheckpointError
        A scale that was not loaded, or is NaN.
    """
    weight, scale = tensors[scheme.weight], tensors[scheme.scale]
    _expect_loaded(scheme, scheme.scale, scale, layer)
    n, k = weight.shape[0], logical_k(scheme, tuple(weight.shape))
    input_scale = _input_scale(scheme, tensors, static, layer)
    if scheme.global_scale is not None:
        global_scale = tensors[scheme.global_scale].reshape(-1)
        _expect_loaded(scheme, scheme.global_scale, global_scale, layer)
        global_scale = global_scale.float().reciprocal() if scheme.divides else global_scale.float()
        shards = tuple(rows)
        if bool((global_scale == global_scale[0]).all()):
            global_scale, shards = global_scale[:1].clone(), (n,)
        return LinearWeights("nvfp4_gemm", "nvfp4", n, k, weight, scale, global_scale, shards, input_scale)
    if scheme.scaling == "block128":
        return LinearWeights("fp8_gemm", "block128", n, k, weight, scale.float())
    if scheme.scaling == "row":
        return LinearWeights("fp8_gemm", "row", n, k, weight, scale.reshape(n), input_scale=input_scale)
    scale = scale.reshape(-1)
    if bool((scale == scale[0]).all()):
        return LinearWeights("fp8_gemm", "tensor", n, k, weight, scale[0].clone(), input_scale=input_scale)
    counts = torch.tensor(rows, device=scale.device)
    return LinearWeights("fp8_gemm", "row", n, k, weight, scale.repeat_interleave(counts))


def _input_scale(scheme: Scheme, tensors: Mapping[str, Tensor], static: bool | None, layer: str) -> Tensor | None:
    name = scheme.input_scale
    if name is None or name not in tensors or static is False:  # left from calibration
        return None
    scale = tensors[name]
    if bool(scale.isnan().all()) and static is None:
        return None
    _expect_loaded(scheme, name, scale, layer)
    return (scale.float().reciprocal() if scheme.divides else scale.float()).amax()


def _expect_loaded(scheme: Scheme, name: str, scale: Tensor, layer: str) -> None:
    if bool(scale.float().isnan().any()):
        raise CheckpointError(
            f"{layer}: tensor {name!r} is missing or holds NaN: the configuration says that the layer is stored as "
            f"{scheme.name}: configuration and tensors do not belong together, or the checkpoint is damaged"
        )
