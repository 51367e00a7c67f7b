"""The golden decisions: each choice of the policy on each arch, and each deny rule, with one question that shows it.

Regenerate after a change of rules, capabilities or backends, then read the diff::

    python -m tests.golden.regenerate

All questions are asked: arch x problem x software x capture mode x proven or not. One is kept for each choice (arch,
op, backend and rule), the first; and one for each deny rule, on each arch that it names. So a row stands for many
questions, and a new backend adds few rows.

``chosen`` is the backend and the rule that put it there. ``denied`` are the deny rules that hold for a candidate.
N=K=4096; M=8 or 16, that of the name (16, 64, 512), 4096 for ``many``. ``+copy``: an FP8 copy of the weights is
allowed. ``+raw``: the operator on operands that are quantised already. The software is that of ``stacks.toml``.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from fp4dispatch.machine.system import System
from fp4dispatch.policy.catalogue import catalogue, kernel_ops
from fp4dispatch.policy.resolve import SupportsProblem, resolve
from fp4dispatch.policy.rules import Rule, rules
from fp4dispatch.problem import Problem
from fp4dispatch.problem.arch import KNOWN_ARCHS
from fp4dispatch.problem.decision import Decision
from tests.declared import DeclaredBackend

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent
TABLE = HERE / "decisions.txt"

ARCHS = ("none", *(arch.sm for arch in KNOWN_ARCHS))
Row = tuple[str, ...]
PROBLEMS = {
    "nvfp4": ("nvfp4_gemm", "nvfp4", 8),
    "nvfp4-16": ("nvfp4_gemm", "nvfp4", 16),
    "nvfp4-many": ("nvfp4_gemm", "nvfp4", 4096),
    "nvfp4-64+copy": ("nvfp4_gemm", "nvfp4", 64),
    "nvfp4-many+copy": ("nvfp4_gemm", "nvfp4", 4096),
    "fp8-tensor": ("fp8_gemm", "tensor", 8),
    "fp8-row": ("fp8_gemm", "row", 8),
    "fp8-row-64": ("fp8_gemm", "row", 64),
    "fp8-row-64+raw": ("fp8_gemm", "row", 64),
    "fp8-row-512": ("fp8_gemm", "row", 512),
    "fp8-block128": ("fp8_gemm", "block128", 16),
}
CAPTURES = {"none": ("none", 1), "full": ("full", 1), "piecewise": ("piecewise", 1), "piecewise,M>=0": ("piecewise", 0)}
PROVEN = {"no": False, "yes": True}
STACKS: dict[str, dict[str, str]] = tomllib.loads((HERE / "stacks.toml").read_text())
HEADER = ("arch", "problem", "stack", "capture", "proven", "chosen", "denied")


@dataclass(frozen=True)
class Cell:
    """One question."""

    arch: str
    problem: str
    stack: str
    capture: str
    proven: str

    def ask(self, backends: Mapping[str, SupportsProblem], some: Sequence[Rule]) -> Decision:
        op, scaling, m = PROBLEMS[self.problem]
        capture, m_min = CAPTURES[self.capture]
        system = System.fake(
            None if self.arch == "none" else self.arch,
            **STACKS[self.stack],
            proven=[(kernels, self.arch) for kernels in kernel_ops(op)] if PROVEN[self.proven] else [],
            fp8_copy=self.problem.endswith("+copy"),
        )
        raw = self.problem.endswith("+raw")
        asked = Problem(*(op, m, 4096, 4096, "fp8" if raw else "any", scaling), capture=capture, m_min=m_min, raw=raw)
        return resolve(asked, system, backends, rules=some)


def cells() -> Iterator[Cell]:
    """Every question. Proofs are of our own builds, so software with FlashInfer is asked about without them."""
    for arch, problem, stack, capture, proven in itertools.product(ARCHS, PROBLEMS, STACKS, CAPTURES, PROVEN):
        if proven == "no" or (arch != "none" and "flashinfer" not in STACKS[stack]):
            yield Cell(arch, problem, stack, capture, proven)


def declared() -> dict[str, SupportsProblem]:
    return {name: DeclaredBackend(name) for name in catalogue().backends}


def answer(decision: Decision) -> tuple[str, str]:
    """The two result columns."""
    choice = f"{decision.backend} ({decision.rule.id})" if decision.rule else str(decision.backend)
    denied = dict.fromkeys(hit.id for verdict in decision.verdicts for hit in verdict.denied)
    return choice, " ".join(denied) or "-"


def shown(cell: Cell, decision: Decision, archs: Mapping[str, Sequence[str]]) -> Iterator[tuple[tuple[str, ...], int]]:
    """What a row would show, and how well: a denial shows best where nothing else keeps the backend from running."""
    yield (cell.arch, PROBLEMS[cell.problem][0], answer(decision)[0]), 0
    for verdict in decision.verdicts:
        for hit in verdict.denied:
            alone = 2 if verdict.can_run and len(verdict.denied) == 1 else int(verdict.can_run)
            yield (cell.arch if archs[hit.id] else "any", hit.id), alone


def table(some: Sequence[Rule] | None = None, backends: Mapping[str, SupportsProblem] | None = None) -> list[Row]:
    """The rows: the first question that shows each thing best."""
    some = rules() if some is None else some
    backends = declared() if backends is None else backends
    archs = {rule.id: rule.when.archs for rule in some}
    best: dict[tuple[str, ...], tuple[int, Cell]] = {}
    answers = {}
    for cell in cells():
        decision = cell.ask(backends, some)
        answers[cell] = answer(decision)
        for what, how_well in shown(cell, decision, archs):
            if what not in best or how_well > best[what][0]:
                best[what] = (how_well, cell)
    kept = {cell for _, cell in best.values()}
    return [(*astuple(cell), *found) for cell, found in answers.items() if cell in kept]


def read(text: str) -> list[Row]:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [tuple(part.strip() for part in line.split("|")) for line in lines[1:]]


def render(rows: Sequence[Row]) -> str:
    widths = [max(len(row[i]) for row in (HEADER, *rows)) for i in range(len(HEADER))]
    lines = [
        " | ".join(f"{part:<{w}}" for part, w in zip(row, widths, strict=True)).rstrip() for row in (HEADER, *rows)
    ]
    comment = "".join(f"# {line}\n".replace("# \n", "#\n") for line in (__doc__ or "").splitlines())
    return comment + "\n".join(lines) + "\n"


def compare(golden: Sequence[Row], now: Sequence[Row]) -> list[str]:
    """Every difference between two tables, one a line."""
    gone, new = set(golden) - set(now), set(now) - set(golden)
    return [f"golden only: {' | '.join(r)}" for r in golden if r in gone] + [
        f"      now: {' | '.join(r)}" for r in now if r in new
    ]


if __name__ == "__main__":
    TABLE.write_text(render(table()))
    print(f"wrote {TABLE} ({len(read(TABLE.read_text()))} rows)")
