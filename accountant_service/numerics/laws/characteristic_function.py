"""The characteristic function of one release's tilted privacy loss, with its error and its decay.

A Poisson-sampled Gaussian release has, with z standard normal and Λ = μz − μ²/2, the privacy loss
l = log(1 − q + q·e^Λ) when the record is removed (the outcome then has density n(z)·e^l) and −l
when it is added (density n(z)). With the matching sign of the loss both are one integral of a
complex order: E[e^{(s+iv)·loss}] = K(a), a = s + 1 + iv or a = −s − iv,

    K(a) = ∫ n(z)·e^{a·l(z)} dz.

The law whose density is n(z)·e^{Re(a)·l(z)}/K(Re a) is the tilted one; φ(v) is its loss's
characteristic function. The engine `line_integral` integrates products of such φ. It needs values,
a bound on their error, and a bound on |φ| at all frequencies that are not evaluated.

**Decay.** Frequencies beyond V are bounded block by block. Two bounds of |φ| are used, the smaller
on each:

* *Pairs.* 1 − |φ(v)|² = E[1 − cos v(l − l′)] for two independent draws. Cut the line of z into
  cells, with mⱼ a lower bound of the tilted mass of cell j; the losses of two cells differ by at
  least d and at most D, as l increases. Pairs with vD ≤ 2 count x²/2 − x⁴/24 ≤ 1 − cos x at x = vd;
  pairs with vd ≥ 2 and vD ≤ 2π − 2 count 1 − cos 2; all others count nothing. Then |φ|² ≤ 1 − 2Σ
  mⱼmₖ(1 − cos); a block takes v at its low end for d and at its high end for D. *Masses.* On a cell
  the exponent −z²/2 + a·l(z) lies above a linear function with the value −(z₁² + z₂²)/4 +
  a·l(middle) in the middle if a > 0 (tangent: l is convex), or −(z₁² + z₂²)/4 + a·(l(z₁) + l(z₂))/2
  if a < 0 (chord); by Jensen the mean of its exponential is at least that of its middle.
* *Variation.* A measure on the line of losses whose density f has variation B and total mass m has
  |∫e^{ivl}f| ≤ B/v. Applied to the part of the tilted law above a loss, the rest counting fully:
  |φ(v)| ≤ 1 − (m − B/v). In z the density of the loss is f = n·e^{a·l}/(μπ), π = l′/μ the logistic
  function, and (log f)′ = (a+1)μπ − z − μ: a logistic function less a line, with at most three
  zeros. So f has at most two modes (one, unless the function is negative at its local minimum and
  positive at its local maximum) and B ≤ 2·modes·max f, cut or not. The maximum is bounded cell by
  cell; outside the cells f decreases outwards.

**Values of φ.** The trapezoidal rule in z. In the strip |Im z| ≤ y < π/μ the integrand is analytic
and at most e^{y²/2}·e^{vμy}·cos(μy/2)^{min(a,0)} times its value on the real line: |e^{−z²/2}|
grows by e^{y²/2}; the argument of 1 − q + q·e^{Λ+iμy} lies between 0 and μy, so |(…)^{iv}| ≤
e^{vμy}; its modulus lies between cos(μy/2) and 1 times the real one. By Trefethen and Weideman
(SIAM Review 56(3), 2014, Theorem 5.1) the error is at most 2Me^{−2πy/κ}/(1 − e^{−2πy/κ}); the
spacing κ makes it e^{−44} of K. Beyond the limits of integration see `sampled_gaussian`. φ − 1 is
summed, with e^{ivl} − 1 = −2 sin²(vl/2) + i·sin(vl), so that T of them keep their accuracy. Errors
e of φ enter the product by |(φ+e)^T − φ^T| ≤ (|φ|+|e|)^T − |φ|^T. A computed Φ outside the unit
disc is moved onto it, nearer to the true Φ. Added outward: the relative error of every weight (a
few eps of its exponent, and a·π·δΛ), of every loss (a few eps of itself and of Λ), of the dot
products (eps a term), of log M(s), of phases (eps·v·ε), of the kernel, where |Φ'G' − ΦG| ≤ |Φ' −
Φ|·|G'| + |Φ|·|G' − G|, and of the sum.

**The moment.** log M(s) counts T times. Where M is near 1 it is computed as log(1 + ∫ n·(e^{al} −
1)), so that every rounding error is relative to |e^{al} − 1|, which is of order q. The normal
density integrates to 1, in the trapezoidal rule up to 2e^{−2π²/κ²}. The nodes are multiples of a
spacing of 24 bits, so that they are not rounded. Beyond the node where all windows have closed,
e^{al} counts as 0 and n goes on. Of the two ways to compute M the one with the smaller bound of its
error is taken.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Protocol

import numpy as np

from accountant_service.numerics.errors import SlowDecayError
from accountant_service.numerics.floats import rounding
from accountant_service.numerics.floats.special_functions import (
    LOG_SQRT_TWO_PI,
    Array,
    ComplexArray,
    log1p_complex,
    log_normal_tail,
)
from accountant_service.numerics.laws import sampled_gaussian
from accountant_service.numerics.laws.dominating_pair import (
    Direction,
    GaussianPair,
    Release,
    ReleaseLaw,
)
from accountant_service.numerics.laws.replaced_record import ReplacedRecord
from accountant_service.numerics.time_limit import check_time

_EPS: Final = float(np.finfo(float).eps)
_LOG_ERROR: Final = -44.0  # natural log of the quadrature's error relative to K
_SPAN: Final = 7.0  # standard deviations beyond the modes that the cells of the decay cover
_CELLS_MIN: Final = 64
_CELLS_MAX: Final = 160
_WEIGHT_MIN: Final = 1e-25  # nodes of less weight are left out, and counted as an error
_TAIL_DEVIATIONS: Final = 13.0  # integrated below 0, where the normal density decides
_CHUNK: Final = 64  # nodes of a dot product
_ELEMENTS_MAX: Final = 1 << 18  # of a block of frequencies × nodes (2 MiB)
_MISSING_MAX: Final = 1e-6  # of K, that the limits of integration may leave out
_NEAR_GROWTH: Final = 30.0  # below it e^x − 1 is computed as such, above it as a difference
_SMALL_MOMENT: Final = 0.5  # of log K(a), up to which K(a) − 1 is summed by itself
_SUM_ROUNDING: Final = 40 * _EPS  # of numpy's pairwise sums, with room
_NORMAL_TAILS: Final = 1e-37  # more than both normal tails beyond 13 standard deviations
_STRIP: Final = np.linspace(0.02, 0.98, 49)  # shares of the strip of analyticity that are tried


@dataclass(frozen=True, slots=True)
class CharacteristicValues:
    """Values of a characteristic function φ and a log-moment, with bounds on their errors.

    Attributes:
        log_value: log φ, complex, one for each frequency.
        error: bound on |computed φ − φ|.
        log_moment: log E[e^{s·loss}].
        moment_error: bound on its error.
    """

    log_value: ComplexArray
    error: Array
    log_moment: float
    moment_error: float


class TiltedLoss(Protocol):
    """Interface of a release's exponentially tilted privacy loss and its characteristic function.

    The tilted law weights each outcome by e^{s·loss}, s the tilt, and divides by the mean weight.
    Decay is how |φ(v)| falls with the frequency v.
    """

    @property
    def standard_deviation(self) -> float:
        """Return an estimate of the standard deviation of the tilted privacy loss."""
        ...

    def log_decay(self, low: Array, high: Array) -> Array:
        """Bound log|φ| from above on each frequency range; φ is the characteristic function.

        There is one for each range of frequencies v.
        """
        ...

    def log_decay_beyond(self, frequency: float) -> float:
        """Return an upper bound on log|φ| beyond a frequency; φ is the characteristic function."""
        ...

    def count_nodes(self, frequency: float) -> float:
        """Return how many quadrature nodes the characteristic function needs up to a frequency."""
        ...

    def characteristic(self, frequencies: Array) -> CharacteristicValues:
        """Return the characteristic function at increasing `frequencies`, and the log-moment.

        The log-moment is log E[e^{s·loss}] without tilting.
        """
        ...


def has_characteristic_function(release: ReleaseLaw) -> bool:
    """Return whether the characteristic function of the release's loss can be computed."""
    if isinstance(release, Release):
        return isinstance(release.base_pair, GaussianPair)
    return isinstance(release, ReplacedRecord)


@lru_cache(maxsize=16)  # a solver for the steps, or a curve, asks for the same ones again
def tilted_loss(release: ReleaseLaw, direction: Direction, tilt: float) -> TiltedLoss:
    """Return a release's privacy loss, its distribution tilted by e^{s·loss} with s = `tilt` > 0.

    Raises:
        SlowDecayError: its characteristic function does not decay.
    """
    check_time()
    if isinstance(release, ReplacedRecord):
        return TiltedReplacedRecord(release, tilt)
    if not (isinstance(release, Release) and isinstance(release.base_pair, GaussianPair)):
        raise SlowDecayError
    if release.sample_rate == 1.0:
        return TiltedGaussian(release.base_pair.mu, tilt)
    return TiltedSampledGaussian(release.sample_rate, release.base_pair.mu, direction, tilt)


@dataclass(frozen=True, slots=True)
class TiltedGaussian:
    """The tilted privacy loss of an unsampled Gaussian release, distributed as N((s + ½)μ², μ²)."""

    mu: float
    tilt: float

    @property
    def standard_deviation(self) -> float:
        """Return the standard deviation of the tilted privacy loss."""
        return self.mu

    def log_decay(self, low: Array, high: Array) -> Array:  # noqa: ARG002
        """Return log|φ(low)|, the largest on [low, high]; φ is the characteristic function.

        |φ(v)| decreases with the frequency v.
        """
        decay: Array = -0.5 * (low * self.mu) ** 2
        return decay

    def log_decay_beyond(self, frequency: float) -> float:
        """Return log|φ(frequency)|, the largest from there on; φ is the characteristic function.

        |φ(v)| decreases with the frequency v.
        """
        return -0.5 * (frequency * self.mu) ** 2

    def count_nodes(self, frequency: float) -> float:  # noqa: ARG002
        """Return 1: the characteristic function has a closed form and needs no quadrature."""
        return 1.0

    def characteristic(self, frequencies: Array) -> CharacteristicValues:
        """Return the characteristic function at increasing `frequencies`, and the log-moment.

        Both are in closed form.
        """
        mean = (self.tilt + 0.5) * self.mu**2
        log_value = np.asarray(1j * frequencies * mean - 0.5 * (frequencies * self.mu) ** 2)
        error = 8 * _EPS * np.abs(log_value) * np.exp(log_value.real)
        moment = 0.5 * self.tilt * (self.tilt + 1) * self.mu**2
        return CharacteristicValues(log_value, error, moment, 8 * _EPS * moment)


class QuadratureLoss(ABC):
    """Base of tilted losses whose characteristic function φ is computed by a trapezoidal rule.

    The privacy loss is an increasing function of an output z. A subclass sets the attributes below.
    """

    standard_deviation: float
    _pairs: CellPairs
    _mass_above: Array  # lower bounds on all of the mass, then of that above each cell's lower edge
    _variation_above: Array  # upper bounds on the variation of the loss's density there

    def log_decay(self, low: Array, high: Array) -> Array:
        """Bound log|φ| from above on each frequency range; φ is the characteristic function.

        There is one for each range of frequencies v.
        """
        return np.minimum(self._pairs.log_decay(low, high), self._log_decay_by_variation(low))

    def _log_decay_by_variation(self, frequencies: Array) -> Array:
        """Bound log|characteristic function| by the total variation of the loss's density.

        A law of mass W whose density varies by B has |φ(v)| ≤ B/v; the rest adds at most 1 − W.
        """
        lost = self._mass_above - np.multiply.outer(1 / frequencies, self._variation_above)
        largest: Array = lost.max(axis=1) * (1 - 1e-9)
        return np.log1p(-np.clip(largest, 0.0, 1 - 1e-12))

    def log_decay_beyond(self, frequency: float) -> float:
        """Return an upper bound on log|φ| beyond a frequency; φ is the characteristic function."""
        return float(self._log_decay_by_variation(np.array([frequency]))[0])

    def count_nodes(self, frequency: float) -> float:
        """Return how many quadrature nodes the characteristic function needs up to a frequency."""
        low, high = self._limits()
        return (high - low) / self._spacing(frequency)

    @abstractmethod
    def _limits(self) -> tuple[float, float]:
        """Return the lower and the upper limit of integration over the mechanism's output z."""

    @abstractmethod
    def _spacing(self, frequency: float) -> float:
        """Return the widest trapezoidal spacing that is accurate for frequencies up to this one.

        Its relative error is e^_LOG_ERROR.
        """

    @abstractmethod
    def _trapezoidal_rule(self, frequency: float) -> TrapezoidalRule:
        """Return a trapezoidal rule that is accurate for frequencies up to this one."""

    def characteristic(self, frequencies: Array) -> CharacteristicValues:
        """Return the characteristic function at increasing `frequencies`, and the log-moment.

        The sum is that of φ − 1, so that T factors keep their accuracy.
        """
        rule = self._trapezoidal_rule(float(frequencies[-1]))
        phi_minus_one, error = rule.characteristic(frequencies)
        return CharacteristicValues(
            log1p_complex(phi_minus_one), error, rule.log_moment, rule.moment_error
        )


class TiltedSampledGaussian(QuadratureLoss):
    """The tilted privacy loss of a Poisson-sampled Gaussian release, computed by quadrature.

    A record is added or removed. z is the noise in units of its standard deviation.
    """

    def __init__(self, sample_rate: float, mu: float, direction: Direction, tilt: float) -> None:
        self._rate, self._mu = sample_rate, mu
        self._sign = 1.0 if direction == "removing" else -1.0
        self._order = tilt + 1.0 if direction == "removing" else -tilt
        order = np.array([self._order])
        self._log_truncation_error = float(
            sampled_gaussian.log_truncation_error(order, sample_rate, 1 / mu)[0]
        )
        log_moment = float(sampled_gaussian.log_moments(order, sample_rate, 1 / mu)[0])
        self._log_moment = rounding.up(log_moment)
        if self._log_truncation_error - self._log_moment > math.log(_MISSING_MAX):
            raise SlowDecayError
        self._prepare_decay_bounds()

    def _loss(self, z: Array) -> Array:
        """Return the privacy loss log(1 − q + q·e^Λ(z)) at each output z; q is the sample rate.

        Λ(z) = μz − μ²/2 is the log-likelihood ratio without sampling.
        """
        return sampled_gaussian.privacy_loss(self._mu * z - 0.5 * self._mu**2, self._rate)

    def _log_share(self, z: Array) -> Array:
        """Return log P(record was sampled | output z) at each output z.

        π = q·e^Λ/(1 − q + q·e^Λ); the slope of l is μπ.
        """
        ratio = self._mu * z - 0.5 * self._mu**2
        return -np.logaddexp(0.0, math.log1p(-self._rate) - math.log(self._rate) - ratio)

    def _prepare_decay_bounds(self) -> None:
        """Compute bounds on the loss's density per interval, which `log_decay` uses.

        Stored are lower bounds on the cells' masses under the tilted law, and upper bounds on the
        total variation of the density of the tilted loss, which is n·e^{a·l}/(μπ). On a cell, each
        of its factors is replaced by its largest value there.
        """
        mu, order = self._mu, self._order
        low = min(order * mu, -mu) - _SPAN
        high = max(order * mu, mu) + _SPAN
        count = int(min(max(4.0 * (high - low), _CELLS_MIN), _CELLS_MAX))
        z = np.linspace(low, high, count + 1)
        left, right = z[:-1], z[1:]
        loss, middle = self._loss(z), self._loss(0.5 * (left + right))
        mass = np.exp(log_cell_mass_lower(z, loss, middle, order) - self._log_moment)
        chord = 0.5 * (loss[:-1] + loss[1:])
        nearest = np.where(left * right <= 0, 0.0, np.minimum(np.abs(left), np.abs(right)))
        steepest = np.maximum(order * loss[:-1], order * loss[1:])
        log_density = -0.5 * nearest**2 + steepest - self._log_share(left) - math.log(mu)
        density = np.exp(np.minimum(log_density - LOG_SQRT_TWO_PI - self._log_moment, 600.0))
        # K may be less than its upper bound: by what is left out, and by the rounding up of log K
        density *= 1 + 4 * _MISSING_MAX
        density *= math.exp(2 * rounding.MARGIN * abs(self._log_moment))
        self._mass_above = np.append(1.0, np.cumsum(mass[::-1])[::-1])
        highest = np.maximum.accumulate(density[::-1])[::-1]
        self._variation_above = 2 * self._count_modes() * np.append(highest[0], highest)
        share = mass / mass.sum()
        mean = float(share @ chord)
        self.standard_deviation = math.sqrt(float(share @ (chord - mean) ** 2))
        self._pairs = CellPairs(loss, mass)

    def _count_modes(self) -> int:
        """Return an upper bound on the number of modes of the tilted loss's density: one or two.

        In z its logarithmic slope is (a + 1)·μπ − z − μ: a logistic function less a line, with at
        most three zeros. There are three only if it is negative where it has its minimum, and
        positive where it has its maximum.
        """
        steepness = (self._order + 1) * self._mu**2
        if steepness <= 4:
            return 1
        shares = 0.5 + np.array([-0.5, 0.5]) * math.sqrt(1 - 4 / steepness)
        odds = np.log(shares) - np.log1p(-shares) + math.log1p(-self._rate) - math.log(self._rate)
        z = odds / self._mu + 0.5 * self._mu
        lowest, highest = (self._order + 1) * self._mu * shares - z - self._mu
        return 2 if lowest < 1e-9 and highest > -1e-9 else 1

    def _limits(self) -> tuple[float, float]:
        """Return the lower and the upper limit of integration over the mechanism's output z."""
        low, high = sampled_gaussian.integration_limits(self._order, self._order, 1 / self._mu)
        return low * self._mu, high * self._mu

    def _spacing(self, frequency: float) -> float:
        """Return the widest trapezoidal spacing that is accurate for frequencies up to this one.

        Its relative error is e^_LOG_ERROR.

        Off the real line the integrand grows by e^{y²/2}, for a < 0 by cos(μy/2)^a, and by
        e^{v·arg}, where the argument of 1 − q + q·e^Λ is at most μy.
        """
        y = np.minimum(math.pi / self._mu * _STRIP, 12.6)
        cost = 0.5 * y * y + frequency * self._mu * y
        cost += min(self._order, 0.0) * np.log(np.cos(0.5 * self._mu * y))
        return float(np.max(2 * math.pi * y / (cost - _LOG_ERROR)))

    def _trapezoidal_rule(self, frequency: float) -> TrapezoidalRule:
        """Return a trapezoidal rule that is accurate for frequencies up to this one."""
        spacing = round_spacing(self._spacing(frequency))
        z = exact_multiples(spacing, *self._limits())
        loss = self._loss(z)
        off = loss_rounding(loss, self._rate, self._mu)
        growth = self._order * loss
        quadrature = math.log(2) + _LOG_ERROR + self._log_moment
        log_omitted = float(np.logaddexp(self._log_truncation_error, quadrature))
        integrand = MomentIntegrand(z, spacing, growth, exponent_error(self._order, loss, off))
        return trapezoidal_rule(integrand, self._sign * loss, off, log_omitted)


class TiltedReplacedRecord(QuadratureLoss):
    """The tilted privacy loss of a Poisson-sampled Gaussian release under replace-one.

    In the terms of `laws.replaced_record` the tilted law has the density n·A₊^{s+1}·A₋^{−s}/K. Both
    directions are the same.
    """

    def __init__(self, release: ReplacedRecord, tilt: float) -> None:
        self._release, self._tilt = release, tilt
        self._log_moment = float(release.log_moments("removing", np.array([tilt]))[0])
        low, high = self._limits()
        ends = np.array([high])
        left = float(
            self._log_integrand_ratio(np.array([low]))[0] + log_normal_tail(np.array([-low]))[0]
        )
        right = float(release.log_tail(np.array([tilt]), ends)[0])
        self._log_truncation_error = float(np.logaddexp(left, right))
        if self._log_truncation_error - self._log_moment > math.log(_MISSING_MAX):
            raise SlowDecayError
        self._prepare_decay_bounds()

    def _log_integrand_ratio(self, z: Array) -> Array:
        """Return log(integrand of the log-moment / normal density) at each output z.

        It is log(A₊^{s+1}·A₋^{−s}), which increases with z.
        """
        return self._release.log_ratio(z) + self._tilt * self._release.loss(z)

    def _limits(self) -> tuple[float, float]:
        """Return the lower and the upper limit of integration over the mechanism's output z."""
        return -_TAIL_DEVIATIONS, self._release.largest_node(self._tilt)

    def _spacing(self, frequency: float) -> float:
        """Return the widest trapezoidal spacing that is accurate for frequencies up to this one."""
        return self._release.spacing(self._tilt, frequency)

    def _prepare_decay_bounds(self) -> None:
        """Compute bounds on the loss's density per interval, which `log_decay` uses.

        Stored are lower bounds on the cells' masses under the tilted law, and upper bounds on the
        total variation of the density of the tilted loss. As a function of z that is f =
        n·A₊^{s+1}·A₋^{−s}/(K·μ·(π₊ + π₋)). Its variation is the integral of f·|(log f)′|, bounded
        cell by cell; outside the cells f decreases outwards.
        """
        release, tilt, mu = self._release, self._tilt, self._release.mu
        mode = mu * (tilt + 1)
        share = math.exp(float(release.log_share(np.array([-mode]))[0]))
        low, high = -mu - _SPAN, mode * (1 + share) + _SPAN
        count = int(min(max(4.0 * (high - low), _CELLS_MIN), _CELLS_MAX))
        z = np.linspace(low, high, count + 1)
        left, right = z[:-1], z[1:]
        loss = release.loss(z)
        mass = np.exp(self._log_cell_mass_lower(z) - self._log_moment)
        shares = np.exp(release.log_share(z)), np.exp(release.log_share(-z))
        nearest = np.where(left * right <= 0, 0.0, np.minimum(np.abs(left), np.abs(right)))
        least_slope = mu * (shares[0][:-1] + shares[1][1:])
        with np.errstate(divide="ignore"):
            log_density = self._log_integrand_ratio(right) - 0.5 * nearest**2 - np.log(least_slope)
        density = np.exp(np.minimum(log_density - LOG_SQRT_TWO_PI - self._log_moment, 600.0))
        # K may be less than its upper bound: by the errors that it adds, and by its rounding up
        density *= 1 + 4 * _MISSING_MAX
        density *= math.exp(2 * rounding.MARGIN * abs(self._log_moment))
        variation = density * np.diff(z) * self._steepness(left, right, *shares)
        beyond = np.append(np.cumsum(variation[::-1])[::-1], 0.0) + density[-1]
        self._mass_above = np.append(1.0, np.cumsum(mass[::-1])[::-1])
        # all of the density, then what is left of it above each cell's lower edge
        self._variation_above = np.append(beyond[0] + density[0], beyond[:-1] + density)
        share_of = mass / mass.sum()
        chord = 0.5 * (loss[:-1] + loss[1:])
        mean = float(share_of @ chord)
        self.standard_deviation = math.sqrt(float(share_of @ (chord - mean) ** 2))
        self._pairs = CellPairs(loss, mass)

    def _log_cell_mass_lower(self, z: Array) -> Array:
        """Return logs of lower bounds on the tilted mass between adjacent outputs z.

        The mass is ∫ n·A₊^{s+1}·A₋^{−s} over the cell, without normalisation.

        log A₊ and log A₋ are convex: the one lies above its tangent in the middle of a cell, and
        the other below its chord. So the exponent lies above a linear function, whose exponential
        has at least its middle's value as its mean.
        """
        release = self._release
        with_record = release.log_ratio(0.5 * (z[:-1] + z[1:]))
        replaced = release.log_ratio(-z)
        growth = (self._tilt + 1) * with_record - self._tilt * 0.5 * (replaced[:-1] + replaced[1:])
        log_mass: Array = growth - 0.25 * (z[:-1] ** 2 + z[1:] ** 2) + np.log(np.diff(z))
        return log_mass - LOG_SQRT_TWO_PI

    def _steepness(self, left: Array, right: Array, plus: Array, minus: Array) -> Array:
        """Bound the slope of log f in each interval; f is the tilted loss's density.

        (log f)′ = μ((s+1)π₊ + sπ₋) − z − μ·ρ·(1 − π₊ − π₋), ρ = (π₊ − π₋)/(π₊ + π₋). π₊ and ρ
        increase with z, and π₋ decreases.

        Args:
            left: the cells' lower ends.
            right: their upper ends.
            plus: π₊ at all ends, one more than cells.
            minus: π₋ at the same points.
        """
        mu, tilt = self._release.mu, self._tilt
        least = mu * ((tilt + 1) * plus[:-1] + tilt * minus[1:]) - right
        most = mu * ((tilt + 1) * plus[1:] + tilt * minus[:-1]) - left
        ratio = (plus - minus) / np.maximum(plus + minus, 1e-300)
        rest_low, rest_high = 1 - plus[1:] - minus[:-1], 1 - plus[:-1] - minus[1:]
        corners = mu * np.stack(
            [edge * rest for edge in (ratio[:-1], ratio[1:]) for rest in (rest_low, rest_high)]
        )
        steepest: Array = np.maximum(
            np.abs(least - corners.max(axis=0)), np.abs(most - corners.min(axis=0))
        )
        return steepest * (1 + 1e-9)

    def _trapezoidal_rule(self, frequency: float) -> TrapezoidalRule:
        """Return a trapezoidal rule that is accurate for frequencies up to this one."""
        release, tilt = self._release, self._tilt
        spacing = round_spacing(self._spacing(frequency))
        z = exact_multiples(spacing, *self._limits())
        with_record, loss = release.log_ratio(z), release.loss(z)
        off = release.loss_rounding(z, loss)
        growth_error = loss_rounding(with_record, release.sample_rate, release.mu)
        growth_error = growth_error + exponent_error(tilt, loss, off)
        quadrature = math.log(2) + _LOG_ERROR + self._log_moment
        log_omitted = float(np.logaddexp(self._log_truncation_error, quadrature))
        integrand = MomentIntegrand(z, spacing, with_record + tilt * loss, growth_error)
        return trapezoidal_rule(integrand, loss, off, log_omitted)


def loss_rounding(loss: Array, sample_rate: float, mu: float) -> Array:
    """Return upper bounds on the rounding errors of computed privacy losses.

    They are a few eps of the loss l > log(1 − q), and of Λ where l follows Λ.
    """
    share = np.minimum(np.abs(np.expm1(-loss)) + sample_rate, 1.0)  # at least π
    ratio = 1.0 + np.abs(loss) + abs(math.log(sample_rate)) + mu**2  # about Λ
    rounding: Array = 8 * _EPS * (np.abs(loss) + share * ratio)
    return rounding


def exponent_error(order: float, loss: Array, loss_error: Array) -> Array:
    """Return upper bounds on the errors of the products order·loss, given those of the losses."""
    rounding: Array = 4 * _EPS * np.abs(order * loss) + abs(order) * loss_error
    return rounding


def round_spacing(spacing: float) -> float:
    """Return the spacing rounded down to 24 significant bits, so that its multiples are exact."""
    rounded = np.float32(spacing)
    return float(rounded if float(rounded) <= spacing else np.nextafter(rounded, np.float32(0)))


def exact_multiples(spacing: float, low: float, high: float) -> Array:
    """Return consecutive multiples of a spacing that cover the interval [low, high].

    They are exact: a trapezoidal rule whose nodes were rounded would be another rule.
    """
    first, last = math.floor(low / spacing), math.ceil(high / spacing)
    return spacing * np.arange(first, last + 1, dtype=float)


@dataclass(frozen=True, slots=True)
class MomentIntegrand:
    """Values of an integrand n(z)·e^{growth(z)} at equally spaced z; n is the normal density.

    n is the standard normal density.

    Attributes:
        z: the nodes, from −13 or less to 13 or more; multiples of the spacing.
        spacing: their distance κ.
        growth: at each node; −∞ where e^growth counts as 0.
        growth_error: bound on the absolute error of each growth.
    """

    z: Array
    spacing: float
    growth: Array
    growth_error: Array

    @property
    def exponent(self) -> Array:
        """The log of the integrand at each node z, without its constant factor 1/√(2π)."""
        exponent: Array = self.growth - 0.5 * self.z * self.z
        return exponent

    @property
    def normal_error(self) -> Array:
        """Return upper bounds on the relative error of the computed normal density n(z)."""
        error: Array = 4 * _EPS * (2 + self.z * self.z)
        return error

    def moment_minus_one(self) -> tuple[float, float]:
        """Return the integral minus 1, computed without cancellation, and a bound on its error.

        Every error is one of the differences e^growth − 1, so a moment near 1 keeps the digits
        of its distance from 1. The rule integrates n itself up to 2e^{−2π²/κ²} (Poisson's
        summation formula) and the tails beyond the nodes; the error of the rule on n·e^growth is
        the caller's to add.
        """
        scale = self.spacing / math.sqrt(2 * math.pi)
        normal = np.exp(-0.5 * self.z * self.z)
        near = self.growth < _NEAR_GROWTH
        size = np.exp(self.exponent)
        terms = np.where(near, normal * np.expm1(np.where(near, self.growth, 0.0)), size - normal)
        error = scale * float(
            (self.growth_error * size + (self.normal_error + _SUM_ROUNDING) * np.abs(terms)).sum()
        )
        error += 3 * math.exp(-2 * (math.pi / self.spacing) ** 2) + _NORMAL_TAILS
        return scale * float(terms.sum()), error


@dataclass(frozen=True, slots=True)
class TrapezoidalRule:
    """Nodes (losses) and weights of a quadrature rule for expectations of the tilted loss.

    φ is the characteristic function of the tilted privacy loss, φ(v) = Σ weight·e^{iv·loss}.

    Attributes:
        weight: of each node, summing to one.
        loss: the loss at each node.
        relative_error: bound on the relative error of each weight.
        loss_error: the mean error of a loss.
        log_moment: log K(a).
        moment_rounding: bound on its error, apart from `missing`.
        missing: the share of K(a) that the nodes leave out.
    """

    weight: Array
    loss: Array
    relative_error: Array
    loss_error: float
    log_moment: float
    moment_rounding: float
    missing: float

    @property
    def moment_error(self) -> float:
        """Return an upper bound on the error of the computed log-moment."""
        return 1.1 * self.missing + self.moment_rounding  # −log(1 − x) ≤ 1.1x for x ≤ 0.1

    def unnormalised_characteristic(self, frequencies: Array) -> tuple[ComplexArray, Array]:
        """Return the characteristic function minus 1; the error bounds include the total weight's.

        1 + rise is then ∫ e^{ivl} over a measure whose mass is not exactly e^log_moment: the
        errors of all weights count in full, and none is divided out. They count twice, because
        e^log_moment may be computed in another way than the sum of the weights.
        """
        phi_minus_one, error = self.characteristic(frequencies)
        return phi_minus_one, error + 2 * (float(self._weight_errors().sum()) + 64 * _EPS)

    def _weight_errors(self) -> Array:
        """Return upper bounds on the errors of the weights, which sum to one."""
        summed = _CHUNK + len(self.weight) / _CHUNK + 8
        relative: Array = self.weight * (self.relative_error + _EPS * summed)
        return relative

    def phi_minus_one(self, frequencies: Array) -> ComplexArray:
        """Return φ − 1 at each frequency, where φ is the loss's characteristic function."""
        half = np.multiply.outer(0.5 * frequencies, self.loss)
        sine = np.sin(half)
        real = -2 * _chunked_dot(sine * sine, self.weight)
        imaginary = 2 * _chunked_dot(sine * np.cos(half), self.weight)
        return np.asarray(real + 1j * imaginary)

    def characteristic(self, frequencies: Array) -> tuple[ComplexArray, Array]:
        """Return φ − 1 per frequency, φ the characteristic function, and error bounds."""
        blocks = _frequency_blocks(frequencies, len(self.weight))
        phi_minus_one = np.concatenate([self.phi_minus_one(block) for block in blocks])
        # each term e^{ivl} − 1 is at most min(2, v|l|); its weight is off by its relative error,
        # and so is the sum of all weights, by which each is divided
        relative = self._weight_errors()
        error = np.minimum(frequencies * float(relative @ np.abs(self.loss)), 2 * relative.sum())
        error += frequencies * self.loss_error + 2.2 * self.missing  # 2x/(1 − x) for x ≤ 0.09
        error += relative.sum() * np.abs(phi_minus_one)
        lost = np.abs(1 + phi_minus_one) < 1e-300
        phi_minus_one[lost] = -1 + 1e-16
        return phi_minus_one, error + 4 * _EPS * np.abs(phi_minus_one) + np.where(lost, 1e-16, 0.0)


def trapezoidal_rule(
    integrand: MomentIntegrand, loss: Array, loss_error: Array, log_omitted: float
) -> TrapezoidalRule:
    """Return a trapezoidal rule for a moment's integrand, with weights that sum to one.

    Nodes of negligible weight are left out.

    Args:
        integrand: at all nodes.
        loss: at each.
        loss_error: of each loss.
        log_omitted: log of the absolute error of the rule.
    """
    exponent = integrand.exponent
    peak = float(exponent.max())
    weight = np.exp(exponent - peak)
    total = float(weight.sum())
    log_moment = math.log(total * integrand.spacing) + peak - LOG_SQRT_TWO_PI
    missing = math.exp(min(log_omitted - log_moment, 700.0)) + _WEIGHT_MIN * len(weight)
    kept = weight > _WEIGHT_MIN
    relative_error = integrand.growth_error + integrand.normal_error + 4 * _EPS * abs(peak)
    weight, relative_error = weight[kept] / total, relative_error[kept]
    rounding = float(weight @ relative_error) + 64 * _EPS
    off = float(weight @ loss_error[kept])
    log_moment, rounding = min(
        (log_moment, rounding),
        _log_moment_near_one(integrand, log_moment),
        key=lambda found: found[1],
    )
    return TrapezoidalRule(weight, loss[kept], relative_error, off, log_moment, rounding, missing)


def _log_moment_near_one(integrand: MomentIntegrand, estimate: float) -> tuple[float, float]:
    """Return the log of a moment that is near 1, without cancellation, and an error bound.

    The bound is infinite where the moment is far from 1, by an estimate of its log.
    """
    if abs(estimate) > _SMALL_MOMENT:
        return estimate, math.inf
    moment_minus_one, error = integrand.moment_minus_one()
    log_moment = math.log1p(moment_minus_one)
    return log_moment, 1.1 * error / (1 + moment_minus_one) + 4 * _EPS * abs(log_moment)


def _chunked_dot(terms: Array, weight: Array) -> Array:
    """Return the matrix product terms @ weight, summed in chunks to limit rounding errors.

    It is off by an eps for each term of a chunk, and for each chunk.
    """
    starts = range(0, len(weight), _CHUNK)
    parts = [terms[:, i : i + _CHUNK] @ weight[i : i + _CHUNK] for i in starts]
    total: Array = np.sum(parts, axis=0)
    return total


def _frequency_blocks(frequencies: Array, nodes: int) -> list[Array]:
    """Split frequencies into blocks, such that a table of frequencies × nodes fits in memory."""
    return np.array_split(frequencies, max(1, len(frequencies) * nodes // _ELEMENTS_MAX))


def log_cell_mass_lower(z: Array, loss: Array, middle_loss: Array, order: float) -> Array:
    """Return logs of lower bounds on the tilted probability between adjacent outputs z.

    The mass is the integral of n(z)·e^{a·l(z)} over the cell. `loss` holds l at the points z, and
    `middle_loss` at the middle of each cell.

    On a cell log n is concave and lies above its chord; a·l, l being convex, lies above its tangent
    in the middle (a > 0) or its chord (a < 0). The exponential of a linear function has at least
    its middle's value as its mean.
    """
    growth = order * (middle_loss if order > 0 else 0.5 * (loss[:-1] + loss[1:]))
    log_mass: Array = growth - 0.25 * (z[:-1] ** 2 + z[1:] ** 2) + np.log(np.diff(z))
    return log_mass - LOG_SQRT_TWO_PI


class CellPairs:
    """Upper bounds on |φ|, the characteristic function's modulus, from pairs of loss intervals.

    A cell is an interval of privacy losses with a lower bound on its probability.

    They use 1 − |φ|² = E[1 − cos v(l − l′)] for two independent losses l and l′.

    With x = v·|l − l′|, pairs with x ≤ 2 count 1 − cos x ≥ x²/2 − x⁴/24 at their least x,
    pairs with 2 ≤ x ≤ 2π − 2 count 1 − cos 2, and the rest nothing.
    """

    def __init__(self, loss: Array, mass: Array) -> None:
        """Sort pairs of loss intervals by the least and the greatest distance between their losses.

        Args:
            loss: at the edges of the cells, increasing.
            mass: a lower bound on that of each cell.
        """
        first, second = np.triu_indices(len(mass), 1)
        relative_error = 8 * _EPS * float(np.abs(loss).max())
        least = np.maximum(loss[second] - loss[first + 1] - relative_error, 0.0)
        greatest = loss[second + 1] - loss[first] + relative_error
        weight = mass[first] * mass[second] * (1 - 1e-9)  # for the rounding of all of this
        by_greatest, by_least = np.argsort(greatest), np.argsort(least)
        square = (weight * least**2)[by_greatest]
        self._greatest, self._least = greatest[by_greatest], least[by_least]
        self._square_sums = _prefix_sums(square)
        self._fourth_sums = _prefix_sums(square * least[by_greatest] ** 2)
        self._sums_by_greatest = _prefix_sums(weight[by_greatest])
        self._sums_by_least = _prefix_sums(weight[by_least])

    def log_decay(self, low: Array, high: Array) -> Array:
        """Bound log|φ| from above on each frequency range; φ is the characteristic function.

        There is one for each range of frequencies v.
        """
        near = np.searchsorted(self._greatest, 2.0 / high, side="right")
        opposite = (
            self._sums_by_greatest[
                np.searchsorted(self._greatest, (2 * math.pi - 2.0) / high, side="right")
            ]
            - self._sums_by_least[np.searchsorted(self._least, 2.0 / low)]
        )
        square = low * low
        mass = square * (self._square_sums[near] / 2 - square * self._fourth_sums[near] / 24)
        mass = mass + (1 - math.cos(2.0)) * np.maximum(opposite - 1e-12, 0.0)
        decay: Array = 0.5 * np.log1p(-np.clip(2 * mass, 0.0, 1 - 1e-12))
        return decay


def _prefix_sums(values: Array) -> Array:
    """Return the sum of the first k values for k = 0, 1, 2, …."""
    return np.concatenate([[0.0], np.cumsum(values)])
