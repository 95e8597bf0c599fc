"""Numbers for people: a few digits, rounded to the side that keeps a bound a bound."""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Context
from typing import Final

DIGITS: Final = 6
_PLAIN_FROM: Final = 1e-4  # smaller numbers are written with an exponent


def up(value: float, digits: int = DIGITS) -> str:
    """An upper bound, or what is spent: not less than the value."""
    return _rounded(value, digits, ROUND_CEILING)


def down(value: float, digits: int = DIGITS) -> str:
    """A lower bound, or what is left: not more than the value."""
    return _rounded(value, digits, ROUND_FLOOR)


def nearest(value: float, digits: int = DIGITS) -> str:
    """What bounds nothing."""
    return _rounded(value, digits, ROUND_HALF_EVEN)


def _rounded(value: float, digits: int, direction: str) -> str:
    number = Context(prec=digits, rounding=direction).create_decimal(repr(float(value)))
    size = abs(number)
    if size and not _PLAIN_FROM <= size < 10**digits:
        shown, _, exponent = f"{number:e}".partition("e")
        return f"{_trimmed(shown)}e{int(exponent)}"
    return _trimmed(f"{number:f}")


def _trimmed(shown: str) -> str:
    return shown.rstrip("0").rstrip(".") if "." in shown else shown
