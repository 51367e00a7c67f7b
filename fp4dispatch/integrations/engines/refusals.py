"""What no engine can do with this package, refused in the same words."""

from __future__ import annotations

from dataclasses import dataclass

from fp4dispatch.checkpoints.config.quant_config import QuantConfig
from fp4dispatch.errors import CheckpointUnsupportedError, IntegrationError

READABLE = ("modelopt-nvfp4", "nvfp4-pack-quantized", "fp8-tensor", "fp8-channel")
"""Schemes of :mod:`fp4dispatch.checkpoints.schemes` that layers of engines can have."""

METHODS = ("modelopt", "compressed-tensors")
"""Tools whose checkpoints engines can load with this package."""


@dataclass(frozen=True)
class Host:
    """The engine that runs the model, as errors name it.

    Parameters
    ----------
    name
        Its name.
    leave_out
        How to run the model without this package; the end of errors.
    """

    name: str
    leave_out: str


def check_readable(config: QuantConfig, host: Host) -> None:
    """Refuse formats that layers of engines have no parameters for.

    Raises
    ------
    CheckpointUnsupportedError
        The text names the format that was found, and those that are supported.
    """
    odd = [name for group in config.groups for name in group.schemes if name not in READABLE]
    if odd or config.method not in METHODS:
        raise CheckpointUnsupportedError(
            f"{config.source}: the format {odd[0] if odd else config.method} of {config.method} is not supported in "
            f"{host.name}: expected {', '.join(READABLE)}, of ModelOpt or compressed-tensors: {host.leave_out}"
        )


def other_weights(layer: str) -> IntegrationError:
    """Return the error for weights that are loaded into a layer that runs: the tensors of the checkpoint are gone."""
    return IntegrationError(f"{layer}: loading other weights into a running engine is not supported: start it again")
