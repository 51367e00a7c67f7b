"""Tiny models of architectures that do something of their own: with experts, initialisers, tables, conversions."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

import fp4dispatch
from fp4dispatch.checkpoints import load_quantized, save_quantized
from fp4dispatch.cli import main
from fp4dispatch.errors import CheckpointError, CheckpointUnsupportedError, FormatError
from fp4dispatch.models.choose_layers import EXCLUDE
from tests import tiny_models
from tests.transformers_cases import quantised_modules, taken_over

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
IDS = torch.arange(1, 17).view(1, 16)
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@pytest.fixture(autouse=True, scope="module")
def taken():
    with taken_over("compressed-tensors"):
        yield


def llama4(layers=4):
    sizes = {**tiny_models._text(num_hidden_layers=layers), **TOKENS, "intermediate_size_mlp": 96}
    config = transformers.Llama4TextConfig(
        **sizes, num_local_experts=3, num_experts_per_tok=1, interleave_moe_layer_step=2
    )
    return transformers.Llama4ForCausalLM(config)


def t5():
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=128, **sizes))


def modernbert():
    marks = {**TOKENS, "cls_token_id": 1, "sep_token_id": 2}
    config = transformers.ModernBertConfig(vocab_size=128, **SIZES, **marks)
    return transformers.ModernBertForMaskedLM(config)


def wav2vec2():
    convolutions = {"conv_dim": (32, 32), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2}
    more = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "vocab_size": 32}
    return transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**SIZES, **convolutions, **more))


def siglip():
    text = {**SIZES, "vocab_size": 128, "max_position_embeddings": 16}
    return transformers.SiglipModel(
        transformers.SiglipConfig(text_config=text, vision_config={**SIZES, "image_size": 16, "patch_size": 8})
    )


def dinov2():
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 28, "patch_size": 14}
    return transformers.Dinov2Model(transformers.Dinov2Config(**sizes, use_swiglu_ffn=True))


HEADS = {"attention_heads": 4, "key_value_heads": 2}


def marian():
    sides = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 1), ("ffn_dim", 96))}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    more = {"vocab_size": 128, "d_model": 64, "max_position_embeddings": 32, "decoder_start_token_id": 0}
    return transformers.MarianMTModel(transformers.MarianConfig(**sides, **heads, **more, pad_token_id=0))


def llama(**more):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**tiny_models._text(**more)))


def made(build, seed=0):
    torch.manual_seed(seed)
    return build().to(torch.bfloat16).eval()


def quantised(build, path, format="compressed-tensors"):
    """Return the directory of a model that Transformers saved and `fp4dispatch quantize` quantised."""
    made(build).save_pretrained(path / "plain")
    assert main(["quantize", str(path / "plain"), str(path / format), "--format", format]) == 0
    return path / format


def same_tensors(a, b):
    a, b = (dict(model.state_dict()) for model in (a, b))
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), b[name].reshape(-1).view(torch.uint8)), name


# Experts.


def test_experts_in_one_tensor_are_loaded(tmp_path):
    """Transformers takes compressed-tensors to have the experts of Llama 4 one by one, and they would stay random."""
    path = quantised(llama4, tmp_path)
    model = transformers.Llama4ForCausalLM.from_pretrained(path)
    expected = made(llama4, seed=1)
    load_quantized(expected, path)
    same_tensors(model, expected)


def in_turn(model):
    """Give a model of Llama 4 one module an expert, as Transformers does for some quantisers."""
    from transformers.quantizers.base import SequentialLlama4TextExperts

    for layer in model.model.layers:
        if hasattr(layer.feed_forward, "experts"):
            each = SequentialLlama4TextExperts(model.config)
            layer.feed_forward.experts = each.to(torch.bfloat16)
    return model


def test_experts_that_are_stored_one_by_one_are_quantised_layers(tmp_path):
    model = in_turn(made(llama4))
    fp4dispatch.replace_linears(model, activation="bf16")
    save_quantized(model, tmp_path / "in", "compressed-tensors")
    again = transformers.Llama4ForCausalLM.from_pretrained(tmp_path / "in")
    assert sum(".experts." in name for name in quantised_modules(again)) == 2 * 3 * 3
    assert torch.equal(again.model.layers[3].feed_forward.experts[2].up_proj.weight,
                       model.model.layers[3].feed_forward.experts[2].up_proj.weight)  # fmt: skip


def test_experts_that_stay_random_are_refused(tmp_path):
    """One layer has its experts one by one, and another one has them in one tensor."""
    model = in_turn(made(llama4))
    fp4dispatch.replace_linears(model, activation="bf16", exclude=[*EXCLUDE, "*.experts.*"])
    save_quantized(model, tmp_path / "in", "compressed-tensors")
    file = tmp_path / "in" / "model.safetensors"
    tensors = {name: t for name, t in load_file(file).items() if "layers.3.feed_forward.experts" not in name}
    tensors["model.layers.3.feed_forward.experts.down_proj"] = torch.zeros(3, 96, 64, dtype=torch.bfloat16)
    tensors["model.layers.3.feed_forward.experts.gate_up_proj"] = torch.zeros(3, 64, 192, dtype=torch.bfloat16)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"needs 'model\.layers\.3.*experts\.0.*has 'model\.layers\.3.*experts\."):
        transformers.Llama4ForCausalLM.from_pretrained(tmp_path / "in")


# Loading.


@pytest.mark.parametrize("build", [t5, modernbert, wav2vec2, siglip])
def test_initialisers_that_read_weights_of_children_run(tmp_path, build):
    """They run while the layers have ``weight_packed`` and no ``weight``."""
    path = quantised(build, tmp_path)
    kind = type(made(build))
    model = kind.from_pretrained(path)
    assert len(quantised_modules(model)) > 4
    for layer in quantised_modules(model).values():
        assert layer.weight.dtype == torch.uint8
        assert "weight" not in vars(layer)
    other = quantised(build, tmp_path / "again", "modelopt")
    state, expected = (dict(one.state_dict()) for one in (model, kind.from_pretrained(other)))
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        if not name.endswith("weight_scale_2"):  # compressed-tensors stores the reciprocal, rounded
            assert torch.equal(tensor.reshape(-1).view(torch.uint8), expected[name].reshape(-1).view(torch.uint8)), name
    model.save_pretrained(tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == load_file(path / "model.safetensors").keys()


def test_tables_that_a_model_computes_are_not_missing(tmp_path):
    """Marian does not save its sinusoidal positions."""
    path = quantised(marian, tmp_path, "modelopt")
    stored = load_file(path / "model.safetensors")
    assert not any("embed_positions" in name for name in stored)
    model = made(marian, seed=1)
    table = model.model.encoder.embed_positions.weight.clone()
    assert load_quantized(model, path).missing == ()
    assert torch.equal(model.model.encoder.embed_positions.weight, table)
    expected = transformers.MarianMTModel.from_pretrained(path)
    assert expected.hf_quantizer.report.missing == ()
    assert torch.equal(tiny_models.logits(model), tiny_models.logits(expected))
    with torch.device("meta"):
        empty = marian().to(torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"'model\.encoder\.embed_positions\.weight'.* is missing"):
        load_quantized(empty, path)
    learned = made(marian)
    learned.model.encoder.embed_positions.weight.requires_grad_(True)
    with pytest.raises(CheckpointError, match=r"'model\.encoder\.embed_positions\.weight' is missing"):
        load_quantized(learned, path)
    stored.pop("model.encoder.layers.0.final_layer_norm.weight")
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"final_layer_norm\.weight' is missing"):
        load_quantized(made(marian).requires_grad_(False), path)


# Biases.


def biased():
    return llama(attention_bias=True, mlp_bias=True)


def test_a_bias_that_is_not_finite_is_refused(tmp_path):
    name = "model.layers.1.mlp.up_proj.bias"
    path = quantised(biased, tmp_path, "modelopt")
    plain = tmp_path / "plain"
    for folder in (path, plain):
        tensors = load_file(folder / "model.safetensors")
        tensors[name][3] = torch.nan
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"tensor '{re.escape(name)}' holds NaN or Inf"):
        transformers.LlamaForCausalLM.from_pretrained(path)
    from fp4dispatch.integrations.transformers import Fp4DispatchConfig

    with pytest.raises(CheckpointError, match=f"tensor '{re.escape(name)}' holds NaN or Inf"):
        transformers.LlamaForCausalLM.from_pretrained(plain, quantization_config=Fp4DispatchConfig())
    model = transformers.LlamaForCausalLM.from_pretrained(plain)
    with pytest.raises(FormatError, match=r"model\.layers\.1\.mlp\.up_proj: the bias holds NaN or Inf"):
        fp4dispatch.replace_linears(model)
    assert not quantised_modules(model)


# Saving.


def test_weights_that_transformers_converts_are_not_saved_by_it(tmp_path):
    """DINOv2 has gate and up as one tensor in its files: their codes would be put together without their scales."""
    from fp4dispatch.integrations.transformers import Fp4DispatchConfig, adopt

    made(dinov2).save_pretrained(tmp_path / "in")
    model = transformers.Dinov2Model.from_pretrained(tmp_path / "in", quantization_config=Fp4DispatchConfig())
    refused = r"convert 'encoder\.layer\.0\.mlp\.gate_proj\.weight'.*fp4dispatch\.save_quantized"
    with pytest.raises(CheckpointUnsupportedError, match=refused):
        model.save_pretrained(tmp_path / "out")
    assert not any((tmp_path / "out").iterdir())
    replaced = transformers.Dinov2Model.from_pretrained(tmp_path / "in")
    fp4dispatch.replace_linears(replaced)  # gate and up share one scale, though the file has both in one tensor
    same_tensors(model, replaced)
    save_quantized(model, tmp_path / "ours", "modelopt")
    again = transformers.Dinov2Model.from_pretrained(tmp_path / "ours")
    same_tensors(again, model)
    half = transformers.Dinov2Model.from_pretrained(tmp_path / "in")
    fp4dispatch.replace_linears(half, exclude=["*.gate_proj", "*.up_proj"])
    adopt(half)
    half.save_pretrained(tmp_path / "half")
    same_tensors(transformers.Dinov2Model.from_pretrained(tmp_path / "half"), half)


def test_a_conversion_that_asks_for_the_size_of_a_quantised_layer_is_refused(tmp_path, monkeypatch):
    """As that of Molmo 2."""
    from transformers.core_model_loading import Chunk

    from fp4dispatch.integrations.transformers import Fp4DispatchConfig

    made(dinov2).save_pretrained(tmp_path / "in")
    convert = Chunk.convert

    def asks(self, *args, **kwargs):
        kwargs["model"].get_parameter(kwargs["full_layer_name"])
        return convert(self, *args, **kwargs)

    monkeypatch.setattr(Chunk, "convert", asks)
    config = Fp4DispatchConfig()
    with pytest.raises(
        CheckpointUnsupportedError, match=r"gate_proj\.weight' out of .*call fp4dispatch\.replace_linears"
    ):
        transformers.Dinov2Model.from_pretrained(tmp_path / "in", quantization_config=config)


def test_a_model_with_several_text_configurations_is_quantised(tmp_path):
    """MusicGen: Transformers does not say which one of the text encoder and the decoder is the language model."""
    decoder = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "ffn_dim": 96, "num_codebooks": 2}
    audio = {"hidden_size": 16, "num_filters": 4, "codebook_size": 64, "codebook_dim": 16, "upsampling_ratios": [2, 2]}
    config = transformers.MusicgenConfig(
        text_encoder=transformers.T5Config(d_model=64, d_kv=16, d_ff=96, num_layers=1, num_heads=4, vocab_size=128),
        audio_encoder=transformers.EncodecConfig(**audio),
        decoder=transformers.MusicgenDecoderConfig(vocab_size=64, **decoder),
    )
    transformers.MusicgenForConditionalGeneration(config).save_pretrained(tmp_path / "in")
    assert main(["quantize", str(tmp_path / "in"), str(tmp_path / "out"), "--format", "modelopt"]) == 0
    assert "decoder.lm_heads.0.weight_scale" not in load_file(tmp_path / "out" / "model.safetensors")


def inkling2():
    heads = {f"{kind}num_{what}": n for kind in ("", "swa_") for what, n in HEADS.items()}
    sizes = {"vocab_size": 128, "unpadded_vocab_size": 128, "hidden_size": 64, "rel_extent": 32, "num_hidden_layers": 1}
    experts = {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2}
    dims = {"head_dim": 16, "swa_head_dim": 16, "eos_token_id": 1, "layer_types": ["hybrid"]}
    config = transformers.Inkling2TextConfig(**heads, **sizes, **experts, **dims)
    return transformers.Inkling2ForCausalLM(config)


def test_names_that_transformers_does_not_read_back_are_not_saved_by_it(tmp_path):
    """Inkling 2 is stored as ``sconv.weight_proj``: a scale would be read as ``sconv.weight_proj.weight.weight_scale``.

    Its other names are renamed too, and come back.
    """
    from fp4dispatch.integrations.transformers import adopt

    model = made(inkling2).float()  # Transformers loads some of it in float32 anyway
    fp4dispatch.replace_linears(model)
    adopt(model)
    refused = r"k_sconv\.weight_proj\.weight_scale' of .*apart from the rest.*fp4dispatch\.save_quantized"
    with pytest.raises(CheckpointUnsupportedError, match=refused):
        model.save_pretrained(tmp_path / "out")
    assert not any((tmp_path / "out").iterdir())
    save_quantized(model, tmp_path / "ours", "modelopt")
    same_tensors(transformers.Inkling2ForCausalLM.from_pretrained(tmp_path / "ours"), model)
    some = made(inkling2).float()
    fp4dispatch.replace_linears(some, exclude=["*.weight_proj", "lm_head"])
    adopt(some)
    some.save_pretrained(tmp_path / "some")
    same_tensors(transformers.Inkling2ForCausalLM.from_pretrained(tmp_path / "some"), some)


def test_a_quantised_tensor_to_convert_is_refused_in_true_words(tmp_path):
    made(dinov2).save_pretrained(tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    tensors = load_file(file)
    name = "encoder.layer.0.mlp.weights_in.weight"
    n, k = tensors.pop(name).shape
    tensors |= {name: torch.zeros(n, k // 2, dtype=torch.uint8), f"{name}_scale_2": torch.ones(())}
    tensors[f"{name}_scale"] = torch.ones(n, k // 16).to(torch.float8_e4m3fn)
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*attention*"]}
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointUnsupportedError, match="codes and scales cannot be converted") as raised:
        transformers.Dinov2Model.from_pretrained(tmp_path / "in")
    assert "expert" not in str(raised.value)


@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors"])
def test_a_layer_with_two_names_is_saved_once(tmp_path, format):
    def shared():
        model = llama()
        model.model.layers[1].mlp = model.model.layers[0].mlp
        return model

    model = made(shared)
    fp4dispatch.replace_linears(model)
    save_quantized(model, tmp_path / "out", format)
    assert not any("layers.1.mlp" in name for name in load_file(tmp_path / "out" / "model.safetensors"))
    again = made(shared, seed=1)
    load_quantized(again, tmp_path / "out")
    assert again.model.layers[1].mlp is again.model.layers[0].mlp
    torch.testing.assert_close(tiny_models.logits(again), tiny_models.logits(model))


class WithState(transformers.LlamaForCausalLM):
    def get_extra_state(self):
        return {"version": 1}


def test_extra_state_that_is_no_tensor_is_refused(tmp_path):
    model = made(lambda: WithState(transformers.LlamaConfig(**tiny_models._text())))
    fp4dispatch.replace_linears(model)
    with pytest.raises(CheckpointError, match="'_extra_state' of the model is a dict"):
        save_quantized(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_sizes_that_are_tensors_are_numbers(tmp_path):
    """Inkling of transformers computes sizes of layers with torch, and gives them to ``nn.Linear`` as they are."""

    class Odd(transformers.LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            up = self.model.layers[0].mlp.up_proj
            up.in_features, up.out_features = torch.tensor(up.in_features, device="cpu"), torch.tensor(96, device="cpu")

    def odd():
        torch.manual_seed(0)
        return Odd(transformers.LlamaConfig(**tiny_models._text(num_hidden_layers=1))).eval()

    from fp4dispatch.integrations.transformers import Fp4DispatchConfig

    odd().save_pretrained(tmp_path / "plain")
    replaced, loaded = odd(), odd()
    fp4dispatch.replace_linears(replaced)
    save_quantized(replaced, tmp_path / "stored")
    load_quantized(loaded, tmp_path / "stored")
    on_the_fly = Odd.from_pretrained(tmp_path / "plain", quantization_config=Fp4DispatchConfig("nvfp4"))
    with torch.no_grad():
        want = replaced(IDS).logits
        for model in (loaded, Odd.from_pretrained(tmp_path / "stored"), on_the_fly):
            assert len(quantised_modules(model)) == 7
            assert torch.equal(model(IDS).logits, want)
