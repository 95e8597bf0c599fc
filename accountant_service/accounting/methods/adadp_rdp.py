"""The Rényi accounting of papers/000 (AdaDP), Theorem 1."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from accountant_service.accounting.guarantee import Assumption, NeighbouringRelation
from accountant_service.accounting.methods.base import (
    Accountant,
    Bound,
    Question,
    assume_sampling,
    require_noise,
    require_single_group,
)
from accountant_service.numerics import renyi_conversion
from accountant_service.numerics.floats import rounding
from accountant_service.numerics.laws import without_replacement

_ORDERS: Final = np.arange(2.0, 65.0)
_SOURCE: Final = "Xu et al. 2020, Theorem 1 and Lemma 6"


class AdadpRdp(Accountant):
    """The Rényi accountant of the AdaDP paper: equation (7) of papers/000, at the orders 2 to 64.

    Its σ is the noise multiplier.

    The theorem behind it (Wang, Balle & Kasiviswanathan 2019) is about fixed-size samples without
    replacement, replace-one neighbours and noise relative to the sensitivity 2C of that relation.
    The paper samples with probability L/N and takes σ relative to C, so its formula proves
    nothing. `subsampled_rdp` with `fixed_size` and `replace_one` is the proved form.
    """

    name = "adadp_rdp"
    title = "AdaDP's Rényi bound, as in the paper"
    source = _SOURCE
    needs = "one Gaussian release repeated"
    proves = "nothing; the proved form is subsampled_rdp with fixed_size and replace_one"

    def assumptions(self, question: Question) -> tuple[Assumption, ...]:
        """Return the hypotheses of the paper's bound; one never holds, so ε is an estimate."""
        require_noise(self.name, question, ["gaussian"])
        require_single_group(self.name, question)
        theorem = "Wang, Balle & Kasiviswanathan 2019, arXiv 1808.00087v2, Theorem 9"
        return (
            assume_sampling(
                question, ["fixed_size"], "batches are drawn without replacement", theorem
            ),
            Assumption(
                "neighbouring datasets differ in one replaced record",
                question.relation is NeighbouringRelation.REPLACE_ONE,
                theorem,
            ),
            Assumption(
                "σ is relative to the replace-one sensitivity 2C (in the paper: relative to C)",
                False,
                _SOURCE,
            ),
        )

    def epsilon_bound(self, question: Question, delta: float) -> Bound:
        """Return ε at δ: the smallest over the Rényi orders, converted as in the paper."""
        epsilons = renyi_conversion.classical_epsilons(_ORDERS, self._log_moments(question), delta)
        best = int(np.argmin(epsilons))
        return Bound(rounding.up(float(epsilons[best])), _ORDERS[best], renyi_conversion.CLASSICAL)

    def delta_bound(self, question: Question, epsilon: float) -> Bound:
        """Return δ at ε: the smallest over the Rényi orders, converted as in the paper."""
        moments = rounding.up_each(self._log_moments(question))
        log_deltas = renyi_conversion.classical_log_deltas(_ORDERS, moments, epsilon)
        best = int(np.argmin(log_deltas))
        value = rounding.up(math.exp(min(float(log_deltas[best]), 0.0)))
        return Bound(min(1.0, value), _ORDERS[best], renyi_conversion.CLASSICAL)

    def _log_moments(self, question: Question) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Return α − 1 times the mechanism's Rényi divergence at each order α, as in the paper."""
        group = require_single_group(self.name, question)
        return group.count * without_replacement.log_moments_as_in_paper(
            _ORDERS, group.rate, group.atom.noise_multiplier
        )
