"""How long w8a16_small takes for few tokens, beside bf16 cuBLAS, torch._scaled_mm, w8a8 and our CUTLASS GEMM.

As kernels_w4.py does it, whose method and options these are. Peers: torch._scaled_mm with one scale (tensor)
and with scales per token and column (row), row with our quantiser of activations, the CUTLASS GEMM of the backend
cutlass with that quantiser, and the kernel of the backend w8a8 for so many tokens, alone and with its quantiser, each
reading the same rotating copies of the weight.

    python -m bench.kernels_w8 --json w8.json [--sweep] [--m 1 8 16 32 64 128 256] [--commit HASH]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bench.shared.few_tokens import Kernel, Peer, Timed, run
from fp4dispatch import formats, jit
from fp4dispatch.backends.own.tensors.operands import gpu_of, launch_numbers
from fp4dispatch.backends.own.tiling import launch_model
from fp4dispatch.backends.own.tiling.tiles import speed_of
from fp4dispatch.jit import kernels
from fp4dispatch.jit.catalog.manifest import installed
from fp4dispatch.problem.arch import Arch

SM90 = Arch(9, 0)
QUANTISED = 5e-2
"""Error of a tile to allow where activations are rounded to e4m3; 2.6e-2 is usual."""


class Weight:
    """A random e4m3 weight, with scale 1."""

    def __init__(self, n: int, k: int) -> None:
        draw = torch.Generator("cuda").manual_seed(0)
        self.n, self.k = n, k
        self.packed = torch.empty(n, k, device="cuda", dtype=torch.float8_e4m3fn)
        step = max(1, (1 << 26) // k)
        for start in range(0, n, step):
            part = self.packed[start : start + step]
            part.copy_(torch.randn(part.shape, generator=draw, device="cuda") * 32)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [N, K]."""
        return self.packed.to(dtype)


def peers(timed: Timed, x: Tensor) -> dict[str, Peer]:
    """Return what else multiplies these weights."""
    m, n, copies = x.shape[0], timed.weight.n, len(timed.packed)
    quantize = jit.load("fp8_quantize", "any", SM90).module.fp8_quantize_row
    rows, row_scale = formats.fp8_quantize(x, "row")
    tensor, scale = formats.fp8_quantize(x, "tensor")
    one, columns = torch.ones((), device="cuda"), torch.ones(n, device="cuda")
    q, q_scale = torch.empty_like(rows), torch.empty(m, device="cuda")

    def scaled(a: Tensor, a_scale: Tensor, b_scale: Tensor, i: int, out: Tensor) -> None:
        torch._scaled_mm(a, timed.packed[i].t(), a_scale, b_scale, out_dtype=out.dtype, out=out)

    def with_quantiser(i: int, out: Tensor) -> None:
        quantize(x, q, q_scale, True)
        scaled(q, q_scale.view(-1, 1), columns.view(1, -1), i, out)

    found: dict[str, Peer] = {
        "scaled_mm tensor": (lambda i, out: scaled(tensor, scale, one, i, out), copies, QUANTISED),
        "scaled_mm row": (
            lambda i, out: scaled(rows, row_scale.view(-1, 1), columns.view(1, -1), i, out),
            copies,
            QUANTISED,
        ),
        "row + quant": (with_quantiser, copies, QUANTISED),
    }
    packer = jit.load("w4_activations", "any", SM90).module.w8_quantize_row
    if m <= 64:
        multiply = jit.load("w8a8_small", "bf16", SM90).module.w8a8_small
    else:
        many = ("w8_gemm_sm90", "bf16_128")
        gemm, sms = jit.load(*many, SM90).module.w8_gemm, gpu_of(x.device)[1]
        tile = speed_of(*many)
        assert tile is not None
        shape = launch_numbers(launch_model.best(tile, m, n, timed.weight.k, launch_model.gpu_with(sms)).shape)

        def multiply(*given: Any) -> None:
            gemm(*given[:-1], shape, given[-1])

    packed = torch.empty(-(-timed.weight.k // 128), -(-m // 8), 1024, device="cuda", dtype=torch.uint8)
    packed_scale = torch.empty_like(q_scale)
    packer(x, packed, packed_scale, False)

    def w8a8(i: int, out: Tensor) -> None:
        multiply(packed, packed_scale, timed.packed[i], columns, None, out, True)

    def w8a8_with_quantiser(i: int, out: Tensor) -> None:
        packer(x, packed, packed_scale, True)
        w8a8(i, out)

    found["w8a8"] = (w8a8, copies, QUANTISED)
    found["w8a8 + quant"] = (w8a8_with_quantiser, copies, QUANTISED)
    if m <= 64:
        tile = next(tile for tile in (16, 32, 64) if m <= tile)
        swapped = jit.load("fp8_gemm_sm90", f"row_bf16_swap_64x{tile}", SM90).module
        workspace = torch.empty(swapped.workspace_size(m, n, timed.weight.k), device="cuda", dtype=torch.uint8)

        def cutlass(i: int, out: Tensor) -> None:
            quantize(x, q, q_scale, True)
            swapped.fp8_gemm(q, timed.packed[i], q_scale, columns, None, out, workspace, True)

        found["cutlass + quant"] = (cutlass, copies, QUANTISED)
    return found


KERNEL = Kernel("w8a16_small", Weight)


def builds() -> None:
    """Compile everything at once; then each is only loaded."""
    catalog = installed()
    wanted = [("fp8_gemm_sm90", f"row_bf16_swap_64x{tile}") for tile in (16, 32, 64)] + [("fp8_quantize", "any")]
    wanted += [("w4_activations", "any"), ("w8a8_small", "bf16"), ("w8_gemm_sm90", "bf16_128"), (KERNEL.name, "bf16")]
    kernels.build_all([kernels.job(catalog, name, variant, "90a") for name, variant in wanted], catalog)


def main(words: Sequence[str] | None = None) -> int:
    """Run everything."""
    return run(__doc__, KERNEL, peers, words, before=builds)


if __name__ == "__main__":
    raise SystemExit(main())
