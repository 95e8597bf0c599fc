"""The worst pair with a given privacy profile, or below a given Rényi curve.

*A profile.* As a function of y = e^ε ≥ 0, the profile H of any pair is convex and decreasing, with
H(0) = 1 and H ≥ 1 − y; and every function with these properties is the profile of a pair (Zhu, Dong
& Wang 2022, arXiv 2106.08567v4, Proposition 8 and Theorem 9). Let D be upper bounds of H, in both
directions, at some points y ≥ 1.

1. H lies below each chord between two points, so below the lower convex hull of the points. Beyond
   the last point it lies below the last D.
2. H at y = 1: the identity of the two directions, H(y) = 1 − y + y·H(1/y), gives a slope at 1 of
   at least −(1 − H(1))/2. So H(1) ≤ (2·D(y) + y − 1)/(y + 1) for every y.

The hull, continued to y < 1 by the identity, is convex, and so the profile of a symmetric pair: its
corners are the losses ±ε, a corner's change of slope is the Q-mass of the loss ε, and the last D is
the mass of infinite loss. The pair dominates every release with these bounds, and has them itself.

*A Rényi curve.* With D_α ≤ r for both directions (Canonne, Kamath & Steinke 2020,
arXiv 2004.00010v7, Proposition 12)

    δ(ε) ≤ e^{(α−1)(r − ε)}·(1 − 1/α)^α/(α − 1),    at each order α > 1.

The least of these at many ε are points of a profile. At ε = 0 the total variation distance V is
bounded more tightly by the divergence of order 1, which is at most that of any order:

    V(t) = t·(1 − (coth t − 1/t)²)/2,    D₁(t) = log(t/sinh t) + t·coth t − t²/sinh²t,    t ≥ 0,

is the least D₁ at each V (Fedotov, Harremoës & Topsøe 2003, "Refinements of Pinsker's inequality",
Theorem 1; both increase). By Pinsker's inequality V ≤ √(D₁/2), which is used where t is small.

**Rounding.** All points are raised by 1e-12 relative, and every mass by the same share of the
slopes that it is the difference of. So each computed δ(ε) is at least that of the hull.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from accountant_service.numerics.floats import rounding
from accountant_service.numerics.floats.special_functions import Array
from accountant_service.numerics.laws.atomic_pair import AtomicPair, Atoms

_RAISED: Final = 1e-12
_ERROR: Final = 1e-13
LOSS_MAX: Final = 500.0
_PINSKER_BELOW: Final = 1e-6
_T_ENDS: Final = (1e-6, 1e9)
_POINTS: Final = 4096  # of a profile from a Rényi curve
_LOG_ENDS: Final = (-100.0, -740.0)  # log δ up to which its points are dense, and of the last
_ORDERS: Final = 1 + np.geomspace(1e-3, 1e6, 2000)  # of a curve that is known at every order


@dataclass(frozen=True)
class ProfilePair(AtomicPair):
    """The dominating pair of any release that is (ε, δ)-DP at each of the given points.

    Attributes:
        epsilons: increasing, at least 0.
        deltas: decreasing.
    """

    epsilons: tuple[float, ...]
    deltas: tuple[float, ...]

    def list_atoms(self) -> Atoms:
        """Return the pair's outcomes: one per corner of the convex hull of the points (e^ε, δ)."""
        return atoms_of_profile(np.array(self.epsilons), np.array(self.deltas))


@dataclass(frozen=True)
class RenyiPair(AtomicPair):
    """The dominating pair of releases of which only upper bounds on Rényi divergences are known.

    Attributes:
        rho: of the zero-concentrated releases: their divergences add up to ρ·α at every order.
        curves: orders, divergences and count of each of the others.
    """

    rho: float
    curves: tuple[tuple[tuple[float, ...], tuple[float, ...], int], ...]

    def list_atoms(self) -> Atoms:
        """Return the pair's outcomes, after converting the Rényi divergences to (ε, δ)."""
        orders, divergences = self._sum_divergences()
        ends = [
            min(float((divergences - log_delta / (orders - 1)).min()), LOSS_MAX)
            for log_delta in _LOG_ENDS
        ]
        epsilons = np.concatenate(
            [
                np.linspace(0.0, ends[0], _POINTS),
                np.linspace(ends[0], ends[1], _POINTS // 4 + 1)[1:],
            ]
        )
        epsilons = np.unique(epsilons)
        log_deltas = np.full_like(epsilons, 0.0)
        for order, divergence in zip(orders, divergences, strict=True):
            constant = order * math.log1p(-1 / order) - math.log(order - 1)
            log_deltas = np.minimum(log_deltas, (order - 1) * (divergence - epsilons) + constant)
        deltas = np.exp(log_deltas) * (1 + 1e-9)
        first = self.rho + math.fsum(count * own[0] for _, own, count in self.curves)
        deltas[0] = min(deltas[0], largest_total_variation(first))
        return atoms_of_profile(epsilons, deltas)

    def _sum_divergences(self) -> tuple[Array, Array]:
        """Return Rényi orders, and the sum of all releases' divergences at each order."""
        orders = _ORDERS
        for own, _, _ in self.curves:
            orders = orders[(orders >= own[0]) & (orders <= own[-1])]
            orders = np.union1d(orders, [each for each in own if each > 1])
        if self.curves:
            low = max(own[0] for own, _, _ in self.curves)
            high = min(own[-1] for own, _, _ in self.curves)
            orders = orders[(orders >= low) & (orders <= high)]
        total = self.rho * orders
        for own, divergences, count in self.curves:
            total += count * interpolated_divergences(np.array(own), np.array(divergences), orders)
        return orders, total


def largest_total_variation(divergence: float) -> float:
    """Return an upper bound on the total variation distance of two laws, from D₁ ≥ 0."""
    pinsker = math.sqrt(0.5 * divergence)
    if divergence < _PINSKER_BELOW:  # the curve is nearer than rounding errors
        return rounding.up(pinsker)
    low, high = _T_ENDS
    if _divergence_at(high) < divergence:
        return 1.0
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _divergence_at(middle) < divergence else (low, middle)
    exact = 0.5 * high * (1 - (1 / math.tanh(high) - 1 / high) ** 2)
    return min(1.0, rounding.up(pinsker), exact + 1e-9)


def _divergence_at(t: float) -> float:
    """Return D₁(t) of the curve of least divergences, off by less than 1e-14 where t ≥ 1e-3."""
    kept = -math.expm1(-2 * t)  # so that sinh t is e^t·kept/2
    beyond = 2 * t * math.exp(-2 * t) / kept  # t·coth t − t
    return math.log(2 * t / kept) + beyond - (2 * t * math.exp(-t) / kept) ** 2


def interpolated_divergences(known_orders: Array, divergences: Array, orders: Array) -> Array:
    """Return upper bounds on Rényi divergences at `orders`, interpolated from `known_orders`.

    (α − 1)·D_α is convex in α, so that a chord bounds it.
    """
    known_moments = (known_orders - 1) * divergences
    between: Array = np.interp(orders, known_orders, known_moments) / (orders - 1)
    return between


def atoms_of_profile(epsilons: Array, deltas: Array) -> Atoms:
    """Return the outcomes of a symmetric pair that dominates every pair with at most these δ(ε)."""
    y, bounds = np.exp(epsilons), np.minimum(deltas * (1 + _RAISED), 1.0)
    at_one = float(((2 * bounds + np.expm1(epsilons)) / (y + 1)).min())
    x, bounds = np.append(0.0, epsilons), np.append(at_one, bounds)
    x, bounds = _lower_hull(x, bounds)
    last = float(bounds[-1])
    falls = (bounds[:-1] - bounds[1:]) / (np.exp(x[:-1]) * np.expm1(np.diff(x)))
    steps = falls * (1 + _RAISED) - np.append(falls[1:], 0.0)
    losses, q = x[1:][steps > 0], steps[steps > 0]
    rest = max(1.0 - last - math.fsum(q * (np.exp(losses) + 1)), 0.0)
    log_q = np.log(q)
    log_rest = np.log([rest]) if rest > 0 else np.zeros(0)
    zero = np.zeros(len(log_rest))
    return Atoms(
        np.concatenate([-losses[::-1], zero, losses]),
        np.concatenate([(log_q + losses)[::-1], log_rest, log_q]),
        np.concatenate([log_q[::-1], log_rest, log_q + losses]),
        _ERROR,
        last,
        last,
    )


def _lower_hull(x: Array, values: Array) -> tuple[Array, Array]:
    """Return the corners (x, value) of the lower convex hull of the points (e^x, value)."""
    corners: list[tuple[float, float]] = []
    for point in zip(x.tolist(), values.tolist(), strict=True):
        if corners and point[0] <= corners[-1][0]:
            corners[-1] = (corners[-1][0], min(corners[-1][1], point[1]))
            continue
        if corners and point[1] >= corners[-1][1]:
            continue
        while len(corners) > 1 and _is_above_chord(corners[-2], corners[-1], point):
            corners.pop()
        corners.append(point)
    hull = np.array(corners)
    return hull[:, 0], hull[:, 1]


def _is_above_chord(
    left: tuple[float, float], middle: tuple[float, float], right: tuple[float, float]
) -> bool:
    """Return whether the middle point lies on or above the line between its neighbours."""
    share = math.expm1(middle[0] - left[0]) / math.expm1(right[0] - left[0])
    return middle[1] >= left[1] + share * (right[1] - left[1])
