"""The "modified moments accountant" of papers/001 (PIGDO)."""

from __future__ import annotations

import math
from typing import Final

from accountant_service.accounting.guarantee import Assumption
from accountant_service.accounting.methods.base import (
    DELTA_MIN,
    Accountant,
    Bound,
    Question,
    assume_poisson_sampling,
    require_noise,
    require_single_group,
)
from accountant_service.accounting.release_laws import ReleaseGroup
from accountant_service.numerics.floats import rounding

OTHER_DIRECTION: Final = "the moment of removing a record is at most that of adding it"
_SOURCE: Final = "Ding et al. 2021, Theorem 3"


class ModifiedMomentsAccountant(Accountant):
    """Modified moments accountant: a published formula for ε that is not a guarantee.

    ε = 2q·log(1/δ)/(σ·√(δ^(−1/T) − 1)).

    Let μ₀ and μ be the outputs without and with the record. The proof bounds the moment of adding
    it, E_{μ₀}[(μ₀/μ)^λ], by 1 + q²λ²/σ². The larger moment of removing it, E_μ[(μ/μ₀)^λ], it does
    not bound at all. For some inputs that meet all of the theorem's conditions, the formula's value
    lies below a proved lower bound (docs/accountants/mma.md).
    """

    name = "mma"
    title = "Modified moments accountant (MMA), as in the paper"
    source = _SOURCE
    needs = "one Gaussian release repeated"
    proves = "nothing: the proof is for added records only, and the claim is false for some inputs"

    def assumptions(self, question: Question) -> tuple[Assumption, ...]:
        """Return the theorem's hypotheses; the last one never holds, so ε is an estimate."""
        require_noise(self.name, question, ["gaussian"])
        group = require_single_group(self.name, question)
        return (
            assume_poisson_sampling(question, _SOURCE),
            Assumption("σ ≥ 1", group.sigma >= 1, _SOURCE),
            Assumption("q < 1/σ", group.rate < 1 / group.sigma, _SOURCE),
            Assumption(
                OTHER_DIRECTION,
                False,
                "refuted in docs/accountants/mma.md",
            ),
        )

    def claim_assumptions(
        self, question: Question, epsilon: float, delta: float
    ) -> tuple[Assumption, ...]:
        """Return the theorem's conditions on λ, for the λ that its formula eliminates."""
        group = require_single_group(self.name, question)
        order = moment_order(epsilon, delta)
        return (
            Assumption(
                "λ ≤ 1/(10q²) at λ = 2·log(1/δ)/ε", order <= 1 / (10 * group.rate**2), _SOURCE
            ),
            Assumption(
                "ε > 0.002·T/λ at λ = 2·log(1/δ)/ε", epsilon * order > 0.002 * group.count, _SOURCE
            ),
        )

    def epsilon_bound(self, question: Question, delta: float) -> Bound:
        """Return ε at δ by the paper's formula, with the Rényi order λ + 1 that gives it."""
        group = require_single_group(self.name, question)
        epsilon = _epsilon(group, -math.log(delta))
        return Bound(rounding.up(epsilon), 1 + moment_order(epsilon, delta) if epsilon else None)

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


def moment_order(epsilon: float, delta: float) -> float:
    """Return λ = 2·log(1/δ)/ε, the order of the moment that the formula comes from.

    The formula eliminates λ from K(λ) = λε/2 and δ = e^{−λε/2}. It is infinite at ε = 0.
    """
    return -2 * math.log(delta) / epsilon if epsilon else math.inf


def _epsilon(group: ReleaseGroup, log_inverse_delta: float) -> float:
    """Return ε by the paper's formula, given log(1/δ), so that a tiny δ does not overflow.

    It is 2q·x/(σ·√(e^{x/T} − 1)) for x = log(1/δ).
    """
    if log_inverse_delta == 0.0:
        return 0.0
    exponent = log_inverse_delta / group.count
    log_root = 0.5 * (exponent + math.log(-math.expm1(-exponent)))
    return 2 * group.rate * log_inverse_delta / group.sigma * math.exp(-log_root)
