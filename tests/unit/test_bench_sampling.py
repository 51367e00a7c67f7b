"""Random problems: models that add up to their published sizes, shards, and draws that depend on the seed alone."""

from __future__ import annotations

import collections
import math

import pytest

from fp4dispatch.benchmark.problems import models, sampling
from fp4dispatch.benchmark.problems.models import Dense, Drawn
from fp4dispatch.benchmark.problems.sampling import sample
from fp4dispatch.errors import FlagsError, InputError

LLAMA = next(model for model in models.models() if model.name == "Llama-3.1-8B")


@pytest.mark.parametrize("model", models.models(), ids=lambda m: m.name)
def test_layers_add_up_to_the_published_number_of_parameters(model):
    assert model.total() / 1e9 == pytest.approx(model.parameters, rel=0.005)


def test_there_are_enough_models():
    assert sum(model.intermediate > 0 for model in models.models()) >= 25


def test_shards():
    assert LLAMA.layers(1) == (
        Drawn(6144, 4096, "Llama-3.1-8B qkv"),
        Drawn(4096, 4096, "Llama-3.1-8B o"),
        Drawn(28672, 4096, "Llama-3.1-8B gate_up"),
        Drawn(4096, 14336, "Llama-3.1-8B down"),
    )
    assert LLAMA.layers(8)[0] == Drawn(768, 4096, "Llama-3.1-8B qkv TP 8")
    assert LLAMA.layers(8)[3] == Drawn(4096, 1792, "Llama-3.1-8B down TP 8")
    few = Dense("few", "https://x", 2048, 11008, 16, 2, 128, 1, 1, 1.0)
    assert few.layers(8)[0].n == (2 + 2 * 1) * 128, "each shard has a key and a value head, though there are but two"
    odd = Dense("odd", "https://x", 3584, 18944, 28, 4, 128, 1, 1, 1.0)
    assert odd.layers(8) == (), "28 heads are not cut into 8"
    experts = Dense("experts", "https://x", 2048, 0, 32, 4, 128, 1, 1, 1.0, (768, 128))
    assert [d.owner for d in experts.layers(1)] == ["experts qkv", "experts o"]
    huge = Dense("huge", "https://x", 16384, 53248, 128, 8, 128, 1, 1, 1.0)
    assert [d.owner for d in huge.layers(1)] == ["huge qkv", "huge o"], "the others would take most of a run"


def test_the_seed_alone_decides():
    assert sample(7, 40) == sample(7, 40)
    assert sample(7, 40) != sample(8, 40)
    assert sample(7, 40).problems == 40
    assert sample(7, 41).shapes[:10] == sample(7, 40).shapes
    (_, last) = sample(7, 41).shapes[-1]
    assert len(last) == 1
    assert set(last) < set(sample(7, 44).shapes[-1][1])


def test_draws():
    drawn = sample(1, 800)
    nk = [(layer.n, layer.k) for layer, _ in drawn.shapes]
    assert len(set(nk)) == len(nk)
    assert all(k % 16 == 0 and n % 8 == 0 and n * k <= models.LARGEST for n, k in nk)
    assert all(list(ms) == sorted(set(ms)) and len(ms) == 4 for _, ms in drawn.shapes)
    octaves = collections.Counter(int(math.log2(m)) for _, ms in drawn.shapes for m in ms)
    assert set(octaves) <= set(range(14))
    assert min(octaves[i] for i in range(13)) > 800 / 13 / 2, "log-uniform: as many from 1 to 2 as from 4096 to 8192"
    assert any(layer.n * layer.k < sampling.SMALL for layer, _ in drawn.shapes)
    near = {m for _, ms in sample(3, 90, least_m=17, most_m=24, each=2).shapes for m in ms}
    assert near == set(range(17, 25))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"problems": 0}, "problems=0"),
        ({"problems": 10**6}, "need 1 to"),
        ({"problems": 4, "least_m": 5, "most_m": 7}, "need at least 4 numbers"),
        ({"problems": 4, "least_m": 0}, "M from 0"),
        ({"problems": 4, "least_m": 9, "most_m": 8}, "M from 9 to 8"),
    ],
)
def test_what_cannot_be_drawn_is_refused(given, said):
    with pytest.raises(InputError, match=said):
        sample(1, **given)


GOOD = """
[[model]]
name = "A"
source = "https://example.com/a"
hidden = 64
intermediate = 128
heads = 4
kv_heads = 2
head_dim = 16
depth = 1
embedding = 1024
parameters = 0.001
"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("hidden = 64", "hidden = 0", "hidden is 0"),
        ("hidden = 64", "hidden = 64.0", "hidden must be int"),
        ("intermediate = 128", "intermediate = 0", "intermediate is 0"),
        ("intermediate = 128\n", "", "neither intermediate nor experts"),
        ("intermediate = 128", "experts = [128]", "need .intermediate size, number"),
        ("kv_heads = 2\n", "", "'kv_heads' is missing"),
        ("heads = 4", "head = 4", "unknown key 'head'"),
        ("https://example.com/a", "a book", "source is 'a book'"),
        ("\n[[model]]", GOOD + "\n[[model]]", "A is there twice"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, old, new, said):
    path = tmp_path / "models.toml"
    path.write_text(GOOD)
    assert models.load(path) == (Dense("A", "https://example.com/a", 64, 128, 4, 2, 16, 1, 1024, 0.001),)
    assert old in GOOD
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(FlagsError, match=said):
        models.load(path)
