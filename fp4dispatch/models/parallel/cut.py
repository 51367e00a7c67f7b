"""Cut a dimension of a layer among ranks, and cut its stored tensors exactly there. No process group is needed.

A scale belongs to a block: 16 elements along K for NVFP4, 128 along N and along K for block FP8. A cut through a block
would need another scale and other codes, so it is refused (https://github.com/vllm-project/vllm/issues/48898).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fp4dispatch.backends.base import LinearWeights
from fp4dispatch.errors import InputError
from fp4dispatch.formats import FP8_BLOCK, NVFP4_BLOCK, from_128x4
from fp4dispatch.problem import Op, Scaling

Dim = Literal["N", "K"]


@dataclass(frozen=True)
class Range:
    """Elements ``start`` to ``stop`` of a dimension, and ``zeros`` padded behind them."""

    start: int
    stop: int
    zeros: int = 0

    def entries(self, per: int) -> tuple[int, int]:
        """Return the first entry, and the one behind the last, of a tensor with one entry for ``per`` elements."""
        low = self.start // per
        return low, low if self.stop == self.start else -(-self.stop // per)


@dataclass(frozen=True)
class Cut:
    """The part of a dimension that one rank holds: one range of each fused shard, in order."""

    ranges: tuple[Range, ...]

    @property
    def rows(self) -> tuple[int, ...]:
        """Elements of each range, with padding."""
        return tuple(r.stop - r.start + r.zeros for r in self.ranges)

    @property
    def size(self) -> int:
        """Elements that the rank holds, with padding."""
        return sum(self.rows)


def unit(op: Op, scaling: Scaling, dim: Dim) -> int:
    """Return the number of elements along N or K that share a scale, and so stay on one rank."""
    if scaling == "block128":
        return FP8_BLOCK
    return NVFP4_BLOCK if op == "nvfp4_gemm" and dim == "K" else 1


def cut(
    size: int,
    rank: int,
    ranks: int,
    *,
    unit: int = 1,
    shards: Sequence[int] = (),
    pad: bool = False,
    what: str = "the layer",
    dim: Dim = "N",
) -> Cut:
    """Return what one rank holds of a dimension. All ranks hold the same number of elements.

    Parameters
    ----------
    size
        Elements of the whole dimension.
    unit
        Elements that must stay together, see :func:`unit`.
    shards
        Sizes of the layers that are fused along this dimension (q, k, v). Each is cut by itself.
    pad
        Fill up the last ranks with zeros where the dimension does not divide.
    what, dim
        Layer and dimension, for errors.

    Raises
    ------
    InputError
        If the shards do not add up, or if the cut would split a scale block or leave ranks of unequal sizes; the text
        has the numbers of ranks that work.
    """
    parts = tuple(shards) or (size,)
    if sum(parts) != size or min(parts) < 1:
        raise InputError(f"{what}: fused={list(parts)} do not add up to {dim}={size}")
    ranges, start = [], 0
    for part in parts:
        each = part // ranks
        if pad:
            blocks = -(-part // unit)
            each = -(-blocks // ranks) * unit
        elif part % ranks or each % unit:
            raise InputError(_refusal(what, dim, part, ranks, unit))
        if ranks > 1 and start % unit:
            raise InputError(
                f"{what}: the shards fused along {dim}, {list(parts)}, start inside a scale block of {unit}: need "
                f"multiples of {unit}"
            )
        low, high = min(rank * each, part), min((rank + 1) * each, part)
        ranges.append(Range(start + low, start + high, each - (high - low)))
        start += part
    return Cut(tuple(ranges))


def _refusal(what: str, dim: Dim, size: int, ranks: int, unit: int) -> str:
    works = [n for n in range(1, min(size // unit, 1024) + 1) if size % n == 0 and (size // n) % unit == 0]
    if size % unit:
        works = [1]
    reason = f"{size}/{ranks} = {size / ranks:g} elements a rank"
    blocks = f", and {unit} of them share a scale: need a multiple of {unit}" if unit > 1 else ", which is not whole"
    return (
        f"{what}: {dim}={size} cannot be cut for {ranks} ranks: {reason}{blocks}. Numbers of ranks that work: "
        f"{', '.join(map(str, works[-12:]))}. Or pad it with zeros (pad=True, for layers of an MLP)"
    )


def take(tensor: Tensor, dim: int, where: Cut, per: int = 1, fill: float = 0) -> Tensor:
    """Return the rank's part of one stored tensor, contiguous and in memory of its own.

    Parameters
    ----------
    dim
        Dimension of ``tensor`` to cut.
    per
        Elements of the cut dimension for each entry of ``tensor``: 2 for codes, 16 or 128 for scales.
    fill
        Value of padding: 1 for scales in f32.
    """
    found = assemble(lambda low, high: tensor.narrow(dim, low, high - low), dim, where, per, fill)
    single = len(where.ranges) == 1 and not where.ranges[0].zeros
    return _bytes(found).clone(memory_format=torch.contiguous_format).view(found.dtype) if single else found


def assemble(read: Callable[[int, int], Tensor], dim: int, where: Cut, per: int = 1, fill: float = 0) -> Tensor:
    """Return the rank's part, as :func:`take`. ``read`` gives entries from one index to another, or a view."""
    parts = []
    for r in where.ranges:
        low, high = r.entries(per)
        part = read(low, high)
        zeros = -(-(r.stop - r.start + r.zeros) // per) - (high - low)
        parts.append(part)
        if zeros:
            shape = [*part.shape[:dim], zeros, *part.shape[dim + 1 :]]
            parts.append(_full(shape, fill, part))
    raw = [_bytes(part) for part in parts]
    whole = raw[0] if len(raw) == 1 else torch.cat(raw, dim)
    return whole.view(parts[0].dtype)


def join(parts: Sequence[Tensor], dim: int, cuts: Sequence[Cut], per: int = 1) -> Tensor:
    """Return the whole tensor from the parts of all ranks, in rank order; the inverse of :func:`take`."""
    pieces = []
    for index in range(len(cuts[0].ranges)):
        for part, where in zip(parts, cuts, strict=True):
            offset = sum(-(-rows // per) for rows in where.rows[:index])
            low, high = where.ranges[index].entries(per)
            pieces.append(_bytes(part).narrow(dim, offset, high - low))
    return torch.cat(pieces, dim).view(parts[0].dtype)


def cut_weights(weights: LinearWeights, dim: Dim, where: Cut) -> LinearWeights:
    """Return the rank's part of canonical weights, exactly: codes and scales keep their bits. Copies the part."""
    axis = 0 if dim == "N" else 1
    packed = 2 if weights.op == "nvfp4_gemm" else 1
    scale = weights.scale
    if weights.sf_layout == "128x4":
        scale = from_128x4(scale, weights.n, weights.k // NVFP4_BLOCK)
    per = scale_entries(weights.scaling, dim)
    n, k = (where.size, weights.k) if dim == "N" else (weights.n, where.size)
    rows = weights.shard_rows
    if rows and dim == "N":
        rows = where.rows if len(rows) > 1 else (n,)
    return replace(
        weights,
        n=n,
        k=k,
        weight=take(weights.weight, axis, where, packed if dim == "K" else 1),
        scale=take(scale, axis, where, per, 0 if weights.scaling == "nvfp4" else 1) if per else scale.clone(),
        global_scale=None if weights.global_scale is None else weights.global_scale.clone(),
        input_scale=None if weights.input_scale is None else weights.input_scale.clone(),
        shard_rows=rows,
        sf_layout="linear",
    )


def join_weights(
    parts: Sequence[LinearWeights], dim: Dim, cuts: Sequence[Cut], shard_rows: tuple[int, ...]
) -> LinearWeights:
    """Return the whole weights from those of all ranks, in rank order; the inverse of :func:`cut_weights`."""
    first = parts[0]
    axis = 0 if dim == "N" else 1
    packed = 2 if first.op == "nvfp4_gemm" and dim == "K" else 1
    per = scale_entries(first.scaling, dim)
    weight = join([part.weight for part in parts], axis, cuts, packed)
    scale = join([part.scale for part in parts], axis, cuts, per) if per else first.scale
    k = weight.shape[1] * (2 if first.op == "nvfp4_gemm" else 1)
    return replace(first, n=weight.shape[0], k=k, weight=weight, scale=scale, shard_rows=shard_rows)


def scale_entries(scaling: Scaling, dim: Dim) -> int:
    """Return how many elements along a dimension one entry of the scale covers; 0 where the scale is not cut."""
    if scaling == "block128":
        return FP8_BLOCK
    if scaling == "nvfp4":
        return 1 if dim == "N" else NVFP4_BLOCK
    return 1 if scaling == "row" and dim == "N" else 0


def _bytes(tensor: Tensor) -> Tensor:
    """Return 8-bit floats as bytes: not every torch build concatenates or copies them."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _full(shape: Sequence[int], fill: float, like: Tensor) -> Tensor:
    if like.element_size() == 1:
        return torch.zeros(shape, dtype=torch.uint8, device=like.device).view(like.dtype)
    return torch.full(shape, fill, dtype=like.dtype, device=like.device)
