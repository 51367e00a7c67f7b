"""Run checkpoints through vLLM, in the interpreter that has it.

That is the interpreter of the tests, else ``VLLM_PYTHON``, else ``.venv-vllm/bin/python``. CONTRIBUTING.md says how to
make one.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests import tiny_models

ROOT = Path(__file__).parents[1]
NEEDED = ("vllm", "re2", "pynvml", "platformdirs", "filelock")
_LACKS = "import importlib.util as u, sys; print(*(n for n in sys.argv[1:] if u.find_spec(n) is None))"


@functools.cache
def interpreter() -> tuple[str, str]:
    """Return the interpreter, or why there is none."""
    if all(importlib.util.find_spec(name) for name in NEEDED):
        return sys.executable, ""
    path = os.environ.get("VLLM_PYTHON") or str(ROOT / ".venv-vllm" / "bin" / "python")
    if not Path(path).exists():
        return "", f"vllm is not installed here, and there is no {path} (set VLLM_PYTHON)"
    done = subprocess.run([path, "-c", _LACKS, *NEEDED], capture_output=True, text=True, timeout=60)
    if done.returncode or done.stdout.strip():
        return "", f"{path} lacks {done.stdout.strip() or done.stderr.strip()[-200:]}"
    return path, ""


@dataclass
class Job:
    """One model to run, see ``tests/vllm_run.py``."""

    name: str
    model: str
    options: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)
    control: bool = False
    out: str = ""


def _installed(folder: Path) -> Path:
    """Make a folder with the entry points of pyproject.toml: the interpreter of vLLM runs this tree uninstalled."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    info = folder / "site" / f"fp4dispatch-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fp4dispatch\nVersion: {project['version']}\n")
    lines = [
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in e.items()) for group, e in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return info.parent


def execute(folder: Path, command: list[str], *, processes: bool = False) -> str:
    """Run a command of vLLM's interpreter with this package on its path. Return its output.

    ``processes``: let vLLM start its engine in a process of its own, as it does by default.
    """
    python, _ = interpreter()
    path = [str(ROOT)] if python == sys.executable else [str(ROOT), str(_installed(folder))]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": 2400}
    done = subprocess.run([python, *command], cwd=folder, env=environment, **options)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def run(folder: Path, jobs: list[Job], **options: Any) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Run models; return the results and the logs by the names of the jobs."""
    for job in jobs:
        job.out = str(folder / f"{job.name}.pt")
    (folder / "jobs.json").write_text(json.dumps([asdict(job) for job in jobs]))
    output = execute(folder, [str(ROOT / "tests" / "vllm_run.py"), str(folder / "jobs.json")], **options)
    logs = {part.partition("\n")[0]: part for part in output.split("=== ")[1:]}
    return {job.name: torch.load(job.out) for job in jobs}, logs


def kl(found: dict[str, Any], expected: Any) -> float:
    """Return the largest KL divergence of the predictions from those of a model in fp32."""
    assert "error" not in found, found["error"]
    p = torch.log_softmax(tiny_models.logits(expected)[0], -1)
    return float((p.exp() * (p - found["logprobs"])).sum(-1).max())
