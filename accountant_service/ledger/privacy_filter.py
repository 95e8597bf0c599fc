"""The privacy filter: the cost of a mechanism, and the budget that it is charged to.

The parameters of later runs may depend on the results of earlier ones. A Rényi filter of one fixed
order is sound for such runs: releases are admitted while the sum of their Rényi divergences, each a
function of the mechanism chosen, stays within a bound fixed in advance (Feldman & Zrnic, arXiv
2008.11193; for runs that overlap in time: Haney et al., arXiv 2309.05901). So the order is chosen
once, when the dataset is created, and frozen; the proof is in decision 0004.

Charges are whole micro-nats and round up; the budget rounds down. The cost of one step is kept in
whole atto-nats, so that a thousand small grants cost the same as one large grant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from accountant_service.accountants import ACCOUNTANTS, Question
from accountant_service.accountants.subsampled_rdp import log_moments
from accountant_service.errors import MethodNotApplicableError
from accountant_service.guarantee import NeighbouringRelation
from accountant_service.mechanisms import CanonicalForm, DpSgd, canonical_form
from accountant_service.numerics import renyi_conversion
from accountant_service.numerics.floats import rounding
from accountant_service.numerics.floats.special_functions import Array

_ATTO: Final = 10**18
_ATTO_PER_MICRO: Final = 10**12
_STEP_COST_NATS_MAX: Final = 1e9  # beyond any budget
_ORDERS: Final = 1 + np.geomspace(0.05, 250.0, 120)
# reference runs, which a dataset is likely to have: the order is chosen for them
_SAMPLE_RATES: Final = (0.001, 0.004, 0.01, 0.03, 0.1)
_NOISE_MULTIPLIERS: Final = (0.7, 0.9, 1.1, 1.5, 2.5, 5.0)


@dataclass(frozen=True, slots=True)
class RenyiFilter:
    """A Rényi filter of one order: the frozen accounting policy of a dataset.

    Attributes:
        order: α > 1, the same for every release.
        epsilon: ε of the budget.
        delta: δ of the budget.
        relation: when two datasets are neighbours.
    """

    order: float
    epsilon: float
    delta: float
    relation: NeighbouringRelation

    @property
    def budget(self) -> int:
        """The Rényi divergence that (ε, δ) allows, in micro-nats, rounded down."""
        divergence = -rounding.add_rounding_up(self._conversion_overhead(), -self.epsilon)
        return math.floor(1e6 * max(divergence, 0.0))

    def _conversion_overhead(self) -> float:
        """The ε that the conversion from Rényi divergence adds; it may be negative."""
        return float(
            renyi_conversion.tight_epsilons(np.array([self.order]), np.zeros(1), self.delta)[0]
        )

    def step_cost(self, step: CanonicalForm) -> int:
        """Return the Rényi divergence of one step, in atto-nats, rounded up.

        Raises:
            AccountingError: no divergence is proved for one of its releases.
        """
        return _compute_step_cost(step, self.relation, self.order)

    def epsilon_of(self, micronats: int) -> float:
        """Return the ε of a Rényi divergence in micro-nats, at the budget's δ.

        It is 0 for no divergence, and at most the budget's ε within the budget.
        """
        if micronats <= 0:
            return 0.0
        value = max(rounding.add_rounding_up(micronats / 1e6, self._conversion_overhead()), 0.0)
        return min(value, self.epsilon) if micronats <= self.budget else value


def compute_cost(step_cost: int, steps: int) -> int:
    """Return the cost of a number of steps in micro-nats, rounded up once for all of them.

    Args:
        step_cost: atto-nats of one step.
        steps: at least 0.
    """
    return -(-step_cost * steps // _ATTO_PER_MICRO)


def count_affordable_steps(step_cost: int, micronats: int) -> int | None:
    """Return the most steps that a budget pays for; None if steps cost nothing."""
    if step_cost == 0:
        return None
    return max(micronats, 0) * _ATTO_PER_MICRO // step_cost


@lru_cache(maxsize=4096)
def _compute_step_cost(step: CanonicalForm, relation: NeighbouringRelation, order: float) -> int:
    """Return the Rényi divergence of one step at an order, in atto-nats, rounded up."""
    question = Question(step, relation)
    _require_proof(question)
    if not step.atom_counts:
        return 0
    moment = float(log_moments(question, np.array([order]))[0])
    divergence = rounding.up(moment / (order - 1)) if math.isfinite(moment) else math.inf
    return math.ceil(_ATTO * min(divergence, _STEP_COST_NATS_MAX))


def _require_proof(question: Question) -> None:
    """Refuse releases without a proved divergence: they cannot be charged."""
    for part in question.release_groups:
        if part.atom.sampling == "shuffled":
            raise MethodNotApplicableError(
                "the ledger cannot charge shuffled batches: it has no proved Rényi divergence for "
                "them. Use sampling poisson or fixed_size, or sampling none with one step an epoch",
                part.atom.pointer,
            )
    ACCOUNTANTS["subsampled_rdp"].assumptions(question)


def choose_filter(
    epsilon: float,
    delta: float,
    relation: NeighbouringRelation,
    planned: CanonicalForm | None = None,
) -> RenyiFilter:
    """Return a filter of the order that admits the most steps of likely runs.

    For each reference run, the steps admitted at an order are divided by the steps admitted at the
    run's best order. The chosen order has the largest geometric mean of these ratios. With a
    planned mechanism it is the best order for that mechanism.

    Args:
        epsilon: ε of the budget.
        delta: δ of the budget.
        relation: when two datasets are neighbours.
        planned: one step of the planned mechanism.
    """
    allowed = np.maximum(
        epsilon - renyi_conversion.tight_epsilons(_ORDERS, np.zeros_like(_ORDERS), delta), 1e-9
    )
    costs = (
        _reference_step_costs(relation)
        if planned is None
        else _step_costs_by_order(planned, relation)[None, :]
    )
    log_steps = np.log(allowed) - np.log(costs)
    regret = log_steps - log_steps.max(axis=1, keepdims=True)
    best = int(np.argmax(regret.mean(axis=0)))
    return RenyiFilter(float(_ORDERS[best]), epsilon, delta, relation)


def _step_costs_by_order(step: CanonicalForm, relation: NeighbouringRelation) -> Array:
    """Return the Rényi divergence of one step at each candidate order, in nats."""
    question = Question(step, relation)
    _require_proof(question)
    return np.maximum(log_moments(question, _ORDERS) / (_ORDERS - 1), 1e-300)


@lru_cache(maxsize=4)
def _reference_step_costs(relation: NeighbouringRelation) -> Array:
    """Return the step cost of each reference run (rows) at each candidate order (columns)."""
    return np.array(
        [
            _step_costs_by_order(canonical_form(DpSgd(sigma, sample_rate=rate, steps=1)), relation)
            for rate in _SAMPLE_RATES
            for sigma in _NOISE_MULTIPLIERS
        ]
    )
