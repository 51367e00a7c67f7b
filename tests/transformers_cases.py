"""Checkpoints of tiny models for the tests with Transformers, written by the tools themselves, and fp32 references."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fp4dispatch
from tests import scratch, tiny_models
from tests.checkpoint_cases import dequantised

IDS = torch.arange(1, 17).view(1, 16)


@contextmanager
def taken_over(*methods: str) -> Iterator[None]:
    """Register with Transformers, and give back: other tests look at what Transformers itself does."""
    from transformers.quantizers import auto

    fp4dispatch.register()  # importing the integration does it once: that stays
    mappings = auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING
    before = [dict(mapping) for mapping in mappings]
    fp4dispatch.register(take_over=methods)
    try:
        yield
    finally:
        for mapping, old in zip(mappings, before, strict=True):
            mapping.clear()
            mapping.update(old)


def source(name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return the unquantised model, with the architecture in its configuration."""
    transformers = pytest.importorskip("transformers")
    model = tiny_models.build(name, transformers, dtype)
    model.config.architectures = [type(model).__name__]
    return model


@functools.cache
def modelopt(name: str, config: str = "NVFP4_DEFAULT_CFG", leave: str = "") -> Path:
    """Export with nvidia-modelopt's own quantiser and exporter; ``leave``: a pattern of modules not to quantise."""
    mtq = pytest.importorskip("modelopt.torch.quantization")
    export = pytest.importorskip("modelopt.torch.export")
    chosen = copy.deepcopy(getattr(mtq, config))
    if leave:
        chosen["quant_cfg"].append({"quantizer_name": leave, "enable": False})
    model = mtq.quantize(source(name), chosen, lambda m: m(IDS))
    out = scratch.folder("modelopt")
    with torch.inference_mode():
        export.export_hf_checkpoint(model, export_dir=str(out))
    return out


@functools.cache
def plain(name: str) -> Path:
    """Save the unquantised model with Transformers."""
    out = scratch.folder("plain")
    source(name).save_pretrained(out)
    return out


@functools.cache
def in_blocks(name: str) -> Path:
    """Save with FP8 weights in blocks of 128x128, as Hugging Face and DeepSeek do: ``weight_scale_inv``."""
    import fp4dispatch

    model = source(name)
    fp4dispatch.replace_linears(model, "fp8_block", exclude="lm_head")
    out = scratch.folder("blocks")
    fp4dispatch.save_quantized(model, out / "saved", "fp8")
    return out / "saved"


def rewritten(path: Path, to: Path, **changes: Any) -> Path:
    """Copy a checkpoint with another quantization_config."""
    to.mkdir()
    for file in path.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    config = json.loads((to / "config.json").read_text())
    config["quantization_config"] |= changes
    (to / "config.json").write_text(json.dumps(config))
    (to / "hf_quant_config.json").unlink(missing_ok=True)
    return to


def _dequantised(layer: dict[str, torch.Tensor]) -> torch.Tensor:
    if "weight_packed" in layer:
        return dequantised("nvfp4-pack-quantized", layer)
    if "weight_scale_2" in layer:
        return dequantised("modelopt-nvfp4", layer)
    if "weight_scale_inv" in layer:
        return dequantised("fp8-block", layer)
    scale = layer["weight_scale"]
    if scale.numel() == 1:
        return dequantised("fp8-tensor", layer)
    if scale.numel() == layer["weight"].shape[0]:
        return dequantised("fp8-channel", layer | {"weight_scale": scale.reshape(-1, 1)})
    return dequantised("fp8-block-ct", layer | {"weight_scale": scale.reshape(scale.shape[0], -1)})


def reference(name: str, path: Path, model: Any = None) -> Any:
    """Return the model in fp32 with the dequantised weights of a checkpoint, by the formulas of the formats."""
    stored = load_file(path / "model.safetensors")
    model = source(name, torch.float32) if model is None else model
    state = model.state_dict()
    for key in state:
        module, _, last = key.rpartition(".")
        layer = {k.rpartition(".")[2]: t for k, t in stored.items() if k.rpartition(".")[0] == module}
        if last == "weight" and {"weight_scale", "weight_scale_inv"} & layer.keys():
            weight = _dequantised(layer).float()
            transposed = type(model.get_submodule(module)).__name__ == "Conv1D"  # it has [K, N]
            state[key] = weight.t() if transposed else weight
        elif key in stored:
            state[key] = stored[key].float()
    model.load_state_dict(state)
    return model.eval()


def quantised_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the quantised layers by name."""
    from fp4dispatch.models.quantized_linear import QuantizedLinear

    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def kl(model: Any, expected: Any) -> float:
    """Return the largest KL divergence of the next-token distributions from those of another model."""
    p, q = (torch.log_softmax(tiny_models.logits(m), -1) for m in (expected, model))
    return float((p.exp() * (p - q)).sum(-1).max())


@functools.cache
def compressed(name: str, preset: str = "NVFP4A16", ignore: tuple[str, ...] = ("lm_head",)) -> Path:
    """Quantise, compress and save with compressed-tensors' own functions."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    model = source(name)
    config = quantization.QuantizationConfig(config_groups={preset: ["Linear"]}, ignore=list(ignore))
    quantization.apply_quantization_config(model, config, show_progress=False)
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is not None:
            _calibrate(module, scheme, helpers)
    compressor = compressors.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    out = scratch.folder("compressed")
    model.config.save_pretrained(out)
    state = {k: t.contiguous() for k, t in model.state_dict().items() if not (_tied(model) and k == "lm_head.weight")}
    save_file(state, out / "model.safetensors", {"format": "pt"})
    compressor.update_config(str(out))
    return out


def _tied(model: Any) -> bool:
    return bool(model.config.tie_word_embeddings)


def _calibrate(module: Any, scheme: Any, helpers: Any) -> None:
    weight, args = module.weight.detach().float(), scheme.weights
    with torch.no_grad():
        if args.strategy == "tensor_group":
            module.weight_global_scale.copy_(helpers.generate_gparam(weight.min(), weight.max()))
            groups = weight.unflatten(1, (-1, args.group_size))
            scale, _ = helpers.calculate_qparams(
                groups.amin(-1), groups.amax(-1), args, global_scale=module.weight_global_scale
            )
        else:
            dims, keep = (1, True) if args.strategy == "channel" else ((0, 1), False)
            scale, _ = helpers.calculate_qparams(weight.amin(dims, keepdim=keep), weight.amax(dims, keepdim=keep), args)
        module.weight_scale.copy_(scale.reshape(module.weight_scale.shape))
        for key, tensor in module.named_parameters():
            if key.startswith("input") and "scale" in key:
                tensor.fill_(0.05 if "global" not in key else 400.0)
