"""Integer arithmetic of sizes: how many tiles cover them, and the padded size. No torch."""

from __future__ import annotations


def ceil_div(a: int, b: int) -> int:
    """Return ``a / b``, rounded up."""
    return -(-a // b)


def round_up(n: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``n``."""
    return -(-n // multiple) * multiple
