"""What no engine can do with this package, refused in the same words."""

from __future__ import annotations

from dataclasses import dataclass

from fp4dispatch.checkpoints.config.quant_config import QuantConfig
from fp4dispatch.errors import CheckpointUnsupportedError, IntegrationError

READABLE = ("modelopt-nvfp4", "nvfp4-pack-quantized", "fp8-tensor", "fp8-channel")
"""Schemes of :mod:`fp4dispatch.checkpoints.schemes` that layers of every engine can have."""

BLOCKS = ("fp8-block", "fp8-block-ct")
"""Schemes with a scale for each 128x128 values."""

METHODS = {"modelopt": "ModelOpt", "compressed-tensors": "compressed-tensors"}
"""Tools whose checkpoints every engine can load with this package."""


@dataclass(frozen=True)
class Host:
    """The engine that runs the model, as errors name it.

    Parameters
    ----------
    name
        Its name.
    leave_out
        How to run the model without this package; the end of errors.
    blocks
        Whether its layers can have FP8 in blocks of 128x128 too, also as Hugging Face and DeepSeek store it.
    """

    name: str
    leave_out: str
    blocks: bool = False


def check_readable(config: QuantConfig, host: Host) -> None:
    """Refuse formats that layers of engines have no parameters for.

    Raises
    ------
    CheckpointUnsupportedError
        The text names the format that was found, and those that are supported.
    """
    readable = (*READABLE, *(BLOCKS if host.blocks else ()))
    methods = METHODS | ({"fp8": "Hugging Face (blocks only)"} if host.blocks else {})
    odd = [name for group in config.groups for name in group.schemes if name not in readable]
    if not odd and config.method == "fp8":
        odd = [name for group in config.groups for name in group.schemes if name not in BLOCKS]
    if odd or config.method not in methods:
        raise CheckpointUnsupportedError(
            f"{config.source}: the format {odd[0] if odd else config.method} of {config.method} is not supported in "
            f"{host.name}: expected {', '.join(readable)}, of {' or '.join(methods.values())}: {host.leave_out}"
        )


def other_weights(layer: str) -> IntegrationError:
    """Return the error for weights that are loaded into a layer that runs: the tensors of the checkpoint are gone."""
    return IntegrationError(f"{layer}: loading other weights into a running engine is not supported: start it again")
