"""Facts of GPU models: SMs, clock, memory bandwidth, L2. From ``gpu_models.toml``, else from NVML. No torch."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fp4dispatch import strict_toml
from fp4dispatch.errors import FlagsError
from fp4dispatch.machine import nvml
from fp4dispatch.machine.nvml import Gpu
from fp4dispatch.problem.arch import Arch

FILE = Path(__file__).with_name("gpu_models.toml")
CORES_PER_SM = {(7, 5): 64, (8, 0): 64}
"""FP32 cores of an SM; 128 on every other arch."""


@dataclass(frozen=True)
class GpuModel:
    """Facts of a GPU model.

    Parameters
    ----------
    name, names
        For people, and as NVML and torch spell it.
    arch
        Its arch.
    sms
        SMs.
    clock_mhz
        Highest SM clock, in MHz.
    memory_gbs
        Memory bandwidth, in 1e9 bytes per second, as published.
    l2_mib
        L2 cache, in MiB; 0 if unknown.
    source
        Where it was read: an address, or NVML.
    fitted
        The record that a launch model was fitted to on this GPU; empty if none was.
    """

    name: str
    names: tuple[str, ...]
    arch: Arch
    sms: int
    clock_mhz: float
    memory_gbs: float
    l2_mib: float
    source: str
    fitted: str = ""


@functools.cache
def models() -> tuple[GpuModel, ...]:
    """Return the models that ship with the package."""
    return load(FILE)


def load(path: Path) -> tuple[GpuModel, ...]:
    """Read a file like ``gpu_models.toml``.

    Raises
    ------
    FlagsError
        For a key that is missing, unknown or of the wrong type, a number that is not positive, an arch that no GPU has,
        a source that is no address, or a name that is there twice.
    """
    table = strict_toml.load(path)
    strict_toml.check(str(path), table, {"gpu": list})
    found = tuple(_model(f"{path}: gpu {i}", row) for i, row in enumerate(table["gpu"]))
    strict_toml.unique(f"{path}:", (name for model in found for name in (model.name, *model.names)))
    return found


_REQUIRED, _OPTIONAL = strict_toml.keys_of(GpuModel, arch=str)
_NUMBERS = [key for key, kind in _REQUIRED.items() if kind in (int, float)]


def _model(where: str, row: Any) -> GpuModel:
    strict_toml.check(where, row, _REQUIRED, _OPTIONAL)
    where = f"{where} ({row['name']})"
    if not row["names"] or not all(isinstance(name, str) and name for name in row["names"]):
        raise FlagsError(f"{where}: names is {row['names']}, need the names that NVML has for it")
    for key in _NUMBERS:
        if row[key] < 0 or (row[key] == 0 and key != "l2_mib"):
            raise FlagsError(f"{where}: {key} is {row[key]}, need more than 0")
    if not row["source"].startswith("https://"):
        raise FlagsError(f"{where}: source is {row['source']!r}, need an address")
    return GpuModel(**(row | {"names": tuple(row["names"]), "arch": Arch.real(row["arch"])}))


def of(gpu: Gpu) -> GpuModel | None:
    """Return the facts of a GPU of this machine: of its model, or from NVML; None where neither knows them.

    A part of a GPU (MIG) has no model.
    """
    if named(gpu.name) is not None:
        return listed(gpu)
    return _asked(gpu) if gpu.uuid.startswith("GPU-") else None


def listed(gpu: Gpu) -> GpuModel | None:
    """Return the model of any machine's GPU, from the table alone; None for an unknown name, or one of another arch."""
    found = named(gpu.name)
    return found if found is not None and found.arch == gpu.arch else None


def named(name: str) -> GpuModel | None:
    """Return the model of a name, as NVML spells it or as the table does; None for an unknown one."""
    wanted = name.strip().lower()
    return next((m for m in models() if wanted in (m.name.lower(), *(each.lower() for each in m.names))), None)


@functools.lru_cache(maxsize=64)
def _asked(gpu: Gpu) -> GpuModel | None:
    """Return what NVML knows of a GPU; None if it lacks one of the facts."""
    speed = nvml.speed(gpu.uuid)
    if speed is None:
        return None
    per_sm = CORES_PER_SM.get((gpu.arch.major, gpu.arch.minor), 128)
    facts = GpuModel(gpu.name, (gpu.name,), gpu.arch, speed.cores // per_sm, speed.clock_mhz, 0.0, 0.0, "NVML")
    # Two transfers a clock, on every kind of memory that NVML reports so.
    return replace(facts, memory_gbs=2e-3 * speed.memory_mhz * speed.bus_bits / 8)
