"""Layers whose weights are too many for the GPU: they lie on the CPU or on disk, and come to the GPU for each call.

Only the stored tensors wait there, not the layouts of backends. A call moves them to the GPU and prepares the layouts
from them. So its results are those of a layer that stays on the GPU, in every bit. Backends are chosen, and checked on
the layer, at its first call.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from fp4dispatch.errors import InputError
from fp4dispatch.machine import capture
from fp4dispatch.models.layer_state import LayerState
from fp4dispatch.problem.integers import round_up
from fp4dispatch.run.binding import Choices

_ALIGNMENT = 64


class Layer(Protocol):
    """What this module needs of a quantised layer."""

    name: str
    bias: nn.Parameter | None
    keep_stored: bool
    offload: Offload | None
    _buffers: dict[str, Tensor | None]
    _state: LayerState

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""

    def backend_text(self) -> str:
        """Return its backends, as text."""

    def _forget(self) -> None: ...

    def _bind_as(self, choices: Choices) -> None: ...


@dataclass
class Offload:
    """Where an offloaded layer runs, and what waits elsewhere. It belongs to one layer.

    Parameters
    ----------
    device
        Device of the calls.
    place
        Where the tensors wait, as messages name it.
    """

    device: torch.device
    place: str
    backend: str = ""
    """Backends of the last call."""
    _choices: Choices = field(default_factory=dict, repr=False)
    _waiting: dict[str, Tensor | None] | None = field(default=None, repr=False)
    _bias: Tensor | None = field(default=None, repr=False)

    def bring(self, layer: Layer) -> None:
        """Move the layer to the device of its calls, and bind it there. Host work; nothing if it is there already.

        Raises
        ------
        CaptureError
            During CUDA graph capture: a graph would hold addresses that are freed after the call.
        """
        label = f'layer "{layer.name}"' if layer.name else "a layer"
        capture.forbid_in_capture(
            f"moving {label}, which is offloaded to {self.place},", "load the layers to capture on GPUs, then capture"
        )
        if self._waiting is not None:
            return
        layer._forget()
        self._waiting = dict(layer._buffers)
        self._bias = None if layer.bias is None else layer.bias.data
        try:
            layer._buffers |= {name: None if t is None else t.to(self.device) for name, t in self._waiting.items()}
            if layer.bias is not None:
                layer.bias.data = layer.bias.data.to(self.device)
            layer._bind_as(self._choices)
        except BaseException:
            self.release(layer)
            raise
        self.backend = layer.backend_text()

    def release(self, layer: Layer) -> None:
        """Free what the call used on its device."""
        if self._waiting is None:
            return
        self._choices = {dtype: (bound.spec, bound.decisions) for dtype, bound in layer._state.bound.items()}
        layer._forget()
        layer._buffers = self._waiting
        if layer.bias is not None and self._bias is not None:
            layer.bias.data = self._bias
        self._waiting = self._bias = None


def offload(layer: Layer, device: torch.device, folder: Path | str | None = None) -> Offload:
    """Let the tensors of a layer wait on the CPU, or on disk. The caller brings and releases them for each call.

    Parameters
    ----------
    layer
        On the CPU.
    device
        Device of its calls.
    folder
        Where a file for the tensors is made; it has no name, and is gone when the tensors are. None: they stay in
        memory.

    Raises
    ------
    InputError
        The layer is not on the CPU.
    OSError
        The file cannot be written.
    """
    if layer.device.type != "cpu":
        raise InputError(f"an offloaded layer waits on the CPU, this one is on {layer.device}: call layer.cpu() first")
    layer.keep_stored = True  # what waits is stored tensors, so unpacking them from a layout would be lost work
    layer._forget()
    if folder is not None:
        held = {name: tensor for name, tensor in layer._buffers.items() if tensor is not None}
        layer._buffers |= dict(zip(held, on_disk(held.values(), folder), strict=True))
    layer.offload = Offload(device, "the CPU" if folder is None else "disk")
    return layer.offload


def on_disk(tensors: Iterable[Tensor], folder: Path | str) -> list[Tensor]:
    """Write tensors of the CPU to a file without a name, and return them mapped from it.

    The system reads pages when they are used and drops them when memory is short. A write to a tensor changes its
    memory only, never the file.
    """
    tensors = [tensor.detach().contiguous() for tensor in tensors]
    with tempfile.TemporaryFile(dir=folder) as file:
        starts = []
        for tensor in tensors:
            starts.append(file.seek(round_up(file.tell(), _ALIGNMENT)))
            tensor.reshape(-1).view(torch.uint8).numpy().tofile(file)
        file.flush()
        mapped = mmap.mmap(file.fileno(), max(file.tell(), 1), access=mmap.ACCESS_COPY)
    return [
        torch.frombuffer(mapped, dtype=tensor.dtype, count=tensor.numel(), offset=start).reshape(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=True)
    ]
