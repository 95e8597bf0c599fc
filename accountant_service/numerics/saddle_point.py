"""Where to tilt: the saddle point of a composition, and the Rényi bound that is proved there.

For every s > 0 (Canonne, Kamath & Steinke 2020, arXiv 2004.00010v7, Proposition 12, at α = s + 1),

    δ(ε) ≤ e^{K(s) − sε}·sˢ/(s + 1)^{s+1},    K(s) = log E_P[e^{sL}]:

the least over s is a proved bound, which settles a direction that costs clearly less than the
other. The saddle point of e^{K(s) − sε}/(s(s + 1)) itself, where K′(s) = ε + 1/s + 1/(s + 1), puts
the tilted loss where ε will be, with

    δ(ε) ≈ e^{K(s) − sε}/(s(s + 1)·√(2πK″(s))).

It decides the accuracy of what follows, never its validity.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from accountant_service.numerics import rounding
from accountant_service.numerics.privacy_loss import Composition, Direction, Release
from accountant_service.numerics.special import Array

Cost = Callable[[Array, Array], Array]  # of tilts and their moments

# tilts are tried range by range, upwards or downwards while the least cost is at an end
TILT_MIN: Final = 1e-3
_RATIO: Final = 1.35
_RANGES: Final[list[Array]] = [
    low * _RATIO ** np.arange(points, dtype=float)
    for low, points in ((TILT_MIN, 10), (TILT_MIN * _RATIO**10, 25),
                        (TILT_MIN * _RATIO**35, 13), (TILT_MIN * _RATIO**48, 13))
]  # fmt: skip
_FIRST: Final = 1  # from 0.02 to 27
_FINE: Final = 32  # fine tilts for each coarse one
_WORK_MAX: Final = 1 << 23  # nodes times tilts, of all releases


@dataclass(frozen=True, slots=True)
class SaddlePoint:
    """One direction's saddle point, and what is known around it.

    Attributes:
        direction: of add-or-remove.
        tilt: s.
        epsilon: the ε whose saddle point it is, about.
        log_delta: log δ there, about.
        bound: the Rényi bound: an upper bound of ε at the δ asked for, or of log δ at the ε.
        tilts: increasing, about the saddle point.
        moments: upper bounds of K at each of them.
    """

    direction: Direction
    tilt: float
    epsilon: float
    log_delta: float
    bound: float
    tilts: Array
    moments: Array


def of_delta(
    releases: Composition, direction: Direction, log_delta: float, enough: float = -math.inf
) -> SaddlePoint:
    """The saddle point of the ε at δ, with the Rényi bound of ε.

    Args:
        releases: with their counts.
        direction: of add-or-remove.
        log_delta: log δ < 0.
        enough: a bound that needs no improvement; if that is met, no saddle point is looked for.
    """

    def cost(tilts: Array, moments: Array) -> Array:
        ratio: Array = (moments + _log_constant(tilts) - log_delta) / tilts
        return ratio

    tilts, moments, best = _least(releases, direction, cost, enough)
    if best <= enough:
        return SaddlePoint(direction, TILT_MIN, max(best, 0.0), log_delta, best, tilts, moments)
    curve = _Curve(tilts, moments)
    at = int(np.argmin(np.abs(curve.log_deltas - log_delta)))
    epsilon = min(max(float(curve.epsilons[at]), 0.0), max(best, 0.0))
    return SaddlePoint(direction, float(curve.tilts[at]), epsilon, log_delta, best, tilts, moments)


def of_epsilon(
    releases: Composition, direction: Direction, epsilon: float, enough: float = -math.inf
) -> SaddlePoint:
    """The saddle point of ε ≥ 0, with the Rényi bound of log δ; see `of_delta`."""

    def cost(tilts: Array, moments: Array) -> Array:
        log_delta: Array = moments + _log_constant(tilts) - tilts * epsilon
        return log_delta

    tilts, moments, best = _least(releases, direction, cost, enough)
    curve = _Curve(tilts, moments)
    seen = curve.log_deltas_at(epsilon)
    at = int(np.argmin(np.abs(curve.epsilons - epsilon)))
    about = min(float(seen[at]), best, 0.0)
    return SaddlePoint(direction, float(curve.tilts[at]), epsilon, about, best, tilts, moments)


def renyi_bounds(saddle: SaddlePoint, shares: Array, log_delta: float) -> Array:
    """Upper bounds of ε at δ after some shares, of 1 at most, of the saddle point's repetitions."""
    moments = np.multiply.outer(shares, saddle.moments) + _log_constant(saddle.tilts)
    least: Array = ((moments - log_delta) / saddle.tilts).min(axis=1)
    return rounding.up_each(np.maximum(least, 0.0))


class _Curve:
    """ε, log δ and K along finely spaced tilts, from a monotone spline of log K over log s."""

    def __init__(self, tilts: Array, moments: Array) -> None:
        from scipy import interpolate  # 25 MB that a server without questions does without

        spline = interpolate.PchipInterpolator(np.log(tilts), np.log(np.maximum(moments, 1e-300)))
        x = np.linspace(math.log(tilts[0]), math.log(tilts[-1]), _FINE * len(tilts))
        self.tilts, self.moments = np.exp(x), np.exp(spline(x))
        slope = spline(x, 1)
        first = self.moments / self.tilts * slope
        second = self.moments / self.tilts**2 * (slope * (slope - 1) + spline(x, 2))
        self._log_poles = np.log(self.tilts) + np.log1p(self.tilts)
        self.epsilons = first - 1 / self.tilts - 1 / (1 + self.tilts)
        self._log_poles += 0.5 * np.log(2 * math.pi * np.maximum(second, 1e-300))
        self.log_deltas = self.log_deltas_at(self.epsilons)

    def log_deltas_at(self, epsilons: Array | float) -> Array:
        """About log δ(ε), seen from each tilt."""
        seen: Array = self.moments - self.tilts * epsilons - self._log_poles
        return seen


def _log_constant(tilts: Array) -> Array:
    """log(sˢ/(s + 1)^{s+1})."""
    return -np.log1p(tilts) - tilts * np.log1p(1 / tilts)


def _moments(releases: Composition, direction: Direction, which: int) -> Array:
    """Upper bounds of K(s) for each tilt s of a range."""
    total = np.zeros_like(_RANGES[which])
    for release, count in releases:
        total += count * _release_moments(release, direction, which)
    return total


@lru_cache(maxsize=128)
def _release_moments(release: Release, direction: Direction, which: int) -> Array:
    """Those of one release: the same whatever its count, so a solver asks for them often."""
    return release.log_moments(direction, _RANGES[which])


def _least(
    releases: Composition, direction: Direction, cost: Cost, enough: float
) -> tuple[Array, Array, float]:
    """Tilts, their moments, and the least cost, range after range until it is inside of one."""
    first = _FIRST if _affordable(releases, _RANGES[_FIRST]) else 0
    tried = {first: _moments(releases, direction, first)}
    while True:
        order = sorted(tried)
        tilts = np.concatenate([_RANGES[i] for i in order])
        moments = np.concatenate([tried[i] for i in order])
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
            or costs[best] <= enough
            or not _affordable(releases, _RANGES[following])
        ):
            break
        tried[following] = _moments(releases, direction, following)
    return tilts, moments, float(costs[best])


def _affordable(releases: Composition, tilts: Array) -> bool:
    """Whether the moments at these tilts take little enough work."""
    nodes = math.fsum(release.nodes_needed(float(tilts[-1])) for release, _ in releases)
    return nodes * len(tilts) <= _WORK_MAX
