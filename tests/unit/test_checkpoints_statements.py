"""What a checkpoint says about activations and the KV cache: read, honoured, and written again."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fp4dispatch.checkpoints import FORMATS, load_quantized, open_checkpoint, quantize_checkpoint, save_quantized
from fp4dispatch.checkpoints.config.quant_config import QuantConfig, read_quant_config
from fp4dispatch.errors import CheckpointError, InputError
from fp4dispatch.models.linear import FP4Linear
from tests.checkpoint_cases import FP8_ARGS, NVFP4_ARGS, K, N, Net, layer_weight, stored_layer, tensors_of, write

STATIC8 = FP8_ARGS | {"strategy": "tensor", "dynamic": False}
TOKEN8 = FP8_ARGS | {"strategy": "token", "dynamic": True}
LOCAL4 = NVFP4_ARGS | {"dynamic": "local"}


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["head"]}


def modelopt(algo: str) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algo, "ignore": ["head"]}


def huggingface(**kwargs: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "modules_to_not_convert": ["head"], **kwargs}


TENSOR8, CHANNEL8 = FP8_ARGS | {"strategy": "tensor"}, FP8_ARGS | {"strategy": "channel"}
BLOCK8 = FP8_ARGS | {"strategy": "block", "block_structure": [128, 128]}

# What is stored, whether with a static input scale, what the configuration says -> activation, a static scale is used.
STATEMENTS = [
    ("modelopt-nvfp4", True, modelopt("NVFP4"), "any", True),
    ("modelopt-nvfp4", False, modelopt("W4A16_NVFP4"), "bf16", False),
    ("modelopt-nvfp4", True, modelopt("W4A16_NVFP4"), "bf16", False),
    ("modelopt-nvfp4", True, None, "any", True),
    ("modelopt-nvfp4", False, None, "bf16", False),
    ("nvfp4-pack-quantized", True, compressed(NVFP4_ARGS, LOCAL4), "any", True),
    ("nvfp4-pack-quantized", False, compressed(NVFP4_ARGS, None), "bf16", False),
    ("nvfp4-pack-quantized", True, compressed(NVFP4_ARGS, None), "bf16", False),
    ("nvfp4-pack-quantized", False, compressed(NVFP4_ARGS, TOKEN8), "fp8", False),
    ("fp8-tensor", True, modelopt("FP8"), "any", True),
    ("fp8-tensor", True, compressed(TENSOR8, STATIC8), "any", True),
    ("fp8-tensor", True, compressed(TENSOR8, TOKEN8), "any", False),
    ("fp8-tensor", False, compressed(TENSOR8, None), "bf16", False),
    ("fp8-tensor", True, huggingface(weight_block_size=None, activation_scheme="static"), "any", True),
    ("fp8-tensor", True, huggingface(weight_block_size=None, activation_scheme="dynamic"), "any", False),
    ("fp8-channel", False, compressed(CHANNEL8, TOKEN8), "any", False),
    ("fp8-channel", False, compressed(CHANNEL8, None), "bf16", False),
    ("fp8-channel", False, modelopt("FP8_PER_CHANNEL_PER_TOKEN"), "any", False),
    ("fp8-block", False, huggingface(weight_block_size=[128, 128], activation_scheme="dynamic"), "any", False),
    ("fp8-block-ct", False, compressed(BLOCK8, None), "bf16", False),
    ("fp8-block-ct", False, modelopt("fp8_pb_wo"), "bf16", False),
]


def quantised(model: nn.Module) -> list[Any]:
    return [model.up_proj, model.down_proj]


@pytest.mark.parametrize(("row", "stored", "config", "activation", "static"), STATEMENTS)
def test_the_statement_becomes_the_activation_of_the_layers(tmp_path, row, stored, config, activation, static):
    path = write(tmp_path, tensors_of(row, static=stored), config)
    model = Net()
    report = load_quantized(model, path)
    assert [layer.activation for layer in quantised(model)] == [activation] * 2
    assert [layer.input_scale is not None for layer in quantised(model)] == [static] * 2
    scale = "input_global_scale" if row == "nvfp4-pack-quantized" else "input_scale"
    unused = {f"{name}.{scale}" for name in ("up_proj", "down_proj")} if stored and not static else set()
    assert set(report.ignored) == unused
    for asked in ("any", "bf16", "fp8"):  # the user's word counts
        model = Net()
        load_quantized(model, path, activation=asked)
        assert [layer.activation for layer in quantised(model)] == [asked] * 2


@pytest.mark.parametrize(("row", "stored", "config", "activation", "static"), STATEMENTS)
@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors", "fp8"])
def test_a_saved_model_says_what_its_checkpoint_said(tmp_path, row, stored, config, activation, static, format):
    """Or the format is refused, because it cannot say it."""
    model = Net()
    load_quantized(model, write(tmp_path / "in", tensors_of(row, static=stored), config))
    refusal = ""
    try:
        save_quantized(model, tmp_path / "out", format)
    except CheckpointError as error:
        refusal = str(error)
    if refusal:
        assert "save with" in refusal or "cannot store" in refusal
        assert format != "compressed-tensors"
        assert (format, static) != ("modelopt", True)
        return
    again = Net()
    load_quantized(again, tmp_path / "out")
    assert [layer.input_scale is not None for layer in quantised(again)] == [static] * 2
    # ModelOpt cannot say FP8 activations without a stored scale; 16-bit ones are finer.
    expected = "bf16" if (format, activation) == ("modelopt", "fp8") else activation
    assert [layer.activation for layer in quantised(again)] == [expected] * 2
    for ours, theirs in zip(quantised(model), quantised(again), strict=True):
        torch.testing.assert_close(layer_weight(theirs), layer_weight(ours), rtol=2**-22, atol=0)


@pytest.mark.parametrize("format", FORMATS)
def test_what_quantize_writes_reads_back_as_the_same(tmp_path, format):
    g = torch.Generator().manual_seed(0)
    tensors = {f"{n}_proj.weight": torch.randn(s, generator=g) for n, s in (("up", (N, K)), ("down", (K, N)))}
    tensors |= {k: v for k, v in tensors_of("fp8-tensor").items() if k.startswith("embed") or k == "steps"}
    tensors |= {"up_proj.bias": torch.zeros(N), "down_proj.bias": torch.zeros(K)}
    quantize_checkpoint(write(tmp_path / "in", tensors), tmp_path / "out", format, ["up_proj", "down_proj", "head"])
    model = Net()
    load_quantized(model, tmp_path / "out")
    weight_only = format in ("modelopt", "compressed-tensors")
    assert {layer.activation for layer in quantised(model)} == {"bf16" if weight_only else "any"}
    for layer in quantised(model):
        routes = layer.bind().spec.routes
        assert {route.activation for route in routes} == {"bf16"} if weight_only else True


def test_no_backend_is_offered_a_quantised_activation(tmp_path):
    model = Net()
    load_quantized(model, write(tmp_path, tensors_of("modelopt-nvfp4", static=False), modelopt("W4A16_NVFP4")))
    for m in (1, 64, 4096):
        assert model.up_proj.problem(m).activation == "bf16"


def test_an_activation_that_does_not_exist_is_refused(tmp_path):
    path = write(tmp_path, tensors_of("modelopt-nvfp4"))
    with pytest.raises(InputError, match="activation='int8' is not known"):
        load_quantized(Net(), path, activation="int8")
    with pytest.raises(InputError, match="FP8Linear does not take activation='nvfp4'"):
        load_quantized(Net(), write(tmp_path / "8", tensors_of("fp8-tensor")), activation="nvfp4")


def test_a_pin_of_the_user_stays_and_a_statement_is_replaced(tmp_path):
    weight_only = write(tmp_path / "a", tensors_of("modelopt-nvfp4", static=False), modelopt("W4A16_NVFP4"))
    both = write(tmp_path / "b", tensors_of("modelopt-nvfp4"), modelopt("NVFP4"))
    model = Net()
    load_quantized(model, weight_only)
    load_quantized(model, both)
    assert [layer.activation for layer in quantised(model)] == ["any"] * 2
    model = Net()
    model.up_proj = FP4Linear(K, N, activation="fp8")
    load_quantized(model, weight_only)
    assert [layer.activation for layer in quantised(model)] == ["fp8", "bf16"]
    load_quantized(model, both, activation="nvfp4")
    assert [layer.activation for layer in quantised(model)] == ["nvfp4"] * 2


def test_fused_shards_get_what_the_finest_of_them_was_made_for(tmp_path):
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Linear(K, 256, bias=False)

    tensors = {}
    for seed, name in enumerate(("gate_proj", "up_proj")):
        layer = stored_layer("modelopt-nvfp4", 128, K, seed)
        tensors |= {f"{name}.{key}": t for key, t in layer.items()}
    layers = {"gate_proj": {"quant_algo": "W4A16_NVFP4"}, "up_proj": {"quant_algo": "NVFP4"}}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    with pytest.raises(CheckpointError, match="static input scale"):
        load_quantized(Fused(), write(tmp_path / "a", tensors, config))
    del tensors["up_proj.input_scale"]
    model = Fused()
    load_quantized(model, write(tmp_path / "b", tensors, config))
    assert model.gate_up_proj.activation == "bf16"


@pytest.mark.parametrize(
    ("row", "config", "missing"),
    [
        ("nvfp4-pack-quantized", compressed(NVFP4_ARGS, LOCAL4), "down_proj.input_global_scale"),
        ("fp8-tensor", compressed(TENSOR8, STATIC8), "down_proj.input_scale"),
        ("fp8-tensor", huggingface(weight_block_size=None, activation_scheme="static"), "down_proj.input_scale"),
    ],
)
def test_a_static_scale_that_is_promised_has_to_be_there(tmp_path, row, config, missing):
    tensors = tensors_of(row)
    del tensors[missing]
    with pytest.raises(CheckpointError, match=f"'{missing}' is missing.*incomplete"):
        load_quantized(Net(), write(tmp_path, tensors, config))


def test_transformers_names_are_kept_by_format_fp8(tmp_path):
    """transformers reads weight_scale_inv and activation_scale, vLLM weight_scale and input_scale."""
    tensors = {
        k.replace("weight_scale", "weight_scale_inv").replace("input_scale", "activation_scale"): v
        for k, v in tensors_of("fp8-tensor").items()
    }
    config = huggingface(weight_block_size=None, activation_scheme="static")
    model = Net()
    load_quantized(model, write(tmp_path / "in", tensors, config))
    (file,) = save_quantized(model, tmp_path / "out", "fp8")
    saved = load_file(file)
    for name, tensor in tensors.items():
        assert torch.equal(saved[name].float(), tensor.float()), name
    assert saved.keys() == tensors.keys()


# The KV cache.

FP8_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
CACHES = {
    "modelopt fp8": (
        modelopt("NVFP4") | {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}},
        "FP8",
    ),
    "modelopt nvfp4": (modelopt("NVFP4") | {"kv_cache_scheme": "NVFP4"}, "NVFP4"),
    "compressed-tensors fp8": (compressed(NVFP4_ARGS, LOCAL4) | {"kv_cache_scheme": FP8_CACHE}, "FP8"),
    "compressed-tensors heads": (
        compressed(NVFP4_ARGS, LOCAL4) | {"kv_cache_scheme": FP8_CACHE | {"strategy": "attn_head"}},
        "attn_head",
    ),
}


def config_of(path: Path) -> QuantConfig:
    with open_checkpoint(path) as checkpoint:
        config = read_quant_config(checkpoint)
    assert config is not None
    return config


@pytest.mark.parametrize("case", CACHES)
@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("copied", [False, True], ids=["the model", "a copy"])
def test_the_kv_cache_is_saved_as_it_was(tmp_path, case, format, copied):
    config, algo = CACHES[case]
    row = "modelopt-nvfp4" if "modelopt" in case else "nvfp4-pack-quantized"
    scales = {"attn.k_proj.k_scale": torch.tensor(0.25), "attn.v_scale": torch.tensor([0.5])}
    model = Net()
    report = load_quantized(model, write(tmp_path / "in", tensors_of(row) | scales, config))
    assert set(report.ignored) == set(scales)
    assert algo in str(config_of(tmp_path / "in").kv_cache)
    model = copy.deepcopy(model) if copied else model
    sayable = algo == "FP8" or format in case
    if not sayable:
        with pytest.raises(CheckpointError, match="KV cache of the model is quantised as"):
            save_quantized(model, tmp_path / "out", format)
        assert not (tmp_path / "out").exists()
        return
    (file,) = save_quantized(model, tmp_path / "out", format)
    saved = load_file(file)
    for name, tensor in scales.items():
        assert torch.equal(saved[name], tensor)
    assert config_of(tmp_path / "out").kv_cache == config_of(tmp_path / "in").kv_cache
    if format == "modelopt":
        hf_quant = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
        assert hf_quant["quantization"]["kv_cache_quant_algo"] == algo
    whole = nn.ModuleDict({"inner": model})  # loaded into a part, saved as a whole
    (file,) = save_quantized(whole, tmp_path / "whole", format)
    assert {f"inner.{name}" for name in scales} <= load_file(file).keys()


def test_a_later_checkpoint_leaves_no_scales_of_an_earlier_one(tmp_path):
    model = Net()
    scales = {"attn.k_scale": torch.tensor(0.25)}
    load_quantized(model, write(tmp_path / "a", tensors_of("modelopt-nvfp4") | scales, CACHES["modelopt fp8"][0]))
    load_quantized(model, write(tmp_path / "b", tensors_of("modelopt-nvfp4"), modelopt("NVFP4")))
    (file,) = save_quantized(model, tmp_path / "out", "modelopt")
    assert "attn.k_scale" not in load_file(file)
    assert config_of(tmp_path / "out").kv_cache is None


# A layer by itself.


@pytest.mark.parametrize("bias", [False, True])
def test_a_bare_layer_is_saved_once(tmp_path, bias):
    g = torch.Generator().manual_seed(0)
    linear = nn.Linear(K, N, bias=bias)
    linear.weight.data = torch.randn(N, K, generator=g)
    layer = FP4Linear.from_linear(linear)
    (file,) = save_quantized(layer, tmp_path / "out", "modelopt")
    saved = load_file(file)
    assert saved.keys() == {"weight", "weight_scale", "weight_scale_2"} | ({"bias"} if bias else set())
    again = FP4Linear(K, N, bias=bias, dtype=torch.float32)
    again.load_state_dict(saved)
    assert torch.equal(layer_weight(again), layer_weight(layer))
    for model in (nn.Linear(K, N, bias=bias), again):
        with pytest.raises(CheckpointError, match=r"itself a linear layer.*load_state_dict"):
            load_quantized(model, tmp_path / "out")
