"""CPU work of checks on one thread.

Their tensors are small. On several threads each operation ends with the last of them, and on a CPU with other work that
one waits for its turn: ten times as long on a machine that compiles kernels or runs another rank. On one thread an idle
machine takes as long as on several.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fp4dispatch.machine.locks import ForkSafeLock

_lock = ForkSafeLock()


@contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch compute on one CPU thread in the body.

    Other Python threads keep their number. But one whose first operation on the CPU falls into this time computes on
    one thread from then on: PyTorch cannot set this for a single thread. So a body must be short, and compile nothing.
    """
    with _lock:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)
