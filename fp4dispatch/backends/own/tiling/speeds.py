"""The constants of all time models on a GPU: its own of ``speeds.toml``, or those of another one, scaled. No torch.

``python -m bench.fit_speeds --write`` makes the file from records of bench/launch_samples.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fp4dispatch import strict_toml
from fp4dispatch.backends.own.tiling import corrections, launch_model
from fp4dispatch.backends.own.tiling.corrections import Correction
from fp4dispatch.backends.own.tiling.few_tokens import KERNELS
from fp4dispatch.backends.own.tiling.few_tokens_model import FewTokensSpeed
from fp4dispatch.backends.own.tiling.other_models import (
    LT_TILES,
    BlockScaledSpeed,
    CublasLtSpeed,
    QuantiserSpeed,
    RowsQuantiserSpeed,
    UnfoldSpeed,
)
from fp4dispatch.errors import FlagsError
from fp4dispatch.machine import gpu_models
from fp4dispatch.machine.gpu_models import GpuModel
from fp4dispatch.problem.arch import Arch

FILE = Path(__file__).with_name("speeds.toml")
BLOCKS = "block128"
"""After the name of a kernel for few tokens: its builds for block scales."""
QUANTISERS = ("w4_row", "w8_row", "w8_block")
"""Kinds of quantisers before our GEMMs: on NVFP4 weights, on FP8 weights by row and by block."""
GPU_CONSTANTS = (
    "clock_mhz",
    "memory_bytes",
    "tile_clocks",
    "split_clocks",
    "token_clocks",
    "part_clocks",
    "late_clocks",
    "slowing",
    "slowing_fp4",
    "slowing_moved",
)
"""Of the kernels for many tokens (:class:`~fp4dispatch.backends.own.tiling.launch_model.Gpu`)."""


@dataclass(frozen=True, eq=False)
class Speeds:
    """The constants of a GPU.

    Parameters
    ----------
    fitted
        The GPU model that was measured.
    records
        What was fitted to: names of records, each with its SHA-256.
    many_tokens, builds
        The launch model's constants, and how many times as long as it says each of its builds takes.
    few_tokens
        By kernel; those of builds for block scales by ``<kernel> block128``.
    quantisers, before_cublaslt
        Quantisers before our GEMMs, by the names of :data:`QUANTISERS`, and the one before cuBLASLt's.
    cublaslt, cublaslt_block
        Its GEMM with scales by row and column, and with block scales, quantiser included.
    unfold
        Weights written out.
    corrections
        Of the launch models and of cuBLASLt, by group of builds.
    scaled_to
        The GPU model that the constants were scaled to; empty if they are its own.
    """

    fitted: str
    records: tuple[str, ...]
    many_tokens: launch_model.Gpu
    builds: Mapping[str, float]
    few_tokens: Mapping[str, FewTokensSpeed]
    quantisers: Mapping[str, QuantiserSpeed]
    before_cublaslt: RowsQuantiserSpeed
    cublaslt: CublasLtSpeed
    cublaslt_block: BlockScaledSpeed
    unfold: UnfoldSpeed
    corrections: Mapping[str, Correction] = field(default_factory=dict)
    scaled_to: str = ""

    def __str__(self) -> str:
        return f"scaled from {self.fitted} to {self.scaled_to}" if self.scaled_to else f"fitted on {self.fitted}"

    def scaled(self, old: GpuModel, new: GpuModel) -> Speeds:
        """Return these constants as those of another GPU model of the same arch, by its facts.

        Without corrections: nobody has seen that they hold there.
        """
        clock, memory = new.clock_mhz / old.clock_mhz, new.memory_gbs / old.memory_gbs
        own = self.many_tokens
        many = replace(
            own,
            sms=new.sms,
            usable=launch_model.gpu_with(new.sms).usable,
            clock_mhz=own.clock_mhz * clock,
            memory_bytes=own.memory_bytes * memory / clock,
            l2_bytes=int(new.l2_mib * 2**20),
        )
        return replace(
            self,
            many_tokens=many,
            few_tokens={name: each.scaled(clock, memory) for name, each in self.few_tokens.items()},
            quantisers={name: each.scaled(clock, memory) for name, each in self.quantisers.items()},
            before_cublaslt=self.before_cublaslt.scaled(clock, memory),
            cublaslt=self.cublaslt.scaled(clock, memory),
            cublaslt_block=self.cublaslt_block.scaled(clock, memory),
            unfold=self.unfold.scaled(clock, memory),
            corrections={},
            scaled_to=new.name,
        )


@functools.lru_cache(maxsize=64)
def of(model: GpuModel) -> Speeds | None:
    """Return the constants of a GPU model: its own, or those of another one of its arch, scaled; else None."""
    return fitted().get(model.name) or scaled_to(model)


def scaled_to(model: GpuModel) -> Speeds | None:
    """Return the constants of the other fitted GPU model of the same arch whose memory bandwidth is nearest, scaled."""
    if model.memory_gbs <= 0:
        return None
    others = [old for name in fitted() if (old := gpu_models.named(name)) is not None and old.name != model.name]
    same_arch = [old for old in others if old.arch == model.arch]
    if not same_arch:
        return None
    nearest = min(same_arch, key=lambda old: abs(math.log(old.memory_gbs / model.memory_gbs)))
    return fitted()[nearest.name].scaled(nearest, model)


def known(arch: Arch) -> bool:
    """Whether a GPU of an arch was measured."""
    return any((model := gpu_models.named(name)) is not None and model.arch == arch for name in fitted())


@functools.cache
def fitted() -> dict[str, Speeds]:
    """Return the packaged constants, by GPU model."""
    found = load(strict_toml.load(FILE))
    return {name: replace(each, corrections=corrections.packaged()) for name, each in found.items()}


def load(data: dict[str, Any]) -> dict[str, Speeds]:
    """Check the parsed file and return it typed, without corrections.

    Raises
    ------
    FlagsError
        For a key that is missing, unknown or of the wrong type, a number that is not positive, an unknown GPU model,
        kernel or tile, and for a GPU that is there twice.
    """
    strict_toml.check("speeds.toml", data, {"gpu": list})
    found: dict[str, Speeds] = {}
    for row in data["gpu"]:
        speeds = _speeds(row)
        if speeds.fitted in found:
            raise FlagsError(f"speeds.toml: {speeds.fitted} is there twice")
        found[speeds.fitted] = speeds
    return found


_TABLES = (
    "many_tokens",
    "builds",
    "few_tokens",
    "quantisers",
    "before_cublaslt",
    "cublaslt",
    "cublaslt_block",
    "unfold",
)


def _speeds(row: Any) -> Speeds:
    where = "speeds.toml"
    strict_toml.check(where, row, {"name": str, "records": list, "block_records": list, **dict.fromkeys(_TABLES, dict)})
    where = f"{where}: {row['name']}"
    model = gpu_models.named(row["name"])
    if model is None or model.name != row["name"]:
        raise FlagsError(f"{where}: is no GPU model of gpu_models.toml")
    many = _numbers(f"{where} many_tokens", row["many_tokens"], GPU_CONSTANTS)
    usual = launch_model.gpu_with(model.sms)
    l2_bytes = int(model.l2_mib * 2**20)
    facts = launch_model.Gpu(sms=usual.sms, l2_bytes=l2_bytes, usable=usual.usable, **many)
    strict_toml.check(f"{where} quantisers", row["quantisers"], dict.fromkeys(QUANTISERS, dict))
    quantisers = {
        name: QuantiserSpeed(**_numbers(f"{where} {name}", each, _names(QuantiserSpeed)))
        for name, each in row["quantisers"].items()
    }
    return Speeds(
        row["name"],
        strict_toml.texts(f"{where} records", [*row["records"], *row["block_records"]]),
        facts,
        _numbers(f"{where} builds", row["builds"], row["builds"]),
        {name: _few_tokens(f"{where} {name}", name, each) for name, each in row["few_tokens"].items()},
        quantisers,
        RowsQuantiserSpeed(**_numbers(f"{where} before_cublaslt", row["before_cublaslt"], _names(RowsQuantiserSpeed))),
        _cublaslt(f"{where} cublaslt", row["cublaslt"]),
        BlockScaledSpeed(**_numbers(f"{where} cublaslt_block", row["cublaslt_block"], _names(BlockScaledSpeed))),
        UnfoldSpeed(**_numbers(f"{where} unfold", row["unfold"], _names(UnfoldSpeed))),
    )


def _few_tokens(where: str, name: str, row: Any) -> FewTokensSpeed:
    kernel, _, kind = name.partition(" ")
    if kernel not in KERNELS or kind not in ("", BLOCKS):
        raise FlagsError(f"{where}: is no kernel for few tokens")
    names = [each for each in _names(FewTokensSpeed) if each not in ("tiles", "shallow")]
    strict_toml.check(where, row, {**dict.fromkeys(names, float), "tiles": list, "shallow": list})
    if wrong := set(row["shallow"]) - {instance[0] for instance in KERNELS[kernel].instances}:
        raise FlagsError(f"{where}: shallow has {wrong}: no tile has so many tokens")
    tiles = []
    for each in row["tiles"]:
        if not isinstance(each, list) or len(each) != 6 or tuple(each[:4]) not in KERNELS[kernel].instances:
            raise FlagsError(f"{where}: {each} is no tile that is built, with two times")
        alone, full = _numbers(where, dict(zip(("alone", "full"), each[4:], strict=True)), ("alone", "full")).values()
        tiles.append((tuple(each[:4]), alone, full))
    numbers = _numbers(where, {key: row[key] for key in names}, names)
    return FewTokensSpeed(**numbers, tiles=tuple(tiles), shallow=tuple(row["shallow"]))


def _cublaslt(where: str, row: Any) -> CublasLtSpeed:
    names = ("start", "memory", "end", "slowing")
    strict_toml.check(where, row, {**dict.fromkeys(names, float), "tiles": list})
    if len(row["tiles"]) != len(LT_TILES):
        raise FlagsError(f"{where}: needs {len(LT_TILES)} tiles, found {len(row['tiles'])}")
    tiles = _numbers(where, {str(i): each for i, each in enumerate(row["tiles"])}, map(str, range(len(LT_TILES))))
    numbers = _numbers(where, {key: row[key] for key in names}, names)
    return CublasLtSpeed(**numbers, tiles=tuple(tiles.values()))


def _numbers(where: str, row: Any, names: Any) -> dict[str, float]:
    """Return positive numbers of these names as floats."""
    strict_toml.check(where, row, dict.fromkeys(names, float))
    if wrong := {key: value for key, value in row.items() if not value > 0}:
        raise FlagsError(f"{where}: {wrong} must be more than 0")
    return {key: float(value) for key, value in row.items()}


def _names(kind: type) -> list[str]:
    return [field.name for field in fields(kind)]
