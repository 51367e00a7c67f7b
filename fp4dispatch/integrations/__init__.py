"""Other libraries that run these layers. Each is imported by name, never by ``import fp4dispatch``."""

from __future__ import annotations

from collections.abc import Sequence


def register(*, take_over: Sequence[str] = ()) -> None:
    """Let ``from_pretrained`` of Transformers load, quantise and save models of NVFP4 and FP8 layers.

    Registers the ``quant_method`` ``modelopt`` (checkpoints of NVIDIA ModelOpt) and ``fp4dispatch`` (models quantised
    while they load, see :class:`fp4dispatch.integrations.transformers.Fp4DispatchConfig`). A second call is harmless.

    Parameters
    ----------
    take_over
        Methods that Transformers has a quantizer for and that are to use ours: ``compressed-tensors``, ``fp8``.
        Configurations that this package cannot read stay with Transformers.

    Raises
    ------
    IntegrationError
        Transformers is missing, or has a version that was not tested.
    PluginError
        Another package has registered one of the names.
    InputError
        Another name in ``take_over``.
    """
    from fp4dispatch.integrations.transformers.registry import register as register_transformers

    register_transformers(take_over=take_over)
