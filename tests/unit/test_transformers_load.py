"""``from_pretrained`` and ``save_pretrained`` of Transformers on checkpoints that are quantised already."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp4dispatch.errors import CheckpointError, CheckpointUnsupportedError, InputError
from fp4dispatch.models.linear import FP4Linear
from tests import tiny_models
from tests.transformers_cases import IDS, kl, modelopt, plain, quantised_modules, reference, rewritten, source

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
DENSE = ("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma-3 text", "Phi-3", "GPT-2")


@pytest.fixture(autouse=True, scope="module")
def registered():
    import fp4dispatch

    fp4dispatch.register()


def load(path, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(path, **options)


def check_saved(model, path, out):
    """What is saved has the tensors of the checkpoint, bit by bit, and loads again to the same model."""
    model.save_pretrained(out)
    stored, saved = (load_file(p / "model.safetensors") for p in (path, out))
    assert saved.keys() == stored.keys()
    for name, tensor in stored.items():
        assert (saved[name].shape, saved[name].dtype) == (tensor.shape, tensor.dtype), name
        assert torch.equal(saved[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    again = load(out)
    assert torch.equal(tiny_models.logits(again), tiny_models.logits(model))
    assert {n: m.activation for n, m in quantised_modules(again).items()} == {
        n: m.activation for n, m in quantised_modules(model).items()
    }


@pytest.mark.parametrize("name", DENSE)
def test_modelopt_nvfp4_of_each_architecture(tmp_path, name):
    path = modelopt(name)
    expected = reference(name, path)
    model = load(path, dtype=torch.float32)
    layers = quantised_modules(model)
    assert len(layers) == sum(key.endswith("weight_scale_2") for key in load_file(path / "model.safetensors"))
    assert model.hf_quantizer.report.excluded == ("lm_head",)
    torch.testing.assert_close(tiny_models.logits(model), tiny_models.logits(expected), rtol=1e-4, atol=1e-4)
    assert kl(source(name, torch.float32), expected) > 20 * kl(load(path), expected), "as far as rounding to bf16"
    check_saved(load(path), path, tmp_path / "out")


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ("FP8_DEFAULT_CFG", "any"),
        ("W4A16_NVFP4_CFG", "bf16"),
        ("FP8_PER_CHANNEL_PER_TOKEN_CFG", "any"),
        ("FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", "bf16"),
        ("NVFP4_MLP_ONLY_CFG", "any"),
    ],
)
def test_modelopt_formats(tmp_path, config, activation):
    path = modelopt("Llama", config)
    model = load(path, dtype=torch.float32)
    layers = quantised_modules(model)
    assert {layer.activation for layer in layers.values()} == {activation}
    assert len(layers) == (6 if "MLP" in config else 14)
    expected = reference("Llama", path)
    torch.testing.assert_close(tiny_models.logits(model), tiny_models.logits(expected), rtol=1e-4, atol=1e-4)
    check_saved(load(path), path, tmp_path / "out")


def test_scales_of_the_kv_cache_are_saved_again(tmp_path, caplog):
    path = tmp_path / "in"
    rewritten(modelopt("Llama"), path, kv_cache_scheme={"dynamic": False, "num_bits": 8, "type": "float"})
    tensors = load_file(path / "model.safetensors")
    tensors |= {f"model.layers.{i}.self_attn.{x}_proj.{x}_scale": torch.tensor(0.5) for i in (0, 1) for x in "kv"}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with caplog.at_level(logging.WARNING):
        model = load(path)
    assert "UNEXPECTED" not in caplog.text
    check_saved(model, path, tmp_path / "out")


def test_the_layers_outlive_the_files(tmp_path):
    """On the CPU Transformers hands out views of mapped files."""
    path = rewritten(modelopt("Llama"), tmp_path / "in")
    layer = load(path).model.layers[0].mlp.up_proj
    before = layer.weight.clone()
    with (path / "model.safetensors").open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(size // 4)
        file.write(bytes(size - size // 4))
    assert torch.equal(layer.weight, before)


def test_sharded_checkpoints_load_and_save(tmp_path):
    model = load(modelopt("Llama"))
    model.save_pretrained(tmp_path / "out", max_shard_size="20KB")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert torch.equal(tiny_models.logits(load(tmp_path / "out")), tiny_models.logits(model))


@pytest.mark.parametrize("config", ["FP8_DEFAULT_CFG", "NVFP4_DEFAULT_CFG"])
def test_codes_are_not_converted_where_a_model_keeps_modules_in_fp32(monkeypatch, config):
    monkeypatch.setattr(transformers.LlamaForCausalLM, "_keep_in_fp32_modules_strict", {"up_proj"})
    model = load(modelopt("Llama", config))
    expected = reference("Llama", modelopt("Llama", config))
    assert kl(model, expected) < 1e-4


def test_the_caller_may_pin_activations_against_the_checkpoint():
    from fp4dispatch.integrations.transformers import Fp4DispatchConfig

    path = modelopt("Llama", "W4A16_NVFP4_CFG")
    model = load(path, quantization_config=Fp4DispatchConfig(activation="any", backend="reference"))
    assert {(layer.activation, layer.backend) for layer in quantised_modules(model).values()} == {("any", "reference")}


def test_static_activation_scales_of_fused_layers_are_saved_for_each(tmp_path):
    from fp4dispatch.integrations.transformers import Fp4DispatchConfig

    path = modelopt("Llama")
    apart, fused = load(path), load(path, quantization_config=Fp4DispatchConfig(fuse=True))
    layer = fused.model.layers[0].self_attn.qkv_proj
    assert torch.equal(layer.input_scale, apart.model.layers[0].self_attn.k_proj.input_scale)
    torch.testing.assert_close(tiny_models.logits(fused), tiny_models.logits(apart))
    fused.save_pretrained(tmp_path / "out")
    stored, saved = (load_file(p / "model.safetensors") for p in (path, tmp_path / "out"))
    assert saved.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(saved[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def test_a_tied_head_stays_tied_and_a_quantised_one_is_untied(tmp_path):
    tied = load(modelopt("Gemma-3 text"))
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    path = rewritten(modelopt("Gemma-3 text"), tmp_path / "in", ignore=[])
    tensors = load_file(path / "model.safetensors")
    head = FP4Linear.from_linear(source("Gemma-3 text").lm_head).state_dict()
    tensors |= {f"lm_head.{name}": tensor for name, tensor in head.items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    model = load(path)
    assert isinstance(model.lm_head, FP4Linear)
    assert model.config.tie_word_embeddings is False
    model.tie_weights()
    assert torch.equal(model.lm_head.weight, head["weight"])
    check_saved(model, path, tmp_path / "out")


def test_a_base_model_and_a_new_head():
    base = transformers.AutoModel.from_pretrained(modelopt("Llama"))
    assert len(quantised_modules(base)) == 14
    head = transformers.AutoModelForSequenceClassification.from_pretrained(modelopt("Llama"))
    assert len(quantised_modules(head)) == 14


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3-MoE"])
def test_experts_stay_in_16_bits_and_this_is_said(tmp_path, name, caplog):
    path = modelopt(name, leave="*experts*")
    with caplog.at_level(logging.WARNING, "fp4dispatch"):
        model = load(path)
    assert "tensors of experts" in caplog.text
    assert "stay in bfloat16" in caplog.text
    assert model.model.layers[0].mlp.experts.down_proj.dtype == torch.bfloat16
    assert len(quantised_modules(model)) == 8
    check_saved(model, path, tmp_path / "out")


def test_the_report_names_layers_and_what_was_left_alone():
    import fp4dispatch

    model = load(modelopt("Mixtral", leave="*experts*"))
    found = fp4dispatch.report(model, large=0)
    assert {(g.name, g.count, g.format) for g in found.groups} == {
        (f"model.layers.*.self_attn.{name}_proj", 2, "nvfp4") for name in "qkvo"
    }
    assert all(group.backend == "reference (bf16)" and group.reason for group in found.groups)
    left = {one.name: one for one in found.left}
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.layers.*.mlp.gate.weight"} < left.keys()
    assert "experts in one tensor" in left["model.layers.*.mlp.experts.gate_up_proj"].reason
    assert left["model.layers.*.mlp.experts.gate_up_proj"].nbytes == 2 * 4 * 192 * 64 * 2
    named = sum(part.nbytes for part in (*found.groups, *found.left))
    assert found.model_bytes == named + found.small_bytes
    assert json.loads(json.dumps(found.to_dict()))["left"]
    assert all("experts.gate_up_proj" in text for text in (found.to_html(), str(found)))


def test_quantised_experts_are_refused_by_name():
    with pytest.raises(CheckpointUnsupportedError, match=r"experts\.0.*quantised experts are not supported yet"):
        load(modelopt("Mixtral"))


# Generating and compiling.


def test_it_generates_with_a_static_cache():
    model = load(modelopt("Llama"))
    expected = model.generate(IDS, max_new_tokens=8, do_sample=False)
    found = model.generate(IDS, max_new_tokens=8, do_sample=False, cache_implementation="static")
    assert torch.equal(found, expected)
    assert model.hf_quantizer.is_compileable


def test_it_compiles_as_one_graph():
    torch._dynamo.reset()
    model = load(modelopt("Llama"))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        found = compiled(IDS).logits.float()
    torch.testing.assert_close(found, tiny_models.logits(model), rtol=2e-2, atol=2e-2)


def test_device_map():
    pytest.importorskip("accelerate", reason="accelerate, which Transformers needs for device_map, is not installed")
    path = modelopt("Llama")
    model = load(path, device_map="cpu")
    assert torch.equal(tiny_models.logits(model), tiny_models.logits(load(path)))
    assert torch.equal(tiny_models.logits(load(path, device_map="auto")), tiny_models.logits(model))


# Refusals.


def edited(tmp_path, edit):
    path = rewritten(modelopt("Llama"), tmp_path / "in")
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


LAYER = "model.layers.1.mlp.up_proj"
DAMAGE = {
    "no scale": (lambda t: t.pop(f"{LAYER}.weight_scale"), "up_proj.weight_scale' is missing"),
    "no global scale": (lambda t: t.pop(f"{LAYER}.weight_scale_2"), "up_proj.weight_scale_2' is missing"),
    "no layer": (lambda t: [t.pop(k) for k in list(t) if k.startswith(LAYER)], "up_proj.weight' is missing"),
    "no shard of a fused format": (lambda t: t.update({f"{LAYER}.weight": torch.zeros(96, 31, dtype=torch.uint8)}),
                                   "expected U8"),
    "zero scale": (lambda t: t[f"{LAYER}.weight_scale_2"].zero_(), "found the scale 0.0"),
    "NaN": (lambda t: t[f"{LAYER}.weight_scale"].view(torch.uint8).fill_(127), "up_proj.weight_scale"),
    "16 bits": (lambda t: [t.pop(f"{LAYER}.{k}") for k in ("weight_scale", "weight_scale_2", "input_scale")]
                and t.update({f"{LAYER}.weight": torch.zeros(96, 64, dtype=torch.bfloat16)}),
                "holds it unquantised"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoints_are_refused(tmp_path, damage):
    edit, says = DAMAGE[damage]
    with pytest.raises(CheckpointError, match=says):
        load(edited(tmp_path, edit))


def test_truncated_shards_are_refused(tmp_path):
    load(modelopt("Llama")).save_pretrained(tmp_path / "out", max_shard_size="20KB")
    shard = sorted((tmp_path / "out").glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        load(tmp_path / "out")
    shard.unlink()
    with pytest.raises((CheckpointError, OSError)):
        load(tmp_path / "out")


@pytest.mark.parametrize("algo", ["W4A16_AWQ", "MXFP8", None])
def test_unknown_algorithms_are_refused(tmp_path, algo):
    with pytest.raises(CheckpointUnsupportedError, match=f"quant_algo {algo!r} is not supported"):
        load(rewritten(modelopt("Llama"), tmp_path / "in", quant_algo=algo))


def test_a_configuration_of_another_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="do not belong together"):
        load(rewritten(modelopt("Llama"), tmp_path / "in", quant_algo="FP8"))


def test_other_dtypes_and_tensor_parallelism_are_refused():
    with pytest.raises(InputError, match=r"dtype=torch.float64; need"):
        load(modelopt("Llama"), dtype=torch.float64)
    from fp4dispatch.integrations.transformers import Fp4DispatchConfig, Fp4DispatchHfQuantizer

    model = source("Llama")
    model.config.distributed_config = type("Parallel", (), {"tp_size": 2})()
    with pytest.raises(InputError, match="tensor parallelism of Transformers"):
        Fp4DispatchHfQuantizer(Fp4DispatchConfig()).update_parallel_plan(model, {})


def test_without_registration_transformers_cannot_read_it(monkeypatch):
    """What the integration is for; and that these tests go through it."""
    from transformers.quantizers import auto

    for mapping in (auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING):
        monkeypatch.delitem(mapping, "modelopt")
    with pytest.raises(RuntimeError):
        load(modelopt("Llama"))


def test_hf_quant_config_is_read_too(tmp_path):
    path = rewritten(modelopt("Llama"), tmp_path / "in")
    config = json.loads((modelopt("Llama") / "hf_quant_config.json").read_text())
    config["quantization"]["exclude_modules"] = []
    (path / "hf_quant_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="disagrees"):
        load(path)
    assert plain("Llama").is_dir()
