"""ε of a composition after each of many numbers of repetitions, at the cost of a few.

K of n repetitions is n times that of one repetition, so similar numbers n share a line and the
expensive part of the integrand: φ is evaluated once, and Φ = φⁿ is a table of numbers ×
frequencies. Every error bound is linear in n or taken where it is largest, and rounded outward as
for a single number (see `line_integral`). An interval that is too wide is computed again by itself.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from accountant_service.numerics import certified_interval
from accountant_service.numerics.engines import saddle_point
from accountant_service.numerics.engines.line_integral import (
    IntegrationSettings,
    integrate_composition,
)
from accountant_service.numerics.errors import SlowDecayError
from accountant_service.numerics.floats.bounds import (
    Bounds,
    check_bounds,
    relative_width,
    widen_bounds,
)
from accountant_service.numerics.floats.special_functions import Array
from accountant_service.numerics.laws.dominating_pair import (
    Composition,
    Direction,
    distinct_directions,
)

SECONDS_MAX: Final = 20.0  # of CPU time: a busy machine proves as much as a quiet one
_RATIO_MAX: Final = 4.0  # of the largest to the least number on a line
_TOGETHER_MAX: Final = 64  # numbers on a line: bounds the memory
_SETTINGS: Final = (
    IntegrationSettings(math.log(1e-8), 0.0, 1 << 18),
    IntegrationSettings(math.log(1e-5), 0.0, 1 << 21),
)


def epsilon_curve(
    releases: Composition, repetitions: Sequence[int], delta: float, tolerance: float
) -> list[Bounds]:
    """Return a proved interval around ε after each number of repetitions of a composition.

    Args:
        releases: the repeated composition: each release with its count, at least one.
        repetitions: increasing numbers ≥ 1. The last is computed as if it were the only one.
        delta: in (0, 1).
        tolerance: the width to reach, relative to max(ε, `bounds.EPSILON_NEGLIGIBLE`).

    Raises:
        TimeoutError: too many numbers need a computation of their own.
    """
    deadline = time.process_time() + SECONDS_MAX
    found = [
        bounds
        for group in _group_repetitions(repetitions[:-1])
        for bounds in _bounds_of_group(releases, group, delta)
    ]
    found.append(Bounds(0.0, math.inf))
    rounded = [widen_bounds(bounds, tolerance) for bounds in found]
    found = []
    for each, bounds in zip(repetitions, rounded, strict=True):
        if relative_width(bounds) > tolerance:
            if time.process_time() > deadline:
                raise TimeoutError
            bounds = certified_interval.epsilon_bounds(_repeat(releases, each), delta, tolerance)
        found.append(bounds)
    return _enforce_monotone(found)


def _enforce_monotone(bounds: list[Bounds]) -> list[Bounds]:
    """Tighten bounds on ε, which never decreases as the number of repetitions grows.

    Fewer repetitions never cost more (post-processing).
    """
    lower = np.maximum.accumulate([each.lower for each in bounds])
    upper = np.minimum.accumulate([each.upper for each in bounds][::-1])[::-1]
    return [check_bounds(float(low), float(high)) for low, high in zip(lower, upper, strict=True)]


def _group_repetitions(repetitions: Sequence[int]) -> list[Array]:
    """Split sorted repetition counts into ranges; one integral gives ε for each range."""
    groups: list[list[int]] = []
    for each in repetitions:
        if groups and each <= _RATIO_MAX * groups[-1][0] and len(groups[-1]) < _TOGETHER_MAX:
            groups[-1].append(each)
        else:
            groups.append([each])
    return [np.array(group, dtype=float) for group in groups]


def _repeat(releases: Composition, repetitions: int) -> Composition:
    """Return the composition with each count multiplied by `repetitions`."""
    return [(release, count * repetitions) for release, count in releases]


def _bounds_of_group(releases: Composition, repetitions: Array, delta: float) -> list[Bounds]:
    """Return bounds on ε after each number of repetitions, from one shared integral.

    The fewest repetitions decay the slowest. If they prevent any bound, the group is split.
    """
    if len(repetitions) == 1:
        return [Bounds(0.0, math.inf)]
    lower, upper = np.zeros_like(repetitions), np.zeros_like(repetitions)
    for direction in distinct_directions(
        releases
    ):  # removing first: it settles the other more often
        low, high = _bounds_of_direction(releases, repetitions, delta, direction, lower)
        lower, upper = np.maximum(lower, low), np.maximum(upper, high)
    if np.isinf(upper).all():
        halves = np.array_split(repetitions, 2)
        return [bounds for half in halves for bounds in _bounds_of_group(releases, half, delta)]
    return [Bounds(float(low), float(high)) for low, high in zip(lower, upper, strict=True)]


def _bounds_of_direction(
    releases: Composition,
    repetitions: Array,
    delta: float,
    direction: Direction,
    other_lower_bounds: Array,
) -> tuple[Array, Array]:
    """Return lower and upper bounds on ε per repetition count, for a removed or added record.

    `other_lower_bounds` are lower bounds on ε in the other direction.
    """
    log_delta, largest_count = math.log(delta), repetitions[-1]
    saddle = saddle_point.find_at_delta(
        _repeat(releases, int(largest_count)), direction, log_delta, float(other_lower_bounds[-1])
    )
    bound = saddle_point.renyi_bounds(saddle, repetitions / largest_count, log_delta)
    for settings in _SETTINGS if saddle.bound > other_lower_bounds[-1] else ():
        with contextlib.suppress(SlowDecayError):
            line = integrate_composition(releases, saddle, settings, repetitions)
            low, high = line.epsilons(delta, saddle.epsilon * np.sqrt(repetitions / largest_count))
            return low, np.minimum(high, bound)
    return np.zeros_like(repetitions), np.where(bound <= other_lower_bounds, bound, math.inf)
