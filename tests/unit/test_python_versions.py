"""The sources are for every Python that pyproject.toml names, whichever runs the tests."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from fp4dispatch import strict_toml

ROOT = Path(__file__).parents[2]
PROJECT = strict_toml.load(ROOT / "pyproject.toml")["project"]
OLDEST = tuple(int(part) for part in re.fullmatch(r">=(\d+)\.(\d+)", PROJECT["requires-python"]).groups())
NEWER = {"tomllib": (3, 11), "annotationlib": (3, 14), "compression": (3, 14), "string.templatelib": (3, 14)}
"""Modules of the standard library, and the first Python that has them."""
SOURCES = [path for top in ("fp4dispatch", "tests", "bench") for path in sorted((ROOT / top).rglob("*.py"))]


def newer_imports(tree: ast.AST) -> set[str]:
    """Modules that the oldest Python lacks, but for those below a test of ``sys.version_info``."""
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "sys.version_info" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return {name for name in found if any(f"{name}.".startswith(f"{m}.") and v > OLDEST for m, v in NEWER.items())}


def test_sources_parse_and_import_as_the_oldest_python_can():
    assert len(SOURCES) > 500
    shipped = [path for path in (*SOURCES, ROOT / "setup.py") if path.is_relative_to(ROOT / "fp4dispatch")]
    for path in (*SOURCES, ROOT / "setup.py"):
        tree = ast.parse(path.read_text("utf-8"), str(path), feature_version=OLDEST)
        if path in shipped:
            assert not newer_imports(tree), path


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import tomllib", {"tomllib"}),
        ("from string.templatelib import Template", {"string.templatelib"}),
        ("import sys\nif sys.version_info >= (3, 11):\n    import tomllib\nelse:\n    import tomli as tomllib", set()),
        ("import json, string", set()),
    ],
)
def test_newer_modules_are_found(text, found):
    assert newer_imports(ast.parse(text)) == found


def test_newer_syntax_is_found():
    with pytest.raises(SyntaxError):
        ast.parse("try:\n    pass\nexcept* ValueError:\n    pass", feature_version=OLDEST)


def test_what_the_project_says_agrees():
    named = [f"Programming Language :: Python :: {OLDEST[0]}.{minor}" for minor in range(OLDEST[1], 14)]
    assert [word for word in PROJECT["classifiers"] if re.search(r"Python :: \d+\.", word)] == named
    tools = strict_toml.load(ROOT / "pyproject.toml")["tool"]
    assert tools["ruff"]["target-version"] == f"py{OLDEST[0]}{OLDEST[1]}"
    assert tools["mypy"]["python_version"] == ".".join(map(str, OLDEST))


@pytest.mark.parametrize("minor", range(OLDEST[1], 14))
def test_each_python_that_is_here_compiles_the_sources(minor):
    """The parser of a newer Python accepts some f-strings that an older one does not."""
    python = f"python{OLDEST[0]}.{minor}"
    code = "import sys; [compile(open(p, encoding='utf-8').read(), p, 'exec') for p in sys.stdin.read().split('\\0')]"
    try:
        subprocess.run([python, "-c", ""], capture_output=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        pytest.skip(f"{python} is not here")
    given = "\0".join(map(str, SOURCES))
    done = subprocess.run([python, "-c", code], input=given, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
