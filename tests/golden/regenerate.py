"""The golden table: every arch x op x software x capture mode x proven or not -> backend. Reviewed like code.

Regenerate after a change of rules, capabilities or backends, then read the diff::

    python -m tests.golden.regenerate

Two answers a row: ``designed``, with every backend of capabilities.toml taken as written, and ``today``, with the
backends that this version has. ``denied`` are the deny rules that hold for a candidate. N=K=4096; M=8 or 16, that of
the name (16, 64, 512), 4096 for ``many``. ``+copy``: an FP8 copy of the weights is allowed. ``+raw``: the operator on
operands that are quantised already.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fp4dispatch.backends import registry
from fp4dispatch.machine.system import System
from fp4dispatch.policy.capability import DeclaredBackend
from fp4dispatch.policy.catalogue import catalogue, kernel_ops
from fp4dispatch.policy.resolve import SupportsProblem, resolve
from fp4dispatch.policy.rules import Rule, rules
from fp4dispatch.problem import Problem
from fp4dispatch.problem.arch import KNOWN_ARCHS
from fp4dispatch.problem.decision import Decision

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent
TABLE = HERE / "decisions.txt"

ARCHS = ("none", *(arch.sm for arch in KNOWN_ARCHS))
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
HEADER = ("arch", "problem", "stack", "capture", "proven", "designed", "today", "denied")


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
    for arch in ARCHS:
        for problem in PROBLEMS:
            for stack in STACKS:
                for capture in CAPTURES:
                    for proven in PROVEN:
                        if arch != "none" or proven == "no":
                            yield Cell(arch, problem, stack, capture, proven)


def declared() -> dict[str, SupportsProblem]:
    return {name: DeclaredBackend(name) for name in catalogue().backends}


def answer(cell: Cell, some: Sequence[Rule], designed: Mapping, today: Mapping) -> tuple[str, str, str]:
    """The three result columns of a cell."""
    plan, now = cell.ask(designed, some), cell.ask(today, some)
    denied = dict.fromkeys(hit.id for verdict in plan.verdicts for hit in verdict.denied)
    return _choice(plan), _choice(now), " ".join(denied) or "-"


def _choice(decision: Decision) -> str:
    return f"{decision.backend} ({decision.rule.id})" if decision.rule else str(decision.backend)


def table(some: Sequence[Rule] | None = None) -> list[tuple[str, ...]]:
    """The rows, capture modes and proven merged where the answer is the same."""
    some = rules() if some is None else some
    designed, today = declared(), registry.builtins()
    answers = {cell: answer(cell, some, designed, today) for cell in cells()}
    rows: dict[tuple[str, ...], list[str]] = {}
    for group in dict.fromkeys((c.arch, c.problem, c.stack) for c in answers):
        by_proven = {}
        for proven in PROVEN:
            found: dict[tuple[str, str, str], list[str]] = {}
            for capture in CAPTURES:
                cell = Cell(*group, capture, proven)
                if cell in answers:
                    found.setdefault(answers[cell], []).append(capture)
            by_proven[proven] = found
        for proven, found in by_proven.items():
            for result, captures in found.items():
                modes = "any" if len(captures) == len(CAPTURES) else " ".join(captures)
                rows.setdefault((*group, modes, *result), []).append(proven)
    return [(*key[:4], "any" if len(proven) == len(PROVEN) else proven[0], *key[4:]) for key, proven in rows.items()]


def read(text: str) -> list[tuple[str, ...]]:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [tuple(part.strip() for part in line.split("|")) for line in lines[1:]]


def render(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in (HEADER, *rows)) for i in range(len(HEADER))]
    lines = [
        " | ".join(f"{part:<{w}}" for part, w in zip(row, widths, strict=True)).rstrip() for row in (HEADER, *rows)
    ]
    comment = "".join(f"# {line}\n".replace("# \n", "#\n") for line in (__doc__ or "").splitlines())
    return comment + "\n".join(lines) + "\n"


def compare(golden: Sequence[tuple[str, ...]], now: Sequence[tuple[str, ...]]) -> list[str]:
    """Every difference between two tables, one a line."""
    gone, new = set(golden) - set(now), set(now) - set(golden)
    return [f"golden only: {' | '.join(r)}" for r in golden if r in gone] + [
        f"      now: {' | '.join(r)}" for r in now if r in new
    ]


if __name__ == "__main__":
    TABLE.write_text(render(table()))
    print(f"wrote {TABLE} ({len(read(TABLE.read_text()))} rows)")
