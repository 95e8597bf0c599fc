"""A Poisson-sampled Gaussian release of two datasets that differ in one replaced record.

Let z be the output in units of the noise's standard deviation, μ the clip norm in these units and q
the sample rate. The record contributes +μ in one dataset and −μ in the other:

    P = (1−q)·N(0) + q·N(μ)  against  Q = (1−q)·N(0) + q·N(−μ).

This pair dominates every other replacement, and two datasets attain it (docs/accountants/pld.md).
It is its own mirror image, so both directions have the same law. With n the standard normal
density, Λ± = ±μz − μ²/2 and A± = 1 − q + q·e^{Λ±}, the densities are n·A₊ and n·A₋. The privacy
loss is L = log(A₊/A₋), an odd and increasing function of z.

**Inverse.** With b = q·e^{−μ²/2}, e^L = (1−q + b·e^{μz})/(1−q + b·e^{−μz}) is a quadratic equation
in e^{μz − L/2}, with the solution μz = L/2 + asinh(((1−q)/b)·sinh(L/2)).

**Moments.** K(s) = E_P[e^{sL}] = ∫ n·A₊^{s+1}·A₋^{−s} dz. As ∫ n·A± = 1, the average of K − 1 and
its mirror image is an integral of one sign, which keeps all digits of a moment near 1:

    K − 1 = ½ ∫ n·A₋·(1 − e^{−sL})·(e^{(s+1)L} − 1) dz,

an even integrand: K − 1 is the integral over z > 0. It is the sum of four terms n·A₊^a·A₋^b.

*Quadrature.* The trapezoidal rule with spacing h. In the strip |Im z| ≤ y < π/μ each term is at
most e^{y²/2}·cos(μy/2)^{−s} times its value on the real line: |n| grows by e^{y²/2}, and |A±| lies
between cos(μy/2) and 1 times the value at the real part. The terms integrate to K or 1. So the
error is at most 2(K + 1)·e^{y²/2}·cos(μy/2)^{−s}/(e^{2πy/h} − 1) (Trefethen & Weideman, SIAM Review
56(3), 2014, Theorem 5.1).

*Truncation.* For z > 0 the integrand is at most n·G, G = A₊^{s+1}·A₋^{−s}. With
π± = q·e^{Λ±}/A± the slope of log G is μ·((s+1)·π₊ + s·π₋). π₋ decreases, so beyond a point z₁ > 0
the slope is at most κ = μ·(s + 1 + s·π₋(z₁)), and the rest is at most
G(z₁)·e^{κ²/2 − κz₁}·P(Z > z₁ − κ).

For the contour, as in `characteristic_function`:

* *Tilted law*: density n·A₊^{s+1}·A₋^{−s}/K.
* *Masses of cells.* log A₊ and log A₋ are convex. On a cell the exponent lies above the tangent of
  (s+1)·log A₊ in the middle and the chord of −s·log A₋.
* *Variation.* The density of L, in z, is f = n·A₊^{s+1}·A₋^{−s}/(μ(π₊ + π₋)), with (log f)′ =
  μ((s+1)π₊ + sπ₋) − z − μ·ρ·(1 − π₊ − π₋), ρ = (π₊ − π₋)/(π₊ + π₋). Cell by cell, f and |(log f)′|
  at their largest bound the variation ∫f·|(log f)′|. π₊ and ρ increase, and π₋ decreases. Left of
  −μ and right of m(1 + π₋(m)), m = μ(s+1), f decreases outwards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from accountant_service.numerics.floats import rounding
from accountant_service.numerics.floats.special_functions import (
    LOG_SQRT_TWO_PI,
    Array,
    lattice_points,
    log_normal_tail,
    log_sum_exp,
)
from accountant_service.numerics.laws.dominating_pair import (
    LOSS_MAX,
    Direction,
    LossCells,
    normal_masses,
)
from accountant_service.numerics.laws.sampled_gaussian import privacy_loss

_EPS: Final = float(np.finfo(float).eps)
_LOG_ERROR: Final = -80.0  # natural log of the quadrature's error relative to K + 1
_TAIL_DEVIATIONS: Final = 13.0  # integrated beyond the mode; the rest is bounded and added
_STRIP: Final = np.linspace(0.02, 0.98, 49)  # shares of the strip of analyticity that are tried
_ELEMENTS_MAX: Final = 1 << 20  # of one block of tilts × nodes (8 MiB)
_DIRECT_MAX: Final = 300.0  # exponents up to which e^x and sinh x are used as such


@dataclass(frozen=True, slots=True)
class ReplacedRecord:
    """A Poisson-sampled Gaussian release, for datasets that differ in one replaced record.

    Attributes:
        mu: the clip norm divided by the standard deviation of the noise.
        sample_rate: q in (0, 1).
    """

    mu: float
    sample_rate: float

    @property
    def is_symmetric(self) -> bool:
        """Return True: swapping the two datasets gives the same privacy-loss distribution."""
        return True

    def total_variation(self) -> float:
        """Return the sample rate times the total variation of N(μ, 1) and N(−μ, 1)."""
        return self.sample_rate * math.erf(self.mu / math.sqrt(2.0))

    def infinite_mass(self, direction: Direction) -> float:  # noqa: ARG002
        """Return 0: no loss is infinite, as both distributions have the same possible outcomes."""
        return 0.0

    def log_moments(self, direction: Direction, tilts: Array) -> Array:  # noqa: ARG002
        """Return upper bounds on the log-moments log E[e^{s·loss}], for each s > 0 in `tilts`."""
        return rounding.up_each(self._log_moments(tilts))

    def count_nodes(self, tilt: float) -> float:
        """Return the number of quadrature nodes that log-moments up to this tilt need."""
        return self.largest_node(tilt) / self.spacing(tilt)

    def _log_moments(self, tilts: Array) -> Array:
        """Return upper bounds on the log-moments, including quadrature and truncation errors."""
        upper = np.empty_like(tilts)
        order = np.argsort(tilts)
        block = max(1, int(_ELEMENTS_MAX / self.count_nodes(float(tilts.max()))))
        for start in range(0, len(tilts), block):
            chosen = order[start : start + block]
            upper[chosen] = self._log_moments_on_one_grid(tilts[chosen])
        return upper

    def _log_moments_on_one_grid(self, tilts: Array) -> Array:
        """Return the log-moments at increasing tilts, all with one quadrature's nodes."""
        spacing = self.spacing(float(tilts[-1]))
        last = self.largest_node(float(tilts[-1]))
        z = spacing * np.arange(1, math.ceil(last / spacing) + 1, dtype=float)
        loss = self.loss(z)
        log_density = -0.5 * z * z - LOG_SQRT_TWO_PI + math.log(spacing)
        exponent = log_density + self.log_ratio(-z) + _log_product_of_differences(tilts, loss)
        log_excess = log_sum_exp(exponent)  # log(K − 1)
        moment = np.logaddexp(0.0, log_excess)
        missing = np.logaddexp(
            self.log_tail(tilts, np.full_like(tilts, z[-1])),
            _LOG_ERROR + math.log(4) + np.logaddexp(moment, 0.0),
        )
        upper: Array = np.logaddexp(0.0, np.logaddexp(log_excess, missing))
        return upper

    def spacing(self, tilt: float, frequency: float = 0.0) -> float:
        """Return the widest trapezoidal spacing whose relative error is below e^`_LOG_ERROR`.

        Args:
            tilt: s.
            frequency: v; a moment of order s + iv also grows as e^{vθ}, θ of `argument_bound`.
        """
        y = np.minimum(math.pi / self.mu * _STRIP, 12.6)
        cost = 0.5 * y * y - tilt * np.log(np.cos(0.5 * self.mu * y))
        cost += frequency * self.argument_bound(y)
        return float(np.max(2 * math.pi * y / (cost - _LOG_ERROR)))

    def argument_bound(self, y: Array) -> Array:
        """Return, per y, an upper bound on |arg(P(z)/Q(z))| over complex outputs z with Im z = ±y.

        Each factor's argument is at most μy. A₊ and the conjugate of A₋ have the product
        e^{iμy}·(2(1−q)b·cosh(μx) + (1−q)²e^{−iμy} + b²e^{iμy}). Where b ≤ 1 − q the second
        factor has an imaginary part ≤ 0, so that both arguments together are at most μy.
        """
        rate = self.sample_rate
        factor = 1.0 if rate * math.exp(-0.5 * self.mu**2) <= 1 - rate else 2.0
        return factor * self.mu * y

    def largest_node(self, tilt: float) -> float:
        """Return the largest node z of the quadrature of log-moments up to this tilt.

        From μ(s + 1) on, the slope of log G is at most μ(s + 1 + s·π₋), π₋ taken there.
        """
        mode = self.mu * (tilt + 1)
        share = math.exp(min(float(self.log_share(np.array([-mode]))[0]), 0.0))
        return mode + self.mu * tilt * share + _TAIL_DEVIATIONS

    def log_tail(self, tilts: Array, ends: Array) -> Array:
        """Return, per tilt, the log of a bound on the moment's integral beyond the last node.

        The integral is ∫ n·A₊^{s+1}·A₋^{−s}, and every end z₁ is positive.
        """
        slope = self.mu * (tilts + 1 + tilts * np.exp(self.log_share(-ends)))
        growth = self.log_ratio(ends) + tilts * self.loss(ends)
        tail: Array = growth + slope * (0.5 * slope - ends) + log_normal_tail(ends - slope)
        return tail

    def log_ratio(self, z: Array) -> Array:
        """Return log(P(z)/N(z; 0, 1)) at each output z: density with the record over noise alone.

        It is log A₊(z), which is log A₋(−z).
        """
        return privacy_loss(self.mu * z - 0.5 * self.mu**2, self.sample_rate)

    def log_share(self, z: Array) -> Array:
        """Return log P(record was sampled | output z) at each output z.

        It is log π₊(z), which is log π₋(−z): π₊ = q·e^{Λ₊}/A₊.
        """
        ratio = self.mu * z - 0.5 * self.mu**2
        return -np.logaddexp(
            0.0, math.log1p(-self.sample_rate) - math.log(self.sample_rate) - ratio
        )

    def loss(self, z: Array) -> Array:
        """Return the privacy loss log(P(z)/Q(z)) at each output z.

        A₊ − A₋ = 2b·sinh(μz) keeps the digits of a small loss.
        """
        size = np.abs(z)
        exponent = np.minimum(self.mu * size, _DIRECT_MAX)
        rise = 2 * self.sample_rate * math.exp(-0.5 * self.mu**2) * np.sinh(exponent)
        least = self.log_ratio(-size)
        loss = np.where(
            self.mu * size < _DIRECT_MAX,
            np.log1p(rise * np.exp(-least)),
            np.maximum(self.log_ratio(size) - least, 0.0),
        )
        return np.copysign(loss, z)

    def loss_rounding(self, z: Array, loss: Array) -> Array:
        """Return upper bounds on the rounding errors of computed privacy losses.

        The relative error of e^{|L|} − 1 is a few eps of 1 + |μz| + μ², and its effect on L is at
        most 1 − e^{−|L|} times that. Large losses are differences of two logarithms.
        """
        size = self.mu * np.abs(z)
        relative = 8.0 + 2 * size + 2 * self.mu**2
        off = np.abs(loss) - np.expm1(-np.abs(loss)) * relative
        far = np.where(size < _DIRECT_MAX, 0.0, size + abs(math.log(self.sample_rate)))
        error: Array = 8 * _EPS * (off + far)
        return error

    def _output_at(self, loss: Array) -> Array:
        """Return the output z at which the privacy loss has each given value."""
        half = 0.5 * np.abs(loss)
        log_odds = math.log1p(-self.sample_rate) - math.log(self.sample_rate) + 0.5 * self.mu**2
        # sinh(x) = e^x·(1 − e^{−2x})/2; the inverse of a large argument x is log(2x)
        with np.errstate(divide="ignore"):
            log_argument = log_odds + half + np.log(-np.expm1(-2 * half)) - math.log(2)
        direct = np.arcsinh(np.exp(np.minimum(log_argument, _DIRECT_MAX)))
        inverse = np.where(log_argument < _DIRECT_MAX, direct, log_argument + math.log(2))
        return np.copysign((half + inverse) / self.mu, loss)

    def loss_limits(self, direction: Direction, tail_deviations: float) -> tuple[float, float]:  # noqa: ARG002
        """Return the least and greatest loss to cover; `tail_deviations` sets the mass left out.

        Outside, P has at most a normal tail beyond `tail_deviations` on either side.
        """
        ends = self.loss(np.array([-tail_deviations, self.mu + tail_deviations]))
        low, high = np.clip(ends, -LOSS_MAX, LOSS_MAX)
        return float(low), float(high)

    def cells(
        self,
        direction: Direction,  # noqa: ARG002
        first: int,
        count: int,
        spacing: float,
        offset: float = 0.0,
    ) -> LossCells:
        """Discretise the loss: return each interval's probability under both output distributions.

        The edges are (first + offset)·h, (first + 1 + offset)·h, … The gap P − Q·e^{loss} is
        q·(N(μ) − N(−μ)) − Q·(e^{loss} − 1).
        """
        edges = lattice_points(first, count + 1, spacing, offset)
        outputs = self._output_at(edges)
        at_outputs = self.loss(outputs)
        edge_error = np.abs(at_outputs - edges) + self.loss_rounding(outputs, at_outputs)
        z = np.concatenate([[-np.inf], outputs, [np.inf]])
        absent, absent_rounding = normal_masses(z, self.mu)
        plus, plus_rounding = normal_masses(z - self.mu, self.mu)
        minus, minus_rounding = normal_masses(z + self.mu, self.mu)
        q = self.sample_rate
        p, p_rounding = _mix(q, absent, plus, absent_rounding, plus_rounding)
        other, other_rounding = _mix(q, absent, minus, absent_rounding, minus_rounding)
        inner, rise = slice(1, -1), np.expm1(edges[:-1])
        difference = q * (plus - minus)[inner]
        fall = other[inner] * rise
        gap_rounding = (
            q * (plus_rounding + minus_rounding)[inner]
            + np.abs(rise) * other_rounding[inner]
            + 4 * _EPS * (np.abs(difference) + np.abs(fall))
        )
        return LossCells(
            first,
            p,
            other,
            difference - fall,
            p_rounding,
            other_rounding,
            gap_rounding,
            np.exp(-edges[:-1]),
            edge_error + 2 * _EPS * np.abs(edges),
        )


def _mix(
    rate: float, absent: Array, present: Array, absent_rounding: Array, present_rounding: Array
) -> tuple[Array, Array]:
    """Return the interval probabilities of a mixture of two distributions, and rounding errors."""
    mixed = (1 - rate) * absent + rate * present
    return mixed, (1 - rate) * absent_rounding + rate * present_rounding + 4 * _EPS * mixed


def _log_product_of_differences(tilts: Array, loss: Array) -> Array:
    """Return log((1 − e^{−sL})·(e^{(s+1)L} − 1)), for log-moments, per tilt s and loss L."""
    lower = np.multiply.outer(tilts, loss)
    upper = np.multiply.outer(tilts + 1, loss)
    with np.errstate(divide="ignore"):  # a loss that underflows adds nothing
        product: Array = upper + np.log(-np.expm1(-lower)) + np.log(-np.expm1(-upper))
    return product
