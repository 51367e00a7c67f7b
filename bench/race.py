"""The launch race of every kernel family: our builds, builds without barriers, and the PDL trial of each. Needs SM90.

    python -m bench.race --commit REVISION --json bench/results/race-CARD.json

A wrong launch of ours, or a control that is not caught, by the race or by the trial, ends with exit code 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bench.shared import commandline
from fp4dispatch import jit
from fp4dispatch.backends.own.pdl_trial import pdl
from fp4dispatch.benchmark import machine
from fp4dispatch.benchmark.reports import records
from fp4dispatch.jit.catalog.manifest import installed
from fp4dispatch.jit.kernels import CHAIN
from fp4dispatch.problem.arch import Arch
from fp4dispatch.trust import race


def trials() -> list[dict[str, Any]]:
    """Try each build of the race and its control; milliseconds without building."""
    device = torch.device("cuda", torch.cuda.current_device())
    arch, catalog = Arch(*torch.cuda.get_device_capability()), installed()
    chain = jit.load(*CHAIN, arch).module
    rows = []
    for kernel, variant in dict.fromkeys((case.kernel, case.variant) for case in race.CASES):
        ours = pdl.trial(jit.load(kernel, variant, arch), chain, device)
        bare = jit.load(kernel, variant, arch, catalog=race.without_barriers(catalog, kernel))
        control = pdl.trial(bare, chain, device)
        rows.append(
            {
                "build": f"{kernel}/{variant}",
                "launches": ours.launches,
                "ms": round(ours.ms, 1),
                "passed": ours.passed,
                "evidence": ours.evidence,
                "control_caught": not control.passed,
                "control_evidence": control.evidence,
            }
        )
    return rows


def main(words: Sequence[str] | None = None) -> int:
    """Run all three, write the record, print a table."""
    parser = commandline.parser(__doc__)
    commandline.takes_record(parser, needed=True)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--requests", type=int, default=84)
    arguments = commandline.parse(parser, words)
    facts = machine.facts(machine.card("cuda"), arguments.commit)
    ours = race.run_race(arguments.rounds, arguments.requests)
    control = race.run_race(max(arguments.rounds // 5, 1), arguments.requests, control=True)
    rows = trials()
    result = {"ours": ours.to_dict(), "control": control.to_dict(), "trials": rows}
    records.write(arguments.json, "race", facts, result)
    by_name = {row["build"]: row for row in rows}
    for mine, bare in zip(ours.cases, control.cases, strict=True):
        row = by_name[mine.name.split()[0]]
        seen = "caught" if row["control_caught"] else "NOT CAUGHT"
        print(
            f"{mine.name:<48} ours {mine.bad_launches} of {mine.launches}  control {bare.bad_launches} of "
            f"{bare.launches}  trial {row['ms']} ms {'passed' if row['passed'] else 'FAILED'}, control {seen}"
        )
    right = all(row["passed"] and row["control_caught"] for row in rows)
    right &= ours.bad_launches == 0 and all(case.bad_launches for case in control.cases)
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
