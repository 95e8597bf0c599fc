"""Advanced composition of amplified steps (Dwork & Roth 2014; papers/001–003)."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from accountant_service.accountants import amplified
from accountant_service.accountants.base import Accountant, Bound, Question, single_part
from accountant_service.guarantee import Assumption
from accountant_service.numerics import rounding

_SOURCE: Final = "Dwork & Roth 2014, Theorem 3.20"


class AdvancedComposition(Accountant):
    """ε = ε₁·√(2T·log(1/δ′)) + T·ε₁·(e^{ε₁} − 1) with δ = T·δ₁ + δ′, the best of 37 splits of δ."""

    name = "advanced_composition"
    title = "Advanced composition of amplified steps"
    source = f"{_SOURCE}; {amplified.SOURCE}"
    needs = "one Gaussian or Laplace release repeated"
    proves = "an upper bound of ε, usually loose"

    def assumptions(self, question: Question) -> tuple[Assumption, ...]:
        """The hypotheses of amplification by sampling."""
        single_part(self.name, question)
        return amplified.assumptions(self.name, question)

    def epsilon_bound(self, question: Question, delta: float) -> Bound:
        """The least ε over the splits of δ between the steps and the composition."""
        part = single_part(self.name, question)
        steps, slack = (1 - amplified.DELTA_SHARES) * delta, amplified.DELTA_SHARES * delta
        epsilon = amplified.step_epsilons(part, steps / part.count)
        with np.errstate(over="ignore"):
            growth = part.count * epsilon * np.expm1(epsilon)
        total = epsilon * np.sqrt(-2 * part.count * np.log(slack)) + growth
        return Bound(rounding.up(float(np.min(total, initial=math.inf))))
