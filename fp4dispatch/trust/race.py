"""The race test: every kernel family of ours in a PDL chain, many times, on several streams.

Each request is one :class:`~fp4dispatch.backends.own.pdl_trial.launch_chain.LaunchChain`: a producer that writes late,
the kernel, and a consumer that overwrites, all launched with PDL. Requests of different kernels, shapes and delays run
at once. Every output must have the same bits as in stream order.

The negative control is the same kernel, compiled without its barriers and launched with PDL. A test that does not catch
it proves nothing.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fp4dispatch import jit
from fp4dispatch.backends.own.pdl_trial import launch_operands
from fp4dispatch.backends.own.pdl_trial.launch_chain import LaunchChain
from fp4dispatch.backends.own.pdl_trial.launch_operands import Entry, Sizes
from fp4dispatch.errors import BackendUnsupportedError
from fp4dispatch.jit import kernels
from fp4dispatch.jit.catalog.manifest import Catalog, installed
from fp4dispatch.jit.kernels import CHAIN
from fp4dispatch.problem.arch import Arch

_DELAYS = (0, 20_000, 200_000)
"""Cycles the producer spins before it writes; 200,000 are about 0.1 ms."""

Loader = Callable[[str, str, bool], Any]
"""(kernel, variant, control) -> loaded module."""


@dataclass(frozen=True)
class Case:
    """Problems for one function of one build: M is drawn from ``m``, (N, K) from ``nk``."""

    kernel: str
    variant: str
    function: str
    m: tuple[int, ...]
    nk: tuple[tuple[int, int], ...]

    @property
    def name(self) -> str:
        """Kernel, build and function, for reports."""
        return f"{self.kernel}/{self.variant} {self.function}"


# Ragged M, N and K tails, one wave and many.
_FEW = (1, 2, 7, 16, 31)
_MANY = (65, 128, 200, 1000)
_ANY = (1, 7, 33, 200, 1000)
_NK = ((4096, 4096), (520, 2080), (1544, 1056), (6144, 4096))

CASES = (
    Case("w4a16_small", "bf16", "w4a16_small", _FEW, _NK),
    Case("w4_gemm_sm90", "a16_bf16_128x128", "w4_gemm", _MANY, _NK),
    Case("w4_gemm_sm90", "a8_bf16_64", "w4_gemm", _ANY, _NK),
    Case("w4_gemm_sm90", "a8_bf16_96", "w4_gemm", _MANY, _NK),
    Case("w4_gemm_sm90", "a8_bf16_208", "w4_gemm", _MANY, _NK),
    Case("w4_gemm_sm90", "even_a8_bf16_112", "w4_gemm_even", _MANY, _NK),
    Case("w4a8_small", "bf16", "w4a8_small", _FEW, _NK),
    Case("w8a16_small", "bf16", "w8a16_small", _FEW, _NK),
    Case("w8a8_small", "bf16", "w8a8_small", (*_FEW, 64), _NK),
    Case("w8a8_small", "block_bf16", "w8a8_small", (*_FEW, 64), _NK),
    Case("w8_gemm_sm90", "a16_bf16_128", "w8_gemm", _MANY, _NK),
    Case("w8_gemm_sm90", "bf16_128", "w8_gemm", _MANY, _NK),
    Case("w8_gemm_sm90", "bf16_224", "w8_gemm", _MANY, _NK),
    Case("w8_gemm_sm90", "block_bf16_128", "w8_gemm", _MANY, _NK),
    Case("w4_activations", "any", "w4_quantize_row", _ANY, _NK),
    Case("w4_activations", "any", "w4_quantize_tensor", _ANY, _NK),
    Case("w4_activations", "any", "w8_quantize_row", _ANY, _NK),
    Case("w4_activations", "any", "w8_quantize_tensor", _ANY, _NK),
    Case("w4_activations", "any", "w8_quantize_block", _ANY, _NK),
    Case("swiglu_activations", "any", "w4_swiglu_row", _ANY, _NK),
    Case("swiglu_activations", "any", "w8_swiglu_row", _ANY, _NK),
    Case("swiglu_activations", "any", "w8_swiglu_tensor", _ANY, _NK),
    Case("swiglu_activations", "any", "w8_swiglu_block", _ANY, _NK),
    Case("swiglu_rows", "any", "fp8_swiglu_row", _ANY, _NK),
    Case("swiglu_rows", "any", "fp8_swiglu_tensor", _ANY, _NK),
    Case("swiglu_rows", "any", "fp8_swiglu_1x128", _ANY, _NK),
    Case("swiglu_rows", "any", "swiglu_product", _ANY, _NK),
    Case("w4_to_e4m3", "any", "w4_to_e4m3", (1,), _NK),
    Case("fp8_quantize", "any", "fp8_quantize_row", _ANY, _NK),
    Case("fp8_quantize", "any", "fp8_quantize_tensor", _ANY, _NK),
    Case("fp8_quantize", "any", "fp8_quantize_1x128", _ANY, _NK),
    Case("nvfp4_quantize", "any", "nvfp4_quantize", _ANY, _NK),
    Case("fp8_gemm_sm90", "row_bf16_swap_64x16", "fp8_gemm", _FEW[:4], _NK),
    Case("fp8_gemm_sm90", "row_bf16_128x128", "fp8_gemm", _MANY, _NK),
    Case("fp8_gemm_sm90", "block_bf16_128x128", "fp8_gemm", _MANY, _NK),
)
"""Every kernel family that runs on SM90."""


@dataclass(frozen=True)
class CaseCount:
    """Counts of one function of one build."""

    name: str
    launches: int
    bad_launches: int


@dataclass(frozen=True)
class RaceReport:
    """Outcome of :func:`run_race`. A launch is bad if any byte differs from stream order."""

    gpu: str
    control: bool
    rounds: int
    requests: int
    streams: int
    seed: int
    launches: int
    bad_launches: int
    bad_rounds: int
    cases: tuple[CaseCount, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data for JSON."""
        return asdict(self)


def run_race(
    rounds: int = 50,
    requests: int = 64,
    streams: int = 4,
    control: bool = False,
    seed: int = 0,
    *,
    load: Loader | None = None,
    cases: tuple[Case, ...] = CASES,
) -> RaceReport:
    """Run the chains and count the launches that differ from stream order. Not for use during capture.

    Parameters
    ----------
    rounds, requests, streams
        ``requests`` chains run at once, on ``streams`` CUDA streams. Each round ends with a synchronisation.
    control
        Use the builds without barriers; their results should be wrong.
    seed
        Decides shapes, data and delays.
    load
        ``(kernel, variant, control) -> module``. By default our JIT, which compiles what is missing.
    cases
        What to run; each request takes the next case in turn.

    Returns
    -------
    RaceReport
        ``bad_launches == 0`` where the barriers work.

    Raises
    ------
    BackendUnsupportedError
        Where torch sees no GPU that these kernels are built for.
    RuntimeError
        If a kernel is wrong even in stream order.
    """
    if not torch.cuda.is_available():
        raise BackendUnsupportedError(
            f"the race needs {_needed(cases)}, and torch sees no CUDA GPU\n  fix: `fp4dispatch doctor` says why"
        )
    load = load or _jit_loader(cases, control)
    rng = random.Random(seed)
    generator = torch.Generator(device="cuda")
    generator.manual_seed(seed)
    chain = load(*CHAIN, False)
    built = [(case, _entry(case), load(case.kernel, case.variant, control)) for case in cases]
    work = []
    for i in range(requests):
        case, entry, module = built[i % len(built)]
        sizes = Sizes(rng.choice(case.m), *rng.choice(case.nk), launch_operands.dtype_of(_variant(case)))
        work.append((case, LaunchChain(module, chain, entry, sizes, generator)))
    side_streams = [torch.cuda.Stream() for _ in range(streams)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    counts = []
    for _ in range(rounds):
        for i, (_, link) in enumerate(work):
            with torch.cuda.stream(side_streams[i % streams]):
                link.launch(rng.choice(_DELAYS))
        torch.cuda.synchronize()
        counts.append(torch.stack([link.wrong().sum() for _, link in work]).tolist())
    return _report(counts, [case for case, _ in work], control=control, streams=streams, seed=seed, cases=cases)


def _variant(case: Case) -> Any:
    return installed().kernel(case.kernel).variant(case.variant)


def _entry(case: Case) -> Entry:
    found = launch_operands.entries(installed().kernel(case.kernel), _variant(case))
    return next(entry for entry in found if entry.function == case.function)


def _report(
    counts: list[list[int]], work: list[Case], *, control: bool, streams: int, seed: int, cases: tuple[Case, ...]
) -> RaceReport:
    def count(case: Case) -> CaseCount:
        bad = [row[i] for row in counts for i, mine in enumerate(work) if mine is case]
        return CaseCount(case.name, len(bad), sum(b > 0 for b in bad))

    by_case = tuple(count(case) for case in cases)
    return RaceReport(
        gpu=torch.cuda.get_device_name(),
        control=control,
        rounds=len(counts),
        requests=len(work),
        streams=streams,
        seed=seed,
        launches=sum(case.launches for case in by_case),
        bad_launches=sum(case.bad_launches for case in by_case),
        bad_rounds=sum(any(row) for row in counts),
        cases=by_case,
    )


def _archs(cases: tuple[Case, ...]) -> list[Arch]:
    """Return the archs that every case has a build for."""
    catalog = installed()
    each = [
        {arch for target in catalog.kernel(case.kernel).targets for arch in catalog.record(target).archs}
        for case in cases
    ]
    return sorted(set.intersection(*each), key=str)


def _needed(cases: tuple[Case, ...]) -> str:
    return f"a GPU of {' or '.join(arch.sm for arch in _archs(cases))}"


def _jit_loader(cases: tuple[Case, ...], control: bool) -> Loader:
    """Compile what is missing, all at once, and return a loader."""
    arch = Arch(*torch.cuda.get_device_capability())
    if arch not in _archs(cases):
        raise BackendUnsupportedError(
            f"the race needs {_needed(cases)}, and torch runs on {torch.cuda.get_device_name()} ({arch})\n"
            "  fix: choose another GPU with CUDA_VISIBLE_DEVICES, or run it on a machine that has one"
        )
    names = dict.fromkeys((case.kernel, case.variant) for case in cases)
    catalog = without_barriers(installed(), *(kernel for kernel, _ in names)) if control else installed()
    jobs = []
    for kernel, variant in names:
        target = catalog.target_for(catalog.kernel(kernel), arch)
        assert target is not None
        jobs.append(kernels.job(catalog, kernel, variant, target))
    kernels.build_all(jobs, catalog)
    # The chain around the kernel keeps its barriers; only the kernel of a control lacks them.
    return lambda kernel, variant, _: (
        jit.load(kernel, variant, arch, catalog=installed() if kernel == CHAIN[0] else catalog).module
    )


def without_barriers(catalog: Catalog, *names: str) -> Catalog:
    """Return a catalog in which these kernels lack the GDC define; only for the negative control.

    A define switches off the guard in the source, and the kernel no longer claims to be safe under PDL.
    """
    gdc = set(catalog.common.gdc_defines.values())
    records = {
        target: dataclasses.replace(
            record, defines=tuple(d for d in record.defines if d.split("=")[0] not in gdc), gdc=False
        )
        for target, record in catalog.records.items()
    }
    changed = {}
    for name in names:
        known = catalog.kernel(name)
        variants = {
            key: dataclasses.replace(variant, defines=(*variant.defines, "FP4D_TEST_ALLOW_NO_GDC"))
            for key, variant in known.variants.items()
        }
        changed[name] = dataclasses.replace(known, pdl=False, variants=variants)
    return dataclasses.replace(catalog, records=records, kernels={**catalog.kernels, **changed})
