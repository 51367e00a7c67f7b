"""The benchmark problems from ``shapes.toml``: layers of real models, and suites that select from them.

A model that is in ``models.toml`` too has its layers from there.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp4dispatch import strict_toml
from fp4dispatch.benchmark.problems import models as published
from fp4dispatch.errors import FlagsError, InputError
from fp4dispatch.settings import did_you_mean

FILE = Path(__file__).with_name("shapes.toml")
SPLITS = ("n", "k", "none")
DECODER_SPLITS = {"qkv": "n", "o": "k", "gate_up": "n", "down": "k"}
"""How engines cut the layers of a model of ``models.toml``."""


@dataclass(frozen=True)
class Layer:
    """One unsharded linear layer: N output and K input features, and the one that tensor parallelism splits."""

    name: str
    n: int
    k: int
    split: str

    def shard(self, tp: int) -> tuple[int, int]:
        """Return (N, K) of one of ``tp`` equal shards."""
        return (self.n // tp if self.split == "n" else self.n, self.k // tp if self.split == "k" else self.k)


@dataclass(frozen=True)
class Model:
    """A model's linear layers. ``depth``, ``embedding`` and ``parameters`` (billions) are 0 where not stated."""

    name: str
    source: str
    tp: tuple[int, ...]
    layers: tuple[Layer, ...]
    depth: int = 0
    embedding: int = 0
    parameters: float = 0.0


@dataclass(frozen=True)
class Suite:
    """The problems of one run: ``shapes`` (N, K), most important first; ``m`` ascending."""

    name: str
    why: str
    shapes: tuple[tuple[int, int], ...]
    m: tuple[int, ...]


@dataclass(frozen=True)
class Catalogue:
    """Everything in ``shapes.toml``."""

    models: tuple[Model, ...]
    suites: Mapping[str, Suite]

    def suite(self, name: str) -> Suite:
        """Return a suite by name; InputError with the nearest name for an unknown one."""
        if name not in self.suites:
            known = ", ".join((*self.suites, "random"))
            raise InputError(f"{name!r} is not a suite.{did_you_mean(name, self.suites)} Known: {known}")
        return self.suites[name]

    def owners(self, n: int, k: int) -> tuple[str, ...]:
        """Return which layers of which models have this shape, e.g. ``Llama-3.1-8B o`` or ``... gate_up TP 2``."""
        found: dict[str, None] = {}
        for model in self.models:
            for layer in model.layers:
                for tp in model.tp:
                    if layer.shard(tp) == (n, k):
                        found[f"{model.name} {layer.name}" + (f" TP {tp}" if tp > 1 else "")] = None
        return tuple(found)


@functools.cache
def catalogue() -> Catalogue:
    """Return the catalogue that ships with the package."""
    return load(FILE)


def load(path: Path) -> Catalogue:
    """Read a file like ``shapes.toml``.

    Raises
    ------
    FlagsError
        For a key that is missing, unknown or of the wrong type, a duplicate name, a size that is not positive, a layer
        that cannot be split evenly, a model without layers that is not in ``models.toml`` or is there with experts, or
        a suite without shapes.
    """
    table = strict_toml.load(path)
    strict_toml.check(str(path), table, {"model": list, "suite": list})
    models = tuple(_model(f"{path}: model {i}", row) for i, row in enumerate(table["model"]))
    strict_toml.unique(f"{path}: model", [model.name for model in models])
    suites: dict[str, Suite] = {}
    for i, row in enumerate(table["suite"]):
        suite = _suite(f"{path}: suite {i}", row, models, suites)
        strict_toml.unique(f"{path}: suite", [*suites, suite.name])
        suites[suite.name] = suite
    return Catalogue(models, suites)


def _model(where: str, row: Any) -> Model:
    if isinstance(row, dict) and "layers" not in row:
        return _published(where, row)
    strict_toml.check(where, row, *strict_toml.keys_of(Model))
    where = f"{where} ({row['name']})"
    if not row["source"].startswith("https://"):
        raise FlagsError(f"{where}: source is {row['source']!r}, need the address of its configuration")
    tp = _sizes(f"{where}: tp", row["tp"])
    layers = tuple(_layer(f"{where}: layer {i}", layer, tp) for i, layer in enumerate(row["layers"]))
    if not layers:
        raise FlagsError(f"{where}: has no layers")
    strict_toml.unique(f"{where}: layer", [layer.name for layer in layers])
    return Model(**(row | {"tp": tp, "layers": layers, "parameters": float(row.get("parameters", 0))}))


def _published(where: str, row: Any) -> Model:
    """Return a model of which the row has but the name and ``tp``."""
    strict_toml.check(where, row, {"name": str, "tp": list})
    where = f"{where} ({row['name']})"
    found = next((model for model in published.models() if model.name == row["name"]), None)
    if found is None:
        raise FlagsError(f"{where}: has no layers, and is not in models.toml; add the layers here, or the model there")
    if found.experts:
        raise FlagsError(f"{where}: has experts in models.toml, whose layers are not known; write all its layers here")
    tp = _sizes(f"{where}: tp", row["tp"])
    layers = tuple(Layer(name, *nk, DECODER_SPLITS[name]) for name, nk in found.sizes().items())
    for parts in tp:
        if found.sizes(parts) != {layer.name: layer.shard(parts) for layer in layers}:
            raise FlagsError(f"{where}: cannot be cut into {parts} equal parts; leave {parts} out of tp")
    return Model(found.name, found.source, tp, layers, found.depth, found.embedding, found.parameters)


def _layer(where: str, row: Any, tp: tuple[int, ...]) -> Layer:
    strict_toml.check(where, row, *strict_toml.keys_of(Layer))
    _sizes(where, [row["n"], row["k"]], ascending=False)
    layer = Layer(**row)
    if layer.split not in SPLITS:
        raise FlagsError(f"{where}: split is {layer.split!r}, need one of {', '.join(SPLITS)}")
    for parts in tp:
        whole = {"n": layer.n, "k": layer.k, "none": parts}[layer.split]
        if whole % parts:
            raise FlagsError(
                f"{where}: {layer.name} {layer.n}x{layer.k} cannot be cut into {parts} along {layer.split}"
            )
    return layer


def _suite(where: str, row: Any, models: tuple[Model, ...], known: Mapping[str, Suite]) -> Suite:
    strict_toml.check(where, row, {"name": str, "why": str, "m": list}, {"nk": list, "continues": str})
    m = _sizes(f"{where}: m", row["m"])
    first: tuple[tuple[int, int], ...] = ()
    if before := row.get("continues"):
        if before not in known:
            raise FlagsError(f"{where}: continues {before!r}, which is no suite above it")
        first = known[before].shapes
    if "nk" in row:
        own = [_sizes(f"{where}: nk", pair, ascending=False) for pair in row["nk"]]
    else:
        own = [layer.shard(tp) for model in models for layer in model.layers for tp in model.tp]
    shapes = dict.fromkeys((*first, *own))
    if not shapes or any(len(shape) != 2 for shape in shapes):
        raise FlagsError(f"{where}: nk needs pairs [N, K], at least one")
    return Suite(row["name"], row["why"], tuple((n, k) for n, k in shapes), m)


def _sizes(where: str, values: Any, *, ascending: bool = True) -> tuple[int, ...]:
    if not isinstance(values, list) or not values or not all(type(v) is int and v > 0 for v in values):
        raise FlagsError(f"{where}: need a list of positive integers, found {values!r}")
    if ascending and values != sorted(set(values)):
        raise FlagsError(f"{where}: need ascending numbers, each once, found {values!r}")
    return tuple(values)
