"""One epoch of balls-in-bins sampling: each record is in one of b batches, drawn uniformly.

In units of the clip norm the outputs along the record's contributions are b normal variables of
standard deviation σ: Q = N(0, σ²·I) without the record, and P the uniform mixture of N(eᵢ, σ²·I)
with it. The likelihood ratio is R = (X₁ + … + X_b)/b with Xᵢ independent lognormals of mean 1
under Q; μ = 1/σ. The pair dominates the epoch, even if every step depends on earlier outputs
(docs/accountants/balls_in_bins.md):

    removing:  loss log R        adding:  loss −log R.

R is a sum, whose law is known by bounds only. So there are two sets of cells: those for an upper
bound of δ have Xᵢ that are larger in convex order, those for a lower bound come from an attacker
who sees Xᵢ rounded.

**Moments.** Outcomes without a summand above a cut are bounded on the lattices. On the others let
ΣY be the sum of the summands up to the cut and ΣJ that of those above: ‖R‖ ≤ ‖ΣY/b‖ + ‖ΣJ/b‖, in
the norm whose a-th power is E[·^a]. With N the number of further summands above the cut, (ΣJ)^a is
at most the sum of Jᵢ^a·(1 + N)^{a−1}, and 1 + N ≤ 2^N. For E[R^{−s}] the lattices bound a convex
function that is R^{−s} above a point r₀ and its tangent below; the rest, where R < r₀, is at most
√(E[R^{−2s}]·Q(R < r₀)), and R is at least the geometric mean of the Xᵢ. Both are at most the
moments of the release without sampling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Final, Literal

import numpy as np

from accountant_service.numerics.floats import rounding
from accountant_service.numerics.floats.special_functions import (
    Array,
    lattice_points,
    log_normal_tail,
    log_sum_exp,
)
from accountant_service.numerics.laws import lognormal_sum
from accountant_service.numerics.laws.dominating_pair import (
    Direction,
    GaussianPair,
    LossCells,
)
from accountant_service.numerics.laws.lognormal_sum import SumAbove, SumLattice
from accountant_service.numerics.laws.sum_lattices import choose_lattices, ratio_limits

_EPS: Final = float(np.finfo(float).eps)
_CUT_LESS: Final = 8.0  # less in the square of the deviations that cells cover
_MOMENT_DEVIATIONS: Final = 8.0  # fewer bend the curve of moments, and saddle points go astray
_MOMENT_POINTS: Final = 1 << 13
_MOMENT_SPACING: Final = 0.1
_SPACING_MAX: Final = 0.09  # for which the lattices of sums are chosen
_MOMENT_SHARE: Final = 0.25  # of the standard deviation of R, for the same
_LEAST: Final = 1e-300  # more than any mass that is computed as zero
_MOMENT_ROUNDING: Final = 1e-12
_COVERED_DEVIATIONS: Final = 9.2  # of cells: the mass beyond those of moments is 1e-3 of δ
_EDGES: Final = 2  # cells that a grid of losses has beyond what it must cover


@dataclass(frozen=True, slots=True)
class BallsInBins:
    """One epoch of balls-in-bins sampling: a record takes part in one of `bins` Gaussian releases.

    Attributes:
        mu: the sensitivity divided by the standard deviation of the noise.
        bins: number of steps, at least 2.
    """

    is_costly_to_discretise: ClassVar[bool] = True  # it takes longer than composing the losses
    mu: float
    bins: int

    @property
    def is_symmetric(self) -> bool:
        """Return False: removing a record costs more than adding it."""
        return False

    def total_variation(self) -> float:
        """Return an upper bound on the total variation distance of the output distributions.

        It is at most that of the release without sampling, and at most half the standard deviation
        of R.
        """
        variance = math.expm1(min(self.mu * self.mu, 100.0)) / self.bins
        return min(GaussianPair(self.mu).total_variation(), 0.5 * math.sqrt(variance))

    def infinite_mass(self, direction: Direction) -> float:  # noqa: ARG002
        """Return 0: no loss is infinite, as both distributions have the same possible outcomes."""
        return 0.0

    def loss_limits(self, direction: Direction, tail_deviations: float) -> tuple[float, float]:
        """Return the least and the greatest privacy loss that the discretisation must cover.

        Outside lies about a normal tail of `tail_deviations`, or a little more. This affects the
        width of bounds, never their validity: what lies outside is counted outward.
        """
        deviations = math.sqrt(max(tail_deviations**2 - _CUT_LESS, 1.0))
        low, high = ratio_limits(self.mu, self.bins, deviations)
        if direction == "removing":
            return math.log(low), math.log(high)
        return -math.log(high), -math.log(low)

    def count_nodes(self, tilt: float) -> float:  # noqa: ARG002
        """Return how many terms a log-moment at this `tilt` sums, which measures its cost."""
        return float(_MOMENT_POINTS)

    def log_moments(self, direction: Direction, tilts: Array) -> Array:
        """Return upper bounds on the log-moments log E[e^{s·loss}], for each s > 0 in `tilts`."""
        bounds = _moments_above if direction == "removing" else _moments_below
        unsampled = 0.5 * self.mu**2 * tilts * (tilts + 1)
        found = np.minimum(bounds(self.mu, self.bins, tilts), unsampled)
        return rounding.up_each(np.maximum(found, 0.0))

    def cells(
        self, direction: Direction, first: int, count: int, spacing: float, offset: float = 0.0
    ) -> LossCells:
        """Discretise the loss: return each interval's probability under both output distributions.

        With an offset of 0 the masses are those of a pair that dominates the release; with an
        offset of ½ they are bounds of those of an attacker's rounded observation.
        """
        edges = lattice_points(first, count + 1, spacing, offset)
        low, high = first * spacing, (first + count) * spacing  # the same lattices for both
        if direction == "adding":
            low, high = -high, -low
        if offset == 0 and self._is_covered_by_moments(low, high, spacing):
            law = _law_for_moments(self.mu, self.bins)
            return self._cells_above(direction, first, edges, law)
        sums: Literal["small", "large"] = "small" if direction == "adding" else "large"
        finest = min(spacing, _SPACING_MAX)
        lattices = choose_lattices(self.mu, self.bins, low, high, finest, sums)
        if offset > 0:
            return self._cells_below(direction, first, edges, lattices)
        law = _cached_sum_above(self.mu, self.bins, lattices)
        return self._cells_above(direction, first, edges, law)

    def _is_covered_by_moments(self, low: float, high: float, spacing: float) -> bool:
        """Return whether the law for moments is as fine as cells of log R, and reaches far enough.

        What lies beyond its limits is a small share of a δ for which cells reach a little farther.
        """
        least, most = ratio_limits(self.mu, self.bins, _COVERED_DEVIATIONS)
        reaches_far = low >= math.log(least) - _EDGES * spacing
        reaches_far &= high <= math.log(most) + _EDGES * spacing
        return reaches_far and spacing >= _moment_spacing(self.mu, self.bins)

    def _cells_above(
        self, direction: Direction, first: int, edges: Array, law: SumAbove
    ) -> LossCells:
        """Discretise a pair that dominates this one, for upper bounds on δ."""
        removing = direction == "removing"
        # sums outside of a window count at its end if that is the worse, else as infinite loss
        at_ends = (law.lows, law.below) if removing else (law.ends, law.beyond)
        ratio = np.concatenate([law.points, at_ends[0]]) / self.bins
        mass = np.concatenate([law.mass, at_ends[1]])
        loss = np.log(np.maximum(ratio, _LEAST))
        error = 8 * _EPS * (1 + np.abs(loss))
        tilted = ratio * mass * (1 + 8 * _EPS)
        if removing:
            cells = _group_by_loss(first, edges, loss + error, tilted, mass)
            cells.p[-1] += law.tilted_beyond
        else:
            cells = _group_by_loss(first, edges, -loss + error, mass, tilted)
            cells.p[-1] += law.below.sum()
        return cells

    def _cells_below(
        self, direction: Direction, first: int, edges: Array, lattices: tuple[SumLattice, ...]
    ) -> LossCells:
        """Discretise the loss of an attacker who sees rounded values, for lower bounds on δ.

        An outcome's loss is that of the bounds of its masses; any function of it would do.
        """
        p, wrapped, q = lognormal_sum.sum_below(
            self.mu, self.bins, lattices, tilted=direction == "removing"
        )
        with np.errstate(divide="ignore"):
            cells = _group_by_loss(first, edges, np.log(p) - np.log(q + _LEAST), p, q + _LEAST)
        return replace(cells, p=_remove_top(cells.p, wrapped))


def _remove_top(mass: Array, share: float) -> Array:
    """Return `mass` without the probability `share`, which is taken from the last entries first.

    If any part of the mass, of at most that size, does not belong here, the tails of the rest are
    lower bounds.
    """
    tails = np.cumsum(mass[::-1])[::-1]
    less = np.maximum(tails * (1 - 4 * _EPS * len(mass)) - share, 0.0)
    kept: Array = np.maximum(less - np.append(less[1:], 0.0), 0.0) * (1 - 4 * _EPS)
    return kept


def _group_by_loss(first: int, edges: Array, loss: Array, p: Array, q: Array) -> LossCells:
    """Sum the grid points' probabilities, `p` and `q`, over intervals of the privacy loss."""
    count = len(edges) - 1
    cell = np.searchsorted(edges, loss, side="right")
    inner = (cell > 0) & (cell <= count)
    low = edges[np.clip(cell - 1, 0, count)]
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.where(inner, p * -np.expm1(np.where(inner, low - loss, 0.0)), 0.0)

    def sums(values: Array) -> Array:
        """Return the sums of values over each loss interval, and beyond the last."""
        return np.bincount(cell, values, count + 2).astype(float)

    terms = 4 * _EPS * (2 + sums(np.ones(len(p))))
    p_sums, q_sums, gaps = sums(p), sums(q), sums(gap)[1:-1]
    return LossCells(
        first,
        p_sums,
        q_sums,
        gaps,
        terms * p_sums,
        terms * q_sums,
        terms[1:-1] * np.abs(gaps),
        np.exp(-edges[:-1]),
        np.zeros(count + 1),  # each point is in the interval of the loss that it was given
    )


@lru_cache(maxsize=8)  # both directions use the same law
def _cached_sum_above(mu: float, bins: int, lattices: tuple[SumLattice, ...]) -> SumAbove:
    """Return, from a cache, upper bounds on the distribution of a sum of `bins` lognormals."""
    return lognormal_sum.sum_above(mu, bins, lattices)


@lru_cache(maxsize=64)
def _law_for_moments(mu: float, bins: int) -> SumAbove:
    """Return upper bounds on a lognormal sum's distribution, on a coarse grid for moments."""
    low, high = ratio_limits(mu, bins, _MOMENT_DEVIATIONS)
    spacing = _moment_spacing(mu, bins)
    lattices = choose_lattices(mu, bins, math.log(low), math.log(high), spacing, "small")
    # errors of transforms are less than what lies beyond the limits: no tilts are needed
    return lognormal_sum.sum_above(mu, bins, [replace(each, tilts=(0.0,)) for each in lattices])


def _moment_spacing(mu: float, bins: int) -> float:
    """Return the spacing of the grid of log R on which moments are computed."""
    deviation = math.sqrt(math.expm1(min(mu * mu, 30.0)) / bins)  # of R
    return min(_MOMENT_SPACING, _MOMENT_SHARE * deviation)


def _moments_above(mu: float, bins: int, tilts: Array) -> Array:
    """Return upper bounds on the loss's log-moments for a removed record, one per tilt."""
    law, powers = _law_for_moments(mu, bins), tilts + 1
    points, mass = np.concatenate([law.points, law.lows]), np.concatenate([law.mass, law.below])
    useful = (points > 0) & (mass > 0)
    terms = np.log(mass[useful]) + powers[:, None] * np.log(points[useful] / bins)
    above = [
        each.log_power_above(float(end), powers, fine=False) - powers * math.log(bins)
        for each, end in zip(law.classes, law.ends, strict=False)
    ]
    within: Array = np.logaddexp.reduce([log_sum_exp(terms), *above])  # may be infinite
    cut = float(law.ends[-1])
    share = min(lognormal_sum.tails_beyond(mu, cut)[0], 0.5)
    jumps = 0.5 * mu**2 * powers * tilts + log_normal_tail(
        math.log(cut) / mu + 0.5 * mu - powers * mu - 1e-9
    )
    jumps += (bins - 1) * np.logaddexp(
        0.0, math.log(share + _LEAST) + tilts * math.log(2)
    ) - tilts * math.log(bins)
    beside = within - bins * math.log1p(-share) + math.log(bins * share + _LEAST)
    beyond = powers * np.logaddexp(beside / powers, jumps / powers)
    return np.logaddexp(within, beyond) + _MOMENT_ROUNDING * (1 + powers)


def _moments_below(mu: float, bins: int, tilts: Array) -> Array:
    """Return upper bounds on the loss's log-moments for an added record, one per tilt."""
    law, least = _law_for_moments(mu, bins), ratio_limits(mu, bins, _MOMENT_DEVIATIONS)[0]
    ratio = np.concatenate([law.points, law.ends, np.zeros(1)]) / bins
    log_mass = np.log(np.concatenate([law.mass, law.beyond, [law.below.sum()]]) + _LEAST)
    capped = np.maximum(ratio, least)
    factor = np.log1p(tilts[:, None] * (1 - np.minimum(ratio / least, 1.0)))
    inside = log_sum_exp(log_mass - tilts[:, None] * np.log(capped) + factor)
    rest = 0.5 * (
        tilts * (2 * tilts / bins + 1) * mu**2
        + math.log(lognormal_sum.mass_below(law, least * bins) + _LEAST)
    )
    return np.logaddexp(inside, rest) + _MOMENT_ROUNDING * (1 + tilts)
