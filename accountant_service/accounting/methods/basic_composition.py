"""Basic composition: the sums of all steps' ε and of their δ."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from accountant_service.accounting.guarantee import Assumption
from accountant_service.accounting.methods import sampled_step
from accountant_service.accounting.methods.base import Accountant, Bound, Question
from accountant_service.numerics.floats import rounding

_SOURCE: Final = "Dwork & Roth 2014, Theorem 3.16"


class BasicComposition(Accountant):
    """Basic composition of steps amplified by sampling: add up all ε and all δ."""

    name = "basic_composition"
    title = "Basic composition of amplified steps"
    source = f"{_SOURCE}; {sampled_step.SOURCE}"
    needs = "Gaussian or Laplace releases"
    proves = "an upper bound of ε, loose for many steps"

    def assumptions(self, question: Question) -> tuple[Assumption, ...]:
        """Return the hypothesis of amplification by sampling, the only one of this method."""
        return sampled_step.assumptions(self.name, question)

    def epsilon_bound(self, question: Question, delta: float) -> Bound:
        """Return the sum of the steps' ε, with δ split evenly over the steps.

        An even split is valid for any composition.
        """
        share = np.array([delta / question.form.steps])
        total = math.fsum(
            group.count * float(sampled_step.step_epsilons(group, share)[0])
            for group in question.release_groups
        )
        return Bound(rounding.up(total))
