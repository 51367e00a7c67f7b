"""How NVFP4 weights enter a multiplication by FP8 activations (w4a8): the block scale is folded into an e4m3 value.

FP8 tensor cores multiply e4m3 by e4m3 and know no scale per 16 values, so ``e2m1 * block_scale``, which has up to six
significant bits, is rounded to the four of e4m3. This *defines* ``activation="fp8"`` for NVFP4 weights: every backend
must use these values. docs/measurements.md has the accuracy cost.
"""

from __future__ import annotations

import torch

from fp4dispatch import formats
from fp4dispatch.problem import SfLayout

FOLD = 8.0
"""Factor between a folded value and the weight. The largest folded value is 6 * 448 / 8 = 336: nothing saturates."""


def fold_e4m3(data: torch.Tensor, scale: torch.Tensor, *, sf_layout: SfLayout = "linear") -> torch.Tensor:
    """Return an NVFP4 weight as w4a8 multiplies it: ``e4m3(e2m1 * block_scale / 8)``, to nearest, ties to even.

    The weight is about ``8 * result * global_scale``. The rounding changes ``e2m1 * block_scale`` by at most 1/21 of
    itself, and where that is under 1/8 (e4m3 subnormals) by at most 2^-7.

    Parameters
    ----------
    data
        uint8 [N, K/2], two e2m1 codes a byte, even element in the low nibble.
    scale
        float8_e4m3fn block scales, [N, K/16] (``linear``) or [pad128(N), pad4(K/16)] (``128x4``).
    sf_layout
        Layout of ``scale``.

    Returns
    -------
    Tensor
        float8_e4m3fn [N, K], contiguous.

    Raises
    ------
    InputError
        For wrong dtypes or shapes. No sync; safe to capture and to compile.
    """
    eighth = torch.full((), 1 / FOLD, dtype=torch.float32, device=data.device)
    exact = formats.nvfp4_dequantize(data, scale, eighth, sf_layout=sf_layout)
    return exact.to(torch.float8_e4m3fn)
