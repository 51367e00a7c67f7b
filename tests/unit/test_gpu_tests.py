"""Tests that need a GPU do not run in CI. What they take from other modules exists."""

from __future__ import annotations

import ast
import importlib
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "gpu"


def missing(name: str, text: str) -> Iterator[str]:
    """Yield ``module.name`` for each name of another module that a module uses, and that this does not have."""
    held = vars(importlib.import_module(name))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            of = held.get(node.value.id)
            if isinstance(of, types.ModuleType) and not hasattr(of, node.attr):
                yield f"{node.value.id}.{node.attr}"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_what_gpu_tests_take_from_modules_exists(path: Path) -> None:
    assert [*missing(f"tests.gpu.{path.stem}", path.read_text("utf-8"))] == []


def test_a_name_that_is_gone_is_seen() -> None:
    text = "few.SHAPE, few.NO_SUCH_NAME, many.W8"
    assert [*missing("tests.gpu.test_kernels_w8_blocks", text)] == ["few.NO_SUCH_NAME", "many.W8"]
