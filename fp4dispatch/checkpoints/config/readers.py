"""Read the quantisation configurations of ModelOpt, compressed-tensors and Hugging Face into one form.

The configured activation format becomes the ``activation`` of the layers:

| the checkpoint says | activation |
|---|---|
| weight-only (``W4A16_NVFP4``, ``input_activations: null``) | ``bf16``: never quantised, unless the user asks for it |
| FP8 activations with NVFP4 weights | ``fp8`` |
| activations in the format of the weights, static or dynamic | ``any``: the policy has no coarser choice |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fp4dispatch.checkpoints.config.foreign import INSTEAD
from fp4dispatch.checkpoints.schemes import SCHEMES
from fp4dispatch.errors import CheckpointError, CheckpointUnsupportedError
from fp4dispatch.formats import FP8_BLOCK, NVFP4_BLOCK
from fp4dispatch.problem import ACTIVATIONS, Activation

MODELOPT_ALGOS: dict[str, tuple[str, Activation]] = {
    "NVFP4": ("modelopt-nvfp4", "any"),
    "W4A16_NVFP4": ("modelopt-nvfp4", "bf16"),
    "FP8": ("fp8-tensor", "any"),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8-channel", "any"),
    "FP8_PB_WO": ("fp8-block-ct", "bf16"),
}
"""ModelOpt's ``quant_algo`` to our scheme (modelopt/torch/export/convert_hf_config.py and quant_utils.py, 0.47)."""

CT_STRATEGIES: dict[str, str] = {"tensor": "fp8-tensor", "channel": "fp8-channel", "block": "fp8-block-ct"}
"""compressed-tensors' weight strategy of 8-bit floats to our scheme (quantization/quant_scheme.py, 0.20)."""

_CT_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": NVFP4_BLOCK}
_CT_FP8 = {"num_bits": 8, "type": "float"}
CT_PRESETS: dict[str, dict[str, Any]] = {
    "NVFP4": {"weights": _CT_NVFP4, "input_activations": _CT_NVFP4 | {"dynamic": "local"}},
    "NVFP4A16": {"weights": _CT_NVFP4},
    "FP8": {
        "weights": _CT_FP8 | {"strategy": "tensor"},
        "input_activations": _CT_FP8 | {"strategy": "tensor", "dynamic": False},
    },
    "FP8_DYNAMIC": {
        "weights": _CT_FP8 | {"strategy": "channel"},
        "input_activations": _CT_FP8 | {"strategy": "token", "dynamic": True},
    },
    "FP8_BLOCK": {
        "weights": _CT_FP8 | {"strategy": "block", "block_structure": [FP8_BLOCK, FP8_BLOCK]},
        "input_activations": _CT_FP8 | {"strategy": "group", "group_size": FP8_BLOCK, "dynamic": True},
    },
}
"""Preset names that a group may use instead of a scheme (quantization/quant_scheme.py, ``PRESET_SCHEMES``)."""

_CT_COMPRESSED = (None, "compressed")
_CT_FORMATS = (None, "nvfp4-pack-quantized", "float-quantized", "naive-quantized", "mixed-precision")


@dataclass(frozen=True)
class Group:
    """Modules that are stored in the same way.

    Parameters
    ----------
    targets
        Patterns of their names, or names of their classes.
    schemes
        The schemes that they may have; empty where their weights are not quantised.
    activation
        The coarsest activation format that may be chosen for them.
    static
        Whether each layer has a static input scale; None if the configuration does not say.
    """

    targets: tuple[str, ...]
    schemes: tuple[str, ...]
    activation: Activation = "any"
    static: bool | None = None


Read = tuple[tuple[Group, ...], tuple[str, ...]]
"""Groups, and patterns of excluded modules."""


# ModelOpt.

_Kind = tuple[tuple[str, ...], Activation, bool | None]


def read_modelopt(block: dict[str, Any], source: str, ignore_key: str) -> Read:
    """Read ``quantization`` of hf_quant_config.json, or ModelOpt's ``quantization_config`` of config.json."""
    ignore = strings(block, ignore_key, source)
    algo = block.get("quant_algo")
    if algo != "MIXED_PRECISION":
        groups = block.get("config_groups")
        stated = [g.get("weights") for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []
        for weights in (block, *stated):
            _check_group_size(algo, weights, source)
        return (Group(("Linear",), *_algo(algo, source)),), ignore
    layers = expect_object(block, "quantized_layers", source)
    kinds: dict[_Kind, list[str]] = {}
    for name in layers:
        layer = expect_object(layers, name, source)
        where = f"{source}: {name[:200]}"
        kind = _algo(layer.get("quant_algo"), where)
        _check_group_size(layer.get("quant_algo"), layer, where)
        kinds.setdefault(kind, []).append(name)
    return tuple(Group(tuple(names), *kind) for kind, names in kinds.items()), ignore


def _algo(algo: object, source: str) -> _Kind:
    known = MODELOPT_ALGOS.get(algo.upper()) if isinstance(algo, str) else None
    if known is None:
        raise CheckpointUnsupportedError(
            f"{source}: quant_algo {repr(algo)[:80]} is not supported: expected {', '.join(MODELOPT_ALGOS)} or "
            f"MIXED_PRECISION: {INSTEAD}"
        )
    return (known[0],), known[1], False if known[1] == "bf16" or known[0] == "fp8-channel" else None


def _check_group_size(algo: object, stated: object, source: str) -> None:
    size = stated.get("group_size") if isinstance(stated, dict) else None
    if isinstance(algo, str) and "NVFP4" in algo.upper() and size not in (None, NVFP4_BLOCK):
        raise CheckpointUnsupportedError(
            f"{source}: {algo} with group_size {size!r} is not supported: expected {NVFP4_BLOCK}, the block of NVFP4 "
            f"that GPUs multiply: {INSTEAD}"
        )


# compressed-tensors.


def read_compressed_tensors(block: dict[str, Any], source: str) -> Read:
    """Read the ``quantization_config`` of compressed-tensors or llm-compressor."""
    status, form = block.get("quantization_status"), block.get("format")
    if status not in _CT_COMPRESSED or form not in _CT_FORMATS:
        raise CheckpointUnsupportedError(
            f"{source}: format {repr(form)[:80]} with quantization_status {repr(status)[:80]} is not supported: "
            f"expected {', '.join(str(f) for f in _CT_FORMATS[1:])}, compressed: save the model with "
            "save_compressed=True, or quantise the original with `fp4dispatch quantize`"
        )
    sparsity = block.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format") not in (None, "dense"):
        raise CheckpointUnsupportedError(
            f"{source}: sparsity_config with format {repr(sparsity['format'])[:80]} is not supported: expected dense "
            "weights: save the model without sparse compression"
        )
    transforms = block.get("transform_config")
    if isinstance(transforms, dict) and transforms.get("config_groups"):
        raise CheckpointUnsupportedError(
            f"{source}: transform_config is not supported: its layers rotate their activations, so the weights alone "
            f"are not the model's: expected none: {INSTEAD}"
        )
    config_groups = expect_object(block, "config_groups", source)
    groups = []
    for key, value in config_groups.items():
        where = f"{source}: {key[:200]}"
        if isinstance(value, list):  # the name of a preset, and its targets
            preset = CT_PRESETS.get(key.upper())
            if preset is None:
                raise CheckpointUnsupportedError(
                    f"{where} is not supported: expected {', '.join(CT_PRESETS)}, or a described scheme: {INSTEAD}"
                )
            value = preset | {"targets": value}
        groups.append(_ct_group(expect_object({key: value}, key, source), where))
    if not any(group.schemes for group in groups):
        raise CheckpointUnsupportedError(
            f"{source}: no group quantises weights ('weights' is null everywhere), expected NVFP4 or FP8: load the "
            "model as an unquantised one"
        )
    return tuple(groups), strings(block, "ignore", source)


def _ct_group(group: dict[str, Any], source: str) -> Group:
    targets = strings(group, "targets", source)
    if group.get("weights") is None:  # only activations, e.g. of attention
        return Group(targets, ())
    scheme = _ct_scheme(expect_object(group, "weights", source), source)
    return Group(targets, (scheme,), *_ct_activation(group, scheme, source))


def _ct_scheme(weights: dict[str, Any], source: str) -> str:
    kind = (weights.get("type"), weights.get("num_bits"))
    strategy, group_size = weights.get("strategy"), weights.get("group_size")
    symmetric = weights.get("symmetric") in (None, True)
    if symmetric and kind == ("float", 4) and strategy == "tensor_group" and group_size == NVFP4_BLOCK:
        return "nvfp4-pack-quantized"
    if symmetric and kind == ("float", 8) and isinstance(strategy, str) and strategy in CT_STRATEGIES:
        block = weights.get("block_structure")
        if strategy != "block" or block == [FP8_BLOCK, FP8_BLOCK]:
            return CT_STRATEGIES[strategy]
        raise CheckpointUnsupportedError(
            f"{source}: block_structure {repr(block)[:80]} is not supported: expected [128, 128]: {INSTEAD}"
        )
    raise CheckpointUnsupportedError(
        f"{source}: weights of type {kind[0]!r}, num_bits {kind[1]!r}, strategy {strategy!r}, group_size "
        f"{group_size!r}{'' if symmetric else ', not symmetric,'} are not supported: expected NVFP4 (float, 4, "
        f"tensor_group, 16) or FP8 (float, 8, tensor, channel or block): {INSTEAD}"
    )


def _ct_activation(group: dict[str, Any], scheme: str, source: str) -> tuple[Activation, bool | None]:
    if group.get("input_activations") is None:
        return "bf16", False
    inputs = expect_object(group, "input_activations", source)
    kind, dynamic = (inputs.get("type"), inputs.get("num_bits")), inputs.get("dynamic")
    nvfp4 = scheme == "nvfp4-pack-quantized"
    if kind == (("float", 4) if nvfp4 else ("float", 8)):
        return "any", dynamic is not True  # "local" computes the scales of blocks, and keeps one of the tensor
    if nvfp4 and kind == ("float", 8) and dynamic is True:
        return "fp8", False
    raise CheckpointUnsupportedError(
        f"{source}: input_activations of type {kind[0]!r}, num_bits {kind[1]!r}, dynamic {dynamic!r} with {scheme} "
        f"weights are not supported: expected null, or activations in the format of the weights: {INSTEAD}"
    )


# Hugging Face and DeepSeek.


def read_huggingface_fp8(block: dict[str, Any], source: str) -> Read:
    """Read Hugging Face's or DeepSeek's FP8: blocks of 128x128, or one scale per tensor or per row.

    A missing ``weight_block_size`` means null to vLLM and [128, 128] to transformers: the tensors tell.
    """
    size = block.get("weight_block_size")
    if size not in (None, [FP8_BLOCK, FP8_BLOCK]):
        raise CheckpointUnsupportedError(
            f"{source}: weight_block_size {repr(size)[:80]} is not supported: expected [128, 128] or null: {INSTEAD}"
        )
    scheme = block.get("activation_scheme")
    if scheme not in (None, "dynamic", "static"):
        raise CheckpointError(f"{source}: activation_scheme {repr(scheme)[:80]} is not known: expected dynamic, static")
    if size and scheme == "static":
        raise CheckpointUnsupportedError(
            f"{source}: activation_scheme 'static' with weight_block_size {size} is not supported: expected dynamic, "
            f"blocks of activations are scaled from their own values: {INSTEAD}"
        )
    if block.get("fmt") not in (None, "e4m3"):
        raise CheckpointUnsupportedError(
            f"{source}: fmt {repr(block['fmt'])[:80]} is not supported: expected e4m3: {INSTEAD}"
        )
    blocks, single = ("fp8-block",), ("fp8-tensor", "fp8-tensor-inv", "fp8-channel")
    schemes = blocks if size else single if "weight_block_size" in block else (*blocks, *single)
    if block.get("quant_method") == "fbgemm_fp8":
        schemes = ("fp8-channel",)
    ignore = *strings(block, "modules_to_not_convert", source), *strings(block, "ignored_layers", source)
    return (Group(("Linear",), schemes, static=scheme == "static"),), tuple(dict.fromkeys(ignore))


# Models that transformers saved after this package had quantised them.

OWN_METHOD = "fp4dispatch"


def read_own(block: dict[str, Any], source: str) -> Read:
    """Read what :mod:`fp4dispatch.integrations.transformers` writes. The tensors tell which layers are meant."""
    activation = block.get("activation", "any")
    if activation not in ACTIVATIONS:
        raise CheckpointError(
            f"{source}: activation {repr(activation)[:80]} is not known: expected {', '.join(ACTIVATIONS)}"
        )
    return (Group(("Linear",), tuple(SCHEMES), activation),), ()


def expect_object(parent: dict[str, Any], key: str, source: str) -> dict[str, Any]:
    """Return the object below a key of a configuration, or raise CheckpointError."""
    value = parent.get(key)
    if not isinstance(value, dict):
        raise CheckpointError(f"{source}: {key[:200]!r} is {repr(value)[:80]}: expected an object")
    return value


def strings(parent: dict[str, Any], key: str, source: str) -> tuple[str, ...]:
    """Return the list of strings below a key, each once; empty where there is none."""
    value = parent.get(key)
    value = [] if value is None else value
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise CheckpointError(f"{source}: {key!r} is {repr(value)[:80]}: expected a list of strings")
    return tuple(dict.fromkeys(value))
