"""Which kernels Humming launches for a layer with NVFP4 weights and bfloat16 activations.

The layer that is timed and the process that compiles ahead both ask here, so they mean the same kernels. No tensor is
needed: the configuration follows from the sizes and the GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch

DTYPE = torch.bfloat16

Table = Sequence[tuple[int, int, dict[str, Any]]]
"""Humming's choices: a range ``low, high``, which means ``low < M <= high``, and the tuning configuration for it."""


def schema() -> dict[str, str]:
    """Return how the weights are stored. A new one each time, because ``HummingLayer`` may write into it."""
    return {"quant_method": "modelopt", "quant_algo": "nvfp4"}


def layer_config(n: int, k: int, device: torch.device) -> Any:
    """Return the configuration that a ``HummingLayer`` of [N, K] has after ``transform()``."""
    stored = importlib.import_module("humming.schema").BaseWeightSchema.from_config(schema())
    prepare = importlib.import_module("humming.transform").prepare_layer_config
    return prepare(n, k, stored.to_humming_schema(DTYPE), torch_dtype=DTYPE, device=device)


def is_layer_config(config: Any, n: int, k: int, device: torch.device) -> bool:
    """Whether :func:`layer_config` tells the configuration of a layer; False if another version of Humming has none."""
    try:
        return bool(layer_config(n, k, device).to_str() == config.to_str())
    except Exception:
        return False


def table(config: Any, device: torch.device) -> Table:
    """Return Humming's own choices for a layer."""
    found: Table = importlib.import_module("humming.tune").get_heuristics_config(config, device=device)
    return found


def choice(choices: Table, m: int) -> dict[str, Any]:
    """Return the choice for M tokens.

    Raises
    ------
    ValueError
        If no range holds M.
    """
    for low, high, config in choices:
        if low < m <= high:
            return config
    raise ValueError(f"Humming's table has no kernel for M={m}")
