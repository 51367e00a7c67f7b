"""From sources to a library: the toolchain, the build folder, how many compilers may run."""
