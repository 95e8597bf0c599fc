"""Cubic interpolation without overshoot (PCHIP), with two derivatives.

Fritsch & Butland 1984, as in SciPy: the slope at an inner point is a weighted harmonic mean of the
slopes on both sides, or 0 at an extremum. SciPy has the same, but importing it takes longer than
many answers (docs/decisions/0015-commands-and-reports.md).
"""

from __future__ import annotations

import numpy as np

from accountant_service.numerics.floats.special_functions import Array


def interpolate(x: Array, y: Array, at: Array) -> tuple[Array, Array, Array]:
    """Return a monotone cubic interpolant's values, and its first and second derivatives.

    Args:
        x: increasing, three or more.
        y: the value at each x.
        at: where to evaluate; outside of x the outermost cubics go on.
    """
    widths, secants = np.diff(x), np.diff(y) / np.diff(x)
    slopes = _slopes(widths, secants)
    left, right = slopes[:-1], slopes[1:]
    quadratic = (3 * secants - 2 * left - right) / widths
    cubic = (left + right - 2 * secants) / widths**2
    cell = np.clip(np.searchsorted(x, at, side="right") - 1, 0, len(widths) - 1)
    s, d, b, c = at - x[cell], left[cell], quadratic[cell], cubic[cell]
    return y[cell] + s * (d + s * (b + s * c)), d + s * (2 * b + 3 * s * c), 2 * b + 6 * s * c


def _slopes(widths: Array, secants: Array) -> Array:
    """Return the slope at each point, from the widths of the cells and their secants' slopes."""
    before, after = secants[:-1], secants[1:]
    weights = 2 * widths[1:] + widths[:-1], widths[1:] + 2 * widths[:-1]
    monotone = before * after > 0
    safe = np.where(monotone, before, 1.0), np.where(monotone, after, 1.0)
    inner = sum(weights) / (weights[0] / safe[0] + weights[1] / safe[1])
    first = _end_slope(widths[0], widths[1], secants[0], secants[1])
    last = _end_slope(widths[-1], widths[-2], secants[-1], secants[-2])
    return np.concatenate([[first], np.where(monotone, inner, 0.0), [last]])


def _end_slope(width: float, next_width: float, secant: float, next_secant: float) -> float:
    """Return the slope at an end: that of the parabola through three points, kept monotone."""
    slope = ((2 * width + next_width) * secant - width * next_secant) / (width + next_width)
    if slope * secant <= 0:
        return 0.0
    if secant * next_secant <= 0 and abs(slope) > 3 * abs(secant):
        return 3 * secant
    return slope
