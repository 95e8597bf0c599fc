"""Proved intervals: their width, the check that they are not empty, and the final widening."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from accountant_service.numerics.errors import ContradictionError
from accountant_service.numerics.floats import rounding

EPSILON_NEGLIGIBLE: Final = 0.05  # a tolerance is relative to ε, or to this if ε is less
_MARGIN_SHARE: Final = 5e-4  # of the tolerance: the final widening of an interval


@dataclass(frozen=True, slots=True)
class Bounds:
    """A proved interval around a value: lower ≤ value ≤ upper (upper may be infinite)."""

    lower: float
    upper: float


def relative_width(bounds: Bounds) -> float:
    """Return the width of an interval around ε, divided by max(ε, `EPSILON_NEGLIGIBLE`)."""
    if math.isinf(bounds.upper):
        return math.inf
    return (bounds.upper - bounds.lower) / max(bounds.upper, EPSILON_NEGLIGIBLE)


def check_bounds(lower: float, upper: float) -> Bounds:
    """Return the interval [lower, upper], after checking that it is not empty.

    Raises:
        ContradictionError: no value satisfies both.
    """
    if not lower <= upper:
        raise ContradictionError(
            f"the proved lower bound {lower!r} is above the proved upper bound {upper!r}"
        )
    return Bounds(lower, upper)


def widen_bounds(bounds: Bounds, tolerance: float) -> Bounds:
    """Widen an interval by a safety margin for floating-point errors; apply it only once.

    Raises:
        ContradictionError: the lower one is above the upper one by more than rounding explains.
    """
    check_bounds(bounds.lower * (1 - rounding.MARGIN), bounds.upper * (1 + rounding.MARGIN))
    margin = max(rounding.MARGIN, _MARGIN_SHARE * tolerance)
    return Bounds(rounding.down(bounds.lower) * (1 - margin), bounds.upper * (1 + margin))
