"""Names of projections that share an input and may be one layer, as Llama's class and those after it name them."""

from __future__ import annotations

from collections.abc import Mapping

QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")
FUSED: Mapping[str, tuple[str, ...]] = {"qkv_proj": QKV, "gate_up_proj": GATE_UP}
"""Name of the fused layer -> those of its shards, in the order of its rows, as vLLM and SGLang have them."""
