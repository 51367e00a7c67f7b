"""Benchmarks of linear layers and their peers: correctness first, then time.

``shapes`` lists the problems. ``methods`` (``ours``, ``peers``) are compared. ``operands`` and ``check`` define the
correct result. ``roofline`` measures the limits of the GPU, ``host`` the host time of a call. ``run`` combines them;
``report``, ``compare`` and ``plot`` present the results. :mod:`fp4dispatch.tune.timing` measures times. The command is
``fp4dispatch bench``.
"""
