"""The data behind capabilities (``capabilities.toml``): typed records and their strict loader. No torch."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from fp4dispatch import strict_toml
from fp4dispatch.errors import SettingsError
from fp4dispatch.problem import ACTIVATIONS, OPS, OUT_DTYPES, SCALINGS, SF_LAYOUTS, Activation, Op
from fp4dispatch.problem.arch import KNOWN_ARCHS

FILE = Path(__file__).with_name("capabilities.toml")
ANY_ARCH = "any"
MEASURED = "docs/measurements.md"
TOOLKIT = "toolkit"
FACTS = ("cuda", "torch", "cudnn", "cudnn_frontend", "flashinfer", "cutlass", "nvcc")
"""Facts of a :class:`~fp4dispatch.machine.system.System` that the data files may ask a version of."""

PROPERTIES = ("tma_from_live_m",)
"""Properties that a deny rule may name instead of backends."""

SM = tuple(arch.sm for arch in KNOWN_ARCHS)


@dataclass(frozen=True)
class Requirement:
    """A lowest version of something that the machine must have; ``toolkit`` = the first CUDA that knows the arch."""

    what: str
    min: str


@dataclass(frozen=True)
class Capability:
    """What one backend can do for one op, some of its scalings, and some archs."""

    backend: str
    op: Op
    archs: tuple[str, ...]
    activations: tuple[Activation, ...]
    scalings: tuple[str, ...]
    out_dtypes: tuple[str, ...]
    source: str
    checked: str
    n_multiple: int = 1
    k_multiple: int = 1
    sf_layouts: tuple[str, ...] = ()
    compiles: bool = False
    proof: bool = False
    requires: tuple[Requirement, ...] = ()
    kernel_op: str = ""
    raw: bool = True
    tma_from_live_m: bool = False
    auto: bool = True

    @property
    def proven_by(self) -> str:
        """The op of the kernels whose proof counts, as ``csrc/kernels.toml`` names it."""
        return self.kernel_op or self.op


@dataclass(frozen=True)
class Toolkit:
    """The first CUDA release whose libraries (``cuda``) and compiler (``nvcc``) know an arch."""

    cuda: str
    nvcc: str
    source: str
    checked: str


@dataclass(frozen=True)
class Alias:
    """A backend name from another project, and what it means here."""

    name: str
    backend: str
    note: str


@dataclass(frozen=True)
class Catalogue:
    """Everything that ``capabilities.toml`` says."""

    capabilities: tuple[Capability, ...]
    toolkits: dict[str, Toolkit]
    aliases: dict[str, Alias]

    @property
    def backends(self) -> tuple[str, ...]:
        """Names of the declared backends, in the file's order."""
        return tuple(dict.fromkeys(c.backend for c in self.capabilities))

    @functools.cached_property
    def named_only(self) -> frozenset[str]:
        """Names of the backends that ``auto`` never chooses: ``auto = false`` in each of their records."""
        return frozenset(self.backends) - {c.backend for c in self.capabilities if c.auto}


def parse_version(text: str) -> Version | None:
    """Return a comparable version, or None where the text is not one (a vendor's build tag)."""
    try:
        return Version(text)
    except InvalidVersion:
        return None


@functools.cache
def catalogue() -> Catalogue:
    """Return the packaged ``capabilities.toml``, read once."""
    return load(strict_toml.load(FILE, error=SettingsError))


def load(data: dict[str, Any]) -> Catalogue:
    """Check the parsed file strictly and return it typed.

    Raises
    ------
    SettingsError
        For a key that is missing, unknown or of the wrong type, an unknown arch, op, format or fact, an unreadable
        version, or a duplicate.
    """
    check("capabilities.toml", data, {"capability": list, "toolkit": list}, {"alias": list})
    toolkits = {arch: tk for row in data["toolkit"] for arch, tk in _toolkit(row).items()}
    records = tuple(_capability(row) for row in data["capability"])
    seen: set[tuple[str, ...]] = set()
    for record in records:
        for key in itertools.product([record.backend], [record.op], record.scalings, record.archs):
            if key in seen:
                raise SettingsError(f"capabilities.toml: {' '.join(key)} is declared twice")
            seen.add(key)
    names = {record.backend for record in records}
    aliases = {alias.name: alias for alias in map(_alias, data.get("alias", ()))}
    for alias in aliases.values():
        if alias.backend not in names or alias.name in names:
            raise SettingsError(f"capabilities.toml: alias {alias.name!r} must be new and name a declared backend")
    return Catalogue(records, toolkits, aliases)


def having(what: str, op: str = "", scaling: str = "", arch: str = "") -> tuple[str, ...]:
    """Return the backends that have one of :data:`PROPERTIES`, for what is given of op, scaling and arch."""
    found = (
        c.backend
        for c in catalogue().capabilities
        if getattr(c, what)
        and (not op or op == c.op)
        and (not scaling or scaling in c.scalings)
        and (not arch or arch in c.archs)
    )
    return tuple(dict.fromkeys(found))


def kernel_ops(op: Op) -> tuple[str, ...]:
    """Return the ops of our own kernels, as ``csrc/kernels.toml`` names them, that backends run an op with."""
    return tuple(dict.fromkeys(c.proven_by for c in catalogue().capabilities if c.op == op and c.proof))


check = functools.partial(strict_toml.check, error=SettingsError)
subset = functools.partial(strict_toml.names, error=SettingsError)


def provenance(where: str, row: dict[str, Any]) -> tuple[str, str]:
    """Return the source (a URL, or this project's own measurements) and the date it was checked, ISO."""
    source: str = row["source"]
    checked: date = row["checked"]
    if not source.startswith("https://") and source != MEASURED:
        raise SettingsError(f"{where}: source {source!r} is neither a https URL nor {MEASURED}")
    return source, checked.isoformat()


def _toolkit(row: dict[str, Any]) -> dict[str, Toolkit]:
    where = "capabilities.toml: toolkit"
    check(where, row, {"archs": list, **strict_toml.keys_of(Toolkit, checked=date)[0]})
    for key in ("cuda", "nvcc"):
        if parse_version(row[key]) is None:
            raise SettingsError(f"{where}: {key} {row[key]!r} is not a version")
    source, checked = provenance(where, row)
    kit = Toolkit(row["cuda"], row["nvcc"], source, checked)
    return dict.fromkeys(subset(where, row["archs"], SM), kit)


_REQUIRED, _OPTIONAL = strict_toml.keys_of(Capability, checked=date)


def _capability(row: dict[str, Any]) -> Capability:
    where = f"capabilities.toml: {row.get('backend')} {row.get('op')}"
    check(where, row, _REQUIRED, _OPTIONAL)
    source, checked = provenance(where, row)
    for key in ("n_multiple", "k_multiple"):
        if row.get(key, 1) < 1:
            raise SettingsError(f"{where}: {key} {row[key]!r} is not a positive integer")
    if "kernel_op" in row and not row.get("proof"):
        raise SettingsError(f"{where}: kernel_op is the op of the kernels whose proof counts, and belongs to proof")
    if (row["op"] == "nvfp4_gemm") != ("sf_layouts" in row):
        raise SettingsError(f"{where}: sf_layouts belongs to nvfp4_gemm, and is needed there")
    typed = {
        "op": subset(where, [row["op"]], OPS)[0],
        "archs": subset(where, row["archs"], (*SM, ANY_ARCH)),
        "activations": subset(where, row["activations"], ACTIVATIONS[1:]),
        "scalings": subset(where, row["scalings"], SCALINGS),
        "out_dtypes": subset(where, row["out_dtypes"], OUT_DTYPES),
        "source": source,
        "checked": checked,
        "sf_layouts": subset(where, row["sf_layouts"], SF_LAYOUTS) if "sf_layouts" in row else (),
        "requires": tuple(_requirement(where, need) for need in row.get("requires", ())),
    }
    return Capability(**(row | typed))


def _requirement(where: str, row: dict[str, Any]) -> Requirement:
    check(where, row, *strict_toml.keys_of(Requirement))
    what = subset(where, [row["what"]], FACTS)[0]
    if row["min"] != TOOLKIT and parse_version(row["min"]) is None:
        raise SettingsError(f"{where}: {what} {row['min']!r} is not a version")
    return Requirement(what, row["min"])


def _alias(row: dict[str, Any]) -> Alias:
    check("capabilities.toml: alias", row, *strict_toml.keys_of(Alias))
    return Alias(**row)
