"""load_quantized: five formats and their configurations, fused layers, exclusions, and that failure changes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from fp4dispatch.checkpoints import load_quantized, open_checkpoint
from fp4dispatch.checkpoints.config.patterns import matches
from fp4dispatch.checkpoints.config.quant_config import read_quant_config
from fp4dispatch.errors import CheckpointError
from fp4dispatch.models.linear import FP4Linear, FP8Linear
from tests.checkpoint_cases import (
    CONFIGS,
    ROWS,
    K,
    N,
    Net,
    assert_untouched,
    dequantised,
    layer_weight,
    state_of,
    stored_layer,
    tensors_of,
    write,
)


def below(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {key.removeprefix(name + "."): t for key, t in tensors.items() if key.startswith(name + ".")}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("config", [True, False], ids=["config", "tensors only"])
@pytest.mark.parametrize("shards", [1, 3])
def test_every_format_gives_the_weights_of_its_formula(tmp_path, row, config, shards):
    tensors = tensors_of(row)
    model = Net()
    report = load_quantized(model, write(tmp_path, tensors, CONFIGS[row] if config else None, shards))
    for name in ("up_proj", "down_proj"):
        module = getattr(model, name)
        assert type(module) is (FP4Linear if "nvfp4" in row else FP8Linear)
        # float64 throughout; compressed-tensors' reciprocal is rounded once to float32
        expected = dequantised(row, below(tensors, name))
        torch.testing.assert_close(layer_weight(module), expected, rtol=2**-23, atol=0)
        assert torch.equal(module.bias, tensors[f"{name}.bias"])
    assert torch.equal(model.embed.weight, tensors["embed.weight"])
    assert model.head.weight is model.embed.weight  # the tie is kept
    assert model.steps.item() == 7
    assert [layer.name for layer in report.layers] == ["up_proj", "down_proj"]
    assert {layer.scheme for layer in report.layers} == {row}
    assert report.excluded == ("head",)
    assert report.missing == report.ignored == ()


@pytest.mark.parametrize("row", ["modelopt-nvfp4", "nvfp4-pack-quantized", "fp8-tensor"])
def test_static_input_scales_multiply(tmp_path, row):
    tensors = tensors_of(row)
    model = Net()
    load_quantized(model, write(tmp_path, tensors))
    for seed, name in enumerate(("up_proj", "down_proj")):
        expected = 1 / (2.0 + seed) if row == "nvfp4-pack-quantized" else 0.5 + seed
        assert getattr(model, name).weights().input_scale.item() == pytest.approx(expected, rel=1e-7)
    model = Net()
    load_quantized(model, write(tmp_path / "dynamic", tensors_of(row, static=False)))
    assert model.up_proj.weights().input_scale is None


def test_scalars_may_be_one_element_vectors_and_scales_16_bit(tmp_path):
    tensors = tensors_of("fp8-tensor")
    for name in ("up_proj", "down_proj"):
        tensors[f"{name}.weight_scale"] = torch.tensor([0.25], dtype=torch.bfloat16)
    model = Net()
    load_quantized(model, write(tmp_path, tensors))
    assert model.up_proj.weights().scale.shape == ()
    assert model.up_proj.weights().scale.dtype == torch.float32
    assert torch.equal(layer_weight(model.up_proj), tensors["up_proj.weight"].double() * 0.25)
    tensors = tensors_of("fp8-channel")
    tensors["up_proj.weight_scale"] = tensors["up_proj.weight_scale"].flatten()  # [N] in place of [N, 1]
    model = Net()
    load_quantized(model, write(tmp_path / "n", tensors))
    assert model.up_proj.weights().scale.shape == (N,)


@pytest.mark.parametrize(("row", "scale"), [("fp8-block", "weight_scale_inv"), ("fp8-block-ct", "weight_scale")])
def test_ue8m0_block_scales(tmp_path, row, scale):
    tensors = tensors_of(row)
    for name in ("up_proj", "down_proj"):
        key = f"{name}.{scale}"
        tensors[key] = tensors[key].to(torch.float8_e8m0fnu)
    model = Net()
    load_quantized(model, write(tmp_path, tensors, CONFIGS[row]))
    expected = dequantised(row, {k: v.float() for k, v in below(tensors, "up_proj").items()})
    assert torch.equal(layer_weight(model.up_proj), expected)


class Fused(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(K, 320, bias=bias)
        self.gate_up_proj = nn.Linear(K, 256, bias=False)


def fused_tensors(row: str, q_rows: int = 192, k_rows: int = 64) -> dict[str, torch.Tensor]:
    tensors = {}
    parts = [("q_proj", q_rows), ("k_proj", k_rows), ("v_proj", 64), ("gate_proj", 128), ("up_proj", 128)]
    for seed, (name, n) in enumerate(parts):
        tensors |= {f"{name}.{key}": t for key, t in stored_layer(row, n, K, seed).items()}
        if name[0] in "qkv":
            tensors[f"{name}.bias"] = torch.full((n,), float(seed))
    return tensors


@pytest.mark.parametrize("row", ["modelopt-nvfp4", "nvfp4-pack-quantized", "fp8-tensor", "fp8-channel"])
@pytest.mark.parametrize("meta", [False, True])
def test_fused_shards_keep_their_own_scales_exactly(tmp_path, row, meta):
    tensors = fused_tensors(row)
    with torch.device("meta" if meta else "cpu"):
        model = Fused()
    report = load_quantized(model, write(tmp_path, tensors, CONFIGS[row]))
    for name, shards in {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}.items():
        module = getattr(model, name)
        expected = torch.cat([dequantised(row, below(tensors, shard)) for shard in shards])
        torch.testing.assert_close(layer_weight(module), expected, rtol=2**-23, atol=0)
    weights = model.qkv_proj.weights()
    if "nvfp4" in row:
        assert weights.shard_rows == (192, 64, 64)
        assert len(set(weights.global_scale.tolist())) == 3
        # one input, several records of its range: the widest is kept, so that nothing new saturates
        assert weights.input_scale.item() == (2.5 if row == "modelopt-nvfp4" else 0.5)
    elif row == "fp8-tensor":
        assert weights.scaling == "row"  # different per-tensor scales, so one a row, and dynamic activations
        assert weights.input_scale is None
    assert torch.equal(model.qkv_proj.bias, torch.cat([tensors[f"{p}_proj.bias"] for p in "qkv"]))
    assert report.layers[0].sources == ("q_proj", "k_proj", "v_proj")


def test_fused_per_tensor_shards_with_one_scale_stay_per_tensor(tmp_path):
    tensors = fused_tensors("fp8-tensor")
    for name in tensors:
        if name.endswith("_scale"):
            tensors[name] = torch.tensor(0.5)
    model = Fused()
    load_quantized(model, write(tmp_path, tensors))
    weights = model.qkv_proj.weights()
    assert weights.scaling == "tensor"
    assert weights.input_scale.item() == 0.5


def test_fused_blocks_must_not_straddle_shards(tmp_path):
    model = Fused()
    before = state_of(model)
    with pytest.raises(CheckpointError, match="straddle"):
        load_quantized(model, write(tmp_path, fused_tensors("fp8-block")))
    assert_untouched(model, before)
    tensors = fused_tensors("fp8-block", q_rows=128, k_rows=128)
    load_quantized(model, write(tmp_path / "ok", tensors))
    expected = torch.cat([dequantised("fp8-block", below(tensors, f"{p}_proj")) for p in "qkv"])
    assert torch.equal(layer_weight(model.qkv_proj), expected)


def test_an_unquantised_fused_layer_is_concatenated(tmp_path):
    tensors = fused_tensors("modelopt-nvfp4")
    for p, n in zip("qkv", (192, 64, 64), strict=True):
        for key in list(tensors):
            if key.startswith(f"{p}_proj.weight"):
                del tensors[key]
        del tensors[f"{p}_proj.input_scale"]
        tensors[f"{p}_proj.weight"] = torch.full((n, K), float(ord(p)))
    config = {**CONFIGS["modelopt-nvfp4"], "ignore": ["[qkv]_proj"]}
    model = Fused()
    report = load_quantized(model, write(tmp_path, tensors, config))
    assert report.excluded == ("qkv_proj",)
    assert type(model.qkv_proj) is nn.Linear
    assert model.qkv_proj.weight[:, 0].unique_consecutive().tolist() == [113.0, 107.0, 118.0]


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda t: t.pop("k_proj.weight_scale"), "'k_proj.weight_scale' is missing: expected F8_E4M3"),
        (lambda t: [t.pop(k) for k in list(t) if k.startswith("k_")], r"'k_proj\.weight' is missing: expected all"),
        (lambda t: t.update(below_full("k_proj", "fp8-channel")), "stored as fp8-channel, modelopt-nvfp4"),
        (lambda t: t.update(below_full("k_proj", "bf16")), "only q_proj, v_proj are quantised"),
        (lambda t: t.pop("k_proj.input_scale"), "static input scale"),
        (lambda t: t.pop("v_proj.bias"), r"only some shards|missing"),
    ],
)
def test_shards_that_do_not_go_together_are_refused(tmp_path, edit, expected):
    tensors = fused_tensors("modelopt-nvfp4")
    edit(tensors)
    tensors = {k: v for k, v in tensors.items() if v is not None}
    model = Fused()
    before = state_of(model)
    with pytest.raises(CheckpointError, match=expected):
        load_quantized(model, write(tmp_path, tensors))
    assert_untouched(model, before)


def below_full(name: str, row: str) -> dict[str, torch.Tensor | None]:
    old = dict.fromkeys(f"{name}.{k}" for k in ("weight", "weight_scale", "weight_scale_2", "input_scale"))
    layer = {"weight": torch.zeros(64, K)} if row == "bf16" else stored_layer(row, 64, K, 1)
    return {**old, **{f"{name}.{key}": t for key, t in layer.items()}}


# What can be wrong with a tensor. Every edit is made to the last layer, after all others were read.

EDITS = {
    "missing weight": ("modelopt-nvfp4", lambda t: t.pop("down_proj.weight"), r"proj\.weight' is missing: expected U8"),
    "missing scale": ("modelopt-nvfp4", lambda t: t.pop("down_proj.weight_scale"), "weight_scale' is missing"),
    "missing global": ("modelopt-nvfp4", lambda t: t.pop("down_proj.weight_scale_2"), "weight_scale_2' is missing"),
    "missing divisor": ("nvfp4-pack-quantized", lambda t: t.pop("down_proj.weight_global_scale"), "is missing"),
    "missing row scale": ("fp8-channel", lambda t: t.pop("down_proj.weight_scale"), "weight_scale' is missing"),
    "missing block scale": ("fp8-block", lambda t: t.pop("down_proj.weight_scale_inv"), "is missing"),
    "missing bias": ("fp8-tensor", lambda t: t.pop("down_proj.bias"), r"'down_proj\.bias' is missing"),
    "missing buffer": ("fp8-tensor", lambda t: t.pop("steps"), "'steps' is missing"),
    "unexpected": ("fp8-tensor", lambda t: t.update({"ghost.weight": torch.ones(1)}), r"'ghost\.weight' is unexpected"),
    "weight shape": (
        "modelopt-nvfp4",
        lambda t: t.update({"down_proj.weight": torch.zeros(K, N // 2 + 1, dtype=torch.uint8)}),
        r"is U8 \[160, 97\], expected U8 \[160, 96\]",
    ),
    "scale shape": (
        "modelopt-nvfp4",
        lambda t: t.update({"down_proj.weight_scale": t["down_proj.weight_scale"][:, :-1].contiguous()}),
        r"is F8_E4M3 \[160, 11\], expected F8_E4M3 \[160, 12\]",
    ),
    "scale dtype": (
        "modelopt-nvfp4",
        lambda t: t.update({"down_proj.weight_scale": t["down_proj.weight_scale"].float()}),
        r"is F32 \[160, 12\], expected F8_E4M3",
    ),
    "global dtype": (
        "modelopt-nvfp4",
        lambda t: t.update({"down_proj.weight_scale_2": torch.tensor(1)}),
        r"is I64 \[\], expected F32 or BF16 or F16",
    ),
    "block grid": (
        "fp8-block",
        lambda t: t.update({"down_proj.weight_scale_inv": torch.ones(2, 3)}),
        r"is F32 \[2, 3\], expected .* \[2, 2\]",
    ),
    "channel count": (
        "fp8-channel",
        lambda t: t.update({"down_proj.weight_scale": torch.ones(K - 1, 1)}),
        r"is F32 \[159, 1\], expected|says that 'down_proj'",
    ),
    "bias shape": ("fp8-tensor", lambda t: t.update({"down_proj.bias": torch.ones(3)}), r"expected float32 \[160\]"),
    "embedding dtype": (
        "fp8-tensor",
        lambda t: t.update({"embed.weight": torch.ones(32, K, dtype=torch.int32)}),
        r"is I32 \[32, 160\], expected float32",
    ),
    "NaN block scale": ("modelopt-nvfp4", lambda t: poison(t, "down_proj.weight_scale", 0x7F), "scale'.* 1 NaN"),
    "negative block scale": ("modelopt-nvfp4", lambda t: poison(t, "down_proj.weight_scale", 0x81), "scale'.* 1 neg"),
    "NaN weight": ("fp8-channel", lambda t: poison(t, "down_proj.weight", 0xFF), r"proj\.weight'.* 1 NaN"),
    "NaN global": ("modelopt-nvfp4", lambda t: t["down_proj.weight_scale_2"].fill_(torch.nan), "found the scale nan"),
    "zero global": ("modelopt-nvfp4", lambda t: t["down_proj.weight_scale_2"].fill_(0), r"found the scale 0\.0"),
    "inf divisor": ("nvfp4-pack-quantized", lambda t: t["down_proj.weight_global_scale"].fill_(torch.inf), "scale inf"),
    "tiny divisor": ("nvfp4-pack-quantized", lambda t: t["down_proj.weight_global_scale"].fill_(1e-45), "the scale"),
    "NaN input scale": ("fp8-tensor", lambda t: t["down_proj.input_scale"].fill_(torch.nan), "found the scale nan"),
    "negative row scale": ("fp8-channel", lambda t: t["down_proj.weight_scale"][-1].fill_(-1), r"-1\.0 \(1 of 160"),
    "inf block scale": ("fp8-block", lambda t: t["down_proj.weight_scale_inv"][-1, -1].fill_(torch.inf), "scale inf"),
}  # fmt: skip


def poison(tensors: dict[str, torch.Tensor], name: str, byte: int) -> None:
    tensors[name].view(torch.uint8).view(-1)[-1] = byte


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("shards", [1, 2])
def test_a_bad_tensor_is_named_and_the_model_untouched(tmp_path, edit, shards):
    row, change, expected = EDITS[edit]
    tensors = tensors_of(row)
    change(tensors)
    model = Net()
    before = state_of(model)
    with pytest.raises(CheckpointError, match=expected) as error:
        load_quantized(model, write(tmp_path, tensors, CONFIGS[row], shards))
    assert str(tmp_path) in str(error.value)
    assert any(word in str(error.value) for word in ("expected", "need finite", "needs it", "no place"))
    assert_untouched(model, before)


def test_a_checkpoint_of_a_larger_model_is_refused(tmp_path):
    model = Net()
    model.down_proj = nn.Linear(N + 16, K)
    before = state_of(model)
    with pytest.raises(CheckpointError, match=r"is U8 \[160, 96\], expected U8 \[160, 104\]"):
        load_quantized(model, write(tmp_path, tensors_of("modelopt-nvfp4")))
    assert_untouched(model, before)


def test_an_interrupt_while_the_layers_change_places_is_undone(tmp_path):
    class Interrupting(dict):
        def __setitem__(self, key, value):
            super().__setitem__(key, value)
            if key == "steps" and value.item() == 7:
                raise KeyboardInterrupt

    model = Net()
    before = state_of(model)
    model._buffers = Interrupting(model._buffers)
    with pytest.raises(KeyboardInterrupt):
        load_quantized(model, write(tmp_path, tensors_of("modelopt-nvfp4")))
    assert_untouched(model, before)


def test_strict_false_loads_what_fits_and_reports_the_rest(tmp_path):
    tensors = tensors_of("fp8-tensor")
    del tensors["steps"]
    tensors["ghost"] = torch.ones(1)
    model = Net()
    report = load_quantized(model, write(tmp_path, tensors), strict=False)
    assert report.missing == ("steps",)
    assert report.ignored == ("ghost",)
    assert type(model.up_proj) is FP8Linear


def test_kv_cache_scales_are_reported_and_not_an_error(tmp_path):
    tensors = tensors_of("modelopt-nvfp4") | {"attn.k_proj.k_scale": torch.ones(1), "attn.v_scale": torch.ones(1)}
    report = load_quantized(Net(), write(tmp_path, tensors))
    assert set(report.ignored) == {"attn.k_proj.k_scale", "attn.v_scale"}


def test_an_unquantised_checkpoint_is_refused(tmp_path):
    model = Net()
    tensors = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="no quantised tensors for any of the model's 3 linear layers"):
        load_quantized(model, write(tmp_path, tensors))


def test_a_shared_module_is_replaced_everywhere(tmp_path):
    model = Net()
    model.again = model.up_proj
    load_quantized(model, write(tmp_path, tensors_of("fp8-tensor")))
    assert model.again is model.up_proj
    assert type(model.again) is FP8Linear


def test_loading_again_replaces_the_quantised_layers(tmp_path):
    model = Net()
    load_quantized(model, write(tmp_path / "a", tensors_of("fp8-tensor")))
    load_quantized(model, write(tmp_path / "b", tensors_of("modelopt-nvfp4")))
    assert type(model.up_proj) is FP4Linear


def test_meta_models_are_filled_and_own_their_memory(tmp_path):
    with torch.device("meta"):
        model = Net()
    tensors = tensors_of("modelopt-nvfp4")
    load_quantized(model, write(tmp_path, tensors))
    (tmp_path / "model.safetensors").write_bytes(b"")  # would be a bus error if anything were still mapped
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.embed.weight, tensors["embed.weight"])
    assert torch.isfinite(layer_weight(model.down_proj)).all()


def test_a_buffer_that_nobody_can_fill_is_refused(tmp_path):
    class WithCache(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("cache", torch.ones(3), persistent=False)

    with torch.device("meta"):
        model = WithCache()
    with pytest.raises(CheckpointError, match="'cache' of the model is on the meta device"):
        load_quantized(model, write(tmp_path, tensors_of("fp8-tensor")))
    load_quantized(WithCache(), tmp_path)  # off meta it keeps its value


# The configuration.


@pytest.mark.parametrize("row", ROWS)
def test_configurations_are_understood(tmp_path, row):
    with open_checkpoint(write(tmp_path, tensors_of(row), CONFIGS[row])) as checkpoint:
        config = read_quant_config(checkpoint)
    assert row in config.group_for("up_proj").schemes
    assert config.group_for("head") is None


@pytest.mark.parametrize(("row", "other"), [(r, o) for r in ROWS for o in ROWS if r != o])
def test_configuration_and_tensors_must_agree(tmp_path, row, other):
    model = Net()
    before = state_of(model)
    with pytest.raises(CheckpointError, match="do not belong together"):
        load_quantized(model, write(tmp_path, tensors_of(row), CONFIGS[other]))
    assert_untouched(model, before)


def test_a_layer_that_is_excluded_but_quantised_is_refused_and_the_reverse(tmp_path):
    for ignore, strict, expected in (
        (["head", "up_proj"], False, "'up_proj' is not quantised"),
        ([], True, "'head' is q"),
    ):
        config = {**CONFIGS["modelopt-nvfp4"], "ignore": ignore}
        tensors = tensors_of("modelopt-nvfp4") | {"head.weight": torch.ones(32, K)}
        with pytest.raises(CheckpointError, match=expected):
            load_quantized(Net(), write(tmp_path, tensors, config), strict=strict)


def test_the_two_modelopt_files_must_agree(tmp_path):
    path = write(tmp_path, tensors_of("modelopt-nvfp4"), CONFIGS["modelopt-nvfp4"])
    hf_quant = {"producer": {}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["head*"]}}
    (path / "hf_quant_config.json").write_text(json.dumps(hf_quant))
    load_quantized(Net(), path)
    (path / "config.json").unlink()  # older exports have this file alone
    load_quantized(Net(), path)
    write(path, tensors_of("modelopt-nvfp4"), CONFIGS["modelopt-nvfp4"])
    hf_quant["quantization"]["quant_algo"] = "FP8"
    (path / "hf_quant_config.json").write_text(json.dumps(hf_quant))
    with pytest.raises(CheckpointError, match="disagrees with"):
        load_quantized(Net(), path)


def test_mixed_precision_of_modelopt(tmp_path):
    tensors = {
        k: v
        for k, v in tensors_of("modelopt-nvfp4").items()
        if not k.startswith("up_proj.w") and k != "up_proj.input_scale"
    }
    tensors |= {f"up_proj.{k}": v for k, v in stored_layer("fp8-tensor", N, K, 5).items()}
    layers = {"up_proj": {"quant_algo": "FP8"}, "down_proj": {"quant_algo": "NVFP4", "group_size": 16}}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    model = Net()
    load_quantized(model, write(tmp_path, tensors, config))
    assert (type(model.up_proj), type(model.down_proj)) == (FP8Linear, FP4Linear)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quant_method": "gptq"}, "quant_method 'gptq' is not supported"),
        ({"quant_method": ["x"]}, "not supported"),
        ({}, "quant_method None is not supported"),
        ([], "expected an object"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ' is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": "head"}, "expected a list of strings"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "'quantized_layers'"),
        ({"quant_method": "compressed-tensors"}, "'config_groups'"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"type": "int"}}}}, "type 'int'"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": None}}}, "'weights'"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"\[64, 64\] is not supported"),
        ({**CONFIGS["nvfp4-pack-quantized"], "ignore": ["re:("]}, "is not a regular expression"),
        ({**CONFIGS["nvfp4-pack-quantized"], "ignore": [r"re:(a)\1"]}, "no backreferences"),
    ],
)  # fmt: skip
def test_configurations_that_are_not_supported_are_refused(tmp_path, config, expected):
    path = write(tmp_path, tensors_of("nvfp4-pack-quantized"))
    (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    model = Net()
    before = state_of(model)
    with pytest.raises(CheckpointError, match=expected):
        load_quantized(model, path)
    assert_untouched(model, before)


@pytest.mark.parametrize(
    ("pattern", "name", "method", "expected"),
    [
        ("lm_head", "lm_head", "modelopt", True),
        ("lm_head", "model.lm_head", "modelopt", False),
        ("*lm_head", "model.lm_head", "modelopt", True),
        ("model.layers.0*", "model.layers.0.mlp.up_proj", "modelopt", True),
        ("model.layers.0", "model.layers.0.mlp.up_proj", "modelopt", False),
        ("re:.*lm_head", "model.lm_head", "compressed-tensors", True),
        ("re:lm_head", "model.lm_head", "compressed-tensors", False),  # from the start, as re.match
        (r"re:model\.layers\.(\d+)\..*(q|k|v)_proj$", "model.layers.17.self_attn.k_proj", "compressed-tensors", True),
        ("visual", "model.visual.blocks.0.fc", "fp8", True),
        ("lm_head", "model.lm_head", "fp8", True),
        ("gate", "model.layers.0.gate_proj", "fp8", False),
    ],
)
def test_patterns(pattern, name, method, expected):
    assert matches(pattern, name, method) is expected


def test_fused_layers_are_excluded_by_the_name_of_the_fused_layer_too(tmp_path):
    config = {**CONFIGS["modelopt-nvfp4"], "ignore": ["qkv_proj"]}
    with pytest.raises(CheckpointError, match="is not quantised"):
        load_quantized(Fused(), write(tmp_path, fused_tensors("modelopt-nvfp4"), config))


# Memory.


LOAD = """
    import sys, threading, time
    import torch
    from fp4dispatch.checkpoints import load_quantized
    from tests.checkpoint_cases import Net

    def anonymous():
        return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))

    load_quantized(Net(), sys.argv[1])  # imports and pools, out of the way
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(4096, 8192, bias=False) for _ in range(6)))
    base, peak, stop = anonymous(), 0, threading.Event()

    def watch():
        global peak
        while not stop.is_set():
            peak = max(peak, anonymous() - base)
            time.sleep(0.0005)

    thread = threading.Thread(target=watch)
    thread.start()
    load_quantized(model, sys.argv[2])
    stop.set()
    thread.join()
    print(peak, anonymous() - base)
"""


def test_memory_beyond_the_new_model_is_about_one_layer(tmp_path):
    one = 8192 * 4096 // 2 + 8192 * 4096 // 16
    tensors = {}
    for i in range(6):
        tensors |= {f"{i}.{key}": t for key, t in stored_layer("modelopt-nvfp4", 8192, 4096, i).items()}
    command = [sys.executable, "-c", textwrap.dedent(LOAD), write(tmp_path / "warm", tensors_of("modelopt-nvfp4"))]
    command.append(write(tmp_path / "in", tensors))
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # so that malloc gives back what is freed
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    peak, held = map(int, done.stdout.split())
    assert held > 5.5 * one, "the measurement must see the layers themselves"
    assert peak - held < 1.5 * one, f"{(peak - held) / one:.1f} layers of extra memory"
