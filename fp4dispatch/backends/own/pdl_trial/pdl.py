"""Whether a build of a kernel may be launched with PDL on this machine.

Two independent checks must pass. The proof (:mod:`fp4dispatch.jit.prove`) reads the machine code. The trial here runs
it: each launching function of the build runs between a producer that writes late and a consumer that overwrites
(:mod:`~fp4dispatch.backends.own.pdl_trial.launch_chain`), for a few sizes and delays. If any bit differs from stream
order, that build is launched without PDL on that GPU model; the layer still runs.

The verdict is kept in ``pdl/`` of the cache folder (:mod:`fp4dispatch.jit.store.records`), under the library's hash,
the GPU model, the driver and the code of the trial. ``FP4DISPATCH_SELFCHECK=off`` skips the trial, ``force`` repeats it
in each process.
"""

from __future__ import annotations

import functools
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fp4dispatch import jit
from fp4dispatch.backends.own.pdl_trial import launch_chain, launch_operands
from fp4dispatch.backends.own.pdl_trial.launch_chain import LaunchChain
from fp4dispatch.backends.own.pdl_trial.launch_operands import Sizes
from fp4dispatch.backends.own.tensors.operands import arch_of
from fp4dispatch.errors import CacheError, CompileError, FlagsError, ProofError, ToolchainError
from fp4dispatch.jit import LoadedKernel
from fp4dispatch.jit.catalog import manifest
from fp4dispatch.jit.kernels import CHAIN
from fp4dispatch.jit.store import records
from fp4dispatch.jit.store.digests import sources_sha256
from fp4dispatch.machine import capture
from fp4dispatch.machine import log as _log
from fp4dispatch.machine import system as _system
from fp4dispatch.machine.locks import ForkSafeLock
from fp4dispatch.settings import settings

SCHEMA = 1
_SIZES = ((1, 520, 2080), (12, 4096, 1056), (24, 2056, 4128), (200, 1544, 2080))
"""M, N, K: one token, ragged and full tiles, short and long K. N % 8 == 0 and K % 32 == 0 suit every kernel."""
_DELAYS = (0, 20_000, 200_000)
"""Cycles that the producer spins; 200,000 are about 0.1 ms, longer than any of these launches takes."""

_lock = ForkSafeLock()
_known: dict[tuple[str, str, str], PdlVerdict] = {}


@dataclass(frozen=True)
class PdlVerdict:
    """What the trial of one build found.

    ``passed``: no launch differed. ``launches`` were made, in ``ms`` milliseconds without building. ``evidence`` is
    empty or says which launch was wrong, or why no trial could be made. The verdict holds under ``facts``.
    """

    kernel: str
    library_sha256: str
    gpu: str
    passed: bool
    launches: int = 0
    ms: float = 0.0
    evidence: str = ""
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the record: the hash of the build, the GPU model and the facts."""
        return _name(self.library_sha256, self.gpu, self.facts)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> PdlVerdict:
        """Read :meth:`to_dict` back.

        Raises
        ------
        TypeError, ValueError
            If the data is no verdict.
        """
        found = cls(**data)
        if not isinstance(found.passed, bool) or not isinstance(found.evidence, str):
            raise ValueError("not a verdict")
        return found


def _name(sha: str, gpu: str, facts: dict[str, str]) -> str:
    return records.name_of([SCHEMA, sha, gpu, sorted(facts.items())])


store = records.Store("pdl", SCHEMA, "PDL trials", PdlVerdict.from_dict)


def allowed(kernel: LoadedKernel, device: torch.device) -> bool:
    """Return whether a loaded kernel may be launched with PDL on a device: proven, tried, and not switched off.

    The first question about a build on a GPU model runs its trial: a few milliseconds, with a synchronisation.

    Raises
    ------
    CaptureError
        If a trial would have to run while a CUDA graph is being captured.
    """
    if settings.pdl == "off" or not kernel.pdl_allowed:
        return False
    return settings.selfcheck == "off" or verdict(kernel, device).passed


def verdict(kernel: LoadedKernel, device: torch.device) -> PdlVerdict:
    """Return the verdict on a build: of this process, kept on disk, or made now. Errors as :func:`allowed`."""
    gpu = torch.cuda.get_device_name(device)
    sha = kernel.built.entry.library_sha256
    key = (sha, gpu, settings.selfcheck)
    found = _known.get(key)
    if found is not None:
        return found
    capture.forbid_in_capture(f"the PDL trial of {kernel.built.entry.name}", "fp4dispatch.warmup(model, tokens=[...])")
    with _lock:
        if key not in _known:
            kept = store.find(_name(sha, gpu, _facts())) if settings.selfcheck == "auto" else None
            _known[key] = kept or _made(kernel, device, gpu)
        return _known[key]


def results() -> tuple[PdlVerdict, ...]:
    """Return the verdicts of this process. Runs nothing."""
    with _lock:
        return tuple(_known.values())


def reset() -> None:
    """Forget the verdicts of this process; those on disk stay."""
    with _lock:
        _known.clear()


def _made(kernel: LoadedKernel, device: torch.device, gpu: str) -> PdlVerdict:
    """Run the trial; store its verdict unless something other than the kernel prevented it."""
    try:
        chain = jit.load(*CHAIN, arch_of(device))
    except (CacheError, CompileError, FlagsError, ProofError, ToolchainError) as error:
        return _refused(kernel, gpu, f"its trial needs the kernel {CHAIN[0]}, which is not there: {error}")
    if not chain.pdl_allowed:
        return _refused(kernel, gpu, f"the barriers of {CHAIN[0]}, which its trial needs, are not proven")
    try:
        found = replace(trial(kernel, chain.module, device), facts=_facts())
    except torch.OutOfMemoryError as error:
        return _refused(kernel, gpu, f"memory ran out in its trial: {error}")
    store.save(found)
    if not found.passed:
        _log.warning("%s is launched without PDL: %s", found.kernel, found.evidence)
    return found


def _refused(kernel: LoadedKernel, gpu: str, why: str) -> PdlVerdict:
    entry = kernel.built.entry
    _log.warning("%s is launched without PDL: %s", entry.name, why)
    return PdlVerdict(entry.name, entry.library_sha256, gpu, False, evidence=why)


def trial(kernel: LoadedKernel, chain: Any, device: torch.device) -> PdlVerdict:
    """Launch every function of a build in the chain and compare bits with stream order.

    Parameters
    ----------
    kernel
        The build; launched with PDL whatever its proof says.
    chain
        The loaded library of ``csrc/checks/race_chain.cu``.
    device
        CUDA device to run on. Synchronises a stream of its own; not for use during capture.
    """
    entry = kernel.built.entry
    catalog = manifest.installed()
    known = catalog.kernel(entry.request["kernel"])
    variant = known.variant(entry.request["variant"])
    gpu, launches = torch.cuda.get_device_name(device), 0
    functions = launch_operands.entries(known, variant)
    blank = PdlVerdict(entry.name, entry.library_sha256, gpu, False)
    if not functions:
        return replace(
            blank, evidence=f"{known.name} is not in the table of launches (backends/own/pdl_trial/launch_operands.py)"
        )
    started = time.perf_counter()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.inference_mode(mode=False), torch.no_grad(), torch.cuda.device(device), torch.cuda.stream(stream):
        generator = torch.Generator(device=device)
        generator.manual_seed(0)
        counts, asked = [], []
        for function in functions:
            for mnk in _SIZES:
                link = LaunchChain(
                    kernel.module, chain, function, Sizes(*mnk, launch_operands.dtype_of(variant)), generator
                )
                for delay in _DELAYS:
                    link.launch(delay)
                    counts.append(link.wrong())
                    asked.append((function.function, mnk, delay))
                    launches += 1
        found = torch.stack(counts).tolist()
    ms = (time.perf_counter() - started) * 1e3
    for (name, (m, n, k), delay), (output, inputs) in zip(asked, found, strict=True):
        if output or inputs:
            what = (
                f"{output} bytes of its output differ from stream order"
                if output
                else f"{inputs} bytes of its input were written after the kernel behind it had started"
            )
            evidence = f"{name} M={m} N={n} K={k} behind a kernel that writes {delay} cycles late: {what}"
            return replace(blank, launches=launches, ms=ms, evidence=evidence)
    return replace(blank, passed=True, launches=launches, ms=ms)


def _facts() -> dict[str, str]:
    """Return everything else that a verdict depends on."""
    machine = _system.current()
    return {"driver": machine.driver or "", "cuda": machine.cuda or "", "trial": _own_code()}


@functools.cache
def _own_code() -> str:
    """Hash the sources of the trial."""
    modules = [Path(str(module.__file__)) for module in (launch_chain, launch_operands)]
    return sources_sha256([*modules, Path(__file__), manifest.installed().csrc / "checks" / "race_chain.cu"])[:32]
