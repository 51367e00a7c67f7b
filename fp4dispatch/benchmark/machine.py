"""The GPU under test, and the facts recorded with its results."""

from __future__ import annotations

import platform
from datetime import date
from typing import Any

import torch

from fp4dispatch import __version__
from fp4dispatch.benchmark.methods.base import Card
from fp4dispatch.errors import InputError
from fp4dispatch.machine import system as _system
from fp4dispatch.problem.arch import Arch
from fp4dispatch.tune.timing import Engine, GraphEngine, WallEngine

_LIBRARIES = ("cudnn", "flashinfer", "cutlass", "nvcc")


def card(device: str | None = None) -> Card:
    """Return the card to measure: the named device, else the current GPU, else the CPU.

    Raises
    ------
    InputError
        If the device is neither the CPU nor a visible GPU.
    """
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"device={name!r} is not a device: use cpu, cuda or cuda:0") from error
    if where.type == "cpu":
        return Card(where, platform.processor() or platform.machine() or "CPU", None, 0.0, 0.0)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if where.type != "cuda" or (where.index or 0) >= count:
        raise InputError(f"device={name!r} is not here: torch sees {count} CUDA GPUs; `fp4dispatch doctor` says why")
    index = torch.cuda.current_device() if where.index is None else where.index
    torch.cuda.set_device(index)
    p = torch.cuda.get_device_properties(index)
    return Card(
        torch.device("cuda", index),
        p.name,
        Arch(p.major, p.minor),
        float(p.L2_cache_size),
        float(p.total_memory),
        p.multi_processor_count,
    )


def engine_for(card: Card) -> Engine:
    """Return what times calls there."""
    if card.device.type == "cuda":
        return GraphEngine(card.device, card.cache_bytes)
    return WallEngine()


def facts(card: Card, commit: str) -> dict[str, Any]:
    """Return plain data: the card, the versions, the commit and the day."""
    system = _system.current().to_dict()
    return {
        "commit": commit,
        "date": date.today().isoformat(),
        "fp4dispatch": __version__,
        "device": card.name,
        "arch": card.arch.sm if card.arch else "",
        "l2_mb": round(card.cache_bytes / 1e6, 1),
        "sms": card.sms,
        "driver": system["driver"],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        **{name: fact["version"] for name in _LIBRARIES if (fact := system[name])},
    }
