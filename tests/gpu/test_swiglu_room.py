"""SwiGLU before a GEMM on 16-bit activations leaves it room on each SM. Seen by time: nothing may run beside this."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

from fp4dispatch.backends.activations import swiglu
from tests.gpu import layers
from tests.gpu.backend_cases import captured
from tests.gpu.sm90 import needs_sm90

pytestmark = [pytest.mark.gpu, needs_sm90, pytest.mark.usefixtures("rules_alone")]


@torch.inference_mode()
def test_the_gemm_finds_room_beside_it() -> None:
    """A CTA of the GEMM on each SM, also on those that run SwiGLU; two on one SM would take twice as long.

    Torch's operations end before the GEMM starts, so that it finds room whatever they leave of shared memory.
    """
    options: Any = {"k": 14_336, "n": 4096, "activation": "bf16", "backend": "w4a16"}
    down = [layers.nvfp4_layer(**options) for _ in range(4)]  # more weights than L2 holds
    x = torch.randn(1, 2 * 14_336, device="cuda").bfloat16()

    def together() -> Tensor:
        return torch.cat([layer.swiglu(x.clone()) for layer in down])

    def apart() -> Tensor:
        return torch.cat([layer(swiglu(x.clone())) for layer in down])

    assert torch.equal(together(), apart())
    times: dict[Any, list[float]] = {together: [], apart: []}
    graphs = {call: captured(call)[0] for call in times}
    for _ in range(11):
        for call, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[call].append(begin.elapsed_time(end))
    fused, separate = (statistics.median(times[call]) for call in (together, apart))
    assert fused < separate, f"{fused * 250:.1f} us a layer, {separate * 250:.1f} with torch's operations"
