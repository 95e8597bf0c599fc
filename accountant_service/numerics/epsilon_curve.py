"""ε of one composition after each of many numbers of repetitions, at the cost of a few.

K of n repetitions is n times that of one, so neighbouring numbers share a line, and on it the one
expensive part of the integrand: φ is evaluated once, Φ = φⁿ is a table of numbers × frequencies.
Everything that bounds an error is linear in n, or is taken where it is largest, and is as outward
as for a single number (see `contour`). What comes out too wide is asked for again, by itself.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from accountant_service.numerics import saddle_point, two_sided
from accountant_service.numerics.contour import Effort, contour
from accountant_service.numerics.privacy_loss import DIRECTIONS, Composition, Direction
from accountant_service.numerics.special import Array
from accountant_service.numerics.tilted_loss import UndampedError
from accountant_service.numerics.two_sided import Bounds

SECONDS_MAX: Final = 20.0
_RATIO_MAX: Final = 4.0  # of the numbers that share a line
_TOGETHER_MAX: Final = 64  # so many at a time: it bounds the memory
_EFFORTS: Final = (Effort(math.log(1e-8), 0.0, 1 << 18), Effort(math.log(1e-5), 0.0, 1 << 21))


def epsilon_curve(
    releases: Composition, times: Sequence[int], delta: float, tolerance: float
) -> list[Bounds]:
    """Proved intervals around ε of a composition after each number of repetitions.

    Args:
        releases: what is repeated: each release with its count, at least one.
        times: increasing numbers ≥ 1. The last is answered as if it were asked for alone.
        delta: in (0, 1).
        tolerance: the width to reach, relative to max(ε, `two_sided.EPSILON_NEGLIGIBLE`).

    Raises:
        TimeoutError: too many of them are hard, and have to be answered by themselves.
    """
    deadline = time.monotonic() + SECONDS_MAX
    found = [bounds for group in _groups(times[:-1]) for bounds in _shared(releases, group, delta)]
    found.append(Bounds(0.0, math.inf))
    outward = [two_sided.outward(bounds, tolerance) for bounds in found]
    found = []
    for each, bounds in zip(times, outward, strict=True):
        if two_sided.relative_width(bounds) > tolerance:
            if time.monotonic() > deadline:
                raise TimeoutError
            bounds = two_sided.epsilon_bounds(_repeated(releases, each), delta, tolerance)
        found.append(bounds)
    return _increasing(found)


def _increasing(bounds: list[Bounds]) -> list[Bounds]:
    """The same bounds or better ones: fewer repetitions never cost more (post-processing)."""
    lower = np.maximum.accumulate([each.lower for each in bounds])
    upper = np.minimum.accumulate([each.upper for each in bounds][::-1])[::-1]
    return [
        two_sided.consistent(float(low), float(high))
        for low, high in zip(lower, upper, strict=True)
    ]


def _groups(times: Sequence[int]) -> list[Array]:
    """Runs of numbers that are near each other."""
    groups: list[list[int]] = []
    for each in times:
        if groups and each <= _RATIO_MAX * groups[-1][0] and len(groups[-1]) < _TOGETHER_MAX:
            groups[-1].append(each)
        else:
            groups.append([each])
    return [np.array(group, dtype=float) for group in groups]


def _repeated(releases: Composition, times: int) -> Composition:
    return [(release, count * times) for release, count in releases]


def _shared(releases: Composition, times: Array, delta: float) -> list[Bounds]:
    """Bounds of ε for each of these numbers: the costlier direction's, as far as it is known.

    The fewest repetitions decay the slowest: where these spoil it for all, fewer share a line.
    """
    if len(times) == 1:
        return [Bounds(0.0, math.inf)]
    lower, upper = np.zeros_like(times), np.zeros_like(times)
    for direction in DIRECTIONS:  # removing first: it settles the other more often
        low, high = _one_way(releases, times, delta, direction, lower)
        lower, upper = np.maximum(lower, low), np.maximum(upper, high)
    if np.isinf(upper).all():
        halves = np.array_split(times, 2)
        return [bounds for half in halves for bounds in _shared(releases, half, delta)]
    return [Bounds(float(low), float(high)) for low, high in zip(lower, upper, strict=True)]


def _one_way(
    releases: Composition, times: Array, delta: float, direction: Direction, enough: Array
) -> tuple[Array, Array]:
    """Bounds in one direction; only Rényi's, where these are below `enough`."""
    log_delta, most = math.log(delta), times[-1]
    saddle = saddle_point.of_delta(
        _repeated(releases, int(most)), direction, log_delta, float(enough[-1])
    )
    bound = saddle_point.renyi_bounds(saddle, times / most, log_delta)
    for effort in _EFFORTS if saddle.bound > enough[-1] else ():
        with contextlib.suppress(UndampedError):
            line = contour(releases, saddle, effort, times)
            low, high = line.epsilons(delta, saddle.epsilon * np.sqrt(times / most))
            return low, np.minimum(high, bound)
    return np.zeros_like(times), np.where(bound <= enough, bound, math.inf)
