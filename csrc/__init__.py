"""CUDA sources of the kernels and their manifest; read by :mod:`fp4dispatch.jit.catalog.manifest`."""
