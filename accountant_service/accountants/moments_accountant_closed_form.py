"""The closed form that papers/001 §5.2 uses in place of the moments accountant."""

from __future__ import annotations

import math
from typing import Final

from accountant_service.accountants.base import (
    Accountant,
    Bound,
    Question,
    require_noise,
    single_part,
)
from accountant_service.guarantee import Assumption
from accountant_service.numerics import rounding

_SOURCE: Final = "papers/001, section 5.2; Abadi et al. 2016, Theorem 1 (constant c₂ unspecified)"
_CONSTANT: Final = 3.0


class MomentsAccountantClosedForm(Accountant):
    """σ = 3q·√(T·log(1/δ))/ε: the asymptotic theorem of papers/002 with its constant set to 3.

    The theorem only says that some constant exists, for ε below another one. The 3 has no proof;
    in practice it overstates ε by half.
    """

    name = "moments_accountant_closed_form"
    title = "Moments accountant, closed form with constant 3"
    source = _SOURCE
    needs = "one Gaussian release repeated"
    proves = "nothing: the constant has no proof"

    def assumptions(self, question: Question) -> tuple[Assumption, ...]:
        """The one hypothesis there is."""
        require_noise(self.name, question, ["gaussian"])
        single_part(self.name, question)
        return (Assumption("the theorem's constant is 3", False, _SOURCE),)

    def epsilon_bound(self, question: Question, delta: float) -> Bound:
        """ε = 3q·√(T·log(1/δ))/σ."""
        return Bound(rounding.up(self._slope(question) * math.sqrt(-math.log(delta))))

    def delta_bound(self, question: Question, epsilon: float) -> Bound:
        """δ = exp(−(ε/(3q√T/σ))²)."""
        return Bound(min(1.0, rounding.up(math.exp(-((epsilon / self._slope(question)) ** 2)))))

    def _slope(self, question: Question) -> float:
        part = single_part(self.name, question)
        return _CONSTANT * part.rate * math.sqrt(part.count) / part.sigma
