"""A wheel of real kernels: a fresh process with an empty cache and no nvcc loads its kernels from it. No GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import kernel_wheel

pytestmark = pytest.mark.compile

FLOOR = {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13), "GCC": (8, 0, 0)}
"""Newest symbol versions that a kernel may need: those of RHEL 9, which docs/containers.md names."""


def too_new(listing: str) -> set[str]:
    """Return the versions in what ``objdump -T`` prints that are above the floor, or of an unknown library."""
    named = set(re.findall(r"\b([A-Z]+)_(\d+(?:\.\d+)+)\b", listing))
    return {
        f"{library}_{version}"
        for library, version in named
        if library not in FLOOR or tuple(map(int, version.split("."))) > FLOOR[library]
    }


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
    if shutil.which("objdump") is None:
        pytest.skip("objdump, which lists the symbols that a library needs, is not here")
    kernels = list(site.rglob("kernel.so"))
    assert kernels
    for kernel in kernels:
        listing = subprocess.run(["objdump", "-T", str(kernel)], capture_output=True, text=True, check=True).stdout
        assert "GLIBC_2." in listing
        assert not too_new(listing)


def test_symbols_of_newer_systems_are_found() -> None:
    listing = "0000 DF *UND* 0000 (GLIBCXX_3.4.32) _ZSt\n0000 DF *UND* 0000 (GLIBC_2.2.5) free\n0 (GLIBC_2.38) strtol"
    assert too_new(listing) == {"GLIBCXX_3.4.32", "GLIBC_2.38"}
    assert too_new("0000 (OTHER_1.2) x") == {"OTHER_1.2"}
