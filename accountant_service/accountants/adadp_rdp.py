"""The accounting that papers/000 (AdaDP) prints as its Theorem 1."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from accountant_service.accountants.base import (
    Accountant,
    Bound,
    Question,
    require_noise,
    sampled_as,
    single_part,
)
from accountant_service.guarantee import Assumption, NeighbouringRelation
from accountant_service.numerics import conversion, rounding, without_replacement

_ORDERS: Final = np.arange(2.0, 65.0)
_SOURCE: Final = "papers/000, Theorem 1 and Lemma 6"


class AdadpRdp(Accountant):
    """Equation (7) of papers/000, exactly as printed, at σ = noise multiplier, α in 2…64.

    The theorem behind it (Wang, Balle & Kasiviswanathan 2019) is about fixed-size samples without
    replacement, replace-one neighbours and noise relative to the sensitivity 2C of that relation.
    The paper samples with probability L/N and takes σ relative to C: as printed it proves
    nothing. `subsampled_rdp` with `fixed_size` and `replace_one` is its proved form.
    """

    name = "adadp_rdp"
    title = "AdaDP's Rényi bound, as printed"
    source = _SOURCE
    needs = "one Gaussian release repeated"
    proves = "nothing as printed; see subsampled_rdp with fixed_size and replace_one"

    def assumptions(self, question: Question) -> tuple[Assumption, ...]:
        """What the theorem behind the formula asks, against what the paper's algorithm does."""
        require_noise(self.name, question, ["gaussian"])
        single_part(self.name, question)
        theorem = "Wang, Balle & Kasiviswanathan 2019, arXiv 1808.00087v2, Theorem 9"
        return (
            sampled_as(question, ["fixed_size"], "batches are drawn without replacement", theorem),
            Assumption(
                "neighbours differ by one record replaced",
                question.relation is NeighbouringRelation.REPLACE_ONE,
                theorem,
            ),
            Assumption(
                "σ is relative to the replace-one sensitivity 2C (printed: relative to C)",
                False,
                _SOURCE,
            ),
        )

    def epsilon_bound(self, question: Question, delta: float) -> Bound:
        """The least ε over the orders, converted as printed."""
        epsilons = conversion.classical_epsilons(_ORDERS, self._moments(question), delta)
        best = int(np.argmin(epsilons))
        return Bound(rounding.up(float(epsilons[best])), _ORDERS[best], conversion.CLASSICAL)

    def delta_bound(self, question: Question, epsilon: float) -> Bound:
        """The least δ over the orders."""
        moments = rounding.up_each(self._moments(question))
        log_deltas = conversion.classical_log_deltas(_ORDERS, moments, epsilon)
        best = int(np.argmin(log_deltas))
        value = rounding.up(math.exp(min(float(log_deltas[best]), 0.0)))
        return Bound(min(1.0, value), _ORDERS[best], conversion.CLASSICAL)

    def _moments(self, question: Question) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        part = single_part(self.name, question)
        return part.count * without_replacement.printed_log_moments(
            _ORDERS, part.rate, part.atom.noise_multiplier
        )
