"""Checkpoints that are not quantised: each weight is quantised when Transformers has read it, on its final device."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.core_model_loading import ConversionOps
from transformers.pytorch_utils import Conv1D

from fp4dispatch.checkpoints.config.quant_config import read_quant_config
from fp4dispatch.checkpoints.files.finite import check_finite
from fp4dispatch.checkpoints.files.reader import Checkpoint
from fp4dispatch.checkpoints.hf_names import Conversion, Names, names_in
from fp4dispatch.errors import CheckpointError, CheckpointUnsupportedError, InputError
from fp4dispatch.formats import fp8_quantize, nvfp4_quantize
from fp4dispatch.integrations.transformers.config import Fp4DispatchConfig
from fp4dispatch.integrations.transformers.stored_layers import linear_of, open_files, replace_module
from fp4dispatch.models.choose_layers import FORMATS, PROBLEM, choose_layers
from fp4dispatch.models.quantized_linear import QuantizedLinear
from fp4dispatch.models.replacing.fusion import SharedScales
from fp4dispatch.models.replacing.replaceable import carry_over
from fp4dispatch.problem import Scaling
from fp4dispatch.run import prebuild, routes
from fp4dispatch.run.prebuild import Ask


@dataclass
class NewLayers:
    """The layers of a model that are quantised while it loads.

    Parameters
    ----------
    layers
        The new layers, empty at first, and their scalings, by name in the model.
    checkpoint
        The open files.
    scales
        The weight scales that layers share because engines fuse them.
    transposed
        Layers whose stored weight is [K, N]: ``Conv1D`` of GPT-2.
    skipped, notes
        As in :class:`~fp4dispatch.models.choose_layers.Chosen`.
    bad
        Weights with NaN or Inf in them, found while loading.
    """

    layers: dict[str, tuple[QuantizedLinear, Scaling]]
    checkpoint: Checkpoint
    scales: SharedScales
    transposed: frozenset[str]
    skipped: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    bad: list[str] = field(default_factory=list)

    def wants(self, name: str) -> bool:
        """Whether this parameter of the model is a weight to quantise."""
        layer, _, last = name.rpartition(".")
        return last == "weight" and layer in self.layers

    def quantise(self, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors of a layer, by their names in the model; ``name`` is that of the weight."""
        layer = name.rpartition(".")[0]
        module, scaling = self.layers[layer]
        if layer in self.transposed:
            weight = weight.t().contiguous()
        expected = (module.out_features, module.in_features)
        if tuple(weight.shape) != expected:
            raise CheckpointError(
                f"tensor {name!r} makes a weight of {list(weight.shape)}, expected {list(expected)}: the checkpoint is "
                "of another model"
            )
        if not bool(torch.isfinite(weight).all()):
            self.bad.append(name)  # Transformers swallows what is raised here
            weight = torch.zeros_like(weight)
        scale = self.scales.of(layer)
        scale = None if scale is None else scale.to(weight.device, copy=True)  # tensors in common cannot be saved
        if scaling == "nvfp4":
            packed = nvfp4_quantize(weight, scale)
            made = {"weight": packed.data, "weight_scale": packed.sf, "weight_scale_2": packed.global_scale.reshape(())}
        else:
            fp8 = fp8_quantize(weight, scaling, scale)
            made = {"weight": fp8.data, "weight_scale_inv" if scaling == "block128" else "weight_scale": fp8.scale}
        return {f"{layer}.{suffix}": tensor for suffix, tensor in made.items()}

    def finish(self) -> None:
        """Check and bind the layers.

        Raises
        ------
        CheckpointError
            A weight or bias with NaN or Inf in it.
        """
        if self.bad:
            more = f" (and {len(self.bad) - 1} more)" if len(self.bad) > 1 else ""
            raise CheckpointError(f"tensor {self.bad[0]!r}{more} holds NaN or Inf, expected finite weights")
        self.checkpoint.close()
        for name, (layer, _) in self.layers.items():
            if layer.bias is not None:
                check_finite(str(self.checkpoint.path), f"{name}.bias", layer.bias)
        layers = [layer for layer, _ in self.layers.values()]
        prebuild.together(Ask(layer.problem(1), layer.backend, routes.gpu_of(layer.device)) for layer in layers)
        for layer in layers:
            layer.fill(layer.weights(lend=False), layer.bias)
            layer._hold_once()


class Quantise(ConversionOps):  # type: ignore[misc,unused-ignore]
    """The operation that Transformers runs on weights that it has read."""

    def __init__(self, new: NewLayers) -> None:
        self._new = new

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the tensors with each weight to quantise replaced by codes and scales."""
        out: dict[str, Any] = {}
        for name, value in input_dict.items():
            tensor = value[0] if isinstance(value, list) else value
            out |= self._new.quantise(name, tensor) if self._new.wants(name) else {name: value}
        return out


def expect_plain(model: Any, files: Sequence[str] | None, config: Fp4DispatchConfig, dtype: torch.dtype) -> NewLayers:
    """Replace the layers of a model on the meta device that the configuration says to quantise.

    Raises
    ------
    InputError
        As :func:`fp4dispatch.replace_linears`; or nothing to quantise.
    CheckpointError
        The checkpoint is quantised already, damaged, or not in safetensors.
    UnknownBackendError, BackendUnsupportedError, SettingsError
        As :func:`fp4dispatch.replace_linears`.
    """
    checkpoint = open_files(files)
    stored = read_quant_config(checkpoint)
    if stored is not None:
        raise CheckpointError(
            f"{stored.source}: the checkpoint is already quantised ({stored.method}), expected an unquantised one: "
            "say how, e.g. quantization_config={'quant_method': 'modelopt', 'quant_algo': 'NVFP4', 'ignore': [...]}, "
            "or build the model and call fp4dispatch.load_quantized"
        )
    names = names_in(model, checkpoint)
    convolutions = {name: module for name, module in model.named_modules() if isinstance(module, Conv1D)}
    for name, module in convolutions.items():
        replace_module(model, (name,), linear_of(module))
    chosen = choose_layers(model, config.format, config.include, config.exclude)
    tied = {name.removesuffix(".weight") for pair in model.all_tied_weights_keys.items() for name in pair}
    todo = [(name, linear, fmt) for name, linear, fmt in chosen.layers if name not in tied]
    skipped = [*chosen.skipped, *((n, "its weight is tied") for n, _, _ in chosen.layers if n in tied)]
    if not todo:
        reasons = "; ".join(f"{name}: {why}" for name, why in skipped[:3])
        raise InputError(f"{type(model).__name__}: no layer to quantise ({reasons}): change include, exclude or format")
    made: dict[int, QuantizedLinear] = {}
    layers: dict[str, tuple[QuantizedLinear, Scaling]] = {}
    for name, linear, fmt in todo:
        if id(linear) not in made:
            options = {"activation": config.activation or "any", "backend": config.backend, "name": name}
            made[id(linear)] = FORMATS[fmt](linear, **options)
            carry_over(linear, made[id(linear)])
        layers[name] = made[id(linear)], PROBLEM[fmt][1]
    for name, (layer, _) in layers.items():
        replace_module(model, (name,), layer)
    for name in convolutions.keys() - layers.keys():
        replace_module(model, (name,), convolutions[name])
    kinds = {name: (scaling, layer.in_features) for name, (layer, scaling) in layers.items()}
    weights = {name: f"{name}.weight" for name in layers}
    converted = _converted(names, checkpoint, set(weights.values()))

    def read(name: str) -> torch.Tensor:
        conversion = converted.get(name)
        made = checkpoint.tensor(names.stored[name]) if conversion is None else conversion.run(checkpoint.tensor)[name]
        return made.to(dtype)

    there = {name: weight for name, weight in weights.items() if weight in names.stored or weight in converted}
    scales = SharedScales(kinds, there, read)
    return NewLayers(layers, checkpoint, scales, frozenset(convolutions), tuple(skipped), chosen.notes)


def _converted(names: Names, checkpoint: Checkpoint, weights: Set[str]) -> dict[str, Conversion]:
    """Return the conversions that make these weights, by name in the model: q, k and v may be one stored tensor."""
    wanted = weights - names.stored.keys()
    if not wanted:
        return {}
    found: dict[str, Conversion] = {}
    for conversion in names.conversions:
        try:
            made = conversion.run(lambda name: checkpoint[name].on_meta())
        except AttributeError as error:  # it asks the model for the parameter, which a quantised layer has not
            raise CheckpointUnsupportedError(
                f"{checkpoint.path}: Transformers makes {conversion.name!r} out of {conversion.sources[0]!r} by the "
                "size of the unquantised layer, so it cannot be quantised while loading: load without "
                "quantization_config and call fp4dispatch.replace_linears, or exclude the layer"
            ) from error
        found |= dict.fromkeys(made.keys() & wanted, conversion)
    return found
