"""Both bounds in closed form for sampled Gaussian releases with little noise.

With little noise an outcome shows whether the record took part, so nearly all there is to sum over
is the number of times that it did. Let N₀ and N₁ be the noise without and with the record,
Λ = log(dN₁/dN₀), and l = log(1 − q + q·e^Λ) the loss of one release (see `privacy_loss`). Unsampled
Gaussian releases join in with their exact law. For a number k of participations of each release
let o(k) = Σ kᵢ·log qᵢ + (Tᵢ − kᵢ)·log(1 − qᵢ), and let δ_μ be the profile of the Gaussian mechanism
with μ² = Σ kᵢ·μᵢ² + (the unsampled μ²). With Binomial probabilities of k, define

    G(ε) = Σ_k P(k)·δ_μ(ε − o(k)).

**Removing, below.** l ≥ log q + Λ and l ≥ log(1 − q). Given who took part, the first bounds are
summed over the releases with the record, where Σ Λ has the law of the Gaussian mechanism's loss,
and the second over the others. So δ(ε) = E_P[(1 − e^{ε−L})₊] ≥ G(ε), whatever the noise.

**Removing, above.** Let v = log((1−q)/q) and x > 0. Where Λ ≥ v + x, the mixture's density is at
most (1 + e^{−x})·q·dN₁, and l ≤ log q + Λ + e^{−x}. Where Λ ≤ v − x, it is at most
(1 + e^{−x})·(1−q)·dN₀, and l ≤ log(1−q) + e^{−x}. Between them lies a mass
m ≤ q·N₁(Λ < v + x) + (1−q)·N₀(Λ > v − x), where l ≤ log(1−q) + h with h = log(1 + e^x). With
η = ΣT·e^{−x}, the outcomes with no release between add at most e^η·G(ε − η) to δ. If a set of j
releases lies between, the others have the law of G with these j absent, which has the probability
Π(1−qᵢ) in G: so all sets of j add at most e^η·M^j/j!·G(ε − η − j·h), M = ΣT·m/(1−q). That J or more
lie between has a probability of at most M^J/J!.

**Adding.** The loss of a sampled release is −l ≤ −log(1−q), and at least that less e^{−x} where
Λ ≤ v − x. With c = −ΣT·log(1−q) and B = ΣT·N₀(Λ > v − x), and δ₀ the profile of the unsampled
releases,

    (1 − B)·δ₀(ε − c + η) ≤ δ(ε) ≤ δ₀(ε − c).

The profile at a negative ε is δ_μ(ε) = 1 − e^ε + e^ε·δ_μ(−ε), by the symmetry of the pair.

**Rounding.** Every argument is moved outward by 1e-14 of the sum of its terms' sizes, every δ by
the margin of `rounding`. Counts outside the window of the sum have a probability of at most
e^`log_tail`, which the upper bound adds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from accountant_service.numerics.floats import rounding, search
from accountant_service.numerics.floats.bounds import Bounds
from accountant_service.numerics.floats.special_functions import (
    Array,
    binomial_window,
    log_binomial_pmf,
    log_normal_tail,
)
from accountant_service.numerics.laws import gaussian
from accountant_service.numerics.laws.dominating_pair import (
    DIRECTIONS,
    Composition,
    Direction,
    GaussianPair,
    Release,
)

_TERMS_MAX: Final = 1 << 18  # of one sum
_MARGINS: Final = (24.0, 18.0, 12.0)  # x less log ΣT: the least accurate one is good to 1e-5 in ε
_AMBIGUOUS_MAX: Final = 1e-2  # M beyond which the upper bound is too loose to be of use
_AMBIGUOUS_FEW: Final = 1e-6  # M that costs no digits
_AMBIGUOUS_RELEASES_MAX: Final = 12  # J
_ARGUMENT_ROUNDING: Final = 1e-14
_LOG_TAIL_MIN: Final = -730.0  # below the least δ that is claimed
_EPSILON_LEAST: Final = 1e-9  # smaller values of ε are not distinguished from 0
_RELATIVE_WIDTH: Final = 1e-12


def is_useful(releases: Composition) -> bool:
    """Return whether the noise is so small that this engine bounds δ(ε) tightly."""
    sampled = _collect_sampled(releases)
    return sampled is not None and _choose_margin(sampled) is not None


def epsilon_bounds(releases: Composition, delta: float) -> Bounds | None:
    """Return a proved interval around ε at δ, or None if it would be too wide.

    Args:
        releases: each release with its count (≥ 1), at least one.
        delta: in (0, 1).
    """
    profile = _build_profile(releases, math.log(delta) - 35.0)
    if profile is None:
        return None
    log_delta, largest = math.log(delta), 1.0 + profile.epsilon_max(delta)

    def upper_violation(epsilon: float) -> float:
        """Return log(upper bound on δ(ε)) − log δ, which is positive if ε is too small."""
        return profile.log_upper(epsilon) - log_delta

    def lower_violation(epsilon: float) -> float:
        """Return log δ − log(lower bound on δ(ε)), which is positive if ε is too large."""
        return log_delta - profile.log_lower(epsilon)

    upper = _find_smallest_epsilon(upper_violation, largest)
    about_lower = min(upper, largest) * (1 - 1e-8)  # if the noise is little enough
    starts = (
        start for start in (about_lower, _EPSILON_LEAST) if start > 0 and lower_violation(start) < 0
    )
    start, lower = next(starts, 0.0), 0.0
    if start > 0:
        lower = search.find_boundary(
            lower_violation, start, 1 + min(upper, largest), _RELATIVE_WIDTH
        )
    return Bounds(rounding.down(lower), rounding.up(upper))


def delta_bounds(releases: Composition, epsilon: float) -> Bounds | None:
    """Return a proved interval around δ(ε), or None if it would be too wide.

    Args:
        releases: each release with its count (≥ 1), at least one.
        epsilon: at least 0.
    """
    profile = _build_profile(releases, _LOG_TAIL_MIN)
    if profile is None:
        return None
    lower, upper = profile.log_lower(epsilon), profile.log_upper(epsilon)
    return Bounds(rounding.down(math.exp(lower)), min(1.0, rounding.up(math.exp(upper))))


def _find_smallest_epsilon(violation: Callable[[float], float], largest: float) -> float:
    """Return the smallest ε with violation(ε) ≤ 0; ∞ if violation(largest) > 0.

    The violation decreases with ε.
    """
    if violation(0.0) <= 0:
        return 0.0
    if violation(_EPSILON_LEAST) <= 0:
        return _EPSILON_LEAST
    if violation(largest) > 0:
        return math.inf
    return search.find_boundary(violation, largest, _EPSILON_LEAST, _RELATIVE_WIDTH)


@dataclass(frozen=True, slots=True)
class _SampledReleases:
    """Sampled Gaussian releases as arrays: the count, sample rate and μ of each.

    A release is ambiguous if its outcome does not show whether the record was in the sample: |Λ −
    v| < x, Λ the log-likelihood ratio of presence, v = log((1 − q)/q), and x the `margin` that the
    methods take. A larger margin leaves more releases ambiguous and bounds the others better.
    """

    counts: Array
    rates: Array
    mus: Array

    @property
    def log_absent(self) -> Array:
        """Return log(1 − q) for each release: the log probability of not sampling the record."""
        return np.log1p(-self.rates)

    @property
    def log_odds(self) -> Array:
        """Return each release's log-odds of not sampling the record: log((1 − q)/q) at rate q."""
        return self.log_absent - np.log(self.rates)

    def log_false_presence(self, margin: float) -> Array:
        """Return, per release, log P(outcome does not clearly show absence | record absent).

        This is N₀(Λ > v − x).
        """
        return log_normal_tail((self.log_odds - margin) / self.mus + self.mus / 2)

    def log_false_absence(self, margin: float) -> Array:
        """Return, per release, log P(outcome does not clearly show presence | record present).

        This is N₁(Λ < v + x).
        """
        return log_normal_tail(self.mus / 2 - (self.log_odds + margin) / self.mus)

    def expected_ambiguous(self, margin: float) -> float:
        """Bound the sum over releases of P(outcome leaves presence open)/P(record not sampled).

        This is M of the module docstring, rounded up.
        """
        present = np.log(self.rates) + self.log_false_absence(margin)
        absent = self.log_absent + self.log_false_presence(margin)
        mass = np.logaddexp(present, absent) - self.log_absent
        return rounding.up(float(self.counts @ np.exp(mass)))


@dataclass(frozen=True, slots=True)
class _Participations:
    """The distribution of the number of times that each release samples the record.

    It has P(k), o(k) and μ(k) for all likely combinations of numbers k of participations.

    Attributes:
        log_weights, offsets, mus: of every combination of counts within the window.
        log_outside: of an upper bound on all others' probability.
    """

    log_weights: Array
    offsets: Array
    mus: Array
    log_outside: float

    def log_mixture_delta(self, epsilon: float, rounding_sign: float) -> float:
        """Return the log of the mean δ(ε) of Gaussian mechanisms, one per participation count.

        This is log G(ε) of the module docstring.

        The arguments are moved up by `rounding_sign` times their rounding.
        """
        size = abs(epsilon) + np.abs(self.offsets) + self.mus**2
        at = epsilon - self.offsets + rounding_sign * _ARGUMENT_ROUNDING * size
        terms = self.log_weights + _log_gaussian_delta(at, self.mus)
        peak = float(terms.max())
        return peak + math.log(np.exp(terms - peak).sum()) if peak > -math.inf else peak


@dataclass(frozen=True, slots=True)
class _SmallNoiseProfile:
    """Closed-form bounds on log δ(ε), valid for a removed and for an added record."""

    sampled: _SampledReleases
    participations: _Participations
    unsampled_mu: float
    margin: float

    def epsilon_max(self, delta: float) -> float:
        """Return an upper bound on ε at δ: that of the same releases without sampling."""
        total = self.sampled.counts @ self.sampled.mus**2 + self.unsampled_mu**2
        return float(gaussian.epsilon(delta, math.sqrt(total)))

    def log_lower(self, epsilon: float) -> float:
        """Return a lower bound on log δ(ε), rounded down; −∞ if δ may be 0."""
        return max(self.log_bounds(each, epsilon)[0] for each in DIRECTIONS)

    def log_upper(self, epsilon: float) -> float:
        """Return an upper bound on log δ(ε), rounded up."""
        return max(self.log_bounds(each, epsilon)[1] for each in DIRECTIONS)

    def log_bounds(self, direction: Direction, epsilon: float) -> tuple[float, float]:
        """Return a lower and an upper bound on log δ(ε) of one direction, rounded outward.

        Where δ hardly falls with ε, an error of δ would be a large one of ε.
        """
        if direction == "removing":
            lower = self.participations.log_mixture_delta(epsilon, 1.0)
            mixed = self._log_delta_removing(epsilon)
            upper = float(np.logaddexp(mixed, self.participations.log_outside))
        else:
            false = np.exp(self.sampled.log_false_presence(self.margin))
            taken, lower = float(self.sampled.counts @ false), -math.inf
            if taken < 0.5:
                lower = self._log_delta_adding(epsilon + self._loss_error, 1.0)
                lower += math.log1p(-rounding.up(taken))
            upper = self._log_delta_adding(epsilon, -1.0)
        return lower - rounding.MARGIN, min(0.0, upper) + rounding.MARGIN

    @property
    def _loss_error(self) -> float:
        """Return an upper bound on the error of the sum of approximated privacy losses.

        Each release contributes e^{−x}.
        """
        return float(self.sampled.counts.sum()) * math.exp(-self.margin)

    def _log_delta_removing(self, epsilon: float) -> float:
        """Return the log of an upper bound on δ(ε) for a removed record.

        It sums over the number of ambiguous releases; the last number counts fully.
        """
        expected_ambiguous, loss_error = (
            self.sampled.expected_ambiguous(self.margin),
            self._loss_error,
        )
        terms, log_factor = [], 0.0
        height = float(np.logaddexp(0.0, self.margin)) * (1 + 1e-14)
        for number in range(_AMBIGUOUS_RELEASES_MAX):
            shifted = epsilon - loss_error - number * height
            terms.append(
                loss_error + log_factor + self.participations.log_mixture_delta(shifted, -1.0)
            )
            log_factor += (
                math.log(expected_ambiguous / (number + 1)) if expected_ambiguous > 0 else -math.inf
            )
            if log_factor < terms[0] - 40.0:
                break
        return float(np.logaddexp.reduce([*terms, log_factor]))

    def _log_delta_adding(self, epsilon: float, rounding_sign: float) -> float:
        """Return the log of a bound on δ(ε) for an added record: lower if `rounding_sign` is 1.

        It is δ₀(ε − c) of the module docstring. The argument is moved up by `rounding_sign` times
        its rounding error: −1 gives an upper bound.
        """
        cost = -float(self.sampled.counts @ self.sampled.log_absent)
        size = abs(epsilon) + cost + self.unsampled_mu**2
        at = epsilon - cost + rounding_sign * _ARGUMENT_ROUNDING * size
        return float(_log_gaussian_delta(np.array([at]), np.array([self.unsampled_mu]))[0])


def _build_profile(releases: Composition, log_tail: float) -> _SmallNoiseProfile | None:
    """Return closed-form bounds on δ(ε); None if they would be too wide or too costly."""
    sampled = _collect_sampled(releases)
    margin = _choose_margin(sampled) if sampled else None
    if sampled is None or margin is None:
        return None
    unsampled = math.fsum(
        n * mu**2 for n, rate, mu in _gaussian_parameters(releases) if rate == 1.0
    )
    participations = _enumerate_participations(sampled, unsampled, log_tail)
    if participations is None:
        return None
    return _SmallNoiseProfile(sampled, participations, math.sqrt(unsampled), margin)


def _gaussian_parameters(releases: Composition) -> list[tuple[int, float, float]]:
    """Return the count, sample rate and μ (sensitivity over noise) of each Gaussian release."""
    return [
        (count, each.sample_rate, each.base_pair.mu)
        for each, count in releases
        if isinstance(each, Release) and isinstance(each.base_pair, GaussianPair)
    ]


def _collect_sampled(releases: Composition) -> _SampledReleases | None:
    """Return the sampled Gaussian releases; None without any, or if other noise is present."""
    gaussians = _gaussian_parameters(releases)
    table = np.array([each for each in gaussians if each[1] < 1.0], dtype=float)
    if len(gaussians) < len(releases) or not len(table):
        return None
    return _SampledReleases(*table.T)


def _choose_margin(sampled: _SampledReleases) -> float | None:
    """Choose the margin by which outcomes must show presence or absence; None if none works.

    It is one of `_MARGINS` plus log ΣT.
    """
    log_count = math.log(float(sampled.counts.sum()))
    margins = [log_count + margin for margin in _MARGINS]
    found = next(
        (x for x in margins if sampled.expected_ambiguous(x) <= _AMBIGUOUS_FEW), margins[-1]
    )
    return found if sampled.expected_ambiguous(found) <= _AMBIGUOUS_MAX else None


def _enumerate_participations(
    sampled: _SampledReleases, unsampled: float, log_tail: float
) -> _Participations | None:
    """List the likely participation counts, with probabilities; None if there are too many.

    `unsampled` is the sum of μ² of the unsampled releases.
    """
    log_weights, offsets, squares = np.zeros(1), np.zeros(1), np.full(1, unsampled)
    columns = zip(sampled.counts, sampled.rates, sampled.mus, sampled.log_absent, strict=True)
    for count, rate, mu, log_absent in columns:
        first, last = binomial_window(int(count), float(rate), log_tail)
        if len(offsets) * (last - first + 1) > _TERMS_MAX:
            return None
        present = np.arange(first, last + 1, dtype=float)
        weights = log_binomial_pmf(present, int(count), float(rate))
        own = present * math.log(rate) + (count - present) * log_absent
        log_weights = np.add.outer(log_weights, weights).ravel()
        offsets = np.add.outer(offsets, own).ravel()
        squares = np.add.outer(squares, present * mu * mu).ravel()
    outside = log_tail + math.log(2 * len(sampled.counts))
    return _Participations(log_weights, offsets, np.sqrt(squares), outside)


def _log_gaussian_delta(epsilon: Array, mu: Array) -> Array:
    """Return log δ(ε) of Gaussian mechanisms; ε may be negative and μ may be 0."""
    size = np.abs(epsilon)
    with np.errstate(divide="ignore"):
        of_size = np.where(mu > 0, gaussian.log_delta(size, np.where(mu > 0, mu, 1.0)), -np.inf)
        negative = np.log(-np.expm1(-size) + np.exp(of_size - size))
    return np.where(epsilon >= 0, of_size, negative)
