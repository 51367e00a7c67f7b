"""Names matched with patterns: compressed-tensors' meaning, in linear time, and a refusal for what cannot be."""

from __future__ import annotations

import contextlib
import random
import re
import sys
import time
from fnmatch import fnmatchcase

import pytest

from fp4dispatch.checkpoints.config.patterns import MAX_TRIED, any_matches, matches
from fp4dispatch.errors import CheckpointError, InputError
from fp4dispatch.models.choose_layers import picker
from fp4dispatch.models.name_patterns import MAX_PATTERNS, NamePatterns, compile_pattern

NAMES = [
    "lm_head", "model.lm_head", "model.layers.0.self_attn.q_proj", "model.layers.17.mlp.gate",
    "model.layers.1.mlp.gate_proj", "model.layers.3.mlp.experts.12.down_proj", "vision_tower.blocks.1.attn.qkv",
    "model.layers.3.mlp.shared_expert_gate",
    "model.visual.merger", "mtp.fc", "a" * 40, "", "x|y", "model.layers.10.(odd)",
]  # fmt: skip

WRITTEN = [
    "re:.*lm_head", "re:lm_head", "re:.*mlp.gate$", "re:.*mlp.shared_expert_gate$", "re:vision_tower.*",
    "re:model.visual.*",
    r"re:.*\.(q|k|v|o)_proj$", r"re:model\.layers\.(\d+)\..*(q|k|v)_proj$", "re:.*self_attn.*", "re:^mtp.*",
    r"re:.*layers\.[0-9]\..*", r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$", "re:(?i)MODEL.*", "re:.*gate|.*fc",
    "re:^(?!.*mlp.experts).*", "re:^(?!.*shared_experts).*$", r"re:^(?!.*\.mlp\.experts(?:\.|$)).*$", "re:(?!model).*",
    r"re:^(?!.*language_model\.model\.layers\.)", "re:(?=.*experts)(?!.*gate)model", "re:(?![)]|x\\|).*", "re:a{2,40}$",
    r"re:^(?!.*(?:self_attn\.(?:q_proj|k_proj)|vision_tower\..*)$).*$", "re:(?!(?:a(b|c)))(?:model|mtp).*",
]  # fmt: skip
"""As they stand in recipes and checkpoints of llm-compressor, vLLM and Quark."""


@pytest.mark.parametrize("pattern", WRITTEN)
def test_as_compressed_tensors_matches_them(pattern):
    utils = pytest.importorskip("compressed_tensors.utils.match")
    theirs = utils.match_name
    for name in NAMES:
        assert compile_pattern(pattern)(name) == bool(theirs(name, pattern)), name


def test_random_expressions_mean_what_python_means():
    """Accepted expressions agree with ``re.match`` on every name; and most are accepted."""
    rng = random.Random(5)
    parts = [
        "a",
        "b",
        ".",
        r"\.",
        "[ab]",
        "[^a]",
        r"\d",
        "(a|b)",
        "(?:ab)?",
        "a*",
        "b+",
        ".*",
        "a{1,2}",
        "$",
        "x?",
        r"\w",
    ]
    accepted = hits = 0
    for _ in range(3000):
        text = "".join(rng.choices(parts, k=rng.randint(1, 5)))
        if rng.random() < 0.4:
            ahead = "".join(rng.choices(parts, k=rng.randint(1, 3)))
            text = rng.choice(["^", ""]) + rng.choice(["(?!", "(?="]) + ahead + ")" + text
        if rng.random() < 0.2:
            text += "|" + rng.choice(parts)
        try:
            found = compile_pattern.__wrapped__(f"re:{text}")
        except InputError:
            continue
        accepted += 1
        for _ in range(20):
            name = "".join(rng.choices("ab.1_", k=rng.randint(0, 8)))
            assert found(name) == (re.match(text, name) is not None), (text, name)
            hits += found(name)
    assert accepted > 2000
    assert hits > 5000


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("re:(.?){50}!", "a" * 60),
        ("re:(a+)+$", "a" * 60 + "!"),
        ("re:(a|a)*$", "a" * 60 + "!"),
        ("re:(a|aa)+$", "a" * 60 + "!"),
        ("re:" + ".*a" * 40 + "$", "a" * 300 + "!"),
        ("re:(?:(?:a?){30}){30}!", "a" * 60),
        ("re:^(?!(.?){50}!)(?!(a+)+$)a", "a" * 60 + "b"),
        ("re:(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)[^a]$", "a" * 3000),
        ("*a" * 100 + "!", "a" * 3000),
        ("?" * 20 + "*" * 40 + "!", "a" * 3000),
        ("re:" + "(" * 300 + "a" + ")*" * 300 + "!", "a" * 3000),
    ],
)
def test_no_pattern_takes_long(pattern, name):
    start = time.perf_counter()
    for _ in range(3):
        with contextlib.suppress(InputError):
            compile_pattern(pattern)(name)
    assert time.perf_counter() - start < 2.0


def test_many_names_and_many_patterns_take_no_product_of_them():
    names = [f"model.layers.{layer}.mlp.experts.{expert}.down_proj" for layer in range(100) for expert in range(300)]
    start = time.perf_counter()
    excluded = any_matches([*names, "*.gate", "re:.*router"], "modelopt")
    assert all(map(excluded, names))
    assert not excluded("model.layers.0.mlp.experts.300.down_proj")
    assert time.perf_counter() - start < 5.0
    with pytest.raises(CheckpointError, match=f"expected at most {MAX_TRIED:,}"):
        any_matches([f"*{number}" for number in range(MAX_TRIED + 1)], "modelopt")
    with pytest.raises(InputError, match=f"at most {MAX_PATTERNS} are tried"):
        NamePatterns([f"*{number}" for number in range(MAX_PATTERNS + 1)])


REFUSED = [
    (r"re:(a)\1", "no backreferences"),
    ("re:(?<!model)head", "no lookbehind"),
    ("re:model(?!.0).*", "lookahead only at the very start"),
    ("re:(?!a)b|c", "a lookahead in one branch only"),
    ("re:(?!a(?!b))c", "lookahead only at the very start"),
    ("re:(?!a)*b", "is not|linear time"),
    ("re:a{1001}", "no repeats above 1000"),
    ("re:(((a{100}){100}){100}){100}", "repe"),
    ("re:(", "is not a regular expression"),
    ("re:" + "(" * 2000 + ")" * 2000, "is not a regular expression|linear time"),
    ("re:a{,3}", "write {0,n}"),
    (r"re:\p{Greek}", "is not a regular expression"),
    ("re:[[:alpha:]]", "is not a regular expression"),
    ("re:" + "a" * 5000, "5003 characters: at most 4096"),
    ("*" * 5000, "5000 characters: at most 4096"),
    ("re:\ud800", "linear time"),
]


@pytest.mark.parametrize(("pattern", "expected"), REFUSED)
def test_what_cannot_be_matched_is_refused_everywhere_alike(pattern, expected):
    with pytest.raises(InputError, match=expected):
        NamePatterns([pattern])
    with pytest.raises(InputError, match=expected):
        picker("nvfp4", pattern, ())
    with pytest.raises(CheckpointError, match=expected):
        matches(pattern, "a", "modelopt")
    with pytest.raises(CheckpointError, match=expected):
        any_matches([pattern], "modelopt")("a")


def test_a_name_that_is_not_unicode_is_refused():
    with pytest.raises(InputError, match="is not Unicode"):
        compile_pattern("re:.*")("a\ud800")
    with pytest.raises(CheckpointError, match="is not Unicode"):
        any_matches(["re:.*"], "modelopt")("a\ud800")


def test_globs_are_fnmatch():
    rng = random.Random(6)
    for _ in range(2000):
        pattern = "".join(rng.choices(["a", "b", ".", "*", "?", "[ab]", "[!a]", "["], k=rng.randint(1, 6)))
        name = "".join(rng.choices("ab.[", k=rng.randint(0, 6)))
        assert compile_pattern(pattern)(name) == fnmatchcase(name, pattern)


@pytest.mark.parametrize("method", ["modelopt", "fp8", "compressed-tensors"])
def test_all_at_once_is_one_after_the_other(method):
    patterns = ["lm_head", "mlp.gate", "model.layers.0", "", "re:.*visual.*", "*.fc", "experts"]
    at_once = any_matches(patterns, method)
    for name in [*NAMES, "model.layers.0.mlp.up", "model.layers.01", "x.mlp.gate.y", "mlp.gateway"]:
        assert at_once(name) == any(matches(pattern, name, method) for pattern in patterns), name


def test_without_re2_only_expressions_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "re2", None)
    with pytest.raises(InputError, match="pip install google-re2"):
        compile_pattern.__wrapped__("re:a")
    assert compile_pattern.__wrapped__("a*")("ab")
