"""The benchmark's problems: real models, adding up to their published sizes, and a loader that takes nothing else."""

from __future__ import annotations

import pytest

from fp4dispatch import strict_toml
from fp4dispatch.benchmark.problems import models, shapes
from fp4dispatch.errors import FlagsError, InputError

TARGETS = ((4096, 4096), (28672, 4096), (4096, 14336), (8192, 8192), (57344, 8192), (8192, 28672))


@pytest.mark.parametrize("model", [m for m in shapes.catalogue().models if m.parameters], ids=lambda m: m.name)
def test_layers_add_up_to_the_published_number_of_parameters(model):
    total = model.embedding + model.depth * sum(layer.n * layer.k for layer in model.layers)
    assert total / 1e9 == pytest.approx(model.parameters, rel=0.01)


def test_the_models_of_the_contract_are_there():
    models = {model.name: model for model in shapes.catalogue().models}
    assert models["Llama-3.1-8B"].tp == models["Llama-3.1-70B"].tp == (1, 2, 4, 8)
    assert {"Qwen3-8B", "Qwen3-32B", "DeepSeek-V3, dense layer", "all-MiniLM-L6-v2"} < set(models)
    minilm = {(layer.n, layer.k) for layer in models["all-MiniLM-L6-v2"].layers}
    assert minilm == {(384, 384), (1536, 384), (384, 1536)}


@pytest.mark.parametrize(
    ("name", "tp", "qkv", "o", "gate_up", "down"),
    [
        ("Llama-3.1-8B", (1, 2, 4, 8), (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
        ("Llama-3.1-70B", (1, 2, 4, 8), (10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
        ("Qwen3-8B", (1,), (6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)),
        ("Qwen3-32B", (1, 2), (10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600)),
    ],
)
def test_layers_that_follow_from_the_sizes_of_a_model(name, tp, qkv, o, gate_up, down):
    (model,) = (model for model in shapes.catalogue().models if model.name == name)
    assert model.tp == tp
    assert model.layers == (
        shapes.Layer("qkv", *qkv, "n"),
        shapes.Layer("o", *o, "k"),
        shapes.Layer("gate_up", *gate_up, "n"),
        shapes.Layer("down", *down, "k"),
    )


def test_no_model_is_typed_twice():
    rows = strict_toml.load(shapes.FILE)["model"]
    known = {model.name for model in models.models()}
    assert [row["name"] for row in rows if "layers" in row and row["name"] in known] == []
    assert len([row for row in rows if "layers" not in row]) >= 4


def test_suites():
    known = shapes.catalogue()
    assert known.suite("targets").shapes == TARGETS
    full = known.suite("full")
    assert full.shapes[:6] == TARGETS  # what a short budget measures first
    assert len(set(full.shapes)) == len(full.shapes)
    every = {layer.shard(tp) for model in known.models for layer in model.layers for tp in model.tp}
    assert every <= set(full.shapes)
    assert all(k % 16 == 0 for _, k in full.shapes)
    assert full.m[0] == 1
    assert full.m[-1] == 8192
    assert [m for m in full.m if m & (m - 1)] == [3, 17, 33, 65, 129, 333, 1000]


def test_an_unknown_suite_names_the_nearest():
    with pytest.raises(InputError, match="Did you mean targets"):
        shapes.catalogue().suite("target")


def test_shards_and_their_owners():
    layer = shapes.Layer("down", 4096, 14336, "k")
    assert [layer.shard(tp) for tp in (1, 2, 8)] == [(4096, 14336), (4096, 7168), (4096, 1792)]
    assert shapes.Layer("qkv", 6144, 4096, "n").shard(4) == (1536, 4096)
    assert shapes.Layer("q_a", 1536, 7168, "none").shard(8) == (1536, 7168)
    assert "Llama-3.1-70B gate_up TP 2" in shapes.catalogue().owners(28672, 8192)
    assert shapes.catalogue().owners(1, 16) == ()


GOOD = """
[[model]]
name = "A"
source = "https://example.com/a"
tp = [1, 2]
layers = [{ name = "x", n = 64, k = 32, split = "n" }]

[[suite]]
name = "one"
why = "a test"
nk = [[64, 32]]
m = [1, 2]
"""


def load(tmp_path, text):
    path = tmp_path / "shapes.toml"
    path.write_text(text)
    return shapes.load(path)


def test_a_minimal_file(tmp_path):
    found = load(tmp_path, GOOD)
    assert found.models[0].layers[0].shard(2) == (32, 32)
    assert found.suites["one"].shapes == ((64, 32),)


def test_without_nk_a_suite_takes_every_layer(tmp_path):
    assert load(tmp_path, GOOD.replace("nk = [[64, 32]]\n", "")).suites["one"].shapes == ((64, 32), (32, 32))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('name = "A"', 'title = "A"', "unknown key 'title'.*'name' is missing"),
        ('"https://example.com/a"', '"a book"', "source is 'a book'"),
        ("tp = [1, 2]", "tp = []", "positive integers"),
        ("tp = [1, 2]", "tp = [2, 1]", "ascending"),
        ("tp = [1, 2]", "tp = [1, 3]", "cannot be cut into 3 along n"),
        ("n = 64", "n = 0", "positive integers"),
        ("n = 64", "n = 64.0", "n must be int"),
        ('split = "n"', 'split = "m"', "split is 'm'"),
        ('layers = [{ name = "x", n = 64, k = 32, split = "n" }]', "layers = []", "has no layers"),
        ("m = [1, 2]", "m = [2, 1]", "ascending"),
        ("m = [1, 2]", "m = [1, 1]", "ascending"),
        ("m = [1, 2]", "m = [true]", "positive integers"),
        ("nk = [[64, 32]]", "nk = [[64]]", "pairs"),
        ("nk = [[64, 32]]", "nk = []", "at least one"),
        ("nk = [[64, 32]]", 'nk = [[64, 32]]\ncontinues = "two"', "no suite above"),
        ('name = "one"', "name = 1", "name must be str"),
        ("[[suite]]", "[[suites]]", "unknown key 'suites'"),
        ("why", "why not", "not TOML"),
        ("[[model]]\n" + GOOD.partition("[[model]]\n")[2].partition("\n\n")[0], "model = [1]", "model 0"),
    ],
)
def test_anything_else_is_refused(tmp_path, old, new, said):
    assert old in GOOD
    with pytest.raises(FlagsError, match=said):
        load(tmp_path, GOOD.replace(old, new, 1))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('name = "Qwen3-9B"\ntp = [1]', r"\(Qwen3-9B\): has no layers, and is not in models.toml; add the layers"),
        ('name = "Mixtral-8x7B"\ntp = [1]', "has experts in models.toml"),
        ('name = "Qwen2.5-7B"\ntp = [1, 2, 8]', r"\(Qwen2.5-7B\): cannot be cut into 8 equal parts; leave 8 out"),
        ('name = "GLM-4-9B"\ntp = [1, 4]', "cannot be cut into 4 equal parts"),  # 2 heads of keys, each there twice
        ('name = "Qwen3-8B"\ntp = [1]\ndepth = 36', "unknown key 'depth'"),
        ('name = "Qwen3-8B"', "'tp' is missing"),
    ],
)
def test_a_model_without_layers_is_one_of_the_published(tmp_path, row, said):
    with pytest.raises(FlagsError, match=said):
        load(tmp_path, f"[[model]]\n{row}\n{GOOD}")
    found = load(tmp_path, f'[[model]]\nname = "Qwen3-8B"\ntp = [1, 8]\n{GOOD}').models[0]
    (same,) = (model for model in models.models() if model.name == "Qwen3-8B")
    assert (found.source, found.depth, found.embedding, found.parameters) == (
        *(same.source, same.depth, same.embedding, same.parameters),
    )
    assert found.layers[3].shard(8) == (4096, 1536)


@pytest.mark.parametrize("part", ["model", "suite"])
def test_a_name_twice_is_refused(tmp_path, part):
    models, suite = GOOD.split("[[suite]]")
    again = models if part == "model" else "[[suite]]" + suite
    with pytest.raises(FlagsError, match="is there twice"):
        load(tmp_path, GOOD + again if part == "suite" else again + GOOD)
