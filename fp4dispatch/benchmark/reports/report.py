"""The result of a run as plain data (the JSON document), and table, CSV and Markdown made from that document."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fp4dispatch.benchmark.host import HostRow
from fp4dispatch.benchmark.methods.base import BASELINE, Method, rivals
from fp4dispatch.benchmark.problems.shapes import Suite, catalogue
from fp4dispatch.benchmark.reports import targets
from fp4dispatch.benchmark.roofline import Peaks
from fp4dispatch.benchmark.run import Outcome
from fp4dispatch.errors import InputError

KIND, SCHEMA = "bench", 1
NOISY = 0.05
"""A row whose spread is larger is marked in the table."""
LOSS = 0.02
"""A loss to a peer below this share counts as a tie."""
COLUMNS = 7
"""Token counts per row of the table."""

Document = dict[str, Any]
_KEYS = ("kind", "schema", "suite", "facts", "peaks", "methods", "absent", "left", "stopped", "measured", "host")


def document(
    suite: Suite,
    facts: Mapping[str, Any],
    peaks: Peaks,
    methods: Iterable[Method],
    outcome: Outcome,
    host: Iterable[HostRow],
) -> Document:
    """Return the result of a run as plain data."""
    every = tuple(methods)
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "suite": suite.name,
        "facts": dict(facts),
        "peaks": peaks.to_dict(),
        "methods": {
            method.name: {
                "what": method.what,
                "format": method.format,
                "takes": method.takes,
                "ours": method.ours,
                "rivals": list(rivals(method, every)) if method.ours else [],
            }
            for method in every
        },
        "absent": dict(outcome.absent),
        "left": [list(problem) for problem in outcome.left],
        "stopped": outcome.stopped,
        "seconds": round(outcome.seconds, 1),
        "measured": [row.to_dict() for row in outcome.rows],
        "host": [row.to_dict() for row in host],
    }


def json_text(doc: Document) -> str:
    """Return the document as JSON, one line per measured row."""
    lines = ",\n".join(f"  {json.dumps(row)}" for row in doc["measured"])
    rest = json.dumps({**doc, "measured": []}, indent=1)
    return rest.replace('"measured": []', f'"measured": [\n{lines}\n ]' if lines else '"measured": []', 1) + "\n"


def read(path: Path) -> Document:
    """Read a document back.

    Raises
    ------
    InputError
        If there is no such file, or it is not benchmark JSON of this schema.
    """
    try:
        data = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path} cannot be read as a benchmark's JSON: {error}") from error
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise InputError(f"{path} is not a benchmark's JSON: write one with `fp4dispatch bench --json FILE`")
    missing = [key for key in _KEYS if key not in data]
    if data.get("schema") != SCHEMA or missing:
        raise InputError(
            f"{path} has schema {data.get('schema')!r}"
            + (f" and lacks {', '.join(missing)}" if missing else "")
            + f"; need schema {SCHEMA}: measure again with this version"
        )
    return data


# ------------------------------------------------------------------------------------------------------------- derived


def by_problem(doc: Document) -> dict[tuple[int, int, int, str], dict[str, Any]]:
    """Return the rows by (N, K, M, method)."""
    return {(row["n"], row["k"], row["m"], row["method"]): row for row in doc["measured"]}


def shapes_of(doc: Document) -> list[tuple[int, int]]:
    """Return the (N, K) that were measured, in their order."""
    return list(dict.fromkeys((row["n"], row["k"]) for row in doc["measured"]))


def tokens_of(doc: Document) -> list[int]:
    """Return the M that were measured, ascending."""
    return sorted({row["m"] for row in doc["measured"]})


def speedups(doc: Document, shapes: Sequence[tuple[int, int]] | None = None) -> dict[str, dict[int, tuple[float, int]]]:
    """Return speed-ups by method and M: geometric mean of baseline time / method time, and the number of shapes.

    A shape counts if both were measured and correct.
    """
    rows = by_problem(doc)
    found: dict[str, dict[int, tuple[float, int]]] = {}
    for method in doc["methods"]:
        for m in tokens_of(doc):
            logs = []
            for n, k in shapes or shapes_of(doc):
                base, mine = (rows.get((n, k, m, name), {}).get("us") for name in (BASELINE, method))
                if base and mine:
                    logs.append(math.log(base / mine))
            if logs:
                found.setdefault(method, {})[m] = (math.exp(sum(logs) / len(logs)), len(logs))
    return found


def versus(doc: Document) -> list[dict[str, Any]]:
    """Return, for every shape and method of ours, the M with the worst ratio to the best rival.

    ``ratio`` is our time / the best rival's at that M, above 1 if we are slower; ``rival`` is that peer.
    """
    rows = by_problem(doc)
    found = []
    for n, k in shapes_of(doc):
        for method, about in doc["methods"].items():
            worst: dict[str, Any] | None = None
            for m in tokens_of(doc):
                mine = rows.get((n, k, m, method), {}).get("us")
                theirs = {r: us for r in about["rivals"] if (us := rows.get((n, k, m, r), {}).get("us"))}
                if not mine or not theirs:
                    continue
                best = min(theirs, key=lambda name: theirs[name])
                ratio = mine / theirs[best]
                if worst is None or ratio > worst["ratio"]:
                    worst = {"n": n, "k": k, "method": method, "ratio": ratio, "m": m, "rival": best}
            if worst:
                found.append(worst)
    return found


def overall(doc: Document) -> list[dict[str, Any]]:
    """Return, for each method of ours, its worst shape and how many problems lose more than ``LOSS`` to a peer."""
    rows = by_problem(doc)
    found: dict[str, dict[str, Any]] = {}
    for worst in versus(doc):
        best_so_far = found.get(worst["method"])
        if best_so_far is None or worst["ratio"] > best_so_far["ratio"]:
            found[worst["method"]] = dict(worst)
    for method, worst in found.items():
        ratios = []
        for (n, k, m, name), row in rows.items():
            theirs = [rows.get((n, k, m, rival), {}).get("us") for rival in doc["methods"][method]["rivals"]]
            times = [us for us in theirs if us]
            if name == method and row["us"] and times:
                ratios.append(row["us"] / min(times))
        worst |= {"problems": len(ratios), "lost": sum(ratio > 1 + LOSS for ratio in ratios)}
    return list(found.values())


TARGET_SHAPES = catalogue().suite("targets").shapes


def _targets(doc: Document) -> list[list[str]]:
    """Return the table of targets; empty if no shape of the targets was measured, or the GPU is not sm_90."""
    over = [shape for shape in TARGET_SHAPES if shape in shapes_of(doc)]
    return targets.table(speedups(doc, over), len(TARGET_SHAPES)) if over and doc["facts"]["arch"] == "sm_90" else []


def target_shapes(doc: Document) -> list[tuple[int, int]]:
    """Return the shapes of the targets if all were measured, else all measured shapes."""
    measured = shapes_of(doc)
    return list(TARGET_SHAPES) if set(TARGET_SHAPES) <= set(measured) else measured


# --------------------------------------------------------------------------------------------------------------- table


def text(doc: Document) -> str:
    """Return everything as plain text."""
    return "\n\n".join(part for part in _parts(doc, plain) if part)


def markdown(doc: Document) -> str:
    """Return the same as GitHub's Markdown."""
    return "\n\n".join(part for part in _parts(doc, github) if part) + "\n"


def summary(doc: Document) -> str:
    """Return the summary for the documentation, as Markdown: means, worst ratios to peers, errors."""
    over = target_shapes(doc)
    parts = [headline(doc), f"Times as fast as {BASELINE}, geometric mean over {len(over)} shapes:"]
    parts += [github(_means(doc, over, some)) for some in _chunks(tokens_of(doc), 2 * COLUMNS)]
    if len(aims := _targets(doc)) > 1:
        parts += [f"Beside the targets, which are stated over {len(TARGET_SHAPES)} shapes:", github(aims)]
    if standing := overall(doc):
        head = ["ours", "worst time / best peer's", "N x K", "M", "that peer", f"over {1 + LOSS:.2f}"]
        lines = [
            [
                *(w["method"], f"{w['ratio']:.3f}", f"{w['n']}x{w['k']}", str(w["m"]), w["rival"]),
                f"{w['lost']} of {w['problems']}",
            ]
            for w in standing
        ]
        parts += [f"Ours beside the best peer, over {len(shapes_of(doc))} shapes:", github([head, *lines])]
    wrong = sum(row["status"] != "ok" for row in doc["measured"])
    parts.append(
        f"{len(doc['measured'])} rows were checked tile by tile, {wrong} of them are wrong or failed. Relative error "
        f"against the exact product of the stored weight, mean over all problems:"
    )
    parts.append(github(_errors(doc)))
    parts += [notes] if (notes := _notes(doc)) else []
    return "\n\n".join(parts)


def _errors(doc: Document) -> list[list[str]]:
    found: dict[str, list[float]] = {}
    for row in doc["measured"]:
        if row["status"] == "ok":
            found.setdefault(row["method"], []).append(row["error"])
    return [["method", "error"], *([name, f"{sum(e) / len(e):.4f}"] for name, e in found.items())]


def csv_text(doc: Document) -> str:
    """Return the rows as CSV, one line per method and problem."""
    if not doc["measured"]:
        return ""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(doc["measured"][0]), lineterminator="\n")
    writer.writeheader()
    for row in doc["measured"]:
        writer.writerow(row | {"tile": "x".join(map(str, row["tile"])) if row["tile"] else ""})
    return out.getvalue()


Grid = Callable[[Sequence[Sequence[str]]], str]


def _parts(doc: Document, grid: Grid) -> Iterable[str]:
    on_gpu = bool(doc["facts"]["arch"])
    yield headline(doc)
    for n, k in shapes_of(doc):
        owners = catalogue().owners(n, k)
        yield f"N={n} K={k}" + (f": {', '.join(owners)}" if owners else "")
        for some in _chunks(tokens_of(doc), COLUMNS):
            yield grid(_block(doc, n, k, some, on_gpu))
    if doc["measured"]:
        meaning = f" (times as fast as {BASELINE}, share of the measured roofline)" if on_gpu else ""
        yield f"microseconds{meaning}; ~ spread over {NOISY:.0%}" + (", * weights may stay in the cache" * on_gpu)
    if on_gpu and len(shapes_of(doc)) > 1:
        over = target_shapes(doc)
        yield f"times as fast as {BASELINE}, geometric mean over {len(over)} shapes:"
        for some in _chunks(tokens_of(doc), 2 * COLUMNS):
            yield grid(_means(doc, over, some))
    if len(aims := _targets(doc)) > 1:
        yield f"beside the targets, geometric means over {len(TARGET_SHAPES)} shapes:"
        yield grid(aims)
    if on_gpu and (against := versus(doc)):
        yield "ours / the best peer in time, at the M where it is worst (over 1: slower):"
        yield grid(_standing(against))
    if doc["host"]:
        yield "host time of a call, microseconds:"
        yield grid(_host(doc["host"]))
    yield _notes(doc)


def headline(doc: Document) -> str:
    """Return the card, the versions and the measured limits as one line."""
    facts, peaks = doc["facts"], doc["peaks"]
    known = [("driver", facts["driver"]), ("torch", facts["torch"]), ("commit", facts["commit"])]
    where = f"{facts['device']}{' ' + facts['arch'] if facts['arch'] else ''}"
    line = ", ".join([where, *(f"{name} {value}" for name, value in known if value), facts["date"]])
    units = (("copy", 1e12, "TB/s"), ("bf16", 1e12, "TFLOP/s"), ("fp8", 1e12, "TFLOP/s"))
    best = [f"{name} {peaks[name] / unit:.3g} {word}" for name, unit, word in units if peaks[name]]
    return line + (f"; measured ceilings: {', '.join(best)}" if best else "")


def _block(doc: Document, n: int, k: int, ms: Sequence[int], on_gpu: bool) -> list[list[str]]:
    rows = by_problem(doc)
    grid = [["", *(f"M={m}" for m in ms)]]
    for method in doc["methods"]:
        bases = [rows.get((n, k, m, BASELINE)) if on_gpu else None for m in ms]
        cells = [_cell(rows.get((n, k, m, method)), base, on_gpu) for m, base in zip(ms, bases, strict=True)]
        if any(cells):
            grid.append([method, *cells])
    return grid


def _cell(row: Mapping[str, Any] | None, base: Mapping[str, Any] | None, on_gpu: bool) -> str:
    if row is None:
        return ""
    if row["status"] != "ok":
        return str(row["status"])
    marks = ("~" if row["spread"] > NOISY else "") + ("*" if on_gpu and not row["cold"] else "")
    extra = [f"{base['us'] / row['us']:.2f}x"] if base and base["us"] and row["method"] != BASELINE else []
    extra += [f"{100 * row['roofline']:.0f}%"] if row["roofline"] else []
    return f"{row['us']:.1f}{marks}" + (f" ({', '.join(extra)})" if extra else "")


def _means(doc: Document, shapes: Sequence[tuple[int, int]], ms: Sequence[int]) -> list[list[str]]:
    found = speedups(doc, shapes)
    grid = [["", *(f"M={m}" for m in ms)]]
    for method, by_m in found.items():
        if method != BASELINE:
            grid.append([method, *(targets.mean_text(by_m.get(m), len(shapes)) for m in ms)])
    return grid


def _standing(against: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    head = ["N x K", "ours", "worst", "at M", "best peer there"]
    return [
        head,
        *([f"{a['n']}x{a['k']}", a["method"], f"{a['ratio']:.3f}", str(a["m"]), a["rival"]] for a in against),
    ]


def _host(rows: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    grid = [["call", "us", "spread", "of it not the backend's"]]
    for row in rows:
        adds = f"{row['adds']:.1f}" if row["adds"] is not None else ""
        grid.append([row["what"], f"{row['us']:.1f}", f"{row['spread']:.0%}", adds])
    return grid


def _notes(doc: Document) -> str:
    bad: dict[tuple[str, ...], list[str]] = {}
    for row in doc["measured"]:
        if row["status"] != "ok":
            what = (row["status"], row["method"], f"N={row['n']} K={row['k']}", row["detail"])
            bad.setdefault(what, []).append(str(row["m"]))
    lines = [f"{status}: {name} {nk} M={','.join(ms)}: {why}" for (status, name, nk, why), ms in bad.items()]
    lines += [f"not measured: {name}: {why}" for name, why in doc["absent"].items()]
    if doc["left"]:
        first = ", ".join(f"{n}x{k} M={m}" for n, k, m in doc["left"][:3])
        more = ", ..." if len(doc["left"]) > 3 else ""
        why = "the run stopped" if doc["stopped"] else "the time budget was used up"
        lines.append(f"not measured: {len(doc['left'])} problems ({first}{more}): {why}")
    lines += [f"STOPPED: {doc['stopped']}"] if doc["stopped"] else []
    return "\n".join(lines)


def plain(grid: Sequence[Sequence[str]]) -> str:
    """Return a table as plain text; the first row is its head."""
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    lines = []
    for row in grid:
        cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def github(grid: Sequence[Sequence[str]]) -> str:
    """Return a table as GitHub's Markdown."""
    head, *rows = grid
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _chunks(values: Sequence[int], size: int) -> list[Sequence[int]]:
    return [values[i : i + size] for i in range(0, len(values), size)]
