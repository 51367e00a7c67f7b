"""The kernels that can be compiled: ``csrc/kernels.toml``, loaded strictly, together with the compile targets.

One (kernel, variant, target) is one shared library and one cache entry; nothing is compiled that was not asked for.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fp4dispatch import strict_toml
from fp4dispatch.errors import FlagsError
from fp4dispatch.jit.catalog import flags
from fp4dispatch.jit.catalog.early_loads import EarlyLoads
from fp4dispatch.problem.arch import Arch

_NAME = re.compile(r"[a-z0-9][a-z0-9_]*")
OPS = ("nvfp4_gemm", "fp8_gemm", "w4_gemm", "w8_gemm", "nvfp4_quantize", "fp8_quantize", "w4_activations", "w4_weights")
"""What kernels are for. ``w4_gemm``: NVFP4 weights by 16-bit or FP8 activations. It is not ``nvfp4_gemm``, which is
NVFP4 by NVFP4: a proof of the one says nothing about the other. Likewise ``w8_gemm``, FP8 weights by 16-bit or
FP8 activations of few tokens, and ``fp8_gemm``."""
CHECK_OPS = ("race_chain",)
"""Kernels that only check others."""


@dataclass(frozen=True)
class Variant:
    """One instance of a kernel's source: its id and the macros that make it."""

    id: str
    defines: tuple[str, ...]


@dataclass(frozen=True)
class Kernel:
    """One source file and what may be built from it.

    ``targets`` are in order of preference. ``pdl``: every kernel of the binary must wait for the previous grid before
    its first access of global memory. ``mma``: regular expression of the tensor-core opcode that every kernel of the
    binary must hold; None for kernels that need none. ``before_wait``: the only loads from global memory that may come
    before that wait, of what no kernel writes (weights); None for none.
    """

    name: str
    op: str
    source: str
    targets: tuple[str, ...]
    cutlass: bool
    pdl: bool
    mma: str | None
    variants: Mapping[str, Variant]
    before_wait: EarlyLoads | None = None

    def variant(self, variant_id: str) -> Variant:
        """Return a variant; FlagsError that lists the known ones where there is none of this id."""
        if variant_id not in self.variants:
            raise FlagsError(f"{self.name} has no variant {variant_id!r}; known: {', '.join(self.variants)}")
        return self.variants[variant_id]


@dataclass(frozen=True)
class Catalog:
    """Sources, kernels and compile targets of one installation (or of a test)."""

    csrc: Path
    common: flags.CommonFlags
    records: Mapping[str, flags.FlagRecord]
    kernels: Mapping[str, Kernel]

    @classmethod
    def load(cls, csrc: Path, jit_flags: Path) -> Catalog:
        """Load and check both folders; FlagsError names the file and key of the first fault."""
        common = flags.load_common(jit_flags)
        records = flags.load_records(jit_flags, common)
        return cls(csrc, common, records, load_manifest(csrc / "kernels.toml", records))

    def kernel(self, name: str) -> Kernel:
        """Return a kernel; FlagsError that lists the known ones where there is none of this name."""
        if name not in self.kernels:
            raise FlagsError(f"no kernel {name!r}; known: {', '.join(self.kernels)}")
        return self.kernels[name]

    def record(self, target: str) -> flags.FlagRecord:
        """Return a compile target; FlagsError that lists the known ones where there is none of this name."""
        if target not in self.records:
            raise FlagsError(f"no compile target {target!r}; known: {', '.join(self.records)}")
        return self.records[target]

    def target_for(self, kernel: Kernel, arch: Arch) -> str | None:
        """Return the first target of a kernel whose machine code runs on an arch; None where none does."""
        return next((target for target in kernel.targets if arch in self.records[target].archs), None)

    def jobs(self, archs: tuple[Arch, ...], ops: tuple[str, ...]) -> Iterator[tuple[Kernel, Variant, str]]:
        """Yield each (kernel, variant, target) that these archs and ops need, once."""
        for kernel in self.kernels.values():
            targets = dict.fromkeys(self.target_for(kernel, arch) for arch in archs) if kernel.op in ops else {}
            for target in targets:
                if target is not None:
                    yield from ((kernel, variant, target) for variant in kernel.variants.values())


@functools.cache
def installed() -> Catalog:
    """Return the catalog of this installation, loaded once."""
    return Catalog.load(_package_data("csrc"), _package_data("jit_flags"))


def load_manifest(path: Path, records: Mapping[str, flags.FlagRecord]) -> dict[str, Kernel]:
    """Load the kernels of a manifest, by name.

    Raises
    ------
    FlagsError
        For an unknown or missing key, an unknown op or target, a missing source file or a name used twice.
    """
    table = strict_toml.load(path)
    strict_toml.check(str(path), table, {"kernel": list})
    kernels: dict[str, Kernel] = {}
    for row in table["kernel"]:
        kernel = _kernel(path, row, records)
        if kernel.name in kernels:
            raise FlagsError(f"{path}: kernel {kernel.name!r} stands twice")
        kernels[kernel.name] = kernel
    return kernels


def _kernel(path: Path, row: object, records: Mapping[str, flags.FlagRecord]) -> Kernel:
    name = row.get("name", "?") if isinstance(row, dict) else "?"
    where = f"{path} kernel {name}"
    required = {
        **dict.fromkeys(("name", "op", "source"), str),
        **dict.fromkeys(("targets", "variants"), list),
        **dict.fromkeys(("cutlass", "pdl"), bool),
    }
    strict_toml.check(where, row, required, {"mma": str, "before_wait": dict})
    assert isinstance(row, dict)
    kernel = Kernel(
        name=_name(where, row["name"]),
        op=row["op"],
        source=row["source"],
        targets=strict_toml.texts(f"{where} targets", row["targets"]),
        cutlass=row["cutlass"],
        pdl=row["pdl"],
        mma=row.get("mma"),
        variants=_variants(where, row["variants"]),
        before_wait=_before_wait(where, row),
    )
    if kernel.op not in (*OPS, *CHECK_OPS):
        raise FlagsError(f"{where}: op {kernel.op!r} is not known; use one of {', '.join((*OPS, *CHECK_OPS))}")
    if Path(kernel.source).name != kernel.source or not (path.parent / kernel.source).is_file():
        raise FlagsError(f"{where}: source {kernel.source!r} is not a file of {path.parent}")
    if unknown := [target for target in kernel.targets if target not in records]:
        raise FlagsError(f"{where}: target {', '.join(unknown)} has no file in jit_flags (known: {', '.join(records)})")
    if not kernel.targets:
        raise FlagsError(f"{where}: needs at least one target")
    if kernel.mma is not None:
        flags.regex(f"{where} mma", kernel.mma)
    elif kernel.op.endswith("_gemm"):
        raise FlagsError(f"{where}: a GEMM must name the tensor-core instruction that it is for (mma)")
    return kernel


def _before_wait(where: str, row: Mapping[str, object]) -> EarlyLoads | None:
    if "before_wait" not in row:
        return None
    if not row["pdl"]:
        raise FlagsError(f"{where}: before_wait without pdl = true: nothing waits, so nothing can come before")
    return EarlyLoads.parse(f"{where} before_wait", row["before_wait"])


def _variants(where: str, rows: list[object]) -> dict[str, Variant]:
    variants: dict[str, Variant] = {}
    for row in rows:
        strict_toml.check(f"{where} variants", row, {"id": str, "defines": list})
        assert isinstance(row, dict)
        variant = Variant(_name(where, row["id"]), flags.defines(where, row["defines"]))
        if variant.id in variants:
            raise FlagsError(f"{where}: variant {variant.id!r} stands twice")
        variants[variant.id] = variant
    if not variants:
        raise FlagsError(f"{where}: needs at least one variant")
    return variants


def _name(where: str, name: str) -> str:
    """Names become parts of file names."""
    if not _NAME.fullmatch(name):
        raise FlagsError(f"{where}: name {name!r} may hold lower-case letters, digits and _ only")
    return name


def _package_data(name: str) -> Path:
    """Folder of package data: inside the package where it is installed, beside it in a source checkout."""
    spec = importlib.util.find_spec(f"fp4dispatch.{name}")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        return Path(location)
    checkout = Path(__file__).resolve().parents[3] / name
    if (checkout / "__init__.py").is_file():
        return checkout
    raise FlagsError(f"the package data {name}/ is missing from this installation; reinstall fp4dispatch")
