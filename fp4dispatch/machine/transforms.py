"""What of torch follows each operation: transforms of ``torch.func``, forward gradients, dispatch modes (``make_fx``).

A launch that torch does not see would be missing in what they make. In some of them new tensors have no memory of
their own, and none are valid after the block. So host work leaves them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.autograd import forward_ad

_interpreter: Callable[[], object] = torch._C._functorch.peek_interpreter_stack
_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


def forward_gradients() -> bool:
    """Whether code computes gradients in forward mode (``torch.func.jvp``): tensors may have tangents."""
    return forward_ad._current_level >= 0


def active() -> bool:
    """Whether one of them is active. It is on the eager fast path."""
    return _interpreter() is not None or _dispatch_modes() > 0 or forward_ad._current_level >= 0


@contextmanager
def left() -> Iterator[None]:
    """Leave transforms and dispatch modes for a block, which makes tensors that outlive them."""
    if not active():
        yield
        return
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch.utils._python_dispatch import _disable_current_modes

    with temporarily_clear_interpreter_stack(), _disable_current_modes():
        yield
