"""Write the quantisation configuration of a saved checkpoint, in the form of the tool whose format it uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from fp4dispatch.checkpoints.config.readers import CT_STRATEGIES
from fp4dispatch.checkpoints.files.paths import CONFIG_FILE, HF_QUANT_FILE
from fp4dispatch.checkpoints.kv_cache import KvCache
from fp4dispatch.errors import CheckpointError

Stated = Literal["static", "dynamic", "dynamic-fp8", "weight-only"]
"""Activation statement of a layer: static scale, dynamic scale, dynamic FP8 with NVFP4 weights, or not quantised."""

_Kinds = dict[tuple[str, Stated], list[str]]

_MODELOPT_ALGOS: dict[tuple[str, Stated], str] = {
    ("modelopt-nvfp4", "static"): "NVFP4",
    ("modelopt-nvfp4", "weight-only"): "W4A16_NVFP4",
    ("fp8-tensor", "static"): "FP8",
    ("fp8-channel", "dynamic"): "FP8_PER_CHANNEL_PER_TOKEN",
}


def write_quant_config(
    method: str,
    layers: dict[str, tuple[str, Stated]],
    ignore: Sequence[str],
    version: str,
    kv_cache: KvCache | None = None,
) -> dict[str, dict[str, Any]]:
    """Return what to write: ``quantization_config`` for config.json and, for ModelOpt, ``hf_quant_config.json`` too.

    Parameters
    ----------
    method
        ``modelopt``, ``compressed-tensors``, ``fp8`` or ``fp8-transformers``.
    layers
        Scheme name, and what is said about activations, by layer name.
    ignore
        Names of the linear layers that are not quantised.
    version
        Version of this package, entered as the producer's.
    kv_cache
        How the KV cache is quantised; ``fp8`` has no place for it, there the scales alone tell.

    Raises
    ------
    CheckpointError
        A statement that the tool's configuration cannot express.
    """
    kinds: _Kinds = {}
    for name, kind in layers.items():
        kinds.setdefault(kind, []).append(name)
    if method == "modelopt":
        return _write_modelopt(kinds, list(ignore), version, kv_cache)
    if method == "compressed-tensors":
        return {CONFIG_FILE: _write_compressed_tensors(kinds, list(ignore), kv_cache)}
    return {CONFIG_FILE: _write_huggingface_fp8(kinds, list(ignore))}


def _write_modelopt(
    kinds: _Kinds, ignore: list[str], version: str, kv_cache: KvCache | None
) -> dict[str, dict[str, Any]]:
    quantization: dict[str, Any]
    groups: dict[str, Any] = {}
    layers: dict[str, dict[str, Any]] = {}
    for number, ((scheme, stated), names) in enumerate(kinds.items()):
        algo = _modelopt_algo(scheme, stated)
        quantization = {"quant_algo": algo} | ({"group_size": 16} if scheme == "modelopt-nvfp4" else {})
        layers |= dict.fromkeys(names, quantization)
        args: dict[str, Any] = {"dynamic": False, "num_bits": 4 if "nvfp4" in scheme else 8, "type": "float"}
        args |= {"group_size": 16} if "nvfp4" in scheme else {}
        group: dict[str, Any] = {"weights": dict(args)} if algo == "W4A16_NVFP4" else {
            "input_activations": dict(args),
            "weights": args | ({"strategy": "channel"} if scheme == "fp8-channel" else {}),
        }  # fmt: skip
        groups[f"group_{number}"] = group | {"targets": ["Linear"] if len(kinds) == 1 else names}
    if len(kinds) > 1:
        quantization = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    producer = {"name": "fp4dispatch", "version": version}
    config = {"config_groups": groups, "ignore": ignore, "quant_algo": quantization["quant_algo"]}
    config |= {"producer": producer, "quant_method": "modelopt"}
    if len(kinds) > 1:
        config["quantized_layers"] = layers
    cache_algo, cache_scheme = kv_cache.as_modelopt() if kv_cache else (None, None)
    if kv_cache:
        config["kv_cache_scheme"] = cache_scheme
    hf_quant = {
        "producer": producer,
        "quantization": quantization | {"kv_cache_quant_algo": cache_algo, "exclude_modules": ignore},
    }
    return {CONFIG_FILE: config, HF_QUANT_FILE: hf_quant}


def _modelopt_algo(scheme: str, stated: Stated) -> str:
    if (scheme, stated) in _MODELOPT_ALGOS:
        return _MODELOPT_ALGOS[scheme, stated]
    if scheme == "fp8-tensor" and stated == "dynamic":
        raise CheckpointError(
            "ModelOpt's FP8 needs a static input scale and the layers have none: save with "
            'format="compressed-tensors" or "fp8", which scale activations dynamically'
        )
    raise CheckpointError(
        f"ModelOpt has no name for {scheme} weights with {stated} activations, expected one of "
        f'{", ".join(_MODELOPT_ALGOS.values())}: save with format="compressed-tensors"'
    )


def _write_compressed_tensors(kinds: _Kinds, ignore: list[str], kv_cache: KvCache | None) -> dict[str, Any]:
    formats, groups = set(), {}
    for number, ((scheme, stated), names) in enumerate(kinds.items()):
        form = "nvfp4-pack-quantized" if scheme == "nvfp4-pack-quantized" else "float-quantized"
        formats.add(form)
        weights, inputs = _ct_args(scheme, stated)
        groups[f"group_{number}"] = {
            "targets": ["Linear"] if len(kinds) == 1 else names,
            "weights": weights,
            "input_activations": inputs,
            "output_activations": None,
            "format": form,
        }
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": ignore,
        "kv_cache_scheme": kv_cache.as_compressed_tensors() if kv_cache else None,
    }


def _ct_args(scheme: str, stated: Stated) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Weight and activation arguments, as the presets of compressed-tensors 0.20 have them."""
    fp8: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
    token = fp8 | {"strategy": "token", "dynamic": True}
    if scheme == "nvfp4-pack-quantized":
        args: dict[str, Any] = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": 16}
        args |= {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
        inputs = {"static": args | {"dynamic": "local"}, "dynamic-fp8": token}.get(stated)
        return args | {"dynamic": False}, inputs
    strategy = {name: strategy for strategy, name in CT_STRATEGIES.items()}[scheme]
    weights = fp8 | {"strategy": strategy, "dynamic": False}
    if strategy == "block":
        weights["block_structure"] = [128, 128]
    if stated == "weight-only":
        return weights, None
    if strategy == "block":
        return weights, fp8 | {"strategy": "group", "group_size": 128, "dynamic": True}
    return weights, fp8 | {"strategy": "tensor", "dynamic": False} if stated == "static" else token


def _write_huggingface_fp8(kinds: _Kinds, ignore: list[str]) -> dict[str, Any]:
    if len(kinds) > 1:
        raise CheckpointError(
            f"Hugging Face fp8 has one scheme for all layers, found {sorted(name for name, _ in kinds)}: save with "
            'format="compressed-tensors"'
        )
    scheme, stated = next(iter(kinds))
    if stated == "weight-only":
        raise CheckpointError(
            "Hugging Face fp8 cannot say that activations are not quantised, as it is for these layers: save with "
            'format="compressed-tensors"'
        )
    return {
        "quant_method": "fp8",
        "activation_scheme": stated,
        "weight_block_size": [128, 128] if scheme == "fp8-block" else None,
        "modules_to_not_convert": ignore,
    }
