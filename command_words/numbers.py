"""Advice on how numbers are written."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

_THOUSANDS: Final = re.compile(r"\d{1,3}(?:,\d{3})+", re.ASCII)
_DECIMAL_COMMA: Final = re.compile(r"\d*,\d+(?:e-?\d+)?", re.ASCII)
_MULTIPLE: Final = re.compile(r"(\d+(?:\.\d+)?) ?([kKmM])", re.ASCII)
_MULTIPLES: Final = {"k": 1000, "m": 1_000_000}
_POWER: Final = re.compile(r"(?:(\d+(?:\.\d+)?)\s*[*x×])?\s*10(?:\^|\*\*)(-?\d+)", re.ASCII)
_ASSIGNED: Final = re.compile(r"[^\W\d]\w*\s*=\s*(\S+)")
_PERCENTAGE: Final = re.compile(r"(\d*\.?\d+) ?%", re.ASCII)


def advise_on_text(value: str) -> str | None:
    """Return how a number is written that a text probably stands for; None if it is unclear."""
    if found := _POWER.fullmatch(value):
        return f"write {found[1] or 1}e{found[2]}"
    if found := _ASSIGNED.fullmatch(value):
        return f"write {found[1]} alone"
    if _THOUSANDS.fullmatch(value):
        return f"write {value.replace(',', '')}, without commas"
    if _DECIMAL_COMMA.fullmatch(value):
        return f"write {value.replace(',', '.')}, with a decimal point"
    if found := _MULTIPLE.fullmatch(value):
        number = Fraction(found[1]) * _MULTIPLES[found[2].lower()]
        return f"write {number}" if number.denominator == 1 else None
    if found := _PERCENTAGE.fullmatch(value):
        return f"write {float(Fraction(found[1]) / 100):g}"
    return None


def advise_on_rate(value: float, counts: str) -> str | None:
    """Return what a sample rate above 1 was probably meant to be.

    Args:
        value: the sample rate.
        counts: the names of the two numbers of records that may be given instead.
    """
    if not value > 1:
        return None
    share = f"write {value / 100:.6g} for {value:g} %, or " if value <= 100 else ""
    return f"{share}give {counts} for a number of records"
