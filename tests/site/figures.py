"""The pictures of README.md and docs/, from the records of bench/results."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from fp4dispatch.benchmark.reports import random_runs as random
from fp4dispatch.benchmark.reports import records, standing
from tests.site.svg import Chart, Series, draw

RESULTS = Path(__file__).parents[2] / "bench" / "results"
LINE = 90
"""Characters of a line below a picture."""
OURS = {
    "FP4Linear": "NVFP4, ours",
    "FP8Linear/row": "FP8 by row, ours",
}
PEERS = {
    "torch/row+q": "FP8 by row, torch._scaled_mm",
    "humming/nvfp4": "NVFP4, Humming",
}
"""Methods of a run -> name in the picture."""
DECODER = {
    "bf16": "bf16",
    "fp8_row": "FP8 by row",
    "nvfp4": "NVFP4",
    "fp8_row+fuse+head": "FP8 by row, fused, with head",
    "nvfp4+fuse+head": "NVFP4, fused, with head",
}
"""Formats of a decoder -> name in the picture. A compiled run has more formats than a picture has colours."""
KL = {
    ("fp4dispatch", "nvfp4", "bf16"): "NVFP4 x 16 bits",
    ("fp4dispatch", "nvfp4", "fp8"): "NVFP4 x FP8",
    ("fp4dispatch", "nvfp4", "nvfp4"): "NVFP4 x NVFP4",
    ("fp4dispatch", "fp8_row", "bf16"): "FP8 x 16 bits",
    ("fp4dispatch", "fp8_row", "fp8"): "FP8 x FP8",
}
"""Rows of the accuracy record -> weights x activations, as the picture names them."""


def card(record: dict) -> str:
    """Return the name of a card without the maker's."""
    return record["facts"]["device"].removeprefix("NVIDIA ").split(" 80GB")[0]


def commits(found: Iterable[dict]) -> str:
    """Return the commits that records were measured at, each once."""
    return ", ".join(dict.fromkeys(each for record in found for each in record["facts"]["commit"].split(", ")))


@functools.cache
def kept(folder: Path, kind: str, subject: str | None = None) -> tuple[dict, ...]:
    """Return the records of a kind, one for each card. All files are read to find them, so once."""
    return tuple(records.kept(folder, kind, subject))


def runs(subject: str) -> tuple[dict, ...]:
    """Return the benchmark runs of a subject: one for each card."""
    return kept(RESULTS, "bench", subject)


def of_card(record: dict) -> list[dict]:
    """Return a card's run of the targets, and its run of them beside all peers where one is kept."""
    peers = [run for run in runs("targets all peers") if run["facts"]["device"] == record["facts"]["device"]]
    return [record, *peers]


def random_runs() -> tuple[dict, ...]:
    """Return the runs of random problems, all of a card as one."""
    return tuple(sorted(random.by_model(kept(RESULTS, "random suite")), key=card))


def range_names() -> list[str]:
    """Return the ranges of M as a picture names them."""
    return [
        f"{first} to {last:,}" if last < standing.ANY_MORE else f"over {first - 1:,}" for first, last in standing.RANGES
    ]


def speedups(run: dict) -> list[Series]:
    """Return ours and the peers of a run of random problems, as times over bf16 in each range of M."""
    found: list[Series] = []
    for method, shown in (OURS | PEERS).items():
        means = zip(range_names(), standing.means(run, method, small=False), strict=True)
        values = {name: mean for name, (mean, problems) in means if problems}
        if values:
            found.append(Series(shown, values))
    return found


def speed() -> str:
    """Return the speed-up of layers over bf16, by tokens, of every card that a run of random problems is kept of."""
    charts = []
    for run in random_runs():
        title = f"{card(run)}: how many times as fast as bf16 cuBLAS a linear layer is"
        series = speedups(run)
        places = [[*(OURS | PEERS).values()].index(one.name) for one in series]
        measured = [name for name in range_names() if any(name in one.values for one in series)]
        charts.append(Chart(title, measured, series, "times bf16", "tokens", 1.0, "", 2, places))
    note = "Random layers of published models; geometric means."
    measured_at = (f"{card(run)}. Commits: {commits([run])}." for run in random_runs())
    lines = (line for text in measured_at for line in textwrap.wrap(text, LINE))  # there are many
    return draw(charts, "\n".join((note, *lines)))


def decoder() -> str:
    """Return tokens per second of a whole decoder over bf16, of every card that a run is kept of."""
    charts = []
    found = kept(RESULTS, "decoder")
    for record in found:
        first, *others = record["formats"]
        compiled = record.get("compiled", False)
        others = [each for each in others if each["format"] in DECODER or not compiled]
        series = []
        for each in others:
            done = {
                f"decode, batch {base['batch']}": mine["tokens_per_s"] / base["tokens_per_s"]
                for mine, base in zip(each["decode"], first["decode"], strict=True)
                if mine["status"] == base["status"] == "ok"
            }
            if "prefill" in each and not compiled:  # prefill is not compiled
                speeds = [one["prefill"]["tokens_per_s"] for one in (each, first)]
                done[f"prefill, {each['prefill']['tokens']} tokens"] = speeds[0] / speeds[1]
            if done:
                series.append(Series(DECODER.get(each["format"], each["format"]), done))
        if not series:
            continue
        title = f"{card(record)}: tokens/s of a decoder with the layer sizes of Llama-3.1-8B"
        title += ", torch.compile" if compiled else ""
        x = list(dict.fromkeys(name for one in series for name in one.values))
        names = [one.name for one in series]
        fixed = {"FP8 by row": 1, "NVFP4": 0} if len(names) < 3 else {}
        places = [fixed.get(name, i) for i, name in enumerate(names)]
        base = DECODER.get(first["format"], first["format"])
        charts.append(Chart(title, x, series, f"times {base}", "", 1.0, "", 2, places))
    note = f"A CUDA graph a step; attention and heads not named: bf16.\nCommits: {commits(found)}."
    return draw(charts, note)


def accuracy() -> str:
    """Return the KL divergence of formats from the original model, of every machine that a run is kept of."""
    charts = []
    found = kept(RESULTS, "accuracy")
    for record in found:
        rows = {(row["by"], row["weights"], row["activations"]): row for row in record["rows"]}
        series = [
            Series(shown, {text: rows[key]["texts"][text]["kl"] for text in record["texts"]})
            for key, shown in KL.items()
            if key in rows
        ]
        title = f"{record['model']} on {card(record)}: KL divergence from the original model"
        charts.append(Chart(title, list(record["texts"]), series, "nats a token", digits=2, places=[0, 2, 4, 1, 3]))
    note = f"Weights x activations; lower is better.\nCommits: {commits(found)}."
    return draw(charts, note, height=200)


def all_figures() -> Iterator[tuple[str, str]]:
    """Yield the file name of each picture in docs/images, and its text."""
    yield "speed.svg", speed()
    yield "decoder.svg", decoder()
    yield "accuracy.svg", accuracy()
