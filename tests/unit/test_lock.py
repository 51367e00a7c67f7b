"""requirements-ci.lock: every package of the tests by hash, at the versions of constraints.txt; no index is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.lock import BY_TORCH, LOCK

tomllib = pytest.importorskip("tomllib")

ROOT = Path(__file__).parents[2]
TEXT = LOCK.read_text("utf-8")
ENTRY = re.compile(
    r"^(?P<requirement>[A-Za-z0-9][^\s\\#]*==[^\\\n]*?) \\\n(?P<hashes>(?:    --hash=.*\n?)+)", re.MULTILINE
)


def entries() -> list[tuple[Requirement, str]]:
    return [(Requirement(m["requirement"]), m["hashes"]) for m in ENTRY.finditer(TEXT)]


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def test_every_entry_has_hashes_and_no_line_is_anything_else():
    assert len(entries()) > 50
    for requirement, hashes in entries():
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", hashes), requirement
    rest = ENTRY.sub("", TEXT)
    assert [line for line in rest.splitlines() if line and not line.startswith("#")] == []


def test_no_address_is_written():
    assert not re.search(r"://|--(?:extra-)?index|--find-links|@ ", TEXT)


def test_versions_are_those_of_the_constraints():
    constraints = pinned()
    for requirement, _ in entries():
        version = str(requirement.specifier).removeprefix("==")
        assert constraints.get(requirement.name, version) == version, requirement


def test_all_that_the_tests_name_is_in_it():
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    extras = project["optional-dependencies"]
    named = [*project["dependencies"], *extras["test"], *extras["jit"], *extras["demo"], *extras["transformers"]]
    named += (ROOT / "tests" / "requirements-oracles.txt").read_text("utf-8").splitlines()
    wanted = {Requirement(line).name for line in named if line and not line.startswith("#")}
    old = {"fp4dispatch", "tomli"}  # itself, and what only Python 3.10 needs
    assert wanted - old - set(BY_TORCH) - {requirement.name for requirement, _ in entries()} == set()


def test_torch_and_what_only_its_builds_for_cuda_need_is_not_in_it():
    assert {requirement.name for requirement, _ in entries()} & set(BY_TORCH) == set()


def test_ci_installs_it_before_the_documented_command():
    text = (ROOT / ".ci" / "run").read_text("utf-8")
    assert text.index("--require-hashes --no-deps -r requirements-ci.lock") < text.index("tests/readme.py test")
