"""Compiles sources to a library: toolchain, build folder, number of parallel compilers."""
