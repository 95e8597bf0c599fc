"""Optimal homogeneous composition of amplified steps (Kairouz, Oh & Viswanath 2015)."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from accountant_service.accounting.guarantee import Assumption
from accountant_service.accounting.methods import sampled_step
from accountant_service.accounting.methods.base import (
    Accountant,
    Bound,
    Question,
    require_single_group,
)
from accountant_service.errors import TooExpensiveError
from accountant_service.numerics.floats import rounding
from accountant_service.numerics.floats.special_functions import binomial_window, log_binomial_pmf

_SOURCE: Final = "Kairouz, Oh & Viswanath 2015, arXiv 1311.0776v4, Theorem 3.3"
_TERMS_MAX: Final = 70_000


class OptimalComposition(Accountant):
    """Optimal composition of equal (ε₁, δ₁)-DP steps: the least ε over 37 choices of δ₁.

    T randomised responses of ε₁ have a binomial privacy loss (T − 2l)·ε₁ with
    l ∼ Binom(T, 1/(1 + e^{ε₁})), and the total δ is 1 − (1 − δ₁)^T·(1 − δ(ε)). The ε at a given δ
    is the largest of log((P(A) − δ)/Q(A)) over the events A = {loss ≥ t}.
    """

    name = "optimal_composition"
    title = "Optimal composition of amplified steps"
    source = f"{_SOURCE}; {sampled_step.SOURCE}"
    needs = "one Gaussian or Laplace release repeated"
    proves = "an upper bound of ε, the least that follows from (ε₁, δ₁) of the steps alone"

    def assumptions(self, question: Question) -> tuple[Assumption, ...]:
        """Return the hypothesis of amplification by sampling, the only one of this method."""
        group = require_single_group(self.name, question)
        if 20 * math.sqrt(group.count) > _TERMS_MAX:
            raise TooExpensiveError(
                f"{group.count} steps spread over too many terms to sum; use subsampled_rdp or pld"
            )
        return sampled_step.assumptions(self.name, question)

    def epsilon_bound(self, question: Question, delta: float) -> Bound:
        """Return the smallest ε over 37 ways to split δ between the steps and the composition."""
        group = require_single_group(self.name, question)
        step_deltas = (1 - sampled_step.DELTA_SHARES) * delta / group.count
        epsilons = sampled_step.step_epsilons(group, step_deltas)
        even = np.array([delta / group.count])
        best = group.count * float(sampled_step.step_epsilons(group, even)[0])  # all δ to the steps
        for step_epsilon, step_delta in zip(epsilons, step_deltas, strict=True):
            # 1 − (1 − δ₁)^T·(1 − δ′) ≤ δ, solved for δ′
            slack = -math.expm1(math.log1p(-delta) - group.count * math.log1p(-step_delta))
            best = min(best, _randomised_response_epsilon(float(step_epsilon), group.count, slack))
        return Bound(rounding.up(best))


def _randomised_response_epsilon(step_epsilon: float, count: int, delta: float) -> float:
    """Return ε at δ of `count` composed randomised responses, each `step_epsilon`-DP."""
    if delta <= 0 or step_epsilon == 0:
        return count * step_epsilon
    if step_epsilon > 30:  # e^{−ε₁} is below rounding: the sum is exact
        return count * step_epsilon
    probability = 1 / (1 + math.exp(step_epsilon))
    log_tail = math.log(delta) - 30.0
    first, last = binomial_window(count, probability, log_tail)
    lie_counts = np.arange(first, last + 1, dtype=float)
    log_p = log_binomial_pmf(lie_counts, count, probability)
    loss = (count - 2 * lie_counts) * step_epsilon
    # From the largest loss down; outcomes outside the window count as infinite loss.
    p = np.cumsum(np.exp(log_p))
    log_q = np.logaddexp.accumulate(log_p - loss)
    gain = p - delta * (1 - 1e-12) + math.exp(log_tail)
    useful = gain > 0
    if not useful.any():
        return max(0.0, float(loss[-1]))
    return max(0.0, float(np.max(np.log(gain[useful]) - log_q[useful])))
