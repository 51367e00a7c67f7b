"""The worked examples of CONTRIBUTING.md, followed to the letter: a plug-in, a built-in, a kernel, a format."""

from __future__ import annotations

import ast
import re
import sys
from importlib.metadata import EntryPoint
from typing import get_args

import pytest
import torch

from fp4dispatch.backends import registry
from fp4dispatch.backends.activations import quantize_activation
from fp4dispatch.backends.reference import ReferenceBackend
from fp4dispatch.errors import InputError
from fp4dispatch.machine.system import System
from fp4dispatch.policy import resolve
from fp4dispatch.policy.catalogue import catalogue
from fp4dispatch.problem import ACTIVATIONS, Activation, Problem
from fp4dispatch.problem.measurement import EXACTNESS
from fp4dispatch.trust import canary
from tests import contract, contributing, copied_tree
from tests.contributing import BLOCKS, BUILTIN, ROOT, TEXT
from tests.golden import regenerate

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# ------------------------------------------------------------------------------------------------------------- plug-in


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Install the example as its text says: the file, then the entry point."""
    (tmp_path / "float64_backend.py").write_text(BLOCKS["file: float64_backend.py"])
    monkeypatch.syspath_prepend(tmp_path)
    points = tomllib.loads(BLOCKS["entry point"])["project"]["entry-points"][registry.GROUP]
    yield registry.plugins([EntryPoint(name, value, registry.GROUP) for name, value in points.items()])
    sys.modules.pop("float64_backend", None)


taken = pytest.mark.skipif("float64" in registry.BUILTINS, reason="the example is a built-in of this tree")


@taken
def test_example_is_a_backend_that_keeps_the_contract(plugin):
    backend = plugin["float64"]
    assert not isinstance(backend, registry.BrokenBackend), backend.reason
    here = System.fake(arch=None)
    runnable = [case for case in contract.cases(backend) if not contract.unsupported(backend, case, here)]
    assert {case.scaling for case in runnable} == {"tensor", "row", "block128"}
    for case in runnable:
        contract.check(backend, case)


@taken
def test_example_is_judged_by_the_policy(plugin):
    here = System.fake(arch=None)
    decision = resolve.resolve(Problem("fp8_gemm", 1, 64, 64, scaling="row"), here, plugin, requested="float64")
    assert decision.backend == "float64"
    refused = resolve.resolve(Problem("nvfp4_gemm", 1, 64, 64), here, plugin, requested="float64")
    assert refused.backend is None
    assert "needs fp8_gemm" in refused.text()


def test_every_file_that_it_names_exists():
    named = re.findall(r"\]\(([\w./]+)\)", TEXT) + re.findall(r"`((?:tests|fp4dispatch|bench)/[\w./]+)`", TEXT)
    assert BUILTIN in named
    for path in named:
        assert (ROOT / path).exists() or path == BUILTIN, path


# ------------------------------------------------------------------------------------------------------------ built in


@pytest.fixture(scope="module")
def builtin(tmp_path_factory):
    """A copy of the tree with the example built in; only the generated tables are left to do."""
    tree = copied_tree.copy_to(tmp_path_factory.mktemp("builtin") / "tree")
    touched = contributing.follow(tree, "Add a backend")
    assert touched == [BUILTIN, "fp4dispatch/backends/registry.py", "fp4dispatch/policy/capabilities.toml"]
    return tree


@taken
def test_a_built_in_backend_is_one_file_one_line_and_one_record(builtin):
    copied_tree.run(builtin, "-m", "ruff", "check", BUILTIN, "fp4dispatch/backends/registry.py")
    question = ("fp8_gemm", "-m", "1", "-n", "64", "-k", "64", "--backend", "float64", "--arch", "9.0")
    said = copied_tree.run(builtin, "-m", "fp4dispatch", "explain", *question)
    assert "float64 was asked for by argument" in said
    files = ("registry", "policy_capability")
    copied_tree.run(builtin, "-m", "pytest", "-q", "-x", *(f"tests/unit/test_{name}.py" for name in files))


@taken
@pytest.mark.slow
def test_no_other_test_fails_for_a_built_in_backend(builtin):
    """All files that know the backends, the policy, the layout or the wheel."""
    for command in BLOCKS["run: backend"].split(" && "):
        copied_tree.run(builtin, *command.split()[1:])
    changed = regenerate.compare(regenerate.read(regenerate.TABLE.read_text()), _golden(builtin))
    assert changed == []  # `auto = false`: no choice changes
    names = (
        "policy* registry layout contributing packaging backend_contract defaults dispatch explain measurement readme"
    )
    names += " selfcheck* tuned_store unknown_names whole_models"
    files = [str(path) for name in names.split() for path in sorted((builtin / "tests/unit").glob(f"test_{name}.py"))]
    copied_tree.run(builtin, "-m", "pytest", "-q", *files, timeout=1800)


@taken
@pytest.mark.slow
def test_a_built_in_that_auto_may_choose_changes_few_golden_rows(builtin):
    record = builtin / "fp4dispatch/policy/capabilities.toml"
    before = record.read_text()
    head, found, tail = before.rpartition("auto = false\n")
    assert found
    try:
        record.write_text(head + tail)
        copied_tree.run(builtin, "-m", "tests.golden.regenerate")
        changed = regenerate.compare(regenerate.read(regenerate.TABLE.read_text()), _golden(builtin))
    finally:
        record.write_text(before)
    assert any("float64" in line for line in changed)
    assert len(changed) <= 60


def _golden(tree):
    return regenerate.read((tree / regenerate.TABLE.relative_to(ROOT)).read_text())


# -------------------------------------------------------------------------------------------------------------- kernel


def test_a_kernel_is_known_to_the_manifest_the_pdl_trial_and_the_race(tmp_path):
    tree = copied_tree.copy_to(tmp_path / "tree")
    places = contributing.follow(tree, "Add a kernel")
    assert len(places) == 4  # and the two that depend on what the kernel is for
    said = copied_tree.run(tree, "-c", _KERNEL)
    assert said.split() == ["90a", "row_amax", "('x',", "'out_token_scale')", "row_amax/amax"]
    copied_tree.run(tree, "-m", "pytest", "-q", "tests/unit/test_jit_flags.py", "tests/unit/test_pdl.py")


_KERNEL = """
from fp4dispatch.backends.own.pdl_trial.launch_operands import entries
from fp4dispatch.jit.catalog.manifest import installed
from fp4dispatch.problem.arch import SM90
from fp4dispatch.trust.race import CASES
kernel, variant, target = next(job for job in installed().jobs((SM90,), ("fp8_quantize",)) if job[0].name == "row_amax")
(entry,) = entries(kernel, variant)
(case,) = (case for case in CASES if case.kernel == kernel.name)
print(target, entry.function, entry.arguments, case.name.split()[0])
"""


# -------------------------------------------------------------------------------------------------- activation format

FORMATS = ACTIVATIONS[1:]
ALL_FORMATS = ("backends/activations.py", "backends/reference.py")
"""Of backends/: what must know every format. The others say for themselves which ones they have."""
TABLE = re.findall(r"^\| `(fp4dispatch/[\w./]+)` \|", TEXT, re.MULTILINE)


def lacking(name: str) -> set[str]:
    """Places that can be asked, and do not know a format."""
    reference = {f for formats in ReferenceBackend.activations.values() for f in formats}
    declared = {f for record in catalogue().capabilities if record.backend == "reference" for f in record.activations}
    asked = {
        "fp4dispatch/problem/problem.py": name in get_args(Activation),
        "fp4dispatch/problem/measurement.py": name in EXACTNESS,
        "fp4dispatch/backends/activations.py": name == "bf16" or _quantises(name),
        "fp4dispatch/backends/reference.py": name in reference,
        "fp4dispatch/policy/capabilities.toml": name in declared,
        "fp4dispatch/trust/canary.py": name in canary.ACCUMULATE,
    }
    return {path for path, known in asked.items() if not known}


def _quantises(name: str) -> bool:
    try:
        quantize_activation(torch.ones(16, 32, dtype=torch.bfloat16), name, "nvfp4" if name == "nvfp4" else "row")
    except InputError:
        return False
    return True


def named_in(tree: ast.Module) -> bool:
    """Whether a module compares an activation with a format, or lists all of them."""
    for node in ast.walk(tree):
        texts = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)} & set(FORMATS)
        if isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict) and texts == set(FORMATS):
            return True
        names = {getattr(each, "attr", getattr(each, "id", "")) for each in ast.walk(node)}
        if isinstance(node, ast.Compare) and texts and any("activation" in str(name) for name in names):
            return True
    return False


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_known_in_every_place(name):
    assert lacking(name) == set()


def test_a_format_that_is_only_a_word_is_noticed():
    assert lacking("int8") <= set(TABLE)
    assert len(lacking("int8")) == 6


def test_the_places_of_a_format_are_those_of_the_table():
    package = ROOT / "fp4dispatch"
    names = [path.relative_to(package).as_posix() for path in package.rglob("*.py")]
    asked = [name for name in names if not name.startswith("backends/") or name in ALL_FORMATS]
    found = {f"fp4dispatch/{name}" for name in asked if named_in(ast.parse((package / name).read_text()))}
    assert sorted({*found, "fp4dispatch/policy/capabilities.toml"}) == sorted(TABLE)
    assert named_in(ast.parse("if problem.activation == 'fp8': pass"))
    assert not named_in(ast.parse("if problem.scaling == 'nvfp4': pass"))
