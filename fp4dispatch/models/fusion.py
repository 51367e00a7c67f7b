"""Layers that engines fuse into one GEMM share one weight scale: which they are, and what the scale is.

vLLM and SGLang load ``q_proj``, ``k_proj`` and ``v_proj`` into one layer with one global scale. Where the shards were
quantised with different ones, vLLM takes the largest and does not rescale the codes (``quantization/modelopt.py``), so
the other shards come out too large. ModelOpt therefore unifies the scales before it quantises
(``torch/export/quant_utils.py``, ``preprocess_linear_fusion``), and so does this package. For FP8 per tensor vLLM
quantises the shards a second time, with the largest scale; that rounds twice unless they have one scale already.

A scale for each row, or for each block in float32, needs nothing of the kind: it travels with its rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

import torch

from fp4dispatch.formats import fp8_quantize, nvfp4_global_scale
from fp4dispatch.problem import Scaling

FUSED_BY_ENGINES: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj", "b_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("query", "key", "value"),
    ("wq", "wk", "wv"),
    ("q", "k", "v"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
    ("fc1", "fc3"),
    ("c_fc_0", "c_fc_1"),
)
"""Last components of the names of layers that are fused where they have one parent.

From ``packed_modules_mapping`` and ``stacked_params_mapping`` of vLLM 0.32 (``model_executor/models``)."""

_GROUP_OF: dict[str, int] = {last: number for number, group in enumerate(FUSED_BY_ENGINES) for last in group}


def fusion_groups(layers: Mapping[str, Hashable]) -> list[tuple[str, ...]]:
    """Return the groups of two or more layers that engines may fuse, in the order of ``layers``.

    Parameters
    ----------
    layers
        The layers that are going to be quantised, by name, with what must be equal within a group: at least K, since
        layers of different K never share a GEMM.
    """
    groups: dict[Hashable, list[str]] = {}
    for name, kind in layers.items():
        parent, _, last = name.rpartition(".")
        if last in _GROUP_OF:
            groups.setdefault((parent, _GROUP_OF[last], kind), []).append(name)
    return [tuple(names) for names in groups.values() if len(names) > 1]


def shared_scale(weights: Iterable[torch.Tensor], scaling: Scaling) -> torch.Tensor | None:
    """Return the one scale with which all weights of a group are to be quantised.

    It is the scale of their largest element: the global scale of NVFP4 (amax / 2688), or the scale of FP8 per tensor
    (amax / 448). Nothing saturates. Weights are taken one at a time; synchronises.

    Parameters
    ----------
    weights
        Floating-point [N, K] each.
    scaling
        How they are going to be scaled.

    Returns
    -------
    torch.Tensor or None
        f32 [], on the CPU. None where nothing is to be shared: each row or block has a scale of its own (``row``,
        ``block128``), or a weight holds NaN or Inf (quantising that weight says so).
    """
    if scaling not in ("nvfp4", "tensor"):
        return None
    amax = torch.stack([weight.detach().abs().amax().float().cpu() for weight in weights]).amax()
    if not bool(torch.isfinite(amax)):
        return None
    return nvfp4_global_scale(amax) if scaling == "nvfp4" else fp8_quantize(amax.reshape(1, 1), "tensor").scale
