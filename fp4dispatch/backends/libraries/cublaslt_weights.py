"""Weights as :mod:`fp4dispatch.backends.libraries.cublaslt` multiplies them: padded with zeros, scales rearranged."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fp4dispatch.backends.base import LinearWeights
from fp4dispatch.backends.own.tiling.predict import BLOCK_K, BLOCK_N
from fp4dispatch.backends.weight_layout import block_scales_128x4, global_scales
from fp4dispatch.formats import round_up, zero_pad
from fp4dispatch.problem import Scaling


class Layout(NamedTuple):
    """Sizes of prepared weights; ``np``, ``kp`` are padded. ``per_row``: the weight has one scale per row of [np]."""

    scaling: Scaling
    n: int
    k: int
    np: int
    kp: int
    per_row: bool
    has_input_scale: bool


def prepare(weights: LinearWeights) -> tuple[list[Tensor], Layout]:
    """Return the tensors of a layer and their sizes; the input scale is last, if any. What fits is not copied.

    Weight [np, kp] (nvfp4: uint8 [np, kp/2]), then its scales. ``tensor`` with an input scale: f32 []. ``row``, and
    ``tensor`` without one: f32 [1, np]. ``row`` with an input scale: also their product, f32 [1, np]. ``block128``:
    [np/128, kp/128 rounded up to 4]. nvfp4: the 128x4 block scales and the global scale, f32 [1] or [np].
    """
    make = {"nvfp4": _prepare_nvfp4, "block128": _prepare_block128}.get(weights.scaling, _prepare_fp8)
    tensors, layout = make(weights)
    if weights.input_scale is not None:
        tensors.append(weights.input_scale)
    return tensors, layout


def _prepare_fp8(w: LinearWeights) -> tuple[list[Tensor], Layout]:
    """Make weight [np, kp] and scale f32 []; [1, np] for row scaling and for activations scaled per token.

    With row scaling and a static input scale, a second [1, np] is their product: tokens then have the scale 1.
    """
    np, kp = round_up(w.n, 16), round_up(w.k, 16)
    per_row = w.scaling == "row" or w.input_scale is None  # per-token activations need per-row weights beside them
    tensors = [zero_pad(w.weight, np, kp), w.scale]
    if per_row:
        tensors[1] = zero_pad(w.scale.expand(w.n).reshape(1, -1), 1, np).contiguous()
        if w.input_scale is not None:
            tensors.append(tensors[1] * w.input_scale)
    return tensors, Layout(w.scaling, w.n, w.k, np, kp, per_row, w.input_scale is not None)


def _prepare_block128(w: LinearWeights) -> tuple[list[Tensor], Layout]:
    np, kp = round_up(w.n, BLOCK_N), round_up(w.k, BLOCK_K)
    scale = zero_pad(w.scale, w.scale.shape[0], round_up(w.scale.shape[1], 4)).contiguous()
    layout = Layout(w.scaling, w.n, w.k, np, kp, False, w.input_scale is not None)
    return [zero_pad(w.weight, np, kp), scale], layout


def _prepare_nvfp4(w: LinearWeights) -> tuple[list[Tensor], Layout]:
    np, kp = round_up(w.n, 16), round_up(w.k, 32)
    layout = Layout("nvfp4", w.n, w.k, np, kp, len(w.shard_rows) > 1, w.input_scale is not None)
    return [zero_pad(w.weight, np, kp // 2), block_scales_128x4(w, np, kp), global_scales(w, np)], layout
