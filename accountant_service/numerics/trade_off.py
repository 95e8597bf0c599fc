"""The trade-off function of a membership attack, bounded from both sides.

For the pair (P, Q) of a record present and absent let f(α) be the least false-negative rate of any
test whose false-positive rate is at most α. Every event A has P(A) ≤ δ(ε) + e^ε·Q(A), and the same
with P and Q exchanged; so f is at least (and by convex duality equal to the largest of) the lines

    1 − δ(ε) − e^ε·α    and    e^{−ε}·(1 − δ′(ε) − α),    ε ≥ 0,

δ of the direction "removing" and δ′ of "adding". So upper bounds on δ at some ε give a lower bound
of f, and explicit attacks, with the chords between them (toss a coin which one to use), an upper
bound. Both are exact at the ε and thresholds used, and second-order close between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from scipy import special

from accountant_service.numerics.engines.line_integral import EvaluatedIntegral
from accountant_service.numerics.floats import rounding
from accountant_service.numerics.floats.bounds import check_bounds
from accountant_service.numerics.floats.special_functions import Array
from accountant_service.numerics.laws import gaussian
from accountant_service.numerics.laws.dominating_pair import (
    DIRECTIONS,
    Composition,
    Direction,
)
from accountant_service.numerics.privacy_profile import (
    PrivacyProfile,
    ProfileBounds,
    bounds_near,
    lower_hull,
)

_NARROW: Final = 1e-4  # relative width of δ at which no other tilt is tried
_WORK_MAX: Final = 12  # line integrals for each direction
_LINE_WORK_MAX: Final = 8  # the same, for a true-positive rate: lines are near each other
_NARROW_RATE: Final = 1e-2  # relative width of a rate at which one direction is enough
_LATTICE_WORK: Final = 4  # a lattice costs at least as much as this many line integrals
_POINTS: Final = 65  # values of ε on each of two grids for a true-positive rate
_FLATTEST: Final = 12.0  # the largest ε tried for large false-positive rates
_EPSILON_MAX: Final = 600.0  # e^ε is a double
_SLACK: Final = 1e-12  # for the rounding of lines and chords
_MU_WIDTH: Final = 1e-7  # relative width of the bracket around μ
_MU_MIN: Final = 1e-9
_PROBITS: Final = np.linspace(-8.0, 8.0, 16001)  # where the Gaussian trade-off is compared


@dataclass(frozen=True, slots=True)
class DirectionCurve:
    """Bounds on δ(ε) and attacks' error rates when a record is removed, or when one is added.

    An attack is a hypothesis test whether the record is in the data. Its false-positive rate is an
    upper bound, its true-positive rate a lower bound.
    """

    epsilons: Array
    lower: Array
    upper: Array
    false_positives: Array
    true_positives: Array

    def intersected(self, deltas: Mapping[float, float], advantage: float) -> DirectionCurve:
        """Return the curve, narrowed by bounds that are known from elsewhere.

        Args:
            deltas: by ε of the curve, upper bounds on δ in either direction.
            advantage: a lower bound on δ(0), which is the same in both.

        Raises:
            ContradictionError: they contradict the bounds of this curve.
        """
        lower, upper = self.lower.copy(), self.upper.copy()
        for epsilon, delta in deltas.items():
            at = int(np.searchsorted(self.epsilons, epsilon))
            upper[at] = min(upper[at], delta)
            check_bounds(rounding.down(float(lower[at])), rounding.up(float(upper[at])))
        lower[0] = max(lower[0], advantage)
        check_bounds(rounding.down(float(lower[0])), rounding.up(float(upper[0])))
        return replace(self, lower=np.minimum(lower, upper), upper=upper)


def direction_curve(releases: Composition, direction: Direction, epsilons: Array) -> DirectionCurve:
    """Compute bounds on δ(ε) at many ε, with as few integrals as possible.

    Args:
        releases: with their counts.
        direction: of add-or-remove.
        epsilons: increasing, at least 0.
    """
    lower, upper = np.zeros_like(epsilons), np.ones_like(epsilons)
    # the attacks that accuse no one, and everyone
    false_positives, true_positives = [np.array([0.0, 1.0])], [np.array([0.0, 1.0])]
    pending = np.ones(len(epsilons), dtype=bool)
    work = 0
    while work < _WORK_MAX:
        pending &= upper - lower > _NARROW * upper + _SLACK
        if not pending.any():
            break
        first = int(np.flatnonzero(pending)[0])
        pending[first] = False  # no other engine is better there
        found = bounds_near(releases, direction, float(epsilons[first]))
        work += 1 if isinstance(found, EvaluatedIntegral) else _LATTICE_WORK
        if found is None:
            continue
        lower, upper = _intersection(lower, upper, *found.delta(epsilons))
        found_false_positives, found_true_positives = found.attack_rates(epsilons)
        false_positives.append(found_false_positives)
        true_positives.append(found_true_positives)
    return DirectionCurve(
        epsilons, lower, upper, np.concatenate(false_positives), np.concatenate(true_positives)
    )


@dataclass(frozen=True, slots=True)
class TradeOff:
    """Bounds on attacks' trade-off function, and μ of the nearest Gaussian mechanism.

    Attributes:
        lower, upper: bounds on the least false-negative rate at each.
        mu: μ of the Gaussian mechanism whose trade-off is nearest.
        mu_error: an upper bound on |f − G_μ| at every false-positive rate.
    """

    lower: Array
    upper: Array
    mu: float
    mu_error: float


def trade_off(
    removing: DirectionCurve, adding: DirectionCurve, rates: Array, *, attained: bool = True
) -> TradeOff:
    """Bound attackers' least false-negative rate at each false-positive rate in `rates`.

    Args:
        removing: δ and attacks of the direction "removing".
        adding: δ and attacks of the direction "adding".
        rates: false-positive rates in [0, 1].
        attained: whether the pair is the mechanism's own. If it only dominates, an attack on it is
            not one on the mechanism, and the upper bound is that of tossing a coin.
    """

    def lower(at: Array) -> Array:
        """Return a lower bound on the trade-off function at each false-positive rate."""
        steep = (
            1 - removing.upper - np.multiply.outer(at, np.exp(np.minimum(removing.epsilons, 700)))
        )
        flat = np.exp(-adding.epsilons) * (1 - adding.upper - at[:, None])
        best: Array = np.maximum(steep.max(axis=1), flat.max(axis=1)) * (1 - _SLACK) - _SLACK
        return np.clip(best, 0.0, 1.0)

    hull = _attack_hull(removing, adding) if attained else np.array([[0.0, 1.0], [1.0, 0.0]])

    def upper(at: Array) -> Array:
        """Return an upper bound on the trade-off function at each false-positive rate."""
        found: Array = np.minimum(np.interp(at, hull[:, 0], hull[:, 1]) + _SLACK, 1.0)
        return found

    mu, error = _nearest_gaussian(lower, upper)
    low, high = lower(rates), upper(rates)
    for least, most in zip(low, high, strict=True):
        check_bounds(float(least), float(most) + _SLACK)
    return TradeOff(low, np.maximum(high, low), mu, error)


def _attack_hull(removing: DirectionCurve, adding: DirectionCurve) -> Array:
    """Return the lower convex hull of attacks' (false-positive, false-negative) rate points."""
    # the event of "adding" clears the record: its Q is a false negative, its P a true one
    points = np.concatenate(
        [
            np.stack([removing.false_positives, 1 - removing.true_positives], axis=1),
            np.stack([1 - adding.true_positives, adding.false_positives], axis=1),
        ]
    )
    return points[lower_hull(points[:, 0], points[:, 1])]


def true_positive_rate(releases: Composition, rate: float) -> tuple[float, float, float]:
    """Return the ε whose bound is best, and an upper and a lower bound on the true-positive rate.

    δ is bounded only near the ε at which a line may be the least. Where the best line of "removing"
    has an ε above 0 it is about the tangent of the trade-off curve, with a slope above 1, and the
    lines of "adding", whose slopes are below 1, are no better.

    Args:
        releases: with their counts.
        rate: the false-positive rate, in (0, 1).

    Returns:
        The ε of the best line, the upper bound that it gives, and a lower bound from the attacks.
    """
    steepest = min(-math.log(rate), _EPSILON_MAX)
    grid = np.union1d(*(np.linspace(0.0, most, _POINTS) for most in (steepest, _FLATTEST)))
    step = max(steepest, _FLATTEST) / (_POINTS - 1)
    epsilon, upper, lower = 0.0, 1.0, rate
    for direction in DIRECTIONS:
        search = _LineSearch(releases, direction, rate)
        first = search.best_line(grid)
        near = np.linspace(max(0.0, first - step), first + step, _POINTS)
        at = search.best_line(near)
        if search.upper < upper:
            epsilon, upper = at, search.upper
        lower = max(lower, search.true_positives(np.union1d(grid, near)))
        if first > 0.0 and upper - lower <= _NARROW_RATE * upper:
            break
    return epsilon, upper, min(lower, upper)


class _LineSearch:
    """A search for the ε whose line gives the least upper bound on a true-positive rate."""

    def __init__(self, releases: Composition, direction: Direction, rate: float) -> None:
        self._releases, self._direction, self._rate = releases, direction, rate
        self._found: list[ProfileBounds] = []
        self._work = 0
        self.upper, self._best = 1.0, 0.0

    def best_line(self, grid: Array) -> float:
        """Return the ε of the best line that is found; `upper` is its bound on the rate.

        δ is bounded near the best line, and then near any line that may be better by more than
        `_NARROW`.
        """
        tried = np.zeros(len(grid), dtype=bool)
        lower, upper = np.zeros_like(grid), self._renyi_bound(grid)
        for found in self._found:
            lower, upper = _intersection(lower, upper, *found.delta(grid))
        while True:
            least, most = self._lines(grid, lower), self._lines(grid, upper)
            at = int(np.argmin(most))
            if most[at] * (1 + _SLACK) + _SLACK < self.upper:
                self.upper, self._best = float(most[at]) * (1 + _SLACK) + _SLACK, float(grid[at])
            better = ~tried & (least < most[at] * (1 - _NARROW) - _SLACK)
            if not better.any() or self._work >= _LINE_WORK_MAX:
                return self._best
            at = int(np.argmin(np.where(better, most, math.inf)))
            tried[at] = True
            added = self._add_near(float(grid[at]))
            if added is not None:
                lower, upper = _intersection(lower, upper, *added.delta(grid))

    def true_positives(self, thresholds: Array) -> float:
        """Return a lower bound on the rate, from attacks with these thresholds."""
        false, true = [np.array([0.0, 1.0])], [np.array([0.0, 1.0])]
        for found in self._found:
            rates = found.attack_rates(thresholds)
            false.append(rates[0])
            true.append(rates[1])
        one, other = np.concatenate(false), 1 - np.concatenate(true)
        if self._direction == "adding":  # an event of "adding" clears the record
            one, other = other, one
        hull = lower_hull(one, other)
        return max(0.0, 1 - float(np.interp(self._rate, one[hull], other[hull])) - _SLACK)

    def _lines(self, epsilons: Array, delta: Array) -> Array:
        """Return the bound on the true-positive rate that each ε gives with its δ."""
        if self._direction == "removing":
            steep: Array = delta + np.exp(epsilons) * self._rate
            return steep
        flat: Array = 1 - np.exp(-epsilons) * (1 - delta - self._rate)
        return flat

    def _renyi_bound(self, grid: Array) -> Array:
        """Return upper bounds on δ at each ε that cost little."""
        profile = PrivacyProfile(self._releases, self._direction)
        bound: Array = np.minimum(profile.renyi_bound(grid)[0], 1.0)
        return bound

    def _add_near(self, epsilon: float) -> ProfileBounds | None:
        """Bound δ near one ε, and keep the bounds."""
        found = bounds_near(self._releases, self._direction, epsilon)
        self._work += 1 if isinstance(found, EvaluatedIntegral) else _LATTICE_WORK
        if found is not None:
            self._found.append(found)
        return found


def _intersection(lower: Array, upper: Array, low: Array, high: Array) -> tuple[Array, Array]:
    """Return the intersection of proved intervals.

    Raises:
        ContradictionError: one of them is empty.
    """
    lower, upper = np.maximum(lower, low), np.minimum(upper, high)
    for least, most in zip(lower, upper, strict=True):
        check_bounds(rounding.down(float(least)), rounding.up(float(most)))
    return lower, upper


def least_mu(curves: Sequence[DirectionCurve], slack: float, largest: float) -> tuple[float, float]:
    """Return bounds on the least μ for which μ-Gaussian DP holds up to an error `slack` of δ.

    δ and δ_μ are convex functions of x = e^ε, and δ is decreasing. Between two points of the grid δ
    is below the chord of its upper bounds, and δ_μ above its tangents; after the last point δ must
    be within the slack. At the points themselves lower bounds on δ give a lower bound on μ.

    Args:
        curves: δ of each direction on a grid that begins at 0.
        slack: above 0.
        largest: a μ that is large enough.

    Returns:
        A lower and an upper bound; the upper one is infinite if none up to `largest` is proved.
    """

    def is_proved(mu: float) -> bool:
        """Return whether δ(ε) is proved to be at most that of μ-Gaussian DP plus slack."""
        return all(_is_below_gaussian(curve, mu, slack) for curve in curves)

    def is_possible(mu: float) -> bool:
        """Return whether δ(ε) may be at most that of μ-Gaussian DP plus slack, on the grid."""
        return all(
            bool((curve.lower <= np.exp(gaussian.log_delta(curve.epsilons, mu)) + slack).all())
            for curve in curves
        )

    upper = _least_satisfying(is_proved, largest)[1] if is_proved(largest) else np.inf
    return _least_satisfying(is_possible, largest)[0], upper


def _least_satisfying(holds: Callable[[float], bool], largest: float) -> tuple[float, float]:
    """Return a lower and an upper bound on the smallest μ for which `holds` is true."""
    low, high = 0.0, largest
    while high - low > _MU_WIDTH * high and high > _MU_MIN:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if holds(middle) else (middle, high)
    return low, high


def _is_below_gaussian(curve: DirectionCurve, mu: float, slack: float) -> bool:
    """Return whether a curve's δ(ε) is at most that of μ-Gaussian DP plus `slack`, at every ε."""
    x, most = np.exp(curve.epsilons), np.minimum.accumulate(curve.upper) * (1 + _SLACK)
    least = np.exp(gaussian.log_delta(curve.epsilons, mu)) * (1 - rounding.MARGIN) + slack
    slope = -special.ndtr(-0.5 * mu - curve.epsilons / mu)  # of δ_μ as a function of x
    if most[-1] > slack or (most > least).any():
        return False
    width = np.diff(x)
    # where the tangents of the two ends meet, as a distance from the left end
    drop = least[:-1] - (least[1:] - slope[1:] * width)
    bend = slope[1:] - slope[:-1]
    meet = np.clip(drop / np.where(bend > 0, bend, 1.0), 0.0, width)
    chord = most[:-1] + np.diff(most) / width * meet
    tangent = np.maximum(least[:-1] + slope[:-1] * meet, least[1:] - slope[1:] * (width - meet))
    return bool((chord <= tangent).all())


def _nearest_gaussian(
    lower: Callable[[Array], Array], upper: Callable[[Array], Array]
) -> tuple[float, float]:
    """Return the μ whose Gaussian trade-off is nearest, and an upper bound on the distance.

    That trade-off is G_μ(α) = Φ(Φ⁻¹(1 − α) − μ).

    Both curves decrease, so between two rates they differ at most by one's value at the left and
    the other's at the right.
    """
    rates = special.ndtr(_PROBITS)
    low, high = lower(rates), upper(rates)
    low, high = np.append(low, 0.0), np.append(1.0, high)  # at the right, and at the left, ends

    def distance(mu: float) -> float:
        """Bound the distance to the Gaussian trade-off function of μ from above."""
        gaussian = special.ndtr(-_PROBITS - mu)
        right, left = np.append(gaussian, 0.0), np.append(1.0, gaussian)
        return float(max((high - right).max(), (left - low).max()))

    from scipy import optimize  # 25 MB that a server without questions does without

    start = float(np.interp(0.5, special.ndtr(_PROBITS), 0.5 * (low[:-1] + high[1:])))
    guess = max(-float(special.ndtri(min(max(start, 1e-12), 0.5))), 1e-6)
    found = optimize.minimize_scalar(distance, bounds=(0.2 * guess, 5 * guess), method="bounded")
    mu = float(found.x)
    return mu, min(1.0, distance(mu) + _SLACK)
