"""Numbers before trust: self-checks, verdicts, the launch race."""
