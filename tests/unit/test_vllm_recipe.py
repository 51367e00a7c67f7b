"""Every block of docs/vllm.md runs, on a tiny model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import vllm_cases
from tests.transformers_cases import compressed, modelopt, plain

PAGE = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text("utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
SNIPPETS = [body for kind, body in BLOCKS if kind == "python"]
SERVE = "vllm serve MODELOPT_DIR --quantization fp4dispatch\n"
MODEL = "Llama for engines"

PRELUDE = """
import functools, vllm
vllm.LLM = functools.partial(vllm.LLM, enforce_eager=True, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4)
"""
"""For models without a tokenizer, on a small machine."""

COMMAND = """
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
args = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(ARGUMENTS)
print("the command runs", EngineArgs.from_cli_args(args).create_model_config().quantization)
"""
"""What ``vllm serve`` does with its arguments before it starts the engine of the first snippet."""


def test_every_block_is_of_a_kind_that_is_tested():
    others = [body for kind, body in BLOCKS if kind != "python"]
    assert others == ["pip install 'fp4dispatch[vllm]'\n", SERVE, f"FP4_GEMM_BACKEND=reference {SERVE}"]
    assert len(SNIPPETS) == 3


def test_the_page_states_the_supported_versions():
    from fp4dispatch.integrations.vllm import SUPPORTED

    ((first, last),) = re.findall(r"Supported: vLLM 0\.(\d+) and 0\.(\d+)\.", PAGE)
    assert str(SUPPORTED) in (f">=0.{first},<0.{int(last) + 1}", f"<0.{int(last) + 1},>=0.{first}")


def test_the_page_lists_the_formats():
    stored = re.search(r"ModelOpt \| (.*?), and mixtures", PAGE)
    assert stored
    from fp4dispatch.checkpoints.config.readers import CT_PRESETS, MODELOPT_ALGOS

    assert set(re.findall(r"`(\w+)`", stored[1])) == set(MODELOPT_ALGOS)
    (presets,) = re.findall(r"llm-compressor \| (.*?) \|", PAGE)
    assert set(re.findall(r"`(\w+)`", presets)) == set(CT_PRESETS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_snippets_run(tmp_path):
    if not vllm_cases.interpreter()[0]:
        pytest.skip(vllm_cases.interpreter()[1])
    places = {"MODELOPT_DIR": modelopt(MODEL), "COMPRESSED_DIR": compressed(MODEL), "MODEL_DIR": plain(MODEL)}
    arguments = SERVE.replace("MODELOPT_DIR", str(places["MODELOPT_DIR"])).split()[2:]
    code = "\n".join([PRELUDE, *SNIPPETS, COMMAND.replace("ARGUMENTS", repr(["--model", *arguments]))])
    for name, place in places.items():
        code = code.replace(f'"{name}"', repr(str(place)))
    output = vllm_cases.execute(tmp_path, ["-c", code])
    assert re.search(r"^\[\d+(, \d+){7}\]$", output, re.MULTILINE), "the new tokens"
    assert "reference (bf16)" in output, "the report"
    assert "8 quantised layers" in output
    assert "FP8Linear" in output or "fp8_gemm" in output
    assert "the command runs fp4dispatch" in output
