"""The recipe for SGLang: commands are parsed by the programs themselves, Python is run, and the page names versions."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from fp4dispatch.integrations.sglang import METHOD, SUPPORTED

PAGE = (Path(__file__).parents[2] / "docs" / "sglang.md").read_text("utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [shlex.split(body) for kind, body in BLOCKS if kind == "bash"]


def test_every_block_is_of_a_kind_that_is_tested():
    assert {kind for kind, _ in BLOCKS} == {"bash", "python"}
    assert all("\n" not in body.strip() for kind, body in BLOCKS if kind == "bash")
    found = sorted({next(word for word in command if "=" not in word) for command in COMMANDS})
    assert found == ["fp4dispatch", "pip", "sglang"]


def test_the_page_states_the_supported_version():
    (version,) = re.findall(r"Supported: SGLang ([\d.]+)\.", PAGE)
    assert SpecifierSet(f"=={version}") == SUPPORTED
    assert f"--quantization {METHOD}" in PAGE
    assert f"--fp4-gemm-backend {METHOD}" in PAGE


def test_our_commands_are_parsed(tmp_path, capsys):
    from fp4dispatch import cli

    (command,) = [command for command in COMMANDS if command[0] == "fp4dispatch"]
    places = {"MODEL_DIR": str(tmp_path / "none"), "QUANTISED": str(tmp_path / "out")}
    assert cli.main([places.get(word, word) for word in command[1:]]) == 1, "usage errors are 2"
    assert str(tmp_path / "none") in capsys.readouterr().err


def test_variables_of_the_commands():
    from fp4dispatch.dispatch.request import check_request

    settings = [word for command in COMMANDS for word in command if re.match(r"[A-Z0-9_]+=", word)]
    assert settings == ["FP4_GEMM_BACKEND=w4a16"]
    check_request("nvfp4_gemm", "w4a16")


def test_the_page_is_linked():
    root = Path(__file__).parents[2]
    assert "docs/sglang.md" in (root / "README.md").read_text("utf-8")
    assert "`sglang/`" in (root / "CONTRIBUTING.md").read_text("utf-8")


def test_servers_take_the_commands_and_python_runs(tmp_path):
    pytest.importorskip("sglang", reason="SGLang is not installed; tests/sglang_cases.py says how")
    from tests import sglang_cases

    sglang_cases.prepare()
    path = sglang_cases.checkpoint("modelopt", tmp_path / "in")
    servers = [command[command.index("--model-path") + 2 :] for command in COMMANDS if "sglang" in command]
    assert len(servers) == 3
    for options in servers:
        model = sglang_cases.load(path, *options)
        assert model.model.layers[0].mlp.down_proj.fp4dispatch.activation == "any"
        for code in (body for kind, body in BLOCKS if kind == "python"):
            exec(code, {"model": model})
