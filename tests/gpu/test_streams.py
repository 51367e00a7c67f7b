"""What all launches of a process share is safe on any stream, whatever other streams still have to do."""

from __future__ import annotations

import pytest
import torch

from fp4dispatch.backends.own import scratch
from fp4dispatch.backends.own.tensors import quantizers

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
CYCLES = 500_000_000  # about 0.3 s


def leave_work_behind(nbytes: int, value: int) -> int:
    """Queue a late write to memory on the current stream, free the memory, and return its address."""
    late = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
    torch.cuda._sleep(CYCLES)
    late.fill_(value)
    return late.data_ptr()


@pytest.fixture(autouse=True)
def nothing_waits() -> None:
    """Load the kernels of these tests: loading one waits for what is queued."""
    torch.empty(16, dtype=torch.uint8, device=DEVICE).fill_(0)
    torch.ones(16, device=DEVICE).clone()
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def test_an_arena_is_no_memory_that_the_default_stream_still_writes() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # free memory of this stream, as asking the driver for memory may wait
        torch.empty(scratch.ARENA_BYTES, dtype=torch.uint8, device=DEVICE)
    leave_work_behind(scratch.ARENA_BYTES, 1)
    with torch.cuda.stream(stream):
        arena = scratch._lasting(DEVICE).fill_(2)
    assert not torch.cuda.default_stream().query(), "the late write has ended: nothing was tried"
    torch.cuda.synchronize()
    assert torch.equal(arena, torch.full_like(arena, 2))


def test_ones_are_written_before_another_stream_reads_them() -> None:
    quantizers.ones.cache_clear()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        leave_work_behind(4 << 15, 7)
        ones = quantizers.ones(DEVICE)
    with torch.cuda.stream(second):
        seen = ones.clone()
    torch.cuda.synchronize()
    assert torch.equal(seen, torch.ones_like(seen))
