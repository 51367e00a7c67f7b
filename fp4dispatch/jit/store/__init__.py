"""Finished kernels and records on disk: looked up by content, private, published whole, removed by age."""
