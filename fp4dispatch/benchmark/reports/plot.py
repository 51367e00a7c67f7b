"""Plots the speed-up over bfloat16 by number of tokens, one panel per shape. Needs matplotlib (extra ``bench``)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from fp4dispatch.benchmark.methods.base import BASELINE
from fp4dispatch.benchmark.reports.report import Document, by_problem, shapes_of, tokens_of
from fp4dispatch.errors import InputError

PANELS = 12
"""Largest number of shapes drawn; suites list the most important ones first."""


def check(path: Path) -> None:
    """Refuse a picture that could not be drawn. Call it before measuring.

    Raises
    ------
    InputError
        If matplotlib is not installed or does not know the ending, or the folder is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise InputError(f"--plot needs matplotlib ({error})\n  fix: pip install matplotlib") from error
    known = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in known:
        raise InputError(f"--plot {path}: the ending says the format, and matplotlib knows {', '.join(sorted(known))}")
    if not path.absolute().parent.is_dir():
        raise InputError(f"--plot {path}: there is no folder {path.parent}")


def draw(doc: Document, path: Path) -> None:
    """Write a picture; the format follows the file's ending (png, svg, pdf).

    Raises
    ------
    InputError
        As :func:`check`, or if nothing with a baseline was measured.
    """
    check(path)
    from matplotlib.figure import Figure

    shapes = [shape for shape in shapes_of(doc) if _lines(doc, *shape)][:PANELS]
    if not shapes:
        raise InputError(f"nothing to draw: no method was measured beside {BASELINE}")
    columns = min(3, len(shapes))
    rows = math.ceil(len(shapes) / columns)
    figure = Figure(figsize=(5.2 * columns, 3.8 * rows + 0.8), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    names = [name for name in doc["methods"] if name != BASELINE]
    for place, axis in enumerate(axes.flat):
        if place >= len(shapes):
            axis.set_visible(False)
            continue
        _panel(axis, doc, *shapes[place], names)
    handles: dict[str, Any] = {}
    for axis in axes.flat:
        handles |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(f"{doc['facts']['device']}, {doc['facts']['date']}: time of bfloat16 cuBLAS / time")
    try:
        figure.savefig(path)
    except (ValueError, OSError) as error:
        raise InputError(f"cannot draw to {path}: {error}") from error


def _panel(axis: Any, doc: Document, n: int, k: int, names: list[str]) -> None:
    axis.axhline(1, color="0.6", linewidth=1)
    for name, points in _lines(doc, n, k).items():
        style = "-" if doc["methods"][name]["ours"] else "--"
        axis.plot(*zip(*points, strict=True), style, marker=".", label=name, color=f"C{names.index(name) % 10}")
    axis.set_xscale("log", base=2)
    ticks = tokens_of(doc)
    axis.set_xticks(ticks, [str(m) for m in ticks], fontsize=7, rotation=45)
    axis.set_xticks([], minor=True)
    axis.set_title(f"{n} x {k}", fontsize=10)
    axis.set_xlabel("tokens", fontsize=8)
    axis.grid(alpha=0.3)


def _lines(doc: Document, n: int, k: int) -> dict[str, list[tuple[int, float]]]:
    """Return (M, speed-up) of every method but the baseline."""
    rows = by_problem(doc)
    lines: dict[str, list[tuple[int, float]]] = {}
    for name in doc["methods"]:
        for m in tokens_of(doc):
            base, mine = (rows.get((n, k, m, each), {}).get("us") for each in (BASELINE, name))
            if base and mine and name != BASELINE:
                lines.setdefault(name, []).append((m, base / mine))
    return lines
