"""The pairs of mechanisms with discrete outcomes.

*Randomized response.* With probability f the answer is drawn uniformly from k categories, else it
is true. For two true answers a and b the laws differ at a and b only, with the losses ±log of
(1 − f + f/k)/(f/k). All pairs of answers have the same profile, so it is exact.

*Discrete noise.* Let X be noise on the integers with a log-concave and symmetric mass function, and
Δ the largest difference of a query's integer answers to two neighbours. The pair is X + Δ against
X. It dominates every smaller difference s: the likelihood ratio of X + s to X increases with the
outcome, so H(x) is the largest P(X + s ≥ t) − e^x·P(X ≥ t) over t, and each of these increases in
s. By symmetry the same holds for −s and for both directions.

* Discrete Laplace: P(X = j) = tanh(1/(2b))·e^{−|j|/b}. The loss (|j| − |j − Δ|)/b is ±Δ/b outside
  of 0 < j < Δ, so there are Δ + 1 different losses.
* Discrete Gaussian (Canonne, Kamath & Steinke 2020, arXiv 2004.00010): P(X = j) ∝ e^{−j²/(2σ²)},
  with the loss Δ(2j − Δ)/(2σ²). The normalising constant is a sum of positive terms; the range is
  cut at 40σ, where less than 1e-340 is left.

*Approximate DP.* Nothing is known of the release but (ε, δ)-DP. The worst such release (Kairouz,
Oh & Viswanathan 2015, arXiv 1311.0776, Theorem 3.4) reveals everything with probability δ and
otherwise answers one bit by randomized response with the loss ±ε.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from accountant_service.numerics.floats.special_functions import Array, log_sum_exp
from accountant_service.numerics.laws.atomic_pair import AtomicPair, Atoms

_EPS: Final = float(np.finfo(float).eps)
_TAIL_DEVIATIONS: Final = 40.0  # of discrete Gaussian noise; less than the least double lies beyond


@dataclass(frozen=True)
class RandomizedResponsePair(AtomicPair):
    """Randomized response on k categories: a uniform answer with probability f, else the truth."""

    categories: int
    flip_probability: float

    def list_atoms(self) -> Atoms:
        """Return up to three outcomes: the true category, the neighbour's, and any other."""
        k, f = self.categories, self.flip_probability
        # without differences of numbers near each other: 1 − f is exact for f ≥ ½
        likely, unlikely = math.log((1 - f) + f / k), math.log(f / k)
        ratio = math.log1p((1 - f) * k / f)
        if k == 2:
            return _atoms(np.array([-ratio, ratio]), np.array([likely, unlikely]))
        other = math.log(f * (1 - 2 / k))
        return _atoms(np.array([-ratio, 0.0, ratio]), np.array([likely, other, unlikely]))


@dataclass(frozen=True)
class DiscreteLaplacePair(AtomicPair):
    """Discrete Laplace noise of scale b, added to an integer query of sensitivity Δ."""

    scale: float
    sensitivity: int

    def list_atoms(self) -> Atoms:
        """Return one outcome for each possible privacy loss: outputs of equal loss are merged."""
        b, outcome = self.scale, np.arange(self.sensitivity + 1, dtype=float)
        log_ratios = (2 * outcome - self.sensitivity) / b
        log_without = math.log(math.tanh(0.5 / b)) - outcome / b
        log_tail = -math.log1p(math.exp(-1 / b))  # log P(X ≤ 0)
        log_without[0] = log_tail
        log_without[-1] = log_tail - self.sensitivity / b
        return _atoms(log_ratios, log_without)


@dataclass(frozen=True)
class DiscreteGaussianPair(AtomicPair):
    """Discrete Gaussian noise of parameter σ, added to an integer query of sensitivity Δ."""

    noise_std: float
    sensitivity: int

    def list_atoms(self) -> Atoms:
        """Return the integer outputs that are possible without or with the record."""
        reach = math.ceil(_TAIL_DEVIATIONS * self.noise_std) + 1
        noise = np.arange(-reach, reach + self.sensitivity + 1, dtype=float)
        exponent = -0.5 * (noise / self.noise_std) ** 2
        log_ratios = self.sensitivity * (2 * noise - self.sensitivity) / (2 * self.noise_std**2)
        return _atoms(log_ratios, exponent - float(log_sum_exp(exponent)))


@dataclass(frozen=True)
class ApproximatePair(AtomicPair):
    """The dominating pair of (ε, δ)-DP: randomized response that reveals all with probability δ."""

    epsilon: float
    delta: float

    def list_atoms(self) -> Atoms:
        """Return the two answers of randomized response, and infinite losses of probability δ."""
        if self.delta == 1.0:  # nothing but infinite losses
            return Atoms(np.zeros(0), np.zeros(0), np.zeros(0), 0.0, 1.0, 1.0)
        log_kept = math.log1p(-self.delta)
        likely = log_kept - math.log1p(math.exp(-self.epsilon))
        log_without = np.array([likely, likely - self.epsilon])
        log_ratios = np.array([-self.epsilon, self.epsilon])
        return _atoms(log_ratios, log_without, self.delta)


def _atoms(log_ratios: Array, log_without: Array, infinite: float = 0.0) -> Atoms:
    """Build the outcomes of a symmetric pair of distributions from its log-likelihood ratios.

    Every log is off by a few eps of its size, and the normalising constants by fewer than 16.
    """
    log_with = log_without + log_ratios
    largest = float(np.maximum(np.minimum(np.abs(log_without), 745.0), np.abs(log_ratios)).max())
    error = 8 * _EPS * (16 + min(largest, 745.0))
    return Atoms(log_ratios, log_without, log_with, error, infinite, infinite)
