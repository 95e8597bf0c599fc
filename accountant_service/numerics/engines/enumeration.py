"""The exact profile of a composition with few different privacy losses.

Releases with finitely many outcomes are composed outcome by outcome: losses add up, P-masses
multiply, and outcomes whose losses agree to 1e-12 are merged. With the losses l, their P-masses p
and the mass m of infinite loss,

    δ(ε) = m + Σ_{l > ε} p·(1 − e^{ε−l}).

All masses are off by a relative `mass_error` at most and all losses by `loss_error`. The bounds
move ε and the masses outward by them, and by the margin of `rounding`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from accountant_service.numerics.floats import rounding
from accountant_service.numerics.floats.bounds import Bounds
from accountant_service.numerics.floats.special_functions import Array
from accountant_service.numerics.laws.atomic_pair import AtomicPair
from accountant_service.numerics.laws.dominating_pair import (
    Composition,
    Direction,
    Release,
    distinct_directions,
    infinite_mass,
)

_OUTCOMES_MAX: Final = 1 << 16  # of the composition
_PRODUCTS_MAX: Final = 1 << 18  # of one step of the composition: a fiftieth of a second
_MERGED: Final = 1e-12  # losses that differ by less are one
_EPS: Final = float(np.finfo(float).eps)
_UNDERFLOW: Final = 1e-290  # more than all masses that are computed as zero


@dataclass(frozen=True, slots=True, eq=False)
class Outcomes:
    """A composition's finite privacy losses in increasing order, with their probabilities.

    Attributes:
        losses: different ones.
        mass: their P-masses.
        mass_error: a bound of the relative error of the masses.
        loss_error: a bound of the absolute error of the losses.
    """

    losses: Array
    mass: Array
    mass_error: float
    loss_error: float

    def joined(self, other: Outcomes) -> Outcomes | None:
        """Return the outcomes of two independent releases together; None if there are too many."""
        if len(self.losses) * len(other.losses) > _PRODUCTS_MAX:
            return None
        if not len(self.losses) or not len(other.losses):
            return Outcomes(np.zeros(0), np.zeros(0), 0.0, 0.0)
        losses = np.add.outer(self.losses, other.losses).ravel()
        mass = np.multiply.outer(self.mass, other.mass).ravel()
        order = np.argsort(losses)
        losses, mass = losses[order], mass[order]
        starts = np.flatnonzero(np.diff(losses, prepend=-np.inf) > _MERGED)
        if len(starts) > _OUTCOMES_MAX:
            return None
        ends = losses[np.append(starts[1:], len(losses)) - 1]
        spread = float((ends - losses[starts]).max())
        rounding = 4 * _EPS * (1 + float(np.abs(losses).max()))
        return Outcomes(
            losses[starts],
            np.add.reduceat(mass, starts),
            self.mass_error + other.mass_error + 4 * _EPS * len(other.losses),
            self.loss_error + other.loss_error + spread + rounding,
        )


class EnumeratedProfile:
    """The privacy profile δ(ε), and attacks' error rates, from a list of all outcomes."""

    def __init__(self, outcomes: Outcomes, infinite: float) -> None:
        self._outcomes, self._infinite = outcomes, infinite
        descending = slice(None, None, -1)
        losses, mass = outcomes.losses[descending], outcomes.mass[descending]
        with np.errstate(divide="ignore"):
            log_mass = np.log(mass)
        self._p = np.cumsum(mass)
        self._log_q = np.logaddexp.accumulate(log_mass - losses)

    def delta(self, epsilons: Array) -> tuple[Array, Array]:
        """Return lower and upper bounds on δ at each ε ≥ 0."""
        error = self._outcomes.mass_error
        lower = self._delta_from_finite_losses(epsilons + self._outcomes.loss_error) * (1 - error)
        upper = (
            self._delta_from_finite_losses(epsilons - self._outcomes.loss_error) * (1 + error)
            + _UNDERFLOW
        )
        infinite = self._infinite
        return (
            np.maximum(lower + infinite * (1 - 1e-9), 0.0),
            np.minimum(upper + infinite, 1.0),
        )

    def delta_table(self, epsilons: Array) -> tuple[Array, Array]:
        """Return lower and upper bounds on δ as tables: one row, and a column per ε."""
        lower, upper = self.delta(epsilons)
        return lower[np.newaxis], upper[np.newaxis]

    def _delta_from_finite_losses(self, epsilons: Array) -> Array:
        """Return the part of δ(ε) from finite losses l > ε, of probability p: Σ p·(1 − e^{ε−l})."""
        losses, mass = self._outcomes.losses, self._outcomes.mass
        found = np.empty_like(epsilons)
        for i, epsilon in enumerate(epsilons):
            first = int(np.searchsorted(losses, epsilon))
            found[i] = float(mass[first:] @ -np.expm1(epsilon - losses[first:]))
        return found

    def epsilon(self, delta: float) -> tuple[float, float]:
        """Return a lower and an upper bound on the smallest ε at δ."""
        error, shift = self._outcomes.mass_error, self._outcomes.loss_error
        lower = self._epsilon_at((delta - self._infinite * (1 - 1e-9)) / (1 - error))
        upper = self._epsilon_at((delta - self._infinite - _UNDERFLOW) / (1 + error))
        return max(lower - shift, 0.0), max(upper + shift, 0.0)

    def _epsilon_at(self, delta: float) -> float:
        """Return the least ε with δ(ε) ≤ `delta`: the greatest over all thresholds on the loss."""
        if delta <= 0:
            return math.inf
        useful = self._p > delta
        if not useful.any():
            return 0.0
        return float((np.log(self._p[useful] - delta) - self._log_q[useful]).max())

    def attack_rates(self, thresholds: Array) -> tuple[Array, Array]:
        """Return upper bounds on FPR and lower bounds on TPR of attacks that threshold the loss.

        The first attack accuses if the loss is infinite, which it never is without the record.
        """
        chosen = np.linspace(0, len(self._p) - 1, min(len(self._p), 8 * len(thresholds)))
        at = np.unique(chosen.astype(int))
        error = self._outcomes.mass_error
        false_positives = np.exp(self._log_q[at]) * (1 + error + 2 * self._outcomes.loss_error)
        true_positives = np.append(0.0, self._p[at] * (1 - error)) + self._infinite * (1 - 1e-9)
        false_positives = np.append(0.0, np.minimum(false_positives + _UNDERFLOW, 1.0))
        return false_positives, np.minimum(true_positives, 1.0)


def profile(releases: Composition, direction: Direction) -> EnumeratedProfile | None:
    """Return bounds on a composition's δ(ε) from all outcomes; None if it has too many to list."""
    return _profile(tuple(releases), direction)


@lru_cache(maxsize=16)
def _profile(releases: Composition, direction: Direction) -> EnumeratedProfile | None:
    """Compute the bounds on δ(ε) that `profile` returns; results are cached."""
    total: Outcomes | None = Outcomes(np.zeros(1), np.ones(1), 0.0, 0.0)
    for release, count in releases:
        if not isinstance(release, Release) or not isinstance(release.base_pair, AtomicPair):
            return None
        own = _repeat(_outcomes(release.base_pair, release.sample_rate, direction), count)
        total = total.joined(own) if total is not None and own is not None else None
    if total is None:
        return None
    return EnumeratedProfile(total, infinite_mass(releases, direction))


def _outcomes(pair: AtomicPair, sample_rate: float, direction: Direction) -> Outcomes | None:
    """Return the outcomes of one release, or None if there are too many."""
    losses, p, error = pair.outcomes(sample_rate, direction)
    if len(losses) > _OUTCOMES_MAX:
        return None
    return Outcomes(losses, p, error, error)


def _repeat(outcomes: Outcomes | None, count: int) -> Outcomes | None:
    """Return the outcomes of `count` equal releases together; None if there are too many."""
    total, power = None, outcomes
    while power is not None:
        if count & 1:
            total = power if total is None else total.joined(power)
            if total is None:
                return None
        count >>= 1
        if not count:
            return total
        power = power.joined(power)
    return None


def epsilon_bounds(releases: Composition, delta: float) -> Bounds | None:
    """Return bounds on ε at δ from a list of all outcomes; None if there are too many."""
    return _combine_directions(
        [_epsilon(releases, each, delta) for each in distinct_directions(releases)]
    )


def delta_bounds(releases: Composition, epsilon: float) -> Bounds | None:
    """Return bounds on δ(ε) from a list of all outcomes; None if there are too many."""
    return _combine_directions(
        [_delta(releases, each, epsilon) for each in distinct_directions(releases)]
    )


def _epsilon(releases: Composition, direction: Direction, delta: float) -> Bounds | None:
    """Return bounds on ε at δ for a removed or an added record; None if too many outcomes."""
    found = profile(releases, direction)
    return Bounds(*found.epsilon(delta)) if found else None


def _delta(releases: Composition, direction: Direction, epsilon: float) -> Bounds | None:
    """Return bounds on δ(ε) for a removed or an added record; None if too many outcomes."""
    found = profile(releases, direction)
    if found is None:
        return None
    lower, upper = found.delta(np.array([epsilon]))
    return Bounds(float(lower[0]), float(upper[0]))


def _combine_directions(found: list[Bounds | None]) -> Bounds | None:
    """Return bounds on the maximum over removing and adding a record; None if one is missing."""
    known = [each for each in found if each is not None]
    if len(known) < len(found):
        return None
    return Bounds(
        rounding.down(max(each.lower for each in known)),
        rounding.up(max(each.upper for each in known)),
    )
