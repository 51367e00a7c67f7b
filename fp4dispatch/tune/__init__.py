"""Timing candidates on this machine, and the agreement of ranks."""
