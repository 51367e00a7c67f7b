"""The quantizer that Transformers calls before, during and after it loads weights, and when it saves them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer

from fp4dispatch.backends.base import LinearWeights
from fp4dispatch.checkpoints.carried import all_carried
from fp4dispatch.checkpoints.config.readers import OWN_METHOD
from fp4dispatch.checkpoints.hf_names import lost_when_saved
from fp4dispatch.checkpoints.load import LoadReport, with_fused
from fp4dispatch.checkpoints.plan import LayerPlan
from fp4dispatch.checkpoints.schemes import SCHEMES, from_linear
from fp4dispatch.errors import CheckpointUnsupportedError, InputError
from fp4dispatch.integrations.transformers.config import Fp4DispatchConfig
from fp4dispatch.integrations.transformers.on_the_fly import NewLayers, Quantise, expect_plain
from fp4dispatch.integrations.transformers.stored_layers import StoredLayers, expect_stored, tensors_as_stored
from fp4dispatch.integrations.transformers.supported import check_version
from fp4dispatch.machine import log as _log
from fp4dispatch.models.compact_weights import without_dropped
from fp4dispatch.models.fusing.fuse import fuse
from fp4dispatch.models.fusing.parents import shards_in
from fp4dispatch.models.fusing.rows import split
from fp4dispatch.models.parallel.layers import refuse_cut
from fp4dispatch.models.quantized_linear import QuantizedLinear
from fp4dispatch.models.replacing.replaceable import leftover, model_bytes, why_no_linear
from fp4dispatch.run import routes

_OWN_SCHEMES = {"nvfp4": "modelopt-nvfp4", "tensor": "fp8-tensor", "row": "fp8-channel", "block128": "fp8-block"}
"""How layers are saved that no checkpoint has stored in another way: under the names that they have."""


class Fp4DispatchHfQuantizer(HfQuantizer):  # type: ignore[misc,unused-ignore]
    """Put ``FP4Linear`` and ``FP8Linear`` into a model that Transformers builds.

    Attributes
    ----------
    report
        What was loaded; None before.
    """

    quantization_config: Fp4DispatchConfig

    def __init__(self, quantization_config: Fp4DispatchConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.pre_quantized |= quantization_config.block is not None  # the caller says what the checkpoint is
        self.report: LoadReport | None = None
        self._stored: StoredLayers | None = None
        self._new: NewLayers | None = None
        self._schemes: dict[str, LayerPlan] = {}
        self._divisors: dict[tuple[str, str], torch.Tensor] = {}

    # --------------------------------------------------------------------------------------------------------- checks

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuse other versions of Transformers, and to offload layers that are quantised while they are loaded."""
        check_version()
        away = _offloads(device_map) if isinstance(device_map, Mapping) else []
        if away and not self.pre_quantized:
            raise InputError(
                f"device_map puts parts of the model on {', '.join(away)}, and the checkpoint is not quantised: "
                "Transformers would read the unquantised weights again for each call: quantise it first (fp4dispatch "
                "quantize, or from_pretrained and save_pretrained without offloading), then load the result"
            )

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Refuse dtypes of the model that the layers do not compute with."""
        if dtype not in routes.OUT_DTYPE:
            raise InputError(f"dtype={dtype}; need torch.bfloat16, torch.float16 or torch.float32")
        return dtype

    def update_parallel_plan(self, model: Any, plan: dict[str, str]) -> None:
        """Refuse tensor parallelism of Transformers, which would not cut the scales."""
        parallel = getattr(model.config, "distributed_config", None)
        if (getattr(parallel, "tp_size", None) or 1) > 1:
            raise InputError(
                "tensor parallelism of Transformers does not cut the scales of quantised layers: build the model "
                "on the meta device and call fp4dispatch.load_quantized(model, dir, tp=group), which uses the model's "
                "tp_plan; or load it without tp_plan"
            )

    # -------------------------------------------------------------------------------------------------------- loading

    def _convert_model_for_quantization(self, model: Any) -> None:
        """Leave the experts of the model as they are until the checkpoint is open.

        For compressed-tensors Transformers puts one linear layer an expert in place of the experts of Llama 4. Their
        weights would stay random where the checkpoint has all experts in one tensor, which Transformers does not ask.
        """

    def _process_model_before_weight_loading(
        self,
        model: Any,
        dtype: torch.dtype | None = None,
        checkpoint_files: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        if self.pre_quantized:
            apart = super()._convert_model_for_quantization
            self._stored = expect_stored(model, checkpoint_files, self.quantization_config, apart)
            self._schemes = self._stored.stored()
        else:
            main = dtype or torch.get_default_dtype()
            self._new = expect_plain(model, checkpoint_files, self.quantization_config, main)

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Whether a parameter of the checkpoint is to be quantised now."""
        return self._new is not None and self._new.wants(param_name)

    def get_quantize_ops(self) -> Quantise:
        """Return the operation that quantises."""
        if self._new is None:
            raise InputError("the model is quantised already")
        return Quantise(self._new)

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """Return the dtype to convert a tensor of the checkpoint to; None: 8-bit tensors stay as they are."""
        name = param.get_dtype() if hasattr(param, "get_dtype") else ""
        return None if name.startswith("F8") else super().get_new_dtype(converter, param, dtype)

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        """Return the conversions of the model unchanged: stored tensors are loaded under their names."""
        return weight_conversions

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self._stored is not None:
            self.report = self._stored.finish(model)
            self._divisors = self._stored.divisors
            _log.info("%s", self.report)
            self._stored = None
        if self._new is not None:
            self._new.finish()
            _log_new(self._new)
            self._new = None
        if self.quantization_config.fuse:
            self._fuse(model)
        _say_what_is_left(model)
        return model

    def _fuse(self, model: Any) -> None:
        fusing = fuse(model)
        for line in fusing.lines():
            _log.info("%s", line)
        if self.report is not None:
            layers, size = with_fused(model, self.report.layers, fusing), model_bytes(model)
            self.report = replace(self.report, layers=layers, model_bytes=size, fusing=fusing)

    # --------------------------------------------------------------------------------------------------------- saving

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Return the tensors to save, quantised ones under the names of the checkpoint that they came from."""
        refuse_cut(model, "save_pretrained")
        layers = {n: m for n, m in model.named_modules(remove_duplicate=False) if isinstance(m, QuantizedLinear)}
        fused = shards_in(model)
        apart = {*layers, *(shard for shards in fused.values() for shard in shards)}
        state: dict[str, torch.Tensor] = {}
        with without_dropped():
            held = model.state_dict()
        for name, tensor in held.items():
            parent, _, last = name.rpartition(".")
            if parent not in apart or last == "bias":
                state[name] = tensor
        codes: dict[str, torch.Tensor] = {}
        for name, layer in layers.items():
            weights = layer.weights(lend=False)
            shards = fused.get(name)
            if shards is None:
                codes |= self._saved(name, weights)
                continue
            for shard, part in zip(shards, split(weights, list(shards.values())), strict=True):
                codes |= self._saved(shard, part)
        why = lost_when_saved(model, codes)
        if why is not None:
            raise CheckpointUnsupportedError(
                f"save_pretrained: Transformers would {why}: save with fp4dispatch.save_quantized"
            )
        state |= codes
        for prefix, carried in all_carried(model):
            state |= {prefix + name: tensor for name, tensor in carried.tensors.items()}
        return state, {}

    def _saved(self, name: str, weights: LinearWeights) -> dict[str, torch.Tensor]:
        planned = self._schemes.get(name)
        if planned is None:
            tensors = from_linear(SCHEMES[_OWN_SCHEMES[weights.scaling]], weights)
            # Layers may share a scale tensor, and safetensors refuses tensors in common.
            return {f"{name}.{suffix}": t.clone() if t.numel() == 1 else t for suffix, t in tensors.items()}
        divisors = {suffix: t for (layer_name, suffix), t in self._divisors.items() if layer_name == name}
        tensors = tensors_as_stored(planned, weights, divisors)
        return {f"{name}.{suffix}": tensor for suffix, tensor in tensors.items()}

    def is_serializable(self) -> bool:
        """Return True: ``save_pretrained`` works."""
        return True

    @property
    def is_trainable(self) -> bool:
        """False: the layers are for inference only."""
        return False

    @property
    def is_compileable(self) -> bool:
        """True: ``generate`` may compile the model."""
        return True


def adopt(model: Any) -> None:
    """Let ``save_pretrained`` of a model write what ``from_pretrained`` can load.

    For models that :func:`fp4dispatch.replace_linears` or :func:`fp4dispatch.load_quantized` changed: Transformers does
    not know of their layers, and would save them without a ``quantization_config``.

    Parameters
    ----------
    model
        A model of Transformers with ``FP4Linear`` or ``FP8Linear`` in it.

    Raises
    ------
    InputError
        Another model; layers that do not all take the same activation format.
    """
    layers = [module for module in getattr(model, "modules", list)() if isinstance(module, QuantizedLinear)]
    if not isinstance(model, PreTrainedModel) or not layers:
        raise InputError(
            f"adopt: got a {type(model).__name__} with {len(layers)} quantised layers; need a model of Transformers "
            "with at least one: call fp4dispatch.replace_linears first"
        )
    activations = sorted({layer.activation for layer in layers})
    if len(activations) > 1:
        raise InputError(
            f"adopt: the layers take activations as {', '.join(activations)}; the configuration can say one for all: "
            "save with fp4dispatch.save_quantized"
        )
    config = Fp4DispatchConfig(activation=activations[0])
    quantizer = Fp4DispatchHfQuantizer(config, pre_quantized=True)
    model.config.quantization_config = config
    for name, value in (("hf_quantizer", quantizer), ("is_quantized", True), ("quantization_method", OWN_METHOD)):
        setattr(model, name, value)


def _log_new(new: NewLayers) -> None:
    """Log what was quantised, and what the caller asked for and did not get."""
    _log.info("%d layers were quantised while loading; %d linear layers left alone", len(new.layers), len(new.skipped))
    for name, reason in new.skipped:
        _log.info("left alone: %s: %s", name, reason)
    for note in new.notes:
        _log.warning("%s", note)


def _offloads(device_map: Mapping[str, Any]) -> list[str]:
    """Return the places of a device_map from which parts of the model are moved to another device for each call."""
    devices = {str(device) for device in device_map.values()}
    return sorted(devices & ({"disk"} if devices <= {"cpu", "disk"} else {"cpu", "disk"}))


def _say_what_is_left(model: nn.Module) -> None:
    """Log one WARNING with the experts that stay unquantised: they can be most of a model."""
    reasons = [(name, p, why_no_linear(name, owner, p)) for name, owner, p in leftover(model)]
    experts = [(name, p, why) for name, p, why in reasons if "experts in one tensor" in why]
    if experts:
        name, parameter, why = experts[0]
        _log.warning(
            "%d tensors of experts (%.2f MB of the model) stay in %s, e.g. %s: %s",
            len(experts), sum(p.numel() * p.element_size() for _, p, _ in experts) / 1e6,
            str(parameter.dtype).removeprefix("torch."), name, why,
        )  # fmt: skip
