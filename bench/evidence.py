"""Run what needs a GPU and keep the outcome: the GPU tests and the demo, with commit, card, driver and versions.

    python -m bench.evidence --commit HASH --json bench/results

Exits with 1 if a test or the demo failed, or time ran out before all tests had run: what had is kept, and the file says
so. The matrix of docs/reference/support.md is generated from the files this writes.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.shared import commandline
from bench.shared.commandline import ROOT

ALONE = (
    *("test_race.py", "test_selfcheck.py", "test_graphs.py", "test_system_gpu.py"),
    *("test_capture_guards.py", "test_tuning.py", "test_bench.py", "test_swiglu_room.py"),
)
"""Files that measure time, memory or the whole card: never beside other tests."""
INTERRUPTED = 2  # pytest's exit code
OP = {"nvfp4": "nvfp4_gemm", "tensor": "fp8_gemm", "row": "fp8_gemm", "block128": "fp8_gemm"}


def run_tests(arguments: list[str], limit_s: float | None = None) -> tuple[list[tuple[str, str, str]], int]:
    """Run pytest on files, if any; return (file, test, outcome) rows and the exit code, 2 if ``limit_s`` ended it."""
    if not any(argument.endswith(".py") or ".py::" in argument for argument in arguments):
        return [], 0
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--durations=10"]
        # A shell's background job ignores SIGINT, and so do its children, unless they are told otherwise.
        process = subprocess.Popen(
            [*command, f"--junitxml={report}", *arguments],
            cwd=ROOT,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # pytest still reports what has run
            code = process.wait(60)
        if not report.exists():  # the limit came before pytest had started
            return [], INTERRUPTED
        # One that was interrupted has no name.
        cases = [case for case in ElementTree.parse(report).getroot().iter("testcase") if case.get("name")]
    rows = []
    for case in cases:
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        rows.append((case.get("classname", "").rsplit(".", 1)[-1], case.get("name", ""), outcome))
    return rows, code


def ran(rows: list[tuple[str, str, str]], device: str) -> list[dict[str, Any]]:
    """Return which backends ran which ops here: the contract tests that passed, none of which failed."""
    counts: dict[tuple[str, str], Counter[str]] = {}  # by backend and scaling
    for _, test, outcome in rows:
        if not test.startswith("test_contract["):
            continue
        backend, scaling = test.removeprefix("test_contract[").split("-")[:2]
        counts.setdefault((backend, scaling), Counter())[outcome] += 1
    return [
        {"backend": backend, "op": OP[scaling], "scaling": scaling, "device": device, "cases": count["passed"]}
        for (backend, scaling), count in sorted(counts.items())
        if count["passed"] and not count["failed"]
    ]


SAME = ("device", "driver", "torch", "cuda", "python", "cudnn")
"""Facts that runs of one record share. Each file and backend has its own commit."""


def joined(before: dict[str, Any] | None, result: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """Return what two runs on one card found. Of a file or a backend that ran twice, the later run's counts.

    Of a file that the limit cut, which has fewer tests than before, the earlier run's, unless one of them failed.
    """
    of = {"commit": facts["commit"], "date": facts["date"]}
    result = result | {
        "tests": {file: counts | of for file, counts in result["tests"].items()},
        "ran": [row | of for row in result["ran"]],
    }
    if before is None:
        return result
    if differs := [key for key in SAME if before["facts"].get(key) != facts.get(key)]:
        found = {key: (before["facts"].get(key), facts.get(key)) for key in differs}
        raise SystemExit(f"--add: the record there is of another machine: {found}")
    cut = {
        file for file, counts in result["tests"].items() if result["ended_by_limit"] and _fewer(counts, before, file)
    }
    if cut:
        print("cut by the limit, the run before stands:", ", ".join(sorted(cut)))
        kept = {key: [row for row in result[key] if row.split("::")[0] not in cut] for key in ("failed", "skipped")}
        tests = {file: counts for file, counts in result["tests"].items() if file not in cut}
        known = set(tests) <= set(before["tests"])  # a file that is new here may be cut too
        result |= kept | {"tests": tests, "ended_by_limit": before["ended_by_limit"] or not known}
    again = set(result["tests"])
    old = {key: [row for row in before[key] if row.split("::")[0] not in again] for key in ("failed", "skipped")}
    rows = {(row["backend"], row["scaling"]): row for row in [*before["ran"], *result["ran"]]}
    return {
        "tests": dict(sorted((before["tests"] | result["tests"]).items())),
        "failed": old["failed"] + result["failed"],
        "skipped": old["skipped"] + result["skipped"],
        "ran": [rows[key] for key in sorted(rows)],
        "ended_by_limit": result["ended_by_limit"],
    }


def _fewer(counts: dict[str, Any], before: dict[str, Any], file: str) -> bool:
    """Whether fewer tests of a file ran than before, and none failed."""
    of = ("passed", "skipped", "failed")
    old = before["tests"].get(file, {})
    return not counts.get("failed") and sum(counts.get(key, 0) for key in of) < sum(old.get(key, 0) for key in of)


def run_demo(fmt: str) -> dict[str, Any]:
    """Run the demo and return what it found, less the long parts."""
    command = [sys.executable, "-m", "fp4dispatch", "demo", "--model", "minilm", "--json", "--format", fmt]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if not done.stdout.strip():
        return {"format": fmt, "ok": False, "error": done.stderr[-2000:]}
    result = json.loads(done.stdout)
    layers = result.pop("report")
    result["cosine"].pop("each")
    backends = sorted({layer["backend"] for layer in layers["layers"]})
    return result | {"backends": backends, "bytes_before": layers["bytes_before"], "bytes_after": layers["bytes_after"]}


def main(words: Sequence[str] | None = None) -> int:
    """Run everything and write the result."""
    parser = commandline.parser(__doc__)
    commandline.takes_record(parser, needed=True, folder=True)
    parser.add_argument("--demo", nargs="*", default=["nvfp4", "fp8", "fp8_row", "fp8_block"])
    parser.add_argument("--add", action="store_true", help="join the record of the same card in --json")
    parser.add_argument("--workers", type=int, default=1, help="processes for the tests that share the card")
    parser.add_argument(
        "--limit-s", type=float, default=86400.0, help="seconds after which no test goes on; the demo comes first"
    )
    files = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests" / "gpu").glob("test_*.py"))]
    parser.add_argument("pytest", nargs="*", default=[*files, "tests/unit/test_formats_cuda.py"])
    arguments = commandline.parse(parser, words)
    from fp4dispatch.benchmark import machine
    from fp4dispatch.benchmark.reports import records

    facts = machine.facts(machine.card("cuda"), arguments.commit)
    result: dict[str, Any] = {}
    demos = [run_demo(fmt) for fmt in arguments.demo]
    end = time.monotonic() + arguments.limit_s
    alone = [path for path in arguments.pytest if Path(path).name in ALONE]
    rows, code = run_tests(alone, arguments.limit_s)
    beside = [path for path in arguments.pytest if path not in alone]
    workers = ["-n", str(arguments.workers)] if arguments.workers > 1 else []  # needs pytest-xdist
    more, other_code = run_tests([*workers, *beside], max(end - time.monotonic(), 1.0))
    rows, code = rows + more, code or other_code
    files = sorted({file for file, _, _ in rows})
    result["tests"] = {file: dict(Counter(outcome for f, _, outcome in rows if f == file)) for file in files}
    result["failed"] = [f"{file}::{test}" for file, test, outcome in rows if outcome == "failed"]
    result["skipped"] = [f"{file}::{test}" for file, test, outcome in rows if outcome == "skipped"]
    result["ran"] = ran(rows, facts["device"])
    result["ended_by_limit"] = INTERRUPTED in (code, other_code)
    path = arguments.json / records.name({"kind": "gpu tests", "facts": facts})
    result = joined(records.read(path) if arguments.add and path.exists() else None, result, facts)
    records.write(arguments.json, "gpu tests", facts, result)
    if demos:
        records.write(arguments.json, "demo", facts, {"demo": demos})
    for file, counts in result["tests"].items():
        print(f"{file:<28} {counts}")
    for demo in demos:
        found = demo.get("error") or f"{demo['cosine']} {demo['backends']}"
        print(f"demo {demo['format']:<10} ok={demo['ok']} {found}")
    print("failed:", *result["failed"], sep="\n  ")
    return 1 if code or not all(demo["ok"] for demo in demos) else 0


if __name__ == "__main__":
    raise SystemExit(main())
