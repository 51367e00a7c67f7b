"""Errors that say which: damaged, of another model, or in a format that is not supported."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from fp4dispatch.checkpoints import load_quantized
from fp4dispatch.checkpoints.config.foreign import METHODS
from fp4dispatch.errors import CheckpointError, CheckpointUnsupportedError
from tests.checkpoint_cases import CONFIGS, FP8_ARGS, K, N, Net, assert_untouched, state_of, tensors_of, write

U8, I8, I32 = torch.uint8, torch.int8, torch.int32


def other(**tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    """A checkpoint of Net whose down_proj [K, N] is stored in somebody else's tensors."""
    rest = {k: v for k, v in tensors_of("fp8-tensor").items() if not k.startswith("down_proj.") or "bias" in k}
    return rest | {f"down_proj.{name.replace('__', '.')}": t for name, t in tensors.items()}


FOREIGN = {
    "GPTQ": other(qweight=torch.zeros(N // 8, K, dtype=I32), scales=torch.ones(2, K), g_idx=torch.zeros(N, dtype=I32)),
    "AWQ or GPTQ": other(
        qweight=torch.zeros(N, K // 8, dtype=I32), scales=torch.ones(2, K), qzeros=torch.zeros(2, K // 8, dtype=I32)
    ),
    "bitsandbytes": other(weight=torch.zeros(K * N // 2, 1, dtype=U8), weight__absmax=torch.ones(K * N // 64)),
    "SCB|bitsandbytes": other(weight=torch.zeros(K, N, dtype=I8), SCB=torch.ones(K)),
    "INT8": other(weight=torch.zeros(K, N, dtype=I8), weight_scale=torch.ones(K, 1)),
    "MXFP4": other(weight=torch.zeros(K, N // 2, dtype=U8), weight_scale=torch.ones(K, N // 32, dtype=U8)),
    "MXFP4: blocks": other(
        weight_packed=torch.zeros(K, N // 2, dtype=U8), weight_scale=torch.ones(K, N // 32, dtype=U8)
    ),
    "MXFP8": other(weight=torch.zeros(K, N).to(torch.float8_e4m3fn), weight_scale=torch.ones(K, N // 32, dtype=U8)),
    "e5m2": other(weight=torch.zeros(K, N).to(torch.float8_e5m2), weight_scale=torch.ones(())),
    "integers packed into 32 bits": other(
        weight_packed=torch.zeros(K, N // 8, dtype=I32), weight_scale=torch.ones(K, 2), weight_shape=torch.ones(2)
    ),
    "zero points": other(
        weight=torch.zeros(K, N, dtype=I8), weight_scale=torch.ones(K, 1), weight_zero_point=torch.zeros(K, 1)
    ),
    "NVFP4-like blocks of 32; NVFP4 has blocks of 16": other(
        weight=torch.zeros(K, N // 2, dtype=U8),
        weight_scale=torch.ones(K, N // 32).to(torch.float8_e4m3fn),
        weight_scale_2=torch.ones(()),
    ),
    "pre_quant_scale": other(
        weight=torch.zeros(K, N // 2, dtype=U8),
        weight_scale=torch.ones(K, N // 16).to(torch.float8_e4m3fn),
        weight_scale_2=torch.ones(()),
        pre_quant_scale=torch.ones(N),
    ),
}


@pytest.mark.parametrize("what", FOREIGN)
@pytest.mark.parametrize("strict", [True, False])
def test_a_layer_in_another_format_is_named(tmp_path, what, strict):
    model = Net()
    before = state_of(model)
    with pytest.raises(CheckpointUnsupportedError, match=f"'down_proj' is stored as .*({what}).*fp4dispatch quantize"):
        load_quantized(model, write(tmp_path, FOREIGN[what]), strict=strict)
    assert_untouched(model, before)


@pytest.mark.parametrize("method", METHODS)
def test_other_methods_are_named(tmp_path, method):
    path = write(tmp_path, tensors_of("fp8-tensor"), {"quant_method": method})
    with pytest.raises(CheckpointUnsupportedError) as error:
        load_quantized(Net(), path)
    assert METHODS[method] in str(error.value)
    assert "fp4dispatch quantize" in str(error.value)


CT = {"quant_method": "compressed-tensors", "config_groups": CONFIGS["nvfp4-pack-quantized"]["config_groups"]}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}


def group(weights: dict[str, Any] | None, inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size 32 is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "quant_algo 'NVFP4_AWQ' is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_NVFP4_FP8"}, "is not supported"),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
             "quantized_layers": {"up_proj": {"quant_algo": "NVFP4", "group_size": 64}}},
            "up_proj: NVFP4 with group_size 64 is not supported",
        ),
        ({"quant_method": "fp8", "weight_block_size": [128, 64]}, r"weight_block_size \[128, 64\] is not supported"),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"},
            "'static' with weight_block_size",
        ),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2' is not supported"),
        (CT | {"format": "dense", "quantization_status": "frozen"}, "'dense' with quantization_status 'frozen'"),
        (CT | {"format": "pack-quantized", "quantization_status": "compressed"}, "format 'pack-quantized'"),
        (CT | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config with format 'sparse-24-bitmask'"),
        (CT | {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}, "transform_config is not support"),
        (group(NVFP4 | {"group_size": 32}), "group_size 32 are not supported"),
        (group(NVFP4 | {"symmetric": False}), "not symmetric, are not supported"),
        (group(FP8_ARGS | {"strategy": "tensor"}, {"num_bits": 8, "type": "int"}), "type 'int', num_bits 8"),
        (group(NVFP4, {"num_bits": 8, "type": "float", "dynamic": False}), "input_activations of type 'float'"),
        (group(None), "no group quantises weights"),
    ],
)  # fmt: skip
def test_configurations_of_other_formats_say_so(tmp_path, config, expected):
    path = write(tmp_path, tensors_of("nvfp4-pack-quantized"), config)
    with pytest.raises(CheckpointUnsupportedError, match=expected) as error:
        load_quantized(Net(), path)
    assert "damaged" not in str(error.value)
    assert "belong together" not in str(error.value)


def larger(*, bias: bool = True) -> nn.Module:
    model = Net()
    model.down_proj = nn.Linear(N + 16, K, bias=bias)
    return model


@pytest.mark.parametrize("row", ["modelopt-nvfp4", "nvfp4-pack-quantized", "fp8-tensor", "fp8-channel", "fp8-block"])
def test_a_layer_of_another_size_is_of_another_model(tmp_path, row):
    path = write(tmp_path, tensors_of(row), CONFIGS[row])
    with pytest.raises(CheckpointError, match=r"of another model: its layer is 160 x 192, the model's 160 x 208") as e:
        load_quantized(larger(), path)
    assert "damaged" not in str(e.value)


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ("modelopt-nvfp4", "weight"), ("modelopt-nvfp4", "weight_scale"), ("nvfp4-pack-quantized", "weight_packed"),
        ("fp8-channel", "weight"), ("fp8-block", "weight_scale_inv"), ("fp8-tensor", "bias"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_each_other_are_damage(tmp_path, row, name):
    tensors = tensors_of(row)
    full = f"down_proj.{name}"
    tensors[full] = tensors[full][:-1].contiguous()
    with pytest.raises(CheckpointError, match="damaged") as e:
        load_quantized(Net(), write(tmp_path, tensors))
    assert "another model" not in str(e.value)
    assert not isinstance(e.value, CheckpointUnsupportedError)


def test_other_tensors(tmp_path):
    tensors = tensors_of("fp8-tensor")
    embedding = tensors["embed.weight"]
    tensors["embed.weight"] = embedding.to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointUnsupportedError, match=r"'embed\.weight' is F8_E4M3.*no linear layer"):
        load_quantized(Net(), write(tmp_path / "a", tensors))
    tensors["embed.weight"] = embedding[:5].contiguous()
    with pytest.raises(CheckpointError, match=r"'embed\.weight' is F32 \[5, 160\].*of another model"):
        load_quantized(Net(), write(tmp_path / "b", tensors))


def compress(module: nn.Linear, preset: str) -> dict[str, torch.Tensor]:
    """Quantise and compress one layer with compressed-tensors itself."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    config = quantization.QuantizationConfig(config_groups={preset: ["Linear"]})
    model = nn.ModuleDict({"layer": module})
    quantization.apply_quantization_config(model, config, show_progress=False)
    compressors.compress_module(module)
    return {name: t.detach() for name, t in module.state_dict().items() if t is not None}


@pytest.mark.parametrize(
    ("preset", "what"),
    [
        ("W4A16", "integers packed"),
        ("W8A8", "INT8"),
        ("MXFP4", "MXFP4"),
        ("MXFP8", "MXFP8"),
        ("W4A16_ASYM", "integers"),
    ],
)
def test_layers_that_compressed_tensors_wrote(tmp_path, preset, what):
    n, k = 128, 128
    stored = {f"layer.{name}": t for name, t in compress(nn.Linear(k, n, bias=False), preset).items()}
    assert len(stored) >= 2, json.dumps(sorted(stored))
    with pytest.raises(CheckpointUnsupportedError, match=f"stored as .*{what}"):
        load_quantized(nn.ModuleDict({"layer": nn.Linear(k, n, bias=False)}), write(tmp_path, stored))
