"""Bracketing searches that end on the side that was asked for.

Both work on a decreasing or increasing `excess` (≤ 0 means: fits) that need not be smooth: false
position with the Illinois correction while it helps, bisection otherwise. What they return has
been evaluated: the caller can rely on its sign, whatever the shape in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable


def _between(fit: tuple[float, float], unfit: tuple[float, float]) -> float:
    """Where the chord crosses zero, kept away from both ends; the middle if a value is infinite."""
    (x_fit, y_fit), (x_unfit, y_unfit) = fit, unfit
    share = 0.5
    if math.isfinite(y_fit) and math.isfinite(y_unfit) and y_unfit > y_fit:
        share = min(0.98, max(0.02, y_unfit / (y_unfit - y_fit)))
    return x_unfit + share * (x_fit - x_unfit)


def boundary(
    excess: Callable[[float], float], fit: float, unfit: float, relative_width: float
) -> float:
    """The fitting end of a bracket of relative width `relative_width` around the boundary.

    Args:
        excess: ≤ 0 where the parameter fits; evaluated on positive numbers only.
        fit: a parameter that fits.
        unfit: a parameter that does not, on either side of `fit`.
        relative_width: width of the bracket to end with, relative to its place.
    """
    good, bad = (math.log(fit), excess(fit)), (math.log(unfit), excess(unfit))
    last_fitted: bool | None = None
    while abs(good[0] - bad[0]) > relative_width:
        start = abs(good[0] - bad[0])
        for _ in range(3):
            x = _between(good, bad)
            y = excess(math.exp(x))
            if y <= 0:
                good, bad = (x, y), (bad[0], bad[1] / 2 if last_fitted is True else bad[1])
            else:
                good, bad = (good[0], good[1] / 2 if last_fitted is False else good[1]), (x, y)
            last_fitted = y <= 0
        if abs(good[0] - bad[0]) > start / 4:
            middle = 0.5 * (good[0] + bad[0])
            y = excess(math.exp(middle))
            good, bad = ((middle, y), bad) if y <= 0 else (good, (middle, y))
    return math.exp(good[0])


def _bracket_integer(
    excess: Callable[[int], float], limit: int, start: int
) -> tuple[tuple[int, float], tuple[int, float]] | None:
    """A pair that fits and one that does not, outward from `start`; None if `limit` fits."""
    good, bad, step = (0, -math.inf), (start, excess(start)), max(1, start // 8)
    while bad[1] <= 0:  # upwards, with growing steps
        if bad[0] == limit:
            return None
        good, n, step = bad, min(bad[0] + step, limit), 4 * step
        bad = (n, excess(n))
    while good[0] == 0 and bad[0] > 1:  # downwards
        n, step = max(bad[0] - step, 0), 4 * step
        if n == 0:
            break
        y = excess(n)
        good, bad = ((n, y), bad) if y <= 0 else (good, (n, y))
    return good, bad


def largest_integer(excess: Callable[[int], float], limit: int, start: int = 1) -> int | None:
    """The largest n ≤ `limit` that fits, for an increasing excess: n fits and n + 1 does not.

    Args:
        excess: ≤ 0 where n fits; 0 always fits and is never asked.
        limit: at least 1.
        start: a guess of the answer, from 1 to `limit`.

    Returns:
        The integer, or None if `limit` itself fits.
    """
    bracket = _bracket_integer(excess, limit, start)
    if bracket is None:
        return None
    good, bad = bracket
    last_fitted: bool | None = None
    while bad[0] - good[0] > 1:
        start = bad[0] - good[0]
        for _ in range(3):
            if bad[0] - good[0] <= 1:
                break
            x = min(max(round(_between(good, bad)), good[0] + 1), bad[0] - 1)
            y = excess(x)
            if y <= 0:
                good, bad = (x, y), (bad[0], bad[1] / 2 if last_fitted is True else bad[1])
            else:
                good, bad = (good[0], good[1] / 2 if last_fitted is False else good[1]), (x, y)
            last_fitted = y <= 0
        if bad[0] - good[0] > max(1, start // 4):
            x = (good[0] + bad[0]) // 2
            y = excess(x)
            good, bad = ((x, y), bad) if y <= 0 else (good, (x, y))
    return good[0]
