"""δ(ε) by a line integral where it comes from a few improbable outcomes.

With rarely sampled releases and a small δ, two properties of one loss defeat the plain line
integral. Nearly all of its mass is at one point, so its characteristic function hardly decays. Its
tail is log-normal, so e^{sl} is dominated by outcomes far beyond ε, the line has to stay far left,
and every digit cancels. So each release's outcomes are divided by their loss, smoothly (see
`windowed_loss`), into common ones a, rare ones b and extreme ones c. Then

* the extreme ones are counted as the worst: they add at most Σ T·c to δ, and nothing below;
* the compositions of common outcomes alone hardly ever reach ε: they add at most
  Π a(s)^T·e^{−sε} for any s > 0 (Chernoff), and nothing below;
* the rest is a measure whose moments are Π(a + b)^T − Πa^T, which decays as b does.

If every such division leaves out too much, only the extreme outcomes are set aside.

**The tail.** |D(v)| ≤ Σ T·|b(v)|·Π(a+b)^T/(a+b), all but the first at v = 0: D is as steep as b,
which has no mass where l does not turn. With D = Πb^T the pairs of `characteristic_function` are
used, with each cell's window at its smaller end, or |b(v)| ≤ c + |d(v)|, c what lies below a small
loss and d what lies above.

**Errors.** Each a is known as e^{A ± λ}·(1 + ρ ± e), with the same scale error λ at all
frequencies. Multiplied by e^{θ}, |θ| ≤ λ, the law of a stays a measure; so D belongs to a measure
that is between e^{−ΣTλ} and e^{ΣTλ} times the true one, and so is its δ. The scale error of b is
counted as an error of b instead, as often as rare outcomes occur; with D = Πb^T it is a scale error
as well. D is a polynomial in every a and b without negative coefficients: if those are off by e and
f, D is off by at most D(|a|+e, |b|+f) − D(|a|, |b|). The difference of the products is taken as
Π(a+b)^T·(1 − e^{−Σ T·log(1+b/a)}), without cancellation. Weights are off by a few eps of their
exponents, by the order times |dl| and, through the windows, by (1 + u⁻)·|dl|/w. Where a window is
nearly open, the error of log Φ(u) is (1 + u²) eps of itself.
"""

from __future__ import annotations

import bisect
import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np

from accountant_service.numerics.engines.line_integral import (
    EvaluatedIntegral,
    IntegrandValues,
    IntegrationSettings,
    OmittedOutcomes,
    choose_line,
    integrate_along_line,
)
from accountant_service.numerics.engines.saddle_point import SaddlePoint
from accountant_service.numerics.errors import SlowDecayError
from accountant_service.numerics.floats.special_functions import (
    LOG_SQRT_TWO_PI,
    Array,
    ComplexArray,
    log1p_complex,
    log_sum_exp,
)
from accountant_service.numerics.laws import gaussian
from accountant_service.numerics.laws.dominating_pair import Composition, GaussianPair, Release
from accountant_service.numerics.laws.sampled_gaussian import privacy_loss
from accountant_service.numerics.laws.windowed_loss import (
    Window,
    WindowedLoss,
    cached_windowed_loss,
)

_EPS: Final = float(np.finfo(float).eps)
# shares of ε up to which losses are common
_SHARES: Final = (0.7, 0.5, 0.35, 0.25, 0.15, 0.1, 0.07, 0.05, 0.03)
_LOW_SHARES: Final = (0.02, 0.01, 0.005)
_EPSILON_MIN: Final = 1e-4  # smaller ε are not worth the work
_SCALE: Final = 1.08  # ε is rounded to its powers, so that neighbouring questions share laws
_TOPS: Final = np.geomspace(1e-5, 100.0, 160)  # losses, beyond which they may be extreme
_SPLIT_WIDTH: Final = 0.1  # of where it is
_TOP_WIDTH: Final = 0.07
_TILTS: Final = np.geomspace(0.1, 120.0, 36)  # times 1/ε
_RENYI_TILTS: Final = np.geomspace(0.1, 3e3, 80)  # times 1/top
_SLOW_PHASE: Final = 0.003  # of the top: the phase of smaller losses turns slowly
_COMMON_TILTS: Final = np.geomspace(1.0, 300.0, 40)  # the same, for the common outcomes
_SCALE_ERROR_MAX: Final = 1e-9  # log of the scale error of one factor
_TOTAL_SCALE_ERROR_MAX: Final = 1e-6  # of a composition; the bounds on its decay include it
_APPROXIMATE_NODES: Final = 1500  # nodes on which a division is chosen


def integrate_rare_events(
    releases: Composition, saddle: SaddlePoint, settings: IntegrationSettings
) -> EvaluatedIntegral:
    """Bound δ(ε): integrate over outcomes with a rarely large loss, and bound the others' share.

    Args:
        releases: with their counts.
        saddle: only its ε and δ are used.
        settings: accuracy, smoothing, and the work limit.

    Raises:
        SlowDecayError: a release is not Gaussian, a record is added, no division leaves little
            enough, or the integrand decays too slowly for the work limit.
    """
    parts = _sampled_gaussians(releases, saddle)
    if saddle.epsilon < _EPSILON_MIN:
        raise SlowDecayError
    epsilon = _SCALE ** round(math.log(saddle.epsilon, _SCALE))
    for division in _candidate_divisions(parts, epsilon, saddle.log_delta + settings.log_accuracy):
        with contextlib.suppress(SlowDecayError):
            divided = DividedComposition(parts, division, epsilon)
            line = choose_line(divided.own_saddle(saddle), settings, divided.log_integrated_mass)
            return integrate_along_line(
                divided.integrand(line.tilt), line, settings.work_limit, divided.omitted()
            )
    raise SlowDecayError


def guess_saddle_points(releases: Composition, near: SaddlePoint) -> list[SaddlePoint]:
    """Return two starting points: one assumes that a single rare loss causes δ, one that many do.

    `near` gives δ and the direction.

    The first guess solves Σ T·δ₁(ε) = δ, with δ₁(ε) = q·δ_G(log(1 + (e^ε − 1)/q)) for one release
    and δ_G for the unsampled one. The second is the Rényi bound without the extreme outcomes.
    """
    parts = _sampled_gaussians(releases, near)
    laws = _ApproximateLaws(parts)
    many = laws.renyi_epsilon(near.log_delta)
    epsilons = np.geomspace(1e-3, 1.0, 200) * max(many, _EPSILON_MIN)
    at = int(np.searchsorted(-_log_delta_of_one_outcome(parts, epsilons), -near.log_delta))
    one = float(epsilons[min(at, len(epsilons) - 1)])
    return [replace(near, epsilon=max(guess, _EPSILON_MIN)) for guess in (one, many)]


def _sampled_gaussians(releases: Composition, near: SaddlePoint) -> list[_SampledGaussian]:
    """Return the sample rate, μ and count of each release; raise if one is not a sampled Gaussian.

    Raises:
        SlowDecayError: a record is added or replaced, or a release is not Gaussian.
    """
    if near.direction == "adding":
        raise SlowDecayError
    parts = []
    for release, count in releases:
        if not (isinstance(release, Release) and isinstance(release.base_pair, GaussianPair)):
            raise SlowDecayError
        parts.append(_SampledGaussian(release.sample_rate, release.base_pair.mu, count))
    return parts


def _log_delta_of_one_outcome(parts: list[_SampledGaussian], epsilons: Array) -> Array:
    """Estimate log δ(ε), at each ε, if a single release has a privacy loss above ε."""
    total = np.full_like(epsilons, -np.inf)
    for part in parts:
        unsampled = np.log1p(np.expm1(np.minimum(epsilons, 500.0)) / part.sample_rate)
        log_one = gaussian.log_delta(unsampled, part.mu)
        total = np.logaddexp(total, log_one + math.log(part.count * part.sample_rate))
    return total


@dataclass(frozen=True, slots=True)
class _SampledGaussian:
    """A Poisson-sampled Gaussian release: its sample rate, μ (sensitivity over noise) and count.

    Attributes:
        sample_rate: q.
        mu: μ, the sensitivity divided by the standard deviation of the noise.
        count: the number of repetitions.
    """

    sample_rate: float
    mu: float
    count: int


@dataclass(frozen=True, slots=True)
class _OutcomeDivision:
    """The windows that split outcomes, by privacy loss, into common, rare and extreme ones.

    Each part is given by the smooth windows whose product is the weight with which an outcome of
    some loss belongs to it.
    """

    common: tuple[Window, ...]
    rare: tuple[Window, ...]
    extreme: tuple[Window, ...]

    @classmethod
    def at(cls, split: float, top: float) -> _OutcomeDivision:
        """Return windows for rare losses (about `split` to `top`), extreme (above) and common ones.

        No outcomes are common if `split` is 0.
        """
        below, above = (Window(top, _TOP_WIDTH * top, sign) for sign in (-1, 1))
        if split == 0.0:
            return cls((), (below,), (above,))
        common, rare = (Window(split, _SPLIT_WIDTH * split, sign) for sign in (-1, 1))
        return cls((common, below), (rare, below), (above,))


class _ApproximateLaws:
    """Approximate distributions of losses, used only to choose which losses count as rare."""

    def __init__(self, parts: list[_SampledGaussian]) -> None:
        self._laws = [(*_approximate_law(part.sample_rate, part.mu), part.count) for part in parts]

    def log_mass(self, windows: tuple[Window, ...]) -> float:
        """Return the log of the expected number of releases with a loss inside the windows."""
        counts = [
            count * math.exp(float(log_sum_exp(log_mass + _log_window_weights(windows, loss))))
            for loss, log_mass, count in self._laws
        ]
        return math.log(max(math.fsum(counts), 1e-300))

    def log_chernoff(self, windows: tuple[Window, ...], epsilon: float) -> float:
        """Estimate the log of Chernoff's bound on δ(ε), from the losses that the windows select."""
        tilts = _COMMON_TILTS / epsilon
        return float((self._log_moments(windows, tilts) - tilts * epsilon).min())

    def _log_moments(self, windows: tuple[Window, ...], tilts: Array) -> Array:
        """Return log E[e^{sL}] of the composition at each tilt s, over selected losses only."""
        total = np.zeros_like(tilts)
        for loss, log_mass, count in self._laws:
            weighted = log_mass + _log_window_weights(windows, loss)
            total += count * log_sum_exp(weighted + tilts[:, None] * loss)
        return total

    def estimate_top(self, log_share: float) -> float:
        """Estimate the loss that at most e^`log_share` releases are expected to exceed."""

        def is_negligible(top: float) -> bool:
            """Return whether few enough outcomes have a loss above `top`."""
            return self.log_mass(_OutcomeDivision.at(0.0, float(top)).extreme) < log_share

        at = bisect.bisect_left(_TOPS, True, key=is_negligible)
        if at == len(_TOPS):
            raise SlowDecayError
        return float(_TOPS[at])

    def renyi_epsilon(self, log_delta: float) -> float:
        """Estimate the Rényi upper bound on ε at δ if extreme outcomes are ignored."""
        top = self.estimate_top(log_delta - 3.0)
        tilts = _RENYI_TILTS / top
        moments = self._log_moments(_OutcomeDivision.at(0.0, top).rare, tilts)
        constant = -np.log1p(tilts) - tilts * np.log1p(1 / tilts)
        return float(((moments + constant - log_delta) / tilts).min())


@lru_cache(maxsize=16)
def _approximate_law(sample_rate: float, mu: float) -> tuple[Array, Array]:
    """Return a release's privacy losses at a few quadrature nodes, and their log probabilities."""
    z = np.linspace(-9.0, 13.0 + mu, _APPROXIMATE_NODES)
    loss = privacy_loss(mu * z - 0.5 * mu**2, sample_rate)
    return loss, loss - 0.5 * z * z - LOG_SQRT_TWO_PI + math.log(z[1] - z[0])


def _log_window_weights(windows: tuple[Window, ...], loss: Array) -> Array:
    """Return the log of the product of all windows' weights (0 to 1) at each privacy loss."""
    total = np.zeros_like(loss)
    for window in windows:
        total = total + window.log_weight(loss)
    return total


def _candidate_divisions(
    parts: list[_SampledGaussian], epsilon: float, log_share: float
) -> Iterator[_OutcomeDivision]:
    """Yield thresholds of rare and extreme losses to try; omitted ones add ≤ e^`log_share` to δ.

    Their top is the lowest possible. Their splits are the highest possible, none, and a very low
    one.
    """
    laws = _ApproximateLaws(parts)
    top = laws.estimate_top(log_share)
    for shares in (_SHARES, (), _LOW_SHARES):
        if not shares:
            yield _OutcomeDivision.at(0.0, top)
        for division in (_OutcomeDivision.at(share * epsilon, top) for share in shares):
            if laws.log_chernoff(division.common, epsilon) < log_share:
                yield division
                break


class DividedComposition:
    """A composition whose outcomes are split by privacy loss into common, rare and extreme ones.

    Integrated are the outcomes in which some release has a rare loss and none an extreme one;
    without common losses, all that have no extreme one. What is left out is bounded by `omitted`.
    """

    def __init__(
        self, parts: list[_SampledGaussian], division: _OutcomeDivision, epsilon: float
    ) -> None:
        self._sampled_gaussians, self._division, self._epsilon = parts, division, epsilon
        order = 1.0 + float(_TILTS[-1]) / epsilon
        self._rare = self._laws(division.rare, order)
        self._common = self._laws(division.common, order) if division.common else []
        top = division.rare[-1].edge
        slow = _OutcomeDivision.at(_SLOW_PHASE * top, top)  # slow and fast phases
        self._slow_and_fast = list(
            zip(self._laws(slow.common, order), self._laws(slow.rare, order), strict=True)
        )
        self._tilts = np.append(0.0, _TILTS / epsilon)
        self._moments = self._integrated_log_moments(1.0 + self._tilts)

    def _laws(self, windows: tuple[Window, ...], order: float) -> list[WindowedLoss]:
        """Return each release's loss distribution, weighted by windows, for orders ≤ `order`."""
        return [
            cached_windowed_loss(p.sample_rate, p.mu, windows, order)
            for p in self._sampled_gaussians
        ]

    def _integrated_log_moments(self, orders: Array) -> Array:
        """Return upper bounds on the log-moments of the outcomes to integrate, one per order."""
        total, ratio = np.zeros_like(orders), np.zeros_like(orders)
        if not self._common:
            for rare, part in zip(self._rare, self._sampled_gaussians, strict=True):
                total += part.count * rare.log_moments(orders)
            return total
        for common, rare, part in zip(
            self._common, self._rare, self._sampled_gaussians, strict=True
        ):
            log_common = common.log_moments(orders)
            total += part.count * log_common
            ratio += part.count * np.logaddexp(0.0, rare.log_moments(orders) - log_common)
        upper: Array = total + ratio + np.log(-np.expm1(-ratio)) + 1e-9
        return upper

    @property
    def log_integrated_mass(self) -> float:
        """Return an upper bound on the log probability of the outcomes to integrate."""
        return min(float(self._moments[0]), 0.0)

    def own_saddle(self, near: SaddlePoint) -> SaddlePoint:
        """Return the point through which to integrate these outcomes' part of δ, at `near`'s ε."""
        tilts, moments = self._tilts[1:], self._moments[1:]
        cost = moments - tilts * near.epsilon - np.log(tilts) - np.log1p(tilts)
        return replace(near, tilt=float(tilts[np.argmin(cost)]), tilts=tilts, moments=moments)

    def omitted(self) -> OmittedOutcomes:
        """Return an upper bound on the part of δ(ε) due to the omitted outcomes.

        These are the outcomes with some extreme loss, and those with common losses only.
        """
        mass = math.fsum(
            part.count * math.exp(float(law.log_moments(np.ones(1))[0]))
            for part, law in zip(
                self._sampled_gaussians, self._laws(self._division.extreme, 1.0), strict=True
            )
        )
        if not self._common:
            return OmittedOutcomes(mass)
        tilts = _COMMON_TILTS / self._epsilon
        moments = np.zeros_like(tilts)
        laws = self._laws(self._division.common, 1.0 + float(tilts[-1]))
        for part, law in zip(self._sampled_gaussians, laws, strict=True):
            moments += part.count * law.log_moments(1.0 + tilts)
        return OmittedOutcomes(mass, tilts, moments)

    def integrand(self, tilt: float) -> _RareOutcomeIntegrand:
        """Return the integrand Φ(v) = E[e^{(s + iv)L}] over rare outcomes; s is the `tilt`."""
        log_scale = float(self._integrated_log_moments(np.array([1.0 + tilt]))[0])
        counts = [part.count for part in self._sampled_gaussians]
        return _RareOutcomeIntegrand(
            counts,
            self._common,
            self._rare,
            self._slow_and_fast,
            tilt + 1.0,
            log_scale,
            self._epsilon,
        )


@dataclass(frozen=True, slots=True)
class _RareOutcomeIntegrand:
    """The integrand Φ(v) = E[e^{(s + iv)L}] over outcomes in which some release's loss is rare.

    With a and b the transforms of a release's common and rare outcomes and T its count, Φ is Π(a +
    b)^T − Πa^T over the releases, or Πb^T without common outcomes.

    It is a polynomial in every a and b without negative coefficients. So if a and b are off by e
    and f, it is off by at most its value at |a| + e and |b| + f, less its value at |a| and |b|.
    """

    counts: list[int]
    common: list[WindowedLoss]
    rare: list[WindowedLoss]
    slow: list[tuple[WindowedLoss, WindowedLoss]]
    order: float
    log_scale: float
    epsilon: float

    @property
    def standard_deviation(self) -> float:
        """Return a deliberately large estimate of the tilted privacy loss's standard deviation."""
        return 10.0 * self.epsilon

    def log_decay(self, edges: Array) -> Array:
        """Return upper bounds on log|Φ(v)/Φ(0)| of the integrand Φ, one per range of frequencies v.

        |Φ(v)| ≤ Σ T·|b(v)|·Π(a + b)^T/(a + b), all factors at v = 0 but the first.

        Without common outcomes Π|b|^T.
        """
        if not self.common:
            log_sizes = [
                count * self._log_decay_of_law(rare, slow, fast, edges)
                for rare, (slow, fast), count in zip(self.rare, self.slow, self.counts, strict=True)
            ]
            total: Array = np.sum(log_sizes, axis=0) - self.log_scale
            return np.minimum(total, 0.0) + _TOTAL_SCALE_ERROR_MAX
        order = np.array([self.order])
        rows, whole = [], 0.0
        for common, rare, count in zip(self.common, self.rare, self.counts, strict=True):
            either = float(np.logaddexp(common.log_moments(order), rare.log_moments(order))[0])
            whole += count * either
            rows.append(math.log(count) + rare.log_decay(self.order, edges) - either)
        bound: Array = log_sum_exp(np.array(rows), axis=0) + whole - self.log_scale
        return np.minimum(bound, 0.0) + _TOTAL_SCALE_ERROR_MAX

    def _log_decay_of_law(
        self, whole: WindowedLoss, slow: WindowedLoss, fast: WindowedLoss, edges: Array
    ) -> Array:
        """Return upper bounds on log|Laplace transform| of a release's loss, per frequency range.

        A range of frequencies v starts at one of the edges and ends at the next; the last has no
        end.

        Each is the least of three bounds; `whole` = `slow` + `fast`.

        The phase of the slow part hardly turns, so its moment bounds it.
        """
        order = np.array([self.order])
        log_moment, log_slow = whole.log_moments(order)[0], slow.log_moments(order)[0]
        by_pairs = np.append(whole.cell_pairs(self.order).log_decay(edges[:-1], edges[1:]), 0.0)
        by_lines = np.minimum(
            whole.log_decay(self.order, edges),
            np.logaddexp(log_slow, fast.log_decay(self.order, edges)),
        )
        best: Array = np.minimum(by_pairs + log_moment, by_lines)
        return best

    def count_nodes(self, frequency: float) -> float:
        """Return the number of quadrature nodes that all releases need up to this frequency."""
        laws = (*self.common, *self.rare)
        return math.fsum(law.count_nodes(self.order, frequency) for law in laws)

    def values(self, frequencies: Array) -> IntegrandValues:
        """Return the integrand Φ at increasing frequencies, with upper bounds on its error."""
        value, size, largest = (
            _LaplaceTransformProduct(len(frequencies), bool(self.common)) for _ in range(3)
        )
        terms: Array = np.full(len(frequencies), float(len(self.counts)))
        log_scale_error = 0.0
        for at, count in enumerate(self.counts):
            b, a = self._transforms(at, frequencies)
            terms += count * value.multiply(b.log(), a.log() if a else None, count)
            size.multiply(b.log_modulus(), a.log_modulus() if a else None, count)
            largest.multiply(b.log_modulus_upper(), a.log_modulus_upper() if a else None, count)
            log_scale_error += count * (b.scale_error + (a.scale_error if a else 0.0))
        if log_scale_error > _TOTAL_SCALE_ERROR_MAX:
            raise SlowDecayError
        most = largest.value(self.log_scale).real
        rounding = 16 * _EPS * terms * most
        error = most - size.value(self.log_scale).real + 2 * rounding
        if not np.isfinite(error).all():
            raise SlowDecayError
        found = value.value(self.log_scale)
        error = np.maximum(error, rounding)
        return IntegrandValues(
            found, most, error, np.asarray(self.log_scale), np.asarray(log_scale_error)
        )

    def _transforms(
        self, at: int, frequencies: Array
    ) -> tuple[_LaplaceTransform, _LaplaceTransform | None]:
        """Return the Laplace transforms of one release's rare and of its common losses.

        a is None if no outcomes are common.

        Beside common outcomes rare ones are few. An error of b's scale, as a factor of the whole
        measure, would count T times. As an absolute error it counts only as often as rare outcomes
        occur.
        """
        if not self.common:
            return _LaplaceTransform.with_scale_error(self.rare[at], self.order, frequencies), None
        b = _LaplaceTransform.with_absolute_error(self.rare[at], self.order, frequencies)
        return b, _LaplaceTransform.with_scale_error(self.common[at], self.order, frequencies)


@dataclass(frozen=True, slots=True)
class _LaplaceTransform:
    """The Laplace transform of one release's common or rare losses, with bounds on its error.

    It is e^{log_scale ± scale_error}·(1 + phi_minus_one ± error) at each frequency v of s + iv.

    The scale error is the same at every v: the measure is larger or smaller by this factor
    throughout. So the integral over a composition, which is that of a positive measure, is off by T
    times it.
    """

    log_scale: float
    scale_error: float
    phi_minus_one: ComplexArray
    error: Array

    @classmethod
    def with_scale_error(
        cls, law: WindowedLoss, order: float, frequencies: Array
    ) -> _LaplaceTransform:
        """Compute the transform; `scale_error` holds a small error of its factor e^log_scale.

        Otherwise it is made part of the absolute error, as in `with_absolute_error`.
        """
        nodes = law.trapezoidal_rule(order, float(frequencies[-1]))
        if nodes.moment_error > _SCALE_ERROR_MAX:
            return cls.with_absolute_error(law, order, frequencies)
        phi_minus_one, error = nodes.characteristic(frequencies)
        return cls(nodes.log_moment, nodes.moment_error, phi_minus_one, error)

    @classmethod
    def with_absolute_error(
        cls, law: WindowedLoss, order: float, frequencies: Array
    ) -> _LaplaceTransform:
        """Compute the transform; `error` includes the error of its factor e^log_scale."""
        nodes = law.trapezoidal_rule(order, float(frequencies[-1]))
        phi_minus_one, error = nodes.unnormalised_characteristic(frequencies)
        return cls(nodes.log_moment, 0.0, phi_minus_one, error)

    def log(self) -> ComplexArray:
        """Return the complex logarithm of the computed transform at each frequency."""
        return np.asarray(self.log_scale + log1p_complex(self.phi_minus_one))

    def log_modulus(self) -> ComplexArray:
        """Return log|computed transform|, as complex numbers with imaginary part 0."""
        return np.asarray(self.log().real, complex)

    def log_modulus_upper(self) -> ComplexArray:
        """Return upper bounds on log|exact transform| as complex numbers with imaginary part 0."""
        size = np.exp(log1p_complex(self.phi_minus_one).real)
        return self.log_modulus() + np.log1p(self.error / np.maximum(size, 1e-300))


class _LaplaceTransformProduct:
    """The product of all releases' transforms, minus the product over common outcomes only.

    That is Π(a + b)^T − Πa^T, or Πb^T alone without common outcomes, built release by release.
    """

    def __init__(self, points: int, differs: bool) -> None:
        self._whole, self._ratio = np.zeros(points, complex), np.zeros(points, complex)
        self._differs = differs

    def multiply(
        self, log_rare: ComplexArray, log_common: ComplexArray | None, count: int
    ) -> Array:
        """Multiply by a transform `count` times; return the rounding error in machine epsilons.

        `log_rare` is the log of b, its transform of rare outcomes, and `log_common` that of a, its
        transform of common outcomes.
        """
        if log_common is None:
            self._whole += count * log_rare
            return np.asarray(np.abs(log_rare))
        log_ratio = _log_one_plus_exp(log_rare - log_common)  # of (a + b)/a
        self._whole += count * (log_common + log_ratio)
        self._ratio += count * log_ratio
        # of b/a: its rounding is the ratio's
        exponent = np.minimum(np.abs(log_rare - log_common), 700.0)
        return np.asarray(np.abs(log_common) + np.abs(log_ratio) * (1 + exponent))

    def value(self, log_scale: float) -> ComplexArray:
        """Return the product divided by e^log_scale at each frequency, without overflow.

        The product is e^whole·(1 − e^−ratio).
        """
        whole = self._whole - log_scale
        if not self._differs:
            with np.errstate(over="ignore", invalid="ignore"):
                return np.exp(whole)
        grows = self._ratio.real > 0
        positive, negative = np.where(grows, self._ratio, 0.0), np.where(grows, 0.0, self._ratio)
        with np.errstate(
            over="ignore", invalid="ignore"
        ):  # a non-finite value is refused by the caller
            up = np.exp(whole) * -np.expm1(-positive)
            down = np.exp(whole - negative) * np.expm1(negative)
        return np.asarray(np.where(grows, up, down))


def _log_one_plus_exp(x: ComplexArray) -> ComplexArray:
    """Return log(1 + e^x), without overflow."""
    grows = x.real > 0
    return np.asarray(np.where(grows, x, 0.0) + log1p_complex(np.exp(np.where(grows, -x, x))))
