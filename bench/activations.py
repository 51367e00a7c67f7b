"""How long the kernels take that quantise activations, SwiGLU before them included: from memory, from L2, under PDL.

Each is compared with formats.py, bit for bit, on what it is timed on (all else that must hold: tests/gpu). Times: a
CUDA graph of calls on rotating copies of input and output (300 MB or a thousand of them, so that the bytes come from
memory), with and without PDL, kernels in turn, medians; "floor" is their bytes at the speed of a copy. "hot"
is one input and output, PDL: what a layer sees whose input was just written. "apart": torch's two operations of SwiGLU,
then the quantiser.

    python -m bench.activations --json activations.json [--old DIRECTORY]

--old: another csrc/ (kernels.toml and all), timed beside this one; its bits must be the same.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.shared import commandline
from bench.shared.graphs import COLD_BYTES, COPY_BYTES_PER_US, METHOD, capture, microseconds, watched
from fp4dispatch import formats, jit
from fp4dispatch.backends.activations import swiglu
from fp4dispatch.backends.own.swiglu import kernel_of
from fp4dispatch.benchmark import machine
from fp4dispatch.benchmark.reports import records
from fp4dispatch.jit.catalog.manifest import Catalog, installed
from fp4dispatch.problem.arch import Arch
from tests.w4_model import place

ROUNDS = 7
M = (8, 64, 128, 256, 512, 1024, 4096)
K = (4096, 8192, 14336, 28672)
Call = Callable[[Any, Tensor, Tensor, Tensor, bool], None]


def packed_like(m: int, k: int) -> Tensor:
    """Return an output of the packing kernels, full of 0xA5."""
    return torch.full((-(-k // 128), -(-m // 8), 1024), 0xA5, device="cuda", dtype=torch.uint8)


def pack(q: Tensor) -> Tensor:
    """Return what tests/w4_model.py packs from e4m3 [M, K], all tokens at once."""
    m, k = q.shape
    column, byte = (torch.tensor(part, device=q.device) for part in zip(*(place(i) for i in range(128)), strict=True))
    token, element = torch.arange(m, device=q.device)[:, None], torch.arange(k, device=q.device)[None]
    where = ((element // 128 * -(-m // 8) + token // 8) * 8 + token % 8) * 128
    where = where + (column[element % 128] ^ token % 8) * 16 + byte[element % 128]
    packed = torch.zeros(-(-k // 128), -(-m // 8), 1024, dtype=torch.uint8, device=q.device)
    packed.view(-1)[where] = q.contiguous().view(torch.uint8)
    return packed


class Kernel:
    """One entry: how to call it, what it writes (``packed`` or row by row), and the bits it must write.

    ``behind``: it starts from gate_up [M, 2K], and this entry must give the same bits behind torch's SwiGLU.
    """

    def __init__(
        self, library: str, entry: str, scaling: formats.FP8Scaling, packed: bool, behind: Kernel | None = None
    ) -> None:
        self.library, self.entry, self.scaling, self.packed, self.behind = library, entry, scaling, packed, behind

    @property
    def bytes_each(self) -> int:
        """Bytes that an element of the result costs: 16 bits read, or twice, and 8 written."""
        return 3 if self.behind is None else 5

    def outputs(self, m: int, k: int) -> tuple[Tensor, Tensor]:
        """Return (data, scales), to be written."""
        blocks = -(-k // 128)
        count = (m, blocks) if self.scaling == "1x128" else (m,)
        scale = torch.full(count, torch.nan, device="cuda")
        if self.packed:
            return packed_like(m, k), scale
        return torch.zeros(m, k, device="cuda", dtype=torch.uint8).view(torch.float8_e4m3fn), scale

    def call(self, modules: Any, x: Tensor, data: Tensor, scale: Tensor, pdl: bool) -> None:
        """Launch it."""
        getattr(modules[self.library], self.entry)(x, data, scale, pdl)

    def call_apart(self, modules: Any, x: Tensor, data: Tensor, scale: Tensor, pdl: bool) -> None:
        """Launch torch's operations and the quantiser."""
        assert self.behind is not None
        self.behind.call(modules, swiglu(x), data, scale, pdl)

    def fault(self, modules: Any, x: Tensor, what: str) -> str:
        """Return what is wrong with its bits, or nothing."""
        data, scale = self.outputs(x.shape[0], x.shape[1] if self.behind is None else x.shape[1] // 2)
        with watched(f"{self.entry} {what}"):
            self.call(modules, x, data, scale, False)
            torch.cuda.synchronize()
        expected, scale_expected = formats.fp8_quantize(x if self.behind is None else swiglu(x), self.scaling)
        if self.packed:
            expected = pack(expected)
        wrong = int((data.view(torch.uint8) != expected.view(torch.uint8)).sum())
        if wrong:
            return f"{self.entry} {what}: {wrong} bytes differ"
        if not torch.equal(scale, scale_expected):
            return f"{self.entry} {what}: scales differ"
        return ""


KERNELS = {
    "a8 pack": Kernel("w4_activations", "w4_quantize_row", "row", True),
    "fp8 row": Kernel("fp8_quantize", "fp8_quantize_row", "row", False),
    "fp8 1x128": Kernel("fp8_quantize", "fp8_quantize_1x128", "1x128", False),
}
GATED = {name: (by, by.entry.replace("quantize", "swiglu")) for name, by in KERNELS.items()}
KERNELS |= {
    f"SwiGLU, {name}": Kernel(kernel_of(entry), entry, by.scaling, by.packed, by) for name, (by, entry) in GATED.items()
}


def graphs(kernel: Kernel, modules: dict[str, Any], x: Tensor) -> dict[str, Any]:
    """Return the graphs of one kernel on an input, by name."""
    m, k = x.shape[0], x.shape[1] if kernel.behind is None else x.shape[1] // 2
    data, scale = kernel.outputs(m, k)
    size = x.numel() * 2 + data.numel()
    copies = min(1000, math.ceil(COLD_BYTES / size) + 1)
    xs = [x] + [x.clone() for _ in range(copies - 1)]
    outs = [(data, scale)] + [kernel.outputs(m, k) for _ in range(copies - 1)]
    made = {}
    for build, module in modules.items():
        subjects = {"cold": (kernel.call, True, copies), "no PDL": (kernel.call, False, copies)}
        subjects["hot"] = (kernel.call, True, 1)
        if kernel.behind is not None:
            subjects["apart"] = (kernel.call_apart, True, copies)
        for name, (launch, pdl, count) in subjects.items():
            calls = max(count, 16 if size > 50e6 else 64)

            def call(i: int, launch: Call = launch, module: Any = module, pdl: bool = pdl) -> None:
                launch(module, xs[i], *outs[i], pdl)

            made[f"{name}{build}"] = capture(call, count, calls)
    if len(modules) > 1:
        results = []
        for module in modules.values():
            data.view(torch.uint8).zero_()
            kernel.call(module, x, data, scale, False)
            results.append((data.view(torch.uint8).clone(), scale.clone()))
        if not all(torch.equal(a, b) for a, b in zip(*results, strict=True)):
            raise AssertionError(f"{kernel.entry} M={m} K={k}: the two builds differ")
    return made


def main(words: Sequence[str] | None = None) -> int:
    """Compare and time; the JSON file is written at the end."""
    parser = commandline.parser(__doc__)
    commandline.takes_record(parser, needed=True)
    parser.add_argument("--old", type=Path, help="another csrc/ to time beside this one")
    parser.add_argument("--seconds", type=float, default=60, help="start no new problem after this")
    arguments = commandline.parse(parser, words)
    begin = time.perf_counter()
    torch.manual_seed(0)
    arch = Arch(*torch.cuda.get_device_capability())
    libraries = sorted({kernel.library for kernel in KERNELS.values()})
    modules = {"": {name: jit.load(name, "any", arch).module for name in libraries}}
    if arguments.old:
        other = Catalog.load(arguments.old, installed().csrc.parent / "jit_flags")
        modules[" old"] = {name: jit.load(name, "any", arch, catalog=other).module for name in libraries}
    facts = machine.facts(machine.card("cuda"), arguments.commit)
    result: dict[str, Any] = {"method": METHOD, "problems": []}
    faults = []
    print(f"ready after {time.perf_counter() - begin:.1f} s", flush=True)
    for (name, kernel), k, m in itertools.product(KERNELS.items(), K, M):
        if time.perf_counter() - begin > arguments.seconds:
            print("out of time", flush=True)
            break
        x = torch.randn(m, k if kernel.behind is None else 2 * k, device="cuda").to(torch.bfloat16)
        if fault := kernel.fault(modules[""], x, f"M={m} K={k}"):
            faults.append(fault)
            print(f"WRONG {fault}", flush=True)
            continue
        times = microseconds(graphs(kernel, modules, x), ROUNDS)
        floor = m * k * kernel.bytes_each / COPY_BYTES_PER_US
        result["problems"].append({"kernel": name, "m": m, "k": k, "us": times, "floor_us": floor})
        texts = ", ".join(f"{what} {us:.1f}" for what, us in times.items())
        print(f"{name} M={m} K={k}: {texts}; floor {floor:.1f}", flush=True)
        torch.cuda.empty_cache() if m * k > 5e7 else None
    records.write(arguments.json, "activations", facts, result)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
