"""Checkpoints that are quantised already: layers take the stored tensors under their stored names.

Transformers fills the tensors that a module has, by name. So a quantised layer on the meta device first gets tensors
with the names, dtypes and shapes of the checkpoint. When Transformers has filled them, they become the layer's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from fp4dispatch.backends.base import LinearWeights
from fp4dispatch.checkpoints.carried import Carried, carry
from fp4dispatch.checkpoints.config.quant_config import QuantConfig, read_quant_config
from fp4dispatch.checkpoints.files.finite import check_finite
from fp4dispatch.checkpoints.files.reader import FLOATS, Checkpoint, TensorInfo, open_checkpoint
from fp4dispatch.checkpoints.hf_names import Names, cannot_convert, names_in, never_stored
from fp4dispatch.checkpoints.load import (
    LoadedLayer,
    LoadReport,
    check_e4m3,
    check_scales,
    collect_carried,
    layer_options,
)
from fp4dispatch.checkpoints.plan import LayerPlan, Plan
from fp4dispatch.checkpoints.planner import plan_load
from fp4dispatch.checkpoints.schemes import detect, from_linear, to_linear
from fp4dispatch.errors import CheckpointError, CheckpointUnsupportedError, FormatError
from fp4dispatch.integrations.transformers.config import Fp4DispatchConfig
from fp4dispatch.models.linear import FP4Linear, FP8Linear
from fp4dispatch.models.quantized_linear import QuantizedLinear
from fp4dispatch.models.replacing.replaceable import Tied, carry_over, model_bytes, models_with_ties, sizes, untie
from fp4dispatch.run import prebuild, routes
from fp4dispatch.run.prebuild import Ask

if TYPE_CHECKING:
    from fp4dispatch.integrations.transformers.offloaded import Offloaded


_TOLD_BY = ("weight", "weight_packed", "weight_scale", "weight_scale_2", "weight_scale_inv")
"""Tensors that tell how a layer is stored."""

_INSTEAD = "build the model and call fp4dispatch.load_quantized"


def open_files(files: Sequence[str] | None) -> Checkpoint:
    """Open the checkpoint that Transformers is about to load, and check all its headers.

    Raises
    ------
    CheckpointError
        No files, files of other kinds than safetensors, or files that are damaged.
    """
    if not files:
        raise CheckpointError("a state_dict was passed to from_pretrained: need a directory or a repository with files")
    parents = {Path(file).parent for file in files}
    if len(parents) > 1:
        raise CheckpointError(f"the weights lie in {len(parents)} directories, e.g. {files[0]}: need one")
    checkpoint = open_checkpoint(parents.pop() if len(files) > 1 else files[0])
    absent = {Path(file).name for file in files} - {file.name for file in checkpoint.files}
    if absent:
        raise CheckpointError(
            f"{checkpoint.path}: Transformers would load {', '.join(sorted(absent)[:3])}, which is not part of the "
            "checkpoint: remove the other files"
        )
    return checkpoint


@dataclass
class StoredLayers:
    """The quantised layers of a model that Transformers is filling.

    Parameters
    ----------
    path
        Directory of the checkpoint.
    plan
        What is stored quantised, and where it goes.
    carried
        Data of the checkpoint that no module holds.
    layers
        The new layers, in the order of ``plan.layers``.
    """

    path: Path
    plan: Plan
    carried: Carried
    layers: list[QuantizedLinear] = field(default_factory=list)
    divisors: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    """Stored reciprocals of scales, by layer and suffix: a reciprocal of a reciprocal can differ in the last bit."""

    def stored(self) -> dict[str, LayerPlan]:
        """Return how each layer is stored, by each of its names in the model."""
        return {name: layer for layer in self.plan.layers for name in layer.names}

    def finish(self, model: nn.Module) -> LoadReport:
        """Turn the stored tensors, now filled, into those of the layers.

        Raises
        ------
        CheckpointError
            Values that do not fit the format; the text names the tensor.
        """
        loaded = []
        prebuild.together(Ask(layer.problem(1), layer.backend, routes.gpu_of(_place(layer))) for layer in self.layers)
        for planned, layer in zip(self.plan.layers, self.layers, strict=True):
            away = _taken_away(layer)
            for suffix, divisor in _settle(self.path, planned, layer, away).items():
                self.divisors |= {(name, suffix): divisor for name in planned.names}
            shard, nbytes = planned.shards[0].name, layer.stored_nbytes()
            loaded.append(LoadedLayer(planned.names[0], planned.scheme.name, (shard,), nbytes))
        carry(model, self.carried)
        plan = self.plan
        ignored = tuple(plan.kv_cache + plan.ignored + plan.unexpected)
        tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
        computed = never_stored(model)  # Transformers fills these with the values that the model computes
        missing = tuple(n for n in plan.missing if tied.get(n, n) in plan.missing and n not in computed)
        return LoadReport(self.path, tuple(loaded), tuple(plan.excluded), ignored, missing, (), model_bytes(model))


def expect_stored(
    model: Any, files: Sequence[str] | None, config: Fp4DispatchConfig, apart: Callable[[Any], object]
) -> StoredLayers:
    """Replace the layers of a model on the meta device that the checkpoint stores quantised. Reads headers only.

    ``apart`` gives a model of Transformers linear layers for each of its experts, where it has such a form of them. It
    is called if the checkpoint stores experts one by one.

    Raises
    ------
    CheckpointUnsupportedError
        Quantised experts; a layer whose weight other code of the model reads, or that the checkpoint stores in shards.
    CheckpointError
        Anything else that is wrong with the checkpoint, as :func:`fp4dispatch.load_quantized`.
    """
    with open_files(files) as checkpoint:
        quant = read_quant_config(checkpoint, config.to_dict())
        if any(re.search(r"\.experts\.\d+\.", name) for name in checkpoint):
            apart(model)
        names = names_in(model, checkpoint)
        _linears_for_conv1d(model, checkpoint, names)
        _refuse_experts(checkpoint, names)
        plan = plan_load(model, checkpoint, quant, strict=False)
        _refuse(plan, checkpoint, quant)
        plan.refuse_orphans(checkpoint, names)
        found = StoredLayers(checkpoint.path, plan, collect_carried(plan, checkpoint, quant))
        tied = models_with_ties(model)
        for planned in plan.layers:
            found.layers.append(_replace(model, planned, config, tied))
        known = (*plan.kv_cache, *plan.ignored)
        model._keys_to_ignore_on_load_unexpected |= {f"^{re.escape(names.plain[name])}$" for name in known}
    return found


def _linears_for_conv1d(model: nn.Module, checkpoint: Checkpoint, names: Names) -> None:
    """Put an ``nn.Linear`` where a ``Conv1D`` (GPT-2) is stored quantised: tools store its weight as [N, K]."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            below = names.module_in_file(name)
            infos = {key: checkpoint[full] for key in _TOLD_BY if (full := f"{below}.{key}") in checkpoint}
            kinds = {key: (info.dtype, info.shape) for key, info in infos.items()}
            if detect(kinds):
                replace_module(model, (name,), linear_of(module))


def linear_of(conv: Conv1D) -> nn.Linear:
    """Return an ``nn.Linear`` on the meta device in place of a ``Conv1D``."""
    return nn.Linear(conv.nx, conv.nf, conv.bias is not None, device="meta", dtype=conv.weight.dtype)


def replace_module(model: nn.Module, names: Sequence[str], module: nn.Module) -> None:
    """Put a module at each of its places."""
    for name in names:
        parent, _, last = name.rpartition(".")
        model.get_submodule(parent)._modules[last] = module


def _refuse_experts(checkpoint: Checkpoint, names: Names) -> None:
    for conversion in names.conversions:
        infos = (checkpoint[source] for source in conversion.sources)
        odd = next((info for info in infos if info.dtype not in FLOATS), None)
        if odd is not None:
            raise CheckpointUnsupportedError(
                f"{odd.file}: tensor {odd.name!r} is {odd}; Transformers makes {conversion.name!r} of it, and "
                f"{cannot_convert(conversion.name)}"
            )


def _refuse(plan: Plan, checkpoint: Checkpoint, config: QuantConfig | None) -> None:
    """Refuse what Transformers would load wrongly, or fill with random values."""
    for layer in plan.layers:
        if layer.keep:
            raise CheckpointUnsupportedError(
                f"{checkpoint.path}: layer {layer.names[0]!r} is stored quantised, but {layer.keep}: {_INSTEAD}, which "
                "dequantises it"
            )
        if len(layer.shards) > 1:
            raise CheckpointUnsupportedError(
                f"{checkpoint.path}: layer {layer.names[0]!r} is stored as "
                f"{', '.join(shard.name for shard in layer.shards)}, which Transformers cannot put together: {_INSTEAD}"
            )
    if plan.unquantised:
        raise CheckpointError(
            f"{config.source if config else checkpoint.path}: says that {plan.unquantised[0]!r} (and "
            f"{len(plan.unquantised) - 1} more) is quantised, but {checkpoint.path} holds it unquantised: "
            "configuration and tensors do not belong together"
        )
    inside = {f"{name}." for layer in plan.layers for name in layer.names}
    kinds = {_kind(name) for layer in plan.layers for name in layer.names}
    for name in plan.missing:
        parent = name.rpartition(".")[0]
        if f"{parent}." in inside or _kind(parent) in kinds:
            raise CheckpointError(
                f"{checkpoint.path}: tensor {name!r} is missing: the model needs it; the checkpoint is incomplete: "
                "fetch or export it again"
            )


def _kind(name: str) -> str:
    """Return a module's name without the numbers of its blocks."""
    return re.sub(r"\.\d+\.", ".*.", name)


def _replace(model: Any, planned: LayerPlan, config: Fp4DispatchConfig, tied: Tied) -> QuantizedLinear:
    """Put an empty quantised layer with the stored tensors in place of the model's."""
    old, scheme = planned.module, planned.scheme
    options = layer_options(planned, config.activation, None)
    if config.backend is not None:
        options["backend"] = config.backend
    n, k = sizes(old)
    bias = old.bias is not None
    new: QuantizedLinear
    new = (
        FP4Linear(k, n, bias, device="meta", **options)
        if scheme.op == "nvfp4_gemm"
        else FP8Linear(k, n, bias, scaling=scheme.scaling, device="meta", **options)
    )
    carry_over(old, new)
    untie(tied, planned.names, new)
    replace_module(model, planned.names, new)
    for name in new.quantized:
        new._buffers.pop(name, None)
    for suffix, info in planned.shards[0].tensors.items():  # parameters: accelerate offloads those by default
        new.register_parameter(suffix, nn.Parameter(info.on_meta(), requires_grad=False))
    if scheme.weight != "weight":
        # The initialisers of T5, SigLIP and others read the weights of their children. Nothing else sees this one: it
        # is no parameter, and _settle removes it.
        stand_in: Any = torch.empty(n, k, dtype=old.weight.dtype, device="meta")
        stand_in._is_hf_initialized = True
        object.__setattr__(new, "weight", stand_in)
    return new


def _settle(path: Path, planned: LayerPlan, layer: QuantizedLinear, away: Offloaded | None) -> dict[str, torch.Tensor]:
    """Make the stored tensors the layer's own. Return those that are stored as reciprocals of them."""
    scheme, infos = planned.scheme, planned.shards[0].tensors
    vars(layer).pop("weight", None)  # the stand-in of _replace
    if away is not None:
        away.take_from(layer)
    held = {name: p.data for name, p in layer._parameters.items() if p is not None} if away is None else away.tensors
    # On the CPU they are views of the mapped file: the layer must outlive it, and must not change when the file does.
    stored = {suffix: held[suffix].clone() if held[suffix].is_cpu else held[suffix] for suffix in infos}
    for suffix, info in infos.items():
        check_scales(info, stored[suffix], scheme)
    if layer.bias is not None:
        check_finite(str(path), f"{planned.names[0]}.bias", held["bias"])
    weights = to_linear(scheme, stored)
    for suffix in infos:
        delattr(layer, suffix)
    for name in own_tensors(layer):
        layer.register_buffer(name, None)
    try:
        layer.fill(weights, None if layer.bias is None else held["bias"])
    except FormatError as error:  # find the bad tensor only now: the check reads all elements
        for suffix, info in infos.items():
            check_e4m3(info, stored[suffix], scheme, suffix == scheme.weight)
        raise CheckpointError(f"{path}: layer {planned.names[0]!r}: {error}") from error
    divisors = (scheme.global_scale, scheme.input_scale) if scheme.divides else ()
    kept = {suffix: stored[suffix].clone() for suffix in divisors if suffix in stored}
    del stored, weights, held  # so that no other code holds what the layer can drop
    if away is not None:
        away.bring_for_calls(layer)
    layer._hold_once()
    return kept


def _hook_of(layer: nn.Module) -> Any:
    """Return accelerate's hook of a layer that it offloads, or None."""
    hook = getattr(layer, "_hf_hook", None)
    return next((one for one in getattr(hook, "hooks", (hook,)) if getattr(one, "offload", False)), None)


def _taken_away(layer: nn.Module) -> Offloaded | None:
    hook = _hook_of(layer)
    if hook is None:
        return None
    from fp4dispatch.integrations.transformers.offloaded import Offloaded  # needs accelerate, which is optional

    return Offloaded(layer, hook)


def _place(layer: QuantizedLinear) -> torch.device:
    """Return where a layer that is being loaded will run."""
    hook = _hook_of(layer)
    return next(layer.parameters()).device if hook is None else torch.device(hook.execution_device)


def own_tensors(layer: QuantizedLinear) -> tuple[str, ...]:
    """Return the names of a layer's stored tensors."""
    absent = ""
    if isinstance(layer, FP8Linear):
        absent = "weight_scale" if layer.scaling == "block128" else "weight_scale_inv"
    return tuple(name for name in layer.quantized if name != absent)


def tensors_as_stored(
    planned: LayerPlan, weights: LinearWeights, divisors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer as the checkpoint had them: names, shapes, dtypes and, if unchanged, all bits."""
    scheme = planned.scheme
    tensors = from_linear(scheme, weights)
    mine = {scheme.global_scale: weights.global_scale, scheme.input_scale: weights.input_scale}
    for suffix, divisor in divisors.items():
        held = mine[suffix]
        if held is not None and torch.equal(divisor.float().reciprocal().reshape(-1).cpu(), held.reshape(-1).cpu()):
            tensors[suffix] = divisor
    infos = planned.shards[0].tensors
    return {suffix: t.reshape(infos[suffix].shape).to(_dtype(infos[suffix])) for suffix, t in tensors.items()}


def _dtype(info: TensorInfo) -> torch.dtype:
    return info.on_meta().dtype
