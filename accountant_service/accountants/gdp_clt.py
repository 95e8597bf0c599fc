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
        """Infinitely many steps."""
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
    """The formula as printed, also at q = 1, where the true μ of a Gaussian is √T/σ: smaller."""
    total = 0.0
    for part in question.parts:
        exponent = part.sigma**-2
        if exponent > 60:  # μ² beyond e^60·(q²T): no ε to speak of
            raise NoFiniteEpsilonError(
                f"gdp_clt has no finite estimate at an effective noise multiplier of {part.sigma:g}"
            )
        total += part.count * part.rate**2 * math.expm1(exponent)
    return math.sqrt(total)
