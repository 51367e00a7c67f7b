"""Backends on our own kernels (``csrc/``), and what they share.

``compiled`` is their base, ``scratch`` their temporary memory. ``tiling`` chooses builds and launch shapes, ``tensors``
lays out operands, ``pdl_trial`` tries a build with PDL.
"""
