"""Kernels compiled just in time or ahead of time, with grid barriers proved in the binary.

``build(kernel, variant, target)`` returns a finished kernel with its proof; ``load(kernel, variant, arch)`` returns one
that is ready to call; ``find(kernel, variant, target)`` never compiles and may return None. Nothing here needs torch.
"""

from __future__ import annotations

from fp4dispatch.jit.compiler.toolchain import toolchain_reasons
from fp4dispatch.jit.kernels import Built, LoadedKernel, build, build_together, find, load

__all__ = ["Built", "LoadedKernel", "build", "build_together", "find", "load", "toolchain_reasons"]
