"""Save a model with quantised layers as a checkpoint in the format of another tool."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from fp4dispatch.backends.base import LinearWeights
from fp4dispatch.checkpoints.carried import all_carried
from fp4dispatch.checkpoints.config.patterns import shard_names
from fp4dispatch.checkpoints.config.write_config import Stated, write_quant_config
from fp4dispatch.checkpoints.files.companions import copy_companions, write_configs
from fp4dispatch.checkpoints.files.finite import check_finite
from fp4dispatch.checkpoints.files.paths import CONFIG_FILE
from fp4dispatch.checkpoints.files.publish import atomic_directory
from fp4dispatch.checkpoints.files.reader import MAX_CONFIG_BYTES
from fp4dispatch.checkpoints.files.strict_json import read_object
from fp4dispatch.checkpoints.files.writer import SAFETENSORS_DTYPES, Entry, write_tensors
from fp4dispatch.checkpoints.other_readers import misread_by_transformers
from fp4dispatch.checkpoints.schemes import SCHEMES, Scheme, from_linear, written_shape
from fp4dispatch.errors import CheckpointError
from fp4dispatch.machine import log as _log
from fp4dispatch.models.compact_weights import without_dropped
from fp4dispatch.models.fusing.parents import shards_in
from fp4dispatch.models.fusing.rows import split
from fp4dispatch.models.parallel.layers import refuse_cut
from fp4dispatch.models.quantized_linear import QuantizedLinear
from fp4dispatch.models.replacing.fusion import fusion_groups
from fp4dispatch.problem import Activation, Scaling

SaveFormat = Literal["modelopt", "compressed-tensors", "fp8", "fp8-transformers"]
DEFAULT_SHARD_BYTES = 5 * 10**9


METHOD_SCHEMES: dict[str, dict[Scaling, str]] = {
    "modelopt": {"nvfp4": "modelopt-nvfp4", "tensor": "fp8-tensor", "row": "fp8-channel"},
    "compressed-tensors": {
        "nvfp4": "nvfp4-pack-quantized",
        "tensor": "fp8-tensor",
        "row": "fp8-channel",
        "block128": "fp8-block-ct",
    },
    "fp8": {"tensor": "fp8-tensor", "row": "fp8-channel", "block128": "fp8-block"},
    "fp8-transformers": {"tensor": "fp8-tensor-inv", "block128": "fp8-block"},
}


def scheme_for(method: str, scaling: Scaling) -> Scheme:
    """Return how a tool stores a scaling.

    Raises
    ------
    CheckpointError
        An unknown tool, or one that has no format for this scaling.
    """
    if method not in METHOD_SCHEMES:
        raise CheckpointError(f"format {method!r} is not known: use one of {', '.join(METHOD_SCHEMES)}")
    if scaling not in METHOD_SCHEMES[method]:
        able = [name for name, schemes in METHOD_SCHEMES.items() if scaling in schemes]
        raise CheckpointError(f"format {method!r} cannot store {scaling!r} scaling: use {' or '.join(able)}")
    scheme = SCHEMES[METHOD_SCHEMES[method][scaling]]
    # transformers refuses a compressed-tensors checkpoint whose per-tensor scales are not [1].
    return replace(scheme, scalar=(1,)) if method == "compressed-tensors" else scheme


def layer_entries(scheme: Scheme, name: str, n: int, k: int, *, static: bool) -> list[Entry]:
    """Return the tensors that a layer of N x K is written as; ``static``: with its input scale."""
    specs = scheme.specs(n, k)
    return [
        Entry(_below(name, suffix), spec.dtypes[0], written_shape(scheme, suffix, n, k))
        for suffix, spec in specs.items()
        if spec.required or static
    ]


def save_quantized(
    model: nn.Module,
    out_dir: str | Path,
    format: SaveFormat = "modelopt",
    *,
    source_dir: str | Path | None = None,
    overwrite: bool = False,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> tuple[Path, ...]:
    """Save a model whose linear layers are :class:`FP4Linear` or :class:`FP8Linear`; returns the safetensors files.

    The directory appears when all files are written and flushed. On an error nothing is created. Fused NVFP4 layers are
    written as their shards, each with its own global scale. Tied parameters are written once. Scales of a KV cache that
    :func:`load_quantized` found are written again.

    The configuration says of each layer's activations: a static scale where the layer has one; weight-only where it is
    NVFP4 without one (engines cannot quantise activations to NVFP4 then) or has ``activation="bf16"``; scaled at run
    time for other FP8 layers.

    Parameters
    ----------
    model
        At least one layer quantised, or such a layer itself; any device.
    out_dir
        Directory to create.
    format
        ``modelopt`` (NVFP4, FP8 per tensor with static input scales, FP8 per channel), ``compressed-tensors``
        (nvfp4-pack-quantized, float-quantized), ``fp8`` (Hugging Face / DeepSeek blocks; per tensor or channel as vLLM
        names them) or ``fp8-transformers`` (blocks; per tensor as Transformers 5 names them). Per tensor, vLLM reads
        ``weight_scale`` and ``input_scale``, Transformers ``weight_scale_inv`` and ``activation_scale``: neither reads
        the other's. A model that :func:`load_quantized` found with Transformers' names keeps them in ``fp8``.
    source_dir
        Where to copy config.json, tokenizer and other small files from. Without it, config.json is written from
        ``model.config`` where the model has one.
    overwrite
        Whether an existing checkpoint directory may be replaced.
    max_shard_bytes
        Data bytes a file at most; a single larger tensor has a file to itself.

    Raises
    ------
    CheckpointError
        Layers, or a statement about activations or the KV cache, that the format cannot store; tensors on the meta
        device or with NaN or Inf in them, an existing ``out_dir``, or a failed write.
    """
    refuse_cut(model, "save_quantized")
    layers = list(_layers(model, format))
    if not layers:
        raise CheckpointError("the model has no quantised layer: use fp4dispatch.replace_linears first")
    every = model.named_modules(remove_duplicate=False)  # a layer is written once, under its first name
    quantised = [name for name, module in every if isinstance(module, QuantizedLinear)]
    fused = [shard for shards in shards_in(model).values() for shard in shards]
    inside = tuple(_below(name, "") for name in (*quantised, *fused))
    others = _other_tensors(model, inside) | _kv_tensors(model)
    _warn_of_separate_scales(layers)
    entries = [e for layer in layers for e in layer.entries()]
    entries += [Entry(name, _dtype_name(name, t), tuple(t.shape)) for name, t in others.items()]
    ignore = sorted(name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    kv_cache = next((c.kv_cache for _, c in all_carried(model) if c.kv_cache), None)
    stated = {layer.name: (layer.scheme.name, layer.stated()) for layer in layers}
    configs = write_quant_config(format, stated, ignore, producer_version(), kv_cache)

    def produce() -> Iterator[tuple[str, torch.Tensor]]:
        for layer in layers:
            for name, tensor in layer.tensors():
                if name == f"{layer.name}.bias":
                    check_finite("the model", name, tensor)
                yield name, tensor
        for name, tensor in others.items():
            check_finite("the model", name, tensor)
            yield name, tensor

    with atomic_directory(Path(out_dir), overwrite=overwrite) as directory:
        if source_dir is not None:
            copy_companions(Path(source_dir).resolve(), directory)
        write_configs(directory, _base_config(model, source_dir), configs)
        files = write_tensors(directory, entries, produce(), max_shard_bytes)
    _warn_of_misread_blocks(layers)
    return tuple(Path(out_dir) / file.name for file in files)


def producer_version() -> str:
    """Return this package's version, as written into ModelOpt's producer field."""
    try:
        return version("fp4dispatch")
    except PackageNotFoundError:
        return "unknown"


class _Layer:
    """A layer, or a shard of a fused layer, to store."""

    def __init__(
        self, name: str, scheme: Scheme, weights: LinearWeights, bias: torch.Tensor | None, activation: Activation
    ) -> None:
        self.name = name
        self.scheme = scheme
        self.weights = weights
        self.bias = bias
        self.activation = activation

    def stated(self) -> Stated:
        """Return the activation statement for the configuration."""
        if self.weights.input_scale is not None:
            return "static"
        if self.scheme.name == "nvfp4-pack-quantized" and self.activation == "fp8":
            return "dynamic-fp8"
        if self.weights.op == "nvfp4_gemm" or self.activation == "bf16":
            return "weight-only"
        return "dynamic"

    def entries(self) -> list[Entry]:
        static = self.weights.input_scale is not None
        entries = layer_entries(self.scheme, self.name, self.weights.n, self.weights.k, static=static)
        if self.bias is not None:
            name = _below(self.name, "bias")
            entries.append(Entry(name, _dtype_name(name, self.bias), tuple(self.bias.shape)))
        return entries

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for suffix, tensor in from_linear(self.scheme, self.weights).items():
            yield _below(self.name, suffix), tensor
        if self.bias is not None:
            yield _below(self.name, "bias"), self.bias


def _below(name: str, suffix: str) -> str:
    """Return the full name of a tensor; a layer that is saved by itself has no name."""
    return f"{name}.{suffix}" if name else suffix


def _layers(model: nn.Module, format: str) -> Iterator[_Layer]:
    fused = shards_in(model)
    inverse = format == "fp8" and any(carried.inverse_scales for _, carried in all_carried(model))
    for name, module in model.named_modules():
        if not isinstance(module, QuantizedLinear):
            continue
        weights = module.weights(lend=False)
        scheme = scheme_for(format, weights.scaling)
        if inverse and scheme.name == "fp8-tensor":
            scheme = SCHEMES["fp8-tensor-inv"]
        rows = tuple(fused[name].values()) if name in fused else weights.shard_rows
        if len(rows) < 2:
            yield _Layer(name, scheme, weights, module.bias, module.activation)
            continue
        names = tuple(fused[name]) if name in fused else shard_names(name)
        if len(names) != len(rows):
            raise CheckpointError(
                f"layer {name!r} is fused from {len(rows)} shards with their own global scales, and the names of its "
                f"shards are not known (expected a layer called qkv_proj or gate_up_proj): the formats store one "
                "global scale a layer"
            )
        biases = [None] * len(rows) if module.bias is None else list(torch.split(module.bias, list(rows)))
        for shard_name, shard, bias in zip(names, split(weights, rows), biases, strict=True):
            yield _Layer(shard_name, scheme, shard, bias, module.activation)


def _other_tensors(model: nn.Module, inside: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Return persistent tensors outside quantised layers. Tied tensors appear once: the model restores the tie."""
    others: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    with without_dropped():
        state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        if (inside and name.startswith(inside)) or id(tensor) in seen:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(
                f"{name!r} of the model is a {type(tensor).__name__}, which get_extra_state returned: safetensors "
                "stores tensors only: keep it elsewhere, e.g. in the model's configuration"
            )
        seen.add(id(tensor))
        others[name] = tensor
    return others


def _kv_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the KV cache scales attached to the model."""
    return {prefix + name: t for prefix, carried in all_carried(model) for name, t in carried.tensors.items()}


def _warn_of_separate_scales(layers: list[_Layer]) -> None:
    """Warn of layers that engines fuse but that have different global scales: an engine would use wrong weights."""
    scales = {layer.name: layer.weights.global_scale for layer in layers if layer.weights.global_scale is not None}
    groups = fusion_groups({layer.name: layer.weights.k for layer in layers if layer.name in scales})
    apart = [group for group in groups if len({float(scales[name]) for name in group}) > 1]
    if apart:
        _log.warning(
            "%s (and %d more groups) have different global scales. Engines that fuse them keep only one: vLLM takes "
            "the largest and does not rescale, so its weights will be wrong. Quantise them together: `fp4dispatch "
            "quantize`, or fp4dispatch.replace_linears on the whole model",
            ", ".join(apart[0]),
            len(apart) - 1,
        )


def _warn_of_misread_blocks(layers: list[_Layer]) -> None:
    """Warn of blocks of FP8 that Transformers dequantises wrong."""
    written = ((layer.name, layer.scheme, layer.weights.n, layer.weights.k) for layer in layers)
    misread = misread_by_transformers(written, "replace these layers with 'fp8_row', or exclude them")
    if misread:
        _log.warning("%s", misread)


def _dtype_name(name: str, tensor: torch.Tensor) -> str:
    if tensor.dtype not in SAFETENSORS_DTYPES or tensor.is_meta:
        raise CheckpointError(
            f"tensor {name!r} is {tensor.dtype} on {tensor.device}: safetensors cannot store it: load or convert it "
            "first, or register it with persistent=False"
        )
    return SAFETENSORS_DTYPES[tensor.dtype]


def _base_config(model: nn.Module, source_dir: str | Path | None) -> dict[str, Any]:
    if source_dir is not None:
        file = Path(source_dir) / CONFIG_FILE
        return read_object(file, max_bytes=MAX_CONFIG_BYTES) if file.exists() else {}
    to_json = getattr(getattr(model, "config", None), "to_json_string", None)
    config = json.loads(to_json()) if callable(to_json) else {}
    return config if isinstance(config, dict) else {}
