"""How long w4a16_small takes for few tokens, beside bf16 cuBLAS: launch shapes, tokens, PDL on and off.

Each launch is compared tile by tile with the exact product before it is timed (all else that must hold: tests/gpu). A
measurement is a CUDA graph of launches on rotating copies of the weights (more than 256 MB, so they come from memory),
the launches chained by PDL; all methods in turn, medians.

    python -m bench.kernels_w4 --json w4.json [--sweep] [--commit HASH]
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.shared.few_tokens import Kernel, Nvfp4Weight, run

KERNEL = Kernel("w4a16_small", Nvfp4Weight)


def main(words: Sequence[str] | None = None) -> int:
    """Run everything."""
    return run(__doc__, KERNEL, lambda timed, x: {}, words)


if __name__ == "__main__":
    raise SystemExit(main())
