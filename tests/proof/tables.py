"""The mutation tables of docs/proof.md, from the kept record: class x target, refused of tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from bench import proof_cost
from tests.proof import cases, small

Row = Mapping[str, Any]
Counts = dict[tuple[str, str], list[int]]


def _table(first: str, counts: Counts, order: Iterable[str]) -> str:
    targets = sorted({target for _, target in counts}, key=["90a", "100f", "103a", "110a", "120f", "121a"].index)
    lines = [f"| {first} | {' | '.join(targets)} |", "|---" * (len(targets) + 1) + "|"]
    for name in order:
        cells = [counts.get((name, target)) for target in targets]
        texts = [f"{cell[0]} of {cell[1]}" if cell and cell[1] else "-" for cell in cells]
        lines.append(f"| {name} | {' | '.join(texts)} |")
    return "\n".join(lines)


def _add(counts: Counts, key: tuple[str, str], refused: int, tried: int) -> None:
    cell = counts.setdefault(key, [0, 0])
    cell[0] += refused
    cell[1] += tried


def small_kernels(record: Row) -> str:
    """Return refused of all small mutants; the last row is good kernels, which must be accepted."""
    counts: Counts = {}
    for row in record["small"]:
        _add(counts, (row["class"], row["target"]), row["refused"], row["tried"])
    return _table("class", counts, [*small.MUTANTS, "good"])


def machine_code(record: Row) -> str:
    """Return accepted builds, and refused of all faults in their machine code."""
    counts: Counts = {}
    for row in record["builds"]:
        _add(counts, ("builds accepted", row["target"]), row["accepted"], 1)
        for kind, tried in row["tried"].items():
            missed = sum(name.endswith(f": {kind}") for name in row["wrong"])
            _add(counts, (kind, row["target"]), tried - missed, tried)
    known, tried = cases.builds(), {row["id"] for row in record["builds"]}
    all_of = Counter(build.kernel for build in known)
    absent = Counter(build.kernel for build in known if build.id not in tried)
    text = f"Tried: {len(record['builds'])} of {len(known)} builds."
    if absent:
        text += f" Not tried: {', '.join(f'{absent[name]} of {all_of[name]} of {name}' for name in absent)}."
    return f"{text}\n\n{_table('class', counts, ['builds accepted', *small.MUTANTS])}"


def sources(record: Row) -> str:
    """Return refused of all faults in sources, by class and by family, and how many of all were tried."""
    by_class: Counts = {}
    by_family: Counts = {}
    for row in record["sources"]:
        refused = int(row["refused"] > 0)
        _add(by_class, (row["class"], row["target"]), refused, 1)
        if row["class"] != cases.CONTROL:
            _add(by_family, (row["family"], row["target"]), refused, 1)
    tried, known = len(record["sources"]), len(cases.planted())
    families = dict.fromkeys(case.family for case in cases.planted())
    return "\n\n".join(
        [
            f"Tried: {tried} of {known}, `{cases.CONTROL}` among them: a copy without fault, which must be accepted.",
            _table("class", by_class, [*small.MUTANTS, cases.CONTROL]),
            _table("family", by_family, families),
        ]
    )


def cost(record: Row) -> str:
    """Return the CPU seconds of each build and the share that is not the compiler's."""
    lines = [
        "| build | kernels | compiler, s | proof, s | checks, s | share of proof and checks |",
        "|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        seconds = [f"{row[name]:.1f}" for name in ("compile_s", "proof_s", "checks_s")]
        lines.append(f"| {row['id']} | {row['kernels']} | {' | '.join(seconds)} | {100 * row['share']:.1f} % |")
    measured = {row["id"] for row in record["rows"]}
    absent = ["/".join(build) for build in proof_cost.builds() if "/".join(build) not in measured]
    return "\n".join(lines + ([f"\nNot measured: {', '.join(absent)}."] if absent else []))
