"""The producer -> GEMM -> consumer chain under PDL, which shows whether a GEMM waits for the previous kernel.

A lone GEMM cannot show the race that a missing ``griddepcontrol.wait`` makes. Here a producer releases its dependents
at once, spins, and only then writes the activations and their scales; our FP8 GEMM and a consumer follow with the PDL
attribute. Many requests of different shapes do so on several streams, with every buffer poisoned with NaN first. The
result of each must equal, bit for bit in every 128x128 tile, what the same kernel gives in stream order.

The negative control is the same kernel compiled without its barriers and launched with PDL all the same: a test that
does not catch it proves nothing.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fp4dispatch import jit
from fp4dispatch.arch import Arch
from fp4dispatch.errors import BackendUnsupportedError
from fp4dispatch.formats import FP8_BLOCK, round_up
from fp4dispatch.jit import kernels
from fp4dispatch.jit.manifest import Catalog, installed

TILE = 128
_GEMM = "fp8_gemm_sm90"
_E4M3_NAN = 0x7F
_DELAYS = (0, 20_000, 200_000)
"""Cycles the producer spins before it writes; 200,000 are about 0.1 ms."""

Loader = Callable[[str, str, bool], Any]
"""(kernel, variant, control) -> loaded module."""


@dataclass(frozen=True)
class Case:
    """Problems that one build serves: M is drawn from ``m``, and (N, K) from ``nk``."""

    variant: str
    scaling: str
    m: tuple[int, ...]
    nk: tuple[tuple[int, int], ...]


# Ragged M, N and K tails, one wave and many; every kernel structure (swapped or not, cluster or not, block scales).
CASES = (
    Case("row_bf16_swap_64x16", "row", (1, 2, 7, 16), ((4096, 4096), (2056, 1040), (6144, 4096))),
    Case("row_bf16_128x128", "row", (65, 128, 200, 1000), ((4096, 4096), (520, 2064), (1536, 1024))),
    Case("block_bf16_128x128", "block128", (65, 128, 200, 1000), ((4096, 4096), (520, 2064))),
)


@dataclass(frozen=True)
class CaseCount:
    """What one build of the chain did."""

    variant: str
    launches: int
    bad_launches: int
    tiles: int
    bad_tiles: int


@dataclass(frozen=True)
class RaceReport:
    """Outcome of :func:`run_race`. A tile is 128x128 of an output; a launch is one GEMM."""

    gpu: str
    control: bool
    rounds: int
    requests: int
    streams: int
    seed: int
    launches: int
    bad_launches: int
    tiles: int
    bad_tiles: int
    bad_rounds: int
    cases: tuple[CaseCount, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data for JSON."""
        return asdict(self)


class _Request:
    """Buffers of one chain, and its result in stream order."""

    def __init__(self, case: Case, gemm: Any, chain: Any, rng: random.Random, generator: torch.Generator) -> None:
        device = generator.device
        self.case, self.gemm, self.chain = case, gemm, chain
        m, (n, k) = rng.choice(case.m), rng.choice(case.nk)

        def fp8(rows: int) -> Tensor:
            return torch.randn(rows, k, device=device, dtype=torch.float32, generator=generator).to(torch.float8_e4m3fn)

        def scales(*shape: int) -> Tensor:
            return torch.rand(shape, device=device, dtype=torch.float32, generator=generator) + 0.5

        self.source, self.b = fp8(m), fp8(n)
        if case.scaling == "row":
            self.scale_source, self.b_scale = scales(m), scales(n)
        else:
            blocks = -(-k // FP8_BLOCK)
            self.scale_source, self.b_scale = scales(blocks, round_up(m, 4)), scales(-(-n // FP8_BLOCK), blocks)
        self.a, self.a_scale = torch.empty_like(self.source), torch.empty_like(self.scale_source)
        self.d = torch.empty(m, n, device=device, dtype=torch.bfloat16)
        self.out = torch.empty_like(self.d)
        self.workspace = torch.empty(gemm.workspace_size(m, n, k), device=device, dtype=torch.uint8)
        self._gemm(self.source, self.scale_source, enable_pdl=False)
        self.expected = self.d.clone()
        if not bool(self.expected.isfinite().all()):
            raise RuntimeError(f"{case.variant} [{m}, {n}, {k}] left NaN in its output in stream order")

    def _gemm(self, a: Tensor, a_scale: Tensor, *, enable_pdl: bool) -> None:
        if self.case.scaling == "block128":
            a_scale = a_scale.t()[: a.shape[0]]
        self.gemm.fp8_gemm(a, self.b, a_scale, self.b_scale, None, self.d, self.workspace, enable_pdl)

    def launch(self, delay: int) -> None:
        """Poison every buffer, then launch the chain on the current stream."""
        self.a.view(torch.uint8).fill_(_E4M3_NAN)
        for buffer in (self.a_scale, self.d, self.out):
            buffer.fill_(torch.nan)
        self.chain.produce(self.source, self.scale_source, self.a, self.a_scale, delay, False)
        self._gemm(self.a, self.a_scale, enable_pdl=True)
        self.chain.consume(self.d, self.out, True)

    @property
    def tiles(self) -> int:
        rows, columns = self.out.shape
        return -(-rows // TILE) * -(-columns // TILE)

    def bad_tiles(self) -> Tensor:
        """Return the number of tiles that differ in any bit, on the device."""
        wrong = (self.out.view(torch.int16) != self.expected.view(torch.int16)).to(torch.uint8)
        rows, columns = (round_up(size, TILE) for size in wrong.shape)
        padded = wrong.new_zeros(rows, columns)
        padded[: wrong.shape[0], : wrong.shape[1]] = wrong
        return padded.view(rows // TILE, TILE, columns // TILE, TILE).amax(dim=(1, 3)).sum(dtype=torch.int64)


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
    """Run the chain and count the tiles that differ from the stream-ordered result.

    Parameters
    ----------
    rounds, requests, streams
        ``requests`` chains are in flight at once, spread over ``streams`` CUDA streams; each round ends with a
        synchronisation.
    control
        Use the builds without barriers. Their results are expected to be wrong.
    seed
        Decides shapes, data and delays.
    load
        ``(kernel, variant, control) -> module``; by default the JIT of this package, which compiles what is missing.
    cases
        What to run; each request takes the next case in turn.

    Returns
    -------
    RaceReport
        ``bad_tiles == 0`` where the barriers work.

    Raises
    ------
    BackendUnsupportedError
        Where torch sees no GPU that the kernels of the race are built for.
    RuntimeError
        If a kernel is wrong even in stream order. Not for use during capture.
    """
    if not torch.cuda.is_available():
        raise BackendUnsupportedError(
            f"the race needs {_needed()}, and torch sees no CUDA GPU\n  fix: `fp4dispatch doctor` says why"
        )
    load = load or _jit_loader(cases, control)
    rng = random.Random(seed)
    generator = torch.Generator(device="cuda")
    generator.manual_seed(seed)
    chain = load("race_chain", "any", False)
    gemms = [load(_GEMM, case.variant, control) for case in cases]
    work = [_Request(cases[i % len(cases)], gemms[i % len(cases)], chain, rng, generator) for i in range(requests)]
    side_streams = [torch.cuda.Stream() for _ in range(streams)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    counts = []
    for _ in range(rounds):
        for i, request in enumerate(work):
            with torch.cuda.stream(side_streams[i % streams]):
                request.launch(rng.choice(_DELAYS))
        torch.cuda.synchronize()
        counts.append(torch.stack([request.bad_tiles() for request in work]).tolist())
    return _report(counts, work, control=control, streams=streams, seed=seed, cases=cases)


def _report(
    counts: list[list[int]], work: list[_Request], *, control: bool, streams: int, seed: int, cases: tuple[Case, ...]
) -> RaceReport:
    def count(case: Case) -> CaseCount:
        mine = [i for i, request in enumerate(work) if request.case is case]
        bad = [row[i] for row in counts for i in mine]
        tiles = sum(work[i].tiles for i in mine) * len(counts)
        return CaseCount(case.variant, len(bad), sum(b > 0 for b in bad), tiles, sum(bad))

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
        tiles=sum(case.tiles for case in by_case),
        bad_tiles=sum(case.bad_tiles for case in by_case),
        bad_rounds=sum(any(row) for row in counts),
        cases=by_case,
    )


def _needed() -> str:
    catalog = installed()
    targets = catalog.kernel(_GEMM).targets
    return f"a GPU of {' or '.join(dict.fromkeys(a.sm for target in targets for a in catalog.record(target).archs))}"


def _jit_loader(cases: tuple[Case, ...], control: bool) -> Loader:
    """Compile what is missing, all at once, and return a loader."""
    arch = Arch(*torch.cuda.get_device_capability())
    catalog = without_barriers(installed(), _GEMM) if control else installed()
    target = catalog.target_for(catalog.kernel(_GEMM), arch)
    if target is None:
        raise BackendUnsupportedError(
            f"the race needs {_needed()}, and torch runs on {torch.cuda.get_device_name()} ({arch})\n"
            "  fix: choose another GPU with CUDA_VISIBLE_DEVICES, or run it on a machine that has one"
        )
    kernels.build_all([kernels.job(catalog, _GEMM, case.variant, target) for case in cases], catalog)
    # Only the GEMM of a control lacks its barriers: the chain around it is the same in both.
    sources = {_GEMM: catalog}
    return lambda kernel, variant, _: jit.load(kernel, variant, arch, catalog=sources.get(kernel)).module


def without_barriers(catalog: Catalog, kernel: str) -> Catalog:
    """Return a catalog in which builds of one kernel lack the GDC define, for the negative control alone.

    The guard in the source is told to let it pass, and the kernel no longer claims to be safe under PDL.
    """
    gdc = set(catalog.common.gdc_defines.values())
    records = {
        target: dataclasses.replace(
            record, defines=tuple(d for d in record.defines if d.split("=")[0] not in gdc), gdc=False
        )
        for target, record in catalog.records.items()
    }
    known = catalog.kernel(kernel)
    variants = {
        name: dataclasses.replace(variant, defines=(*variant.defines, "FP4D_TEST_ALLOW_NO_GDC"))
        for name, variant in known.variants.items()
    }
    changed = dataclasses.replace(known, pdl=False, variants=variants)
    return dataclasses.replace(catalog, records=records, kernels={**catalog.kernels, kernel: changed})
