"""How fast the layers are, as a table and as one line, from the records of bench/results."""

from __future__ import annotations

from fp4dispatch.benchmark.reports import report, standing, targets
from tests.docs import origin
from tests.site import figures

ANY = range(1, 1 << 20)
SPEED = {
    "FP4Linear": ("`FP4Linear`", ANY),
    "FP4Linear/w4a8_expanded": ("`FP4Linear`, `FP4DISPATCH_FP8_COPY=1`", range(129, 1 << 20)),
    "FP8Linear/row": ("`FP8Linear`, by row", ANY),
    "FP8Linear/block128": ("`FP8Linear`, 128x128 blocks", range(1, 385)),
    "torch/row+q": ("`torch._scaled_mm` by row, our quantiser", ANY),
    "flashinfer/block128+q": ("FlashInfer's DeepGEMM, 128x128 blocks", ANY),
    "humming/nvfp4": ("Humming, NVFP4", ANY),
}
"""What the table of speed-ups shows: methods, under which names, for how many tokens: those for which a layer still
runs what it ran then."""


def table() -> str:
    """Return what layers and their peers are over bf16 cuBLAS, of each card that a run is kept of."""
    parts = []
    for record in figures.runs("targets"):
        tokens = report.tokens_of(record)
        lines = [f"| tokens | {' | '.join(map(str, tokens))} |", "|---|" + "---:|" * len(tokens)]
        for method, (shown, serves) in SPEED.items():
            for run in figures.of_card(record):
                means = report.speedups(run, report.TARGET_SHAPES).get(method)
                if means:
                    cells = [
                        targets.mean_text(means.get(m) if m in serves else None, len(report.TARGET_SHAPES))
                        for m in tokens
                    ]
                    other = "" if run is record else " (another run)"
                    lines.append(f"| {' | '.join([shown + other, *cells])} |")
                    break
        parts += [f"{origin(record)}.", "\n".join(lines)]
    return "\n\n".join(parts) or "No run is kept yet."


def headline() -> str:
    """Return what the layers gain, in one line for each card: few tokens and many, and a whole decoder."""
    lines = []
    for run in figures.random_runs():
        means = standing.means(run, "FP4Linear", small=False)
        gains = [(name, *found) for name, found in zip(figures.range_names(), means, strict=True) if found[1]]
        (few, fast, some), (many, slow, others) = gains[0], gains[-1]
        text = f"**{figures.card(run)}: NVFP4 linear layers are {fast:.1f} times as fast as bf16** "
        text += f"with {few} tokens (mean of {some} problems), and {slow:.1f} times with {many} ({others})"
        decoders = figures.kept(figures.RESULTS, "decoder")
        mine = [each for each in decoders if each["facts"]["device"] == run["facts"]["device"]]
        for each in [each for each in mine if each.get("compiled")] or mine:
            text += _decoder_line(each)
        lines.append(f"{text}.")
    what = "The layers are random ones of published models, with at least 8 million weights"
    lines.append(f"{what} ([all results](docs/guide/benchmarks.md)).")
    return "\n\n".join(lines) if len(lines) > 1 else "No run is kept yet."


def _decoder_line(run: dict) -> str:
    """Return what a whole decoder gains at the smallest batch, and in memory; nothing where a step was wrong."""
    formats = {each["format"]: each for each in run["formats"]}
    best = "nvfp4+fuse+head" if run.get("compiled") and "nvfp4+fuse+head" in formats else "nvfp4"
    if "bf16" not in formats or best not in formats:
        return ""
    base, mine = formats["bf16"], formats[best]
    slow, fast = (each["decode"][0] for each in (base, mine))
    if slow["status"] != "ok" or fast["status"] != "ok":
        return ""
    held = mine.get("compact", mine)["weights_gb"]
    compiled = " under `torch.compile`" if run.get("compiled") else ""
    merged = ", with fused projections and a quantised head" if best != "nvfp4" else ""
    return (
        f". A decoder of the size of Llama-3.1-8B goes from {slow['tokens_per_s']:.0f} to {fast['tokens_per_s']:.0f} "
        f"tokens/s at batch {slow['batch']}{compiled}, and its weights from {base['weights_gb']:.1f} to {held:.1f} GB"
        + merged
    )
