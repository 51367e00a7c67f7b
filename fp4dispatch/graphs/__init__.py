"""Breakable CUDA graphs: the inner stack of a model in CUDA graphs, with attention run eagerly between them."""

from fp4dispatch.graphs import huggingface as _huggingface

_huggingface.register()
