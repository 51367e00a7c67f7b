"""Nothing is left, random or replaced in silence: whole models through replace, load and ``fp4dispatch quantize``."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from torch import nn

import fp4dispatch
from fp4dispatch.checkpoints import load_quantized, open_checkpoint, quantize_checkpoint, save_quantized
from fp4dispatch.cli import main
from fp4dispatch.errors import CheckpointError, InputError
from fp4dispatch.models.linear import FP4Linear, FP8Linear
from fp4dispatch.models.replace import replace_linears, warmup
from tests.tiny_models import build, logits

QUANTISED = (FP4Linear, FP8Linear)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 64, 32))
        self.norm = nn.Parameter(torch.ones(32))

    def forward(self, x):
        return x + (x @ self.gate_up_proj[0].T)[..., :32] * self.norm


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.q_proj, self.o_proj = nn.Linear(32, 32), nn.Linear(32, 32)
        self.experts = Experts()
        self.lm_head = nn.Linear(32, 50, bias=False)

    def forward(self, ids):
        return self.lm_head(self.experts(self.o_proj(self.q_proj(self.embed(ids)))))


def model():
    torch.manual_seed(0)
    return Model()


# ------------------------------------------------------------------------------------------------------ replace_linears


def test_everything_left_is_named_and_percentages_are_of_the_whole_model():
    m = model()
    whole = sum(p.numel() * 4 for p in m.parameters())
    report = replace_linears(m)
    assert {o.name: o.nbytes for o in report.others} == {"embed.weight": 6400, "experts.gate_up_proj": 32768}
    assert "experts in one tensor [4, 64, 32], which are not supported yet" in str(report)
    assert report.model_bytes_before == whole
    assert report.model_bytes_after == whole - report.bytes_before + report.bytes_after
    assert report.saved_percent == pytest.approx(100 * (1 - report.model_bytes_after / whole))
    assert f"({report.saved_percent:.1f} % saved)" in str(report)
    data = report.to_dict()
    assert data["saved_percent"] == report.saved_percent
    assert data["others"][1]["shape"] == (4, 64, 32)
    assert data["model_bytes_before"] == whole


def test_a_model_in_which_nothing_is_replaced_says_so(caplog):
    transformers = pytest.importorskip("transformers")
    gpt2 = build("GPT-2", transformers)
    with caplog.at_level(logging.WARNING, "fp4dispatch"):
        report = replace_linears(gpt2)
    assert report.layers == ()
    assert sum("Conv1D" in other.reason for other in report.others) == 4
    assert "nothing was replaced" in caplog.text
    assert "transformer.h.*.attn.c_attn.weight" in caplog.text
    with pytest.raises(InputError, match="Conv1D"):
        replace_linears(gpt2.transformer)


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"include": "*.q_prj"}, r"include pattern '\*\.q_prj' names none of the 3 linear layers; nearest: q_proj"),
        ({"include": ["q_proj", "nothing"]}, "include pattern 'nothing' names none"),
        ({"include": "*experts*"}, "names 3 modules or parameters, e.g. 'experts', but no nn.Linear"),
        ({"config": {"w_proj": "fp8", "*": "nvfp4"}}, "config pattern 'w_proj' names none"),
        ({"config": 4}, "config is a int"),
        ({"config": None}, "config is a NoneType"),
        ({"config": {"*": 4}}, "config=4 is not a format"),
        ({"config": {3: "fp8"}}, "need patterns"),
        ({"include": 3}, "include is 3"),
        ({"exclude": None}, "exclude is None"),
        ({"exclude": [None]}, "exclude is"),
        ({"include": b"q"}, "include is b'q'"),
    ],
)
def test_requests_that_choose_nothing_or_are_of_a_wrong_type_are_refused(kwargs, says):
    m = model()
    with pytest.raises(InputError, match=says):
        replace_linears(m, **kwargs)
    assert not any(isinstance(x, QUANTISED) for x in m.modules())


def test_an_exclude_that_names_nothing_is_told():
    report = replace_linears(model(), exclude=["lm_head", "o_prj", "experts"])
    assert [note.partition(";")[0] for note in report.notes] == ["exclude pattern 'o_prj' names nothing in the model"]
    assert "note: exclude pattern 'o_prj'" in str(report)
    assert replace_linears(model()).notes == ()


@pytest.mark.parametrize("wrong", [None, "model", nn.Linear, {}])
def test_what_is_no_module_is_refused(wrong, tmp_path):
    for call in (replace_linears, lambda m: warmup(m, 1), lambda m: load_quantized(m, tmp_path)):
        with pytest.raises(InputError, match=r"need a torch\.nn\.Module"):
            call(wrong)


@pytest.mark.parametrize("tokens", [0, -1, 1.5, True, "16", None, [1, "2"], [[1]], b"1"])
def test_warmup_refuses_what_is_no_number_of_tokens(tokens):
    m = model()
    replace_linears(m)
    if tokens == b"1":  # bytes are numbers, one by one
        assert warmup(m, tokens) == 1
        return
    with pytest.raises(InputError, match="tokens="):
        warmup(m, tokens)


def test_warmup_takes_one_number():
    m = model()
    replace_linears(m)
    assert warmup(m, 16) == warmup(m, [16]) == 1
    with pytest.raises(InputError, match="dtype="):
        warmup(m, 16, torch.int8)


# ---------------------------------------------------------------------------------------------------------- what stays


class Adapter(nn.Linear):
    pass


def odd(kind: str) -> nn.Linear:
    linear = nn.Linear(32, 32)
    if kind == "subclass":
        return Adapter(32, 32)
    if kind == "child":
        linear.lora = nn.Linear(32, 2)
    if kind == "weight_norm":
        with pytest.warns(FutureWarning):
            nn.utils.weight_norm(linear)
    if kind == "parametrize":
        nn.utils.parametrizations.weight_norm(linear)
    if kind == "forward":
        linear.forward = lambda x: x
    if kind == "backward hook":
        linear.register_full_backward_hook(lambda *a: None)
    if kind == "backward pre hook":
        linear.register_full_backward_pre_hook(lambda *a: None)
    if kind == "state_dict hook":
        linear.register_state_dict_post_hook(lambda *a: None)
    if kind == "load hook":
        linear.register_load_state_dict_pre_hook(lambda *a: None)
    if kind == "sparse":
        linear.weight = nn.Parameter(linear.weight.detach().to_sparse_csr(), requires_grad=False)
    if kind == "empty":
        linear.weight = nn.Parameter(torch.empty(0))  # as DeepSpeed leaves the weight of another rank
    if kind == "no outputs":
        return nn.Linear(32, 0)
    if kind == "no inputs":
        return nn.Linear(0, 32)
    if kind == "lazy":
        return nn.LazyLinear(32)
    if kind == "torchao":
        torchao = pytest.importorskip("torchao.quantization")
        torchao.quantize_(linear, torchao.Int8WeightOnlyConfig())
    return linear


KINDS = ["subclass", "child", "weight_norm", "parametrize", "forward", "backward hook", "backward pre hook"]
KINDS += ["state_dict hook", "load hook", "sparse", "empty", "no outputs", "no inputs", "lazy", "torchao"]


@pytest.mark.parametrize("kind", KINDS)
def test_odd_layers_stay_as_they_are(kind):
    m = nn.ModuleDict({"plain": nn.Linear(32, 32), "odd": odd(kind)})
    layer = m["odd"]
    report = replace_linears(m)
    assert m["odd"] is layer
    assert "odd" in dict(report.skipped)
    assert isinstance(m["plain"], FP4Linear)
    fp4dispatch.report(m)


def test_tensors_without_plain_memory_do_not_matter():
    m = nn.Sequential(nn.Linear(32, 32), nn.LazyConv2d(3, 3))
    dense = torch.eye(8)
    for name, sparse in {"coo": dense.to_sparse(), "csr": dense.to_sparse_csr(), "csc": dense.to_sparse_csc()}.items():
        m.register_buffer(name, sparse)
    report = replace_linears(m)
    assert len(report.layers) == 1
    held = 8 * 4 + 2 * 8 * 8, 8 * 4 + (8 + 9) * 8, 8 * 4 + (8 + 9) * 8  # values, and indices of 8 bytes
    assert report.model_bytes_after == report.bytes_after + sum(held)


class Reader(nn.Module):
    """``wo`` is read; MultiheadAttention reads its ``out_proj``."""

    def __init__(self):
        super().__init__()
        self.wi, self.wo = nn.Linear(32, 32), nn.Linear(32, 32)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.special = Adapter(32, 32)

    def forward(self, x):
        x = self.wo(self.wi(x).to(self.wo.weight.dtype))
        return self.special(self.attention(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("form", ["nvfp4", "fp8_block"])
def test_loading_dequantises_what_cannot_be_replaced(tmp_path, caplog, form):
    """A checkpoint of another tool has them quantised: the layer stays, and gets the weight that is meant."""
    torch.manual_seed(0)
    reader = Reader().eval()
    names = ["wi", "wo", "special", "attention.out_proj"]
    plain = nn.ModuleDict({name.replace(".", "/"): nn.Linear(32, 32) for name in names})
    for name in names:
        plain[name.replace(".", "/")].load_state_dict(reader.get_submodule(name).state_dict())
    replace_linears(plain, form)
    meant = {name: plain[name.replace(".", "/")](torch.eye(32)) for name in names}
    source = nn.Module()
    source.attention = nn.Module()
    for name in names:
        parent, _, last = name.rpartition(".")
        setattr(source.get_submodule(parent), last, plain[name.replace(".", "/")])
    source.attention.in_proj_weight = reader.attention.in_proj_weight
    source.attention.in_proj_bias = reader.attention.in_proj_bias
    save_quantized(source, tmp_path / "q", "fp8" if form == "fp8_block" else "modelopt")
    fresh = Reader().eval()
    with caplog.at_level(logging.WARNING, "fp4dispatch"):
        report = load_quantized(fresh, tmp_path / "q")
    assert [layer.name for layer in report.layers] == ["wi"]
    assert {name for name, _ in report.dequantized} == {"wo", "special", "attention.out_proj"}
    assert "wo is stored quantised and was dequantised: Reader.forward reads self.wo.weight.dtype" in caplog.text
    for name in names[1:]:
        layer = fresh.get_submodule(name)
        assert not isinstance(layer, QUANTISED)
        torch.testing.assert_close(nn.functional.linear(torch.eye(32), layer.weight, layer.bias), meant[name])
    with torch.inference_mode():
        assert torch.isfinite(fresh(torch.randn(1, 3, 32))).all()


# --------------------------------------------------------------------------------------------------------------- hooks


def test_hooks_and_attributes_survive_replacing_and_loading(tmp_path):
    def prepare():
        m, seen = model().eval(), []
        layer = m.q_proj
        layer.register_forward_pre_hook(lambda mod, args: seen.append("pre"))
        layer.register_forward_pre_hook(lambda mod, args, kw: seen.append("pre kwargs"), with_kwargs=True)
        layer.register_forward_hook(lambda mod, args, out: seen.append("post"))
        layer.register_forward_hook(lambda mod, args, kw, out: seen.append("post kwargs"), with_kwargs=True)
        layer.register_forward_hook(lambda mod, args, out: seen.append("always"), always_call=True)
        last = layer.register_forward_hook(lambda mod, args, out: seen.append("removed"))
        layer.tag = {"shard": 3}
        return m, seen, last

    first, seen, last = prepare()
    replace_linears(first)
    save_quantized(first, tmp_path / "q")
    second, seen_too, last_too = prepare()
    load_quantized(second, tmp_path / "q")
    for m, calls, handle in ((first, seen, last), (second, seen_too, last_too)):
        assert isinstance(m.q_proj, FP4Linear)
        assert m.q_proj.tag == {"shard": 3}
        assert not m.q_proj.training
        handle.remove()
        m(torch.arange(3))
        assert calls == ["pre", "pre kwargs", "post", "post kwargs", "always"]
        m.o_proj = None  # nothing after it: the call fails
        calls.clear()
        with pytest.raises(Exception, match=r".*"):
            m.q_proj(torch.ones(2, 7))
        assert "always" in calls


# --------------------------------------------------------------------------------------------------------- strict=False


def test_what_a_checkpoint_did_not_fill_is_named_loudly(tmp_path, caplog):
    m = model()
    replace_linears(m)
    save_quantized(m, tmp_path / "q")
    bigger = model()
    bigger.extra = Experts()
    bigger.q_proj.register_buffer("calls", torch.zeros(1))
    with caplog.at_level(logging.WARNING, "fp4dispatch"):
        report = load_quantized(bigger, tmp_path / "q", strict=False)
    assert set(report.missing) == {"extra.gate_up_proj", "extra.norm", "q_proj.calls"}
    assert [name for name, _ in report.dequantized] == ["q_proj"]  # it holds more than weight and bias
    assert "NOT FILLED, still with their old values: 3 parameters" in str(report)
    for name in report.missing:
        assert name in caplog.text
        assert name in str(report)
    with pytest.raises(CheckpointError, match="missing"):
        load_quantized(bigger, tmp_path / "q")


def test_a_bias_that_is_missing_keeps_its_value(tmp_path):
    m = model()
    m.q_proj = nn.Linear(32, 32, bias=False)
    replace_linears(m)
    save_quantized(m, tmp_path / "q")
    other = model()
    bias = other.q_proj.bias.detach().clone()
    report = load_quantized(other, tmp_path / "q", strict=False)
    assert report.missing == ("q_proj.bias",)
    torch.testing.assert_close(other.q_proj.bias, bias.to(other.q_proj.bias.dtype), rtol=0, atol=0)


# ------------------------------------------------------------------------------------------- models of transformers


EXPECTED = {
    "Mixtral": (8, {"block_sparse_moe.experts": "experts", "block_sparse_moe.gate": "Router"}),
    "Qwen3-MoE": (8, {"mlp.experts": "experts", "mlp.gate": "Router"}),
    "DeepSeek-V3": (16, {"mlp.experts": "experts", "mlp.gate": "outer"}),
    "LLaVA": (14, {"mlp.fc1": "outside the language model", "multi_modal_projector.linear_1": "outside"}),
    "Gemma-3": (14, {"mlp.fc1": "outside the language model", "head.attention.out_proj": ""}),
    "Qwen2-VL": (14, {"blocks.0.attn.qkv": "outside the language model", "merger.mlp.0": "outside"}),
    "T5": (14, {"DenseReluDense.wo": "reads self.wo.weight.dtype"}),
    "Mamba": (1, {"mixer.dt_proj": "reads self.dt_proj.weight"}),
}


@pytest.fixture(scope="module", params=EXPECTED)
def stored(request, tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    source = build(request.param, transformers, torch.bfloat16)
    folder = tmp_path_factory.mktemp("model")
    source.save_pretrained(folder)
    return request.param, source, folder


@pytest.mark.parametrize("form", ["modelopt", "fp8-channel", "fp8-block"])
def test_whole_models_are_quantised_told_and_loaded_again(stored, form, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    name, source, folder = stored
    out = tmp_path / "q"
    assert main(["quantize", str(folder), str(out), "--format", form, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    count, kept = EXPECTED[name]
    assert len(report["layers"]) == count
    for end, why in kept.items():
        assert any(layer.endswith(end) and why in text for layer, text in report["skipped"].items()), end

    # Every weight of the checkpoint is quantised or named; the bytes are those of the whole.
    done = {layer["name"] for layer in report["layers"]}
    with open_checkpoint(folder) as checkpoint:
        assert report["bytes_before"] == checkpoint.nbytes
        for tensor in checkpoint:
            module = tensor.rpartition(".")[0]
            if len(checkpoint[tensor].shape) > 1 and module not in done:
                assert any(f"{module}.".startswith(f"{left}.") for left in report["skipped"]), tensor

    model = build(name, transformers, torch.bfloat16)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)  # whatever is not filled shows
    loaded = load_quantized(model, out)
    assert len(loaded.layers) == count
    assert loaded.dequantized == loaded.missing == ()
    stayed = dict(model.named_parameters())
    for key, value in source.named_parameters():  # experts put together in their order, embeddings, the vision tower
        if key in stayed:
            assert torch.equal(stayed[key], value), key
    reference = logits(source)
    assert torch.nn.functional.cosine_similarity(logits(model), reference, dim=-1).min() > 0.85


@pytest.mark.filterwarnings("ignore")
def test_transformers_reads_what_was_written(stored, tmp_path, capsys):
    pytest.importorskip("compressed_tensors")
    name, source, folder = stored
    out = tmp_path / "q"
    assert main(["quantize", str(folder), str(out), "--format", "fp8-channel"]) == 0
    theirs, info = type(source).from_pretrained(out, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(info.values()), info
    assert torch.nn.functional.cosine_similarity(logits(theirs.eval()), logits(source), dim=-1).min() > 0.97, name


def test_conv1d_is_no_linear_layer_even_if_asked_for(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    build("GPT-2", transformers).save_pretrained(tmp_path / "gpt2")
    command = ["quantize", str(tmp_path / "gpt2"), str(tmp_path / "q"), "--format", "fp8"]
    assert main([*command, "--include", "*.c_attn"]) == 1
    assert "Conv1D: its weight is [K, N]" in capsys.readouterr().err


def test_the_vision_tower_is_quantised_if_named(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    build("LLaVA", transformers, torch.bfloat16).save_pretrained(tmp_path / "llava")
    command = ["quantize", str(tmp_path / "llava"), str(tmp_path / "q"), "--format", "fp8-channel", "--json"]
    assert main([*command, "--include", "model.vision_tower.*", "--include", "*.self_attn.*"]) == 0
    report = json.loads(capsys.readouterr().out)
    names = [layer["name"] for layer in report["layers"]]
    assert "vision_tower.encoder.layers.0.mlp.fc1" in names  # named as in transformers, stored as in the file
    assert "language_model.model.layers.0.self_attn.q_proj" in names
    assert "not included" in report["skipped"]["language_model.model.layers.0.mlp.up_proj"]


def test_without_a_model_every_other_weight_is_excluded(tmp_path):
    from safetensors.torch import save_file

    (tmp_path / "in").mkdir()
    tensors = {"a.weight": torch.ones(32, 32), "b.weight": torch.ones(32, 32), "n.weight": torch.ones(32)}
    tensors |= {f"layers.0.x.experts.{i}.w1.weight": torch.ones(32, 32) for i in range(3)}
    save_file(tensors, str(tmp_path / "in" / "model.safetensors"))
    report = quantize_checkpoint(tmp_path / "in", tmp_path / "q", "compressed-tensors", ["a"])
    assert set(report.skipped) == {"b", "layers.0.x.experts"}
    assert report.bytes_left == 4 * 32 * 32 * 4
    assert "3 tensors" in report.skipped["layers.0.x.experts"]
    config = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["b", "layers.0.x.experts", r"re:.*\.x\.experts\..*"]
