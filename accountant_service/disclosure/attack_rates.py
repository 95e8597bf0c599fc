"""Upper bounds on what an attacker achieves, as rates and as counts out of a thousand.

A mechanism's own profile bounds its attacks best. Two cases use less:

* a whole budget under the reference filter: everything released has H(x) ≤ H_{ρ^N}(x) + s·δ for all
  x (docs/accountants/filters.md), so each rate is that of N reference steps, plus s·δ;
* ε and δ alone: TPR ≤ e^ε·FPR + δ and TPR ≤ 1 − e^{−ε}(1 − δ − FPR), which meet at the advantage
  (e^ε − 1 + 2δ)/(e^ε + 1) (Kairouz, Oh & Viswanath 2015, arXiv 1311.0776).

All rates are rounded up.
"""

from __future__ import annotations

import math
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.accounting.methods import Question
from accountant_service.accounting.risk import Advantage, GaussianMu, TruePositiveRate
from accountant_service.errors import AccountingError
from accountant_service.mechanisms import Mechanism, canonical_form
from accountant_service.numerics.floats import rounding

FALSE_POSITIVE_RATES: Final = (0.001, 0.01, 0.1)
_EPSILON_MAX: Final = 700.0  # e^ε is a double


class Detection(BaseModel):
    """An upper bound on the true-positive rate of attacks with a given false-positive rate."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    false_positive_rate: float = Field(gt=0, lt=1)
    true_positive_rate: float = Field(ge=0, le=1, description="upper bound")

    def posterior(self, prior: float) -> float:
        """Return an upper bound on P(member) of a record that an attack calls a member.

        Args:
            prior: the attacker's probability before the attack, in (0, 1).
        """
        present = prior * self.true_positive_rate
        return min(1.0, rounding.up(present / (present + (1 - prior) * self.false_positive_rate)))


class AttackRates(BaseModel):
    """Upper bounds on the success rates of membership attacks against one record.

    Attributes:
        basis: what the bounds follow from.
        advantage: largest true-positive minus false-positive rate.
        detections: at each rate of `FALSE_POSITIVE_RATES`.
        mu: a μ of Gaussian differential privacy that holds up to `mu_slack`; None if unknown.
        mu_slack: s, where the trade-off function is at least G_μ − s.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    basis: Literal["mechanism", "reference_steps", "epsilon_and_delta"]
    advantage: float = Field(ge=0, le=1)
    detections: tuple[Detection, ...]
    mu: float | None = None
    mu_slack: float | None = None

    @property
    def guess_success(self) -> float:
        """An upper bound on the probability of guessing membership right at prior 1/2."""
        above = math.nextafter(0.5 + 0.5 * self.advantage, 1.0)
        return above if self.advantage else 0.5

    def detection(self, false_positive_rate: float) -> Detection:
        """Return the bound at a false-positive rate, which is one of `FALSE_POSITIVE_RATES`."""
        return next(
            each for each in self.detections if each.false_positive_rate == false_positive_rate
        )


def count_per_thousand(rate: float) -> int:
    """Convert a rate to a count out of 1000, rounded up."""
    return min(1000, math.ceil(1000 * rate))


def bound_attacks_on_mechanism(
    mechanism: Mechanism,
    relation: NeighbouringRelation,
    delta: float,
    slack: float = 0.0,
) -> AttackRates:
    """Bound the success of attacks on a mechanism, or on any that it dominates up to `slack`.

    Args:
        mechanism: the whole plan, or all reference steps of a budget.
        relation: the neighbouring relation.
        delta: the slack of μ, in (0, 1).
        slack: η ≥ 0 with H(x) ≤ H_mechanism(x) + η at all x; 0 for the mechanism itself.

    Raises:
        AccountingError: a release has no proved dominating pair, or the work limit is exceeded.
    """
    question = Question(canonical_form(mechanism), relation)
    detections = tuple(
        Detection(
            false_positive_rate=rate,
            true_positive_rate=_add_slack(TruePositiveRate(rate).risk(question).upper, slack),
        )
        for rate in FALSE_POSITIVE_RATES
    )
    mu = _bound_mu(question, delta)
    return AttackRates(
        basis="reference_steps" if slack else "mechanism",
        advantage=_add_slack(Advantage().risk(question).upper, slack),
        detections=detections,
        mu=mu,
        mu_slack=None if mu is None else _add_slack(delta, slack),
    )


def _add_slack(rate: float, slack: float) -> float:
    """Add δ = `slack` to an upper bound on a rate; round up, to at most 1."""
    return min(1.0, rounding.up(rate + slack) if slack else rate)


def _bound_mu(question: Question, slack: float) -> float | None:
    """Return an upper bound on μ of Gaussian DP, up to δ = `slack`; None if none is proved."""
    try:
        mu = GaussianMu(slack).risk(question).upper
    except AccountingError:
        return None
    return mu if math.isfinite(mu) else None


def bound_attacks_by_epsilon(epsilon: float, delta: float) -> AttackRates:
    """Bound the rates of attacks on any (ε, δ)-differentially private release.

    Args:
        epsilon: at least 0.
        delta: in [0, 1].
    """
    shrunk = math.exp(-epsilon)  # 0 for a large ε
    advantage = (-math.expm1(-epsilon) + 2 * delta * shrunk) / (1 + shrunk)
    return AttackRates(
        basis="epsilon_and_delta",
        advantage=min(1.0, rounding.up(advantage)),
        detections=tuple(
            Detection(
                false_positive_rate=rate,
                true_positive_rate=_true_positive_rate(epsilon, delta, rate),
            )
            for rate in FALSE_POSITIVE_RATES
        ),
    )


def _true_positive_rate(epsilon: float, delta: float, rate: float) -> float:
    """Return the largest TPR that (ε, δ)-DP allows attacks with the FPR `rate`."""
    steep = math.exp(min(epsilon, _EPSILON_MAX)) * rate + delta
    flat = -math.expm1(-epsilon) + math.exp(-epsilon) * (delta + rate)
    return min(1.0, rounding.up(steep), rounding.up(flat))
