"""The kernel of CONTRIBUTING.md compiles, and its barriers are proven."""

from __future__ import annotations

import json
from pathlib import Path

from tests import contributing, copied_tree
from tests.compile.built_kernels import NEEDS_NVCC

pytestmark = NEEDS_NVCC


def test_the_example_compiles_and_is_proven(tmp_path: Path) -> None:
    tree = copied_tree.copy_to(tmp_path / "tree")
    contributing.follow(tree, "Add a kernel")
    command = contributing.BLOCKS["run: kernel"].split()[1:]
    copied_tree.run(tree, *command, "--out", str(tmp_path / "kernels"))
    (proof,) = (tmp_path / "kernels").rglob("proof.json")
    kernels = json.loads(proof.read_text())["kernels"]
    assert len(kernels) == 2  # bf16 and fp16
    assert all(kernel["wait"] == 1 and not kernel["unguarded"] for kernel in kernels)
