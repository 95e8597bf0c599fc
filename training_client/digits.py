"""Numbers for people: a few digits, rounded to the side that keeps a bound a bound."""

from __future__ import annotations

from decimal import ROUND_CEILING, Context
from typing import Final

DIGITS: Final = 6
_PLAIN_FROM: Final = 1e-4  # smaller numbers are written with an exponent


def up(value: float) -> str:
    """An upper bound, what is spent, or noise that must not be less: not less than the value."""
    number = Context(prec=DIGITS, rounding=ROUND_CEILING).create_decimal(repr(float(value)))
    if number and not _PLAIN_FROM <= abs(number) < 10**DIGITS:
        return f"{number:e}"
    shown = f"{number:f}"
    return shown.rstrip("0").rstrip(".") if "." in shown else shown
