"""The saddle point of a composition, which is where to tilt, and the Rényi bound proved there.

For every s > 0 (Canonne, Kamath & Steinke 2020, arXiv 2004.00010v7, Proposition 12, at α = s + 1),

    δ(ε) ≤ e^{K(s) − sε}·sˢ/(s + 1)^{s+1},    K(s) = log E_P[e^{sL}]:

the least over s is a proved bound. It settles a direction that costs clearly less than the other.
The saddle point of e^{K(s) − sε}/(s(s + 1)), where K′(s) = ε + 1/s + 1/(s + 1), puts the tilted
loss near ε, with

    δ(ε) ≈ e^{K(s) − sε}/(s(s + 1)·√(2πK″(s))).

Outcomes of infinite loss are left out of K; their mass is added to δ.

The saddle point decides the accuracy of the engines, never their validity.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from accountant_service.numerics.floats import monotone_cubic, rounding
from accountant_service.numerics.floats.special_functions import Array
from accountant_service.numerics.laws.dominating_pair import (
    Composition,
    Direction,
    ReleaseLaw,
    distinct_directions,
    infinite_mass,
)
from accountant_service.numerics.time_limit import check_time

Cost = Callable[[Array, Array], Array]  # of tilts and their moments

# tilts are tried range by range, upwards or downwards while the least cost is at an end
TILT_MIN: Final = 1e-3
_TILT_RATIO: Final = 1.35
_RANGES: Final[list[Array]] = [
    low * _TILT_RATIO ** np.arange(points, dtype=float)
    for low, points in ((TILT_MIN, 10), (TILT_MIN * _TILT_RATIO**10, 25),
                        (TILT_MIN * _TILT_RATIO**35, 13), (TILT_MIN * _TILT_RATIO**48, 13))
]  # fmt: skip
_FIRST_RANGE: Final = 1  # from 0.02 to 27
_FINE_TILTS: Final = 32  # fine tilts for each coarse one
_WORK_MAX: Final = 1 << 23  # nodes times tilts, of all releases


@dataclass(frozen=True, slots=True)
class SaddlePoint:
    """The point through which to integrate for δ(ε), with log-moments of the losses around it.

    Attributes:
        direction: of add-or-remove.
        tilt: s.
        epsilon: about the ε whose saddle point it is.
        log_delta: about log δ(ε).
        bound: the Rényi bound: an upper bound on ε at the given δ, or on log δ at the given ε.
        tilts: increasing, around the saddle point.
        moments: upper bounds on K at each of them.
        infinite: the mass of infinite losses, which is added to δ.
    """

    direction: Direction
    tilt: float
    epsilon: float
    log_delta: float
    bound: float
    tilts: Array
    moments: Array
    infinite: float = 0.0


def find_at_delta(
    releases: Composition,
    direction: Direction,
    log_delta: float,
    other_lower_bound: float = -math.inf,
) -> SaddlePoint:
    """Find the point through which to integrate for ε at δ, and the Rényi upper bound on ε.

    Args:
        releases: with their counts.
        direction: of add-or-remove.
        log_delta: log δ < 0.
        other_lower_bound: a lower bound on the other direction. If the Rényi bound is at most
            this, the direction does not matter, and no saddle point is computed.

    Returns:
        The bound is infinite if outcomes of infinite loss alone exceed δ.
    """
    infinite = infinite_mass(releases, direction)
    left = math.exp(log_delta) - infinite
    if infinite > 0 and left <= 0:
        none = np.zeros(0)
        return SaddlePoint(direction, TILT_MIN, 0.0, log_delta, math.inf, none, none, infinite)
    log_delta = math.log(left) if infinite > 0 else log_delta

    def cost(tilts: Array, moments: Array) -> Array:
        """Return the Rényi upper bound on ε at each tilt."""
        ratio: Array = (moments + _log_constant(tilts) - log_delta) / tilts
        return ratio

    tilts, moments, best = _minimise_cost(releases, direction, cost, other_lower_bound)
    if best <= other_lower_bound:
        epsilon = max(best, 0.0)
        return SaddlePoint(direction, TILT_MIN, epsilon, log_delta, best, tilts, moments, infinite)
    curve = _SaddlePointCurve(tilts, moments)
    at = int(np.argmin(np.abs(curve.log_deltas - log_delta)))
    epsilon = min(max(float(curve.epsilons[at]), 0.0), max(best, 0.0))
    tilt = float(curve.tilts[at])
    return SaddlePoint(direction, tilt, epsilon, log_delta, best, tilts, moments, infinite)


def find_at_epsilon(
    releases: Composition,
    direction: Direction,
    epsilon: float,
    other_lower_bound: float = -math.inf,
) -> SaddlePoint:
    """Find the point through which to integrate for δ at this ε ≥ 0, and the Rényi bound.

    The arguments are those of `find_at_delta`; `other_lower_bound` is one of log δ(ε).
    """

    def cost(tilts: Array, moments: Array) -> Array:
        """Return the Rényi upper bound on log δ(ε) at each tilt."""
        log_delta: Array = moments + _log_constant(tilts) - tilts * epsilon
        return log_delta

    tilts, moments, best = _minimise_cost(releases, direction, cost, other_lower_bound)
    curve = _SaddlePointCurve(tilts, moments)
    seen = curve.estimate_log_deltas(epsilon)
    at = int(np.argmin(np.abs(curve.epsilons - epsilon)))
    about, tilt = min(float(seen[at]), best, 0.0), float(curve.tilts[at])
    infinite = infinite_mass(releases, direction)
    if infinite > 0:
        best = float(np.logaddexp(best, math.log(infinite)))
    return SaddlePoint(direction, tilt, epsilon, about, best, tilts, moments, infinite)


def count_by_renyi(releases: Composition, epsilon: float, log_delta: float) -> float:
    """Estimate how many repetitions of a composition stay within ε at δ, by the Rényi bound.

    Args:
        releases: the repeated composition: each release with its count.
        epsilon: ε > 0.
        log_delta: log δ < 0.
    """
    tilts = _RANGES[_FIRST_RANGE]
    margins = tilts * epsilon + log_delta - _log_constant(tilts)
    return min(
        float((margins / np.maximum(_range_moments(releases, each, _FIRST_RANGE), 1e-300)).max())
        for each in distinct_directions(releases)
    )


def renyi_bounds(saddle: SaddlePoint, shares: Array, log_delta: float) -> Array:
    """Return Rényi upper bounds on ε at δ, one per fraction (`shares`) of the repetitions."""
    log_delta = math.log(math.exp(log_delta) - saddle.infinite) if saddle.infinite else log_delta
    moments = np.multiply.outer(shares, saddle.moments) + _log_constant(saddle.tilts)
    least: Array = ((moments - log_delta) / saddle.tilts).min(axis=1)
    return rounding.up_each(np.maximum(least, 0.0))


def renyi_log_deltas(saddle: SaddlePoint, shares: Array, epsilons: Array) -> Array:
    """Return Rényi upper bounds on log δ: a row per share of the repetitions, a column per ε."""
    moments = np.multiply.outer(shares, saddle.moments) + _log_constant(saddle.tilts)
    least: Array = np.full((len(shares), len(epsilons)), math.inf)
    for tilt, moment in zip(saddle.tilts, moments.T, strict=True):
        least = np.minimum(least, moment[:, np.newaxis] - tilt * epsilons)
    if saddle.infinite > 0:
        least = np.logaddexp(least, math.log(saddle.infinite))
    return least + rounding.MARGIN * (1.0 + np.abs(least))


class _SaddlePointCurve:
    """Quick estimates of (ε, log δ) by the saddle-point method, at finely spaced tilts."""

    def __init__(self, tilts: Array, moments: Array) -> None:
        x = np.linspace(math.log(tilts[0]), math.log(tilts[-1]), _FINE_TILTS * len(tilts))
        log_moments = np.log(np.maximum(moments, 1e-300))
        value, slope, curvature = monotone_cubic.interpolate(np.log(tilts), log_moments, x)
        self.tilts, self.moments = np.exp(x), np.exp(value)
        first = self.moments / self.tilts * slope
        second = self.moments / self.tilts**2 * (slope * (slope - 1) + curvature)
        self._log_poles = np.log(self.tilts) + np.log1p(self.tilts)
        self.epsilons = first - 1 / self.tilts - 1 / (1 + self.tilts)
        self._log_poles += 0.5 * np.log(2 * math.pi * np.maximum(second, 1e-300))
        self.log_deltas = self.estimate_log_deltas(self.epsilons)

    def estimate_log_deltas(self, epsilons: Array | float) -> Array:
        """Estimate log δ at each ε quickly, by the saddle-point method."""
        seen: Array = self.moments - self.tilts * epsilons - self._log_poles
        return seen


def _log_constant(tilts: Array) -> Array:
    """Return the log of the factor sˢ/(s + 1)^{s+1} of the Rényi conversion, for each tilt s."""
    return -np.log1p(tilts) - tilts * np.log1p(1 / tilts)


def _range_moments(releases: Composition, direction: Direction, range_index: int) -> Array:
    """Return upper bounds on a composition's log-moments at the tilts `_RANGES[range_index]`."""
    total = np.zeros_like(_RANGES[range_index])
    for release, count in releases:
        total += count * _release_moments(release, direction, range_index)
    return total


@lru_cache(maxsize=128)
def _release_moments(release: ReleaseLaw, direction: Direction, range_index: int) -> Array:
    """Return upper bounds on one release's log-moment at each tilt of `_RANGES[range_index]`.

    They do not depend on the count, so a search for the steps asks for them often.
    """
    check_time()
    return release.log_moments(direction, _RANGES[range_index])


def _minimise_cost(
    releases: Composition, direction: Direction, cost: Cost, other_lower_bound: float
) -> tuple[Array, Array, float]:
    """Minimise `cost` over tilts; return tilts and log-moments near the minimum, and its value.

    Range after range of tilts is tried, until the least cost lies inside of one.
    """
    first = _FIRST_RANGE if is_affordable(releases, _RANGES[_FIRST_RANGE]) else 0
    moments_by_range = {first: _range_moments(releases, direction, first)}
    while True:
        order = sorted(moments_by_range)
        tilts = np.concatenate([_RANGES[i] for i in order])
        moments = np.concatenate([moments_by_range[i] for i in order])
        costs = cost(tilts, moments)
        best = int(np.argmin(costs))
        above, below = order[-1] + 1, order[0] - 1
        following = None
        if best >= len(tilts) - 2 and above < len(_RANGES):
            following = above
        elif best == 0 and below >= 0:
            following = below
        if (
            following is None
            or costs[best] <= other_lower_bound
            or not is_affordable(releases, _RANGES[following])
        ):
            break
        moments_by_range[following] = _range_moments(releases, direction, following)
    return tilts, moments, float(costs[best])


def is_affordable(releases: Composition, tilts: Array) -> bool:
    """Return whether computing moments at these tilts is within the work limit."""
    nodes = math.fsum(release.count_nodes(float(tilts[-1])) for release, _ in releases)
    return nodes * len(tilts) <= _WORK_MAX
