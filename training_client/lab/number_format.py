"""Format numbers for people: a few digits, rounded so that an upper bound stays one."""

from __future__ import annotations

from decimal import ROUND_CEILING, Context
from typing import Final

DIGITS: Final = 6
_FIXED_MIN: Final = 1e-4  # smaller numbers are written with an exponent


def format_upper_bound(value: float) -> str:
    """Format a number such as spent ε or required noise, rounded up to a few digits."""
    number = Context(prec=DIGITS, rounding=ROUND_CEILING).create_decimal(repr(float(value)))
    if number and not _FIXED_MIN <= abs(number) < 10**DIGITS:
        return f"{number:e}"
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_score(measure: str, score: float) -> str:
    """Format a test score: an accuracy in percent, anything else with four digits."""
    return f"{score:.2%}" if measure == "accuracy" else f"{score:.4g}"
