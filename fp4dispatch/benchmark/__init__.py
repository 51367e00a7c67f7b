"""Measure linear layers beside their peers: what is right first, then how fast it is.

``shapes`` says which problems, ``methods`` (``ours``, ``peers``) what is compared, ``operands`` and ``check`` what the
right answer is, ``roofline`` what the card can do at best, ``host`` what a call costs before anything runs; ``run``
puts them together and ``report``, ``compare`` and ``plot`` say what came out. :mod:`fp4dispatch.tune.timing` says how
time is taken. ``fp4dispatch bench`` is the command.
"""
