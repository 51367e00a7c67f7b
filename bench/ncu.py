"""What Nsight Compute sees of the final kernels: memory, tensor pipe and issue, beside the bytes each has in flight.

    python bench/ncu.py --commit HASH --out bench/results/DATE-CARD-ncu.json

Each case runs in a process of its own under ncu, which profiles one launch: cold caches, clocks as they are. Needs ncu
and the right to read the GPU's counters. Exits with 1 if a case has no profile.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

FIELDS = {
    "us": "gpu__time_duration.sum",
    "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_bytes": "dram__bytes_read.sum",
    "l2_percent": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue_percent": "sm__instruction_throughput.avg.pct_of_peak_sustained_elapsed",
    "tensor_percent": "sm__inst_executed_pipe_tensor_subpipe_hmma_type_hfma2.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
    "ctas": "launch__grid_size",
    "shared_bytes": "launch__shared_mem_per_block_dynamic",
}
"""Ours -> ncu's. Where ncu names the tensor pipe otherwise, ``tensor_metrics`` has what it calls so."""
SCALE = {"second": 1e6, "ms": 1e3, "msecond": 1e3, "us": 1.0, "usecond": 1.0, "ns": 1e-3, "nsecond": 1e-3}
BYTES = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "byte/block": 1.0, "Kbyte/block": 1e3}


class Case(NamedTuple):
    """A kernel on one problem."""

    kernel: str
    build: str
    m: int
    n: int
    k: int


CASES = (
    Case("w4a16_small", "bf16", 1, 57344, 8192),
    Case("w4a8_small", "bf16", 32, 8192, 8192),
    Case("w4_gemm_sm90", "a8_bf16_64", 64, 57344, 8192),
    Case("w4_gemm_sm90", "a8_bf16_128", 512, 28672, 4096),
    Case("w4_gemm_sm90", "a16_bf16_256", 4096, 28672, 4096),
    Case("w8a16_small", "bf16", 1, 57344, 8192),
)


def launch(case: Case) -> None:
    """Run the kernel of a case once, after nothing that ncu would take for it."""
    import torch

    from fp4dispatch import jit
    from fp4dispatch.arch import Arch
    from fp4dispatch.backends.w4_layout import pack_w4p

    arch = Arch(*torch.cuda.get_device_capability())
    module = jit.load(case.kernel, case.build, arch).module
    x = torch.randn(case.m, case.k, device="cuda").bfloat16()
    alpha = torch.ones(1, device="cuda")
    out = torch.empty(case.m, case.n, device="cuda", dtype=torch.bfloat16)
    if case.kernel == "w8a16_small":
        w = torch.randn(case.n, case.k, device="cuda").clamp(-2, 2).to(torch.float8_e4m3fn)
        module.w8a16_small(x, w, alpha, None, out, False)
    else:
        codes = torch.randint(256, (case.n, case.k // 2), device="cuda", dtype=torch.uint8)
        scales = torch.randint(48, 72, (case.n, case.k // 16), device="cuda").to(torch.uint8)
        w = pack_w4p(codes, scales.view(torch.float8_e4m3fn))
        _launch_w4(case, module, jit.load("w4_activations", "any", arch).module, (x, w, alpha, out))
    torch.cuda.synchronize()


def _launch_w4(case: Case, module: Any, packer: Any, operands: tuple[Any, ...]) -> None:
    import torch

    x, w, alpha, out = operands
    if case.kernel == "w4a16_small":
        module.w4a16_small(x, w, alpha, None, out, False)
        return
    fp8 = "a16" not in case.build
    packed = torch.empty(-(-case.k // (128 if fp8 else 64)), -(-case.m // 8), 1024, device="cuda", dtype=torch.uint8)
    scale = torch.empty(case.m, device="cuda") if fp8 else None
    if fp8:
        packer.w4_quantize_row(x, packed, scale, False)
    else:
        packer.w4_pack(x, packed, False)
    gemm: Callable[..., None] = module.w4a8_small if case.kernel == "w4a8_small" else module.w4_gemm
    gemm(packed, scale, w, alpha, None, out, False)


def number(value: str, unit: str) -> float:
    """Return a value of ncu's in us, bytes or its own unit."""
    return float(value.replace(",", "")) * SCALE.get(unit, BYTES.get(unit, 1.0))


def parse(text: str) -> dict[str, Any]:
    """Return what FIELDS names from ``ncu --page raw --csv``: a row of names, one of units, one a kernel.

    Raises
    ------
    ValueError
        Where there is no profile, or no duration in it.
    """
    start = text.find('"ID"')
    rows = list(csv.reader(io.StringIO(text[start:]))) if start >= 0 else []
    if len(rows) < 3:
        raise ValueError(f"no profile in ncu's output: {text[-400:]}")
    values = {name: (value, unit) for name, unit, value in zip(rows[0], rows[1], rows[2], strict=False)}
    found: dict[str, Any] = {
        ours: number(*values[name]) for ours, name in FIELDS.items() if name in values and values[name][0]
    }
    if "us" not in found:
        raise ValueError(f"ncu reports no {FIELDS['us']}")
    found["kernel"] = values.get("Kernel Name", ("", ""))[0]
    found["tensor_metrics"] = {
        name: number(*pair)
        for name, pair in values.items()
        if "tensor" in name and "pct_of_peak" in name and pair[0].replace(".", "").replace(",", "").isdigit()
    }
    if "tensor_percent" not in found and found["tensor_metrics"]:
        found["tensor_percent"] = max(found["tensor_metrics"].values())
    return found


def profile(number_of: int, case: Case) -> dict[str, Any]:
    """Profile one case."""
    command = ["ncu", "--set", "full", "--clock-control", "none", "--page", "raw", "--csv", "-c", "1"]
    pattern = "few_tokens_kernel" if case.kernel.endswith("_small") else "w4_gemm_kernel"
    command += ["-k", f"regex:{pattern}", sys.executable, __file__, "--case", str(number_of)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    return case._asdict() | parse(done.stdout)


def main() -> int:
    """Profile every case and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case is not None:
        launch(CASES[arguments.case])
        return 0
    if arguments.out is None:
        parser.error("--out is needed")
    if shutil.which("ncu") is None:
        parser.error("ncu is not on the PATH; it comes with the CUDA toolkit")
    import torch

    rows, failed = [], 0
    for i, case in enumerate(CASES):
        try:
            rows.append(profile(i, case))
        except (ValueError, subprocess.TimeoutExpired) as error:
            failed += 1
            print(f"{case}: {error}", file=sys.stderr)
            continue
        row = rows[-1]
        percents = ", ".join(f"{name} {row[name]:.0f}" for name in row if name.endswith("_percent"))
        print(f"{case.kernel} {case.build} M={case.m} {case.n}x{case.k}: {row['us']:.1f} us, {percents}", flush=True)
    record = {
        "commit": arguments.commit,
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "profiles": rows,
    }
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
