"""Tensor parallel: which part of a layer a rank holds, and the layers that run with a part."""
