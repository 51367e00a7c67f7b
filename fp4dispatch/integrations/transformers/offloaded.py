"""Parts of a model that ``device_map`` puts on the CPU or on disk while others are on a GPU.

accelerate moves the tensors of each module to the GPU before a forward, by a hook. It does not know that a quantised
layer then needs new layouts, and it leaves buffers on the GPU. So quantised layers get a hook of their own.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module, remove_hook_from_module
from accelerate.utils import OffloadedWeightsLoader, PrefixedDataset, send_to_device
from torch import Tensor, nn

from fp4dispatch.models.offloading import offload
from fp4dispatch.models.quantized_linear import QuantizedLinear


class BringToDevice(ModelHook):  # type: ignore[misc,unused-ignore]
    """Brings an offloaded quantised layer to its device for each forward, and its input."""

    def __init__(self, device: torch.device, skip_keys: Any) -> None:
        self.device, self.skip_keys = device, skip_keys

    @torch.compiler.disable  # type: ignore[untyped-decorator,unused-ignore]
    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Bring the layer."""
        module.offload.bring(module)
        return send_to_device(args, self.device), send_to_device(kwargs, self.device, skip_keys=self.skip_keys)

    @torch.compiler.disable  # type: ignore[untyped-decorator,unused-ignore]
    def post_forward(self, module: Any, output: Any) -> Any:
        """Release the layer."""
        module.offload.release(module)
        return output

    def detach_hook(self, module: Any) -> Any:
        """Leave the layer on the CPU, as any other."""
        module.offload.release(module)
        module.offload = None
        return module


class Offloaded:
    """What accelerate has taken away from a layer: its parameters, by name.

    Parameters
    ----------
    layer
        With its parameters on the meta device.
    hook
        accelerate's hook of this layer.
    """

    def __init__(self, layer: nn.Module, hook: AlignDevicesHook) -> None:
        self._hook = hook
        names = [name for name, parameter in layer._parameters.items() if parameter is not None]
        self.device = torch.device(hook.execution_device)
        data = hook.weights_map
        self.tensors: dict[str, Tensor] = {name: data[name].detach().cpu() for name in names}
        self.folder: str | None = None
        if isinstance(data, PrefixedDataset) and isinstance(data.dataset, OffloadedWeightsLoader):
            loader = data.dataset
            for name in (data.prefix + name for name in names):
                if loader.state_dict.pop(name, None) is None:  # it was on disk
                    self.folder = loader.save_folder or tempfile.gettempdir()
                loader.index.pop(name, None)
                loader.all_keys = [key for key in loader.all_keys if key != name]

    def take_from(self, layer: nn.Module) -> None:
        """Remove accelerate's hook from a layer. Its parameters stay on the meta device."""
        self._hook.original_devices = {}
        remove_hook_from_module(layer)

    def bring_for_calls(self, layer: QuantizedLinear) -> None:
        """Let a layer with its tensors wait where they were, and come for each forward."""
        offload(layer, self.device, self.folder)
        add_hook_to_module(layer, BringToDevice(self.device, self._hook.skip_keys))
