"""Advanced composition of amplified steps (Dwork & Roth 2014; papers/001–003)."""

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
from accountant_service.numerics.floats import rounding

_SOURCE: Final = "Dwork & Roth 2014, Theorem 3.20"


class AdvancedComposition(Accountant):
    """Advanced composition of steps amplified by sampling, using the best of 37 splits of δ.

    ε = ε₁·√(2T·log(1/δ′)) + T·ε₁·(e^{ε₁} − 1) with δ = T·δ₁ + δ′.
    """

    name = "advanced_composition"
    title = "Advanced composition of amplified steps"
    source = f"{_SOURCE}; {sampled_step.SOURCE}"
    needs = "one Gaussian or Laplace release repeated"
    proves = "an upper bound of ε, usually loose"

    def assumptions(self, question: Question) -> tuple[Assumption, ...]:
        """Return the hypothesis of amplification by sampling, the only one of this method."""
        require_single_group(self.name, question)
        return sampled_step.assumptions(self.name, question)

    def epsilon_bound(self, question: Question, delta: float) -> Bound:
        """Return the smallest ε over 37 ways to split δ between the steps and the composition."""
        group = require_single_group(self.name, question)
        steps, slack = (1 - sampled_step.DELTA_SHARES) * delta, sampled_step.DELTA_SHARES * delta
        epsilon = sampled_step.step_epsilons(group, steps / group.count)
        with np.errstate(over="ignore"):
            growth = group.count * epsilon * np.expm1(epsilon)
        total = epsilon * np.sqrt(-2 * group.count * np.log(slack)) + growth
        return Bound(rounding.up(float(np.min(total, initial=math.inf))))
