"""The moments accountant of Abadi et al. 2016 (arXiv 1607.00133v2; papers/002)."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from accountant_service.accountants.base import (
    Accountant,
    Bound,
    Question,
    poisson_or_all,
    related_as,
    require_noise,
)
from accountant_service.errors import TooExpensiveError
from accountant_service.guarantee import Assumption, NeighbouringRelation
from accountant_service.numerics import conversion, rounding, sampled_gaussian
from accountant_service.numerics.special import Array

MOMENT_ORDER_MAX: Final = 127  # the largest λ tried; papers/002 and its code stop at 32
_MOMENTS: Final = np.arange(1.0, MOMENT_ORDER_MAX + 1)
_TERMS_MAX: Final = 2e7  # quadrature nodes × moments of one question
_SOURCE: Final = "Abadi et al. 2016, arXiv 1607.00133v2, Theorem 2"


class MomentsAccountant(Accountant):
    """α(λ) = Σ T·log max(E₁, E₂) and δ = min_λ exp(α(λ) − λε), with both moments computed.

    E₁ = E_{μ₀}[(μ₀/μ)^λ] and E₂ = E_μ[(μ/μ₀)^λ], μ₀ = N(0, σ²), μ = (1−q)μ₀ + qN(1, σ²); λ runs
    over the integers 1…127. Nothing of the paper's asymptotic Theorem 1 is used.
    """

    name = "moments_accountant"
    title = "Moments accountant"
    source = _SOURCE + "; papers/002"
    needs = "Gaussian noise, Poisson sampling (or none), add/remove neighbours"
    proves = "an upper bound of ε by the classical tail bound, integer moments up to 127"

    def assumptions(self, question: Question) -> tuple[Assumption, ...]:
        """Poisson sampling; neighbours that differ in one record."""
        require_noise(self.name, question, ["gaussian"])
        _check_work(question)
        return (
            poisson_or_all(question, _SOURCE),
            _related(question),
        )

    def epsilon_bound(self, question: Question, delta: float) -> Bound:
        """The least ε over the moments."""
        orders, moments = _MOMENTS + 1, _log_moments(question)
        epsilons = conversion.classical_epsilons(orders, moments, delta)
        best = int(np.argmin(epsilons))
        return Bound(rounding.up(float(epsilons[best])), orders[best], conversion.CLASSICAL)

    def delta_bound(self, question: Question, epsilon: float) -> Bound:
        """The least δ over the moments."""
        orders, moments = _MOMENTS + 1, _log_moments(question)
        log_deltas = conversion.classical_log_deltas(orders, rounding.up_each(moments), epsilon)
        best = int(np.argmin(log_deltas))
        value = rounding.up(math.exp(min(float(log_deltas[best]), 0.0)))
        return Bound(min(1.0, value), orders[best], conversion.CLASSICAL)


def _check_work(question: Question) -> None:
    terms = math.fsum(
        len(_MOMENTS) * sampled_gaussian.nodes_needed(-_MOMENTS[-1], _MOMENTS[-1] + 1, part.sigma)
        for part in question.parts
        if part.rate < 1
    )
    if terms > _TERMS_MAX:
        raise TooExpensiveError(
            f"the moments of {len(question.parts)} different releases at these noise levels need "
            f"{terms:.1e} terms, more than {_TERMS_MAX:.0e}: use subsampled_rdp or pld"
        )


def _related(question: Question) -> Assumption:
    sampled = any(part.rate < 1 for part in question.parts)
    allowed = [NeighbouringRelation.ADD_OR_REMOVE_ONE, NeighbouringRelation.ZERO_OUT_ONE]
    return related_as(
        question,
        allowed if sampled else list(NeighbouringRelation),
        "neighbours differ by one record added, removed or zeroed out",
        _SOURCE,
    )


def _log_moments(question: Question) -> Array:
    """α(λ) for λ = 1…127: the larger of both directions, summed over the releases."""
    total = np.zeros_like(_MOMENTS)
    for part in question.parts:
        removing = sampled_gaussian.log_moments(_MOMENTS + 1, part.rate, part.sigma)  # log E₂
        adding = sampled_gaussian.log_moments(-_MOMENTS, part.rate, part.sigma)  # log E₁
        total += part.count * np.maximum(removing, adding)
    return total
