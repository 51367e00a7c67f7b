"""Whether a build may be launched with PDL on this machine: a trial, and the operands for it."""
