"""The end-to-end script on a tiny model: it runs, its decoding is that of the model, and it can say WRONG."""

from __future__ import annotations

import functools
import json

import pytest
import torch

pytest.importorskip("transformers", reason="transformers (extra `demo`) is not installed")

from bench import decoder
from fp4dispatch.benchmark.check import relative_error
from fp4dispatch.models.quantized_linear import QuantizedLinear

CPU = torch.device("cpu")
VOCABULARY = decoder.TINY["vocab_size"]


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


@pytest.fixture
def model():
    return decoder.build(decoder.TINY, CPU)


def prompts(batch, length=9):
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def test_the_sizes_are_those_of_the_model():
    from fp4dispatch.benchmark.problems.shapes import catalogue

    layers = {layer.name: (layer.n, layer.k) for layer in catalogue().models[0].layers}
    s = decoder.SIZES
    head = s["hidden_size"] // s["num_attention_heads"]
    assert layers["qkv"] == ((s["num_attention_heads"] + 2 * s["num_key_value_heads"]) * head, s["hidden_size"])
    assert layers["gate_up"] == (2 * s["intermediate_size"], s["hidden_size"])
    assert s["num_hidden_layers"] == catalogue().models[0].depth


def test_weights_are_scaled_and_the_same_every_time(model):
    again = decoder.build(decoder.TINY, CPU)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, again.get_parameter(name)), name
        if parameter.ndim > 1:
            into_residual = "o_proj" in name or "down_proj" in name
            wanted = 1.0 if "embed" in name else decoder.INIT_STD / (2 if into_residual else 1)  # sqrt(2 * 2 layers)
            assert float(parameter.float().std()) == pytest.approx(wanted, rel=0.1), name
    assert torch.get_default_dtype() == torch.float32
    logits = decoder.probe(model, CPU, VOCABULARY)
    assert 0.05 < float(logits.std()) < 5


@pytest.mark.parametrize("batch", [1, 3])
def test_decoding_is_the_model_without_a_cache(model, batch):
    model = model.float()
    steps = decoder.Decoder(model, prompts(batch), 16)
    found = decoder.run_steps(steps, steps.step, 4)
    tokens = prompts(batch)
    for logits, token in [(None, None), *found]:
        whole = model(input_ids=tokens, use_cache=False).logits[:, -1]
        if logits is not None:
            assert relative_error(logits, whole) < 1e-4
            assert torch.equal(token, whole.argmax(-1, keepdim=True))
        tokens = torch.cat([tokens, whole.argmax(-1, keepdim=True)], 1)


def test_starting_again_forgets_everything(model):
    steps = decoder.Decoder(model, prompts(2), 16)
    first = decoder.run_steps(steps, steps.step, 3)
    assert decoder.difference(decoder.run_steps(steps, steps.step, 3), first) == 0


def test_fused_layers_and_the_head_are_formats_of_their_own(model):
    both = {"fuse": True, "head": True}
    assert decoder.variants(["bf16", "nvfp4:bf16"], **both) == [
        *("bf16", "nvfp4:bf16", "nvfp4:bf16+fuse", "nvfp4:bf16+head", "nvfp4:bf16+fuse+head")
    ]
    assert decoder.variants(["bf16", "fp8_row", "fp8_row"], fuse=False, head=False) == ["bf16", "fp8_row"]
    decoder.quantise(model, "nvfp4+fuse+head")
    names = {name.rpartition(".")[2] for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)}
    assert names == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"}
    with pytest.raises(SystemExit, match="heads is not known"):
        decoder.quantise(model, "nvfp4+heads")


def test_fused_layers_are_measured_in_the_same_run(capsys, tmp_path):
    small = ["--tiny", "--device", "cpu", "--formats", "nvfp4", "--batches", "1", "--steps", "1", "--prefill", "8"]
    assert decoder.main([*small, "--fuse", "--json", str(tmp_path / "out.json"), "--commit", "abc"]) == 0
    apart, fused = json.loads((tmp_path / "out.json").read_text())["formats"]
    assert [apart["format"], fused["format"]] == ["nvfp4", "nvfp4+fuse"]
    assert sum(fused["backends"].values()) == 4 / 7 * sum(apart["backends"].values())
    assert fused["logits"]["relative_error"] < 0.02
    assert "| nvfp4+fuse |" in capsys.readouterr().out


def test_the_state_stays_where_a_graph_reads_and_writes_it(model):
    def places():
        layer = steps.cache.layers[0]
        return [t.data_ptr() for t in (steps.token, steps.logits, layer.keys, layer.values, layer.cumulative_length)]

    steps = decoder.Decoder(model, prompts(2), 16)
    steps.start()
    before = places()
    steps.step()
    steps.start()
    assert places() == before


def test_a_step_never_waits_for_the_device(model):
    """Under fake tensors, reading a value back on the host raises: what would break a capture."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    steps = decoder.Decoder(model, prompts(2), 16)
    steps.start()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        steps.token = mode.from_tensor(steps.token)
        steps.logits = mode.from_tensor(steps.logits)
        for layer in steps.cache.layers:
            layer.keys, layer.values = mode.from_tensor(layer.keys), mode.from_tensor(layer.values)
            layer.cumulative_length = mode.from_tensor(layer.cumulative_length)
        steps.step()
        with pytest.raises(Exception, match="_local_scalar_dense"):
            steps.token.sum().item()  # what the mode would have caught


def test_quantising_replaces_every_linear_layer_but_the_head(model):
    before = decoder.held_bytes(model)
    backends = decoder.quantise(model, "nvfp4:fp8")
    assert backends == {"reference (fp8)": 14}
    left = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    assert left == ["lm_head"]
    assert sum(isinstance(m, QuantizedLinear) for m in model.modules()) == 14
    assert decoder.held_bytes(model) < before
    assert decoder.quantise(decoder.build(decoder.TINY, CPU), "bf16") == {}


def test_logits_errors():
    torch.manual_seed(0)
    reference = torch.randn(8, 100)
    same = decoder.against(reference, reference)
    assert same == {
        "relative_error": 0.0,
        "cosine": pytest.approx(1.0),
        "top1": 1.0,
        "kl": pytest.approx(0.0, abs=1e-6),
    }
    other = decoder.against(reference + 0.1 * torch.randn(8, 100), reference)
    assert other["relative_error"] == pytest.approx(0.1, rel=0.1)
    assert 0 < other["kl"] < 0.02


@pytest.mark.parametrize("off", [0.03, 0.1])
@pytest.mark.parametrize("runs", [2, 1], ids=["the graph", "the second run without one"])
def test_a_wrong_step_gets_no_speed(model, monkeypatch, off, runs):
    real = decoder.Decoder._advance
    count = [0]

    def later_wrong(self, tokens):
        real(self, tokens)
        count[0] += 1
        if count[0] > runs * (1 + decoder.CHECKED_STEPS):
            self.logits.mul_(1 + off)

    monkeypatch.setattr(decoder.Decoder, "_advance", later_wrong)
    found = decoder.decode(model, 1, 2, CPU, VOCABULARY)
    assert found["status"] == "WRONG"
    assert found["off"] == pytest.approx(off, rel=0.1)
    assert found["eager_off"] == (0 if runs == 2 else found["off"])
    assert "tokens_per_s" not in found


@pytest.mark.parametrize("wrong", ["eager_off", "off"])
def test_one_bit_of_one_logit_is_enough(model, monkeypatch, wrong):
    runs = iter([False, wrong == "eager_off", wrong == "off"])

    def run_steps(steps, step, count):
        found = real(steps, step, count)
        if next(runs):
            found[-1][0].view(torch.int32)[0, 7] += 1
        return found

    real = decoder.run_steps
    monkeypatch.setattr(decoder, "run_steps", run_steps)
    found = decoder.decode(model, 1, 2, CPU, VOCABULARY)
    assert found["status"] == "WRONG"
    assert {name: 0 < found[name] < 1e-6 for name in ("eager_off", "off")} == {
        name: name == wrong for name in ("eager_off", "off")
    }


@pytest.mark.parametrize("before", [True, False])
def test_attention_repeats_its_bits_while_the_script_runs(monkeypatch, before):
    """cuDNN's does not; what the process had is there again afterwards."""
    seen = []

    def decode(model, batch, *_):
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return {"batch": batch, "status": "ok", "tokens_per_s": 1}

    monkeypatch.setattr(decoder, "decode", decode)
    monkeypatch.setattr(decoder, "REPEATS", 2)
    process = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(before)
    try:
        words = ["--tiny", "--device", "cpu", "--prefill", "8", "--batches", "1", "--formats", "bf16"]
        assert decoder.main(words) == 0
        assert (seen, torch.backends.cuda.cudnn_sdp_enabled()) == ([False], before)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(process)


def test_what_differs_after_a_different_token_does_not_count():
    a = [(torch.ones(1, 4), torch.tensor([[1]])), (torch.ones(1, 4), torch.tensor([[2]]))]
    b = [(torch.ones(1, 4), torch.tensor([[0]])), (2 * torch.ones(1, 4), torch.tensor([[2]]))]
    assert decoder.difference(a, b) == 0
    assert decoder.difference(a[1:], b[1:]) == pytest.approx(0.5)


def test_the_script(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(decoder, "REPEATS", 2)
    path = tmp_path / "decoder.json"
    words = ["--tiny", "--device", "cpu", "--prefill", "32", "--steps", "2", "--batches", "1", "2"]
    assert decoder.main([*words, "--json", str(path), "--commit", "abc1234"]) == 0
    document = json.loads(path.read_text())
    assert document["facts"]["commit"] == "abc1234"
    assert [each["format"] for each in document["formats"]] == ["bf16", "fp8_row", "nvfp4"]
    for each in document["formats"]:
        assert each["prefill"]["tokens_per_s"] > 0
        assert [(d["batch"], d["status"], d["graph"]) for d in each["decode"]] == [(1, "ok", False), (2, "ok", False)]
        assert all(d["tokens_per_s"] > 0 for d in each["decode"])
    errors = [each["logits"]["relative_error"] for each in document["formats"]]
    assert errors[0] == 0
    assert 0.001 < errors[1] < errors[2] < 0.1
    sizes = [each["weights_gb"] for each in document["formats"]]
    assert sizes[0] > sizes[1] > sizes[2]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(lines) == 5
    assert len({line.count("|") for line in lines}) == 1
    assert "(1.00x)" in lines[2]


def test_the_script_fails_where_a_step_is_wrong(monkeypatch, capsys):
    wrong = {"batch": 1, "status": "WRONG", "off": 1.0}
    monkeypatch.setattr(decoder, "decode", lambda *a: wrong)
    monkeypatch.setattr(decoder, "REPEATS", 2)
    assert decoder.main(["--tiny", "--device", "cpu", "--prefill", "8", "--batches", "1", "--formats", "bf16"]) == 1
    out = capsys.readouterr().out
    assert "| WRONG |" in out
    assert "('bf16', 1)" in out


def small(monkeypatch, *words):
    monkeypatch.setattr(decoder, "REPEATS", 2)
    monkeypatch.setattr(decoder, "decode", lambda model, batch, *a: {"batch": batch, "status": "ok", "tokens_per_s": 1})
    return decoder.main(["--tiny", "--device", "cpu", "--prefill", "8", "--batches", "1", *words])


def cells(capsys):
    lines = [[c.strip() for c in line.split("|")] for line in capsys.readouterr().out.splitlines() if line[:1] == "|"]
    return {line[1]: dict(zip(lines[0], line, strict=True)) for line in lines}


def test_memory_with_and_without_weights_that_are_held_twice(monkeypatch, capsys, tmp_path):
    """What compact() frees is planted: the reference backend of a CPU holds weights once anyway."""
    order = []

    def compact(model):
        order.append("compact")
        del model.lm_head.spare
        return 8_000_000

    def build(sizes, device, seed=0):
        model = real(sizes, device, seed)
        model.lm_head.register_buffer("spare", torch.zeros(2_000_000))
        return model

    real, prefill = decoder.build, decoder.prefill
    monkeypatch.setattr(decoder, "build", build)
    monkeypatch.setattr(decoder.fp4dispatch, "compact", compact)
    monkeypatch.setattr(decoder.fp4dispatch, "warmup", lambda model, tokens: order.append(tokens))
    monkeypatch.setattr(decoder, "prefill", lambda *a: order.append("prefill") or prefill(*a))
    path = tmp_path / "out.json"
    assert small(monkeypatch, "--formats", "bf16", "nvfp4", "--compact", "--json", str(path)) == 0
    assert order == ["prefill", [1, 8], "compact", "prefill"]  # bound for all that follows, and nothing timed before
    bf16, nvfp4 = json.loads(path.read_text())["formats"]
    assert "compact" not in bf16
    assert nvfp4["compact"]["same"]
    assert nvfp4["weights_gb"] - nvfp4["compact"]["weights_gb"] == pytest.approx(0.008)
    found = cells(capsys)
    assert found["bf16"]["compacted GB"] == "-"
    assert float(found["nvfp4"]["compacted GB"]) == pytest.approx(nvfp4["compact"]["weights_gb"], rel=0.01)
    assert small(monkeypatch, "--formats", "nvfp4") == 0
    assert "compacted GB" not in cells(capsys)["nvfp4"]


def test_weights_that_compact_lost_are_seen(monkeypatch, capsys):
    def compact(model):
        model.model.norm.weight.mul_(1.5)

    monkeypatch.setattr(decoder.fp4dispatch, "compact", compact)
    assert small(monkeypatch, "--formats", "bf16", "nvfp4", "--compact") == 1
    out = capsys.readouterr().out
    assert "compact() changed the logits: ['nvfp4']" in out
    assert "| WRONG |" in out


# ------------------------------------------------------------------------------------------------------------ --compile


@pytest.fixture
def traced(monkeypatch):
    """Dynamo alone: what it traces, and how often, is what can be wrong here."""
    monkeypatch.setattr(decoder.compiled_step, "BACKEND", "eager")
    sizes = decoder.TINY | {"num_hidden_layers": 4}
    # Layers of this width change the stream as much as those of 4096 do.
    std = decoder.INIT_STD * (4096 / sizes["hidden_size"]) ** 0.5
    monkeypatch.setattr(decoder, "TINY", sizes)
    monkeypatch.setattr(decoder, "build", functools.partial(decoder.build, std=std))
    decoder.compiled_step.forget()
    yield
    decoder.compiled_step.forget()


@pytest.mark.parametrize("fmt", ["bf16", "nvfp4+fuse"])
def test_all_layers_share_one_compiled_graph(traced, fmt):
    model = decoder.build(decoder.TINY, CPU)
    decoder.quantise(model, fmt)
    for batch in (1, 3):
        found = decoder.decode(model, batch, 2, CPU, VOCABULARY, True)
        assert found["status"] == "ok"
        assert found["tokens_per_s"] > 0
        # Attention adds the mask in place of choosing by it.
        assert 0 <= found["compiled"]["off"] < 0.02
        assert found["compiled"]["compilations"] == 3  # before the layers, a layer, after them
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == [0, 1, 2, 3]


@pytest.mark.parametrize("part", ["self_attn.o_proj", "mlp.down_proj"])
@pytest.mark.parametrize("fmt", ["bf16", "nvfp4"])
def test_one_wrong_layer_of_a_compiled_step_is_seen(traced, monkeypatch, fmt, part):
    model = decoder.build(decoder.TINY, CPU)
    decoder.quantise(model, fmt)
    piece = model.model.layers[2].get_submodule(part)
    real = decoder.compiled_step.CompiledStep.__call__

    def without_it(step):
        with monkeypatch.context() as patch:
            patch.setattr(piece, "forward", lambda x: x.new_zeros(*x.shape[:-1], piece.out_features))
            real(step)

    monkeypatch.setattr(decoder.compiled_step.CompiledStep, "__call__", without_it)
    found = decoder.decode(model, 1, 2, CPU, VOCABULARY, True)
    assert found["status"] == "WRONG"
    assert found["compiled"]["off"] > 2 * found["compiled"]["tolerance"]
    assert "tokens_per_s" not in found


def test_a_compiled_step_that_chooses_another_token_is_wrong(traced, model, monkeypatch):
    real = decoder.compiled_step._after

    def _after(norm, head, hidden, logits, token):
        real(norm, head, hidden, logits, token)
        token.copy_((-logits).argmax(-1, keepdim=True))

    monkeypatch.setattr(decoder.compiled_step, "_after", _after)
    found = decoder.decode(model, 1, 2, CPU, VOCABULARY, True)
    assert not found["compiled"]["greedy"]
    assert found["status"] == "WRONG"


def test_the_tolerance_is_that_of_the_activations():
    for fmt, wanted in (("bf16", "bf16"), ("nvfp4:bf16", "bf16"), ("nvfp4:fp8", "fp8")):
        model = decoder.build(decoder.TINY, CPU)
        decoder.quantise(model, fmt)
        assert decoder.activations(model, 1) == wanted, fmt


def test_the_script_compiles_and_quantises_the_head_of_the_same_model(traced, monkeypatch, capsys, tmp_path):
    built = []
    real = decoder.build
    monkeypatch.setattr(decoder, "build", lambda *a: built.append(1) or real(*a))
    path = tmp_path / "out.json"
    words = ["--tiny", "--device", "cpu", "--prefill", "0", "--batches", "1", "--steps", "1", "--compile"]
    words += ["--fuse", "--head", "--formats", "bf16", "nvfp4", "--json", str(path)]
    assert decoder.main(words) == 0
    document = json.loads(path.read_text())
    assert (document["compiled"], document["subject"]) == (True, "compiled")
    assert [each["format"] for each in document["formats"]] == ["bf16", "nvfp4", "nvfp4+fuse", "nvfp4+fuse+head"]
    assert len(built) == 3
    made = [each["decode"][0]["compiled"]["compilations"] for each in document["formats"]]
    assert made == [3, 3, 3, 1]  # with the quantised head only what follows the layers is new
    _, fused, head = document["formats"][1:]
    assert sum(head["backends"].values()) == sum(fused["backends"].values()) + 1
    assert head["weights_gb"] < fused["weights_gb"]
    assert "prefill" not in capsys.readouterr().out


def test_a_format_that_fails_loses_nothing_of_the_others(monkeypatch, capsys, tmp_path):
    def quantise(model, fmt, **_):
        if fmt == "nvfp4":
            raise RuntimeError("out of memory\nand so on")
        return real(model, fmt)

    real = decoder.quantise
    monkeypatch.setattr(decoder, "quantise", quantise)
    path = tmp_path / "out.json"
    assert small(monkeypatch, "--formats", "bf16", "nvfp4", "fp8_row", "--json", str(path)) == 1
    assert [each["format"] for each in json.loads(path.read_text())["formats"]] == ["bf16", "fp8_row"]
    assert "FAILED: nvfp4: out of memory" in capsys.readouterr().out
