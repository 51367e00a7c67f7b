"""Numbers on a command line that are refused where they mean nothing: NaN, infinite, negative."""

from __future__ import annotations

import argparse
import math
import sys


def seconds(text: str) -> float:
    """Return a number of seconds: 0 or more."""
    return _number(text, sys.float_info.max, "a number of seconds, such as 300")


def share(text: str) -> float:
    """Return a share of a time: from 0, below 10."""
    return _number(text, math.nextafter(10, 0), "a share: need at least 0 and less than 10, such as 0.05 for 5 %")


def _number(text: str, most: float, what: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return number
