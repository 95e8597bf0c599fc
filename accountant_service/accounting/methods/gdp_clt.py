"""The central limit estimate of Gaussian differential privacy."""

from __future__ import annotations

import math
from typing import Final

from accountant_service.accounting.guarantee import Assumption
from accountant_service.accounting.methods.base import Accountant, Bound, Question, require_noise
from accountant_service.errors import NoFiniteEpsilonError
from accountant_service.numerics.floats import rounding
from accountant_service.numerics.laws import gaussian

_SOURCE: Final = "Bu, Dong, Long & Su 2020, arXiv 1911.11607v3, section 3.1"


class GdpClt(Accountant):
    """Central limit estimate: treat many steps as the Gaussian mechanism that they converge to.

    Its μ is √(Σ T·q²·(e^{1/σ²} − 1)).

    The limit of many steps at a constant q√T. At finite T it is neither an upper nor a lower bound;
    in measurements it understated ε up to two-fold.
    """

    name = "gdp_clt"
    title = "Gaussian DP, central limit estimate"
    source = _SOURCE
    needs = "Gaussian releases"
    proves = "nothing at a finite number of steps: the statement is asymptotic"

    def assumptions(self, question: Question) -> tuple[Assumption, ...]:
        """Return the hypothesis of infinitely many steps; it never holds, so ε is an estimate."""
        require_noise(self.name, question, ["gaussian"])
        return (Assumption("the number of steps is infinite", False, _SOURCE),)

    def epsilon_bound(self, question: Question, delta: float) -> Bound:
        """Return ε of the limiting Gaussian mechanism."""
        return Bound(rounding.up(float(gaussian.epsilon(delta, _mu(question)))))

    def delta_bound(self, question: Question, epsilon: float) -> Bound:
        """Return δ of the limiting Gaussian mechanism."""
        log_delta = float(gaussian.log_delta(epsilon, _mu(question)))
        return Bound(min(1.0, rounding.up(math.exp(log_delta))))


def _mu(question: Question) -> float:
    """Return the limiting Gaussian mechanism's μ (sensitivity over noise), by the paper's formula.

    At q = 1 the true μ of a Gaussian is less: √T/σ.
    """
    total = 0.0
    for group in question.release_groups:
        exponent = group.sigma**-2
        if exponent > 60:  # μ² > e^60·q²T: ε is astronomically large
            raise NoFiniteEpsilonError(
                "gdp_clt has no finite estimate at an effective noise multiplier of "
                f"{group.sigma:g}: add noise"
            )
        total += group.count * group.rate**2 * math.expm1(exponent)
    return math.sqrt(total)
