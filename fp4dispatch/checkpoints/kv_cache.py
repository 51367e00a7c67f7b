"""The KV cache quantisation of a checkpoint: read on load, written on save, not used by this package.

Engines use the scales in attention. ModelOpt writes ``k_proj.k_scale``, llm-compressor
``self_attn.k_scale``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from fp4dispatch.errors import CheckpointError

KV_CACHE_SUFFIXES = (
    *("k_scale", "v_scale", "kv_scale", "q_scale", "prob_output_scale"),
    *("k_global_scale", "v_global_scale", "q_global_scale", "k_zero_point", "v_zero_point", "k_bias", "v_bias"),
)
"""Last components of the names of a quantised KV cache's tensors."""

_FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@dataclass(frozen=True)
class KvCache:
    """How a KV cache is quantised.

    Parameters
    ----------
    algo
        ModelOpt's name where the scheme has one (``FP8``), otherwise empty.
    text
        The scheme of the checkpoint as JSON, if it has no such name.
    """

    algo: str
    text: str = ""

    def __str__(self) -> str:
        return self.algo or self.text

    def as_compressed_tensors(self) -> dict[str, Any]:
        """Return ``kv_cache_scheme`` of a compressed-tensors configuration.

        Raises
        ------
        CheckpointError
            A scheme that compressed-tensors cannot express.
        """
        if self.algo == "FP8":
            return dict(_FP8)
        scheme = json.loads(self.text) if self.text else None
        if not isinstance(scheme, dict):
            raise CheckpointError(
                f"the KV cache of the model is quantised as {self}, which compressed-tensors cannot say: save with "
                'format="modelopt"'
            )
        return scheme

    def as_modelopt(self) -> tuple[str, object]:
        """Return ``kv_cache_quant_algo`` of hf_quant_config.json and ``kv_cache_scheme`` of config.json.

        Raises
        ------
        CheckpointError
            A scheme that ModelOpt has no name for.
        """
        if not self.algo:
            raise CheckpointError(
                f"the KV cache of the model is quantised as {self.text}, which ModelOpt has no name for: save with "
                'format="compressed-tensors"'
            )
        return self.algo, {k: _FP8[k] for k in ("dynamic", "num_bits", "type")} if self.algo == "FP8" else self.algo


def read_kv_cache(block: dict[str, Any], source: str) -> KvCache | None:
    """Read ``kv_cache_quant_algo`` or ``kv_cache_scheme``: ModelOpt's name, or the arguments of compressed-tensors.

    Raises
    ------
    CheckpointError
        A value that is neither.
    """
    value = block.get("kv_cache_quant_algo") or block.get("kv_cache_scheme")
    if value is None:
        return None
    if isinstance(value, str):
        return None if value.lower() in ("", "none") else KvCache(value)
    if not isinstance(value, dict):
        raise CheckpointError(f"{source}: the KV cache is {repr(value)[:80]}: expected a name or an object")
    plain = (value.get("num_bits"), value.get("type"), value.get("strategy") or "tensor", bool(value.get("dynamic")))
    if plain == (8, "float", "tensor", False) and value.get("symmetric") in (None, True):
        return KvCache("FP8")
    return KvCache("", json.dumps(value, sort_keys=True))
