"""Bracketing searches that return the feasible side of a boundary.

Both work on a decreasing or increasing `violation` that need not be smooth; a parameter is feasible
if its violation is ≤ 0. They use false position with the Illinois correction while it helps, and
bisection otherwise. The returned point has been evaluated: the caller can rely on its sign.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

Number = TypeVar("Number", int, float)


def _next_trial_point(feasible: tuple[float, float], infeasible: tuple[float, float]) -> float:
    """Return the next point to try between a feasible and an infeasible one: the secant rule.

    That is the middle of the bracket if a value is infinite, or 0 at the feasible end: a violation
    that is cut off at 0 is flat there, and the secant would hardly move that end.
    """
    (x_feasible, y_feasible), (x_infeasible, y_infeasible) = feasible, infeasible
    share = 0.5
    if -math.inf < y_feasible < 0 < y_infeasible < math.inf:
        share = min(0.98, max(0.02, y_infeasible / (y_infeasible - y_feasible)))
    return x_infeasible + share * (x_feasible - x_infeasible)


def _replace_end(
    inside: tuple[Number, float],
    outside: tuple[Number, float],
    point: tuple[Number, float],
    was_feasible: bool | None,
) -> tuple[tuple[Number, float], tuple[Number, float]]:
    """Replace one end of a root's bracket by a new point, by the Illinois rule.

    The value at the other end is halved if that is stale.

    An end is stale if the last point replaced the same end as this one (Illinois correction).
    `was_feasible` is whether the last point was feasible; None if there was none.
    """
    if point[1] <= 0:
        return point, (outside[0], outside[1] / 2 if was_feasible is True else outside[1])
    return (inside[0], inside[1] / 2 if was_feasible is False else inside[1]), point


def find_boundary(
    violation: Callable[[float], float], feasible: float, infeasible: float, relative_width: float
) -> float:
    """Find the last point with violation ≤ 0 between a feasible and an infeasible one.

    Args:
        violation: ≤ 0 where the parameter is feasible; evaluated on positive numbers only.
        feasible: a feasible parameter.
        infeasible: an infeasible parameter, on either side of `feasible`.
        relative_width: the width of the final bracket, relative to its position.
    """
    inside, outside = (
        (math.log(feasible), violation(feasible)),
        (math.log(infeasible), violation(infeasible)),
    )
    was_feasible: bool | None = None
    while abs(inside[0] - outside[0]) > relative_width:
        start = abs(inside[0] - outside[0])
        for _ in range(3):
            x = _next_trial_point(inside, outside)
            y = violation(math.exp(x))
            inside, outside = _replace_end(inside, outside, (x, y), was_feasible)
            was_feasible = y <= 0
        if abs(inside[0] - outside[0]) > start / 4:
            middle = 0.5 * (inside[0] + outside[0])
            y = violation(math.exp(middle))
            inside, outside = ((middle, y), outside) if y <= 0 else (inside, (middle, y))
    return math.exp(inside[0])


def _bracket_integer(
    violation: Callable[[int], float], limit: int, start: int
) -> tuple[tuple[int, float], tuple[int, float]] | None:
    """Return a feasible and an infeasible integer near `start`; None if `limit` is feasible."""
    inside, outside, step = (0, -math.inf), (start, violation(start)), max(1, start // 8)
    while outside[1] <= 0:  # upwards, with growing steps
        if outside[0] == limit:
            return None
        inside, n, step = outside, min(outside[0] + step, limit), 4 * step
        outside = (n, violation(n))
    while inside[0] == 0 and outside[0] > 1:  # downwards
        n, step = max(outside[0] - step, 0), 4 * step
        if n == 0:
            break
        y = violation(n)
        inside, outside = ((n, y), outside) if y <= 0 else (inside, (n, y))
    return inside, outside


def find_largest_integer(
    violation: Callable[[int], float], limit: int, start: int = 1
) -> int | None:
    """Return the largest integer with violation ≤ 0; None if that holds for `limit` itself.

    Args:
        violation: increasing, and ≤ 0 where n is feasible; 0 always is, and is never evaluated.
        limit: at least 1.
        start: a guess of the answer, from 1 to `limit`.

    Returns:
        The integer, or None if `limit` itself is feasible.
    """
    bracket = _bracket_integer(violation, limit, start)
    if bracket is None:
        return None
    inside, outside = bracket
    was_feasible: bool | None = None
    while outside[0] - inside[0] > 1:
        start = outside[0] - inside[0]
        for _ in range(3):
            if outside[0] - inside[0] <= 1:
                break
            x = min(max(round(_next_trial_point(inside, outside)), inside[0] + 1), outside[0] - 1)
            y = violation(x)
            inside, outside = _replace_end(inside, outside, (x, y), was_feasible)
            was_feasible = y <= 0
        if outside[0] - inside[0] > max(1, start // 4):
            x = (inside[0] + outside[0]) // 2
            y = violation(x)
            inside, outside = ((x, y), outside) if y <= 0 else (inside, (x, y))
    return inside[0]
