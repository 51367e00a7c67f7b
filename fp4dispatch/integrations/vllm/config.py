"""The quantisation configuration of a vLLM model: which layers this package runs, and in which format."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.transformers_utils.config import get_safetensors_params_metadata
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

from fp4dispatch.checkpoints.config.quant_config import QuantConfig, read_block
from fp4dispatch.checkpoints.config.readers import OWN_METHOD
from fp4dispatch.checkpoints.files.paths import HF_QUANT_FILE
from fp4dispatch.errors import CheckpointUnsupportedError
from fp4dispatch.integrations.engines.fused import group_of, scheme_of, shard_names, with_engine_names
from fp4dispatch.integrations.engines.refusals import Host, check_readable
from fp4dispatch.integrations.vllm.engine import Engine
from fp4dispatch.integrations.vllm.on_the_fly import Fp4DispatchOnlineLinearMethod, Request
from fp4dispatch.integrations.vllm.stored import Fp4DispatchLinearMethod
from fp4dispatch.run import routes

_log = init_logger("vllm.fp4dispatch")
_HOST = Host("vLLM", f"leave quantization={OWN_METHOD!r} out, so that vLLM runs the model by itself", blocks=True)

_THEIRS = {"FP8": "modelopt", "FP8_PER_CHANNEL_PER_TOKEN": "modelopt", "MIXED_PRECISION": "modelopt_mixed"}
"""ModelOpt's ``quant_algo`` -> vLLM's own method, where that is not ``modelopt_fp4``."""


class Fp4DispatchConfig(QuantizationConfig):  # type: ignore[misc,unused-ignore]
    """Run the linear layers of a model on this package: ``LLM(..., quantization="fp4dispatch")``.

    For a checkpoint of ModelOpt or compressed-tensors, or in FP8 blocks of 128x128 as DeepSeek has it, the layers that
    it holds quantised. What is not a linear layer stays with vLLM's own method for that checkpoint: experts, and the
    scales of the KV cache. For a checkpoint that is not quantised, each linear layer but the head is quantised to NVFP4
    while it is loaded.

    Parameters
    ----------
    block
        ``quantization_config`` of config.json, or the content of hf_quant_config.json. None: not quantised.

    Raises
    ------
    CheckpointUnsupportedError, CheckpointError
        As :func:`fp4dispatch.load_quantized`; the text names the format that was found, and those that are supported.
    """

    def __init__(self, block: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.engine = Engine()
        self._own: Any = None
        self._read(block)

    def _read(self, block: dict[str, Any] | None) -> None:
        self.block = copy.deepcopy(block)
        self.stored: QuantConfig | None = None
        self.request: Request | None = None
        if block is None:
            self.request = Request()
        elif block.get("quant_method") == OWN_METHOD:
            self.request = Request.from_dict(block)
        else:
            self.stored = read_block(block, "quantization_config")
            check_readable(self.stored, _HOST)

    # ------------------------------------------------------------------------------------------- what vLLM asks a class

    def get_name(self) -> str:
        """Return the name of the method."""
        return OWN_METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes that layers take."""
        return list(routes.OUT_DTYPE)

    @classmethod
    def get_min_capability(cls) -> int:
        """Return 75: older GPUs run no current vLLM. What runs on a GPU is for the policy to say."""
        return 75

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return nothing: with a name here, vLLM would refuse checkpoints that are not quantised."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Fp4DispatchConfig:
        """Return the configuration of a checkpoint."""
        return cls(config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Take a checkpoint over where the user asks for it, and only there."""
        return OWN_METHOD if user_quant == OWN_METHOD else None

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Read hf_quant_config.json where config.json says nothing, as older versions of ModelOpt wrote it.

        Raises
        ------
        CheckpointUnsupportedError
            A checkpoint to quantise that is quantised already.
        """
        if self.block is None:
            found = get_hf_file_to_dict(HF_QUANT_FILE, model_name, revision)
            if found is not None:
                self._read(found)
        if self.request is not None:
            _check_plain(get_safetensors_params_metadata(model_name, revision=revision), model_name)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Add vLLM's names of modules to those of the checkpoint."""
        if self.stored is not None:
            self.stored = with_engine_names(self.stored, hf_to_vllm_mapper.apply_list)
        if self._theirs is not None:
            self._theirs.apply_vllm_mapper(hf_to_vllm_mapper)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Return the method of a layer.

        Raises
        ------
        CheckpointUnsupportedError
            A fused layer of which the checkpoint quantises only a part, or in different formats.
        """
        if not isinstance(layer, (LinearBase, ParallelLMHead)):
            return self._leave(layer, prefix)
        names = shard_names(prefix, self.packed_modules_mapping)
        if self.request is not None:
            fmt = self.request.format_of(names, prefix)
            if fmt is None or isinstance(layer, ParallelLMHead) or _reads_weight(layer):
                return UnquantizedLinearMethod()
            return Fp4DispatchOnlineLinearMethod(self.engine, prefix, fmt, self.request.activation)
        assert self.stored is not None
        group = group_of(self.stored, names, prefix, _HOST)
        if group is None:
            return UnquantizedLinearMethod()
        return Fp4DispatchLinearMethod(self.engine, prefix, scheme_of(group), group.activation, group.static)

    # ------------------------------------------------------------------------------------------- what stays with vLLM

    @property
    def _theirs(self) -> Any:
        """The configuration that vLLM itself reads of the checkpoint; None if it is not quantised."""
        if self.stored is None or self.block is None:
            return None
        if self._own is None:
            name = self.stored.method
            if name == "modelopt":
                block = self.block.get("quantization", self.block)
                name = _THEIRS.get(str(block.get("quant_algo")).upper(), "modelopt_fp4")
            self._own = get_quantization_config(name).from_config(copy.deepcopy(self.block))
        self._own.packed_modules_mapping = self.packed_modules_mapping
        return self._own

    def _leave(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, RoutedExperts):
            what = "in 16 bits: they are not quantised" if self.stored is None else "with vLLM's own kernels"
            _log.warning_once("fp4dispatch does not run experts; those of this model run %s", what)
        theirs = self._theirs
        return None if theirs is None else theirs.get_quant_method(layer, prefix)

    def __getstate__(self) -> dict[str, Any]:
        """Return plain data: vLLM sends its configuration to its processes."""
        stored = None if self.stored is None else replace(self.stored)  # without what it has compiled
        return self.__dict__ | {"stored": stored, "engine": Engine()}


def _reads_weight(layer: torch.nn.Module) -> bool:
    """Whether the layer's own forward reads the weight, e.g. DeepSeek's fused_qkv_a_proj with a kernel of its own.

    It decides that when it is made, while the weight still has 16 bits, and our method would never run.
    """
    code = getattr(inspect.unwrap(type(layer).forward), "__code__", None)
    found = code is not None and "weight" in code.co_names
    if found:
        kind = type(layer).__name__
        _log.info_once("fp4dispatch leaves %s in 16 bits: its own forward reads the weight", kind)
    return found


def _check_plain(tensors: Iterable[str], model: str) -> None:
    """Refuse to quantise what is quantised already, as Transformers saves it after this package has quantised it."""
    odd = next(
        (name for name in tensors if name.endswith((".weight_scale", ".weight_scale_inv", ".weight_packed"))), ""
    )
    if odd:
        raise CheckpointUnsupportedError(
            f"{model}: tensor {odd!r}: the checkpoint is quantised already, and its configuration is none of ModelOpt "
            "or compressed-tensors: expected 16- or 32-bit weights: write it with "
            "fp4dispatch.save_quantized(model, path, 'modelopt')"
        )
