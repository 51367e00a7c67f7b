"""What another reader makes of files that are right."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fp4dispatch.checkpoints.schemes import Scheme
from fp4dispatch.formats.fp8 import FP8_BLOCK


def misread_by_transformers(layers: Iterable[tuple[str, Scheme, int, int]], instead: str) -> str | None:
    """Return a warning of layers that Transformers dequantises wrong; None if there are none.

    Its ``Fp8Dequantize`` takes the block size as size / number of blocks, which is 96 and not 128 for a size of 192.
    A size that it cannot divide so, it refuses. One block is always right.

    Parameters
    ----------
    layers
        Name, scheme, N and K of each layer that is written.
    instead
        How the caller stores something else.
    """
    found: dict[str, None] = {}  # layers that differ by their number only are one pattern
    for name, scheme, n, k in layers:
        if scheme.name == "fp8-block" and any(size > FP8_BLOCK and size % FP8_BLOCK for size in (n, k)):
            found[f"{re.sub(r'(?<=[.])[0-9]+(?=[.])', '*', name)} [{n}, {k}]"] = None
    if not found:
        return None
    return (
        f"Transformers reads {', '.join(found)} wrong, without an error, or refuses them, where it dequantises "
        f"(dequantize=True, or no GPU for FP8): it takes the block size as size / number of blocks, which is not "
        f"{FP8_BLOCK} for sizes above {FP8_BLOCK} that are no multiple of it. The files are right: read them with "
        f"fp4dispatch.load_quantized, or {instead}"
    )
