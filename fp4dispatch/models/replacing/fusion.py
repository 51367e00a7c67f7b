"""Find layers that engines fuse into one GEMM, and compute the one weight scale that they must share.

vLLM and SGLang load ``q_proj``, ``k_proj`` and ``v_proj`` into one layer with one global scale. If the shards have
different global scales, vLLM takes the largest and does not rescale the codes (``quantization/modelopt.py``). The other
shards then become too large. ModelOpt therefore computes one scale before it quantises
(``torch/export/quant_utils.py``, ``preprocess_linear_fusion``), and so does this package. For FP8 per tensor vLLM
quantises the shards again with the largest scale. That rounds twice, unless they have one scale already.

Scales per row or per block need no sharing: a fused layer keeps each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping

import torch

from fp4dispatch.formats import fp8_quantize, nvfp4_global_scale
from fp4dispatch.formats.amax import largest
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
"""Last name components of layers that engines fuse if they have the same parent module.

From ``packed_modules_mapping`` and ``stacked_params_mapping`` of vLLM 0.32 (``model_executor/models``)."""

_GROUP_OF: dict[str, int] = {last: number for number, group in enumerate(FUSED_BY_ENGINES) for last in group}


def fusion_groups(layers: Mapping[str, Hashable]) -> list[tuple[str, ...]]:
    """Return the groups of two or more layers that engines may fuse, in the order of ``layers``.

    Parameters
    ----------
    layers
        Names of the layers to quantise, each with a key. Layers of a group have equal keys. The key must contain K:
        layers of different K never share a GEMM.
    """
    groups: dict[Hashable, list[str]] = {}
    for name, kind in layers.items():
        parent, _, last = name.rpartition(".")
        if last in _GROUP_OF:
            groups.setdefault((parent, _GROUP_OF[last], kind), []).append(name)
    return [tuple(names) for names in groups.values() if len(names) > 1]


def shared_scale(weights: Iterable[torch.Tensor], scaling: Scaling) -> torch.Tensor | None:
    """Return the one scale to quantise all weights of a group with.

    It is the scale of their largest element: the global scale of NVFP4 (amax / 2688), or the scale of FP8 per tensor
    (amax / 448). Nothing saturates. Weights are taken one at a time; synchronises.

    Parameters
    ----------
    weights
        Floating-point [N, K] each.
    scaling
        Scaling of the quantised weights.

    Returns
    -------
    torch.Tensor or None
        f32 [], on the CPU. None if no scale is shared: each row or block has its own (``row``, ``block128``), or a
        weight holds NaN or Inf (quantising that weight raises).
    """
    if scaling not in ("nvfp4", "tensor"):
        return None
    amax = torch.stack([largest(weight).cpu() for weight in weights]).amax()
    if not bool(torch.isfinite(amax)):
        return None
    return nvfp4_global_scale(amax) if scaling == "nvfp4" else fp8_quantize(amax.reshape(1, 1), "tensor").scale


class SharedScales:
    """The scales of layers that engines fuse. Each is computed when the first layer of its group is asked for.

    Parameters
    ----------
    kinds
        Scaling and K of the layers to quantise, by name.
    stored
        Names of their weights where they are read from. A group with a weight that is not there shares no scale.
    read
        Returns a weight by that name.
    """

    def __init__(
        self,
        kinds: Mapping[str, tuple[Scaling, int]],
        stored: Mapping[str, str],
        read: Callable[[str], torch.Tensor],
    ) -> None:
        self._kinds, self._stored, self._read = kinds, stored, read
        self._groups = {name: group for group in fusion_groups(kinds) for name in group}
        self._scales: dict[tuple[str, ...], torch.Tensor | None] = {}

    def of(self, name: str) -> torch.Tensor | None:
        """Return the shared scale of a layer; None if it has its own."""
        group = self._groups.get(name)
        if group is None:
            return None
        if group not in self._scales:
            sources = [self._stored[member] for member in group if member in self._stored]
            weights = (self._read(source) for source in sources)
            whole = len(sources) == len(group)
            self._scales[group] = shared_scale(weights, self._kinds[name][0]) if whole else None
        return self._scales[group]
