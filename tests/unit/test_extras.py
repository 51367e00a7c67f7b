"""The extras: what they name exists in the index, is what was tested, and can be imported beside this package."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires, version

import pytest
from packaging.requirements import Requirement

from tests.tiers import ROOT

IMPORTS = {
    "apache-tvm-ffi": "tvm_ffi",
    "cuda-pathfinder": "cuda.pathfinder",
    "flashinfer-python": "flashinfer",
    "mkdocs-material": "material",
    "nvidia-cudnn-frontend": "cudnn",
}
"""Distribution -> module, where the names differ by more than dashes."""
NO_MODULE = "nvidia-cu"
"""Start of distributions that hold libraries and programs only, in the namespace ``nvidia``."""


def extras() -> dict[str, list[Requirement]]:
    """Each extra that users install, with what it requires here."""
    found: dict[str, list[Requirement]] = {}
    for line in requires("fp4dispatch") or ():
        requirement = Requirement(line)
        _, _, name = str(requirement.marker or "").rpartition("extra == ")
        name = name.strip("\"'")
        if name and name not in ("test", "dev") and requirement.marker.evaluate({"extra": name}):
            requirement.marker = None
            found.setdefault(name, []).append(requirement)
    return found


EXTRAS = extras()
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if "==" in line)


def pip_report(*words: str) -> subprocess.CompletedProcess[str]:
    """What pip would install, as JSON. Nothing is downloaded but metadata."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--no-deps", "--ignore-installed"]
    return subprocess.run([*command, "--report", "-", *words], capture_output=True, text=True, timeout=300, check=False)


@functools.cache
def index_fault() -> str:
    """Why no index can be asked here; empty if one answers."""
    done = pip_report("packaging")
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def test_extras_that_users_install():
    assert {"jit", "cu12", "cu13", "cudnn", "flashinfer", "transformers", "vllm", "demo"} <= set(EXTRAS)
    assert [r.name for r in EXTRAS["cu12"]] == ["nvidia-cudnn-cu12"]
    assert "nvidia-cuda-nvcc" in {r.name for r in EXTRAS["cu13"]}


@pytest.mark.parametrize("extra", sorted(EXTRAS))
def test_what_was_tested_is_what_an_extra_allows(extra):
    for requirement in EXTRAS[extra]:
        if requirement.name in PINS:
            assert requirement.specifier.contains(PINS[requirement.name]), requirement


def test_torch_that_was_tested_is_allowed():
    (torch,) = (Requirement(line) for line in requires("fp4dispatch") if Requirement(line).name == "torch")
    assert torch.specifier.contains(PINS["torch"])
    assert torch.specifier.contains("2.11.0")
    assert not torch.specifier.contains("2.10.1")


@pytest.mark.parametrize("extra", sorted(EXTRAS))
def test_an_extra_can_be_imported_beside_this_package(extra):
    modules = []
    for requirement in EXTRAS[extra]:
        if requirement.name.startswith(NO_MODULE):
            continue
        try:
            version(requirement.name)
        except PackageNotFoundError:
            continue
        modules.append(IMPORTS.get(requirement.name, requirement.name.replace("-", "_")))
    if not modules:
        pytest.skip(f"nothing of extra `{extra}` that has a module is installed")
    program = "import importlib, sys, fp4dispatch\nfor name in sys.argv[1:]: importlib.import_module(name)\nprint('ok')"
    done = subprocess.run([sys.executable, "-c", program, *modules], capture_output=True, text=True, timeout=300)
    assert done.stdout.endswith("ok\n"), done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("extra", sorted(EXTRAS))
def test_an_index_has_what_an_extra_names(extra):
    if fault := index_fault():
        pytest.skip(f"no package index answers: {fault}")
    wanted = EXTRAS[extra]
    done = pip_report(*map(str, wanted))
    assert done.returncode == 0, done.stderr
    found = {
        item["metadata"]["name"].lower(): item["metadata"]["version"] for item in json.loads(done.stdout)["install"]
    }
    for requirement in wanted:
        assert requirement.specifier.contains(found[requirement.name.lower()], prereleases=True), requirement
