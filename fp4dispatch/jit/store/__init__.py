"""Finished kernels and records on disk: found by content, private to the user, published atomically, pruned by age."""
