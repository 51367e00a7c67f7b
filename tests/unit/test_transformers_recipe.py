"""Every block of docs/transformers.md runs, on tiny models."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from safetensors.torch import load_file

from tests.transformers_cases import compressed, modelopt, plain

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
SNIPPETS = [body for kind, body in BLOCKS if kind == "python"]


def test_every_block_is_of_a_kind_that_is_tested():
    assert [body for kind, body in BLOCKS if kind != "python"] == ["pip install 'fp4dispatch[transformers]'\n"]
    assert len(SNIPPETS) == 7


def test_the_page_states_the_supported_versions():
    from fp4dispatch.integrations.transformers import SUPPORTED

    ((major, minor),) = re.findall(r"Supported: Transformers (\d+)\.(\d+)\.", PAGE.read_text("utf-8"))
    assert SpecifierSet(f">={major}.{minor},<{major}.{int(minor) + 1}") == SUPPORTED


def test_snippets_run(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate, which Transformers needs for device_map, is not installed")
    places = {
        "MODELOPT_DIR": modelopt("Llama"),
        "COMPRESSED_DIR": compressed("Llama"),
        "MODEL_DIR": plain("Llama"),
        "inductor": "aot_eager",
    }
    code = "\n".join(SNIPPETS)
    for name, place in places.items():
        code = code.replace(f'"{name}"', repr(str(place)))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("FP4Linear(") == 2
    assert "torch.Size([1, 16, 128])" in done.stdout
    assert "fused: model.layers.*.self_attn.qkv_proj = q_proj + k_proj + v_proj (2 of these)" in done.stdout
    written = {"OUT", "QUANTISED", "FOR_ENGINES", "UNFUSED", "COMPRESSED_AGAIN", "OFFLOAD_DIR"}
    assert {path.name for path in tmp_path.iterdir()} == written
    assert not any("qkv_proj" in name for name in load_file(tmp_path / "UNFUSED" / "model.safetensors"))
    assert "offloaded to disk: moved to cpu" in done.stdout
