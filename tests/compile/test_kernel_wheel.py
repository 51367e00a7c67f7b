"""A wheel of real kernels: a fresh process with an empty cache and no nvcc loads its kernels from it. No GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import kernel_wheel

pytestmark = pytest.mark.compile

PROGRAM = """
from fp4dispatch.jit import kernels, packages
from fp4dispatch.problem.arch import Arch
loaded = kernels.load("race_chain", "any", Arch(9, 0))
assert loaded.pdl_allowed and loaded.built.cached
assert loaded.built.entry.folder.is_relative_to(packages.packages()[0].folder)
assert callable(loaded.module["produce"]), loaded.module
(report,) = packages.reports()
print(kernels.builds_done(), report.usable, report.ignored)
"""


def test_kernels_load_from_a_wheel_without_a_compiler(tmp_path: Path) -> None:
    site = kernel_wheel.install(tmp_path, "--ops", "race_chain")
    said = kernel_wheel.run(site, PROGRAM, tmp_path / "empty")
    assert said.strip() == "0 ('race_chain/any-90a',) {}"
    assert not (tmp_path / "empty" / "kernels").exists()
