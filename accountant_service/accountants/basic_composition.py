"""Basic composition: the ε of all steps added up, and their δ."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from accountant_service.accountants import amplified
from accountant_service.accountants.base import Accountant, Bound, Question
from accountant_service.guarantee import Assumption
from accountant_service.numerics import rounding

_SOURCE: Final = "Dwork & Roth 2014, Theorem 3.16"


class BasicComposition(Accountant):
    """ε = Σ ε₁ and δ = Σ δ₁ of the amplified steps, δ split evenly over the steps."""

    name = "basic_composition"
    title = "Basic composition of amplified steps"
    source = f"{_SOURCE}; {amplified.SOURCE}"
    needs = "Gaussian or Laplace releases"
    proves = "an upper bound of ε, loose for many steps"

    def assumptions(self, question: Question) -> tuple[Assumption, ...]:
        """The hypotheses of amplification by sampling."""
        return amplified.assumptions(self.name, question)

    def epsilon_bound(self, question: Question, delta: float) -> Bound:
        """The sum over the steps; an even split of δ is valid for any composition."""
        share = np.array([delta / question.form.steps])
        total = math.fsum(
            part.count * float(amplified.step_epsilons(part, share)[0]) for part in question.parts
        )
        return Bound(rounding.up(total))
