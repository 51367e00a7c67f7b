"""Checkpoints written by compressed-tensors, transformers and ModelOpt themselves, and their own matching functions."""

from __future__ import annotations

import copy
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fp4dispatch.checkpoints import load_quantized, open_checkpoint, quantize_checkpoint, save_quantized
from fp4dispatch.checkpoints.config.patterns import matches
from fp4dispatch.checkpoints.config.quant_config import read_quant_config
from fp4dispatch.errors import CheckpointUnsupportedError
from fp4dispatch.models.linear import FP8Linear
from fp4dispatch.models.replace import replace_linears
from tests.checkpoint_cases import layer_weight, write

# compressed-tensors.

STRATEGIES = ("tensor", "channel", "block")
TARGETS = ["Linear", "Module", "Head", "re:.*q_proj", "re:.*(q|k)_proj$", "re:a", "re:b.*", "re:.*down", "a.q_proj"]
TARGETS += ["a.k_proj", "b.q_proj", "head", "re:.*a", "q_proj", "re:head", "b", "re:.*\\.k_proj"]


class Head(nn.Linear):
    """A subclass, as models have them; compressed-tensors matches its own name and those of its bases."""


def tree() -> nn.Module:
    part = lambda: nn.ModuleDict({name: nn.Linear(8, 8) for name in ("q_proj", "k_proj", "down")})  # noqa: E731
    return nn.ModuleDict({"a": part(), "b": part(), "head": Head(8, 8)})


def test_targets_are_matched_as_the_library_does(tmp_path):
    """On random configurations, against ``apply_quantization_config`` of compressed-tensors itself."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    rng = random.Random(5)
    in_file_order = 0
    for _ in range(40):
        groups: dict[str, Any] = {}
        for number, strategy in enumerate(rng.sample(STRATEGIES, rng.randint(1, 3))):
            weights = {"num_bits": 8, "type": "float", "strategy": strategy}
            weights |= {"block_structure": [128, 128]} if strategy == "block" else {}
            groups[f"g{number}"] = {"targets": rng.sample(TARGETS, rng.randint(1, 4)), "weights": weights}
        block = {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": rng.sample(TARGETS, rng.choice((0, 0, 1, 2))),
        }
        model = tree()
        theirs = quantization.QuantizationConfig.model_validate(block)
        quantization.apply_quantization_config(model, theirs, show_progress=False)
        write(tmp_path, {"x": torch.zeros(1)}, block)
        with open_checkpoint(tmp_path) as checkpoint:
            ours = read_quant_config(checkpoint)
        for name, module in model.named_modules():
            if not isinstance(module, nn.Linear):
                continue
            scheme = getattr(module, "quantization_scheme", None)
            expected = None if scheme is None else f"fp8-{scheme.weights.strategy}"
            found = ours.group_for(name, tuple(c.__name__ for c in type(module).__mro__ if issubclass(c, nn.Module)))
            assert (None if found is None else found.schemes[0].removesuffix("-ct")) == expected, (name, block)
            first = next((g for g in ours.groups if any(t == name or t == "Linear" for t in g.targets)), None)
            in_file_order += found is not None and first is not None and found is not first
    assert in_file_order > 10, "the configurations have to tell the library's order from that of the file"


@pytest.mark.parametrize("preset", ["NVFP4", "NVFP4A16", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "W4A16", "MXFP4", "MXFP8"])
def test_presets_may_be_named(tmp_path, preset):
    """The library fills a group that is a list of targets from its table; ours says what the library's does."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    block = {"quant_method": "compressed-tensors", "config_groups": {preset: ["Linear"]}}
    filled = quantization.QuantizationConfig.model_validate(block).model_dump(mode="json")
    configs = []
    for number, config in enumerate((block, filled | {"format": None, "quantization_status": None})):
        path = write(tmp_path / str(number), {"x": torch.zeros(1)}, config)
        with open_checkpoint(path) as checkpoint:
            try:
                configs.append(read_quant_config(checkpoint).groups[0])
            except CheckpointUnsupportedError:
                configs.append(None)
    assert configs[0] == configs[1]
    assert (configs[0] is None) == (preset in ("W4A16", "MXFP4", "MXFP8"))


# transformers.

SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "vocab_size": 64}


def llama(**kwargs: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(num_hidden_layers=1, num_key_value_heads=2, **SIZES, **kwargs)
    return transformers.LlamaForCausalLM(config).eval()


def deepseek() -> nn.Module:
    """DeepSeek-V3 with its multi-head latent attention; all layers dense."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    mla = {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
    config = transformers.DeepseekV3Config(
        num_hidden_layers=2, first_k_dense_replace=2, num_key_value_heads=4, **SIZES, **mla
    )
    return transformers.DeepseekV3ForCausalLM(config).eval()


class Quantiser:
    """transformers' own ``Fp8Quantize``, which needs of the quantiser nothing but its configuration."""

    def __init__(self, block: list[int] | None) -> None:
        from transformers import FineGrainedFP8Config
        from transformers.integrations.finegrained_fp8 import Fp8Quantize

        self.quantization_config = FineGrainedFP8Config(weight_block_size=block)
        self.operation = Fp8Quantize(self)

    def __call__(self, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.operation.convert({f"{name}.weight": weight})


def quantised_by_transformers(model: nn.Module, block: list[int] | None) -> dict[str, torch.Tensor]:
    quantise, tensors = Quantiser(block), dict(model.state_dict())
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            tensors |= quantise(name, module.weight.detach())
    return {name: t.to(torch.bfloat16) if t.dtype == torch.float32 and "scale" not in name else t
            for name, t in tensors.items()}  # fmt: skip


def assert_loaded(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Every quantised layer has the weight that transformers' own ``Fp8Dequantize`` makes of the tensors."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    layers = {name: module for name, module in model.named_modules() if isinstance(module, FP8Linear)}
    assert len(layers) == sum(name.endswith("weight_scale_inv") for name in tensors) > 0
    for name, layer in layers.items():
        weight, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"]
        scale = scale.reshape(1, 1) if scale.ndim < 2 else scale
        theirs = Fp8Dequantize(None)._dequantize_one(weight, scale, torch.float32)
        torch.testing.assert_close(layer_weight(layer).float(), theirs, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("scheme", ["dynamic", "static"])
def test_fp8_per_tensor_as_transformers_and_ministral_have_it(tmp_path, shape, scheme):
    """``weight_block_size: null``; transformers writes [1, 1], Ministral-3 and Devstral-2 have []."""
    model = llama()
    tensors = quantised_by_transformers(model, None)
    assert tensors["model.layers.0.mlp.up_proj.weight_scale_inv"].shape == (1, 1)
    for name in [n for n in tensors if n.endswith("weight_scale_inv")]:
        tensors[name] = tensors[name].reshape(shape)
        if scheme == "static":
            tensors[name.replace("weight_scale_inv", "activation_scale")] = torch.tensor(0.5, dtype=torch.bfloat16)
    config = {"quant_method": "fp8", "activation_scheme": scheme, "weight_block_size": None, "dequantize": False}
    path = write(tmp_path, tensors, config | {"modules_to_not_convert": ["lm_head", "model.vision_tower"]})
    report = load_quantized(model, path)
    assert report.excluded == ("lm_head",)
    assert_loaded(model, tensors)
    layer = model.model.layers[0].mlp.up_proj
    assert layer.scaling == "tensor"
    assert (layer.input_scale is not None) == (scheme == "static")
    assert scheme == "dynamic" or layer.input_scale == 0.5


@pytest.mark.filterwarnings("ignore")
def test_transformers_reads_what_fp8_transformers_saves(tmp_path):
    """Per tensor it reads other names than vLLM, and would multiply by codes without their scale."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model = llama()
    replace_linears(model, "fp8", exclude="lm_head")
    config = transformers.FineGrainedFP8Config(weight_block_size=None, dequantize=True)
    save_quantized(model, tmp_path / "q", "fp8-transformers")
    read = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "q", quantization_config=config, dtype=torch.float32
    )
    for name, layer in model.named_modules():
        if isinstance(layer, FP8Linear):
            theirs = read.get_submodule(name).weight
            torch.testing.assert_close(theirs.double(), layer_weight(layer), rtol=1e-6, atol=0)
    assert any(isinstance(layer, FP8Linear) for layer in model.modules())


REPAIRED = (
    "Transformers reads these blocks right: remove other_readers.py and its sentence in docs/guide/checkpoints.md"
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("size", "reads"), [(96, "right"), (256, "right"), (192, "wrong"), (257, "not")])
def test_blocks_that_transformers_reads_wrong_are_warned_of(tmp_path, caplog, size, reads):
    """Its own reader, which takes blocks of 96 for 128 where there are two in 192, and finds no size for three in 257.

    Fails when Transformers reads them right, since the warning has no reason then.
    """
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": size, "num_attention_heads": 2, "vocab_size": 64}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=1, **sizes)).eval()
    model.save_pretrained(tmp_path / "in")
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]
    report = quantize_checkpoint(tmp_path / "in", tmp_path / "q", "fp8-block", linears)
    logged = lambda: [r.getMessage() for r in caplog.records if r.name == "fp4dispatch"]  # noqa: E731
    assert list(report.warnings) == logged()
    original = copy.deepcopy(model)
    load_quantized(model, tmp_path / "q")
    caplog.clear()
    save_quantized(model, tmp_path / "saved", "fp8-transformers")
    for said in (report.warnings, logged()):
        assert len(said) == (reads != "right")
        for text in said:
            for name in (f"gate_proj [{size}, 128]", f"up_proj [{size}, 128]", f"down_proj [128, {size}]"):
                assert f"model.layers.*.mlp.{name}" in text
            assert "q_proj" not in text
            assert "fp4dispatch.load_quantized" in text

    config = transformers.FineGrainedFP8Config(dequantize=True)
    read = lambda: transformers.AutoModelForCausalLM.from_pretrained(  # noqa: E731
        tmp_path / "q", quantization_config=config, dtype=torch.float32
    )
    if reads == "not":
        with pytest.raises(RuntimeError, match="automatic conversion of the weights"):
            raise AssertionError(f"{REPAIRED}: {read()}")
        return
    theirs = read()
    for name, layer in model.named_modules():
        if isinstance(layer, FP8Linear):
            exact = original.get_submodule(name).weight.double()
            torch.testing.assert_close(layer_weight(layer), exact, rtol=2**-4, atol=1e-5 * float(exact.abs().max()))
            error = (theirs.get_submodule(name).weight.double() - layer_weight(layer)).abs().max()
            misread = reads == "wrong" and "mlp" in name
            assert (error > 1e-3) == misread, f"{name} {error}: {REPAIRED if misread else 'not as it is stored'}"


DEEPSEEK = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}


def test_deepseek_v3_as_it_is_published(tmp_path):
    """No list of exceptions, a 16-bit head, and the tensors of a layer for further tokens that transformers leaves."""
    model = deepseek()
    tensors = quantised_by_transformers(model, [128, 128])
    assert tensors["lm_head.weight"].dtype == torch.bfloat16
    rows = {name: t.shape[0] for name, t in tensors.items() if name.endswith("kv_a_proj_with_mqa.weight")}
    assert set(rows.values()) == {160}, "transformers leaves what is no multiple of 128"
    for name in rows:  # DeepSeek's own kernel does not
        scaled = nn.functional.pad(tensors[name].float(), (0, 0, 0, 96))
        padded = Quantiser([128, 128])(name.removesuffix(".weight"), scaled)
        tensors |= padded | {name: padded[name][:160].contiguous()}
    tensors["model.layers.61.eh_proj.weight"] = torch.zeros(4, 4, dtype=torch.bfloat16)
    report = load_quantized(model, write(tmp_path, tensors, DEEPSEEK))
    assert report.excluded == ("lm_head",)
    assert report.ignored == ("model.layers.61.eh_proj.weight",)
    assert len(report.layers) == 2 * 8
    layer = model.model.layers[0].self_attn.kv_a_proj_with_mqa
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa"
    blocks = tensors[f"{name}.weight_scale_inv"].double().repeat_interleave(128, 0)[:160].repeat_interleave(128, 1)
    assert torch.equal(layer_weight(layer), tensors[f"{name}.weight"].double() * blocks)
    with torch.no_grad():
        assert torch.isfinite(model(torch.arange(8).view(1, 8)).logits).all()


def test_a_fused_a_projection_is_put_together(tmp_path):
    """What vLLM and SGLang call ``fused_qkv_a_proj``."""
    tensors = quantised_by_transformers(llama(), [128, 128])
    source = "model.layers.0.mlp."
    parts = {"q_a_proj": "up_proj", "kv_a_proj_with_mqa": "gate_proj"}
    stored = {f"{ours}.{k}": tensors[f"{source}{theirs}.{k}"] for ours, theirs in parts.items()
              for k in ("weight", "weight_scale_inv")}  # fmt: skip
    model = nn.ModuleDict({"fused_qkv_a_proj": nn.Linear(256, 768, bias=False)})
    load_quantized(model, write(tmp_path, stored, DEEPSEEK))
    halves = [nn.ModuleDict({name: nn.Linear(256, 384, bias=False)}) for name in parts]
    for half, name in zip(halves, parts, strict=True):
        load_quantized(half, write(tmp_path / name, {k: v for k, v in stored.items() if k.startswith(name)}, DEEPSEEK))
    expected = torch.cat([layer_weight(half[name]) for half, name in zip(halves, parts, strict=True)])
    assert torch.equal(layer_weight(model["fused_qkv_a_proj"]), expected)


def test_exceptions_are_matched_as_transformers_does():
    """``modules_to_not_convert`` on names and entries of real models: all that transformers leaves is left."""
    should_convert = pytest.importorskip("transformers.quantizers.quantizers_utils").should_convert_module
    names = [f"model.layers.{i}.{n}" for i in (0, 1, 11) for n in ("mlp.gate", "mlp.gate_proj", "self_attn.q_proj")]
    names += ["lm_head", "model.visual.blocks.0.attn.qkv", "model.embed_tokens", "score"]
    entries = [
        "lm_head",
        "model.layers.1",
        "gate",
        "mlp.gate",
        "model.visual",
        "visual",
        "head",
        r"model.layers.\d+.mlp",
    ]
    entries += ["model.layers.*.mlp.gate", "re", "model.layers.(0|1)", "*lm_head*", "q_proj", "model"]
    left = 0
    for entry in entries:
        for name in names:
            try:
                theirs = not should_convert(name, [entry])
            except re.error:  # transformers raises; a glob is fine here
                continue
            assert matches(entry, name, "fp8") or not theirs, (entry, name)
            left += theirs
    assert left > 40
    assert not matches("mlp.gate", "model.layers.0.mlp.gate_proj", "fp8")
    assert not matches("model.layers.1", "model.layers.11.mlp.gate", "fp8")


# ModelOpt.


@pytest.fixture(scope="module")
def modelopt(tmp_path_factory):
    """Export a Llama of one layer with ModelOpt's own quantiser and exporter, on the CPU."""
    mtq = pytest.importorskip("modelopt.torch.quantization")
    export = pytest.importorskip("modelopt.torch.export")
    done: dict[str, Path] = {}

    def make(name: str, *, kv_cache: bool = False) -> Path:
        key = f"{name}-{kv_cache}"
        if key in done:
            return done[key]
        model = llama(architectures=["LlamaForCausalLM"]).to(torch.bfloat16)
        tokens = torch.arange(16).view(1, 16)
        config = copy.deepcopy(getattr(mtq, name))
        if kv_cache:
            config = mtq.update_quant_cfg_with_kv_cache_quant(config, mtq.FP8_KV_CFG["quant_cfg"])
        model = mtq.quantize(model, config, lambda m: m(tokens))
        done[key] = tmp_path_factory.mktemp("modelopt") / key
        with torch.inference_mode():
            export.export_hf_checkpoint(model, export_dir=str(done[key]))
        return done[key]

    return make


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "kv_cache", "activation", "scheme"),
    [
        ("NVFP4_DEFAULT_CFG", True, "any", "modelopt-nvfp4"),
        ("FP8_DEFAULT_CFG", True, "any", "fp8-tensor"),
        ("W4A16_NVFP4_CFG", False, "bf16", "modelopt-nvfp4"),
        ("FP8_PER_CHANNEL_PER_TOKEN_CFG", False, "any", "fp8-channel"),
        ("FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", False, "bf16", "fp8-block-ct"),
        ("NVFP4_MLP_ONLY_CFG", False, "any", "modelopt-nvfp4"),
    ],
)
def test_modelopt_exports_load_and_are_saved_as_they_were(tmp_path, modelopt, name, kv_cache, activation, scheme):
    path = modelopt(name, kv_cache=kv_cache)
    model = llama().to(torch.bfloat16)
    report = load_quantized(model, path)
    assert {layer.scheme for layer in report.layers} == {scheme}
    assert {model.get_submodule(layer.name).activation for layer in report.layers} == {activation}
    assert len(report.layers) == (3 if "MLP" in name else 7)
    if scheme == "fp8-block-ct":
        return  # our ModelOpt format has no blocks
    (file,) = save_quantized(model, tmp_path / "out", "modelopt", source_dir=path)
    saved, stored = load_file(file), load_file(path / "model.safetensors")
    assert saved.keys() == stored.keys()
    assert any(n.endswith("k_scale") for n in saved) == kv_cache
    for tensor in stored:
        ours, theirs = saved[tensor], stored[tensor]
        assert torch.equal(ours.float(), theirs.reshape(ours.shape).float()), tensor
    ours, theirs = (json.loads((p / "hf_quant_config.json").read_text()) for p in (tmp_path / "out", path))
    assert ours["quantization"].keys() == theirs["quantization"].keys()
    for key in ("quant_algo", "kv_cache_quant_algo", "group_size"):
        assert ours["quantization"].get(key) == theirs["quantization"].get(key)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "config", "tensors"),
    [
        ("NVFP4_MLP_WEIGHT_ONLY_CFG", "group_size 32", "blocks of 32"),
        ("MXFP4_DEFAULT_CFG", "'mxfp4'", "MXFP4"),
        ("MXFP8_DEFAULT_CFG", "'MXFP8'", "MXFP8"),
        ("INT4_AWQ_CFG", "'W4A16_AWQ'", "integers of 4 bits"),
        ("INT8_DEFAULT_CFG", "'W8A8_SQ_PER_CHANNEL'", "INT8"),
    ],
)
def test_other_modelopt_exports_are_refused_by_name(tmp_path, modelopt, name, config, tensors):
    """By the configuration, and by the tensors where no configuration lies beside them."""
    path = modelopt(name)
    with pytest.raises(CheckpointUnsupportedError, match=f"{config}.*is not supported.*fp4dispatch quantize"):
        load_quantized(llama(), path)
    save_file(load_file(path / "model.safetensors"), tmp_path / "model.safetensors")
    for strict in (True, False):
        with pytest.raises(CheckpointUnsupportedError, match=f"{tensors}.*is not supported.*fp4dispatch quantize"):
            load_quantized(llama(), tmp_path, strict=strict)
