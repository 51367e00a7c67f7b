"""Compiles the kernels that Humming will launch, in a process beside the one that measures.

Humming compiles a kernel for about 3.4 s when it is first called, and the GPU waits. It keeps kernels in a folder, by a
hash of their sources, each behind a lock of its own. So a kernel that this process has compiled is found there, and one
that it is compiling is waited for.

``python -m`` reads ``{"device": ..., "problems": [[n, k, [m, ...]], ...]}`` from stdin, in the order of measuring.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from fp4dispatch.benchmark.methods import background, humming_kernels
from fp4dispatch.benchmark.methods.base import Problems
from fp4dispatch.jit.compiler.limits import limits

ENVIRONMENT = {"HUMMING_DISABLE_PARALLEL_BUILD": "1"}
"""Without it, importing Humming starts processes in the background, which build what is not needed here."""
MOST_WORKERS = 8
"""Enough: a problem takes about a second to measure, and its kernel 3.4 to compile."""
SPARED = 2
"""Cores that are left for what measures."""
_GIGABYTES = 1.0  # of memory for one compiler
_NICE = 10


def job(what: str, problems: Problems, device: torch.device) -> background.Job:
    """Return the job that compiles the kernels of problems."""
    task = {"device": str(device), "problems": [(n, k, list(ms)) for n, k, ms in problems]}
    return background.Job(what, __name__, task, ENVIRONMENT)


def main() -> int:
    """Compile what stdin asks for; 1 if something could not be compiled."""
    if len(sys.argv) > 1:
        background.end_with(int(sys.argv[1]))
    os.nice(_NICE)
    task = json.load(sys.stdin)
    failed = compile_all(task["problems"], torch.device(task["device"]), workers())
    if failed:
        first, *others = failed
        sys.stderr.write(f"\n{first}" + (f" (and {len(others)} more)" if others else "") + "\n")
    return 1 if failed else 0


def workers() -> int:
    """Return how many compilers may run at once: some cores are spared, ``MAX_JOBS`` and memory are kept to."""
    here = limits()
    return replace(here, cores=here.cores - SPARED).jobs(_GIGABYTES, MOST_WORKERS)


def compile_all(problems: Problems, device: torch.device, at_once: int) -> list[str]:
    """Compile each kernel once, in the order of the problems. Returns what could not be compiled, each with why."""
    kernel = _compiled_only()
    started: dict[tuple[str, str], tuple[str, Future[Any]]] = {}
    failed = []
    with ThreadPoolExecutor(at_once) as pool:
        for n, k, ms in problems:
            try:
                config = humming_kernels.layer_config(n, k, device)
                choices = humming_kernels.table(config, device)
                for m in ms:
                    layer, alone = config.to_str(), json.dumps([[0, 1 << 30, humming_kernels.choice(choices, m)]])
                    if (layer, alone) not in started:
                        future = pool.submit(kernel.prepare_kernels, layer, None, alone, device)
                        started[layer, alone] = (f"{n}x{k}, M={m}", future)
            except Exception as error:  # the method meets it too, when the turn of this layer comes
                failed.append(f"{n}x{k}: {_words(error)}")
    ended = [(where, future.exception()) for where, future in started.values()]
    return failed + [f"{where}: {_words(error)}" for where, error in ended if error is not None]


def _words(error: BaseException) -> str:
    return ": ".join(filter(None, (type(error).__name__, " ".join(str(error).split()))))


def _compiled_only() -> Any:
    """Return Humming's class of kernels, but without the last step, which loads a kernel onto the GPU."""

    def register_kernel(self: Any) -> None:
        self.kernel_id = 0

    kernel = importlib.import_module("humming.kernel.humming").HummingKernel
    return type("CompiledOnly", (kernel,), {"register_kernel": register_kernel})


if __name__ == "__main__":
    raise SystemExit(main())
