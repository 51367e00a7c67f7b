"""NVFP4 directories that llm-compressor wrote: through Transformers and ``load_quantized``, beside an fp32 reference.

The directories are stored (``tests/data/llmcompressor``), because llm-compressor needs an older Transformers than the
integration. Where it is installed, it writes them again.
"""

from __future__ import annotations

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

import fp4dispatch
from fp4dispatch.errors import CheckpointError, CheckpointUnsupportedError
from tests import tiny_models
from tests.llmcompressor_cases import CASES, STORED, source, write
from tests.transformers_cases import IDS, kl, quantised_modules, reference, taken_over

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
DENSE = ("llama-nvfp4", "llama-nvfp4a16", "qwen3-nvfp4", "gemma3-nvfp4a16", "phi3-nvfp4")


@pytest.fixture
def taken():
    with taken_over("compressed-tensors"):
        yield


def load(path, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(path, **options)


def test_the_directories_are_as_the_tool_wrote_them():
    for name, (*_, scheme, ignore) in CASES.items():
        config = json.loads((STORED / name / "config.json").read_text("utf-8"))["quantization_config"]
        group = config["config_groups"]["group_0"]
        assert (config["quant_method"], config["format"]) == ("compressed-tensors", "nvfp4-pack-quantized")
        assert (group["input_activations"] is None) == (scheme == "NVFP4A16"), name
        assert "lm_head" in config["ignore"], (name, ignore)
    assert sum(file.stat().st_size for file in STORED.rglob("*") if file.is_file()) < 200_000


@pytest.mark.parametrize("name", CASES)
def test_llmcompressor_writes_them(tmp_path, name):
    pytest.importorskip("llmcompressor", reason="llm-compressor is not installed (it needs an older Transformers)")
    write(name, tmp_path / name)
    stored, written = (load_file(folder / name / "model.safetensors") for folder in (STORED, tmp_path))
    assert stored.keys() == written.keys()
    for key, tensor in stored.items():
        assert torch.equal(tensor.view(torch.uint8), written[key].view(torch.uint8)), key
    configs = [json.loads((folder / name / "config.json").read_text("utf-8")) for folder in (STORED, tmp_path)]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]


@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize("name", DENSE)
def test_through_transformers(tmp_path, name):
    model = load(STORED / name, dtype=torch.float32)
    expected = reference("", STORED / name, source(name, torch.float32))
    layers = quantised_modules(model)
    stored = load_file(STORED / name / "model.safetensors")
    assert len(layers) == sum(key.endswith("weight_packed") for key in stored)
    assert {layer.activation for layer in layers.values()} == {"bf16" if "a16" in name else "any"}
    assert {layer.input_scale is None for layer in layers.values()} == {"a16" in name}
    assert model.hf_quantizer.report.missing == ()
    torch.testing.assert_close(tiny_models.logits(model), tiny_models.logits(expected), rtol=1e-4, atol=1e-4)
    assert kl(source(name, torch.float32), expected) > 20 * kl(model, expected), "as far as rounding to fp4"
    found = model.generate(IDS, max_new_tokens=4, do_sample=False)
    assert torch.equal(found, expected.generate(IDS, max_new_tokens=4, do_sample=False))
    assert quantised_modules(model).keys() == layers.keys(), "still 4 bits after forwards"

    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == stored.keys()
    for key, tensor in stored.items():
        assert saved[key].shape == tensor.shape, key
        assert torch.equal(saved[key].to(tensor.dtype).view(torch.uint8), tensor.view(torch.uint8)), key


@pytest.mark.parametrize("name", DENSE)
def test_through_load_quantized(name):
    model = source(name, torch.float32)
    before = tiny_models.logits(model)
    report = fp4dispatch.load_quantized(model, STORED / name)
    expected = reference("", STORED / name, source(name, torch.float32))
    assert len(report.layers) == len(quantised_modules(model)) > 0
    torch.testing.assert_close(tiny_models.logits(model), tiny_models.logits(expected), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(before, tiny_models.logits(expected), rtol=1e-4, atol=1e-4)


def test_without_taking_over_transformers_has_the_same_numbers_in_16_bits():
    pytest.importorskip("compressed_tensors")
    theirs = load(STORED / "llama-nvfp4a16")
    expected = reference("", STORED / "llama-nvfp4a16", source("llama-nvfp4a16", torch.float32))
    assert kl(theirs, expected) < 1e-4
    assert not quantised_modules(theirs)


# Experts: never random values in their place.


@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize("name", ["mixtral-nvfp4a16", "qwen3moe-nvfp4a16"])
def test_quantised_experts_are_refused(name):
    said = r"needs 'model\.layers\.0\.mlp\.experts\.gate_up_proj'.*experts\.0\..*quantised experts are not supported"
    with pytest.raises(CheckpointUnsupportedError, match=said):
        load(STORED / name)
    with pytest.raises(CheckpointUnsupportedError, match=said):
        fp4dispatch.load_quantized(source(name, torch.float32), STORED / name)


@pytest.mark.usefixtures("taken")
def test_quantised_experts_with_names_that_transformers_converts_are_refused(tmp_path):
    """As older Transformers wrote them: w1, w2 and w3."""
    tensors = load_file(STORED / "mixtral-nvfp4a16" / "model.safetensors")
    names = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    renamed = {}
    for key, tensor in tensors.items():
        for long, short in names.items():
            key = key.replace(f"experts.0.{long}", f"experts.0.{short}").replace(
                f"experts.1.{long}", f"experts.1.{short}"
            )
        renamed[key] = tensor
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((STORED / "mixtral-nvfp4a16" / "config.json").read_bytes())
    with pytest.raises(CheckpointUnsupportedError, match=r"experts\.0\.w\d.*quantised experts are not supported"):
        load(tmp_path)


@pytest.mark.usefixtures("taken")
def test_experts_in_16_bits_under_other_names_are_refused_and_load_under_known_ones(tmp_path, caplog):
    """llm-compressor 0.14 writes Mixtral's experts as gate_proj, up_proj and down_proj: Transformers knows w1 to w3."""
    said = r"experts\.0\.\w+_proj\.weight' \(BF16 .* a name that transformers does not put there"
    with pytest.raises(CheckpointError, match=said):
        load(STORED / "mixtral-attention")
    tensors = load_file(STORED / "mixtral-attention" / "model.safetensors")
    for long, short in {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}.items():
        tensors = {k.replace(f".{long}.", f".{short}.") if "experts" in k else k: t for k, t in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((STORED / "mixtral-attention" / "config.json").read_bytes())
    with caplog.at_level(logging.WARNING, "fp4dispatch"):
        model = load(tmp_path)
    assert "2 tensors of experts" in caplog.text
    assert "stay in bfloat16" in caplog.text
    assert len(quantised_modules(model)) == 4
    original = source("mixtral-attention")
    key = "model.layers.0.mlp.experts.gate_up_proj"
    assert torch.equal(model.state_dict()[key], original.state_dict()[key])
