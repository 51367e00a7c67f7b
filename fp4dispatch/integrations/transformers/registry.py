"""Register our configuration and quantizer with Transformers, for versions that were tested."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fp4dispatch.errors import CheckpointUnsupportedError, InputError, PluginError
from fp4dispatch.integrations.transformers.supported import check_version

METHODS = ("modelopt", "modelopt_fp4", "modelopt_mixed", "fp4dispatch")
"""``quant_method`` of configurations that Transformers has no quantizer for."""

OTHERS = ("compressed-tensors", "fp8")
"""``quant_method`` of configurations that Transformers has a quantizer for, and that ours can read too."""


_REPLACEABLE = "LOADING_ATTRIBUTES_CONFIG_TYPES"
"""Configurations of checkpoints of which a caller of ``from_pretrained`` may replace some values."""


def register(*, take_over: Sequence[str] = ()) -> None:
    """Register; see :func:`fp4dispatch.register`."""
    check_version()
    unknown = [take_over] if isinstance(take_over, str) else [name for name in take_over if name not in OTHERS]
    if unknown:
        raise InputError(f"take_over={take_over!r}; need a list of names from {', '.join(map(repr, OTHERS))}")
    from transformers.quantizers import auto

    from fp4dispatch.integrations.transformers.config import Fp4DispatchConfig
    from fp4dispatch.integrations.transformers.quantizer import Fp4DispatchHfQuantizer

    configs: dict[str, Any] = auto.AUTO_QUANTIZATION_CONFIG_MAPPING
    quantizers: dict[str, Any] = auto.AUTO_QUANTIZER_MAPPING
    for name in METHODS:
        for mapping, ours in ((configs, Fp4DispatchConfig), (quantizers, Fp4DispatchHfQuantizer)):
            if mapping.get(name, ours) is not ours:
                raise PluginError(
                    f"transformers' quant_method {name!r} is registered to {mapping[name]!r} already: remove the "
                    "package that does it, or load with fp4dispatch.load_quantized"
                )
    configs |= dict.fromkeys(METHODS, Fp4DispatchConfig)
    quantizers |= dict.fromkeys(METHODS, Fp4DispatchHfQuantizer)
    for name in take_over:
        if not isinstance(configs[name], _Either):
            configs[name] = _Either(configs[name])
            quantizers[name] = _EitherQuantizer(quantizers[name])
    replaceable: tuple[Any, ...] = auto.LOADING_ATTRIBUTES_CONFIG_TYPES
    if Fp4DispatchConfig not in replaceable:
        setattr(auto, _REPLACEABLE, (*replaceable, Fp4DispatchConfig))


class _Either:
    """In place of a configuration class of Transformers: ours where this package can read the configuration."""

    def __init__(self, theirs: Any) -> None:
        self.theirs = theirs

    def from_dict(self, block: dict[str, Any], **kwargs: Any) -> Any:
        """Return a configuration of ours or of Transformers."""
        from fp4dispatch.integrations.transformers.config import Fp4DispatchConfig

        config = Fp4DispatchConfig.from_dict(block)
        try:
            config.read_block()
        except CheckpointUnsupportedError:
            return self.theirs.from_dict(block, **kwargs)
        return config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.theirs, name)


class _EitherQuantizer:
    """In place of a quantizer class of Transformers."""

    def __init__(self, theirs: Any) -> None:
        self.theirs = theirs

    def __call__(self, config: Any, **kwargs: Any) -> Any:
        from fp4dispatch.integrations.transformers.config import Fp4DispatchConfig
        from fp4dispatch.integrations.transformers.quantizer import Fp4DispatchHfQuantizer

        return (Fp4DispatchHfQuantizer if isinstance(config, Fp4DispatchConfig) else self.theirs)(config, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.theirs, name)
