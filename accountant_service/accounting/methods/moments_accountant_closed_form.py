"""The closed form that papers/001, section 5.2, uses in place of the moments accountant."""

from __future__ import annotations

import math
from typing import Final

from accountant_service.accounting.guarantee import Assumption
from accountant_service.accounting.methods.base import (
    Accountant,
    Bound,
    Question,
    require_noise,
    require_single_group,
)
from accountant_service.numerics.floats import rounding

_SOURCE: Final = (
    "Ding et al. 2021, section 5.2; Abadi et al. 2016, Theorem 1 (constant c₂ unspecified)"
)
_CONSTANT: Final = 3.0


class MomentsAccountantClosedForm(Accountant):
    """Closed form of the moments accountant, with the theorem's unknown constant set to 3.

    σ = 3q·√(T·log(1/δ))/ε, from Theorem 1 of Abadi et al. 2016 (papers/002).

    The theorem only states that some constant exists, for ε below another constant. The 3 has no
    proof. At q = 0.01, σ = 2, T = 40 000 and δ = 1e-5 it gives more than twice the certified ε.
    """

    name = "moments_accountant_closed_form"
    title = "Moments accountant, closed form with constant 3"
    source = _SOURCE
    needs = "one Gaussian release repeated"
    proves = "nothing: the constant has no proof"

    def assumptions(self, question: Question) -> tuple[Assumption, ...]:
        """Return the unproved hypothesis that the theorem's unknown constant c₂ is 3."""
        require_noise(self.name, question, ["gaussian"])
        require_single_group(self.name, question)
        return (Assumption("the theorem's constant is 3", False, _SOURCE),)

    def epsilon_bound(self, question: Question, delta: float) -> Bound:
        """Return ε = 3q·√(T·log(1/δ))/σ for sample rate q, T steps and noise multiplier σ."""
        return Bound(rounding.up(self._epsilon_ratio(question) * math.sqrt(-math.log(delta))))

    def delta_bound(self, question: Question, epsilon: float) -> Bound:
        """Return δ = exp(−(εσ/(3q√T))²) for sample rate q, T steps and noise multiplier σ."""
        return Bound(
            min(1.0, rounding.up(math.exp(-((epsilon / self._epsilon_ratio(question)) ** 2))))
        )

    def _epsilon_ratio(self, question: Question) -> float:
        """Return ε/√(log(1/δ)) = 3q·√T/σ for sample rate q, T steps and noise multiplier σ."""
        group = require_single_group(self.name, question)
        return _CONSTANT * group.rate * math.sqrt(group.count) / group.sigma
