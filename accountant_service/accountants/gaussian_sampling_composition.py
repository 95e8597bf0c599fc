"""The Gaussian sampling composition theorem of papers/003 (A-DDP)."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from accountant_service.accountants.base import (
    Accountant,
    Bound,
    Part,
    Question,
    require_noise,
    sampled_as,
    single_part,
)
from accountant_service.errors import TooExpensiveError
from accountant_service.guarantee import Assumption
from accountant_service.numerics import gaussian, rounding
from accountant_service.numerics.special import Array, binomial_window, log_binomial_pmf

_SOURCE: Final = "papers/003, Theorem 1"
_TERMS_MAX: Final = 200_000
_LOG_TAIL: Final = -40.0  # natural log of the share of δ left to the binomial's tails


class GaussianSamplingComposition(Accountant):
    """δ(ε) = Σᵢ Binom(i; T, q)·δ_Gauss(ε; √i/σ): reveal which steps used the record.

    If an attacker is told in which steps the record took part, what is left is a Gaussian
    mechanism for each number i of such steps; joint convexity of the hockey-stick divergence
    averages over i. The step count is the same for both neighbours, so this also holds for samples
    of fixed size and for replaced records, with their sensitivity. It equals the analytic
    Gaussian mechanism at q = 1. It amplifies δ, hardly ε.
    """

    name = "gaussian_sampling_composition"
    title = "Gaussian sampling composition"
    source = _SOURCE
    needs = "one Gaussian release repeated"
    proves = "an upper bound of δ at ε, and so of ε at δ"

    def assumptions(self, question: Question) -> tuple[Assumption, ...]:
        """That records take part in each step independently of the other steps."""
        require_noise(self.name, question, ["gaussian"])
        part = single_part(self.name, question)
        if 100 * math.sqrt(part.count * part.rate * (1 - part.rate)) > _TERMS_MAX:
            raise TooExpensiveError(
                f"{part.count} steps at rate {part.rate:g} spread over too many terms to sum; "
                "use subsampled_rdp or pld"
            )
        return (
            sampled_as(
                question,
                ["poisson", "fixed_size", "none", "shuffled"],
                "a record takes part in each step with the same probability, independently",
                _SOURCE,
            ),
        )

    def epsilon_bound(self, question: Question, delta: float) -> Bound:
        """ε by bisection on the sum, from above."""
        part = single_part(self.name, question)
        log_weights, mus, log_outside = _terms(part, math.log(delta) + _LOG_TAIL)
        target = delta * (1 - rounding.MARGIN) - math.exp(log_outside)

        def fits(epsilon: float) -> bool:
            return _sum(log_weights, mus, epsilon) <= target

        if fits(0.0):
            return Bound(0.0)
        low, high = 0.0, float(gaussian.epsilon(delta, math.sqrt(part.count) / part.sigma))
        high = max(high, 1e-300) * (1 + 1e-6)
        while high - low > 1e-13 * high:
            middle = 0.5 * (low + high)
            if middle in (low, high):
                break
            low, high = (low, middle) if fits(middle) else (middle, high)
        return Bound(rounding.up(high))

    def delta_bound(self, question: Question, epsilon: float) -> Bound:
        """The sum itself, with the binomial's tails added."""
        part = single_part(self.name, question)
        log_weights, mus, log_outside = _terms(part, -300.0)
        value = _sum(log_weights, mus, epsilon) + math.exp(log_outside)
        return Bound(min(1.0, rounding.up(value)))


def _terms(part: Part, log_tail: float) -> tuple[Array, Array, float]:
    """Log-weights and μ = √i/σ of the terms that matter, and the log of all others' weight."""
    if part.rate == 1.0:
        return np.zeros(1), np.array([math.sqrt(part.count) / part.sigma]), -math.inf
    first, last = binomial_window(part.count, part.rate, log_tail)
    steps = np.arange(max(first, 1), max(last, 1) + 1, dtype=float)
    log_weights = log_binomial_pmf(steps, part.count, part.rate)
    return log_weights, np.sqrt(steps) / part.sigma, log_tail + math.log(2)


def _sum(log_weights: Array, mus: Array, epsilon: float) -> float:
    return float(np.exp(log_weights + gaussian.log_delta(epsilon, mus)).sum())
