"""bench/architectures.py: it passes what is right, and sees what is not."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import time

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

import fp4dispatch
from bench import architectures
from bench.shared import model_checks, tiny_inputs, tiny_models
from fp4dispatch.benchmark.reports import records
from fp4dispatch.errors import FormatError
from fp4dispatch.models.quantized_linear import QuantizedLinear
from tests.site import architectures as page

CHECKS = {"nvfp4", "fp8_row", "fuse", "state_dict", "generate", "saved", "on the fly"}


def first_layer(model):
    return next(module for module in model.modules() if isinstance(module, QuantizedLinear))


def checked(change, name="LlamaForCausalLM"):
    def replace(model, fmt, **options):
        report = fp4dispatch.replace_linears(model, fmt, **options)
        return change(model, report) or report

    return model_checks.check("llama", name, replace)


def test_two_classes_pass_end_to_end_and_their_record_is_one(tmp_path, capsys, monkeypatch):
    drawn = [("llama", "LlamaForCausalLM"), ("bert", "BertForMaskedLM")]
    monkeypatch.setattr(architectures.tiny_models, "classes", lambda: drawn)
    assert architectures.main(["--seed", "3", "--json", str(tmp_path), "--commit", "abc1234"]) == 0
    assert "2 ok, 0 no forward, 0 refused, 0 not built, 0 stopped, 0 wrong" in capsys.readouterr().out
    (path,) = tmp_path.iterdir()
    record = records.read(path)
    assert (record["seed"], record["of"], len(record["rows"])) == (3, 2, 2)
    assert record["versions"]["transformers"].startswith("5.")
    for row in record["rows"]:
        assert set(row["checks"]) == CHECKS
        assert all(error < 1e-5 for error in row["errors"].values())
        assert len(row["errors"]) == 2
    by_class = {row["cls"]: row for row in record["rows"]}
    assert by_class["LlamaForCausalLM"]["checks"]["fuse"] != "0 fused"
    assert by_class["LlamaForCausalLM"]["checks"]["generate"] == "ok"
    assert by_class["BertForMaskedLM"]["checks"]["generate"] == "does not generate"


def louder(model, report):
    first_layer(model).register_forward_hook(lambda layer, args, out: out * 1.2)


def other_weights(model, report):
    for name, buffer in first_layer(model).named_buffers():
        if name in ("weight_scale", "weight_scale_2") and buffer.dtype == torch.float32:
            buffer.mul_(2)


def unnamed(model, report):
    return dataclasses.replace(report, skipped=())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (louder, "against dequantised weights"),
        (other_weights, "relative error of the stored weights is 1"),
        (unnamed, "neither replaced nor named in the report: lm_head"),
    ],
)
def test_a_layer_that_is_perturbed_or_lost_is_wrong(change, words):
    done = checked(change)
    assert done.outcome == "wrong"
    assert words in done.why


def test_fused_layers_state_and_files_that_differ_are_wrong():
    calls = []

    def another_each_time(model, report):
        calls.append(model)
        with torch.no_grad():
            model.lm_head.weight.mul_(1 + 0.1 * len(calls))

    done = checked(another_each_time)
    assert done.checks["fuse"].startswith("wrong: differs from separate layers by")
    assert done.checks["on the fly"].startswith("wrong: outputs differ by")


def test_an_error_that_is_not_ours_is_wrong_and_a_typed_one_is_refused():
    def fails(error):
        def replace(model, fmt, **options):
            raise error

        return model_checks.check("llama", "LlamaForCausalLM", replace)

    done = fails(RuntimeError("first\nsecond"))
    assert (done.outcome, done.why) == ("wrong", "nvfp4: not an error of ours: RuntimeError: first")
    done = fails(FormatError("first\nsecond"))
    assert (done.outcome, done.why) == ("refused", "nvfp4: FormatError: first")


def row(outcome, why="", **more):
    done = model_checks.Outcome("llama", "LlamaForCausalLM", outcome, why, **more)
    return done.row() | {"seconds": 1.0}


@pytest.mark.parametrize(
    ("outcome", "code"), [("ok", 0), ("refused", 0), ("not built", 0), ("stopped", 0), ("wrong", 1)]
)
def test_only_what_is_wrong_ends_with_1(outcome, code, monkeypatch, capsys):
    monkeypatch.setattr(architectures, "rows", lambda classes, seconds: iter([row("ok"), row(outcome)]))
    assert architectures.main(["--seed", "1"]) == code
    assert "seed 1\n" in capsys.readouterr().out


def test_a_class_that_cannot_be_built_is_not_built(monkeypatch):
    def no_configuration(model_type, attempt):
        raise ValueError("sizes do not fit")

    monkeypatch.setattr(tiny_models, "configuration", no_configuration)
    done = model_checks.check("llama", "LlamaForCausalLM")
    assert (done.outcome, done.why) == ("not built", "ValueError: sizes do not fit")


def test_without_inputs_a_model_is_checked_without_a_forward(monkeypatch):
    monkeypatch.setattr(model_checks, "inputs_of", lambda model: None)
    done = model_checks.check("llama", "LlamaForCausalLM")
    assert (done.outcome, done.errors, set(done.checks)) == ("no forward", {}, CHECKS)
    assert (done.checks["saved"], done.checks["on the fly"]) == ("ok", "ok")


def ends(pipe, model_type, name):
    os._exit(3)


def sleeps(pipe, model_type, name):
    time.sleep(60)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("work", "limit", "outcome", "why"),
    [(ends, 30.0, "wrong", "the process ended with 3"), (sleeps, 0.2, "stopped", "took over 0 s")],
)
def test_a_child_that_dies_is_wrong_and_one_that_takes_too_long_is_stopped(work, limit, outcome, why):
    found = architectures.apart(multiprocessing.get_context("fork"), work, "llama", "LlamaForCausalLM", limit)
    assert (found["outcome"], found["why"]) == (outcome, why)
    assert found["seconds"] < 30


def test_the_draw_is_that_of_the_seed():
    everything = tiny_models.classes()
    assert len(everything) > 400
    assert len(set(everything)) == len(everything)
    assert architectures.drawn(1, 5, []) == architectures.drawn(1, None, [])[:5]
    assert architectures.drawn(1, 5, []) != architectures.drawn(2, 5, [])
    assert architectures.drawn(1, 1, ["llama", "bert"]) == [each for each in everything if each[0] in ("bert", "llama")]


def test_an_unknown_type_and_the_default_number(capsys):
    with pytest.raises(SystemExit):
        architectures.main(["--only", "lama"])
    assert "--only lama: Transformers has no such model type" in capsys.readouterr().err
    assert architectures._arguments([]).classes == architectures.CLASSES
    assert architectures._arguments(["--seconds", "5"]).classes is None


def test_the_page_counts_what_the_record_has():
    refused = row(
        "refused",
        "saved: SomeError: Transformers turns 'layers.3.q' of LlamaForCausalLM (in x) around",
        errors={"nvfp4": 3e-7},
    )
    found = [row("ok", errors={"nvfp4": 4e-7}), refused, row("not built", "ValueError: x"), row("wrong", "fuse: y")]
    facts = {"commit": "abc1234"}
    versions = {"transformers": "5.23.0", "torch": "2.11"}
    text = page.block({"rows": found, "versions": versions, "facts": facts, "seed": 7, "of": 600})
    assert "4 classes, drawn with seed 7 of 600; 2 were compared, and the largest relative error is 4e-07" in text
    assert (
        "1 passed everything; 1 refused somewhere with a typed error; 1 not built tiny, by the rules; 1 wrong." in text
    )
    assert text.endswith("- Wrong: `LlamaForCausalLM`, fuse: y.")
    assert "| saved | SomeError: Transformers turns ... of ... | 1 |" in text


def test_outputs_that_are_not_finite_in_the_same_places_differ():
    a = torch.tensor([1.0, float("inf"), 2.0])
    assert tiny_inputs.difference(a, a.clone()) == 0
    assert tiny_inputs.difference(a, torch.tensor([1.0, 1.0, 2.0])) == float("inf")
    assert tiny_inputs.difference(a, a[:2]) == float("inf")
