"""Zero-concentrated differential privacy (Bun & Steinke 2016)."""

from __future__ import annotations

import math
from typing import Final

from accountant_service.accounting.guarantee import Assumption
from accountant_service.accounting.methods.base import Accountant, Bound, Question, require_noise
from accountant_service.numerics.floats import rounding

_SOURCE: Final = "Bun & Steinke 2016, arXiv 1605.02065v1, Propositions 1.3, 1.4 and 1.6"


class Zcdp(Accountant):
    """Zero-concentrated DP: ε = ρ + 2·√(ρ·log(1/δ)), where T steps of noise σ add T/(2σ²) to ρ.

    Papers/001 uses this accounting for its baseline EXP.

    This form of concentrated privacy has no amplification by sampling, so a sampled release is
    charged as if it used all the data. That is still an upper bound, because Rényi divergence is
    jointly quasi-convex: the divergence of two mixtures is at most the largest of their parts'.
    """

    name = "zcdp"
    title = "Zero-concentrated DP"
    source = _SOURCE
    needs = "Gaussian releases; Laplace noise counts as (1/b)²/2"
    proves = "an upper bound of ε, without any amplification by sampling"

    def assumptions(self, question: Question) -> tuple[Assumption, ...]:
        """Return one hypothesis, which always holds, as amplification by sampling is not used."""
        require_noise(self.name, question, ["gaussian", "laplace"])
        sampled = any(group.rate < 1 for group in question.release_groups)
        statement = (
            "sampling never increases ε: each release is charged as if it used all the data"
            if sampled
            else "the releases use all the data"
        )
        return (Assumption(statement, True, _SOURCE),)

    def epsilon_bound(self, question: Question, delta: float) -> Bound:
        """Return ε = ρ + 2·√(ρ·log(1/δ)), where ρ is the total zCDP parameter."""
        rho = _rho(question)
        return Bound(rounding.up(rho + 2 * math.sqrt(-rho * math.log(delta))))

    def delta_bound(self, question: Question, epsilon: float) -> Bound:
        """Return δ = exp(−(ε − ρ)²/(4ρ)) for ε > ρ, else 1, where ρ is the total zCDP parameter."""
        rho = _rho(question) * (1 + rounding.MARGIN)
        if epsilon <= rho:
            return Bound(1.0)
        return Bound(min(1.0, rounding.up(math.exp(-((epsilon - rho) ** 2) / (4 * rho)))))


def _rho(question: Question) -> float:
    """Return the total zCDP parameter ρ of all releases.

    Σ T/(2σ²): Gaussian by Proposition 1.6, (1/b)-DP Laplace by Proposition 1.4.
    """
    return math.fsum(group.count / (2 * group.sigma**2) for group in question.release_groups)
