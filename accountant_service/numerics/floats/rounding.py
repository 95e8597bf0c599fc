"""Directed rounding: bounds moved outward past the floating-point error of their formulas.

Double precision leaves a relative error in every formula here. The tests measure it against
50-digit references (`tests/support/oracles.py`); it stays below 1e-11 on the whole supported range.
`MARGIN` is ten times that: a bound that has been moved outward by it is on the safe side of the
exact value of its formula.
"""

from __future__ import annotations

import math
import sys
from fractions import Fraction
from typing import Final

import numpy as np
from numpy.typing import NDArray

MARGIN: Final = 1e-10
SMALLEST: Final = 1e-307  # of the lower bounds: below it doubles lose digits


def up(value: float) -> float:
    """Round a computed upper bound ≥ 0 up, past the floating-point error of its computation."""
    return value * (1.0 + MARGIN)


def down(value: float) -> float:
    """Round a computed lower bound ≥ 0 down, past the floating-point error of its computation."""
    return value * (1.0 - MARGIN) if value >= SMALLEST else 0.0


def as_written(value: float) -> Fraction:
    """Return the number that a double stands for: the shortest decimal that is read as it."""
    return Fraction(repr(float(value)))


def fraction_up(value: Fraction) -> float:
    """Return the least double that is, as written, not below a rational number; else ∞."""
    try:
        nearest = float(value)
    except OverflowError:
        return math.inf
    return nearest if as_written(nearest) >= value else math.nextafter(nearest, math.inf)


def fraction_down(value: Fraction) -> float:
    """Return the greatest double that is, as written, not above a rational number ≥ 0."""
    try:
        nearest = float(value)
    except OverflowError:
        return sys.float_info.max
    return nearest if as_written(nearest) <= value else math.nextafter(nearest, 0.0)


def add_rounding_up(first: float, second: float) -> float:
    """Return the sum of two upper bounds, plus the floating-point error of both and of the sum."""
    return first + second + MARGIN * (abs(first) + abs(second))


def subtract_rounding_down(first: float, second: float) -> float:
    """Return the largest double that is at most the exact difference of two doubles."""
    difference = first - second
    exact = Fraction(first) - Fraction(second)
    return difference if Fraction(difference) <= exact else math.nextafter(difference, -math.inf)


def down_each(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Round computed lower bounds ≥ 0 down, past the floating-point errors of their computation."""
    return np.where(values >= SMALLEST, values * (1.0 - MARGIN), 0.0)


def up_each(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Round computed upper bounds ≥ 0 up, past the floating-point errors of their computation."""
    return values * (1.0 + MARGIN)
