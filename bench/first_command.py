"""The first command of the README on a fresh machine: time, peak memory, and what it prints.

    python -m bench.first_command --commit HASH --json bench/results

Clones the repository, and runs the command there as it stands in the README, one part after the other, with empty
caches. Downloads are part of the time, so the record depends on how far the package index is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.shared import commandline
from bench.shared.commandline import ROOT
from tests.readme import commands

WIDTH = 100


def parts(command: str) -> list[str]:
    """Return the parts of a command line that run one after the other."""
    return [part.strip() for part in command.split("&&")]


def run(part: str, folder: Path, caches: Path) -> tuple[dict[str, Any], str]:
    """Run one part in a folder; return its seconds and the peak memory of its largest process, and what it prints.

    Raises
    ------
    RuntimeError
        With the end of its output, if it fails.
    """
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("FP4", "PYTHON", "OMP_"))}
    env = ours | {"XDG_CACHE_HOME": str(caches), "PIP_CACHE_DIR": str(caches / "pip"), "COLUMNS": str(WIDTH)}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        started = time.perf_counter()
        process = subprocess.Popen(["bash", "-c", part], cwd=folder, env=env, stdout=out, stderr=err)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        for file in (out, err):
            file.seek(0)
        printed, said = out.read(), err.read()
    if process.returncode:
        raise RuntimeError(f"{part} failed:\n{printed[-2000:]}\n{said[-4000:]}")
    return {"command": part, "wall_s": round(seconds, 1), "peak_mb": round(usage.ru_maxrss * 1024 / 1e6)}, printed


def measure(command: str, source: Path, commit: str) -> dict[str, Any]:
    """Run a command in a clone of a repository; return its parts, and what the last one printed."""
    with tempfile.TemporaryDirectory(prefix="fp4dispatch-") as scratch:
        folder = Path(scratch, "fp4dispatch")
        for words in (["clone", "-q", str(source), str(folder)], ["-C", str(folder), "checkout", "-q", commit]):
            subprocess.run(["git", *words], check=True)
        steps = []
        for part in parts(command):
            step, printed = run(part, folder, Path(scratch, "caches"))
            steps.append(step)
            print(f"{step['wall_s']:7.1f} s  {step['peak_mb']:6d} MB  {part}", flush=True)
        installed = sum(path.lstat().st_size for path in Path(folder, ".venv").rglob("*") if path.is_file())
    return {"steps": steps, "environment_mb": round(installed / 1e6), "output": printed.rstrip().splitlines()}


def faults(found: dict[str, Any]) -> list[str]:
    """Return a sentence for each line that is too wide, and one where the demo did not say that all is well."""
    wide = [line for line in found["output"] if len(line) > WIDTH]
    bad = [f"wider than {WIDTH} columns: {line}" for line in wide]
    return bad if any(line.startswith("ok:") for line in found["output"]) else [*bad, "the demo did not print ok"]


def main(words: Sequence[str] | None = None) -> int:
    """Measure, write the record, print it."""
    parser = commandline.parser(__doc__)
    commandline.takes_record(parser, needed=True)
    arguments = commandline.parse(parser, words)
    if shutil.which("git") is None:
        parser.error("git, which clones the repository, is not on PATH")
    found = measure(commands()["demo"], ROOT, arguments.commit)
    # Only now: until it starts its program, a child process counts as large as this one.
    from fp4dispatch.benchmark import machine
    from fp4dispatch.benchmark.reports import records

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    here = {"cores": len(os.sched_getaffinity(0)), "memory_gb": round(memory / 1e9)}
    records.write(
        arguments.json,
        "first command",
        machine.facts(machine.card(), arguments.commit),
        here | {"first_command": found},
    )
    print("\n".join([*found["output"], "", *(wrong := faults(found))]))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
