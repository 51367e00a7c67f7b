"""replace_linears and warmup."""

import pytest
import torch
from torch import nn

from fp4dispatch.errors import FormatError, InputError
from fp4dispatch.models.choose_layers import EXCLUDE
from fp4dispatch.models.linear import FP4Linear, FP8Linear
from fp4dispatch.models.replace import replace_linears, warmup
from fp4dispatch.models.replacing.replaceable import HEAD


class Block(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim, bias=False)
        self.odd = nn.Linear(20, dim)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.layers = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(64, 100, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.layers:
            x = x + block.out(block.qkv(x)[..., :64])
        return self.lm_head(x)


def model(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return Model().to(dtype)


def kinds(m):
    return {name: type(x).__name__ for name, x in m.named_modules() if "Linear" in type(x).__name__}


def test_replaces_in_place_and_reports():
    m = model()
    ids = torch.arange(8)
    before = m(ids)
    report = replace_linears(m)
    assert [layer.name for layer in report.layers] == [f"layers.{i}.{n}" for i in (0, 1) for n in ("qkv", "out")]
    assert dict(report.skipped) == {
        "layers.0.odd": "in_features=20 is not a multiple of 16, the NVFP4 block",
        "layers.1.odd": "in_features=20 is not a multiple of 16, the NVFP4 block",
        "lm_head": "excluded by name",
    }
    assert isinstance(m.layers[0].qkv, FP4Linear)
    assert type(m.lm_head) is nn.Linear
    assert torch.nn.functional.cosine_similarity(m(ids).flatten(), before.flatten(), dim=0) > 0.97
    first = report.layers[0]
    assert (first.bytes_before, first.bytes_after) == (192 * 64 * 2 + 384, 192 * 64 // 2 + 192 * 4 + 4 + 384)
    assert report.bytes_after == sum(layer.bytes_after for layer in report.layers) < 0.35 * report.bytes_before
    assert first.backend == "reference (bf16)"
    assert "slow reference backend" in first.reason
    text = str(report)
    row = next(line for line in text.splitlines() if line.startswith("layers.*.qkv")).split()
    assert row[:6] == ["layers.*.qkv", "2", "nvfp4", "192", "x", "64"]
    assert float(row[6]) == round(2 * first.bytes_before / 1e6, 2)
    assert "layers.0.qkv" not in text
    assert "left alone: layers.*.odd: in_features=20 is not a multiple of 16, the NVFP4 block (2 of these)" in text
    assert "left alone: lm_head: excluded by name" in text
    data = report.to_dict()
    assert data["layers"][0]["format"] == "nvfp4"
    assert data["skipped"][0]["name"] == "layers.0.odd"


def test_layers_that_differ_are_not_grouped():
    m = model()
    m.layers[1].qkv = nn.Linear(64, 208)
    rows = [line.split()[:6] for line in str(replace_linears(m)).splitlines() if line.startswith("layers.*.qkv")]
    assert [(row[1], row[3]) for row in rows] == [("1", "192"), ("1", "208")]


def test_format_is_another_name_of_config():
    assert {layer.format for layer in replace_linears(model(), format="fp8_row").layers} == {"fp8_row"}
    with pytest.raises(InputError, match="mean the same"):
        replace_linears(model(), "fp8", format="fp8_row")


def test_long_work_shows_its_progress(monkeypatch, capsys):
    monkeypatch.setattr("fp4dispatch.machine.progress.SECONDS_BETWEEN_LINES", 0.0)
    replace_linears(model())
    assert "quantising: 1 of 4 layers" in capsys.readouterr().err
    replace_linears(model(), progress=lambda *_: None)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("config", "scaling"), [("fp8", "tensor"), ("fp8_row", "row"), ("fp8_block", "block128")])
def test_fp8_configs_take_any_size(config, scaling):
    m = model()
    report = replace_linears(m, config)
    assert len(report.layers) == 6
    assert {x.scaling for x in m.modules() if isinstance(x, FP8Linear)} == {scaling}


@pytest.mark.parametrize(
    ("kwargs", "replaced"),
    [
        ({"include": "*.qkv"}, {"layers.0.qkv", "layers.1.qkv"}),
        ({"include": ["re:layers\\.0\\..*"]}, {"layers.0.qkv", "layers.0.out"}),
        ({"exclude": ["layers.1.*", "lm_head"]}, {"layers.0.qkv", "layers.0.out"}),
        ({"exclude": ()}, {"layers.0.qkv", "layers.0.out", "layers.1.qkv", "layers.1.out", "lm_head"}),
        ({"config": {"*.qkv": "nvfp4", "re:.*out": None}}, {"layers.0.qkv", "layers.1.qkv"}),
    ],
)
def test_patterns(kwargs, replaced):
    m = model()
    replace_linears(m, **kwargs)
    assert {n for n, k in kinds(m).items() if k != "Linear"} == replaced


def test_a_mapping_mixes_formats_first_match_first():
    m = model()
    replace_linears(m, {"*.qkv": "fp8_row", "*": "nvfp4"})
    assert kinds(m)["layers.0.qkv"] == "FP8Linear"
    assert kinds(m)["layers.0.out"] == "FP4Linear"


def test_an_error_leaves_the_model_untouched():
    m = model()
    with torch.no_grad():
        m.layers[1].out.weight[0, 0] = float("inf")
    before = {n: id(x) for n, x in m.named_modules()}
    with pytest.raises(FormatError, match=r"layers\.1\.out"):
        replace_linears(m)
    assert {n: id(x) for n, x in m.named_modules()} == before


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"config": "nvfp8"}, "Did you mean"),
        ({"config": {"*": "int4"}}, "int4"),
        ({"include": "re:("}, "regular expression"),
        ({"activation": "int8"}, "int8"),
    ],
)
def test_bad_requests_are_refused(kwargs, says):
    m = model()
    with pytest.raises(InputError, match=says):
        replace_linears(m, **kwargs)
    assert set(kinds(m).values()) == {"Linear"}


def test_models_without_anything_to_replace_are_refused():
    with pytest.raises(InputError, match=r"no nn\.Linear"):
        replace_linears(nn.Sequential(nn.ReLU()))
    with pytest.raises(InputError, match="from_linear"):
        replace_linears(nn.Linear(16, 16))
    with torch.device("meta"):
        m = Model()
    with pytest.raises(InputError, match="meta device"):
        replace_linears(m)


def test_tied_weights_are_left_alone():
    m = model()
    m.lm_head.weight = m.embed.weight
    report = replace_linears(m, exclude=())
    assert dict(report.skipped)["lm_head"] == "its weight is tied to embed"
    assert m.lm_head.weight is m.embed.weight


def test_shared_modules_stay_shared():
    m = model()
    m.layers[1].qkv = m.layers[0].qkv
    report = replace_linears(m)
    assert m.layers[1].qkv is m.layers[0].qkv
    assert isinstance(m.layers[0].qkv, FP4Linear)
    assert sum(layer.name.endswith("qkv") for layer in report.layers) == 1


def test_parents_that_read_the_weight_and_subclasses_are_left_alone():
    class Special(nn.Linear):
        pass

    m = nn.ModuleDict(
        {"encoder": nn.TransformerEncoderLayer(32, 2, 64), "plain": nn.Linear(32, 32), "special": Special(32, 32)}
    ).eval()
    report = replace_linears(m)
    assert [layer.name for layer in report.layers] == ["plain"]
    reasons = dict(report.skipped)
    assert "TransformerEncoderLayer" in reasons["encoder.linear1"]
    assert reasons["special"] == "is a Special, not a plain nn.Linear"
    with torch.inference_mode():
        m["encoder"](torch.randn(1, 3, 32))


@pytest.mark.parametrize(
    ("held", "what"),
    [
        (lambda layer: [layer, nn.ReLU()], "a list"),
        (lambda layer: (layer,), "a tuple"),
        (lambda layer: {"first": layer}, "a dict"),
        (lambda layer: layer, "a plain attribute"),
    ],
)
def test_layers_that_a_module_also_keeps_beside_its_children_are_left_alone(held, what):
    """As in Mask2Former: its forward goes through a list, so a layer put in place of the child would not run."""
    block = nn.Module()
    block.child = nn.Linear(64, 64)
    vars(block)["kept"] = held(block.child)
    model = nn.Sequential(block, nn.Linear(64, 64))
    old = block.child
    report = replace_linears(model, "nvfp4")
    assert report.skipped == (("0.child", f"is also in 0.kept, {what} that would keep the old layer"),)
    assert [layer.name for layer in report.layers] == ["1"]
    assert block.child is old


def test_twice_is_once():
    m = model()
    replace_linears(m)
    before = {n: id(x) for n, x in m.named_modules()}
    assert replace_linears(m).layers == ()
    assert {n: id(x) for n, x in m.named_modules()} == before


def test_hooks_and_mode_move_along():
    m, seen = model().eval(), []
    m.layers[0].qkv.register_forward_hook(lambda module, args, out: seen.append(type(module).__name__))
    replace_linears(m)
    m(torch.arange(3))
    assert seen == ["FP4Linear"]
    assert not m.layers[0].qkv.training


def test_progress_is_told():
    calls = []
    replace_linears(model(), progress=lambda done, total, name: calls.append((done, total, name)))
    assert calls[0] == (0, 4, "layers.0.qkv")
    assert calls[-1] == (4, 4, "")


def test_warmup_plans_each_shape_once(monkeypatch):
    from fp4dispatch.run import routes

    m = model()
    replace_linears(m)
    launches, real = [], routes.launch
    monkeypatch.setattr(routes, "launch", lambda *args: launches.append(args) or real(*args))
    assert warmup(m, tokens=[1, 8, 8]) == 4  # two shapes (one with bias), two numbers of tokens
    assert len(launches) == 4
    with pytest.raises(InputError, match="at least 1"):
        warmup(m, tokens=[0])
    with pytest.raises(InputError, match="replace_linears"):
        warmup(model(), tokens=[1])


def test_warmup_is_refused_during_capture(monkeypatch):
    from fp4dispatch.errors import CaptureError
    from fp4dispatch.machine import capture

    m = model()
    replace_linears(m)
    monkeypatch.setattr(capture, "is_capturing", lambda: True)
    with pytest.raises(CaptureError):
        warmup(m, tokens=[1])


class Mixture(nn.Module):
    """What chooses and weighs experts under the names of transformers: JetMoe, Qwen2-MoE and others, AFMoE."""

    def __init__(self):
        super().__init__()
        self.router = nn.ModuleDict({"layer": nn.Linear(64, 4)})
        self.mlp = nn.ModuleDict(
            {"gate": nn.Linear(64, 4), "shared_expert_gate": nn.Linear(64, 1), "gate_proj": nn.Linear(64, 64)}
        )
        self.lm_head = nn.Linear(64, 128)


def test_what_chooses_experts_stays_as_it_is_unless_it_is_asked_for():
    model = Mixture()
    report = replace_linears(model, "nvfp4")
    assert [layer.name for layer in report.layers] == ["mlp.gate_proj"]
    left = dict(report.skipped)
    assert set(left) == {"router.layer", "mlp.gate", "mlp.shared_expert_gate", "lm_head"}
    assert set(left.values()) == {"excluded by name"}
    assert report.notes == ()
    every = replace_linears(Mixture(), "nvfp4", exclude=())
    assert len(every.layers) == 5


def test_a_model_whose_layers_are_all_quantised_says_so():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)).to(torch.bfloat16)
    assert len(replace_linears(model).layers) == 2
    with pytest.raises(InputError, match=r"no nn\.Linear left: 2 layers are quantised already"):
        replace_linears(model)


def rwkv():
    """A model of transformers whose head is called ``head``."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "attention_hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = transformers.RwkvConfig(**sizes, vocab_size=128, context_length=64, bos_token_id=0, eos_token_id=0)
    return transformers.RwkvForCausalLM(config).to(torch.bfloat16).eval()


@pytest.mark.parametrize("exclude", [EXCLUDE, list(EXCLUDE)], ids=["default", "from JSON"])
def test_an_output_head_of_any_name_stays_by_default(exclude):
    model = rwkv()
    report = replace_linears(model, exclude=exclude)
    assert dict(report.skipped)["head"] == HEAD
    assert type(model.head) is nn.Linear
    assert isinstance(model.rwkv.blocks[0].attention.key, FP4Linear)
    wrapped = nn.ModuleDict({"inner": rwkv()})
    assert dict(replace_linears(wrapped).skipped)["inner.head"] == HEAD


@pytest.mark.parametrize("asked", [{"lm_head": True}, {"exclude": ()}, {"exclude": ["*.key"]}], ids=str)
def test_an_output_head_of_any_name_is_quantised_on_request(asked):
    model = rwkv()
    report = replace_linears(model, **asked)
    assert isinstance(model.head, FP4Linear)
    assert "head" in [layer.name for layer in report.layers]
    again = replace_linears(model, **asked)  # the head is done already, and not missing
    assert again.layers == ()


def fsmt(ffn_dim=128):
    """A model of transformers that names an embedding as its output embeddings."""
    transformers = pytest.importorskip("transformers")
    each = (("layers", 1), ("ffn_dim", ffn_dim))
    sizes = {f"{part}_{size}": n for part in ("encoder", "decoder") for size, n in each}
    config = transformers.FSMTConfig(**sizes, langs=["en", "de"], src_vocab_size=160, tgt_vocab_size=192, d_model=64)
    return transformers.FSMTForConditionalGeneration(config).to(torch.bfloat16).eval()


@pytest.mark.parametrize("ffn_dim", [128, 192])
def test_where_a_model_names_an_embedding_the_layer_that_its_class_ties_to_it_is_the_head(ffn_dim):
    """With 192, the size of the vocabulary, fc1 has the shape of the head."""
    model, name = fsmt(ffn_dim), "model.decoder.output_projection"
    assert isinstance(model.get_output_embeddings(), nn.Embedding)
    model.other = nn.Bilinear(64, 64, 192)  # it has outputs, but inputs of two names
    report = replace_linears(model)
    assert dict(report.skipped) == {name: HEAD}
    assert type(model.model.decoder.output_projection) is nn.Linear
    assert "model.decoder.layers.0.fc1" in [layer.name for layer in report.layers]
    model, asked = fsmt(ffn_dim), {"exclude": ["*.fc1"], "lm_head": True}
    assert name in [layer.name for layer in replace_linears(model, **asked).layers]
    assert replace_linears(model, **asked).layers == (), "it is done already, and not missing"


def test_a_model_without_output_embeddings_has_no_head():
    class Raises(Block):
        def get_output_embeddings(self):
            raise NotImplementedError

    class Returns(Block):
        def get_output_embeddings(self):
            return None

    for kind in (Raises, Returns):
        assert [layer.name for layer in replace_linears(kind().to(torch.bfloat16)).layers] == ["qkv", "out"]


class Attention(nn.Module):
    """Projections that engines fuse: they get one scale."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        for name, factor in (("q_proj", 1), ("k_proj", 2), ("v_proj", 3)):
            linear = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
            linear.weight.data.mul_(factor)
            setattr(self, name, linear)


@pytest.mark.parametrize(("fmt", "kind"), [("nvfp4", FP4Linear), ("fp8", FP8Linear)])
def test_layers_that_share_a_scale_can_be_given_others(fmt, kind):
    m, x = Attention(), torch.randn(4, 64).bfloat16()
    replace_linears(m, fmt)
    tensors = list(m.state_dict().values())
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
    other = Attention(seed=1)
    for name, linear in list(other.named_children()):
        setattr(other, name, kind.from_linear(linear))
    m.load_state_dict(other.state_dict())
    for name, layer in other.named_children():
        assert torch.equal(getattr(m, name)(x), layer(x))


@pytest.mark.parametrize(("kind", "name"), [(FP4Linear, "global_scale"), (FP8Linear, "scale")])
def test_a_scale_that_is_given_stays_the_callers(kind, name):
    linear, scale, x = nn.Linear(64, 32, dtype=torch.bfloat16), torch.tensor(0.01), torch.randn(2, 64).bfloat16()
    layer = kind.from_linear(linear, **{name: scale})
    want = layer(x)
    scale.mul_(2)
    assert torch.equal(layer(x), want)
    with pytest.raises(InputError, match=f"{name} is a float; need a torch.Tensor"):
        kind.from_linear(linear, **{name: 0.01})


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.c = nn.Linear(64, 32), nn.Linear(64, 32)
        self.b = self.a


def test_a_layer_with_two_names_stays_one_layer():
    m = Twice()
    replace_linears(m)
    assert isinstance(m.a, FP4Linear)
    assert m.b is m.a
    m = Twice()
    report = replace_linears(m, exclude=["b"])
    assert (type(m.a), m.b is m.a, type(m.c)) == (nn.Linear, True, FP4Linear)
    assert dict(report.skipped) == {"a": "it is also b, which is excluded by name", "b": "excluded by name"}
    m = Twice()
    with pytest.raises(InputError, match="one layer is asked for in several formats: a nvfp4, b fp8"):
        replace_linears(m, {"a": "nvfp4", "b": "fp8"})
    assert type(m.a) is nn.Linear


def test_a_bias_that_no_layer_takes_leaves_its_layer():
    m = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32))
    m[1].bias = nn.Parameter(m[1].bias.detach().double())
    report = replace_linears(m)
    assert dict(report.skipped) == {"1": "bias is torch.float64"}
    assert [type(layer) for layer in m] == [FP4Linear, nn.Linear]
