"""What a model needs is compiled at once; only the compiler is pretended."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from fp4dispatch.errors import CompileError
from fp4dispatch.jit import building, kernels
from fp4dispatch.jit.catalog.manifest import Catalog
from fp4dispatch.problem.arch import Arch
from tests.jit_cases import MANIFEST, Fake, fake_toolchain, tiny_catalog

ARCH = Arch(12, 0)
WITH_CUTLASS = MANIFEST + MANIFEST.replace('name = "tiny"', 'name = "large"').replace("= false", "= true")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = fake_toolchain(tmp_path / "toolchain")
    monkeypatch.setenv("FP4DISPATCH_NVCC", str(made.nvcc))
    monkeypatch.setenv("PATH", f"{made.nvcc.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FP4DISPATCH_CACHE_DIR", str(tmp_path / "cache"))
    headers = tmp_path / "cutlass" / "include" / "cutlass"
    headers.mkdir(parents=True)
    version = "#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 5\n#define CUTLASS_PATCH 0\n"
    (headers / "version.h").write_text(version)
    (headers / "cutlass.h").write_text("// pretended\n")
    (tmp_path / "cutlass" / "tools" / "util" / "include").mkdir(parents=True)
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path / "cutlass"))
    monkeypatch.setattr(kernels, "_asked", set())
    monkeypatch.setattr(building, "_compiled", [])
    return made


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return tiny_catalog(tmp_path / "csrc", manifest=WITH_CUTLASS)


EVERY = [(kernel, variant) for kernel in ("tiny", "large") for variant in ("one", "two")]


def test_with_and_without_cutlass_compile_side_by_side(fake: Fake, catalog: Catalog, monkeypatch) -> None:
    runs = []
    real = building.compile_jobs
    monkeypatch.setattr(building, "compile_jobs", lambda *a, **k: runs.append(len(a[0])) or real(*a, **k))
    fake.set_seconds(0.4)
    kernels.build_together([*EVERY, EVERY[0]], ARCH, catalog=catalog)
    assert runs == [4]
    assert fake.calls() == 4
    assert [name for name, _ in kernels.compiled()] == [f"{kernel}/{variant}-120f" for kernel, variant in EVERY]
    assert all(0.4 <= seconds < 5 for _, seconds in kernels.compiled())
    calls = [json.loads(line) for line in (fake.folder / "calls").read_text().splitlines()]
    assert sum("inc/cutlass" in " ".join(call) for call in calls) == 2  # only those that asked for its headers
    assert all(kernels.find(*name, "120f", catalog=catalog) for name in EVERY)


def test_what_is_finished_is_not_compiled_and_nothing_is_looked_at_twice(fake: Fake, catalog: Catalog, monkeypatch):
    kernels.build("tiny", "one", "120f", catalog=catalog)
    kernels.build_together(EVERY[:2], ARCH, catalog=catalog)
    assert fake.calls() == 2
    monkeypatch.setattr(kernels, "find", lambda *a, **k: pytest.fail("looked again"))
    started = time.perf_counter()
    kernels.build_together(EVERY[:2], ARCH, catalog=catalog)
    assert time.perf_counter() - started < 0.05


def test_kernels_whose_headers_are_missing_do_not_hold_up_the_others(fake: Fake, catalog: Catalog, monkeypatch) -> None:
    monkeypatch.setenv("CUTLASS_PATH", str(fake.folder))
    kernels.build_together(EVERY, ARCH, catalog=catalog)
    assert [name for name, _ in kernels.compiled()] == ["tiny/one-120f", "tiny/two-120f"]


def test_what_cannot_be_built_is_left_to_whoever_loads_it(fake: Fake, catalog: Catalog) -> None:
    fake.nvcc.write_text(
        fake.nvcc.read_text().replace('if "BROKEN"', 'if any("ADD=2" in word for word in sys.argv) or "BROKEN"')
    )
    kernels.build_together(EVERY[:2], ARCH, catalog=catalog)
    assert kernels.find("tiny", "one", "120f", catalog=catalog) is not None
    with pytest.raises(CompileError):
        kernels.build("tiny", "two", "120f", catalog=catalog)
    kernels.build_together([("tiny", "one")], Arch(7, 5), catalog=catalog)  # no target: nothing to do
