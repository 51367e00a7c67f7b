"""The models in ``models.toml``: the sizes of published decoders, and the linear layers that they make."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fp4dispatch import strict_toml
from fp4dispatch.errors import FlagsError

FILE = Path(__file__).with_name("models.toml")
K_MULTIPLE = 16
"""The NVFP4 block."""
LARGEST = 512 << 20
"""Elements of the largest weight that is drawn: exact products of larger ones would take most of a run."""


class Drawn(NamedTuple):
    """A layer of a model, or of one of its tensor-parallel shards: N output and K input features."""

    n: int
    k: int
    owner: str


@dataclass(frozen=True)
class Dense:
    """The sizes of a decoder model. ``intermediate`` is 0 where all its MLPs are experts, which are not drawn."""

    name: str
    source: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    depth: int
    embedding: int
    parameters: float
    experts: tuple[int, ...] = ()

    def sizes(self, tp: int = 1) -> dict[str, tuple[int, int]]:
        """Return (N, K) of each fused linear layer of one of ``tp`` shards; empty if the model cannot be cut so.

        Key and value heads that are fewer than the shards are copied, as engines do.
        """
        shared = self.kv_heads % tp == 0 or tp % self.kv_heads == 0
        if self.heads % tp or self.intermediate % tp or not shared:
            return {}
        heads, kv, inner = self.heads // tp, max(self.kv_heads // tp, 1), self.intermediate // tp
        found = {"qkv": ((heads + 2 * kv) * self.head_dim, self.hidden), "o": (self.hidden, heads * self.head_dim)}
        if inner:
            found |= {"gate_up": (2 * inner, self.hidden), "down": (self.hidden, inner)}
        return found

    def layers(self, tp: int) -> tuple[Drawn, ...]:
        """Return those of :meth:`sizes` that the random suite may draw."""
        suffix = f" TP {tp}" if tp > 1 else ""
        sizes = self.sizes(tp).items()
        return tuple(Drawn(n, k, f"{self.name} {what}{suffix}") for what, (n, k) in sizes if _fits(n, k))

    def total(self) -> int:
        """Return the number of weights: embeddings and the matrices of all layers."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        mlp = 3 * self.hidden * (self.intermediate + math.prod(self.experts) * bool(self.experts))
        return self.embedding + self.depth * (attention + mlp)


def _fits(n: int, k: int) -> bool:
    return k % K_MULTIPLE == 0 and n % 8 == 0 and n * k <= LARGEST


@functools.cache
def models() -> tuple[Dense, ...]:
    """Return the models that ship with the package."""
    return load(FILE)


def load(path: Path) -> tuple[Dense, ...]:
    """Read a file like ``models.toml``.

    Raises
    ------
    FlagsError
        For a key that is missing, unknown or of the wrong type, a size that is not positive, a source that is no
        address, or a name that is there twice.
    """
    table = strict_toml.load(path)
    strict_toml.check(str(path), table, {"model": list})
    found = tuple(_model(f"{path}: model {i}", row) for i, row in enumerate(table["model"]))
    strict_toml.unique(f"{path}: model", (model.name for model in found))
    return found


_REQUIRED, _OPTIONAL = strict_toml.keys_of(Dense)
_OPTIONAL["intermediate"] = _REQUIRED.pop("intermediate")
_SIZES = [key for key, kind in _REQUIRED.items() if kind is int]


def _model(where: str, row: Any) -> Dense:
    strict_toml.check(where, row, _REQUIRED, _OPTIONAL)
    where = f"{where} ({row['name']})"
    if not row["source"].startswith("https://"):
        raise FlagsError(f"{where}: source is {row['source']!r}, need the address of its configuration")
    experts = tuple(row.get("experts", ()))
    if not experts and "intermediate" not in row:
        raise FlagsError(f"{where}: has neither intermediate nor experts")
    if experts and (len(experts) != 2 or not all(type(size) is int and size > 0 for size in experts)):
        raise FlagsError(f"{where}: experts is {list(experts)}, need [intermediate size, number]")
    for key in (*_SIZES, *({"intermediate"} & set(row))):
        if row[key] < 1:
            raise FlagsError(f"{where}: {key} is {row[key]}, need at least 1")
    more = {"intermediate": row.get("intermediate", 0), "experts": experts, "parameters": float(row["parameters"])}
    return Dense(**(row | more))
