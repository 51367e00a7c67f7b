"""SGLang: linear layers of checkpoints run on this package.

``--quantization fp4dispatch`` reads the checkpoint with this package. ``--fp4-gemm-backend fp4dispatch`` leaves reading
to SGLang, and multiplies the NVFP4 layers. SGLang calls :func:`register` in each of its processes, by the entry point
``fp4dispatch`` in the group ``sglang.srt.plugins``. Importing this module does not import SGLang.
"""

from fp4dispatch.integrations.sglang.registry import METHOD, SUPPORTED, register

__all__ = ["METHOD", "SUPPORTED", "register"]
