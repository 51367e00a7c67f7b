"""``replace_linears(lm_head=True)``: the output head on request, tied or not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp4dispatch
from fp4dispatch.errors import InputError
from fp4dispatch.models.linear import FP4Linear, FP8Linear
from fp4dispatch.models.replacing.replaceable import HEAD
from tests import tiny_models
from tests.transformers_cases import taken_over

transformers = pytest.importorskip("transformers", reason="transformers (extra `demo`) is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")


def model(tied=False):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**tiny_models._text(), tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(config).eval()


def logits(made):
    return tiny_models.logits(made)


@pytest.mark.parametrize(("fmt", "kind"), [("nvfp4", FP4Linear), ("fp8_row", FP8Linear)])
def test_the_head_is_quantised_on_request_only(fmt, kind):
    made = model()
    weight = made.lm_head.weight.detach().clone()
    assert dict(fp4dispatch.replace_linears(made, fmt).skipped) == {"lm_head": HEAD}
    report = fp4dispatch.replace_linears(made, fmt, lm_head=True)  # the other layers are quantised already
    assert [layer.name for layer in report.layers] == ["lm_head"]
    assert isinstance(made.lm_head, kind)
    alone = kind.from_linear(linear(weight), **({} if fmt == "nvfp4" else {"scaling": "row"}))
    x = torch.randn(3, 64)
    torch.testing.assert_close(made.lm_head(x), alone(x))
    again = model()
    assert fp4dispatch.replace_linears(again, fmt, lm_head=True).layers[-1].name == "lm_head"
    torch.testing.assert_close(logits(again), logits(made))
    assert fp4dispatch.replace_linears(model(), fmt, lm_head=True, exclude="*.mlp.*").layers[-1].name == "lm_head"
    assert fp4dispatch.replace_linears(model(), fmt, lm_head=True, include="*.mlp.*").layers[-1].name == "lm_head"


def musicgen():
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "ffn_dim": 96, "num_codebooks": 2}
    return transformers.MusicgenForCausalLM(transformers.MusicgenDecoderConfig(vocab_size=96, **sizes))


def dia():
    return tiny_models.dia(transformers)


@pytest.mark.parametrize(("build", "heads"), [(musicgen, ["lm_heads.0", "lm_heads.1"]), (dia, ["logits_dense"])])
def test_heads_that_a_model_has_in_a_list_or_does_not_name_stay_too(build, heads):
    made = build().eval()
    report = fp4dispatch.replace_linears(made)
    assert dict(report.skipped) == dict.fromkeys(heads, HEAD)
    assert [layer.name for layer in fp4dispatch.replace_linears(made, lm_head=True).layers] == heads
    with pytest.raises(InputError, match=r"has no nn\.Linear left"):
        fp4dispatch.replace_linears(made, lm_head=True)


@pytest.mark.parametrize("generates", [True, lambda: True])
def test_models_of_others_that_say_that_they_generate_have_no_head(generates):
    made = nn.Sequential(nn.Linear(64, 96))
    made.can_generate = generates
    assert [layer.name for layer in fp4dispatch.replace_linears(made).layers] == ["0"]


def linear(weight):
    made = nn.Linear(*weight.shape[::-1], bias=False, device="meta", dtype=weight.dtype)
    made.weight = nn.Parameter(weight)
    return made


def test_a_tied_head_is_untied_and_this_is_said(tmp_path):
    from fp4dispatch.integrations.transformers import adopt

    made = model(tied=True)
    assert dict(fp4dispatch.replace_linears(made).skipped) == {"lm_head": HEAD}
    assert dict(fp4dispatch.replace_linears(made, exclude=()).skipped) == {
        "lm_head": "its weight is tied to model.embed_tokens"
    }
    embedding = made.model.embed_tokens.weight
    before = embedding.detach().clone()
    report = fp4dispatch.replace_linears(made, lm_head=True)
    assert report.notes == (
        "lm_head was tied to model.embed_tokens, and has nvfp4 weights of its own now, besides the 0.03 MB that the "
        "embedding keeps",
    )
    assert "note: lm_head was tied" in str(report)
    assert made.model.embed_tokens.weight is embedding
    assert torch.equal(embedding, before)
    assert made.config.tie_word_embeddings is False
    want = logits(made)
    made.tie_weights()
    assert isinstance(made.lm_head, FP4Linear)
    adopt(made)
    made.save_pretrained(tmp_path / "saved")
    with taken_over():
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert isinstance(again.lm_head, FP4Linear)
    assert torch.equal(again.model.embed_tokens.weight, before)
    torch.testing.assert_close(logits(again), want)
    fp4dispatch.save_quantized(made, tmp_path / "modelopt", "modelopt")
    loaded = model()
    fp4dispatch.load_quantized(loaded, tmp_path / "modelopt")
    torch.testing.assert_close(logits(loaded), want)


class NoHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(32, 32)


def _nan(made):
    made.lm_head.weight.data[0, 0] = torch.nan


def _odd(made):
    made.lm_head = nn.Linear(24, 128)


def _hooked(made):
    made.lm_head.register_full_backward_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("make", "options", "says"),
    [
        (NoHead, {}, "lm_head=True, but NoHead has no linear layer of that name"),
        (model, {"exclude": "lm_head"}, "lm_head cannot be quantised: config or exclude leaves it out"),
        (model, {"config": {"*.mlp.*": "nvfp4"}}, "lm_head cannot be quantised: config or exclude leaves it out"),
        (lambda: (made := model(), _odd(made))[0], {}, "in_features=24 is not a multiple of 16"),
        (lambda: (made := model(), _hooked(made))[0], {}, "has backward hooks"),
    ],
)
def test_a_head_that_cannot_be_quantised_is_refused(make, options, says):
    made = make()
    with pytest.raises(InputError, match=says):
        fp4dispatch.replace_linears(made, lm_head=True, **options)
    assert not any(isinstance(module, (FP4Linear, FP8Linear)) for module in made.modules())


def test_a_tie_stays_if_the_weights_cannot_be_quantised():
    made = model(tied=True)
    _nan(made)
    with pytest.raises(fp4dispatch.FormatError, match="lm_head"):
        fp4dispatch.replace_linears(made, lm_head=True, include="lm_head")
    assert made.config.tie_word_embeddings is True
    assert made.lm_head.weight is made.model.embed_tokens.weight


_ENCODER = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}


def t5(**more):
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=128, **sizes, **more))


TIED = {
    "BERT": lambda: transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=128, **_ENCODER)),
    "RoBERTa": lambda: transformers.RobertaForMaskedLM(transformers.RobertaConfig(vocab_size=128, **_ENCODER)),
    "DeBERTa-v2": lambda: transformers.DebertaV2ForMaskedLM(
        transformers.DebertaV2Config(vocab_size=128, **_ENCODER, type_vocab_size=0)
    ),
    "T5": t5,
    "T5 1.1": lambda: t5(tie_word_embeddings=False, feed_forward_proj="gated-gelu"),
}


@pytest.mark.parametrize("name", TIED)
def test_ties_of_weights_and_biases_are_forgotten(tmp_path, name):
    """The head of BERT shares its bias too. T5 ties its embeddings, whatever its configuration says."""
    from fp4dispatch.integrations.transformers import adopt

    torch.manual_seed(0)
    made = TIED[name]().eval()
    head = made.get_output_embeddings()
    if head.bias is not None:
        head.bias.data.normal_()
    place = next(where for where, module in made.named_modules() if module is head)
    before, scales = logits(made), getattr(made.config, "scale_decoder_outputs", None)
    fp4dispatch.replace_linears(made, {place: "nvfp4"}, lm_head=True, activation="bf16")
    want = logits(made)
    torch.testing.assert_close(want, before, rtol=0.2, atol=0.3 * float(before.std()))  # T5's own scale
    made.tie_weights()
    assert isinstance(made.get_output_embeddings(), FP4Linear)
    assert torch.equal(logits(made), want)
    adopt(made)
    made.save_pretrained(tmp_path / "saved")
    save = fp4dispatch.save_quantized(made, tmp_path / "modelopt", "modelopt")
    assert save
    with taken_over():
        for folder in ("saved", "modelopt"):
            again = type(made).from_pretrained(tmp_path / folder)
            again.tie_weights()
            assert isinstance(again.get_output_embeddings(), FP4Linear)
            assert torch.equal(logits(again), want)
            assert getattr(again.config, "scale_decoder_outputs", None) == scales
    fresh = TIED[name]().eval()
    fp4dispatch.load_quantized(fresh, tmp_path / "modelopt")
    fresh.tie_weights()
    assert torch.equal(logits(fresh), want)
    if name.startswith("T5"):
        assert made.encoder.embed_tokens.weight is made.shared.weight
