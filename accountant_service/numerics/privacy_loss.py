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
from typing import Final, Literal, Protocol

import numpy as np
from scipy import special

from accountant_service.numerics import rounding, sampled_gaussian
from accountant_service.numerics.special import Array, lattice, log_sum_exp, normal_interval

Direction = Literal["removing", "adding"]
DIRECTIONS: Final[tuple[Direction, Direction]] = ("removing", "adding")

LOSS_MAX: Final = 600.0
_MOMENT_CELLS: Final = 512  # for moments of a Laplace release
_UNDERFLOW: Final = 1e-300  # more than any mass that is computed as zero
_EPS: Final = float(np.finfo(float).eps)


@dataclass(frozen=True, slots=True)
class Masses:
    """Masses of intervals under N₀ and N₁, each with a bound on its rounding error."""

    zero: Array
    one: Array
    zero_rounding: Array
    one_rounding: Array


class Ratio(Protocol):
    """The law of Λ = log(dN₁/dN₀) under N₀ and N₁."""

    def masses(self, edges: Array) -> Masses:
        """The N₀- and N₁-mass of each interval (edge, next edge]."""
        ...

    def limits(self, reach: float) -> tuple[float, float]:
        """An interval of Λ outside which both laws have at most the normal tail of `reach`."""
        ...

    def log_moments(self, orders: Array, sample_rate: float) -> Array:
        """Upper bounds of log E_{N₀}[(1 − q + q·e^Λ)^a], for each order a > 1 or a < 0."""
        ...

    def nodes_needed(self, tilt: float) -> float:
        """How many terms a moment of order up to ±(tilt + 1) sums."""
        ...

    def total_variation(self) -> float:
        """The total variation distance of N₀ and N₁."""
        ...


@dataclass(frozen=True, slots=True)
class GaussianRatio:
    """Λ of a Gaussian shift: N(∓μ²/2, μ²) under N₀ and N₁, with μ = sensitivity / deviation."""

    mu: float

    def masses(self, edges: Array) -> Masses:
        """See `Ratio.masses`."""
        scaled = edges / self.mu
        zero, zero_rounding = _normal_masses(scaled + self.mu / 2, self.mu)
        one, one_rounding = _normal_masses(scaled - self.mu / 2, self.mu)
        return Masses(zero, one, zero_rounding, one_rounding)

    def limits(self, reach: float) -> tuple[float, float]:
        """See `Ratio.limits`."""
        half = self.mu * self.mu / 2
        return -half - reach * self.mu, half + reach * self.mu

    def log_moments(self, orders: Array, sample_rate: float) -> Array:
        """See `Ratio.log_moments`."""
        return sampled_gaussian.log_moments(orders, sample_rate, 1 / self.mu)

    def nodes_needed(self, tilt: float) -> float:
        """See `Ratio.nodes_needed`."""
        return sampled_gaussian.nodes_needed(-tilt, tilt + 1, 1 / self.mu)

    def total_variation(self) -> float:
        """See `Ratio.total_variation`."""
        return math.erf(self.mu / math.sqrt(8.0))


def _normal_masses(z: Array, mu: float) -> tuple[Array, Array]:
    """Standard normal masses between neighbouring z = x ± μ/2, and their rounding."""
    z = np.clip(z, -40.0, 40.0)  # beyond lies less than the least double
    magnitude = special.ndtr(-np.abs(z)) * (1 + z * z + mu * (1 + np.abs(z)))
    rounding = 8 * _EPS * np.maximum(magnitude[:-1], magnitude[1:]) + _UNDERFLOW
    return normal_interval(z[:-1], z[1:]), rounding


@dataclass(frozen=True, slots=True)
class LaplaceRatio:
    """Λ of a Laplace shift by one sensitivity: within ±1/b, with an atom at either end."""

    inverse_scale: float

    def masses(self, edges: Array) -> Masses:
        """See `Ratio.masses`."""
        bound = self.inverse_scale
        low, high = edges[:-1], edges[1:]
        start, end = np.clip(low, -bound, bound), np.clip(high, -bound, bound)
        within = -0.5 * np.expm1(-0.5 * (end - start))  # times e^{−distance/2} to the near atom
        bottom = 0.5 * ((low < -bound) & (high >= -bound))
        top = 0.5 * ((low < bound) & (high >= bound))
        far = math.exp(-bound)
        zero = within * np.exp(-0.5 * (start + bound)) + bottom + far * top
        one = within * np.exp(-0.5 * (bound - end)) + top + far * bottom
        return Masses(zero, one, 8 * _EPS * zero + _UNDERFLOW, 8 * _EPS * one + _UNDERFLOW)

    def limits(self, reach: float) -> tuple[float, float]:  # noqa: ARG002
        """See `Ratio.limits`: the whole support."""
        return -self.inverse_scale, self.inverse_scale

    def log_moments(self, orders: Array, sample_rate: float) -> Array:
        """See `Ratio.log_moments`: every outcome of a cell at the worse of its two ends."""
        edges = np.linspace(-self.inverse_scale, self.inverse_scale, _MOMENT_CELLS + 1)
        below = np.nextafter(edges[0], -np.inf)
        mass = self.masses(np.concatenate([[below], edges])).zero  # the first is the lower atom
        growth = sampled_gaussian.privacy_loss(edges, sample_rate)
        ends = np.stack([np.append(growth[0], growth[:-1]), growth])
        exponent = (orders[:, None, None] * ends).max(axis=1) + np.log(mass + _UNDERFLOW)
        return np.maximum(log_sum_exp(exponent), 0.0)

    def nodes_needed(self, tilt: float) -> float:  # noqa: ARG002
        """See `Ratio.nodes_needed`."""
        return float(_MOMENT_CELLS)

    def total_variation(self) -> float:
        """See `Ratio.total_variation`."""
        return -math.expm1(-self.inverse_scale / 2)


@dataclass(frozen=True, slots=True)
class Cells:
    """A release's outcomes grouped by privacy loss, in order of increasing loss.

    Attributes:
        first: lattice index k of the lowest edge: finite edges are k·h, (k+1)·h, …
        p: P-mass of: all below the first edge, each cell, all above the last edge.
        q: Q-mass of the same.
        gap: P − Q·e^{low edge} of each inner cell, computed without cancellation.
        p_rounding, q_rounding: bounds on the floating-point error of each mass.
        gap_rounding: the same for `gap`.
        shrink: e^{−l} at the edge the gap was taken at.
    """

    first: int
    p: Array
    q: Array
    gap: Array
    p_rounding: Array
    q_rounding: Array
    gap_rounding: Array
    shrink: Array

    def reversed(self) -> Cells:
        """The other direction: P and Q swapped, every loss negated."""
        back = slice(None, None, -1)
        return Cells(
            self.first,
            self.q[back],
            self.p[back],
            (-self.gap * self.shrink)[back],
            self.q_rounding[back],
            self.p_rounding[back],
            (self.gap_rounding * self.shrink)[back],
            (1 / self.shrink)[back],
        )


@dataclass(frozen=True, slots=True)
class Release:
    """One release: a base pair and the rate of Poisson sampling in front of it."""

    ratio: Ratio
    sample_rate: float = 1.0

    def log_moments(self, direction: Direction, tilts: Array) -> Array:
        """Upper bounds of log E_P[e^{s·loss}], for each tilt s > 0."""
        orders = tilts + 1 if direction == "removing" else -tilts
        return rounding.up_each(self.ratio.log_moments(orders, self.sample_rate))

    def nodes_needed(self, tilt: float) -> float:
        """How much work a moment at this tilt is, whatever the direction."""
        return self.ratio.nodes_needed(tilt)

    def loss_limits(self, direction: Direction, reach: float) -> tuple[float, float]:
        """The losses outside which P has at most the normal tail of `reach`, on either side.

        Never beyond ±`LOSS_MAX`, where e^loss nears the end of double precision: an outcome with
        a greater loss counts as infinite.
        """
        ends = np.clip(self.loss(np.asarray(self.ratio.limits(reach))), -LOSS_MAX, LOSS_MAX)
        low, high = float(ends[0]), float(ends[1])
        return (low, high) if direction == "removing" else (-high, -low)

    def cells(
        self, direction: Direction, first: int, count: int, spacing: float, offset: float = 0.0
    ) -> Cells:
        """Cut at `count` + 1 edges (first + offset)·h, …, with all beyond in two end cells."""
        if direction == "removing":
            edges = lattice(first, count + 1, spacing, offset)
            return self._cells(first, edges, edges[:-1])
        edges = lattice(-first - count, count + 1, spacing, -offset)
        return self._cells(first, edges, edges[1:]).reversed()

    def _cells(self, first: int, edges: Array, anchor: Array) -> Cells:
        """Cells between `edges` of l, seen from P = M; `anchor` is each cell's edge of lower loss.

        The gap P − Q·e^{loss} is q·(N₁ − N₀) − N₀·(e^l − 1) when removing and, when adding,
        minus that times e^{−l}: `reversed` supplies the sign and the factor.
        """
        cuts = np.concatenate([[-np.inf], self._ratio_at(edges), [np.inf]])
        of, q = self.ratio.masses(cuts), self.sample_rate
        mixed = (1 - q) * of.zero + q * of.one
        mixed_rounding = (1 - q) * of.zero_rounding + q * of.one_rounding + 4 * _EPS * mixed
        inner, rise = slice(1, -1), np.expm1(anchor)
        difference, fall = q * (of.one - of.zero)[inner], of.zero[inner] * rise
        gap_rounding = (
            q * of.one_rounding[inner]
            + (q + np.abs(rise)) * of.zero_rounding[inner]
            + 4 * _EPS * (np.abs(difference) + np.abs(fall))
        )
        return Cells(
            first,
            mixed,
            of.zero,
            difference - fall,
            mixed_rounding,
            of.zero_rounding,
            gap_rounding,
            np.exp(-anchor),
        )

    def loss(self, ratio: Array) -> Array:
        """l = log(1 − q + q·e^Λ)."""
        return sampled_gaussian.privacy_loss(ratio, self.sample_rate)

    def _ratio_at(self, loss: Array) -> Array:
        """Λ = log(1 + (e^l − 1)/q), −∞ where no Λ has so small a loss."""
        if self.sample_rate == 1.0:
            return loss
        capped = np.minimum(loss, 500.0)
        relative = np.maximum(np.expm1(capped) / self.sample_rate, -1.0)
        with np.errstate(divide="ignore"):
            return np.log1p(relative) + (loss - capped)


Composition = Sequence[tuple[Release, int]]  # different releases with their counts


def total_variation(releases: Composition) -> float:
    """An upper bound of δ(0): the sum of the releases' total variations, at most 1.

    That of a sampled release is q times that of its base pair.
    """
    total = math.fsum(n * each.sample_rate * each.ratio.total_variation() for each, n in releases)
    return min(1.0, rounding.up(total))
