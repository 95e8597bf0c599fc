"""The "modified moments accountant" of papers/001 (PIGDO)."""

from __future__ import annotations

import math
from typing import Final

from accountant_service.accountants.base import (
    DELTA_MIN,
    Accountant,
    Bound,
    Question,
    assume_poisson_sampling,
    require_noise,
    require_single_group,
)
from accountant_service.accountants.release_laws import ReleaseGroup
from accountant_service.guarantee import Assumption
from accountant_service.numerics.floats import rounding

_SOURCE: Final = "Ding et al. 2021, Theorem 3"


class ModifiedMomentsAccountant(Accountant):
    """Modified moments accountant: a published formula for ε that is not a guarantee.

    ε = 2q·log(1/δ)/(σ·√(δ^(−1/T) − 1)).

    The proof replaces the per-step moment by 1 + q²λ²/σ² and drops every term of third and higher
    order of the binomial expansion; those of even order are positive. For some inputs that meet
    all of its conditions, its value lies below a proved lower bound (docs/accountants/mma.md).
    """

    name = "mma"
    title = "Modified moments accountant (MMA), as in the paper"
    source = _SOURCE
    needs = "one Gaussian release repeated"
    proves = "nothing: the proof drops positive terms, and the claim is false for some inputs"

    def assumptions(self, question: Question) -> tuple[Assumption, ...]:
        """Return the theorem's hypotheses; the last one never holds, so ε is an estimate."""
        require_noise(self.name, question, ["gaussian"])
        group = require_single_group(self.name, question)
        return (
            assume_poisson_sampling(question, _SOURCE),
            Assumption("σ ≥ 1", group.sigma >= 1, _SOURCE),
            Assumption("q < 1/σ", group.rate < 1 / group.sigma, _SOURCE),
            Assumption(
                "the terms t ≥ 3 of the moment's expansion may be dropped",
                False,
                "positive for even t; refuted in docs/accountants/mma.md",
            ),
        )

    def epsilon_bound(self, question: Question, delta: float) -> Bound:
        """Return ε at δ by the paper's formula, with the moment order that gives it.

        The order is λ + 1 for λ = 2·log(1/δ)/ε.
        """
        group = require_single_group(self.name, question)
        epsilon = _epsilon(group, -math.log(delta))
        return Bound(rounding.up(epsilon), 1 - 2 * math.log(delta) / epsilon if epsilon else None)

    def delta_bound(self, question: Question, epsilon: float) -> Bound:
        """Return δ at ε: the paper's formula for ε, solved for δ.

        As δ falls, the formula's ε first rises, then falls again. On the rising branch there is one
        solution. An ε above the maximum is claimed for every δ: the result is then the least δ.
        """
        group = require_single_group(self.name, question)
        low, high = 0.0, min(-math.log(DELTA_MIN), 1.5936242600400400 * group.count)  # the maximum
        if _epsilon(group, high) <= epsilon:
            return Bound(DELTA_MIN)
        for _ in range(200):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if _epsilon(group, middle) <= epsilon else (low, middle)
        return Bound(min(1.0, rounding.up(math.exp(-low))))


def _epsilon(group: ReleaseGroup, log_inverse_delta: float) -> float:
    """Return ε by the paper's formula, given log(1/δ), so that a tiny δ does not overflow.

    It is 2q·x/(σ·√(e^{x/T} − 1)) for x = log(1/δ).
    """
    if log_inverse_delta == 0.0:
        return 0.0
    exponent = log_inverse_delta / group.count
    log_root = 0.5 * (exponent + math.log(-math.expm1(-exponent)))
    return 2 * group.rate * log_inverse_delta / group.sigma * math.exp(-log_root)
