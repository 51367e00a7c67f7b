"""Breakable CUDA graphs: capture the decoder layers of a model for some numbers of tokens, and replay them."""
