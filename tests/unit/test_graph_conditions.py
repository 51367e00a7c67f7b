"""Conditions under which a call does not run in CUDA graphs: each true and false, data and predicates in step."""

from __future__ import annotations

import copy
import dataclasses
import logging

import pytest

from fp4dispatch import strict_toml
from fp4dispatch.errors import SettingsError
from fp4dispatch.graphs import conditions
from fp4dispatch.graphs.batch import PREDICATES, Batch
from fp4dispatch.machine import capture, log
from fp4dispatch.problem.decision import Reason

GOOD = Batch(num_tokens=48, buckets=(16, 32, 64))

# condition: facts for which it holds, what its text says, and facts near by for which it does not hold
CASES: dict[str, list[tuple[dict, str, dict]]] = {
    "training": [
        ({"training": True}, "training mode is True", {"training": False}),
        ({"grad_enabled": True}, "grad mode is True", {"grad_enabled": False}),
    ],
    "decode-verify": [({"decode_verify": True}, "verifies draft tokens", {"decode_verify": False})],
    "moved-inputs": [({"moved_inputs": ("position_ids", "mask")}, "position_ids, mask", {"moved_inputs": ()})],
    "too-many-tokens": [
        ({"num_tokens": 65}, "65 tokens; the largest captured bucket holds 64", {"num_tokens": 64}),
        ({"num_tokens": 2, "buckets": (1,)}, "holds 1", {"num_tokens": 1, "buckets": ()}),  # another condition says why
    ],
    "padding": [
        ({"num_tokens": 7}, "7 tokens would be padded to 16", {"num_tokens": 8}),
        ({"num_tokens": 17, "buckets": (16, 35)}, "padded to 35", {"num_tokens": 17, "buckets": (16, 34)}),
        ({"num_tokens": 0}, "0 tokens", {"num_tokens": 16}),
    ],
    "eager-faster": [
        (
            {"num_tokens": 40, "pays_from": (1, 1, 50)},
            "40 tokens in the bucket of 64: its replays were measured to pay from 50 tokens on",
            {"num_tokens": 50, "pays_from": (1, 1, 50)},
        ),
        ({"num_tokens": 64, "pays_from": (1, 1, 65)}, "pay for no number of tokens", {"pays_from": (17, 33, 1)}),
        (
            {"num_tokens": 20, "pays_from": (1, 25, 65)},
            "from 25 tokens on",
            {"num_tokens": 20, "pays_from": (1, 1, 65)},
        ),
    ],
    "input-logits": [({"input_logits": True}, "logits of input tokens are wanted", {"input_logits": False})],
    "extra-inputs": [({"extra_inputs": ("pixel_values",)}, "pixel_values", {"extra_inputs": ()})],
    "cpu-offload": [({"offloaded": tuple(f"w{i}" for i in range(9))}, "w0, w1, w2, w3 and 5 more", {"offloaded": ()})],
    "idle-ranks": [({"idle_ranks": (1, 3)}, "1, 3", {"idle_ranks": ()})],
    "torch-compile": [({"compiled": True}, "wrapped by torch.compile", {"compiled": False})],
    "lora-swap": [
        ({"adapters": ("b",), "captured_adapters": ("a",)}, "active are b, then a", {"adapters": ()}),
        ({"captured_adapters": ("a",)}, "are none", {"adapters": ("a",), "captured_adapters": ("a",)}),
    ],
    "deterministic": [({"deterministic": True}, "same bits", {"deterministic": False})],
    "backend-veto": [({"vetoes": ("cudnn {must} not",)}, "cudnn {must} not", {"vetoes": ()})],
    "intermediates": [({"intermediates": ("output_attentions",)}, "output_attentions", {"intermediates": ()})],
    "autocast": [({"autocast": True}, "autocast is on", {"autocast": False})],
    "hooks": [({"hooked": ("mlp", "a layer")}, "hooks of mlp, a layer would not run", {"hooked": ()})],
    "recorded": [({"recorded": True}, "a mode of PyTorch sees each operation", {"recorded": False})],
    "busy": [({"busy": True}, "another thread", {"busy": False})],
    "captured-by-caller": [({"capturing": True}, "captures a CUDA graph around", {"capturing": False})],
    "other-arguments": [({"misfit": "mask is new"}, "mask is new", {"misfit": ""})],
    "disabled": [({"disabled": "the capture failed"}, "the capture failed", {"disabled": ""})],
}
EACH = [(name, *case) for name, cases in CASES.items() for case in cases]
TABLE = strict_toml.load(conditions.FILE)


@pytest.mark.parametrize(("name", "true", "says", "false"), EACH, ids=lambda v: v if isinstance(v, str) else "")
def test_each_condition_holds_and_does_not(name, true, says, false):
    (reason,) = conditions.reasons(dataclasses.replace(GOOD, **true))
    assert isinstance(reason, Reason)
    assert (reason.condition, reason.code) == (name, "CAPTURE")
    assert says in reason.text
    assert reason.why
    assert reason.fix
    assert reason.source.startswith("https://")
    assert conditions.reasons(dataclasses.replace(GOOD, **false)) == ()


def test_there_is_a_case_for_each_condition_and_a_predicate_for_each():
    assert list(CASES) == [c.name for c in conditions.conditions()]
    assert [c.when for c in conditions.conditions()] == list(PREDICATES)


def test_a_good_batch_has_no_reason_and_all_reasons_are_given():
    assert conditions.reasons(GOOD) == ()
    assert conditions.reasons(Batch(64, (64,))) == ()
    bad = dataclasses.replace(GOOD, training=True, compiled=True, num_tokens=5)
    assert [r.condition for r in conditions.reasons(bad)] == ["training", "padding", "torch-compile"]


def test_the_bucket_is_the_smallest_that_holds_the_tokens():
    found = {m: dataclasses.replace(GOOD, num_tokens=m).bucket for m in (0, 1, 16, 17, 64, 65)}
    assert found == {0: 16, 1: 16, 16: 16, 17: 32, 64: 64, 65: None}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda row: row.pop("why"), "'why' is missing"),
        (lambda row: row.update(extra="x"), "unknown key 'extra'"),
        (lambda row: row.update(when="feels_wrong"), "when 'feels_wrong' is not known"),
        (lambda row: row.update(level="loud"), "level 'loud' is not known"),
        (lambda row: row.update(fix="  "), "fix is empty"),
        (lambda row: row.update(name="Training"), "lower-case"),
        (lambda row: row.update(source="docs"), "no https URL"),
        (lambda row: row.update(message="{mood}"), "{mood} is no fact of Batch"),
        (lambda row: row.update(message="{num_tokens"), "message"),
        (lambda row: row.update(fix="{}"), "no fact of Batch"),
        (lambda row: row.update(checked="today"), "checked must be date"),
        (lambda row: row.update(name="padding"), "name padding is used twice"),
        (lambda row: row.update(when="padded_too_much"), "when padded_too_much is used twice"),
    ],
)
def test_a_wrong_row_is_refused(change, says):
    table = copy.deepcopy(TABLE)
    change(table["condition"][0])
    with pytest.raises(SettingsError, match=says):
        conditions.load(table)


def test_a_predicate_without_a_condition_is_refused():
    table = copy.deepcopy(TABLE)
    table["condition"] = table["condition"][1:]
    with pytest.raises(SettingsError, match="no condition uses the predicate trains"):
        conditions.load(table)
    with pytest.raises(SettingsError, match="unknown key"):
        conditions.load({**TABLE, "conditions": []})


def test_each_condition_is_said_once_a_model(caplog, monkeypatch):
    log.reset()
    one, two = conditions.Said("LlamaForCausalLM"), conditions.Said("other")
    padded = conditions.reasons(dataclasses.replace(GOOD, num_tokens=3))
    both = conditions.reasons(dataclasses.replace(GOOD, num_tokens=5, compiled=True))
    with caplog.at_level(logging.INFO, "fp4dispatch"):
        with monkeypatch.context() as patch:
            patch.setattr(capture, "is_capturing", lambda: True)
            one.say(padded)
        assert caplog.records == []
        for found in (padded, both, padded, both):
            one.say(found)
        two.say(padded)
    said = [(r.levelname, r.message.split(" ")[0], r.message.split("[")[1].split("]")[0]) for r in caplog.records]
    assert said == [
        ("INFO", "LlamaForCausalLM", "padding"),
        ("WARNING", "LlamaForCausalLM", "torch-compile"),
        ("INFO", "other", "padding"),
    ]
    for part in ("3 tokens would be padded to 16", "eager is the better choice", "https://", "Fix: capture a bucket"):
        assert part in caplog.records[0].message
    log.reset()
