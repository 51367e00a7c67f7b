"""Charts as SVG, from numbers alone: the same bytes on every machine, light or dark as the reader's system is.

matplotlib's bytes differ between its versions, and its colours cannot follow the reader's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

WIDTH = 760
LIGHT = ("#0b7a3b", "#1f5fbf", "#b45309", "#7c3aed", "#c0266d", "#5b6470")
DARK = ("#4ade80", "#7fb2ff", "#fbbf24", "#c4a5ff", "#ff8ac4", "#a3adba")
"""Colours of the series, in order: each has a contrast of 4 to 1 or more with its background."""
_SIZE = 13
_WIDE = 7.2
"""Width of a character of the legend, nearly."""


@dataclass(frozen=True)
class Series:
    """One set of bars: its name, and its values by place on the x axis."""

    name: str
    values: Mapping[str, float]


@dataclass(frozen=True)
class Chart:
    """One panel: values over named places of the x axis, equally far apart."""

    title: str
    x: Sequence[str]
    series: Sequence[Series]
    y_label: str
    x_label: str = ""
    line: float | None = None
    line_label: str = ""
    digits: int = 1
    places: Sequence[int] = field(default_factory=list)
    """Which colour each series has; in order where it is empty."""


def _style() -> str:
    def rules(back: str, text: str, quiet: str, grid: str, colours: Sequence[str]) -> str:
        found = [f".back{{fill:{back}}}", f"text{{fill:{text}}}", f".quiet{{fill:{quiet}}}", f".grid{{stroke:{grid}}}"]
        found.append(f".one{{stroke:{quiet}}}")
        for i, colour in enumerate(colours):
            found.append(f".f{i}{{fill:{colour};stroke:none}}")
        return "".join(found)

    light = rules("#ffffff", "#1c2128", "#57606a", "#d8dee4", LIGHT)
    dark = rules("#161b22", "#e6edf3", "#9aa4af", "#30363d", DARK)
    shared = f"text{{font:{_SIZE}px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}}"
    shared += ".title{font-weight:600;font-size:15px}.axis{font-size:12px}path{stroke-width:2.4}"
    return f"<style>{shared}{light}@media (prefers-color-scheme:dark){{{dark}}}</style>"


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    kind = f' class="{kind}"' if kind else ""
    anchor = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}"{kind}{anchor}>{escape(words)}</text>'


def _step(top: float) -> float:
    """Return the distance of grid lines: 1, 2 or 5 times a power of ten, about five lines."""
    size = 1.0
    while size * 10 <= top:
        size *= 10
    while size > top:
        size /= 10
    return next(step for step in (size / 10, size / 5, size / 2, size, size * 2) if top / step <= 6)


def _legend(chart: Chart, colours: Sequence[int], y: float) -> tuple[list[str], float]:
    """Return the names of the series, in as many rows as they need, and where they end."""
    parts, x = [], 16.0
    for series, colour in zip(chart.series, colours, strict=True):
        width = 42 + _WIDE * len(series.name)
        if x + width > WIDTH and x > 16:
            x, y = 16.0, y + 20
        parts.append(f'<rect class="f{colour}" x="{x:.1f}" y="{y - 10:.1f}" width="12" height="12" rx="2"/>')
        parts.append(_text(x + 18, y, series.name))
        x += width
    return parts, y


def _panel(chart: Chart, top: float, height: float) -> tuple[list[str], float]:
    """Draw one panel below ``top``; return its elements and where it ends."""
    colours = list(chart.places) or list(range(len(chart.series)))
    parts = [_text(16, top + 24, chart.title, "title")]
    legend, y = _legend(chart, colours, top + 48)
    parts += legend
    left, right, up, down = 52.0, WIDTH - 20.0, y + 44, y + 44 + height
    highest = max(value for series in chart.series for value in series.values.values())
    step = _step(highest * 1.05)
    rows = int(highest * 1.05 / step) + 1

    def at(value: float) -> float:
        return down - (down - up) * value / (rows * step)

    for i in range(rows + 1):
        parts.append(f'<path class="grid" style="stroke-width:1" d="M{left} {at(i * step):.1f}H{right}"/>')
        shown = f"{i * step:.{0 if step >= 1 else 1 if step >= 0.1 else 2}f}"
        parts.append(_text(left - 8, at(i * step) + 4, shown, "axis quiet", "end"))
    wide = (right - left) / len(chart.x)
    for i, name in enumerate(chart.x):
        parts.append(_text(left + wide * (i + 0.5), down + 18, name, "axis quiet", "middle"))
    if chart.line is not None:
        parts.append(f'<path class="one" style="stroke-width:1.4" d="M{left} {at(chart.line):.1f}H{right}"/>')
        parts.append(_text(right, at(chart.line) - 5, chart.line_label, "axis quiet", "end"))
    parts += _bars(chart, colours, left, wide, at)
    parts.append(_text(16, up - 12, chart.y_label, "axis quiet"))
    end = down + 24
    if chart.x_label:
        parts.append(_text((left + right) / 2, down + 36, chart.x_label, "axis quiet", "middle"))
        end = down + 42
    return parts, end


def _bars(chart: Chart, colours: Sequence[int], left: float, wide: float, at: Callable[[float], float]) -> list[str]:
    parts = []
    bar = wide * 0.8 / len(chart.series)
    for j, (series, colour) in enumerate(zip(chart.series, colours, strict=True)):
        for i, name in enumerate(chart.x):
            if name not in series.values:
                continue
            x, y = left + wide * (i + 0.1) + bar * j, at(series.values[name])
            parts.append(
                f'<rect class="f{colour}" x="{x + 1:.1f}" y="{y:.1f}" width="{bar - 2:.1f}" height="{at(0) - y:.1f}"/>'
            )
            shown = f"{series.values[name]:,.{chart.digits}f}"
            parts.append(_text(x + bar / 2, y - 5, shown, "axis", "middle"))
    return parts


def draw(charts: Sequence[Chart], note: str, *, height: float = 230) -> str:
    """Return one picture: panels below each other, and the lines of ``note``, which say where the numbers come from."""
    parts, y = [], 0.0
    for chart in charts:
        found, y = _panel(chart, y, height)
        parts += found
        y += 6
    lines = note.splitlines()
    parts += [_text(16, y + 16 * i, line, "axis quiet") for i, line in enumerate(lines, 1)]
    total = y + 16 * len(lines) + 14
    label = escape(f"{'; '.join(chart.title for chart in charts)}. {' '.join(lines)}", {'"': "&quot;"})
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total:.0f}" role="img" aria-label="{label}">'
    back = f'<rect class="back" width="{WIDTH}" height="{total:.0f}" rx="10"/>'
    return "\n".join([head, _style(), back, *parts, "</svg>"]) + "\n"
