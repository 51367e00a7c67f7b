"""The worked example of CONTRIBUTING.md, followed to the letter."""

from __future__ import annotations

import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from fp4dispatch.backends import registry
from fp4dispatch.machine.system import System
from fp4dispatch.policy import resolve
from fp4dispatch.problem import Problem
from tests import contract

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
FILES = dict(re.findall(r"<!-- file: ([\w. ]+) -->\s*```\w+\n(.*?)```", TEXT, re.DOTALL))


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Install the example as its text says: the file, then the entry point."""
    (tmp_path / "float64_backend.py").write_text(FILES["float64_backend.py"])
    monkeypatch.syspath_prepend(tmp_path)
    points = tomllib.loads(FILES["entry point"])["project"]["entry-points"][registry.GROUP]
    yield registry.plugins([EntryPoint(name, value, registry.GROUP) for name, value in points.items()])
    sys.modules.pop("float64_backend", None)


def test_example_is_a_backend_that_keeps_the_contract(plugin):
    backend = plugin["float64"]
    assert not isinstance(backend, registry.BrokenBackend), backend.reason
    here = System.fake(arch=None)
    runnable = [case for case in contract.cases(backend) if not contract.unsupported(backend, case, here)]
    assert {case.scaling for case in runnable} == {"tensor", "row", "block128"}
    for case in runnable:
        contract.check(backend, case)


def test_example_is_judged_by_the_policy(plugin):
    here = System.fake(arch=None)
    decision = resolve.resolve(Problem("fp8_gemm", 1, 64, 64, scaling="row"), here, plugin, requested="float64")
    assert decision.backend == "float64"
    refused = resolve.resolve(Problem("nvfp4_gemm", 1, 64, 64), here, plugin, requested="float64")
    assert refused.backend is None
    assert "needs fp8_gemm" in refused.text()


def test_every_file_that_it_names_exists():
    for path in re.findall(r"\]\(([\w./]+)\)", TEXT) + re.findall(r"`((?:tests|fp4dispatch|bench)/[\w./]+)`", TEXT):
        assert (ROOT / path).exists(), path
