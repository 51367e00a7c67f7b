"""Producer -> kernel -> consumer, each launched with PDL: shows whether a kernel waits for the one before it.

A lone kernel cannot show the race that a missing ``griddepcontrol.wait`` causes. Here a producer releases its
dependents at once, spins, and only then writes everything that the kernel reads, except declared weights. The consumer
waits, copies what the kernel wrote, and overwrites what it read. Two things must hold: the outputs have the same bits
as in stream order, and the inputs hold what the consumer wrote. If the kernel could end before the producer, the
producer would write after the consumer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp4dispatch.backends.own.pdl_trial.launch_operands import ROLES, Entry, Sizes
from fp4dispatch.backends.own.tensors.operands import gpu_of, launch_numbers
from fp4dispatch.backends.own.tiling import launch_model
from fp4dispatch.problem.integers import round_up

_ALIGNMENT = 256
POISON, OVERWRITTEN = 0xFF, 0x00
"""Bytes of inputs and outputs before the launch (NaN in every format), and of inputs after the consumer."""


class LaunchChain:
    """One launch between its two neighbours, and its result in stream order.

    Parameters
    ----------
    module
        The kernel's loaded library.
    chain
        The loaded library of ``csrc/checks/race_chain.cu``.
    entry
        The function to launch and the roles of its arguments.
    sizes
        M, N and K.
    generator
        Decides the data; on the CUDA device of the launch.

    Raises
    ------
    RuntimeError
        If the kernel leaves an output unwritten in stream order: then nothing can be compared. Synchronises; not for
        use during capture.
    """

    def __init__(self, module: Any, chain: Any, entry: Entry, sizes: Sizes, generator: torch.Generator) -> None:
        self._function, self._chain, self.entry, self.sizes = getattr(module, entry.function), chain, entry, sizes
        device = generator.device
        roles = {name: ROLES[name] for name in entry.arguments if name in ROLES}
        written = [name for name, role in roles.items() if role.fill is None]
        late = [name for name, role in roles.items() if role.fill is not None and name not in entry.early]
        self._inputs, inputs = _arena(late, sizes, device)
        self._outputs, outputs = _arena(written, sizes, device)
        tensors = inputs | outputs
        for name in entry.early:
            role = roles[name]
            tensors[name] = torch.empty(role.shape(sizes), dtype=role.dtype or sizes.dtype, device=device)
        for name, role in roles.items():
            if role.fill is not None:
                role.fill(tensors[name], generator)
        views: dict[str, Any] = {name: roles[name].view(tensor, sizes) for name, tensor in tensors.items()}
        if "workspace" in entry.arguments:
            size = module.workspace_size(*sizes[:3])
            views["workspace"] = torch.empty(size, dtype=torch.uint8, device=device)
        if "shape" in entry.arguments and entry.tile is not None:
            shape = launch_model.best(entry.tile, *sizes[:3], launch_model.gpu_with(gpu_of(device)[1])).shape
            views["shape"] = launch_numbers(shape)
            views["room"] = torch.empty(launch_model.room_bytes(entry.tile, shape), dtype=torch.uint8, device=device)
        self._arguments = [views.get(name) for name in entry.arguments]
        self._source = self._inputs.clone()
        self._after = torch.full_like(self._inputs, OVERWRITTEN)
        self._copy = torch.empty_like(self._outputs)
        self._outputs.fill_(POISON)
        self._function(*self._arguments, False)
        self._expected = self._outputs.clone()
        unwritten = [name for name in written if bool((tensors[name].view(torch.uint8) == POISON).all())]
        if unwritten:
            raise RuntimeError(f"{entry.function} {tuple(sizes[:3])} left {', '.join(unwritten)} unwritten")

    def launch(self, delay: int) -> None:
        """Poison every buffer, then launch the chain on the current stream; the producer spins ``delay`` cycles."""
        for buffer in (self._inputs, self._outputs, self._copy):
            buffer.fill_(POISON)
        self._chain.produce(self._source, self._inputs, delay, False)
        self._function(*self._arguments, True)
        self._chain.consume(self._outputs, self._copy, self._after, self._inputs, True)

    def wrong(self) -> Tensor:
        """Return, as int64 [2] on the device, bytes of the output that differ, and of the inputs not overwritten."""
        return torch.stack([(self._copy != self._expected).sum(), (self._inputs != self._after).sum()])


def _arena(names: list[str], sizes: Sizes, device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
    """Return one buffer, uint8, and the tensors of these roles in it."""
    layout, end = {}, 0
    for name in names:
        shape, dtype = ROLES[name].shape(sizes), ROLES[name].dtype or sizes.dtype
        size = dtype.itemsize
        for dimension in shape:
            size *= dimension
        layout[name] = (end, size, shape, dtype)
        end += round_up(size, _ALIGNMENT)
    buffer = torch.zeros(end, dtype=torch.uint8, device=device)
    return buffer, {
        name: buffer[start : start + size].view(dtype).view(shape)
        for name, (start, size, shape, dtype) in layout.items()
    }
