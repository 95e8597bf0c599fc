"""The membership attacker's trade-off, enclosed from both sides.

For the pair (P, Q) of a record present and absent let f(α) be the least false-negative rate of any
test whose false-positive rate is at most α. Every event A has P(A) ≤ δ(ε) + e^ε·Q(A), and the same
with P and Q exchanged; so f is at least (and by convex duality equal to the largest of) the lines

    1 − δ(ε) − e^ε·α    and    e^{−ε}·(1 − δ′(ε) − α),    ε ≥ 0,

δ of the direction "removing" and δ′ of "adding". So upper bounds of δ at some ε give a lower bound
of f, and explicit attacks, with the chords between them (toss a coin which one to use), an upper
bound. Both are exact at the ε and thresholds used, and second-order close between.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from scipy import special

from accountant_service.numerics import rounding, saddle_point, two_sided
from accountant_service.numerics.contour import Contour, Effort, contour
from accountant_service.numerics.lattice import Profile
from accountant_service.numerics.privacy_loss import Composition, Direction
from accountant_service.numerics.special import Array
from accountant_service.numerics.tilted_loss import UndampedError

_NARROW: Final = 1e-4  # relative width of a δ that needs no other tilt
_READERS_MAX: Final = 12  # contours of a direction
_LATTICE_EFFORT: Final = 4  # a lattice costs as much as so many contours, or more
_LATTICE_WIDTH: Final = 2e-3  # relative, of δ: lattices are costly
_EFFORTS: Final = (
    Effort(math.log(1e-8), blur=0.0, work=1 << 18),
    Effort(math.log(1e-5), blur=0.0, work=1 << 20),
)
_UNDERFLOW: Final = 1e-300  # more than any Q of an attack that is computed as zero
_SLACK: Final = 1e-12  # for the rounding of lines and chords
_PROBITS: Final = np.linspace(-8.0, 8.0, 16001)  # where the Gaussian trade-off is compared


class Reader(Protocol):
    """What a contour or a pair of lattice profiles can say of one direction."""

    def delta(self, epsilons: Array) -> tuple[Array, Array]:
        """Lower and upper bounds of δ."""
        ...

    def attacks(self, thresholds: Array) -> tuple[Array, Array]:
        """Upper bounds of Q and lower bounds of P of some events."""
        ...


@dataclass(frozen=True, slots=True)
class LatticeReader:
    """δ and attacks from an upper and a lower profile."""

    upper: Profile
    lower: Profile

    def delta(self, epsilons: Array) -> tuple[Array, Array]:
        """See `Reader`."""
        lower = np.array([self.lower.delta(float(e)) for e in epsilons])
        return lower, np.array([self.upper.delta(float(e)) for e in epsilons])

    def attacks(self, thresholds: Array) -> tuple[Array, Array]:
        """See `Reader`: of some of the lower profile's own events, whatever the thresholds."""
        every = np.linspace(0, len(self.lower.p) - 1, 8 * len(thresholds)).astype(int)
        accused = np.clip(self.lower.p[every], 0.0, None) * math.exp(self.lower.log_scale_p)
        innocent = self.lower.q[every] * math.exp(self.lower.log_scale_q) + _UNDERFLOW
        return np.minimum(innocent, 1.0), np.minimum(accused, 1.0)


@dataclass(frozen=True, slots=True)
class DirectionCurve:
    """Bounds of δ at increasing ε, and attacks, of one direction."""

    epsilons: Array
    lower: Array
    upper: Array
    innocent: Array
    accused: Array


def direction_curve(releases: Composition, direction: Direction, epsilons: Array) -> DirectionCurve:
    """δ(ε) of one direction at many ε from as few tilts as give it narrowly.

    Args:
        releases: with their counts.
        direction: of add-or-remove.
        epsilons: increasing, at least 0.
    """
    lower, upper = np.zeros_like(epsilons), np.ones_like(epsilons)
    innocent, accused = [np.array([0.0, 1.0])], [np.array([0.0, 1.0])]  # accuse no one, or all
    pending = np.ones(len(epsilons), dtype=bool)
    effort = 0
    while effort < _READERS_MAX:
        pending &= upper - lower > _NARROW * upper + _SLACK
        if not pending.any():
            break
        first = int(np.flatnonzero(pending)[0])
        pending[first] = False  # as good as it gets there
        reader = _reader(releases, direction, float(epsilons[first]))
        effort += 1 if isinstance(reader, Contour) else _LATTICE_EFFORT
        if reader is None:
            continue
        low, high = reader.delta(epsilons)
        lower, upper = np.maximum(lower, low), np.minimum(upper, high)
        for least, most in zip(lower, upper, strict=True):
            two_sided.consistent(rounding.down(float(least)), rounding.up(float(most)))
        false_positives, true_positives = reader.attacks(epsilons)
        innocent.append(false_positives)
        accused.append(true_positives)
    return DirectionCurve(epsilons, lower, upper, np.concatenate(innocent), np.concatenate(accused))


def _reader(releases: Composition, direction: Direction, epsilon: float) -> Reader | None:
    """The contour, or else the lattice, that is accurate around this ε; None if none fits."""
    saddle = saddle_point.of_epsilon(releases, direction, epsilon)
    for effort in _EFFORTS:
        with contextlib.suppress(UndampedError):
            return contour(releases, saddle, effort)
    upper, lower = two_sided.lattice_profiles(releases, saddle, _LATTICE_WIDTH)
    return LatticeReader(upper, lower) if upper is not None and lower is not None else None


@dataclass(frozen=True, slots=True)
class TradeOff:
    """Bounds of f at some false-positive rates, and what follows.

    Attributes:
        lower, upper: bounds of the least false-negative rate at each.
        mu: of the Gaussian mechanism whose trade-off is nearest.
        mu_error: an upper bound of |f − G_μ| at every false-positive rate.
    """

    lower: Array
    upper: Array
    mu: float
    mu_error: float


def trade_off(
    removing: DirectionCurve, adding: DirectionCurve, rates: Array, *, attained: bool = True
) -> TradeOff:
    """The trade-off at some false-positive rates.

    Args:
        removing: δ and attacks of this direction.
        adding: of this one.
        rates: false-positive rates in [0, 1].
        attained: whether the pair is the mechanism's own: if it only dominates, no attack on it is
            one on the mechanism, and the upper bound is that of tossing a coin.
    """

    def lower(at: Array) -> Array:
        steep = (
            1 - removing.upper - np.multiply.outer(at, np.exp(np.minimum(removing.epsilons, 700)))
        )
        flat = np.exp(-adding.epsilons) * (1 - adding.upper - at[:, None])
        best: Array = np.maximum(steep.max(axis=1), flat.max(axis=1)) * (1 - _SLACK) - _SLACK
        return np.clip(best, 0.0, 1.0)

    # the event of "adding" clears the record: its Q is a false negative, its P a true one
    points = np.concatenate(
        [
            np.stack([removing.innocent, 1 - removing.accused], axis=1),
            np.stack([1 - adding.accused, adding.innocent], axis=1),
        ]
    )
    hull = _lower_hull(points if attained else np.array([[0.0, 1.0], [1.0, 0.0]]))

    def upper(at: Array) -> Array:
        return np.minimum(np.interp(at, hull[:, 0], hull[:, 1]) + _SLACK, 1.0)

    mu, error = _nearest_gaussian(lower, upper)
    low, high = lower(rates), upper(rates)
    for least, most in zip(low, high, strict=True):
        two_sided.consistent(float(least), float(most) + _SLACK)
    return TradeOff(low, np.maximum(high, low), mu, error)


def _lower_hull(points: Array) -> Array:
    """The lower convex hull of points, by increasing first coordinate (Andrew's chain)."""
    ordered = points[np.lexsort((points[:, 1], points[:, 0]))]
    hull: list[Array] = []
    for point in ordered:
        while len(hull) >= 2 and _turns_right(hull[-2], hull[-1], point):
            hull.pop()
        if not hull or point[0] > hull[-1][0]:
            hull.append(point)
    return np.array(hull)


def _turns_right(a: Array, b: Array, c: Array) -> bool:
    return bool((b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0]) <= 0)


def _nearest_gaussian(
    lower: Callable[[Array], Array], upper: Callable[[Array], Array]
) -> tuple[float, float]:
    """The μ whose trade-off G_μ(α) = Φ(Φ⁻¹(1 − α) − μ) is nearest in the worst case, and how near.

    Both curves decrease, so between two rates they differ at most by one's value at the left and
    the other's at the right.
    """
    rates = special.ndtr(_PROBITS)
    low, high = lower(rates), upper(rates)
    low, high = np.append(low, 0.0), np.append(1.0, high)  # at the right, and at the left, ends

    def distance(mu: float) -> float:
        gaussian = special.ndtr(-_PROBITS - mu)
        right, left = np.append(gaussian, 0.0), np.append(1.0, gaussian)
        return float(max((high - right).max(), (left - low).max()))

    from scipy import optimize  # 25 MB that a server without questions does without

    start = float(np.interp(0.5, special.ndtr(_PROBITS), 0.5 * (low[:-1] + high[1:])))
    guess = max(-float(special.ndtri(min(max(start, 1e-12), 0.5))), 1e-6)
    found = optimize.minimize_scalar(distance, bounds=(0.2 * guess, 5 * guess), method="bounded")
    mu = float(found.x)
    return mu, min(1.0, distance(mu) + _SLACK)
