"""Order a library's launch behind all work before it.

cuDNN 9.19 launches FP8 kernels on sm_90 with programmatic dependent launch, and some of them do not wait: behind a
kernel that releases its dependents early they read their operands before these are written. On an H200, 20 of 20
launches were wrong in every element (M=320 N=512 K=8192, tests/gpu/test_backend_cudnn.py). Our quantisers and others'
release their dependents early, so a fence must lie between.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Fence:
    """A tiny kernel without programmatic dependent launch.

    It starts when all kernels before it have ended and their writes are visible. A kernel behind it that does not wait
    cannot start before it has ended.
    """

    def __init__(self) -> None:
        self._held: dict[torch.device, Tensor] = {}

    def __call__(self, like: Tensor) -> None:
        """Launch on the current stream of the device of ``like``. Capture-safe after one eager call on the device."""
        held = self._held.get(like.device)
        if held is None:
            with torch.inference_mode(mode=False):  # it outlives the call
                held = self._held[like.device] = torch.zeros(1, dtype=torch.float32, device=like.device)
        held.neg_()
