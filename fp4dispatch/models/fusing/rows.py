"""Join layers along N, and cut a joined layer into them again: codes and scales keep their bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fp4dispatch.backends.base import LinearWeights
from fp4dispatch.errors import FormatError
from fp4dispatch.formats import FP8_BLOCK, NVFP4_BLOCK, from_128x4


def join(shards: Sequence[LinearWeights]) -> LinearWeights:
    """Return one layer with the rows of all shards, in memory of its own.

    NVFP4 shards keep their own global scales. If these are equal, the layer has one, as layers without shards: some
    backends launch one kernel for each scale.

    Parameters
    ----------
    shards
        Weights of one op, scaling and K, with ``linear`` block scales; each has one global scale.

    Raises
    ------
    FormatError
        If one layer cannot hold them exactly: FP8 scales per tensor that differ, static activation scales that differ,
        or blocks of 128 rows that would belong to two shards. The text is a reason, without names.
    """
    first = shards[0]
    state = [_tensors(shard) for shard in shards]
    joined = join_tensors(state, [shard.n for shard in shards])
    n, rows, scales = sum(shard.n for shard in shards), tuple(shard.n for shard in shards), joined.get("weight_scale_2")
    if scales is not None and bool((scales == scales[0]).all()):
        rows, scales = (n,), scales[:1].clone()
    return replace(
        first,
        n=n,
        weight=joined["weight"],
        scale=joined[_scale_name(first)],
        global_scale=scales,
        shard_rows=rows if first.op == "nvfp4_gemm" else (),
        input_scale=joined.get("input_scale"),
    )


def split(weights: LinearWeights, rows: Sequence[int]) -> list[LinearWeights]:
    """Cut a layer into shards of these rows: the inverse of :func:`join`. Copies only scales of the whole layer."""
    scale = weights.scale
    if weights.sf_layout == "128x4":
        scale = from_128x4(scale, weights.n, weights.k // NVFP4_BLOCK)
    parts = split_tensors(_tensors(replace(weights, scale=scale, sf_layout="linear")), rows)
    return [
        replace(
            weights,
            n=n,
            weight=part["weight"],
            scale=part[_scale_name(weights)],
            global_scale=part["weight_scale_2"].reshape(1) if "weight_scale_2" in part else None,
            shard_rows=(n,) if weights.op == "nvfp4_gemm" else (),
            input_scale=part.get("input_scale"),
            sf_layout="linear",
        )
        for n, part in zip(rows, parts, strict=True)
    ]


def join_tensors(shards: Sequence[Mapping[str, Tensor]], rows: Sequence[int]) -> dict[str, Tensor]:
    """Return the stored tensors of a joined layer from those of its shards, all with the same names.

    Raises
    ------
    FormatError
        As :func:`join`.
    """
    joined: dict[str, Tensor] = {}
    for name in shards[0]:
        parts = [shard[name] for shard in shards]
        if name == "weight_scale_2":
            joined[name] = torch.cat([part.reshape(1) for part in parts])
        elif name == "weight_scale_inv" and any(n % FP8_BLOCK for n in rows[:-1]):
            raise FormatError(f"blocks of {FP8_BLOCK} rows, and shards of {list(rows)} rows would share one")
        elif name == "input_scale" or (name == "weight_scale" and parts[0].ndim == 0):
            if not all(torch.equal(part.reshape(()), parts[0].reshape(())) for part in parts):
                what = "static activation scales" if name == "input_scale" else "one FP8 scale each, which"
                raise FormatError(f"{what} differ: {', '.join(f'{float(part):g}' for part in parts)}")
            joined[name] = parts[0].clone()
        else:
            joined[name] = concatenate(parts)
    return joined


def split_tensors(joined: Mapping[str, Tensor], rows: Sequence[int]) -> list[dict[str, Tensor]]:
    """Return the stored tensors of each shard: views where they have rows of their own, else copies."""
    parts: list[dict[str, Tensor]] = [{} for _ in rows]
    for name, tensor in joined.items():
        start = 0
        for index, n in enumerate(rows):
            part = parts[index]
            if name == "weight_scale_2" and tensor.numel() > 1:
                part[name] = tensor[index]
            elif tensor.ndim == 0 or name == "weight_scale_2":
                part[name] = tensor.reshape(()).clone()  # two keys of a state must not share memory that overlaps
            else:
                per = FP8_BLOCK if name == "weight_scale_inv" else 1
                part[name] = tensor[start // per : -(-(start + n) // per)]
            start += n
    return parts


def _tensors(weights: LinearWeights) -> dict[str, Tensor]:
    """Return the tensors of canonical weights, by the names that a layer has for them."""
    found = {"weight": weights.weight, _scale_name(weights): weights.scale}
    if weights.global_scale is not None:
        found["weight_scale_2"] = weights.global_scale
    if weights.input_scale is not None:
        found["input_scale"] = weights.input_scale
    return found


def _scale_name(weights: LinearWeights) -> str:
    return "weight_scale_inv" if weights.scaling == "block128" else "weight_scale"


def concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors of one dtype, one below the other."""
    if parts[0].element_size() == 1:  # not every torch build concatenates float8
        return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)
    return torch.cat(list(parts))
