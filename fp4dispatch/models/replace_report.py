"""What ``replace_linears`` did, as data and as a table."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

from fp4dispatch.models.fusing.fuse import NOTHING_FUSED, FuseReport
from fp4dispatch.models.model_report import pattern_of


@dataclass(frozen=True)
class LayerReport:
    """One replaced layer. ``backend`` has the choice for each range of M; ``rule`` and ``reason`` tell why.

    ``bytes_after`` counts all that it holds now, backend layouts included. ``bytes_dropped`` are of stored tensors that
    it does not hold beside their layout. ``shards``: the layers that were fused into this one.
    """

    name: str
    format: str
    n: int
    k: int
    bytes_before: int
    bytes_after: int
    backend: str
    rule: str
    reason: str
    bytes_dropped: int = 0
    shards: tuple[str, ...] = ()


@dataclass(frozen=True)
class LeftParameter:
    """A parameter with two or more dimensions that is not in a linear layer. It is not changed."""

    name: str
    shape: tuple[int, ...]
    nbytes: int
    reason: str


@dataclass(frozen=True)
class ReplaceReport:
    """What :func:`replace_linears` did; ``str()`` is a table.

    Parameters
    ----------
    layers
        The layers that are quantised now.
    skipped
        (name, reason) of each linear layer that was left alone.
    others
        Other weights that were not quantised: experts in one tensor, convolutions, embeddings, ``Conv1D`` of GPT-2.
    model_bytes_before, model_bytes_after
        Bytes of all parameters and buffers of the model.
    notes
        Notes for the caller, e.g. an exclude pattern that matches nothing.
    fusing
        With ``fuse=True``: which layers are one layer now, and which are not, with the reason.
    """

    layers: tuple[LayerReport, ...]
    skipped: tuple[tuple[str, str], ...]
    others: tuple[LeftParameter, ...] = ()
    model_bytes_before: int = 0
    model_bytes_after: int = 0
    notes: tuple[str, ...] = ()
    fusing: FuseReport = NOTHING_FUSED

    @property
    def bytes_before(self) -> int:
        """Bytes of the replaced layers before."""
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def bytes_after(self) -> int:
        """Bytes of the replaced layers now, backend layouts included."""
        return sum(layer.bytes_after for layer in self.layers)

    @property
    def bytes_dropped(self) -> int:
        """Bytes of stored tensors that the layers do not hold, as a backend layout holds the same bits."""
        return sum(layer.bytes_dropped for layer in self.layers)

    @property
    def saved_percent(self) -> float:
        """Reduction of the whole model's bytes in percent. Negative if backend layouts made it larger."""
        return 100 * (1 - self.model_bytes_after / self.model_bytes_before) if self.model_bytes_before else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for ``--json``."""
        return {
            "layers": [asdict(layer) for layer in self.layers],
            "skipped": [{"name": name, "reason": reason} for name, reason in self.skipped],
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "bytes_dropped": self.bytes_dropped,
            "others": [asdict(other) for other in self.others],
            "model_bytes_before": self.model_bytes_before,
            "model_bytes_after": self.model_bytes_after,
            "saved_percent": self.saved_percent,
            "notes": list(self.notes),
            "fusing": self.fusing.to_dict(),
        }

    def __str__(self) -> str:
        """Return a table in which equal layers, whose names differ only in numbers, are one row."""
        head = ("layers", "", "format", "N x K", "MB before", "after", "backend", "why")
        groups = Counter[LayerReport]()
        for layer in self.layers:
            groups[replace(layer, name=pattern_of(layer.name), shards=())] += 1
        rows = [
            (
                group.name,
                str(count),
                group.format,
                f"{group.n} x {group.k}",
                f"{count * group.bytes_before / 1e6:.2f}",
                f"{count * group.bytes_after / 1e6:.2f}",
                group.backend,
                f"{group.rule}: {group.reason}" if group.rule else group.reason,
            )
            for group, count in groups.items()
        ]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]
        ]
        lines += self.totals()
        left = Counter((pattern_of(name), reason) for name, reason in self.skipped)
        lines += [f"  left alone: {name}: {reason}{_times(count)}" for (name, reason), count in left.items()]
        others = Counter((pattern_of(o.name), o.nbytes, o.reason) for o in self.others)
        for (name, nbytes, reason), count in others.items():
            lines.append(f"  left alone: {name} ({count * nbytes / 1e6:.2f} MB): {reason}{_times(count)}")
        lines += [f"  {line}" for line in self.fusing.lines()]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def totals(self) -> list[str]:
        """Return the lines with the sums: of the layers, and of the whole model."""
        left = f"{len(self.skipped)} linear layers left alone"
        if self.others:
            left += f", and {len(self.others)} other parameters ({sum(o.nbytes for o in self.others) / 1e6:.2f} MB)"
        once = f"held once: {self.bytes_dropped / 1e6:.2f} MB of stored tensors are in the layout of the kernels alone"
        return [
            f"{len(self.layers)} layers: {self.bytes_before / 1e6:.2f} MB -> {self.bytes_after / 1e6:.2f} MB; {left}",
            f"whole model: {self.model_bytes_before / 1e6:.2f} MB -> {self.model_bytes_after / 1e6:.2f} MB "
            f"({self.saved_percent:.1f} % saved)",
            *([once] if self.bytes_dropped else []),
        ]


def _times(count: int) -> str:
    return f" ({count} of these)" if count > 1 else ""
