"""What can be compiled, as data: kernels, targets and flags, read strictly."""
