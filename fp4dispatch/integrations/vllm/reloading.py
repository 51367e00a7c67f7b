"""Other weights for a running engine: refused before vLLM has changed any.

The tensors of the checkpoint are gone, and CUDA graphs have the addresses of those that run. vLLM starts a reload by
taking the tensors of all modules away, one module after the other. It asks none of them before, and loads the new ones
as they come: a layer that refuses its own is too late, as those before it are new already.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO, _place_kernel_tensors

from fp4dispatch.integrations.engines.refusals import other_weights


class Seal(nn.Module):
    """A module of a layer that runs. A reload cannot take its tensor: all others get theirs back, and go on.

    Parameters
    ----------
    layer
        Name of the layer.
    device
        Where the layer is.
    """

    def __init__(self, layer: str, device: torch.device) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("seal", torch.empty(0, device=device), persistent=False)

    def __delattr__(self, name: str) -> None:
        """Refuse the reload.

        Raises
        ------
        IntegrationError
            Always.
        """
        for module, info in list(LAYERWISE_INFO.items()):
            if info.can_load() and info.kernel_tensors is not None:
                _place_kernel_tensors(module, info)
                info.reset()
        raise other_weights(self.layer)


def seal(key: Tensor, layer: nn.Module, prefix: str) -> None:
    """Let a running layer refuse other weights, from a reload and from a model's ``load_weights``.

    Parameters
    ----------
    key
        What vLLM has in place of the weight.
    layer, prefix
        vLLM's layer, and its name.
    """

    def refuse(parameter: Tensor, *args: Any, **kwargs: Any) -> None:
        raise other_weights(prefix)

    vars(key)["weight_loader"] = refuse
    layer.add_module("fp4dispatch_seal", Seal(prefix, key.device))
