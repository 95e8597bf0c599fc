"""One release as a pair of distributions, cut into cells of its privacy loss.

A base pair (N₀, N₁) of noise without and with the record's contribution is described by the law
of Λ = log(dN₁/dN₀) under each. A sampled release is the mixture M = (1−q)·N₀ + q·N₁ against N₀;
its privacy loss is l = log(1 − q + q·e^Λ), an increasing function of Λ. The two directions of
add-or-remove are

    removing:  P = M,  Q = N₀, loss  l        adding:  P = N₀,  Q = M, loss −l,

dominating pairs for Poisson sampling (Zhu, Dong & Wang 2022, arXiv 2106.08567v4, Theorem 11).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Literal, Protocol, Self

import numpy as np
from scipy import special

from accountant_service.numerics.floats import rounding
from accountant_service.numerics.floats.special_functions import (
    Array,
    lattice_points,
    log_sum_exp,
)
from accountant_service.numerics.laws import sampled_gaussian

Direction = Literal["removing", "adding"]
DIRECTIONS: Final[tuple[Direction, Direction]] = ("removing", "adding")

LOSS_MAX: Final = 600.0
_MOMENT_CELLS: Final = 512  # for moments of a Laplace release
_UNDERFLOW: Final = 1e-300  # more than any mass that is computed as zero
_EPS: Final = float(np.finfo(float).eps)


@dataclass(frozen=True, slots=True)
class IntervalMasses:
    """Probabilities of intervals without and with the record, with bounds on rounding errors.

    Attributes:
        without_record, with_record: the probabilities.
        without_record_rounding, with_record_rounding: bounds on their errors.
        edge_error: an upper bound, for each edge or for all, on the distance from the edge of the
            ratio Λ at which the outcomes are divided.
    """

    without_record: Array
    with_record: Array
    without_record_rounding: Array
    with_record_rounding: Array
    edge_error: Array | float = 0.0

    @classmethod
    def with_relative_error(
        cls,
        relative_error: float,
        without_record: Array,
        with_record: Array,
        edge_error: float = 0.0,
    ) -> Self:
        """Return masses whose rounding errors are bounded by a relative error."""
        return cls(
            without_record,
            with_record,
            relative_error * without_record + _UNDERFLOW,
            relative_error * with_record + _UNDERFLOW,
            edge_error,
        )


class BasePair(Protocol):
    """Interface of a pair of output distributions without (N₀) and with (N₁) the record.

    They are N₀ and N₁, and the ratio is Λ = log(dN₁/dN₀).
    """

    def __hash__(self) -> int:
        """Return a hash, so that results for equal pairs can be cached."""
        ...

    @property
    def is_symmetric(self) -> bool:
        """Return whether adding a record costs as much as removing it, by a mirror symmetry."""
        ...

    @property
    def infinite_masses(self) -> tuple[float, float]:
        """The probabilities of outputs possible only without the record, and only with it."""
        ...

    def masses(self, edges: Array) -> IntervalMasses:
        """Return each log-likelihood-ratio interval's probability, without and with the record.

        The last of the edges −∞ begins the interval that holds Λ = −∞.
        """
        ...

    def limits(self, tail_deviations: float) -> tuple[float, float]:
        """Return limits of the log-likelihood ratio; `tail_deviations` sets the mass outside.

        Under both laws, at most the normal tail beyond `tail_deviations` standard deviations lies
        outside.
        """
        ...

    def log_moments(self, orders: Array, sample_rate: float) -> Array:
        """Return upper bounds on log E[e^{a·loss}] of outputs without the record, per order a.

        The log-moment of order a > 1 or a < 0 is log E_{N₀}[(1 − q + q·e^Λ)^a]. Outcomes
        at which the power is infinite are left out: see `ReleaseLaw.infinite_mass`.
        """
        ...

    def count_nodes(self, tilt: float) -> float:
        """Return how many points a log-moment at this `tilt` sums, which measures its cost."""
        ...

    def total_variation(self) -> float:
        """Return the total variation distance of the outputs without and with the record."""
        ...


@dataclass(frozen=True, slots=True)
class GaussianPair:
    """Gaussian noise without and with a record: normal distributions whose means are μ apart.

    μ is the sensitivity divided by the standard deviation of the noise. The log-likelihood ratio is
    N(∓μ²/2, μ²) without and with the record.
    """

    is_symmetric: ClassVar[bool] = True
    infinite_masses: ClassVar[tuple[float, float]] = (0.0, 0.0)
    mu: float

    def masses(self, edges: Array) -> IntervalMasses:
        """Return each log-likelihood-ratio interval's probability, without and with the record."""
        scaled = edges / self.mu
        without_record, without_record_rounding = normal_masses(scaled + self.mu / 2, self.mu)
        with_record, with_record_rounding = normal_masses(scaled - self.mu / 2, self.mu)
        return IntervalMasses(
            without_record, with_record, without_record_rounding, with_record_rounding
        )

    def limits(self, tail_deviations: float) -> tuple[float, float]:
        """Return limits of the log-likelihood ratio; `tail_deviations` sets the mass outside."""
        half = self.mu * self.mu / 2
        return -half - tail_deviations * self.mu, half + tail_deviations * self.mu

    def log_moments(self, orders: Array, sample_rate: float) -> Array:
        """Return upper bounds on log E[e^{a·loss}] of outputs without the record, per order a."""
        return sampled_gaussian.log_moments(orders, sample_rate, 1 / self.mu)

    def count_nodes(self, tilt: float) -> float:
        """Return how many points a log-moment at this `tilt` sums, which measures its cost."""
        return sampled_gaussian.count_nodes(-tilt, tilt + 1, 1 / self.mu)

    def total_variation(self) -> float:
        """Return the total variation distance of the two normal distributions."""
        return math.erf(self.mu / math.sqrt(8.0))


def normal_masses(z: Array, mu: float) -> tuple[Array, Array]:
    """Return normal probabilities between neighbouring points z, and their rounding errors.

    The points are ratios Λ/μ ± μ/2, whose own rounding errors are included. The probabilities are
    differences of tails, except around 0.
    """
    z = np.clip(z, -40.0, 40.0)  # beyond lies less than the least double
    tail = special.ndtr(-np.abs(z))
    magnitude = tail * (1 + z * z + mu * (1 + np.abs(z)))
    rounding = 8 * _EPS * np.maximum(magnitude[:-1], magnitude[1:]) + _UNDERFLOW
    mass = np.abs(tail[:-1] - tail[1:])
    around = (z[:-1] < 0) & (z[1:] > 0)
    mass[around] = 1 - (tail[:-1] + tail[1:])[around]
    rounding[around] += 2 * _EPS
    return mass, rounding


@dataclass(frozen=True, slots=True)
class LaplacePair:
    """Laplace noise of scale b without and with a record; the privacy loss is within ±1/b."""

    is_symmetric: ClassVar[bool] = True
    infinite_masses: ClassVar[tuple[float, float]] = (0.0, 0.0)
    inverse_scale: float

    def masses(self, edges: Array) -> IntervalMasses:
        """Return each log-likelihood-ratio interval's probability, without and with the record."""
        bound = self.inverse_scale
        low, high = edges[:-1], edges[1:]
        start, end = np.clip(low, -bound, bound), np.clip(high, -bound, bound)
        within = -0.5 * np.expm1(-0.5 * (end - start))  # times e^{−distance/2} to the near atom
        bottom = 0.5 * ((low < -bound) & (high >= -bound))
        top = 0.5 * ((low < bound) & (high >= bound))
        far = math.exp(-bound)
        without_record = within * np.exp(-0.5 * (start + bound)) + bottom + far * top
        with_record = within * np.exp(-0.5 * (bound - end)) + top + far * bottom
        return IntervalMasses.with_relative_error(8 * _EPS, without_record, with_record)

    def limits(self, tail_deviations: float) -> tuple[float, float]:  # noqa: ARG002
        """Return the least and the greatest log-likelihood ratio: −1/b and 1/b."""
        return -self.inverse_scale, self.inverse_scale

    def log_moments(self, orders: Array, sample_rate: float) -> Array:
        """Return upper bounds on log E[e^{a·loss}] of outputs without the record, per order a.

        Each interval's mass counts at the worse of its two ends.
        """
        edges = np.linspace(-self.inverse_scale, self.inverse_scale, _MOMENT_CELLS + 1)
        below = np.nextafter(edges[0], -np.inf)
        mass = self.masses(
            np.concatenate([[below], edges])
        ).without_record  # the first is the lower atom
        growth = sampled_gaussian.privacy_loss(edges, sample_rate)
        ends = np.stack([np.append(growth[0], growth[:-1]), growth])
        exponent = (orders[:, None, None] * ends).max(axis=1) + np.log(mass + _UNDERFLOW)
        return np.maximum(log_sum_exp(exponent), 0.0)

    def count_nodes(self, tilt: float) -> float:  # noqa: ARG002
        """Return how many loss intervals a log-moment sums, which measures its cost."""
        return float(_MOMENT_CELLS)

    def total_variation(self) -> float:
        """Return the total variation distance of the two Laplace distributions."""
        return -math.expm1(-self.inverse_scale / 2)


def moments_of_cells(
    edges: Array, masses: IntervalMasses, orders: Array, sample_rate: float
) -> Array:
    """Return upper bounds on log E[e^{a·loss}], per order a, from probabilities of intervals.

    R^a is convex in R, so each cell's mass moves to its two ends with the mean of R kept. The share
    of the upper end does not depend on q.

    Args:
        edges: of the cells of Λ, which hold all the mass.
        masses: of the cells.
        orders: a > 1 or a < 0.
        sample_rate: q.
    """
    mass = masses.without_record + masses.without_record_rounding
    excess = masses.with_record - mass * np.exp(edges[:-1])
    upward = excess / (mass * np.exp(edges[:-1]) * np.expm1(np.diff(edges)))
    losses = sampled_gaussian.privacy_loss(edges, sample_rate)
    ends = np.concatenate([losses[:-1], losses[1:]])
    moments = np.empty_like(orders)
    for rising in (True, False):  # the share is rounded towards the greater power
        chosen = (orders > 0) == rising
        share = np.clip(upward + (1e-9 if rising else -1e-9), 0.0, 1.0)
        with np.errstate(divide="ignore"):
            log_mass = np.log(np.concatenate([mass * (1 - share), mass * share]))
        moments[chosen] = log_sum_exp(np.multiply.outer(orders[chosen], ends) + log_mass)
    upper: Array = np.maximum(moments + 1e-12, 0.0)
    return upper


@dataclass(frozen=True, slots=True)
class LossCells:
    """Intervals of a release's privacy loss, with their probabilities under the pair (P, Q).

    Attributes:
        first: lattice index k of the lowest edge: finite edges are k·h, (k+1)·h, …
        p: P-mass of: all below the first edge, each cell, all above the last edge.
        q: Q-mass of the same.
        gap: P − Q·e^{low edge} of each inner cell, computed without cancellation.
        p_rounding, q_rounding: bounds on the floating-point error of each mass.
        gap_rounding: the same for `gap`.
        shrink: e^{−l} at the edge the gap was taken at.
        edge_error: an upper bound for each edge: the outcomes are divided at a loss that is at most
            this far from it. A lower bound on δ does not need it, as any event is an attack.
        infinite: the part of the last of `p` that Q excludes for certain, rounded down.
    """

    first: int
    p: Array
    q: Array
    gap: Array
    p_rounding: Array
    q_rounding: Array
    gap_rounding: Array
    shrink: Array
    edge_error: Array
    infinite: float = 0.0

    def reversed(self, infinite: float = 0.0) -> LossCells:
        """Swap P and Q, negate all losses: turn removing a record into adding it, or back.

        `infinite` is the mass of infinite loss in that direction.
        """
        back = slice(None, None, -1)
        return LossCells(
            self.first,
            self.q[back],
            self.p[back],
            (-self.gap * self.shrink)[back],
            self.q_rounding[back],
            self.p_rounding[back],
            (self.gap_rounding * self.shrink)[back],
            (1 / self.shrink)[back],
            self.edge_error[back],
            infinite,
        )


class ReleaseLaw(Protocol):
    """Interface of the dominating pair (P, Q) of one release: moments and discretisation."""

    def __hash__(self) -> int:
        """Return a hash, so that results of equal releases are cached."""
        ...

    @property
    def is_symmetric(self) -> bool:
        """Return whether removing and adding a record give the same privacy-loss distribution."""
        ...

    def total_variation(self) -> float:
        """Return the total variation distance of the two output distributions."""
        ...

    def infinite_mass(self, direction: Direction) -> float:
        """Return the probability of an infinite privacy loss, rounded up."""
        ...

    def log_moments(self, direction: Direction, tilts: Array) -> Array:
        """Return upper bounds on the log-moments log E[e^{s·loss}], for each s > 0 in `tilts`.

        Outcomes with an infinite loss are left out.
        """
        ...

    def count_nodes(self, tilt: float) -> float:
        """Return how many points a log-moment at this `tilt` sums, which measures its cost."""
        ...

    def loss_limits(self, direction: Direction, tail_deviations: float) -> tuple[float, float]:
        """Return the least and greatest loss to cover; `tail_deviations` sets the mass left out.

        Outside, P has at most the normal tail beyond `tail_deviations` standard deviations.
        """
        ...

    def cells(
        self, direction: Direction, first: int, count: int, spacing: float, offset: float = 0.0
    ) -> LossCells:
        """Discretise the loss: return each interval's probability under both output distributions.

        With an offset of 0 the masses are for upper bounds of δ, and may be those of a pair that
        dominates the release. With an offset of ½ they are for lower bounds, and may be bounds of
        what an attacker observes. A law that is known exactly gives the same for both.
        """
        ...


@dataclass(frozen=True, slots=True)
class Release:
    """A release on a Poisson sample: its pair of output distributions, and the sample rate.

    Its two directions are the removal and the addition of a record.
    """

    base_pair: BasePair
    sample_rate: float = 1.0

    @property
    def is_symmetric(self) -> bool:
        """Return whether removing and adding a record give the same privacy-loss distribution.

        Sampling breaks the symmetry.
        """
        return self.sample_rate == 1.0 and self.base_pair.is_symmetric

    def total_variation(self) -> float:
        """Return the sample rate times the total variation distance without sampling."""
        return self.sample_rate * self.base_pair.total_variation()

    def infinite_mass(self, direction: Direction) -> float:
        """Return the probability of an infinite privacy loss, rounded up.

        When adding, the sample may leave the record out, so that Q excludes nothing.
        """
        return rounding.up(self._infinite_mass(direction))

    def _infinite_mass(self, direction: Direction) -> float:
        """Return the probability of an infinite privacy loss, before it is rounded up."""
        without_record, with_record = self.base_pair.infinite_masses
        if direction == "removing":
            return self.sample_rate * with_record
        return without_record if self.sample_rate == 1.0 else 0.0

    def log_moments(self, direction: Direction, tilts: Array) -> Array:
        """Return upper bounds on the log-moments log E[e^{s·loss}], for each s > 0 in `tilts`."""
        orders = tilts + 1 if direction == "removing" else -tilts
        return rounding.up_each(self.base_pair.log_moments(orders, self.sample_rate))

    def count_nodes(self, tilt: float) -> float:
        """Return how many points a log-moment at this `tilt` sums, which measures its cost."""
        return self.base_pair.count_nodes(tilt)

    def loss_limits(self, direction: Direction, tail_deviations: float) -> tuple[float, float]:
        """Return the least and greatest loss to cover; `tail_deviations` sets the mass left out.

        Outside, P has at most a normal tail on either side.

        That is the tail beyond `tail_deviations` standard deviations. The losses never exceed
        ±`LOSS_MAX`, where e^loss nears the end of double precision: an outcome with a greater loss
        counts as infinite.
        """
        ends = np.clip(
            self.loss(np.asarray(self.base_pair.limits(tail_deviations))), -LOSS_MAX, LOSS_MAX
        )
        low, high = float(ends[0]), float(ends[1])
        return (low, high) if direction == "removing" else (-high, -low)

    def cells(
        self, direction: Direction, first: int, count: int, spacing: float, offset: float = 0.0
    ) -> LossCells:
        """Discretise the loss: return each interval's probability under both output distributions.

        The edges are (first + offset)·h, (first + 1 + offset)·h, …
        """
        if direction == "removing":
            edges = lattice_points(first, count + 1, spacing, offset)
            return self._cells(first, edges, edges[:-1])
        edges = lattice_points(-first - count, count + 1, spacing, -offset)
        infinite = rounding.down(self._infinite_mass("adding"))
        return self._cells(first, edges, edges[1:]).reversed(infinite)

    def _cells(self, first: int, edges: Array, anchor: Array) -> LossCells:
        """Return each loss interval's probability under both distributions, for a removed record.

        `anchor` is each cell's edge of lower loss. The gap P − Q·e^{loss} is
        q·(N₁ − N₀) − N₀·(e^l − 1) when removing and, when adding, minus that times e^{−l}:
        `reversed` supplies the sign and the factor.
        """
        log_ratios = self._log_ratio_at(edges)
        masses = self.base_pair.masses(np.concatenate([[-np.inf], log_ratios, [np.inf]]))
        edge_error = np.broadcast_to(masses.edge_error, len(edges) + 2)[1:-1]  # dl ≤ dΛ
        edge_error = edge_error + self._inverse_error(edges, log_ratios)
        q = self.sample_rate
        mixed = (1 - q) * masses.without_record + q * masses.with_record
        mixed_rounding = (
            (1 - q) * masses.without_record_rounding
            + q * masses.with_record_rounding
            + 4 * _EPS * mixed
        )
        is_certain = getattr(self.base_pair, "infinite_is_certain", True)
        inner, rise = slice(1, -1), np.expm1(anchor)
        difference = q * (masses.with_record - masses.without_record)[inner]
        fall = masses.without_record[inner] * rise
        gap_rounding = (
            q * masses.with_record_rounding[inner]
            + (q + np.abs(rise)) * masses.without_record_rounding[inner]
            + 4 * _EPS * (np.abs(difference) + np.abs(fall))
        )
        return LossCells(
            first,
            mixed,
            masses.without_record,
            difference - fall,
            mixed_rounding,
            masses.without_record_rounding,
            gap_rounding,
            np.exp(-anchor),
            edge_error,
            rounding.down(self._infinite_mass("removing")) if is_certain else 0.0,
        )

    def loss(self, log_ratio: Array) -> Array:
        """Return the privacy loss log(1 − q + q·e^Λ), sample rate q, per log-likelihood ratio Λ."""
        return sampled_gaussian.privacy_loss(log_ratio, self.sample_rate)

    def _log_ratio_at(self, loss: Array) -> Array:
        """Return about the log-likelihood ratio at each privacy loss; −∞ if no loss is that low.

        It is log((e^l − (1 − q))/q). Each range of losses has the form that loses no digits there.
        """
        q = self.sample_rate
        if q == 1.0:
            return loss
        with np.errstate(divide="ignore"):
            middle = np.log1p(np.maximum(np.expm1(np.minimum(loss, 1.0)) / q, -1.0))
            high = loss + np.log1p(-(1 - q) * np.exp(-np.maximum(loss, 1.0))) - math.log(q)
            found = np.where(loss > 1.0, high, middle)
            if q <= 0.5:  # then no loss is below −log 2
                return found
            low = np.log(np.maximum(np.exp(np.minimum(loss, 0.0)) - (1 - q), 0.0) / q)
        return np.where(loss < -0.5, low, found)

    def _inverse_error(self, loss: Array, log_ratio: Array) -> Array:
        """Return upper bounds on the errors of lattice points and of their computed inverses.

        They are distances of losses. However a ratio was computed, its loss is at most this far
        from the lattice point.
        """
        lowest = math.log1p(-self.sample_rate) if self.sample_rate < 1.0 else -math.inf
        distance = np.abs(self.loss(log_ratio) - np.maximum(loss, lowest))
        error: Array = distance + sampled_gaussian.loss_error(loss, log_ratio, self.sample_rate)
        return error + 2 * _EPS * np.abs(loss)


Composition = Sequence[tuple[ReleaseLaw, int]]  # different releases with their counts


def distinct_directions(releases: Composition) -> tuple[Direction, ...]:
    """Return the directions, record removed or added, to account for: one if both cost the same."""
    return DIRECTIONS[:1] if all(each.is_symmetric for each, _ in releases) else DIRECTIONS


def infinite_mass(releases: Composition, direction: Direction) -> float:
    """Return an upper bound on a composition's probability of an infinite privacy loss.

    It is 1 − Π(1 − m)ⁿ for the masses m of the releases and their counts n.
    """
    masses = ((each.infinite_mass(direction), count) for each, count in releases)
    log_finite = math.fsum(n * math.log1p(-m) if m < 1 else -math.inf for m, n in masses if m > 0)
    return rounding.up(-math.expm1(log_finite))


def total_variation(releases: Composition) -> float:
    """Return an upper bound on δ(0): 1 − Π(1 − d)ⁿ for distances d of releases with counts n.

    A release's two outputs can be drawn so that they are equal with probability 1 − d, given that
    those before were. All are then equal with probability Π(1 − d)ⁿ. On a Poisson sample of rate q,
    d is at most q.
    """
    distances = ((min(each.total_variation(), 1.0), count) for each, count in releases)
    log_equal = math.fsum(n * math.log1p(-d) if d < 1 else -math.inf for d, n in distances)
    return min(1.0, rounding.up(-math.expm1(log_equal)))
