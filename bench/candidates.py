"""Which backends there are for FP8 and NVFP4 on this GPU, what the self-check says of each, and what tuning chooses.

    python -m bench.candidates --commit HASH --json bench/results/candidates-CARD.json

For each op and scaling: every backend with its reasons or its self-check (first in this process and again, building
and checking apart), and the choice of the rules for a few tokens; the tuned choice for a few weights; how many faults
that are planted into an honest emulation on the device the self-check catches, and how many honest emulations it
accuses. Exits with 1 if a backend of this machine fails or its checking takes too long, a fault is missed or an honest
one accused. Verdicts and times go to a temporary folder; kernels that are in the cache are used. The CUDA context is
made before the first self-check: it is no backend's.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.shared import commandline
from fp4dispatch.backends import registry
from fp4dispatch.backends.base import Backend
from fp4dispatch.benchmark import machine
from fp4dispatch.benchmark.reports import records
from fp4dispatch.dispatch import choose, tuned
from fp4dispatch.dispatch.explain import explain
from fp4dispatch.problem import Problem
from fp4dispatch.trust import canary, quarantine, selfcheck
from fp4dispatch.trust.verdict import CheckResult
from fp4dispatch.tune import tuning
from tests.planted import FAULTS, HONEST, ONLY_WITH

KINDS = (("fp8_gemm", "tensor"), ("fp8_gemm", "row"), ("fp8_gemm", "block128"), ("nvfp4_gemm", "nvfp4"))
NK = ((4096, 4096), (6144, 4096), (4096, 14336))
TOKENS = (1, 16, 64, 256, 2048)
LIMIT_MS = 300
"""What the self-check of a backend may take once everything is built; the first in a process too."""
TIMES = {
    "build_ms": "first: build, ms",
    "check_ms": "check, ms",
    "again_build_ms": "again: build, ms",
    "again_check_ms": "check, ms",
}
TIMES_OF_OLD = {"first_ms": "first, ms", "again_ms": "again, ms"}
"""Records of before building and checking were told apart."""
PLANTED = (("fp8_gemm", "row", "fp8"), ("fp8_gemm", "block128", "fp8"), ("nvfp4_gemm", "nvfp4", "nvfp4"))


def candidates(device: torch.device) -> list[dict[str, Any]]:
    """Judge every backend for every op and scaling; self-check, twice, what can run."""
    rows = []
    gpu = device.index
    for op, scaling in KINDS:
        problem = Problem(op, 16, 4096, 4096, scaling=scaling)  # type: ignore[arg-type]
        decision = explain(op, 16, 4096, 4096, scaling=scaling)  # type: ignore[arg-type]
        for verdict in decision.verdicts:
            backend = registry.backends().get(verdict.backend)
            row: dict[str, Any] = {"op": op, "scaling": scaling, "backend": verdict.backend}
            row |= {"activation": verdict.activation, "reasons": [str(r) for r in verdict.reasons]}
            row |= {"denied": [hit.id for hit in verdict.denied]}
            if verdict.can_run and isinstance(backend, Backend):
                row |= check(backend, problem, verdict.activation, device, gpu)
            rows.append(row)
            print(describe(row), flush=True)
    return rows


def check(backend: Backend, problem: Problem, activation: Any, device: torch.device, gpu: int | None) -> dict[str, Any]:
    """Run the self-check twice: the first builds what this process has not built yet."""
    results = []
    for _ in range(2):
        canary.canaries.cache_clear()
        system = choose.facts(gpu)
        results.append(selfcheck.check(backend, problem.op, problem.scaling, activation, system, device))
    first, again = results
    return {
        "status": again.status if first.status == again.status else f"{first.status}, then {again.status}",
        "canaries": len(again.ran),
        "findings": list(first.findings or again.findings),
        "notes": list(again.notes),
        **{f"{name}_ms": round(value) for name, value in _times(first, "").items()},
        **{f"{name}_ms": round(value) for name, value in _times(again, "again_").items()},
    }


def _times(result: CheckResult, prefix: str) -> dict[str, float]:
    assert result.build_ms is not None
    assert result.check_ms is not None
    return {f"{prefix}build": result.build_ms, f"{prefix}check": result.check_ms}


def describe(row: dict[str, Any]) -> str:
    """Return one line for people."""
    head = f"{row['op']} {row['scaling']:<8} {row['backend']:<20}"
    if "status" not in row:
        return f"{head} cannot run: {'; '.join(row['reasons'])[:120]}"
    denied = f", denied by {', '.join(row['denied'])}" if row["denied"] else ""
    found = f": {row['findings'][0][:120]}" if row["findings"] else ""
    first = f"built in {row['build_ms']} ms and checked in {row['check_ms']} ms"
    again = f"again in {row['again_build_ms']} and {row['again_check_ms']} ms"
    return f"{head} {row['activation']}: {row['status']}, {row['canaries']} canaries {first}, {again}{denied}{found}"


def choices(device: torch.device, nk: Any, tokens: Any) -> list[dict[str, Any]]:
    """Tune a few weights; return the rules' choice, the tuned one and every time."""
    rows = []
    for op, scaling in KINDS:
        for n, k in nk:
            weights = None
            for m in tokens:
                problem = Problem(op, m, n, k, scaling=scaling)  # type: ignore[arg-type]
                gpu = device.index
                rules = choose.select(problem, backend="auto", gpu=gpu)
                weights = weights or tuning.make_weights(problem, device)
                before = memory(device)
                started = time.perf_counter()
                found = tuning.tune(problem, weights, gpu=gpu)
                seconds = time.perf_counter() - started
                decision = choose.select(found.problem, backend="auto", gpu=gpu)
                row = {"op": op, "scaling": scaling, "n": n, "k": k, "m": found.problem.m, "seconds": round(seconds, 2)}
                row |= {"rules": f"{rules.backend} ({rules.activation})"}
                row |= {"auto": f"{decision.backend} ({decision.activation})"}
                row |= {"by": decision.rule.id if decision.rule else "", "left_out": list(map(list, found.left_out))}
                row |= {"us": {f"{t.backend} ({t.activation})": round(t.us, 2) for t in found.best()}}
                row |= {"noise_us": {f"{t.backend} ({t.activation})": round(t.noise_us, 2) for t in found.best()}}
                row |= {"bytes_kept": memory(device) - before}
                rows.append(row)
                auto = f"rules {row['rules']}, auto {row['auto']} [{row['by']}] {row['us']}"
                print(f"{op} {scaling} N={n} K={k} M={row['m']}: {auto}", flush=True)
            del weights
    return rows


def memory(device: torch.device) -> int:
    """Return what torch holds on the device, in tensors."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def planted(device: torch.device, kinds: Any) -> list[dict[str, Any]]:
    """Check an honest emulation, and the same with one fault each, with everything on the device."""
    rows = []
    for kind in kinds:
        missed, accused, faults, honest = [], [], 0, 0
        for name, backend in subjects(kind):
            system = choose.facts(device.index)
            with torch.device(device):
                result = selfcheck.check(backend, *kind, system, device)  # type: ignore[arg-type]
            if name in FAULTS:
                faults += 1
                missed += [name] if result.status != "failed" else []
            else:
                honest += 1
                accused += [f"{name}: {result.text()}"] if result.status != "passed" else []
        row = {"op": kind[0], "scaling": kind[1], "activation": kind[2], "faults": faults, "missed": missed}
        rows.append(row | {"caught": faults - len(missed), "honest": honest, "accused": accused})
        print(
            f"planted {' '.join(kind)}: {faults - len(missed)} of {faults} caught, {len(accused)} of {honest} accused"
        )
    return rows


def subjects(kind: Any) -> Iterator[tuple[str, Backend]]:
    """Return every fault and every honest emulation that there is for a kind."""
    for name, fault in FAULTS.items():
        if ONLY_WITH[name](*kind) and kind[2] in fault.activations.get(kind[0], ()):  # type: ignore[operator]
            yield name, fault()
    for emulation in HONEST:
        if kind[2] in emulation.activations.get(kind[0], ()):
            yield emulation.__name__, emulation()


def faults_in(result: dict[str, Any]) -> list[str]:
    """Return what is wrong, one sentence each; what a rule denies is no fault, because ``auto`` leaves it alone."""
    failed = [row for row in result["candidates"] if row.get("status", "passed").startswith("failed")]
    wrong = [describe(row) for row in failed if not row["denied"]]
    wrong += [f"checking takes {LIMIT_MS} ms or more: {describe(row)}" for row in result["candidates"] if slow(row)]
    wrong += [
        f"planted {row['op']} {row['scaling']}: missed {row['missed']}" for row in result["planted"] if row["missed"]
    ]
    return wrong + [f"accused: {text}" for row in result["planted"] for text in row["accused"]]


def slow(row: dict[str, Any]) -> bool:
    """Whether a backend passed and took too long to check, what it built left out."""
    return row.get("status") == "passed" and max(row["check_ms"], row["again_check_ms"]) >= LIMIT_MS


def candidate_table(result: dict[str, Any]) -> str:
    """Return the backends as markdown."""
    times = TIMES if any("check_ms" in row for row in result["candidates"]) else TIMES_OF_OLD
    titles = ["op", "scaling", "backend", "activation", "self-check", *times.values()]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in result["candidates"]:
        head = f"| {row['op']} | {row['scaling']} | {row['backend']} |"
        if "status" in row:
            denied = f", denied: {', '.join(row['denied'])}" if row["denied"] else ""
            verdict = f"{row['status']}, {row['canaries']} canaries{denied}"
            taken = " | ".join(str(row[name]) for name in times)
            lines.append(f"{head} {row['activation']} | {verdict} | {taken} |")
        else:
            codes = ", ".join(dict.fromkeys(reason.split()[0] for reason in row["reasons"]))
            lines.append(f"{head} | cannot run: {codes} |{' |' * len(times)}")
    return "\n".join(lines)


def choice_table(result: dict[str, Any]) -> str:
    """Return the tuned choices as markdown; the time of the rules' choice, and of the fastest."""
    lines = [
        "| op | scaling | N x K | M | the rules choose | us | auto chooses, tuned | us | all, us |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["tuned"]:
        us = row["us"]
        every = ", ".join(f"{name} {value:.1f}" for name, value in us.items())
        cells = [row["op"], row["scaling"], f"{row['n']}x{row['k']}", row["m"]]
        for who in ("rules", "auto"):
            cells += [row[who], f"{us[row[who]]:.1f}" if row[who] in us else ""]
        lines.append(f"| {' | '.join(map(str, cells))} | {every} |")
    return "\n".join(lines)


def planted_table(result: dict[str, Any]) -> str:
    """Return the counts of planted faults as markdown."""
    lines = ["| op | scaling | activation | faults caught | honest accused |", "|---|---|---|---|---|"]
    for row in result["planted"]:
        counts = f"{row['caught']} of {row['faults']} | {len(row['accused'])} of {row['honest']}"
        lines.append(f"| {row['op']} | {row['scaling']} | {row['activation']} | {counts} |")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """Run everything, write the record."""
    parser = commandline.parser(__doc__)
    commandline.takes_record(parser, needed=True)
    parser.add_argument("--device")
    parser.add_argument("--tokens", type=int, nargs="*", default=list(TOKENS))
    parser.add_argument("--nk", nargs="*", default=[f"{n}x{k}" for n, k in NK], metavar="NxK")
    parser.add_argument("--all-planted", action="store_true", help="plant faults for every kind of problem")
    arguments = commandline.parse(parser, words)
    card = machine.card(arguments.device)
    nk = [tuple(map(int, text.split("x"))) for text in arguments.nk]
    everything = tuple(canary.kinds({"nvfp4_gemm": ("nvfp4", "fp8", "bf16"), "fp8_gemm": ("fp8", "bf16")}))
    facts = machine.facts(card, arguments.commit)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o700)
        quarantine.store.folder = lambda: Path(folder) / "selfcheck"  # type: ignore[assignment]
        tuned.store.folder = lambda: Path(folder) / "tuning"  # type: ignore[assignment]
        torch.zeros(1, device=card.device)
        parts: dict[str, Callable[[], list[dict[str, Any]]]] = {
            "candidates": lambda: candidates(card.device),
            "tuned": lambda: choices(card.device, nk, arguments.tokens),
            "planted": lambda: planted(card.device, everything if arguments.all_planted else PLANTED),
        }
        result: dict[str, Any] = dict.fromkeys(parts, ())
        for name, part in parts.items():  # a time limit loses the part that it ends
            result[name] = part()
            records.write(arguments.json, "candidates", facts, result)
    print(candidate_table(result), choice_table(result), planted_table(result), sep="\n\n")
    wrong = faults_in(result)
    fine = f"every candidate passed and was checked in less than {LIMIT_MS} ms, every fault was caught, nothing accused"
    print("\n".join(wrong) or fine)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
