"""Quantising while Transformers loads: ``from_pretrained(..., quantization_config=Fp4DispatchConfig())``."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp4dispatch.checkpoints import load_quantized, save_quantized
from fp4dispatch.errors import CheckpointError, InputError, UnknownBackendError
from fp4dispatch.models.linear import FP4Linear
from fp4dispatch.models.replace import replace_linears
from tests import tiny_models
from tests.transformers_cases import IDS, kl, modelopt, plain, quantised_modules, reference, source

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
DENSE = ("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma-3 text", "Phi-3")
MOE = ("Mixtral", "Qwen3-MoE")


@pytest.fixture(autouse=True, scope="module")
def registered():
    import fp4dispatch

    fp4dispatch.register()


def config(*args, **options):
    from fp4dispatch.integrations.transformers import Fp4DispatchConfig

    return Fp4DispatchConfig(*args, **options)


def load(path, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(path, **options)


def states_equal(a, b):
    a, b = a.state_dict(), b.state_dict()
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name].reshape(-1).view(torch.uint8), b[name].reshape(-1).view(torch.uint8)), name


def test_an_output_head_of_another_name_stays_as_it_is(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "input_embedding_size": 32, "output_embedding_size": 64}
    tiny = transformers.RemBertConfig(**sizes, num_hidden_layers=1, num_attention_heads=4, vocab_size=128)
    torch.manual_seed(0)
    transformers.RemBertForMaskedLM(tiny).save_pretrained(tmp_path / "in")
    model = transformers.RemBertForMaskedLM.from_pretrained(tmp_path / "in", quantization_config=config())
    assert type(model.cls.predictions.decoder) is torch.nn.Linear
    assert isinstance(model.cls.predictions.dense, FP4Linear)
    model.save_pretrained(tmp_path / "out")
    again = transformers.RemBertForMaskedLM.from_pretrained(tmp_path / "out")
    states_equal(again, model)


@pytest.mark.parametrize("name", [*DENSE, *MOE])
def test_it_is_what_replace_linears_makes(tmp_path, name):
    """Also the scales that layers share: both see the whole model."""
    model = load(plain(name), quantization_config=config())
    expected = load(plain(name))
    report = replace_linears(expected)
    states_equal(model, expected)
    assert len(quantised_modules(model)) == len(report.layers)
    model.save_pretrained(tmp_path / "out")
    again = load(tmp_path / "out")
    states_equal(again, model)
    assert torch.equal(tiny_models.logits(again), tiny_models.logits(model))


def test_names_that_transformers_changes(tmp_path):
    """A multi-modal model: files and modules have other prefixes. Scales are renamed with their weights."""
    kind = transformers.Gemma3ForConditionalGeneration
    model = kind.from_pretrained(plain("Gemma-3"), quantization_config=config(include="*language_model*"))
    assert all("language_model" in name for name in quantised_modules(model))
    model.save_pretrained(tmp_path / "out")
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert names >= load_file(plain("Gemma-3") / "model.safetensors").keys()
    again = kind.from_pretrained(tmp_path / "out")
    states_equal(again, model)
    assert quantised_modules(again).keys() == quantised_modules(model).keys()


@pytest.mark.parametrize("format", ["fp8", "fp8_row", "fp8_block", {"*.mlp.*": "nvfp4", "*": "fp8_row"}])
def test_formats(tmp_path, format):
    model = load(plain("Llama"), quantization_config=config(format, activation="bf16"))
    expected = load(plain("Llama"))
    replace_linears(expected, format)
    states_equal(model, expected)
    model.save_pretrained(tmp_path / "out")
    again = load(tmp_path / "out")
    states_equal(again, model)
    assert {layer.activation for layer in quantised_modules(again).values()} == {"bf16"}
    other = load(plain("Llama"))
    load_quantized(other, tmp_path / "out")
    states_equal(other, model)


def test_conv1d_of_gpt2(tmp_path):
    model = load(plain("GPT-2"), quantization_config=config(exclude=("lm_head", "*.0.mlp.c_proj")), dtype=torch.float32)
    kinds = {name: type(module).__name__ for name, module in model.named_modules() if ".c_" in name}
    assert kinds == {
        "transformer.h.0.attn.c_attn": "FP4Linear",
        "transformer.h.0.attn.c_proj": "FP4Linear",
        "transformer.h.0.mlp.c_fc": "FP4Linear",
        "transformer.h.0.mlp.c_proj": "Conv1D",
    }
    model.save_pretrained(tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors")["transformer.h.0.attn.c_attn.weight"].shape == (192, 32)
    expected = reference("GPT-2", tmp_path / "out")
    torch.testing.assert_close(tiny_models.logits(model), tiny_models.logits(expected), rtol=1e-4, atol=1e-4)
    assert kl(source("GPT-2", torch.float32), expected) > 100 * kl(model, expected)
    again = load(tmp_path / "out", dtype=torch.float32)
    states_equal(again, model)


def test_sharded_files_and_a_saved_model_for_engines(tmp_path):
    source("Llama").save_pretrained(tmp_path / "in", max_shard_size="40KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 2
    model = load(tmp_path / "in", quantization_config=config())
    states_equal(model, load(plain("Llama"), quantization_config=config()))
    save_quantized(model, tmp_path / "engines", "modelopt")
    assert (
        json.loads((tmp_path / "engines" / "config.json").read_text())["quantization_config"]["quant_algo"]
        == "W4A16_NVFP4"
    )
    states_equal(load(tmp_path / "engines"), model)


def test_it_generates_and_compiles():
    torch._dynamo.reset()
    model = load(plain("Llama"), quantization_config=config())
    found = model.generate(IDS, max_new_tokens=4, do_sample=False, cache_implementation="static")
    assert torch.equal(found, model.generate(IDS, max_new_tokens=4, do_sample=False))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(IDS).logits.float(), tiny_models.logits(model), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", MOE)
def test_experts_stay_and_this_is_said(name, caplog):
    with caplog.at_level(logging.WARNING, "fp4dispatch"):
        model = load(plain(name), quantization_config=config())
    assert "tensors of experts" in caplog.text
    assert model.model.layers[0].mlp.experts.gate_up_proj.dtype == torch.bfloat16


def test_a_tied_head_is_left_alone():
    model = load(plain("Gemma-3 text"), quantization_config=config(exclude=()))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not isinstance(model.lm_head, FP4Linear)


# Models that were quantised in memory.


@pytest.mark.parametrize("format", ["nvfp4", "fp8", "fp8_row", "fp8_block"])
def test_adopted_models_are_saved_so_that_they_load(tmp_path, format):
    from fp4dispatch.integrations.transformers import adopt

    model = load(plain("Llama"))
    replace_linears(model, format)
    adopt(model)
    model.save_pretrained(tmp_path / "out")
    again = load(tmp_path / "out")
    states_equal(again, model)
    assert {type(layer) for layer in quantised_modules(again).values()} != {torch.nn.Linear}
    assert {layer.activation for layer in quantised_modules(again).values()} == {"any"}


def test_what_cannot_be_adopted():
    from fp4dispatch.integrations.transformers import adopt

    model = source("Llama")
    with pytest.raises(InputError, match="with 0 quantised layers"):
        adopt(model)
    with pytest.raises(InputError, match="got a FP4Linear"):
        adopt(FP4Linear.from_linear(torch.nn.Linear(16, 16)))
    replace_linears(model)
    model.model.layers[0].mlp.up_proj.activation = "bf16"
    with pytest.raises(InputError, match="activations as any, bf16"):
        adopt(model)


# Refusals.


def test_a_quantised_checkpoint_is_not_quantised_again(tmp_path):
    for file in modelopt("Llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    without = json.loads((tmp_path / "config.json").read_text())
    without.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(without))
    with pytest.raises(CheckpointError, match="already quantised"):
        load(tmp_path, quantization_config=config())


def test_nan_is_refused(tmp_path):
    source("Llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"up_proj\.weight' holds NaN"):
        load(tmp_path, quantization_config=config())


def test_truncated_and_pickled_files_are_refused(tmp_path):
    source("Llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="truncated"):
        load(tmp_path, quantization_config=config())
    file.unlink()
    torch.save(source("Llama").state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="safetensors"):
        load(tmp_path, quantization_config=config())


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"format": "nvfp5"}, InputError, "'nvfp5' is not a format"),
        ({"include": "*.q_prj"}, InputError, "names none of the"),
        ({"exclude": "*"}, InputError, "no layer to quantise"),
        ({"backend": "no-such"}, UnknownBackendError, "no-such"),
        ({"format": "fp8", "activation": "nvfp4"}, InputError, "does not take activation='nvfp4'"),
    ],
)
def test_wrong_requests_are_refused(options, error, says):
    with pytest.raises(error, match=says):
        load(plain("Llama"), quantization_config=config(**options))


def test_plain_data_says_the_same(tmp_path):
    """Transformers takes a dictionary too."""
    model = load(plain("Llama"), quantization_config={"quant_method": "fp4dispatch", "format": "fp8_row"})
    states_equal(model, load(plain("Llama"), quantization_config=config("fp8_row")))
    with pytest.raises(InputError, match=r"\['fmt'\] are not known; use format"):
        load(plain("Llama"), quantization_config={"quant_method": "fp4dispatch", "fmt": "fp8_row"})
    with pytest.raises(CheckpointError, match="no quantised tensors"):
        load(plain("Llama"), quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"})


def test_what_only_the_caller_says_of_a_quantised_checkpoint(tmp_path):
    """Older exports of ModelOpt say it in hf_quant_config.json alone."""
    for file in modelopt("Llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    said = json.loads((tmp_path / "config.json").read_text())
    block = said.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(said))
    states_equal(load(tmp_path, quantization_config=block), load(modelopt("Llama")))


def test_an_unknown_activation_is_refused():
    with pytest.raises(InputError, match="activation='int8' is not known"):
        config(activation="int8")


def test_a_weight_of_another_shape_is_refused(tmp_path):
    source("Llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(96, 32)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(RuntimeError):
        load(tmp_path, quantization_config=config())
