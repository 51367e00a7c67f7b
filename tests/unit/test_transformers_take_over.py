"""compressed-tensors and Hugging Face FP8 through Transformers with ``register(take_over=...)``: 4 and 8 bits stay."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

import fp4dispatch
from fp4dispatch.checkpoints import save_quantized
from fp4dispatch.errors import CheckpointError, InputError
from fp4dispatch.models.replace import replace_linears
from tests import tiny_models
from tests.transformers_cases import IDS, compressed, kl, quantised_modules, reference, rewritten, source, taken_over

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def taken():
    with taken_over("compressed-tensors", "fp8"):
        fp4dispatch.register(take_over=["compressed-tensors"])  # a second time changes nothing
        yield


def load(path, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(path, **options)


def check_saved(model, path, out):
    model.save_pretrained(out)
    stored, saved = (load_file(p / "model.safetensors") for p in (path, out))
    assert saved.keys() == stored.keys()
    for name, tensor in stored.items():
        assert (saved[name].shape, saved[name].dtype) == (tensor.shape, tensor.dtype), name
        assert torch.equal(saved[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    assert torch.equal(tiny_models.logits(load(out)), tiny_models.logits(model))


@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize(
    ("name", "preset", "activation"),
    [
        ("Llama", "NVFP4A16", "bf16"),
        ("Llama", "NVFP4", "any"),
        ("Llama", "FP8_DYNAMIC", "any"),
        ("Llama", "FP8", "any"),
        ("Phi-3", "NVFP4A16", "bf16"),
        ("Gemma-3 text", "NVFP4A16", "bf16"),
    ],
)
def test_what_compressed_tensors_wrote(tmp_path, name, preset, activation):
    path = compressed(name, preset)
    expected = reference(name, path)
    model = load(path, dtype=torch.float32)
    layers = quantised_modules(model)
    assert len(layers) == sum(key.endswith("weight_scale") for key in load_file(path / "model.safetensors"))
    assert {layer.activation for layer in layers.values()} == {activation}
    torch.testing.assert_close(tiny_models.logits(model), tiny_models.logits(expected), rtol=1e-4, atol=1e-4)
    assert kl(source(name, torch.float32), expected) > 20 * kl(model, expected)
    assert set(quantised_modules(model)) == set(layers), "still quantised after the first forward"
    model = load(path)
    model.generate(IDS, max_new_tokens=2, do_sample=False, cache_implementation="static")
    check_saved(model, path, tmp_path / "out")


@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize("preset", ["NVFP4A16", "NVFP4", "FP8_DYNAMIC"])
def test_fused_layers_are_saved_as_they_were_stored(tmp_path, preset):
    from fp4dispatch.integrations.transformers import Fp4DispatchConfig

    path = compressed("Llama", preset)
    apart = load(path, dtype=torch.float32)
    fused = load(path, dtype=torch.float32, quantization_config=Fp4DispatchConfig(fuse=True))
    report = fused.hf_quantizer.report.fusing
    assert len(report.fused) == 4, report
    torch.testing.assert_close(tiny_models.logits(fused), tiny_models.logits(apart), rtol=1e-4, atol=1e-5)
    fused.save_pretrained(tmp_path / "out")
    stored, saved = (load_file(p / "model.safetensors") for p in (path, tmp_path / "out"))
    assert saved.keys() == stored.keys()
    for name in (name for name in stored if "_proj." in name):
        assert torch.equal(saved[name].reshape(-1).view(torch.uint8), stored[name].reshape(-1).view(torch.uint8)), name


def test_without_it_transformers_decompresses():
    """What this is for. Both have the same numbers."""
    path = compressed("Llama")
    theirs = load(path)
    assert kl(theirs, reference("Llama", path)) < 1e-4
    assert not quantised_modules(theirs)
    assert theirs.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16


@pytest.mark.usefixtures("taken")
def test_what_transformers_can_read_and_we_cannot_stays_with_it():
    model = load(compressed("Llama", "W8A8"))
    assert type(model.hf_quantizer).__name__ == "CompressedTensorsHfQuantizer"
    assert torch.isfinite(tiny_models.logits(model)).all()


@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize("format", ["fp8_block", "fp8_row", "fp8"])
def test_hugging_face_fp8(tmp_path, format):
    original = source("Llama", torch.float32)
    replace_linears(original, format)
    save_quantized(original, tmp_path / "in", "fp8")
    model = load(tmp_path / "in", dtype=torch.float32)
    assert len(quantised_modules(model)) == 14
    torch.testing.assert_close(tiny_models.logits(model), tiny_models.logits(original), rtol=1e-4, atol=1e-4)
    check_saved(model, tmp_path / "in", tmp_path / "out")


@pytest.mark.usefixtures("taken")
def test_damage_is_refused(tmp_path):
    path = rewritten(compressed("Llama"), tmp_path / "in")
    tensors = load_file(path / "model.safetensors")
    tensors.pop("model.layers.0.mlp.up_proj.weight_global_scale")
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="weight_global_scale' is missing"):
        load(path)


@pytest.mark.usefixtures("taken")
def test_a_written_scale_is_saved(tmp_path):
    """The bits of the checkpoint are only for scales that nobody changed."""
    model = load(compressed("Llama"))
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight_scale_2.mul_(2)
    model.save_pretrained(tmp_path / "out")
    assert torch.equal(tiny_models.logits(load(tmp_path / "out")), tiny_models.logits(model))


@pytest.mark.parametrize("names", ["fp8", ["awq"], ["fp8", "modelopt"]])
def test_other_names_are_refused(names):
    with pytest.raises(InputError, match="need a list of names from 'compressed-tensors', 'fp8'"):
        fp4dispatch.register(take_over=names)
