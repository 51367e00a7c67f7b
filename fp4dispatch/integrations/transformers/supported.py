"""Which versions of Transformers were tested."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet

from fp4dispatch.errors import IntegrationError
from fp4dispatch.integrations.versions import why_untested
from fp4dispatch.machine import installing

SUPPORTED = SpecifierSet(">=5.23,<5.24")
"""Versions of Transformers that were tested. Its interface for quantizers changes between minor versions."""


def check_version() -> None:
    """Raise IntegrationError unless a tested version of Transformers is installed."""
    wrong = why_untested("transformers", supported=SUPPORTED)
    if wrong:
        raise IntegrationError(
            f"{wrong}: {installing.of_extras('transformers')}, or load with fp4dispatch.load_quantized, which needs no "
            "registration"
        )
