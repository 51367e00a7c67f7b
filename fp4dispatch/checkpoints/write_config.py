"""The quantisation configuration that a saved checkpoint carries, as the tool whose format it is would write it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fp4dispatch.checkpoints.quant_config import CONFIG_FILE, CT_STRATEGIES, HF_QUANT_FILE, MODELOPT_ALGOS
from fp4dispatch.errors import CheckpointError


def write_quant_config(
    method: str, layers: dict[str, tuple[str, bool]], ignore: Sequence[str], version: str
) -> dict[str, dict[str, Any]]:
    """Return what to write: ``quantization_config`` for config.json and, for ModelOpt, ``hf_quant_config.json`` too.

    Parameters
    ----------
    method
        ``modelopt``, ``compressed-tensors`` or ``fp8``.
    layers
        Scheme name, and whether there is a static input scale, by layer name.
    ignore
        Names of the linear layers that are not quantised.
    version
        Version of this package, entered as the producer's.
    """
    kinds: dict[tuple[str, bool], list[str]] = {}
    for name, kind in layers.items():
        kinds.setdefault(kind, []).append(name)
    if method == "modelopt":
        return _write_modelopt(kinds, list(ignore), version)
    if method == "compressed-tensors":
        return {CONFIG_FILE: _write_compressed_tensors(kinds, list(ignore))}
    return {CONFIG_FILE: _write_huggingface_fp8(kinds, list(ignore))}


def _write_modelopt(
    kinds: dict[tuple[str, bool], list[str]], ignore: list[str], version: str
) -> dict[str, dict[str, Any]]:
    quantization: dict[str, Any]
    groups: dict[str, Any] = {}
    layers: dict[str, dict[str, Any]] = {}
    for number, ((scheme, static), names) in enumerate(kinds.items()):
        algo = _modelopt_algo(scheme, static)
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
    hf_quant = {
        "producer": producer,
        "quantization": quantization | {"kv_cache_quant_algo": None, "exclude_modules": ignore},
    }
    return {CONFIG_FILE: config, HF_QUANT_FILE: hf_quant}


def _modelopt_algo(scheme: str, static: bool) -> str:
    if scheme == "modelopt-nvfp4":
        return "NVFP4" if static else "W4A16_NVFP4"
    if scheme == "fp8-tensor" and not static:
        raise CheckpointError(
            'ModelOpt\'s FP8 needs a static input scale and the layers have none: save with format="fp8" or '
            '"compressed-tensors", which scale activations dynamically'
        )
    return {name: algo for algo, name in MODELOPT_ALGOS.items()}[scheme]


def _write_compressed_tensors(kinds: dict[tuple[str, bool], list[str]], ignore: list[str]) -> dict[str, Any]:
    formats, groups = set(), {}
    for number, ((scheme, static), names) in enumerate(kinds.items()):
        form = "nvfp4-pack-quantized" if scheme == "nvfp4-pack-quantized" else "float-quantized"
        formats.add(form)
        weights, inputs = _ct_args(scheme, static)
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
        "kv_cache_scheme": None,
    }


def _ct_args(scheme: str, static: bool) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Weight and activation arguments, as the presets of compressed-tensors 0.20 have them."""
    if scheme == "nvfp4-pack-quantized":
        args: dict[str, Any] = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": 16}
        args |= {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
        return args | {"dynamic": False}, args | {"dynamic": "local"} if static else None
    args = {"num_bits": 8, "type": "float", "symmetric": True}
    strategy = {name: strategy for strategy, name in CT_STRATEGIES.items()}[scheme]
    weights = args | {"strategy": strategy, "dynamic": False}
    if strategy == "block":
        inputs = {"strategy": "group", "group_size": 128, "dynamic": True}
        return weights | {"block_structure": [128, 128]}, args | inputs
    return weights, args | (
        {"strategy": "tensor", "dynamic": False} if static else {"strategy": "token", "dynamic": True}
    )


def _write_huggingface_fp8(kinds: dict[tuple[str, bool], list[str]], ignore: list[str]) -> dict[str, Any]:
    if len(kinds) > 1:
        raise CheckpointError(
            f"Hugging Face fp8 has one scheme for all layers, found {sorted(name for name, _ in kinds)}: save with "
            'format="compressed-tensors"'
        )
    scheme, static = next(iter(kinds))
    return {
        "quant_method": "fp8",
        "activation_scheme": "static" if static else "dynamic",
        "weight_block_size": [128, 128] if scheme == "fp8-block" else None,
        "modules_to_not_convert": ignore,
    }
