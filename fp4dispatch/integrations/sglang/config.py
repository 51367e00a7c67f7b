"""The quantisation configuration of an SGLang model: which layers this package runs, and in which format."""

from __future__ import annotations

import copy
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization import QUANTIZATION_METHODS
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

from fp4dispatch.checkpoints.config.quant_config import QuantConfig, read_block
from fp4dispatch.checkpoints.config.readers import OWN_METHOD
from fp4dispatch.errors import CheckpointUnsupportedError
from fp4dispatch.integrations.engines.fused import group_of, scheme_of, shard_names, with_engine_names
from fp4dispatch.integrations.engines.refusals import Host, check_readable
from fp4dispatch.integrations.sglang.linear_method import Fp4DispatchLinearMethod
from fp4dispatch.machine import log as _log
from fp4dispatch.models.projections import FUSED
from fp4dispatch.run import routes

_HOST = Host("SGLang", f"leave --quantization {OWN_METHOD} out, so that SGLang runs the model by itself")
_ADDED = ("packed_modules_mapping", "hf_config")
"""What SGLang adds to the configuration of a checkpoint."""

_PACKED = {name: list(shards) for name, shards in FUSED.items()}
"""Fused layers of models that do not say (``packed_modules_mapping``), e.g. Llama and Qwen3 of SGLang."""

_THEIRS = {"FP8": "modelopt_fp8", "FP8_PER_CHANNEL_PER_TOKEN": "modelopt_fp8", "MIXED_PRECISION": "modelopt_mixed"}
"""ModelOpt's ``quant_algo`` -> SGLang's own method, where that is not ``modelopt_fp4``."""


class Fp4DispatchConfig(QuantizationConfig):  # type: ignore[misc,unused-ignore]
    """Run the quantised linear layers of a checkpoint on this package: ``--quantization fp4dispatch``.

    Experts and the scales of the KV cache stay with SGLang's own method for the checkpoint.

    Parameters
    ----------
    block
        ``quantization_config`` of config.json, or the content of hf_quant_config.json.
    packed
        The model's ``packed_modules_mapping``: fused layers and their shards.

    Raises
    ------
    CheckpointUnsupportedError, CheckpointError
        As :func:`fp4dispatch.load_quantized`; the text names the format that was found, and those that are supported.
    """

    def __init__(self, block: dict[str, Any], packed: dict[str, list[str]] | None = None) -> None:
        super().__init__()
        self.packed_modules_mapping = dict(packed or {})
        self.block = copy.deepcopy({key: value for key, value in block.items() if key not in _ADDED})
        inner = self.block.get("quantization")
        said = inner if isinstance(inner, dict) else self.block
        if "quant_algo" in said and said is self.block:
            self.block["quant_method"] = "modelopt"  # SGLang has put a name of its own there
        self.stored: QuantConfig = read_block(self.block, "quantization_config")
        self._algo = str(said.get("quant_algo")).upper()
        self._own: Any = None
        check_readable(self.stored, _HOST)

    # ----------------------------------------------------------------------------------------- what SGLang asks a class

    def get_name(self) -> str:
        """Return the name of the method."""
        return OWN_METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes that layers take."""
        return list(routes.OUT_DTYPE)

    @classmethod
    def get_min_capability(cls) -> int:
        """Return 75: older GPUs run no current SGLang. What runs on a GPU is for the policy to say."""
        return 75

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return the file of ModelOpt that SGLang reads where config.json says nothing."""
        return ["hf_quant_config.json"]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Fp4DispatchConfig:
        """Return the configuration of a checkpoint."""
        return cls(config, config.get("packed_modules_mapping"))

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: str | None) -> str | None:
        """Take a checkpoint over where the user asks for it, and only there."""
        return OWN_METHOD if user_quant == OWN_METHOD else None

    def get_scaled_act_names(self) -> list[str]:
        """Return nothing: no activation function is scaled."""
        return []

    def apply_weight_name_mapper(self, hf_to_sglang_mapper: Any) -> None:
        """Add SGLang's names of modules to those of the checkpoint."""
        self.stored = with_engine_names(self.stored, hf_to_sglang_mapper.apply_list)
        if self._own is not None:
            self._own.apply_weight_name_mapper(hf_to_sglang_mapper)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Return the method of a layer.

        Raises
        ------
        CheckpointUnsupportedError
            A fused layer of which the checkpoint quantises only a part, or in different formats; a quantised head.
        """
        if not isinstance(layer, (LinearBase, ParallelLMHead)):
            return self._leave(layer, prefix)
        names = shard_names(prefix, {**_PACKED, **self.packed_modules_mapping})
        group = group_of(self.stored, names, prefix, _HOST)
        if group is None and prefix not in names:  # stored as one layer already, as by Phi-3
            group = group_of(self.stored, (prefix,), prefix, _HOST)
        if group is None:
            return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
        if isinstance(layer, ParallelLMHead):
            raise CheckpointUnsupportedError(
                f"{prefix}: the checkpoint says that the head is quantised, which is not supported in SGLang: add it "
                f"to ignore of quantization_config, or {_HOST.leave_out}"
            )
        return Fp4DispatchLinearMethod(prefix, scheme_of(group), group.activation, group.static)

    def _leave(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Ask SGLang's own method of the checkpoint, for what is no linear layer."""
        from sglang.srt.layers.moe.fused_moe_triton import FusedMoE  # imports half of SGLang

        if self._own is None:
            name = "compressed-tensors"
            if self.stored.method == "modelopt":
                name = _THEIRS.get(self._algo, "modelopt_fp4")
            block = copy.deepcopy(self.block) | {"packed_modules_mapping": self.packed_modules_mapping}
            self._own = QUANTIZATION_METHODS[name].from_config(block)
        if isinstance(layer, FusedMoE):
            _log.warning("fp4dispatch does not run experts; %s runs with SGLang's own kernels", prefix)
        return self._own.get_quant_method(layer, prefix)
