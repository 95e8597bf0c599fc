"""Dominating pairs for releases on a fixed-size sample, with one record replaced.

Given the rest of the batch, the outputs are mixtures (1−q)·N(y) + q·N(x) and (1−q)·N(y) + q·N(x′)
of three contributions that are at most 2C apart. Let μ be 2C over the noise's standard deviation,
N₀ = N(0, 1), M = (1−q)·N₀ + q·N(μ) and l = log(dM/dN₀). At every ε ≥ 0 no such mixtures have a
larger δ than M against N₀, in either direction (docs/accountants/pld.md). The pair of laws with
this δ at every ε ≥ 0, both ways round, is symmetric:

    losses > 0:   P has the mass of M,  Q that of N₀,  where l > 0;
    losses < 0:   P has the mass of N₀, Q that of M,   with the loss −l, where l > 0;
    loss 0:       both have the rest, (1−q)·(1 − 2Φ(−μ/2)).

It dominates, but no two datasets attain it, so it gives upper bounds only.

**Any release.** Let (N₁, N₀) be a symmetric pair that dominates a release for datasets that differ
in one replaced record, and M = (1−q)·N₀ + q·N₁. The batches of the two differ in one record, or
both hold another one in its place, and all three are neighbours. By advanced joint convexity
(Balle, Barthe & Gaboardi 2018, arXiv 1807.01647v2, Theorem 2) δ at e^{ε′} = 1 + q(e^ε − 1) is at
most q times that of the release at ε ≥ 0: this is the δ of M against N₀. So the same construction
dominates. If both laws have a mass z of loss 0, the rest with loss 0 is (1−q)·TV(N₁, N₀) + z.

**Moments.** With r = e^l, E_P[e^{sL}] − 1 is the integral of f(r) = (r^s − 1)(r − r^{−s}) under N₀
where r > 1. Without this condition it is e^{K(s+1)} − 1 + e^{K(−s)} − 1, K the log-moments of the
sampled Gaussian. f = r^{s+1} − r + r^{−s} − 1 is convex and not negative. So on each cell of the
outputs with r < 1 its integral is at least N₀'s mass times f at the mean of r, the ratio of the
masses of M and N₀; the sum of these is taken off.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final

import numpy as np

from accountant_service.numerics.floats import rounding
from accountant_service.numerics.floats.special_functions import Array
from accountant_service.numerics.laws import sampled_gaussian
from accountant_service.numerics.laws.dominating_pair import (
    BasePair,
    Direction,
    GaussianPair,
    LossCells,
    Release,
    normal_masses,
)

_EPS: Final = float(np.finfo(float).eps)
_CELLS: Final = 512  # of the outputs with r < 1, for moments
_DEVIATIONS: Final = 9.0  # that these cells reach below 0
_ATOM_ROUNDING: Final = 1e-11  # relative, of the mass of loss 0
_ROUNDING: Final = 1e-9  # relative, of the sum over them, with room


class _Replacement(ABC):
    """Base of the dominating pairs of fixed-size-sampled releases, with one record replaced."""

    __slots__ = ()
    sample_rate: float

    @property
    @abstractmethod
    def _pair(self) -> BasePair:
        """The symmetric dominating pair of the release without sampling."""

    @property
    def is_symmetric(self) -> bool:
        """Return True: swapping the two datasets gives the same privacy-loss distribution."""
        return True

    @property
    def _positive_loss_release(self) -> Release:
        """A Poisson-sampled release with the same distribution of positive losses."""
        return Release(self._pair, self.sample_rate)

    def total_variation(self) -> float:
        """Return the total variation distance of the two output distributions."""
        return self._positive_loss_release.total_variation()

    def infinite_mass(self, direction: Direction) -> float:  # noqa: ARG002
        """Return the probability of an infinite privacy loss, rounded up."""
        return self._positive_loss_release.infinite_mass("removing")

    def _zero_loss_mass(self) -> float:
        """Return the probability of a privacy loss of 0, which is the same on both datasets."""
        return (1 - self.sample_rate) * self._pair.total_variation()

    def count_nodes(self, tilt: float) -> float:
        """Return how many terms a log-moment at this `tilt` sums, which measures its cost."""
        return self._positive_loss_release.count_nodes(tilt) + _CELLS

    def loss_limits(self, direction: Direction, tail_deviations: float) -> tuple[float, float]:  # noqa: ARG002
        """Return the least and greatest loss to cover; `tail_deviations` sets the mass left out.

        Outside, P has at most a normal tail beyond `tail_deviations` on either side.
        """
        highest = self._positive_loss_release.loss_limits("removing", tail_deviations)[1]
        return -highest, highest

    def cells(
        self,
        direction: Direction,  # noqa: ARG002
        first: int,
        count: int,
        spacing: float,
        offset: float = 0.0,
    ) -> LossCells:
        """Discretise the loss: return each interval's probability under both output distributions.

        The edges are (first + offset)·h, (first + 1 + offset)·h, … with an offset of 0 or ½. The
        atom at 0 belongs to the cell above the edge 0, or to the cell around 0.
        """
        centred = offset > 0
        positive = self._positive_loss_release
        upper = positive.cells("removing", 0, first + count, spacing, offset)
        lower = positive.cells("adding", first, -first - centred, spacing, offset)
        middle = self._cells_around_zero(spacing / 2) if centred else None
        atom = self._zero_loss_mass()
        return _join_cells(first, lower, middle, upper, atom)

    def _cells_around_zero(self, half: float) -> LossCells:
        """Return one interval with all losses within ±`half`, except the loss 0."""
        above = self._positive_loss_release.cells("removing", 0, 1, half)
        mass = above.p[1:-1] + above.q[1:-1]
        error = above.p_rounding[1:-1] + above.q_rounding[1:-1] + 4 * _EPS * mass
        gap = -mass * math.expm1(-half)
        shrink = np.array([math.exp(half)])
        off, exact = error + 4 * _EPS * np.abs(gap), np.zeros(2)
        return LossCells(0, mass, mass, gap, error, error, off, shrink, exact)


@dataclass(frozen=True, slots=True)
class FixedSizeReplacement(_Replacement):
    """A Gaussian release on a fixed-size sample, for datasets that differ in one replaced record.

    Attributes:
        mu: twice the clip norm divided by the standard deviation of the noise.
        sample_rate: q = batch size / dataset size, in (0, 1).
    """

    mu: float
    sample_rate: float

    @property
    def _pair(self) -> BasePair:
        """The dominating pair of the Gaussian release without sampling."""
        return GaussianPair(self.mu)

    def log_moments(self, direction: Direction, tilts: Array) -> Array:  # noqa: ARG002
        """Return upper bounds on the log-moments log E[e^{s·loss}], for each s > 0 in `tilts`."""
        whole = np.logaddexp(
            _log_expm1(sampled_gaussian.log_moments(tilts + 1, self.sample_rate, 1 / self.mu)),
            _log_expm1(sampled_gaussian.log_moments(-tilts, self.sample_rate, 1 / self.mu)),
        )
        below = self._negative_loss_moments(tilts) * (1 - _ROUNDING)
        share = np.minimum(below * np.exp(-whole), 1.0 - 1e-3)
        return rounding.up_each(np.logaddexp(0.0, whole + np.log1p(-share) + _ROUNDING))

    def _negative_loss_moments(self, tilts: Array) -> Array:
        """Return lower bounds on the part of each moment's integral where the loss is negative.

        The losses are those of the sampled Gaussian, and there is a bound for each tilt.

        That is the integral of f(r) under N₀ where r < 1.
        """
        z = np.linspace(-_DEVIATIONS, self.mu / 2, _CELLS + 1)
        absent, absent_rounding = normal_masses(z, self.mu)
        present, present_rounding = normal_masses(z - self.mu, self.mu)
        missing = np.maximum(absent - present - absent_rounding - present_rounding, 0.0)
        log_ratio = np.log1p(-self.sample_rate * missing / (absent + absent_rounding))
        lower = -np.expm1(np.multiply.outer(tilts, log_ratio))  # 1 − r^s
        # r^{−s} − r = r^{−s}·(1 − r^{1+s}); r^{−s} ≥ 1 is left out where it would overflow
        upper = -np.expm1(np.multiply.outer(tilts + 1, log_ratio))
        growth = np.exp(np.minimum(np.multiply.outer(-tilts, log_ratio), 300.0))
        total: Array = (lower * upper * growth) @ np.maximum(absent - absent_rounding, 0.0)
        return total


@dataclass(frozen=True, slots=True)
class FixedSizePairReplacement(_Replacement):
    """Any release on a fixed-size sample, for datasets that differ in one replaced record.

    Attributes:
        pair: symmetric, dominates the release for neighbours of the same size.
        sample_rate: q = batch size / dataset size, in (0, 1).
    """

    pair: BasePair
    sample_rate: float

    @property
    def _pair(self) -> BasePair:
        """The symmetric dominating pair of the release without sampling."""
        return self.pair

    def _zero_loss_mass(self) -> float:
        """Return the probability of a privacy loss of 0, which is the same on both datasets."""
        own = self.pair.masses(np.array([-np.inf, np.nextafter(0.0, -1.0), 0.0, np.inf]))
        return (1 - self.sample_rate) * self.pair.total_variation() + float(own.with_record[1])

    def log_moments(self, direction: Direction, tilts: Array) -> Array:  # noqa: ARG002
        """Return upper bounds on the log-moments log E[e^{s·loss}], for each s > 0 in `tilts`.

        Nothing is taken off for negative losses of the sampled release.
        """
        whole = np.logaddexp(
            _log_expm1(self.pair.log_moments(tilts + 1, self.sample_rate)),
            _log_expm1(self.pair.log_moments(-tilts, self.sample_rate)),
        )
        return rounding.up_each(np.logaddexp(0.0, whole + _ROUNDING))


def _join_cells(
    first: int, lower: LossCells, middle: LossCells | None, upper: LossCells, mass_at_zero: float
) -> LossCells:
    """Join the intervals of negative losses, of losses around 0 and of positive losses.

    The mass at loss 0 is added to the middle cell, or to the lowest cell of positive losses.
    """
    inner = slice(1, -1)
    between = [middle] if middle is not None else []
    at = len(lower.gap)  # of the cell with the loss 0, among the inner cells

    def join_all(name: str) -> Array:
        """Join one attribute of all intervals: their probabilities or their rounding errors."""
        return np.concatenate(
            [
                getattr(lower, name)[:-1],
                *(getattr(each, name) for each in between),
                getattr(upper, name)[1:],
            ]
        )

    def join_inner(name: str) -> Array:
        """Join an attribute that the tails do not have, such as `gap`, of all parts."""
        return np.concatenate([getattr(each, name) for each in (lower, *between, upper)])

    p, q, gap = join_all("p"), join_all("q"), join_inner("gap")
    p_rounding, q_rounding = join_all("p_rounding"), join_all("q_rounding")
    shrink, gap_rounding = join_inner("shrink"), join_inner("gap_rounding")
    for mass, error in ((p, p_rounding), (q, q_rounding)):
        mass[inner][at] += mass_at_zero
        error[inner][at] += _ATOM_ROUNDING * mass[inner][at]
    added = mass_at_zero * (1 - 1 / shrink[at])  # P − Q·e^{low edge} of the loss 0
    gap[at] += added
    gap_rounding[at] += _ATOM_ROUNDING * (abs(gap[at]) + added)
    low, high = lower.edge_error, upper.edge_error
    if middle is None:  # they share the edge 0
        low, high = low[:-1], np.append(max(low[-1], high[0]), high[1:])
    edge_error = np.concatenate([low, high])
    return LossCells(
        first, p, q, gap, p_rounding, q_rounding, gap_rounding, shrink, edge_error, upper.infinite
    )


def _log_expm1(x: Array) -> Array:
    """Return log(e^x − 1) for x ≥ 0, without overflow; at x = 0 a finite stand-in for −∞."""
    log: Array = x + np.log(np.maximum(-np.expm1(-x), 1e-300))
    return log
