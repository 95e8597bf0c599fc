"""δ(ε) of a composition by one integral along a vertical line, with every error outward.

With x = L − ε and s > 0 the hockey stick is an integral of exponentials (Laplace inversion; for
privacy curves, not as a bound: Alghamdi et al. 2022, arXiv 2208.09595),

    (1 − e^{−x})₊ = (1/2πi) ∫_{Re w = s} e^{wx}·G(w) dw,    G(w) = 1/(w(w + 1)),

so that δ(ε) = E_P[(1 − e^{ε−L})₊] is the integral of e^{K(w) − wε}·G(w), K(w) = log E_P[e^{wL}].
K is the sum of the releases' own, each times its count: the cost does not depend on the counts.
Summed with spacing Δ the integral is, exactly (Poisson's summation formula),

    δ(ε) + Σ_{j≠0} e^{jsW}·δ(ε + jW),    W = 2π/Δ.

Every added term is positive: the sum errs upwards, by at most 1/(e^{sW} − 1) from the left and by
Chernoff's bound from the right. The frequencies that are left out are bounded by the decay of
|φ|, the rest by the errors of φ and by rounding.

**Smoothing.** Where |φ| hardly decays, as with a handful of rare events, the hockey stick is
smoothed by η. Above it: account one more Gaussian release of μ = η, which multiplies the integrand
by e^{w(w+1)η²/2}. Below it: let the attacker accuse when L + ηZ ≥ ε + c, Z his own normal draw:

    (1 − e^{−x})·P(x + ηZ ≥ c):   G(w) = e^{w²η²/2 − wc}/w − e^{(w+1)²η²/2 − (w+1)c}/(w + 1).

Both cost η²/2 times the density of L at ε, and decay like e^{−v²η²/2} whatever φ does.

docs/accountants/pld.md has the proofs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from accountant_service.numerics.engines.saddle_point import SaddlePoint
from accountant_service.numerics.errors import SlowDecayError
from accountant_service.numerics.floats.special_functions import Array, ComplexArray
from accountant_service.numerics.laws.characteristic_function import TiltedLoss, tilted_loss
from accountant_service.numerics.laws.dominating_pair import Composition
from accountant_service.numerics.time_limit import check_time

_UNDERFLOW: Final = 1e-300  # more than any δ, or Q of an attack, that is computed as zero
_EPS: Final = float(np.finfo(float).eps)
_BLOCKS_PER_OCTAVE: Final = 8
_OCTAVES: Final = 24
_ROUNDS: Final = 7  # each narrows the upper bound 32 times
_POINTS: Final = 32
_HALVINGS: Final = 34  # the lower bound is this many halvings of ε below the upper one, at most
_DIGITS: Final = 32.0  # natural log of what double precision resolves, with room
_SECANTS: Final = 6
_SECANT_LEAST: Final = 1e-10  # relative, of ε
_WIDENINGS: Final = (1.05, 2.0)  # factors on the width that the errors suggest
_ONCE: Final = np.asarray(1.0)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class IntegrationSettings:
    """Settings of an integral for δ(ε): accuracy, smoothing width and work limit.

    Attributes:
        log_accuracy: log of the relative error of δ to aim at.
        smoothing: η ≥ 0, the standard deviation of the noise that smooths the hockey stick.
        work_limit: limit of the number of frequencies times nodes.
    """

    log_accuracy: float
    smoothing: float
    work_limit: float


@dataclass(frozen=True, slots=True)
class _FourierSum:
    """A Fourier sum Σ Re(terms·e^{−ivε}) over frequencies v, and an upper bound on its error.

    It is off by at most `error`, and by `drift` more for each unit of ε. For several compositions,
    terms, error and drift have a row for each of them.
    """

    frequencies: Array
    terms: ComplexArray
    error: Array
    drift: Array

    def evaluate(self, epsilons: Array) -> tuple[Array, Array]:
        """Return the sum at each ε, and an upper bound on its absolute error.

        Several compositions each have their own ε.
        """
        phase = np.multiply.outer(epsilons, self.frequencies)
        total = (np.cos(phase) * self.terms.real + np.sin(phase) * self.terms.imag).sum(axis=-1)
        return total, self.error + self.drift * np.abs(epsilons)

    def evaluate_table(self, epsilons: Array) -> tuple[Array, Array]:
        """Return the sum and its error bound as tables: a row per composition, a column per ε.

        The products may be summed in any order: `error` counts the rounding of any.
        """
        phase = np.multiply.outer(self.frequencies, epsilons)
        terms = np.atleast_2d(self.terms)
        total = terms.real @ np.cos(phase) + terms.imag @ np.sin(phase)
        drift = np.multiply.outer(np.atleast_1d(self.drift), np.abs(epsilons))
        return total, np.atleast_1d(self.error)[:, np.newaxis] + drift


@dataclass(frozen=True, slots=True)
class EvaluatedIntegral:
    """A computed integral of a composition, which bounds δ(ε) at any ε.

    All sums are relative to a scale that is known up to a factor e^{±log_scale_error}. Relative to
    e^{log_scale − sε}, δ(ε) is at most `above` and, less the aliases, at least `below`. Relative to
    e^{log_scale − st}, P(L + ηZ ≥ t) is, less the aliases, at least `true_positives`. Relative to
    e^{log_scale − (s+1)t}, Q(L + ηZ ≥ t) is at most `false_positives`.
    """

    line: IntegrationLine
    above: _FourierSum
    below: _FourierSum
    true_positives: _FourierSum
    false_positives: _FourierSum
    log_scale: Array
    log_scale_error: Array
    omitted: OmittedOutcomes

    def delta(self, epsilons: Array) -> tuple[Array, Array]:
        """Return lower and upper bounds on δ at each real ε (which may be negative)."""
        tilt = self.line.tilt
        exponent = np.minimum(self.log_scale - tilt * epsilons, 600.0)  # past it δ ≤ 1 says more
        exponent_size = np.abs(self.log_scale) + np.abs(tilt * epsilons)
        scale_error = self.log_scale_error + 4 * _EPS * (1 + exponent_size)
        total, error = self.above.evaluate(epsilons)
        upper = np.exp(exponent + scale_error) * np.maximum(total + error, 0.0) + _UNDERFLOW
        upper += self.omitted.delta(epsilons)
        total, error = self.below.evaluate(epsilons)
        lower = np.exp(exponent - scale_error) * np.maximum(total - error, 0.0)
        lower = lower - self._aliasing_error(epsilons)
        return np.clip(lower, 0.0, 1.0), np.minimum(upper, 1.0)

    def delta_table(self, epsilons: Array) -> tuple[Array, Array]:
        """Return lower and upper bounds on δ as tables: a row per composition, a column per ε."""
        tilt = self.line.tilt
        log_scale = np.atleast_1d(self.log_scale)[:, np.newaxis]
        exponent = np.minimum(log_scale - tilt * epsilons, 600.0)
        exponent_size = np.abs(log_scale) + np.abs(tilt * epsilons)
        scale_error = np.atleast_1d(self.log_scale_error)[:, np.newaxis]
        scale_error = scale_error + 4 * _EPS * (1 + exponent_size)
        total, error = self.above.evaluate_table(epsilons)
        upper = np.exp(exponent + scale_error) * np.maximum(total + error, 0.0) + _UNDERFLOW
        upper += self.omitted.delta(epsilons)
        if self.line.smoothing > 0.0:
            total, error = self.below.evaluate_table(epsilons)
        lower = np.exp(exponent - scale_error) * np.maximum(total - error, 0.0)
        lower = lower - self._aliasing_error_table(epsilons)
        return np.clip(lower, 0.0, 1.0), np.minimum(upper, 1.0)

    def epsilon(self, delta: float, known_upper: float) -> tuple[float, float]:
        """Return lower and upper bounds on the smallest ε ≥ 0 with δ(ε) ≤ `delta`.

        Args:
            delta: in (0, 1).
            known_upper: an upper bound on ε that is already proved.
        """
        points, upper = np.linspace(0.0, known_upper, _POINTS + 1), 0.0
        for _ in range(_ROUNDS):
            costly = np.flatnonzero(~(self.delta(points[:-1])[1] <= delta))
            if not len(costly):
                break
            low, upper = points[costly[-1]], float(points[costly[-1] + 1])
            points = np.linspace(low, upper, _POINTS + 1)
        points, lower = upper * (1 - np.exp2(-np.arange(_HALVINGS))), 0.0
        for _ in range(2):
            costly = np.flatnonzero(self.delta(points[:-1])[0] > delta)
            if not len(costly):
                break
            lower = float(points[costly[-1]])
            points = np.linspace(lower, points[costly[-1] + 1], _POINTS + 1)
        return lower, upper

    def epsilons(self, delta: float, guesses: Array) -> tuple[Array, Array]:
        """Return, per composition, lower and upper bounds on the ε > 0 with δ(ε) = `delta`.

        They are found by the secant method.

        Args:
            delta: in (0, 1).
            guesses: a guess of each ε.

        Returns:
            Lower bounds (0 where none is found) and upper bounds (infinite where none is found).
        """
        at, slope = guesses, np.full_like(guesses, self.line.tilt + 0.5)  # of −log δ
        log_ratio = self._log_delta_ratio(at, delta)
        for _ in range(_SECANTS):
            step = np.clip(log_ratio / slope, -0.5 * at, at)
            following = self._log_delta_ratio(at + step, delta)
            with np.errstate(invalid="ignore", divide="ignore"):
                steeper = (log_ratio - following) / step
            usable = (steeper > 0) & (np.abs(step) > _SECANT_LEAST * at) & np.isfinite(steeper)
            at, log_ratio, slope = at + step, following, np.where(usable, steeper, slope)
        least, most = self.delta(at)
        width = np.log(most / np.maximum(least, _UNDERFLOW)) / slope + np.abs(log_ratio) / slope
        lower, upper = np.zeros_like(at), np.full_like(at, math.inf)
        for widening in _WIDENINGS:
            out = widening * width + _SECANT_LEAST * at
            below, above = np.maximum(at - out, 0.0), at + out
            lower = np.maximum(lower, np.where(self.delta(below)[0] > delta, below, 0.0))
            upper = np.minimum(upper, np.where(self.delta(above)[1] <= delta, above, math.inf))
        return lower, upper

    def _log_delta_ratio(self, epsilons: Array, delta: float) -> Array:
        """Return log(upper bound on δ(ε) / `delta`) at each ε."""
        log_ratio: Array = np.log(self.delta(epsilons)[1]) - math.log(delta)
        return log_ratio

    def attack_rates(self, thresholds: Array) -> tuple[Array, Array]:
        """Return upper bounds on FPR and lower bounds on TPR of attacks that threshold the loss.

        Each threshold t is one attack. The noisy loss is L + ηZ: the privacy loss plus normal noise
        of standard deviation `line.attack_noise_deviation`.

        Returns:
            Upper bounds on the false-positive rates and lower bounds on the true-positive rates.
        """
        tilt = self.line.tilt
        exponent_size = np.abs(self.log_scale) + (tilt + 1) * np.abs(thresholds)
        scale_error = self.log_scale_error + 4 * _EPS * (1 + exponent_size)
        exponent = np.minimum(self.log_scale - tilt * thresholds, 600.0)
        total, error = self.true_positives.evaluate(thresholds)
        true_positives = np.exp(exponent - scale_error) * np.maximum(total - error, 0.0)
        exponent = np.minimum(self.log_scale - (tilt + 1) * thresholds, 600.0)
        total, error = self.false_positives.evaluate(thresholds)
        false_positives = (
            np.exp(exponent + scale_error) * np.maximum(total + error, 0.0) + _UNDERFLOW
        )
        true_positives = true_positives - self._aliasing_error(
            thresholds, self.line.attack_noise_deviation
        )
        return np.minimum(false_positives, 1.0), np.clip(true_positives, 0.0, 1.0)

    def _aliasing_error(self, epsilons: Array, smoothing: float = 0.0) -> Array:
        """Return, per ε, an upper bound on the error of replacing the integral by a sum.

        `smoothing` is the standard deviation of Gaussian noise added to the loss.
        """
        line = self.line
        left = math.exp(line.log_mass) / math.expm1(min(line.tilt * line.period, 700.0))
        if not len(line.higher_tilts):
            return np.full_like(epsilons, math.inf)
        decay = np.minimum((line.higher_tilts - line.tilt) * line.period, 700.0)
        chernoff = line.higher_moments - np.multiply.outer(epsilons, line.higher_tilts)
        chernoff += 0.5 * (line.higher_tilts * smoothing) ** 2 - np.log(np.expm1(decay))
        total: Array = left + np.exp(np.minimum(chernoff.min(axis=1), 700.0))
        return total * (1 + 1e-9)

    def _aliasing_error_table(self, epsilons: Array) -> Array:
        """Return the aliasing error's upper bounds: a row per composition, a column per ε."""
        rows = np.atleast_2d(self.line.higher_moments)
        return np.stack(
            [
                replace(self, line=replace(self.line, higher_moments=row))._aliasing_error(epsilons)
                for row in rows
            ]
        )


def integrate_composition(
    releases: Composition,
    saddle: SaddlePoint,
    settings: IntegrationSettings,
    repetitions: Array = _ONCE,
) -> EvaluatedIntegral:
    """Bound δ(ε) of a composition by a complex line integral through its saddle point.

    Args:
        releases: with their counts.
        saddle: near the ε of interest, of the composition repeated the most times.
        settings: accuracy there, smoothing, and the work limit.
        repetitions: how often the composition is repeated; several are integrated at once.

    Raises:
        SlowDecayError: the integrand decays too slowly for the work limit.
    """
    line = choose_line(saddle, settings)
    shares = repetitions / repetitions.max()
    moments = np.multiply.outer(shares, line.higher_moments) * (1 + 4 * _EPS)
    line = replace(line, higher_moments=moments)
    tilted = [(tilted_loss(r, saddle.direction, line.tilt), count) for r, count in releases]
    return integrate_along_line(
        CompositionIntegrand(tilted, repetitions), line, settings.work_limit
    )


@dataclass(frozen=True, slots=True)
class OmittedOutcomes:
    """An upper bound on the part of δ(ε) due to outcomes that an integral leaves out.

    Attributes:
        mass: the mass of outcomes that count as the worst.
        tilts: the tilts of Chernoff's bound for the other outcomes.
        moments: upper bounds on log E[e^{sL}] of these, at each tilt.
    """

    mass: float = 0.0
    tilts: Array = field(default_factory=lambda: np.zeros(0))
    moments: Array = field(default_factory=lambda: np.zeros(0))

    def delta(self, epsilons: Array) -> Array:
        """Return, at each ε, an upper bound on the part of δ(ε) due to the omitted outcomes."""
        total = np.full_like(epsilons, self.mass)
        if len(self.tilts):
            chernoff = (self.moments - np.multiply.outer(epsilons, self.tilts)).min(axis=1)
            total += np.exp(np.minimum(chernoff, 0.0))
        return total * (1 + 1e-9)


@dataclass(frozen=True, slots=True)
class IntegrandValues:
    """Values, with error bounds, of the integrand Φ(v) for δ(ε) at given frequencies v.

    They are known up to a factor e^{±log_scale_error}.

    Attributes:
        value: Φ, relative to e^{log_scale}.
        largest: an upper bound on the true |Φ|.
        error: an upper bound on the distance of `value` from Φ.
        log_scale: about log Φ(0).
        log_scale_error: see above.

    For several compositions, each array has a row for each of them.
    """

    value: ComplexArray
    largest: Array
    error: Array
    log_scale: Array
    log_scale_error: Array


class LineIntegrand(Protocol):
    """Interface of an integrand Φ(v) = E[e^{(s + iv)L}]: privacy loss L, tilt s, frequency v."""

    @property
    def standard_deviation(self) -> float:
        """Estimate the standard deviation of the privacy loss L, exponentially tilted by e^{sL}."""
        ...

    def log_decay(self, edges: Array) -> Array:
        """Return upper bounds on log|Φ(v)/Φ(0)| of the integrand Φ, one per range of frequencies v.

        Each range starts at one of the edges and ends at the next; the last range has no end.
        """
        ...

    def count_nodes(self, frequency: float) -> float:
        """Return the number of quadrature nodes that the integrand needs up to this frequency."""
        ...

    def values(self, frequencies: Array) -> IntegrandValues:
        """Return the integrand Φ at increasing frequencies, with upper bounds on its error."""
        ...


class CompositionIntegrand:
    """A composition's integrand: the product of its releases' transforms raised to their counts.

    φᵢ is the characteristic function of a release's tilted privacy loss, Tᵢ its count. Several
    powers of the product may be computed at once.
    """

    def __init__(
        self, tilted: Sequence[tuple[TiltedLoss, int]], repetitions: Array = _ONCE
    ) -> None:
        """Store the tilted losses of the releases, and how often all of them are repeated.

        Args:
            tilted: each release, and its count.
            repetitions: one number ≥ 1, or several; the values then have a row for each.
        """
        self._tilted = tilted
        self._repetitions = repetitions
        self._least = float(np.min(repetitions))  # |φ| ≤ 1: it decays the slowest

    @property
    def standard_deviation(self) -> float:
        """Return an estimate of the standard deviation of the composition's tilted privacy loss."""
        square = math.fsum(count * loss.standard_deviation**2 for loss, count in self._tilted)
        return math.sqrt(self._least * square)

    def log_decay(self, edges: Array) -> Array:
        """Return upper bounds on log|Φ(v)| of the integrand Φ, one per range of frequencies v.

        Each range starts at one of the edges and ends at the next; the last range has no end. The
        bounds hold for every number of repetitions.
        """
        total = np.zeros_like(edges)
        for loss, count in self._tilted:
            total[:-1] += count * loss.log_decay(edges[:-1], edges[1:])
            total[-1] += count * loss.log_decay_beyond(float(edges[-1]))
        return self._least * total

    def count_nodes(self, frequency: float) -> float:
        """Return the number of quadrature nodes that all releases need up to this frequency."""
        return math.fsum(loss.count_nodes(frequency) for loss, _ in self._tilted)

    def values(self, frequencies: Array) -> IntegrandValues:
        """Return the integrand Φ at increasing frequencies, with upper bounds on its error.

        The error follows from |(φ + e)^T − φ^T| ≤ (|φ| + |e|)^T − |φ|^T.
        """
        different = len(self._tilted)
        log_phi = np.zeros(len(frequencies), complex)
        off = np.zeros(len(frequencies))
        log_scale, log_scale_error = 0.0, 0.0
        for loss, count in self._tilted:
            check_time()
            value = loss.characteristic(frequencies)
            log_phi += count * value.log_value
            magnitude = np.maximum(np.exp(value.log_value.real), _UNDERFLOW)
            rounded = (5 + different) * _EPS * np.abs(value.log_value)
            off += count * (np.log1p(value.error / magnitude) + rounded)
            log_scale += count * value.log_moment
            sums = (2 + different) * _EPS * abs(value.log_moment)
            log_scale_error += count * (value.moment_error + sums)
        repetitions = self._repetitions[..., np.newaxis]
        log_phi, off = repetitions * log_phi, repetitions * off
        # |Φ| ≤ 1: what was computed outside the unit disc is nearer to Φ once it is moved onto it
        phi = np.exp(np.minimum(log_phi.real, 0.0) + 1j * log_phi.imag)
        largest = np.exp(np.minimum(log_phi.real + off, 0.0))  # |Φ| and |phi| are at most this
        grown = np.exp(np.minimum(log_phi.real, 1.0)) * np.expm1(np.minimum(off, 1.0))
        error = np.where(off < 1.0, grown, 2 * largest)
        return IntegrandValues(
            phi, largest, error, self._repetitions * log_scale, self._repetitions * log_scale_error
        )


class KernelValues(NamedTuple):
    """Values of a kernel G at s + iv for frequencies v; δ(ε) is given by ∫ Φ(v)·G(s + iv) dv.

    Attributes:
        values: G at each frequency.
        size: the sum of the absolute values of its terms, to which rounding errors are relative.
    """

    values: ComplexArray
    size: Array


class PerKernel(NamedTuple, Generic[T]):
    """One value for each of the four kernels G of the integrals ∫ Φ·G that bound δ(ε).

    An attack is a hypothesis test of P against Q that accuses if L + ηZ ≥ t, Z standard normal.

    Attributes:
        above: for the upper bound on δ(ε).
        below: for the lower bound on δ(ε).
        true_positives: for the attack's probability under P.
        false_positives: for the attack's probability under Q.
    """

    above: T
    below: T
    true_positives: T
    false_positives: T


@dataclass(frozen=True, slots=True)
class IntegrationLine:
    """The complex line Re w = s on which to integrate for δ(ε), and the Fourier sum's settings.

    The integral is replaced by a sum over the frequencies v = Im w = 2πk/W. As a function of ε the
    sum repeats with period W: a longer period means a smaller error and more terms.

    Attributes:
        tilt: s.
        period: W; the frequencies are 2πk/W.
        smoothing: η.
        threshold: c, by which the attacker's threshold exceeds ε.
        log_tail: log of the tail that may be left out, relative to e^{K(s) − sε}.
        log_mass: log of the total mass of the integrated outcomes, which δ is at most.
        higher_tilts: some tilts above s.
        higher_moments: upper bounds on K there; for several compositions, a row for each.
    """

    tilt: float
    period: float
    smoothing: float
    threshold: float
    log_tail: float
    log_mass: float
    higher_tilts: Array
    higher_moments: Array

    @property
    def attack_noise_deviation(self) -> float:
        """Return the standard deviation of the noise that smooths an attack's threshold.

        The attack's step at L = t has a kernel that decays too slowly to be summed. So the attack
        that is bounded adds normal noise of this standard deviation to L first. Without smoothing
        it is far too little to matter, and never 0.
        """
        return max(self.smoothing, 1e-6 * self.period)

    def kernels(self, frequencies: Array) -> PerKernel[KernelValues]:
        """Return each of the four kernels G(s + iv) at each frequency v.

        Raises:
            SlowDecayError: the smoothing is so large that they overflow.
        """
        w: ComplexArray = np.asarray(self.tilt + 1j * frequencies)
        if 0.5 * (self.tilt + 1) ** 2 * self.attack_noise_deviation**2 > 600.0:
            raise SlowDecayError
        half = 0.5 * self.smoothing**2
        above = np.exp(w * (w + 1) * half) / (w * (w + 1))
        below, below_size = above, np.abs(above)
        if self.smoothing > 0.0:
            true_positives = np.exp(w * w * half - w * self.threshold) / w
            false_positives = np.exp((w + 1) ** 2 * half - (w + 1) * self.threshold) / (w + 1)
            below, below_size = (
                true_positives - false_positives,
                np.abs(true_positives) + np.abs(false_positives),
            )
        half = 0.5 * self.attack_noise_deviation**2
        true_positives, false_positives = (
            np.exp(w * w * half) / w,
            np.exp((w + 1) ** 2 * half) / (w + 1),
        )
        return PerKernel(
            KernelValues(above, np.abs(above)),
            KernelValues(below, below_size),
            KernelValues(true_positives, np.abs(true_positives)),
            KernelValues(false_positives, np.abs(false_positives)),
        )

    def log_kernel_tails(self, low: Array, high: Array) -> PerKernel[Array]:
        """Return upper bounds on log ∫|G(v)| dv from `low` to `high`, for each kernel G.

        They bound log(e^{a²η²/2}·∫|G| dv) with a = low.
        """
        s, half = self.tilt, 0.5 * self.smoothing**2
        log_square = np.log(1 / low - 1 / high)
        attack_half = 0.5 * self.attack_noise_deviation**2
        octaves = np.log(high / low)
        log_inverse = np.log(np.minimum(octaves, 1 / np.maximum(self.smoothing * low, 1e-150) ** 2))
        damped = np.log(np.minimum(octaves, 1 / (self.attack_noise_deviation * low) ** 2))
        damped = damped - (attack_half - half) * low * low
        true_positives, false_positives = s * s * half, (s + 1) ** 2 * half
        larger = max(
            true_positives - s * self.threshold, false_positives - (s + 1) * self.threshold
        )
        return PerKernel(
            log_square + s * (s + 1) * half,
            log_inverse + math.log(2) + larger if self.smoothing else log_square,
            damped + s * s * attack_half,
            damped + (s + 1) ** 2 * attack_half,
        )


def choose_line(
    saddle: SaddlePoint, settings: IntegrationSettings, log_mass: float = 0.0
) -> IntegrationLine:
    """Choose the complex line Re w = s on which the integral for δ(ε) needs the fewest nodes.

    It is the tilt with the shortest period W of the sum, so with the widest spacing 2π/W of the
    frequencies. Tilts at which double precision would lose too many digits of δ are left out.

    Aliases of a share a of δ need W ≥ log(1/aδ)/s on the left and, by Chernoff's bound at s′ > s,
    W ≥ (K(s′) − s′ε − log aδ)/(s′ − s) on the right. Left of the saddle point the right tail is
    lighter, for which e^{K(s) − sε} exceeds δ by more: digits that double precision has to spare.

    Args:
        saddle: the tilts to choose from, their log-moments K, and the ε and δ of interest.
        settings: accuracy and smoothing.
        log_mass: log of the total mass of the integrated outcomes; 0 for all outcomes.

    Raises:
        SlowDecayError: no tilt keeps enough digits.
    """
    tilts, moments = saddle.tilts, saddle.moments
    log_share = settings.log_accuracy + saddle.log_delta
    exponents = moments - tilts * saddle.epsilon
    left = np.logaddexp(0.0, log_mass - log_share) / tilts
    with np.errstate(divide="ignore"):
        right = (moments - tilts * 0.8 * saddle.epsilon - log_share) / np.maximum(
            tilts - tilts[:, None], 0.0
        )
    period = np.maximum(left, np.where(tilts > tilts[:, None], right, math.inf).min(axis=1))
    digits = exponents - np.log1p(tilts) - saddle.log_delta
    period[(digits > _DIGITS + settings.log_accuracy) | (tilts > 1.2 * saddle.tilt)] = math.inf
    best = int(np.argmin(period))
    if not math.isfinite(period[best]):
        raise SlowDecayError
    return IntegrationLine(
        float(tilts[best]),
        float(period[best]),
        settings.smoothing,
        (saddle.tilt + 0.5) * settings.smoothing**2,  # where the attacker loses least
        float(log_share - exponents[best]),
        log_mass,
        tilts[best + 1 :],
        moments[best + 1 :],
    )


def integrate_along_line(
    integrand: LineIntegrand,
    line: IntegrationLine,
    work_limit: float,
    omitted: OmittedOutcomes | None = None,
) -> EvaluatedIntegral:
    """Bound δ(ε) by integrating along a given line of complex numbers.

    Args:
        integrand: on this line.
        line: from `choose_line`.
        work_limit: the most frequencies times nodes.
        omitted: the outcomes that the integrand does not count; none unless given.

    Raises:
        SlowDecayError: the integrand decays too slowly for the work limit.
    """
    kept = _choose_frequencies(integrand, line, work_limit)
    spacing = 2 * math.pi / line.period
    frequencies: Array = spacing * np.arange(kept.count + 1, dtype=float)
    values = integrand.values(frequencies)
    reach = line.tilt + 1 + frequencies  # the kernels are off by a few eps of their exponents
    exponents = line.attack_noise_deviation**2 * reach**2 + abs(line.threshold) * reach
    rounding = 8 * _EPS * (1 + exponents)
    share = np.full(len(frequencies), spacing / math.pi)
    share[0] /= 2
    sums = PerKernel(
        *(
            _fourier_sum(frequencies, values, share * kernel, share * size * rounding, tail)
            for (kernel, size), tail in zip(line.kernels(frequencies), kept.tails, strict=True)
        )
    )
    return EvaluatedIntegral(
        line,
        sums.above,
        sums.below,
        sums.true_positives,
        sums.false_positives,
        values.log_scale,
        values.log_scale_error,
        omitted or OmittedOutcomes(),
    )


@dataclass(frozen=True, slots=True)
class _FrequencyCutoff:
    """The number of frequencies to sum, and upper bounds on the sums' omitted tails."""

    count: int
    tails: PerKernel[float]


def _choose_frequencies(
    integrand: LineIntegrand, line: IntegrationLine, work_limit: float
) -> _FrequencyCutoff:
    """Choose the fewest frequencies to sum such that the omitted tail is small enough.

    It is at most e^`line.log_tail`.
    """
    deviation = integrand.standard_deviation
    if not 1e-60 < deviation < 1e60:
        raise SlowDecayError
    edges = 2.0 ** (np.arange(_BLOCKS_PER_OCTAVE * _OCTAVES + 1) / _BLOCKS_PER_OCTAVE) / deviation
    low, high = edges, np.append(edges[1:], math.inf)
    log_phi = integrand.log_decay(edges)
    # the largest from each block on: what is left out is bounded by a decreasing function
    log_phi = np.maximum.accumulate(log_phi[::-1])[::-1] - 0.5 * (line.smoothing * low) ** 2
    log_tails = PerKernel(
        *(
            np.logaddexp.accumulate((log_phi + log_kernel)[::-1])[::-1] - math.log(math.pi)
            for log_kernel in line.log_kernel_tails(low, high)
        )
    )
    reached = np.flatnonzero(np.maximum(log_tails.above, log_tails.below) <= line.log_tail)
    if not len(reached):
        raise SlowDecayError
    first = int(reached[0])
    count = max(math.ceil(float(low[first]) * line.period / (2 * math.pi)), 8)
    if count * integrand.count_nodes(2 * math.pi * count / line.period) > work_limit:
        raise SlowDecayError
    tails = (math.exp(min(float(tail[first]), 700.0)) for tail in log_tails)
    return _FrequencyCutoff(count, PerKernel(*tails))


def _fourier_sum(
    frequencies: Array,
    values: IntegrandValues,
    kernel: ComplexArray,
    kernel_error: Array,
    tail: float,
) -> _FourierSum:
    """Return the Fourier sum Σ integrand·kernel·e^{−ivε}, with an upper bound on its error.

    |Φ'G' − ΦG| ≤ |Φ' − Φ|·|G'| + |Φ|·|G' − G| for computed Φ', G'.
    """
    terms = values.value * kernel
    size = np.abs(terms)
    error = values.error @ np.abs(kernel) + values.largest @ kernel_error
    error += tail + size.sum(axis=-1) * _EPS * (len(frequencies) + 32)
    return _FourierSum(frequencies, terms, error, 4 * _EPS * (size @ frequencies))
