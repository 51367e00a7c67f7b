"""The ``quantization_config`` of a model: what to quantise while it loads, or what its checkpoint says."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from fp4dispatch.checkpoints.config.quant_config import QuantConfig, read_block
from fp4dispatch.checkpoints.config.readers import OWN_METHOD
from fp4dispatch.errors import InputError
from fp4dispatch.models.choose_layers import EXCLUDE
from fp4dispatch.problem import ACTIVATIONS, Activation, one_of

_FIELDS = ("format", "include", "exclude", "activation", "backend")
_SOURCE = "quantization_config of the model's configuration"


class Fp4DispatchConfig(QuantizationConfigMixin):  # type: ignore[misc,unused-ignore]
    """Quantise the linear layers of a 16- or 32-bit checkpoint while Transformers loads it.

    Pass it as ``from_pretrained(..., quantization_config=Fp4DispatchConfig())``. For a checkpoint that is quantised
    already only ``activation``, ``backend`` and ``fuse`` count, and replace what the checkpoint says.

    Parameters
    ----------
    format, include, exclude
        As ``config``, ``include`` and ``exclude`` of :func:`fp4dispatch.replace_linears`. ``Conv1D`` of GPT-2 counts as
        a linear layer.
    activation
        Pins the activation format of all layers. None: ``any``, or what the checkpoint says.
    backend
        Pins the backend of all layers. It is not saved.
    fuse
        As of :func:`fp4dispatch.replace_linears`: one layer for q, k and v, and one for gate and up, where that is
        exact. It is not saved: checkpoints hold the layers apart.

    Raises
    ------
    InputError
        An activation format that does not exist. Formats and patterns are checked when a model loads.
    """

    def __init__(
        self,
        format: str | Mapping[str, str | None] = "nvfp4",
        include: Sequence[str] | str = ("*",),
        exclude: Sequence[str] | str = EXCLUDE,
        *,
        activation: Activation | None = None,
        backend: str | None = None,
        fuse: bool = False,
    ) -> None:
        if activation is not None:
            one_of("activation", activation, ACTIVATIONS)
        self.quant_method: Any = OWN_METHOD
        self.format, self.include, self.exclude = format, include, exclude
        self.activation: Activation | None = activation
        self.backend = backend
        self.fuse = fuse
        self.block: dict[str, Any] | None = None
        """What a tool wrote into the configuration of a checkpoint; None where this package wrote it."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Return a configuration from plain data: ours, or that of a checkpoint, which is saved as it is.

        Raises
        ------
        InputError
            A key of ours that is not known.
        """
        method = config_dict.get("quant_method", OWN_METHOD)
        if method == OWN_METHOD:
            unknown = config_dict.keys() - {"quant_method", *_FIELDS}
            if unknown:
                raise InputError(f"{_SOURCE}: {sorted(unknown)[:4]} are not known; use {', '.join(_FIELDS)}")
            config = cls(**{key: value for key, value in config_dict.items() if key != "quant_method"})
        else:
            config = cls()
            config.block, config.quant_method = copy.deepcopy(config_dict), method
        return (config, kwargs) if return_unused_kwargs else config

    def read_block(self) -> QuantConfig:
        """Read what the checkpoint says.

        Raises
        ------
        CheckpointUnsupportedError, CheckpointError
            As :func:`fp4dispatch.load_quantized`.
        """
        return read_block(self.to_dict(), _SOURCE)

    def to_dict(self) -> dict[str, Any]:
        """Return what config.json of a saved model says."""
        if self.block is not None:
            return copy.deepcopy(self.block)
        patterns = {"include": self.include, "exclude": self.exclude}
        return {
            "quant_method": OWN_METHOD,
            "format": dict(self.format) if isinstance(self.format, Mapping) else self.format,
            **{key: [value] if isinstance(value, str) else list(value) for key, value in patterns.items()},
            "activation": self.activation or "any",
        }

    def get_loading_attributes(self) -> dict[str, Any]:
        """Return what a caller may say about a checkpoint that is quantised already."""
        asked = {"activation": self.activation, "backend": self.backend, "fuse": self.fuse or None}
        return {key: value for key, value in asked.items() if value is not None}
