"""The moments accountant of Abadi et al. 2016 (arXiv 1607.00133v2; papers/002)."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from accountant_service.accounting.guarantee import Assumption, NeighbouringRelation
from accountant_service.accounting.methods.base import (
    Accountant,
    Bound,
    Question,
    assume_poisson_sampling,
    assume_relation,
    require_noise,
)
from accountant_service.errors import TooExpensiveError
from accountant_service.numerics import renyi_conversion
from accountant_service.numerics.floats import rounding
from accountant_service.numerics.floats.special_functions import Array
from accountant_service.numerics.laws import sampled_gaussian

MOMENT_ORDER_MAX: Final = 127  # the largest λ tried; papers/002 and its code stop at 32
_MOMENTS: Final = np.arange(1.0, MOMENT_ORDER_MAX + 1)
_TERMS_MAX: Final = 2e7  # quadrature nodes × moments of one question
_SOURCE: Final = "Abadi et al. 2016, arXiv 1607.00133v2, Theorem 2"


class MomentsAccountant(Accountant):
    """Moments accountant: a tail bound from numerically computed log-moments of the privacy loss.

    δ = min_λ exp(α(λ) − λε).

    α(λ) = Σ T·log max(E₁, E₂),
    E₁ = E_{μ₀}[(μ₀/μ)^λ] and E₂ = E_μ[(μ/μ₀)^λ], μ₀ = N(0, σ²), μ = (1−q)μ₀ + qN(1, σ²); λ runs
    over the integers 1…127. Nothing of the paper's asymptotic Theorem 1 is used.
    """

    name = "moments_accountant"
    title = "Moments accountant"
    source = _SOURCE
    needs = (
        "Gaussian noise; proven for Poisson sampling with add/remove or zero-out neighbours and "
        "without sampling, else an estimate"
    )
    proves = "an upper bound of ε by the classical tail bound, integer moments up to 127"

    def assumptions(self, question: Question) -> tuple[Assumption, ...]:
        """Return the hypotheses: Poisson sampling, and neighbours that differ in one record."""
        require_noise(self.name, question, ["gaussian"])
        _require_affordable(question)
        return (
            assume_poisson_sampling(question, _SOURCE),
            _relation_assumption(question),
        )

    def epsilon_bound(self, question: Question, delta: float) -> Bound:
        """Return ε at δ: the smallest over the moment orders 1 to 127."""
        orders, moments = _MOMENTS + 1, _log_moments(question)
        epsilons = renyi_conversion.classical_epsilons(orders, moments, delta)
        best = int(np.argmin(epsilons))
        return Bound(rounding.up(float(epsilons[best])), orders[best], renyi_conversion.CLASSICAL)

    def delta_bound(self, question: Question, epsilon: float) -> Bound:
        """Return δ at ε: the smallest over the moment orders 1 to 127."""
        orders, moments = _MOMENTS + 1, _log_moments(question)
        log_deltas = renyi_conversion.classical_log_deltas(
            orders, rounding.up_each(moments), epsilon
        )
        best = int(np.argmin(log_deltas))
        value = rounding.up(math.exp(min(float(log_deltas[best]), 0.0)))
        return Bound(min(1.0, value), orders[best], renyi_conversion.CLASSICAL)


def _require_affordable(question: Question) -> None:
    """Raise TooExpensiveError if the moments need too many quadrature nodes."""
    terms = math.fsum(
        len(_MOMENTS) * sampled_gaussian.count_nodes(-_MOMENTS[-1], _MOMENTS[-1] + 1, group.sigma)
        for group in question.release_groups
        if group.rate < 1
    )
    if terms > _TERMS_MAX:
        raise TooExpensiveError(
            f"the moments of {len(question.release_groups)} different releases at these noise "
            f"levels need {terms:.1e} terms, more than {_TERMS_MAX:.0e}: use subsampled_rdp or pld"
        )


def _relation_assumption(question: Question) -> Assumption:
    """Return the hypothesis on the neighbouring relation, and whether it holds."""
    if all(group.rate == 1 for group in question.release_groups):
        return Assumption("without sampling, any neighbouring relation is allowed", True, _SOURCE)
    return assume_relation(
        question,
        [NeighbouringRelation.ADD_OR_REMOVE_ONE, NeighbouringRelation.ZERO_OUT_ONE],
        "neighbouring datasets differ in one record added, removed or zeroed out",
        _SOURCE,
    )


def _log_moments(question: Question) -> Array:
    """Return log-moments of orders 1 to 127: the maximum over adding and removing a record."""
    total = np.zeros_like(_MOMENTS)
    for group in question.release_groups:
        removing = sampled_gaussian.log_moments(_MOMENTS + 1, group.rate, group.sigma)  # log E₂
        adding = sampled_gaussian.log_moments(-_MOMENTS, group.rate, group.sigma)  # log E₁
        total += group.count * np.maximum(removing, adding)
    return total
