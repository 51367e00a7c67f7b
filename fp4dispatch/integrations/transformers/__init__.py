"""Hugging Face Transformers: ``from_pretrained`` and ``save_pretrained`` with NVFP4 and FP8 layers.

Importing this module registers, as :func:`fp4dispatch.register` does.
"""

from fp4dispatch.integrations.transformers.registry import register
from fp4dispatch.integrations.transformers.supported import SUPPORTED

register()

from fp4dispatch.integrations.transformers.config import Fp4DispatchConfig  # noqa: E402
from fp4dispatch.integrations.transformers.quantizer import Fp4DispatchHfQuantizer, adopt  # noqa: E402

__all__ = ["SUPPORTED", "Fp4DispatchConfig", "Fp4DispatchHfQuantizer", "adopt", "register"]
