"""Format numbers for people: a few digits, with bounds rounded outward."""

from __future__ import annotations

import math
import re
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Context, Decimal
from fractions import Fraction
from typing import Final

DIGITS: Final = 6
TOO_MANY_DIGITS: Final = (  # the message about a number that is not `is_exact`
    "has more digits than double precision keeps; write at most 15, costs rounded up and noise down"
)
_LONG_EXPONENT: Final = re.compile(r"(?<=\d)e-0(?=\d)")
_DECIMAL_NOTATION_MIN: Final = 1e-4  # smaller numbers are written with an exponent


def round_up(value: float | Decimal, digits: int = DIGITS) -> str:
    """Format a number as text that is never less than its value, for upper bounds and costs."""
    return _format(value, digits, ROUND_CEILING)


def round_down(value: float | Decimal, digits: int = DIGITS) -> str:
    """Format a number as text that is never more than its value, for lower bounds."""
    return _format(value, digits, ROUND_FLOOR)


def round_nearest(value: float | Decimal, digits: int = DIGITS) -> str:
    """Format a number that is not a bound, rounded to the nearest."""
    return _format(value, digits, ROUND_HALF_EVEN)


def exactly(value: float) -> str:
    """Format a number as the shortest text that is read as the same number."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def shorten_exponents(text: str) -> str:
    """Return a text with 1e-05, as Python writes it, in the form 1e-5."""
    return _LONG_EXPONENT.sub("e-", text)


def group_digits(value: int) -> str:
    """Format a whole number with narrow non-breaking spaces between groups of three digits."""
    return f"{value:,}".replace(",", "\N{NARROW NO-BREAK SPACE}").replace("-", "\N{MINUS SIGN}")


def as_written(value: float) -> Decimal:
    """Return the shortest decimal number that is read as this float: 0.1, as it was written."""
    return Decimal(repr(float(value)))


def is_exact(text: str) -> bool:
    """Return whether a decimal number is one that double precision keeps.

    It is if a double's shortest decimal form, or its form with 16 or 17 digits, is this number.
    Any other number would be rounded, perhaps in the unsafe direction. NaN and infinities count as
    kept: other checks refuse them.

    Raises:
        ValueError: the text is not a number.
    """
    value = float(text)
    if not math.isfinite(value):
        return True
    exact = Decimal(text)
    return exact == as_written(value) or any(exact == Decimal(f"{value:.{n}g}") for n in (16, 17))


def round_fraction(exact: Fraction, *, up: bool) -> float:
    """Return the nearest double whose decimals are not below a fraction, or not above it."""
    value = float(exact)
    written = Fraction(as_written(value))
    if written < exact if up else written > exact:
        return math.nextafter(value, math.inf if up else -math.inf)
    return value


def _format(value: float | Decimal, digits: int, direction: str) -> str:
    """Format a number with `digits` significant digits; `direction` is a decimal rounding mode."""
    exact = value if isinstance(value, Decimal) else as_written(value)
    number = Context(prec=digits, rounding=direction).create_decimal(exact)
    size = abs(number)
    if size and not _DECIMAL_NOTATION_MIN <= size < 10**digits:
        shown, _, exponent = f"{number:e}".partition("e")
        return f"{_trim_zeros(shown)}e{int(exponent)}"
    return _trim_zeros(f"{number:f}")


def _trim_zeros(shown: str) -> str:
    """Remove trailing zeros after the decimal point."""
    return shown.rstrip("0").rstrip(".") if "." in shown else shown
