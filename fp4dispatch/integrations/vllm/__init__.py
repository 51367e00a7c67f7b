"""vLLM: linear layers of checkpoints run on this package, with ``quantization="fp4dispatch"``.

vLLM calls :func:`register` in each of its processes, by the entry point ``fp4dispatch`` in the group
``vllm.general_plugins``. Importing this module does not import vLLM.
"""

from fp4dispatch.integrations.vllm.registry import METHOD, SUPPORTED, register

__all__ = ["METHOD", "SUPPORTED", "register"]
