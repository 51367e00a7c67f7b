"""Every case of the mutation table: tests/compile/test_proof_mutants.py tries some, bench/mutants.py keeps all."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from fp4dispatch import jit
from fp4dispatch.jit.catalog.early_loads import EarlyLoads
from fp4dispatch.jit.catalog.manifest import installed
from tests.proof import code, listings, shipped, small

SMALL_TARGETS = ("90a", "100f", "120f")
POINTER, MAP = EarlyLoads("UBLKCP", (0, 8), (8, 16)), EarlyLoads("UTMALDG", (0, 128))
CONTROL = "none"
"""In place of a fault: a copy of the sources as they are, which must be accepted."""
JUDGED = 3
"""Kernels of one library that get faults: the others are launch shapes of the same template."""


class Build(NamedTuple):
    """One shared library of the manifest."""

    kernel: str
    variant: str
    target: str

    @property
    def id(self) -> str:
        """``kernel/variant/target``."""
        return "/".join(self)


class Planted(NamedTuple):
    """One fault in the sources of one build."""

    family: str
    fault: str
    build: Build

    @property
    def id(self) -> str:
        """``family/fault/kernel/variant/target``."""
        return f"{self.family}/{self.fault}/{self.build.id}"

    @property
    def kind(self) -> str:
        """The class of the fault; those of one family's own loads are named after it, ``moved_activations``."""
        return self.fault.split("_")[0]


def builds() -> list[Build]:
    """Return every kernel x variant x target with barriers."""
    return [
        Build(kernel.name, variant, target)
        for kernel in installed().kernels.values()
        for variant, target in itertools.product(kernel.variants, kernel.targets)
        if installed().record(target).gdc
    ]


def planted() -> list[Planted]:
    """Return every fault in the sources of every family, the controls first."""
    controls = [Planted(family, CONTROL, Build(*row)) for family, of in shipped.FAMILIES.items() for row in of.builds]
    return controls + [
        Planted(family, fault, Build(*row))
        for family, of in shipped.FAMILIES.items()
        for row in of.builds
        for fault in (*shipped.FAULTS, *shipped.OWN_FAULTS.get(family, ()))
    ]


def judge_small(target: str, folder: Path) -> dict[str, list[str]]:
    """Compile the small kernels for a target; return why each is refused, by name (``CLASS__NAME``)."""
    source = folder / "small.cu"
    source.write_text(small.source(target))
    found = code.small(source, target)
    return {
        kernel.name: found.refused(kernel, MAP if kernel.name.split("__")[1].startswith("map_") else POINTER)
        for kernel in found.kernels
    }


def judge_planted(case: Planted) -> list[list[str]]:
    """Compile a copy of the sources with a fault; return why each of its kernels is refused."""
    job = code.job_of(*case.build)
    with tempfile.TemporaryDirectory() as folder:
        csrc = shipped.copy_of_sources(Path(folder))
        if case.fault in shipped.FAULTS:
            shipped.plant(csrc, case.family, case.fault)
        elif case.fault != CONTROL:
            shipped.plant_own(csrc, case.family, case.fault)
        found = code.shipped(job, csrc, Path(folder))
    return [found.refused(kernel, job.kernel.before_wait) for kernel in found.kernels]


class Shipped(NamedTuple):
    """What the proof says of a shipped library and of faults in its machine code."""

    accepted: bool
    kernels: int
    accepted_mutants: list[str]
    """``kernel: class`` of every fault that is not refused."""
    mutants: Mapping[str, int]
    """Faults tried, by class."""


def judge_shipped(build: Build) -> Shipped:
    """Build a library, or take it from the cache; put faults into its first kernels."""
    built = jit.build(*build)
    declared = EarlyLoads.of_request(built.entry.request)
    found = code.of_library(built.entry.library)
    tried: dict[str, int] = {}
    missed: list[str] = []
    for kernel in found.kernels[:JUDGED]:
        for kind, mutant in listings.mutants(kernel, found.arguments[kernel.name], declared):
            tried[kind] = tried.get(kind, 0) + 1
            missed += [] if found.refused(mutant, declared) else [f"{kernel.name}: {kind}"]
    refused = [why for kernel in found.kernels for why in found.refused(kernel, declared)]
    return Shipped(built.proven and built.pdl_allowed and not refused, len(found.kernels), missed, tried)


def spread(cases: Iterable[Planted]) -> list[Planted]:
    """Return the cases so that a first part holds every class x target, and the next every class x family."""
    groups: dict[tuple[str, str], list[Planted]] = {}
    for case in cases:
        groups.setdefault((case.kind, case.build.target), []).append(case)
    turned = [rows[at % len(rows) :] + rows[: at % len(rows)] for at, rows in enumerate(groups.values())]
    ordered = [case for row in itertools.zip_longest(*turned) for case in row if case is not None]
    seen = {(case.kind, case.family) for case in ordered[: len(groups)]}
    new, rest = [], []
    for case in ordered[len(groups) :]:
        (rest if (case.kind, case.family) in seen else new).append(case)
        seen.add((case.kind, case.family))
    return [*ordered[: len(groups)], *new, *rest]
