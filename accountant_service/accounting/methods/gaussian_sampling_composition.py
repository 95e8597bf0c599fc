"""The Gaussian sampling composition theorem of papers/003 (A-DDP)."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from accountant_service.accounting.guarantee import Assumption
from accountant_service.accounting.methods.base import (
    Accountant,
    Bound,
    Question,
    assume_sampling,
    require_noise,
    require_single_group,
)
from accountant_service.accounting.release_laws import ReleaseGroup
from accountant_service.errors import TooExpensiveError
from accountant_service.numerics.floats import rounding
from accountant_service.numerics.floats.special_functions import (
    Array,
    binomial_window,
    log_binomial_pmf,
)
from accountant_service.numerics.laws import gaussian

_SOURCE: Final = "Cheng et al. 2020, Theorem 1"
_TERMS_MAX: Final = 200_000
_LOG_TAIL: Final = -40.0  # natural log of the share of δ left to the binomial's tails


class GaussianSamplingComposition(Accountant):
    """Gaussian sampling composition: average δ over the binomial number of participations.

    δ(ε) = Σᵢ Binom(i; T, q)·δ_Gauss(ε; √i/σ).

    Tell the attacker in which steps the record took part. What remains, given their number i, is a
    Gaussian mechanism composed i times; joint convexity of the hockey-stick divergence averages
    over i. The step count is the same for both neighbours, so this also holds for samples of fixed
    size and for replaced records, with their sensitivity. It equals the analytic Gaussian
    mechanism at q = 1. Sampling reduces δ in this bound, but hardly ε.
    """

    name = "gaussian_sampling_composition"
    title = "Gaussian sampling composition"
    source = _SOURCE
    needs = "one Gaussian release repeated"
    proves = "an upper bound of δ at ε, and so of ε at δ"

    def assumptions(self, question: Question) -> tuple[Assumption, ...]:
        """Return the hypothesis that a record takes part in each step independently."""
        require_noise(self.name, question, ["gaussian"])
        group = require_single_group(self.name, question)
        if 100 * math.sqrt(group.count * group.rate * (1 - group.rate)) > _TERMS_MAX:
            raise TooExpensiveError(
                f"{group.count} steps at rate {group.rate:g} need a sum of too many terms; "
                "use subsampled_rdp or pld"
            )
        return (
            assume_sampling(
                question,
                ["poisson", "fixed_size", "none", "shuffled"],
                "a record takes part in each step with the same probability, independently",
                _SOURCE,
            ),
        )

    def epsilon_bound(self, question: Question, delta: float) -> Bound:
        """Return an upper bound on ε at δ, found by bisection on the formula for δ(ε)."""
        group = require_single_group(self.name, question)
        log_weights, mus, log_outside = _binomial_terms(group, math.log(delta) + _LOG_TAIL)
        target = delta * (1 - rounding.MARGIN) - math.exp(log_outside)

        def fits(epsilon: float) -> bool:
            """Return whether δ at this ε is at most the target δ."""
            return _delta_sum(log_weights, mus, epsilon) <= target

        if fits(0.0):
            return Bound(0.0)
        low, high = 0.0, float(gaussian.epsilon(delta, math.sqrt(group.count) / group.sigma))
        high = max(high, 1e-300) * (1 + 1e-6)
        while high - low > 1e-13 * high:
            middle = 0.5 * (low + high)
            if middle in (low, high):
                break
            low, high = (low, middle) if fits(middle) else (middle, high)
        return Bound(rounding.up(high))

    def delta_bound(self, question: Question, epsilon: float) -> Bound:
        """Return an upper bound on δ: a sum over likely participation counts plus a tail bound."""
        group = require_single_group(self.name, question)
        log_weights, mus, log_outside = _binomial_terms(group, -300.0)
        value = _delta_sum(log_weights, mus, epsilon) + math.exp(log_outside)
        return Bound(min(1.0, rounding.up(value)))


def _binomial_terms(group: ReleaseGroup, log_tail: float) -> tuple[Array, Array, float]:
    """Return log-probabilities and μ of likely participation counts, and a log of the tail bound.

    The Gaussian mechanism of i participations has μ = √i/σ. The last value is the log of an upper
    bound on the probability of all counts that are left out, except 0.
    """
    if group.rate == 1.0:
        return np.zeros(1), np.array([math.sqrt(group.count) / group.sigma]), -math.inf
    first, last = binomial_window(group.count, group.rate, log_tail)
    steps = np.arange(max(first, 1), max(last, 1) + 1, dtype=float)
    log_weights = log_binomial_pmf(steps, group.count, group.rate)
    return log_weights, np.sqrt(steps) / group.sigma, log_tail + math.log(2)


def _delta_sum(log_weights: Array, mus: Array, epsilon: float) -> float:
    """Return the weighted average of Gaussian mechanisms' δ at ε, one mechanism per μ."""
    return float(np.exp(log_weights + gaussian.log_delta(epsilon, mus)).sum())
