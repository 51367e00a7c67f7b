"""What is missing or too old is said completely, each with its fix; nothing is run for the pure part."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from fp4dispatch.errors import ToolchainError
from fp4dispatch.jit.catalog.flags import load_common, load_records
from fp4dispatch.jit.compiler import limits, toolchain
from fp4dispatch.machine import libraries
from fp4dispatch.machine.libraries import Library
from tests.jit_cases import JIT_FLAGS, fake_toolchain

COMMON = load_common(JIT_FLAGS)
RECORDS = load_records(JIT_FLAGS, COMMON)
CUTLASS = Library("4.5.0")
NVCC = Library("13.0.88", "/usr/local/cuda/bin/nvcc")


def reasons(target: str = "120f", nvcc: Library | None = NVCC, cutlass: Library | None = CUTLASS) -> list[str]:
    found = toolchain.toolchain_reasons(RECORDS[target], COMMON, nvcc=nvcc, cutlass=cutlass)
    assert all(reason.fix for reason in found)
    return [reason.text for reason in found]


def test_a_complete_toolchain_has_no_reasons() -> None:
    for target in RECORDS:
        assert reasons(target) == []


def test_too_old_and_missing_are_all_listed() -> None:
    old = reasons(nvcc=Library("12.8.93", "/usr/bin/nvcc"), cutlass=Library("4.4.2", "/src/cutlass"))
    assert old[:2] == [
        "nvcc 12.8.93 at /usr/bin/nvcc cannot build target 120f (needs 12.9)",
        "CUTLASS 4.4.2 at /src/cutlass is too old (needs 4.5.0)",
    ]
    assert reasons(nvcc=None, cutlass=None) == [
        "no nvcc was found to build target 120f",
        "the CUTLASS headers were not found",
    ]
    assert reasons(nvcc=Library("who knows"))[0].startswith("nvcc who knows")


def test_each_target_has_its_own_first_nvcc() -> None:
    at_12_9 = Library("12.9.86", "/nvcc")
    assert {target for target in RECORDS if reasons(target, nvcc=at_12_9)} == {"110a"}
    at_12_4 = Library("12.4.131", "/nvcc")
    assert {target for target in RECORDS if not reasons(target, nvcc=at_12_4)} == {"80", "89", "90a"}


def test_a_kernel_without_cutlass_needs_none() -> None:
    assert toolchain.toolchain_reasons(RECORDS["90a"], COMMON, nvcc=NVCC, cutlass=None, needs_cutlass=False) == ()


def test_half_a_cutlass_checkout_is_refused(tmp_path: Path) -> None:
    assert "not a whole CUTLASS checkout" in reasons(cutlass=Library("4.5.0", str(tmp_path)))[0]
    (tmp_path / "tools" / "util" / "include").mkdir(parents=True)
    assert reasons(cutlass=Library("4.5.0", str(tmp_path))) == []


def test_locate_says_everything_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("FP4DISPATCH_NVCC", str(tmp_path / "nvcc"))
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ninja", None)
    monkeypatch.setattr(toolchain.libraries, "package_folder", lambda name: None)
    with pytest.raises(ToolchainError) as caught:
        toolchain.locate(RECORDS["120f"], COMMON, needs_cutlass=True)
    text = str(caught.value)
    for part in (
        "no nvcc",
        "CUTLASS headers",
        "host compiler",
        "ninja",
        "apache-tvm-ffi",
        "note: nvcc: FP4DISPATCH_NVCC",
    ):
        assert part in text, part
    assert text.count("fix: ") == 5


def test_locate_finds_the_headers_without_importing_their_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)  # another test may have imported it
    fake = fake_toolchain(tmp_path / "toolchain")
    monkeypatch.setenv("FP4DISPATCH_NVCC", str(fake.nvcc))
    monkeypatch.setenv("PATH", f"{fake.nvcc.parent}:{os.environ['PATH']}")
    cutlass = tmp_path / "cutlass"
    (cutlass / "tools" / "util" / "include").mkdir(parents=True)
    version = cutlass / "include" / "cutlass" / "version.h"
    version.parent.mkdir(parents=True)
    version.write_text("#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 6\n#define CUTLASS_PATCH 1\n")
    monkeypatch.setenv("CUTLASS_PATH", str(cutlass))
    found = toolchain.locate(RECORDS["120f"], COMMON, needs_cutlass=True)
    assert found.nvcc == fake.nvcc
    assert found.header_versions["cutlass"] == "4.6.1"
    assert (found.includes["tvm_ffi"] / "tvm" / "ffi" / "tvm_ffi.h").is_file()
    assert found.versions() == {"nvcc": "13.0.88", "host": "g++ (pretended) 1.0"}
    assert "flashinfer" not in sys.modules
    version.write_text(version.read_text().replace("MINOR 6", "MINOR 4"))
    with pytest.raises(ToolchainError, match=r"CUTLASS 4\.4\.1 at .* is too old \(needs 4\.5\.0\)"):
        toolchain.locate(RECORDS["120f"], COMMON, needs_cutlass=True)


def no_wheels(monkeypatch: pytest.MonkeyPatch, triton: Path | None) -> None:
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    real = libraries.package_folder
    monkeypatch.setattr(libraries, "package_folder", lambda name: triton if name == "triton" else real(name))


def tool(path: Path, version: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release 12.9, V{version}'\n")
    path.chmod(0o755)


def test_the_disassembler_comes_from_path_else_from_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundled = tmp_path / "triton"
    no_wheels(monkeypatch, bundled)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    if shutil.which("cuobjdump"):
        pytest.skip("this system has a disassembler on its standard PATH")
    with pytest.raises(
        ToolchainError, match=r"no cuobjdump and no nvdisasm.*\n  fix: pip install nvidia-cuda-cuobjdump"
    ):
        toolchain.disassembler("12.9")
    for name in ("cuobjdump", "nvdisasm"):
        tool(bundled / "backends" / "nvidia" / "bin" / name, "12.9.82")
    assert toolchain.disassembler("12.9").version == "12.9.82"
    tool(tmp_path / "bin" / "cuobjdump", "13.1.5")
    mixed = toolchain.disassembler("12.9")
    assert (mixed.cuobjdump.parent.name, mixed.version) == ("bin", "12.9.82")
    with pytest.raises(ToolchainError, match=r"is 12\.9\.82 \(needs 13\.0\)"):
        toolchain.disassembler("13.0")


def test_jobs_are_bounded_by_cores_memory_and_max_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MAX_JOBS", raising=False)
    machine = limits.Limits(cores=16, memory_gb=32)
    assert machine.jobs(6.0, 20) == 5
    assert machine.jobs(1.5, 100) == 16
    assert machine.jobs(6.0, 2) == 2
    assert limits.Limits(cores=4, memory_gb=2).jobs(6.0, 8) == 1
    monkeypatch.setenv("MAX_JOBS", "3")
    assert machine.jobs(6.0, 20) == 3
    here = limits.limits()
    assert here.cores >= 1
    assert 0 < here.memory_gb < 1e5
