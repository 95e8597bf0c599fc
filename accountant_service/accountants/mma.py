"""The "modified moments accountant" of papers/001 (PIGDO)."""

from __future__ import annotations

import math
from typing import Final

from accountant_service.accountants.base import (
    DELTA_MIN,
    Accountant,
    Bound,
    Part,
    Question,
    poisson_or_all,
    require_noise,
    single_part,
)
from accountant_service.guarantee import Assumption
from accountant_service.numerics import rounding

_SOURCE: Final = "papers/001, Theorem 3"


class Mma(Accountant):
    """ε = 2q·log(1/δ)/(σ·√(δ^(−1/T) − 1)), as printed. It is not a privacy guarantee.

    The proof replaces the per-step moment by 1 + q²λ²/σ² and drops every term of third and higher
    order of the binomial expansion, all of them positive for even powers. Within all of its stated
    conditions the value lies below a proved lower bound (docs/accountants/mma.md).
    """

    name = "mma"
    title = "Modified moments accountant (MMA), as printed"
    source = _SOURCE
    needs = "one Gaussian release repeated"
    proves = "nothing: the proof drops positive terms, and the claim is false for some inputs"

    def assumptions(self, question: Question) -> tuple[Assumption, ...]:
        """The conditions of the theorem, and the step of its proof that fails."""
        require_noise(self.name, question, ["gaussian"])
        part = single_part(self.name, question)
        return (
            poisson_or_all(question, _SOURCE),
            Assumption("σ ≥ 1", part.sigma >= 1, _SOURCE),
            Assumption("q < 1/σ", part.rate < 1 / part.sigma, _SOURCE),
            Assumption(
                "the terms t ≥ 3 of the moment's expansion may be dropped",
                False,
                "positive for even t; refuted in docs/accountants/mma.md",
            ),
        )

    def epsilon_bound(self, question: Question, delta: float) -> Bound:
        """The printed formula; λ = 2·log(1/δ)/ε is the moment order it eliminated."""
        part = single_part(self.name, question)
        epsilon = _epsilon(part, -math.log(delta))
        return Bound(rounding.up(epsilon), 1 - 2 * math.log(delta) / epsilon if epsilon else None)

    def delta_bound(self, question: Question, epsilon: float) -> Bound:
        """The printed formula solved for δ.

        As δ falls the printed ε first rises, then falls again. On the rising branch there is one
        answer; an ε above its summit is claimed for every δ, which this reports as the least δ.
        """
        part = single_part(self.name, question)
        low, high = 0.0, min(-math.log(DELTA_MIN), 1.5936242600400400 * part.count)  # the summit
        if _epsilon(part, high) <= epsilon:
            return Bound(DELTA_MIN)
        for _ in range(200):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if _epsilon(part, middle) <= epsilon else (low, middle)
        return Bound(min(1.0, rounding.up(math.exp(-low))))


def _epsilon(part: Part, log_inverse_delta: float) -> float:
    """2q·x/(σ·√(e^{x/T} − 1)) with x = log(1/δ), in log space where e^{x/T} would overflow."""
    if log_inverse_delta == 0.0:
        return 0.0
    exponent = log_inverse_delta / part.count
    log_root = 0.5 * (exponent + math.log(-math.expm1(-exponent)))
    return 2 * part.rate * log_inverse_delta / part.sigma * math.exp(-log_root)
