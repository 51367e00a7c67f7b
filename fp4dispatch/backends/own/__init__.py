"""Backends on our own kernels (``csrc/``), and what they share."""
