"""The proof accepts every shipped kernel and refuses every mutant. docs/proof.md shows the table.

Small mutants are compiled for every target. Faults in shipped kernels are put into a copy of the sources, and, because
CUTLASS takes a minute to compile, into the machine code of what is built anyway.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from fp4dispatch import jit
from fp4dispatch.jit.catalog.early_loads import EarlyLoads
from fp4dispatch.jit.catalog.manifest import installed
from fp4dispatch.machine import libraries
from tests.proof import code, listings, shipped, small

pytestmark = [pytest.mark.compile, pytest.mark.skipif(libraries.nvcc()[0] is None, reason="needs nvcc")]

TARGETS = ("90a", "100f", "120f")
POINTER, MAP = EarlyLoads("UBLKCP", (0, 8), (8, 16)), EarlyLoads("UTMALDG", (0, 128))
CLASSES = {*small.MUTANTS}


def test_there_are_enough_mutants() -> None:
    names = [name for classes in (small.MUTANTS, small.MAP_MUTANTS) for rows in classes.values() for name in rows]
    assert len(names) >= 60
    assert len(CLASSES) >= 12
    assert set(small.MAP_MUTANTS) <= CLASSES
    assert set(shipped.FAULTS) == CLASSES


@pytest.mark.parametrize("target", TARGETS)
def test_small_kernels(target: str, tmp_path: Path) -> None:
    source = tmp_path / "small.cu"
    source.write_text(small.source(target))
    found = code.small(source, target)
    wrong = []
    for kernel in found.kernels:
        kind, name = kernel.name.split("__", 1)
        refused = found.refused(kernel, MAP if name.startswith("map_") else POINTER)
        if bool(refused) == (kind == "good"):
            wrong.append((kernel.name, refused[:2]))
    assert wrong == []
    assert len(found.kernels) >= 60 + len(small.GOOD)


# ---- faults in the sources of shipped kernels ----

QUICK = {  # one build of a family, and what the issue of a moved load or a deleted barrier is about
    ("few_tokens", "moved_activations", "w4a16_small", "90a"),
    ("few_tokens", "deleted_producers_wait", "w8a16_small", "120f"),
    ("few_tokens", "pointer_of_activations", "w4a16_small", "120f"),
    ("few_tokens", "conditional", "w8a8_small", "90a"),
    ("many_tokens", "moved_activations", "w4_gemm_sm90", "90a"),
    ("many_tokens", "exit_of_idle_lanes", "w8_gemm_sm90", "90a"),
    ("many_tokens", "helper", "w4_gemm_sm90", "90a"),
    ("nvfp4_quantize", "moved", "nvfp4_quantize", "100f"),
    ("race_chain", "exit", "race_chain", "120f"),
    ("w4_to_e4m3", "store", "w4_to_e4m3", "90a"),
}

CONTROLS = (("w4a16_small", "bf16", "120f"), ("w8_gemm_sm90", "bf16_128", "90a"), ("nvfp4_quantize", "any", "100f"))


def planted() -> list[Any]:
    rows = []
    for family, of in shipped.FAMILIES.items():
        kinds = (*shipped.FAULTS, *shipped.OWN_FAULTS.get(family, ()))
        seen = set()
        for (kernel, variant, target), kind in itertools.product(of.builds, kinds):
            quick = (family, kind, kernel, target) in QUICK and (kind, kernel) not in seen
            seen |= {(kind, kernel)} if quick else set()
            name = f"{family}-{kind}-{kernel}-{variant}-{target}"
            rows.append(
                pytest.param(family, kind, kernel, variant, target, id=name, marks=() if quick else pytest.mark.slow)
            )
    return rows


@pytest.mark.parametrize(("family", "kind", "kernel", "variant", "target"), planted())
def test_a_fault_in_a_shipped_kernel(
    family: str, kind: str, kernel: str, variant: str, target: str, tmp_path: Path
) -> None:
    job = code.job_of(kernel, variant, target)
    csrc = shipped.copy_of_sources(tmp_path)
    if kind in shipped.FAULTS:
        shipped.plant(csrc, family, kind)
    else:
        shipped.plant_own(csrc, family, kind)
    found = code.shipped(job, csrc, tmp_path)
    refused = [found.refused(kernel, job.kernel.before_wait) for kernel in found.kernels]
    assert any(refused), "not one of its kernels was refused"


@pytest.mark.parametrize(
    ("kernel", "variant", "target"),
    [
        pytest.param(*build, id="-".join(build), marks=() if build in CONTROLS else pytest.mark.slow)
        for of in shipped.FAMILIES.values()
        for build in of.builds
    ],
)
def test_a_copy_without_fault_is_accepted(kernel: str, variant: str, target: str, tmp_path: Path) -> None:
    job = code.job_of(kernel, variant, target)
    found = code.shipped(job, shipped.copy_of_sources(tmp_path), tmp_path)
    assert [found.refused(kernel, job.kernel.before_wait) for kernel in found.kernels] == [[]] * len(found.kernels)


# ---- faults in the machine code of shipped kernels ----


def everything() -> list[Any]:
    """Every kernel x variant x target with barriers; quick: one of each kernel that other tests build anyway."""
    quick = {
        *(("w4a16_small", "bf16", "90a"), ("w8a16_small", "bf16", "90a"), ("w8a8_small", "bf16", "90a")),
        *(("w4a8_small", "bf16", "90a"), ("w4_activations", "any", "90a"), ("nvfp4_quantize", "any", "90a")),
        *(("fp8_quantize", "any", "90a"), ("nvfp4_gemm_sm120", "bf16_128x128", "120f")),
        *(("fp8_gemm_sm90", "row_bf16_swap_64x16", "90a"),),
    }
    return [
        pytest.param(*row, id="-".join(row), marks=() if row in quick else pytest.mark.slow)
        for kernel in installed().kernels.values()
        for row in itertools.product((kernel.name,), kernel.variants, kernel.targets)
        if installed().record(row[2]).gdc
    ]


@pytest.mark.parametrize(("kernel", "variant", "target"), everything())
def test_shipped_kernels_are_accepted_and_their_mutants_refused(kernel: str, variant: str, target: str) -> None:
    built = jit.build(kernel, variant, target)
    assert built.proven
    assert built.pdl_allowed
    declared = EarlyLoads.of_request(built.entry.request)
    found = code.of_library(built.entry.library)
    for read in found.kernels[:3]:
        assert found.refused(read, declared) == []
        for kind, mutant in listings.mutants(read, found.arguments[read.name], declared):
            assert found.refused(mutant, declared), f"{read.name}: {kind}"


def test_the_page_shows_every_class_and_count() -> None:
    text = (Path(__file__).parents[2] / "docs" / "proof.md").read_text()
    for kind, rows in small.MUTANTS.items():
        count = len(rows) + len(small.MAP_MUTANTS.get(kind, ()))
        (row,) = (line for line in text.splitlines() if line.startswith(f"| {kind} | {count} |"))
        assert [cell.strip() for cell in row.split("|")[4:-1:2]] == [f"{count} of {count}"] * len(TARGETS), row
