"""Static tensors that carry values across the breaks of a captured model.

A captured segment reads and writes fixed addresses. What enters the first segment, and what crosses a break, therefore
lies in buffers of this module. They are as large as the largest bucket needs, and all layers and buckets share them.
They are ordinary memory and not part of a graph's pool, and this object holds them: no later capture can take them
(https://github.com/sgl-project/sglang/issues/37606).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Bridges:
    """Buffers by role. A role is live from its write to its first read, so layers can share it.

    Parameters
    ----------
    device
        Where the model runs.
    rows
        Tokens of the largest bucket.
    """

    def __init__(self, device: torch.device, rows: int) -> None:
        self.device, self.rows = device, rows
        self._buffers: dict[tuple[str, torch.dtype, int], Tensor] = {}
        self._filled: dict[int, int] = {}

    def take(self, role: str, rows: int, row_shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the first ``rows`` rows of a role's buffer: [rows, *row_shape], contiguous, zeros at first."""
        width = math.prod(row_shape)
        key = (role, dtype, width)
        buffer = self._buffers.get(key)
        if buffer is None:
            with torch.inference_mode(mode=False):  # it must work outside of inference mode too
                buffer = self._buffers[key] = torch.zeros(self.rows, width, dtype=dtype, device=self.device)
        return buffer[:rows].view(rows, *row_shape)

    def fill(self, bridge: Tensor, values: Tensor) -> None:
        """Write ``values`` [n, ...] to the first n rows. The rows behind them are zeros afterwards.

        Zeros stay zeros in norms and linear layers. What an earlier, longer batch left there would enter a scale that a
        layer computes over all tokens.
        """
        rows = values.shape[0]
        bridge[:rows].copy_(values)
        self.rest(bridge, rows)

    def rest(self, bridge: Tensor, rows: int) -> None:
        """Set the rows behind the first ``rows`` to zero, as far as a bridge at this address was ever written."""
        address = bridge.data_ptr()
        filled = self._filled.get(address, 0)
        if filled > rows:
            bridge[rows : min(filled, bridge.shape[0])].zero_()
        # Rows behind this bucket keep what a larger bucket left: only that bucket reads them.
        self._filled[address] = rows if filled <= bridge.shape[0] else filled

    def nbytes(self) -> int:
        """Return the bytes of all buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())
