"""Load a quantised checkpoint into a model: all or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp4dispatch.backends.base import LinearWeights
from fp4dispatch.checkpoints.carried import Carried, carried_by, carry
from fp4dispatch.checkpoints.config.quant_config import QuantConfig, read_quant_config
from fp4dispatch.checkpoints.files.finite import check_finite
from fp4dispatch.checkpoints.files.reader import Checkpoint, TensorInfo, open_checkpoint
from fp4dispatch.checkpoints.parts import PlainParts, Stored, asked, members_of, parts_for, read_bias, read_layer
from fp4dispatch.checkpoints.plan import LayerPlan, Plan, SlotPlan
from fp4dispatch.checkpoints.planner import plan_load
from fp4dispatch.checkpoints.schemes import Scheme
from fp4dispatch.errors import CheckpointError, FormatError
from fp4dispatch.formats import fp8_dequantize, nvfp4_dequantize
from fp4dispatch.formats.checks import check_content, check_module
from fp4dispatch.machine import log as _log
from fp4dispatch.machine.collectives import Team
from fp4dispatch.machine.ranks import Ranks
from fp4dispatch.models.fusing.fuse import NOTHING_FUSED, FusedLayer, FuseReport
from fp4dispatch.models.fusing.fuse import fuse as _fuse
from fp4dispatch.models.fusing.rows import split
from fp4dispatch.models.linear import layer_of
from fp4dispatch.models.parallel.layers import Part, become, cut_bias
from fp4dispatch.models.parallel.plan import TensorParallel
from fp4dispatch.models.quantized_linear import LayerOptions, QuantizedLinear
from fp4dispatch.models.replacing.replaceable import carry_over, model_bytes, models_with_ties, untie
from fp4dispatch.problem import ACTIVATIONS, Activation, one_of


@dataclass(frozen=True)
class LoadedLayer:
    """A replaced layer: its name in the model, its scheme, the stored layers of its shards, and its bytes."""

    name: str
    scheme: str
    sources: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True)
class LoadReport:
    """What :func:`load_quantized` did.

    Parameters
    ----------
    path
        The checkpoint's directory.
    layers
        The layers that are quantised now.
    excluded
        Linear layers that the checkpoint holds unquantised.
    ignored
        Tensors of the checkpoint that no layer uses: scales of a quantised KV cache (kept for
        :func:`save_quantized`), input scales of layers whose activations the configuration says are not scaled with
        them and, with ``strict=False``, any for which the model has no place.
    missing
        Parameters and buffers that the checkpoint did not fill (``strict=False`` only). They keep their old values,
        which are random in a new model. A WARNING lists them too.
    dequantized
        (name, reason) of each layer that is stored quantised but cannot be a quantised layer, e.g. because other code
        of the model reads its weight. It keeps its class and gets the dequantised weight.
    fusing
        With ``fuse=True``: which layers are one layer now, and which are not, with the reason.
    model_bytes
        Bytes of all parameters and buffers of the model now.
    """

    path: Path
    layers: tuple[LoadedLayer, ...]
    excluded: tuple[str, ...]
    ignored: tuple[str, ...]
    missing: tuple[str, ...]
    dequantized: tuple[tuple[str, str], ...] = ()
    model_bytes: int = 0
    fusing: FuseReport = NOTHING_FUSED

    def __str__(self) -> str:
        schemes = ", ".join(sorted({layer.scheme for layer in self.layers}))
        rest = f"; {len(self.excluded)} linear layers not quantised" if self.excluded else ""
        held = sum(layer.nbytes for layer in self.layers)
        lines = [
            f"{len(self.layers)} layers ({schemes}) from {self.path}{rest}; they hold {held / 1e6:.2f} MB of the "
            f"model's {self.model_bytes / 1e6:.2f} MB"
        ]
        lines += [f"  dequantised: {name}: {reason}" for name, reason in self.dequantized]
        lines += [f"  {line}" for line in self.fusing.lines()]
        if self.missing:
            lines.append(f"  NOT FILLED, still with their old values: {len(self.missing)} parameters or buffers:")
            lines += [f"    {name}" for name in self.missing]
        return "\n".join(lines)


def load_quantized(
    model: nn.Module,
    path: str | Path,
    *,
    strict: bool = True,
    device: torch.device | str | None = None,
    activation: Activation | None = None,
    tp: Any = None,
    keep_stored: bool = False,
    fuse: bool = False,
) -> LoadReport:
    """Replace a model's ``nn.Linear`` modules by the quantised layers of a checkpoint, and fill everything else.

    Reads ModelOpt (NVFP4, FP8), compressed-tensors (nvfp4-pack-quantized, float-quantized) and Hugging Face / DeepSeek
    FP8 checkpoints. A fused layer of the model (``qkv_proj``, ``gate_up_proj``) is built from its shards. Each shard
    keeps its own global scale. Names and experts of transformers' models are converted as transformers does it. A layer
    that cannot become a quantised one (see :func:`fp4dispatch.models.replacing.replaceable.why_left`) gets its weight
    dequantised. Forward hooks and attributes of the layers stay.

    All headers, shapes and dtypes are checked first. Then the new layers are built one at a time. Only when all are
    complete do they replace the old ones. So an error leaves the model unchanged. This needs memory for the old model,
    the new one and about one layer. A model built under ``torch.device("meta")`` needs no memory for the old one.

    Layers of a weight-only checkpoint get ``activation="bf16"``: no backend quantises their activations. For layers
    made for quantised activations the policy chooses. A format that the user pinned on a replaced layer stays.

    Parameters
    ----------
    model
        Its linear layers are found by name. Parameters are replaced, not written in place; ties are kept.
    path
        Checkpoint directory or file, see :func:`open_checkpoint`.
    strict
        Whether a missing or unexpected tensor, or a layer left unquantised against the configuration, is an error.
    device
        Where tensors go that are now on the meta device, the CPU by default; all others stay on their devices.
    activation
        Format of the activations of all layers, against what the checkpoint says: ``any`` leaves it to the policy.
    tp
        Cut the layers among ranks, and read this rank's part of them only: a
        :class:`~fp4dispatch.models.parallel.plan.TensorParallel`, or a ``DeviceMesh`` or ``ProcessGroup`` for the plan
        that the model has. A collective call then. The layers of ``model`` are whole; build it on the meta device.
    keep_stored
        Whether NVFP4 layers keep their stored tensors beside a layout that holds the same bits, see
        :class:`~fp4dispatch.models.linear.FP4Linear`. Layers that were made with it keep it.
    fuse
        Whether to make q, k and v projections one layer then, and gate and up projections another, where that is exact
        (:func:`fp4dispatch.fuse`). Layers that are cut among ranks stay apart.

    Raises
    ------
    InputError
        ``model`` is no module; an activation that does not exist, or that FP8 layers cannot take; a plan that does not
        fit, or sizes that cannot be cut.
    RankError
        With ``tp``: another rank failed. No rank's model is changed then.
    CheckpointUnsupportedError
        A sound checkpoint in a format that is not supported; the text names the format.
    CheckpointError
        Anything wrong with the checkpoint; the text names file, tensor, what was found and what was expected.
    """
    check_module("model", model)
    if activation is not None:
        one_of("activation", activation, ACTIVATIONS)
    wanted = asked(tp)
    members = members_of(wanted)
    ranks = Ranks(members.group if members else None, alone=members is None)
    staged = ranks.attempt(
        "loading the checkpoint",
        lambda: _prepare(model, path, strict, torch.device(device or "cpu"), activation, keep_stored, wanted, members),
    )
    checkpoint, plan, layers = staged.checkpoint, staged.plan, staged.layers
    _commit(staged.swaps)
    tied = models_with_ties(model)
    for layer in plan.layers:
        if not layer.keep:
            untie(tied, layer.names, model.get_submodule(layer.names[0]))
    staged.plain.settle(model)
    carry(model, staged.carried)
    dequantized = tuple((layer.names[0], layer.keep) for layer in plan.layers if layer.keep)
    if plan.missing:
        _log.warning(
            "%s does not hold %d parameters or buffers of %s, which keep their old values: %s",
            checkpoint.path, len(plan.missing), type(model).__name__, ", ".join(plan.missing),
        )  # fmt: skip
    for name, reason in dequantized:
        _log.warning("%s is stored quantised and was dequantised: %s", name, reason)
    fusing = _fuse(model) if fuse else NOTHING_FUSED
    return LoadReport(
        checkpoint.path,
        with_fused(model, layers, fusing),
        tuple(plan.excluded),
        tuple(plan.kv_cache + plan.ignored + plan.unexpected),
        tuple(plan.missing),
        dequantized,
        model_bytes(model),
        fusing,
    )


def with_fused(model: nn.Module, layers: Sequence[LoadedLayer], fusing: FuseReport) -> tuple[LoadedLayer, ...]:
    """Return the loaded layers, with each fused one in place of its shards."""

    def one(fused: FusedLayer, parts: list[LoadedLayer]) -> LoadedLayer:
        layer = model.get_submodule(fused.name)
        assert isinstance(layer, QuantizedLinear)
        sources = tuple(source for part in parts for source in part.sources)
        return LoadedLayer(fused.name, parts[0].scheme, sources, layer.stored_nbytes())

    return tuple(fusing.merged(layers, one))


Swap = tuple[dict[str, Any], str, Any]
"""A place in a module's dictionary, and what goes there."""


def collect_carried(plan: Plan, checkpoint: Checkpoint, config: QuantConfig | None) -> Carried:
    """Collect the checkpoint data that saving the model needs later."""
    return Carried(
        config.kv_cache if config else None,
        {name: checkpoint.tensor(name).clone() for name in plan.kv_cache},
        {layer.names[0]: layer.activation for layer in plan.layers},
        any(layer.scheme.name == "fp8-tensor-inv" for layer in plan.layers),
    )


@dataclass(frozen=True)
class _Staged:
    """All that is new, complete, and not yet in the model."""

    checkpoint: Checkpoint
    plan: Plan
    carried: Carried
    swaps: list[Swap]
    layers: list[LoadedLayer]
    plain: PlainParts


def _prepare(
    model: nn.Module,
    path: str | Path,
    strict: bool,
    device: torch.device,
    activation: Activation | None,
    keep_stored: bool,
    tp: TensorParallel | None,
    members: Team | None,
) -> _Staged:
    """Plan and build everything. Does not change the model."""
    with open_checkpoint(path) as checkpoint:
        config = read_quant_config(checkpoint)
        plan = plan_load(model, checkpoint, config, strict=strict)
        parts = parts_for(model, plan, tp, members)
        plain = PlainParts(plan, parts)
        carried = collect_carried(plan, checkpoint, config)
        swaps, layers = _stage(model, plan, checkpoint, device, activation, keep_stored, parts, plain)
    return _Staged(checkpoint, plan, carried, swaps, layers, plain)


def _stage(
    model: nn.Module,
    plan: Plan,
    checkpoint: Checkpoint,
    device: torch.device,
    activation: Activation | None,
    keep_stored: bool,
    parts: dict[str, Part],
    plain: PlainParts,
) -> tuple[list[Swap], list[LoadedLayer]]:
    """Build all new layers and tensors, one layer at a time. Does not change the model."""
    swaps: list[Swap] = []
    layers: list[LoadedLayer] = []
    before = carried_by(model)
    stated = before.activations if before else {}
    for layer in plan.layers:
        if layer.keep:
            slot = plan.kept[layer.names[0]]
            dense = _dense(layer, checkpoint, device if slot.old.is_meta else slot.old.device, slot.old.dtype)
            weight = _like(slot.old, dense)
            swaps.extend((place, key, weight) for place, key in slot.slots)
            continue
        name = layer.names[0] if layer.names[0] in stated else layer.shards[0].name  # it may have been fused since
        options = layer_options(layer, activation, stated.get(name))
        if keep_stored:
            options["keep_stored"] = True
        module, nbytes = _build(layer, checkpoint, device, options, parts.get(layer.names[0]))
        for name in layer.names:
            parent, _, last = name.rpartition(".")
            swaps.append((model.get_submodule(parent)._modules, last, module))
        layers.append(LoadedLayer(layer.names[0], layer.scheme.name, tuple(s.name for s in layer.shards), nbytes))
    for slot in plan.slots:
        new = _filled(slot, checkpoint, device, plain)
        swaps.extend((place, key, new) for place, key in slot.slots)
    for conversion in plan.conversions:
        made = conversion.conversion.run(checkpoint.tensor) if conversion.targets else {}
        for name, slot in conversion.targets.items():
            target = device if slot.old.is_meta else slot.old.device
            new = _like(slot.old, made[name].to(target, slot.old.dtype, copy=True).contiguous())
            swaps.extend((place, key, new) for place, key in slot.slots)
    return swaps, layers


def _commit(swaps: list[Swap]) -> None:
    """Put all new objects in place. On an error or interrupt, restore the old ones."""
    done: list[Swap] = []
    try:
        for place, key, new in swaps:
            done.append((place, key, place[key]))
            place[key] = new
    except BaseException:
        for place, key, old in reversed(done):
            place[key] = old
        raise


def _read(layer: LayerPlan, checkpoint: Checkpoint, part: Part | None = None) -> tuple[LinearWeights, Stored]:
    """Read a layer, or the rank's part of it; whole weights are still those of the mapped file."""
    weights, stored = read_layer(layer, checkpoint, part)
    for info, tensor, _ in stored:
        check_scales(info, tensor, layer.scheme)
    return weights, stored


def _dense(layer: LayerPlan, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return the dequantised weight of a stored layer."""
    weights, stored = _read(layer, checkpoint)
    for info, tensor, is_weight in stored:
        check_e4m3(info, tensor, layer.scheme, is_weight)
    if weights.scaling == "nvfp4":
        # One global scale a shard: they are dequantised apart.
        parts = [
            nvfp4_dequantize(shard.weight, shard.scale, shard.global_scale, dtype=dtype)
            for shard in split(weights, weights.shard_rows)
            if shard.global_scale is not None
        ]
        return torch.cat(parts).to(device)
    return fp8_dequantize(weights.weight, weights.scale, weights.scaling, dtype).to(device)


def _build(
    layer: LayerPlan, checkpoint: Checkpoint, device: torch.device, options: LayerOptions, part: Part | None
) -> tuple[nn.Module, int]:
    fused, stored = _read(layer, checkpoint, part)
    old = layer.module
    place = old.device if isinstance(old, QuantizedLinear) else old.weight.device
    target = device if place.type == "meta" else place
    weights = _owned(fused, target)
    bias = None if old.bias is None or old.bias.is_meta else old.bias.detach().clone()
    if part is not None:
        bias = cut_bias(bias, part)
    if layer.bias and old.bias is not None:
        stored_bias = read_bias(layer, checkpoint, part)
        each = [_finite(info, tensor) for info, tensor in zip(layer.bias, stored_bias, strict=True)]
        bias = torch.cat(each).to(target, old.bias.dtype)
    try:
        module = layer_of(weights, bias, **options)
    except FormatError as error:  # find the bad tensor only now: the check reads all elements
        for info, tensor, is_weight in stored:
            check_e4m3(info, tensor, layer.scheme, is_weight)
        raise CheckpointError(f"{checkpoint.path}: layer {layer.names[0]!r}: {error}") from error
    carry_over(old, module)
    if part is not None:
        become(module, part)
    del weights  # so that no other code holds what the layer can drop
    module._hold_once()
    return module, module.stored_nbytes()


def layer_options(layer: LayerPlan, asked: Activation | None, stated: Activation | None) -> LayerOptions:
    """Return the options of the new layer, from the old layer, the checkpoint, or the caller.

    ``stated`` is the activation format of an earlier checkpoint. It is not a pin of the user.
    """
    old, activation = layer.module, asked or layer.activation
    if isinstance(old, QuantizedLinear):
        if asked is None and old.activation not in ("any", stated):
            activation = old.activation
        return LayerOptions(
            activation=activation,
            backend=old.backend,
            dtype=old.dtype,
            name=layer.names[0],
            keep_stored=old.keep_stored,
        )
    dtype = old.weight.dtype if old.weight.dtype in (torch.float32, torch.float16) else torch.bfloat16
    return LayerOptions(activation=activation, dtype=dtype, name=layer.names[0])


def _owned(weights: LinearWeights, device: torch.device) -> LinearWeights:
    """Copy out of the mapped file: the layer must outlive it, and must not change when the file does."""

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, copy=True).contiguous()

    return LinearWeights(
        weights.op,
        weights.scaling,
        weights.n,
        weights.k,
        own(weights.weight),
        own(weights.scale),
        None if weights.global_scale is None else own(weights.global_scale),
        weights.shard_rows,
        None if weights.input_scale is None else own(weights.input_scale),
        weights.sf_layout,
    )


def _filled(slot: SlotPlan, checkpoint: Checkpoint, device: torch.device, plain: PlainParts) -> torch.Tensor:
    part = plain.part(slot)
    read = (
        [checkpoint.tensor(info.name) for info in slot.sources] if part is None else plain.read(slot, checkpoint, part)
    )
    parts = [_finite(info, tensor) for info, tensor in zip(slot.sources, read, strict=True)]
    target = device if slot.old.is_meta else slot.old.device
    mapped = parts[0] if len(parts) == 1 else torch.cat(parts)
    new = mapped.to(target, slot.old.dtype, copy=True).contiguous()
    return _like(slot.old, new)


def _like(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Make a parameter where there was one."""
    return nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new


def _finite(info: TensorInfo, tensor: torch.Tensor) -> torch.Tensor:
    check_finite(str(info.file), info.name, tensor)
    return tensor


def check_scales(info: TensorInfo, tensor: torch.Tensor, scheme: Scheme) -> None:
    """Refuse floating-point scales that are NaN, infinite, negative, or zero where one scales a whole layer."""
    if tensor.element_size() == 1 and tensor.dtype != torch.float8_e8m0fnu:
        return
    values = tensor.float()
    per_layer = prod(info.shape) == 1
    good = (values > 0 if per_layer else values >= 0) & (values < torch.inf)
    if scheme.divides:
        good &= values.reciprocal() < torch.inf
    if not bool(good.all()):
        bad = values[~good].flatten()[0].item()
        raise CheckpointError(
            f"{info.file}: tensor {info.name!r} ({scheme.name}): found the scale {bad} ({int((~good).sum())} of "
            f"{values.numel()} are bad), expected finite values {'above 0' if per_layer else 'of at least 0'}: "
            "export the checkpoint again"
        )


def check_e4m3(info: TensorInfo, tensor: torch.Tensor, scheme: Scheme, is_weight: bool) -> None:
    """Refuse e4m3 NaN, and signs in block scales."""
    if tensor.dtype != torch.float8_e4m3fn:
        return
    try:
        check_content(f"{info.file}: tensor {info.name!r} ({scheme.name}): values", tensor, signed=is_weight)
    except FormatError as error:
        raise CheckpointError(str(error)) from error
