"""Benchmarks of linear layers and their peers: correctness first, then time.

``problems`` holds the shapes and their operands, ``methods`` what is compared, ``reports`` what becomes of the results.
``check`` compares an output with the exact product. ``roofline`` measures the limits of the GPU, ``host`` the host time
of a call. ``run`` combines them; :mod:`fp4dispatch.tune.timing` measures times. ``background`` holds processes beside
a run. The command is ``fp4dispatch bench``.
"""
