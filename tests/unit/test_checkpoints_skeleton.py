"""Configurations of strangers, given to the real transformers: no network, no code, no flood, only typed errors."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import re
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fp4dispatch.checkpoints import open_checkpoint, skeleton
from fp4dispatch.cli import main
from fp4dispatch.errors import CheckpointError
from tests.checkpoint_cases import write
from tests.fuzz import damage

transformers = pytest.importorskip("transformers")

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
LAYERS = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
EVIL = "somebody/repository"


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """What tried to reach the network, in this process or a child of it."""
    reading, writing = os.pipe()

    def refuse(*args, **kwargs):
        os.write(writing, b"!")
        raise OSError("the test has no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    yield lambda: os.read(reading, 99) if select.select([reading], [], [], 0)[0] else b""
    os.close(reading)
    os.close(writing)


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "in", {f"model.layers.0.{layer}.weight": torch.ones(32, 32) for layer in LAYERS})


def quantize(source: Path, config: dict, capsys) -> tuple[int, str]:
    (source / "config.json").write_text(json.dumps(config))
    code = main(["quantize", str(source), str(source.parent / "out"), "--format", "fp8", "--json"])
    out, err = capsys.readouterr()
    return code, out if code == 0 else err


HARMLESS = {
    "kernels of a repository for attention": {"attn_implementation": EVIL},
    "the same, as transformers saves it": {"_attn_implementation": EVIL, "_attn_implementation_internal": EVIL},
    "attention that is not installed": {"attn_implementation": "flash_attention_2"},
    "kernels of a repository for experts": {"experts_implementation": EVIL},
    "code of a repository": {"auto_map": {"AutoConfig": f"{EVIL}--configuration.Config", "AutoModel": f"{EVIL}--m.M"}},
    "another name": {"_name_or_path": EVIL},
    "no model_type": {"model_type": None},
}
"""What changes no structure is left out, and the model is quantised."""


def children() -> set[str]:
    """Process ids of what this process started and did not wait for; other tests may have left some."""
    return {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


@pytest.mark.parametrize("what", HARMLESS)
def test_what_names_foreign_code_is_left_out(source, capsys, calls, what):
    code, text = quantize(source, LLAMA | HARMLESS[what], capsys)
    assert code == 0, text
    assert [layer["name"] for layer in json.loads(text)["layers"]] == [f"model.layers.0.{layer}" for layer in LAYERS]
    assert calls() == b""
    assert not any(name.startswith("transformers_modules") for name in sys.modules)


DETR = {"architectures": ["DetrForObjectDetection"], "model_type": "detr", "use_pretrained_backbone": True}
LLAVA = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
REFUSED = {
    "a backbone of a repository": (DETR | {"backbone": EVIL, "use_timm_backbone": False}, "Offline"),
    "a backbone by timm": (DETR | {"backbone": f"hf-hub:{EVIL}", "use_timm_backbone": True}, "builds no Detr"),
    "a depth model's backbone": (
        {"architectures": ["DPTForDepthEstimation"], "model_type": "dpt", "backbone": EVIL, "is_hybrid": False},
        "Offline",
    ),
    "a language model of a repository": (LLAVA | {"text_config": {"model_type": "evil"}}, "builds no Llava"),
    "a configuration as a name": (LLAVA | {"vision_config": EVIL}, "builds no Llava"),
    "a function": ({"architectures": ["pipeline"]}, "is no model"),
    "an automatic class": ({"architectures": ["AutoModel"]}, "is no model"),
    "a trainer": ({"architectures": ["Trainer"]}, "is no model|cannot import"),
    "the base class": ({"architectures": ["PreTrainedModel"]}, "is no model"),
    "a string": ({"architectures": ["__version__"]}, "is no model"),
    "a module": ({"architectures": ["modeling_utils"]}, "is no model"),
    "a configuration class": ({"architectures": ["LlamaConfig"]}, "is no model"),
    "a tokenizer": ({"architectures": ["LlamaTokenizer"]}, "is no model|cannot import"),
    "a path": ({"architectures": ["models.llama.LlamaModel"]}, "does not know"),
    "no name": ({"architectures": [""]}, "does not know"),
    "two": ({"architectures": ["LlamaForCausalLM", "BertModel"]}, "no architecture named"),
    "a billion layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, but the file has 7 tensors"),
    "a billion experts below": ({"text_config": {"n_routed_experts": 1e9}}, "n_routed_experts is 1000000000"),
    "a billion blocks in a list": ({"depths": [2, 10**9]}, "depths is 1000000000"),
    "an unknown dtype": ({"dtype": "evil"}, "builds no Llama"),
    "an unknown activation": ({"hidden_act": "evil"}, "builds no Llama"),
    "a number for a name": ({"hidden_act": 3}, "builds no Llama"),
    "no heads": ({"num_attention_heads": 0}, "builds no Llama"),
    "negative": ({"hidden_size": -1}, "builds no Llama"),
    "a name for a number": ({"hidden_size": "big"}, "builds no Llama"),
    "null": ({"hidden_size": None}, "builds no Llama"),
    "a list for an object": ({"rope_scaling": [1]}, "builds no Llama"),
    "unknown positions": ({"rope_parameters": {"rope_type": "evil"}}, "builds no Llama"),
    "a size that overflows": ({"vocab_size": 2**62}, "builds no Llama"),
    "another model's type": ({"model_type": "bert"}, "builds no Llama"),
    "an unknown type": ({"model_type": "nobody"}, "does not know model_type 'nobody'"),
    "a list for a type": ({"model_type": ["llama"]}, "does not know model_type"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_hostile_and_broken_configurations_are_refused(source, capsys, calls, what):
    config, expected = REFUSED[what]
    start = time.monotonic()
    whole = config if {"architectures", "model_type"} <= config.keys() else LLAMA | config
    code, text = quantize(source, whole, capsys)
    assert code == 1
    assert text.startswith("CheckpointError: "), text
    assert re.search(expected, text), text
    assert "name the linear layers yourself" in text
    assert calls() == b""
    assert time.monotonic() - start < 30
    assert not (source.parent / "out").exists()


DOGE = {
    **LLAMA,
    "architectures": ["DogeForCausalLM"],
    "model_type": "doge",
    "num_experts": 128**2,  # as transformers writes it, whether or not a layer has experts
}


def test_experts_that_no_layer_has_are_no_flood(source, capsys):
    code, text = quantize(source, DOGE | {"is_moe": False}, capsys)
    assert code == 0, text
    assert len(json.loads(text)["layers"]) == len(LAYERS)
    code, text = quantize(source, DOGE | {"num_experts": 128**2 + 1}, capsys)
    assert code == 1
    assert "num_experts is 16385, but the file has 7 tensors" in text


def test_experts_that_are_rows_of_a_tensor_are_no_flood(tmp_path, capsys):
    config = DOGE | {"is_moe": True, "num_experts": 40**2, "num_experts_per_tok": 4}
    made = transformers.DogeForCausalLM(transformers.DogeConfig(**config))
    source = write(tmp_path / "in", {name: each.detach().clone() for name, each in made.named_parameters()})
    code, text = quantize(source, config, capsys)
    assert code == 0, text
    report = json.loads(text)
    assert {"self_attn.dt_proj", *LAYERS} == {
        layer["name"].removeprefix("model.layers.0.") for layer in report["layers"]
    }
    assert "an embedding" in report["skipped"]["model.layers.0.mlp.down_embed"]
    assert report["skipped"]["model.layers.0.mlp.router_gate"] == "excluded"


def test_a_billion_labels_meet_the_limit_on_memory(source, capsys, monkeypatch):
    monkeypatch.setattr(skeleton, "BYTES", 300 << 20)
    code, text = quantize(source, LLAMA | {"num_labels": 10**9}, capsys)
    assert code == 1
    assert "out of memory" in text


def test_what_no_key_gives_away_meets_the_limit_on_time(source, capsys, monkeypatch):
    monkeypatch.setattr(skeleton, "SECONDS", 5.0)
    config = transformers.MusicgenDecoderConfig(num_hidden_layers=1).to_dict() | {
        "architectures": ["MusicgenForCausalLM"],
        "num_codebooks": 10**9,
    }
    code, text = quantize(source, config, capsys)
    assert code == 1
    assert "it takes more than 5 s" in text


def test_floats_that_json_cannot_hold_are_read_as_transformers_writes_them(source):
    config = transformers.Mamba2Config(num_hidden_layers=1, hidden_size=32, num_heads=8, head_dim=8, vocab_size=64)
    config.architectures = ["Mamba2ForCausalLM"]
    config.to_json_file(source / "config.json", use_diff=False)
    assert "__float__" in (source / "config.json").read_text()
    with open_checkpoint(source) as checkpoint:
        assert "backbone.layers.0.mixer.in_proj" in skeleton.examine(
            checkpoint, lambda model: [name for name, _ in model.named_modules()], advice=""
        )


def test_a_nested_configuration_is_refused(source, capsys):
    deep: object = {}
    for _ in range(400):
        deep = {"text_config": deep}
    code, text = quantize(source, LLAMA | {"text_config": deep}, capsys)
    assert code in (0, 1)
    assert code == 0 or text.startswith("CheckpointError: ")


# The child.


def _flood(model):
    held = []
    while True:
        held.append(bytearray(1 << 20))


WORK = {
    "connects": (lambda model: socket.create_connection(("127.0.0.1", 9)), "may not use the network|no network"),
    "binds": (lambda model: socket.socket().bind(("127.0.0.1", 0)), "may not use the network"),
    "starts a process": (
        lambda model: subprocess.run(["true"], check=True),
        "may not use the network, files or processes",
    ),
    "forks": (lambda model: os.fork(), "os.fork"),
    "calls a shell": (lambda model: os.system("true"), "os.system"),
    "unpickles": (lambda model: pickle.loads(pickle.dumps(Path)), "pickle.find_class"),
    "writes a file": (lambda model: Path("/tmp/fp4dispatch-written").write_text("x"), "may not write files"),
    "makes a folder": (lambda model: Path("/tmp/fp4dispatch-made").mkdir(), "os.mkdir"),
    "floods": (_flood, "out of memory"),
    "sleeps": (lambda model: time.sleep(60), "more than 3 s"),
    "leaves": (lambda model: os._exit(0), "ended with status"),
    "is killed": (lambda model: os.kill(os.getpid(), 9), "ended with status -9"),
    "exits": (lambda model: sys.exit(0), "SystemExit"),
    "stops": (lambda model: exec("raise KeyboardInterrupt"), "KeyboardInterrupt"),
    "gives what is no data": (lambda model: model, "TypeError"),
    "imports code of a repository": (lambda model: __import__("transformers_modules.evil"), "may not load code"),
}


@pytest.mark.parametrize("what", WORK)
def test_a_skeleton_can_do_no_harm(source, monkeypatch, what):
    from huggingface_hub import constants

    monkeypatch.setattr(skeleton, "SECONDS", 3.0 if what == "sleeps" else 60.0)
    monkeypatch.setattr(skeleton, "BYTES", 300 << 20)
    (source / "config.json").write_text(json.dumps(LLAMA))
    before, started = (dict(os.environ), constants.HF_HUB_OFFLINE), children()
    work, expected = WORK[what]
    with open_checkpoint(source) as checkpoint, pytest.raises(CheckpointError, match=expected):
        skeleton.examine(checkpoint, work, advice="do it by hand")
    assert (dict(os.environ), constants.HF_HUB_OFFLINE) == before
    assert not Path("/tmp/fp4dispatch-written").exists()
    assert not Path("/tmp/fp4dispatch-made").exists()
    assert children() == started, "no child is left behind"


def test_this_process_keeps_all_it_had(source):
    (source / "config.json").write_text(json.dumps(LLAMA))
    with open_checkpoint(source) as checkpoint:
        names = skeleton.examine(checkpoint, lambda model: [n for n, _ in model.named_parameters()], advice="")
    assert "model.layers.0.mlp.up_proj.weight" in names
    subprocess.run(["true"], check=True)
    socket.socket().close()
    (source / "written").write_text("x")


def test_fuzzed_configurations_are_built_or_refused(source, calls):
    rng = random.Random(11)
    outcomes = {True: 0, False: 0}
    start = time.monotonic()
    for _ in range(100):
        config = copy.deepcopy(LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}})
        for _ in range(rng.randint(1, 3)):
            damage._edit(damage.Source(rng.randbytes(64)), config)
        try:
            (source / "config.json").write_text(json.dumps(config))
            with open_checkpoint(source) as checkpoint:
                skeleton.examine(checkpoint, lambda model: len(list(model.modules())), advice="")
            outcomes[True] += 1
        except CheckpointError:
            outcomes[False] += 1
    assert outcomes[False] > 20
    assert outcomes[True] > 5
    assert calls() == b""
    assert time.monotonic() - start < 240
