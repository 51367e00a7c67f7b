"""Register our quantisation method and our GEMM backend with SGLang, for versions that were tested."""

from __future__ import annotations

import logging

from packaging.specifiers import SpecifierSet

from fp4dispatch.checkpoints.config.readers import OWN_METHOD
from fp4dispatch.errors import IntegrationError
from fp4dispatch.integrations.versions import why_untested

SUPPORTED = SpecifierSet("==0.5.23")
"""Versions of SGLang that were tested. Its interface for quantisation changes between versions."""

METHOD = OWN_METHOD
"""Name of the method and of the backend: ``--quantization fp4dispatch``, ``--fp4-gemm-backend fp4dispatch``."""

_log = logging.getLogger("sglang.fp4dispatch")


def check_version() -> None:
    """Raise IntegrationError unless a tested version of SGLang is installed."""
    wrong = why_untested("sglang", supported=SUPPORTED)
    if wrong:
        raise IntegrationError(
            f"{wrong}: use an environment with that version of sglang, or another version of fp4dispatch"
        )


def register(*, strict: bool = False) -> None:
    """Register the method and the backend ``fp4dispatch``. A second call is harmless.

    It changes nothing for models that ask for neither. SGLang calls this function at each start, also for users who do
    not want it. So a version that was not tested is one WARNING, and nothing is registered. The backend works once
    SGLang applies the hooks of its plug-ins, directly after this call.

    Parameters
    ----------
    strict
        Raise instead of the WARNING.

    Raises
    ------
    IntegrationError
        With ``strict``: SGLang is missing, or has a version that was not tested.
    """
    try:
        check_version()
    except IntegrationError as error:
        if strict:
            raise
        _log.warning("%r is not available in SGLang: %s", METHOD, error)
        return
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers import linear, quantization

    from fp4dispatch.integrations.sglang import gemm_backend
    from fp4dispatch.integrations.sglang.config import Fp4DispatchConfig
    from fp4dispatch.integrations.sglang.linear_method import Fp4DispatchLinearMethod

    methods = quantization.QUANTIZATION_METHODS
    if next(iter(methods), None) != METHOD:  # SGLang asks the methods in turn, and ModelOpt's take what they know
        others = {name: config for name, config in methods.items() if name != METHOD}
        methods.clear()
        methods.update({METHOD: Fp4DispatchConfig, **others})
    quantization.CPU_QUANTIZATION_METHODS[METHOD] = Fp4DispatchConfig
    for offered, add in (
        (choices.QUANTIZATION_CHOICES, choices.add_quantization_method_choices),
        (choices.FP4_GEMM_RUNNER_BACKEND_CHOICES, choices.add_fp4_gemm_runner_backend_choices),
    ):
        if METHOD not in offered:
            add([METHOD])
    loaders = linear.WEIGHT_LOADER_V2_SUPPORTED
    if Fp4DispatchLinearMethod.__name__ not in loaders:
        loaders.append(Fp4DispatchLinearMethod.__name__)
    gemm_backend.register()
