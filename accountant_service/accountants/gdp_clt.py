"""The central limit estimate of Gaussian differential privacy."""

from __future__ import annotations

import math
from typing import Final

from accountant_service.accountants.base import Accountant, Bound, Question, require_noise
from accountant_service.errors import NoFiniteEpsilonError
from accountant_service.guarantee import Assumption
from accountant_service.numerics import gaussian, rounding

_SOURCE: Final = "Bu, Dong, Long & Su 2020, arXiv 1911.11607v3, section 3.1"


class GdpClt(Accountant):
    """μ = √(Σ T·q²·(e^{1/σ²} − 1)), then ε as for a Gaussian mechanism of that μ.

    The limit of many steps with q√T held fixed. At finite T it is neither an upper nor a lower
    bound: measured, it understates ε up to two-fold.
    """

    name = "gdp_clt"
    title = "Gaussian DP, central limit estimate"
    source = _SOURCE
    needs = "Gaussian releases"
    proves = "nothing at a finite number of steps: the statement is asymptotic"

    def assumptions(self, question: Question) -> tuple[Assumption, ...]:
        """Infinitely many steps, unless nothing is sampled and the limit is exact."""
        require_noise(self.name, question, ["gaussian"])
        return (Assumption("the number of steps is infinite", False, _SOURCE),)

    def epsilon_bound(self, question: Question, delta: float) -> Bound:
        """ε of the limiting Gaussian mechanism."""
        return Bound(rounding.up(float(gaussian.epsilon(delta, _mu(question)))))

    def delta_bound(self, question: Question, epsilon: float) -> Bound:
        """δ of the limiting Gaussian mechanism."""
        log_delta = float(gaussian.log_delta(epsilon, _mu(question)))
        return Bound(min(1.0, rounding.up(math.exp(log_delta))))


def _mu(question: Question) -> float:
    """Unsampled releases are Gaussian already: they count as 1/σ², not as e^{1/σ²} − 1."""
    total = 0.0
    for part in question.parts:
        exponent = part.sigma**-2
        if part.rate < 1 and exponent > 700:
            raise NoFiniteEpsilonError(
                f"gdp_clt has no finite estimate at an effective noise multiplier of {part.sigma:g}"
            )
        step = part.rate**2 * math.expm1(exponent) if part.rate < 1 else exponent
        total += part.count * step
    return math.sqrt(total)
