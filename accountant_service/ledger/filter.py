"""The privacy filter: how much of a budget a mechanism takes, and whether it still fits.

The parameters of later runs may depend on the results of earlier ones. A Rényi filter of one fixed
order is sound even so: releases are admitted while the sum of their Rényi divergences, each a
function of the mechanism chosen, stays within a bound fixed in advance (Feldman & Zrnic, arXiv
2008.11193; for runs that overlap in time: Haney et al., arXiv 2309.05901). So the order is chosen
once, when the dataset is created, and frozen; the proof is in decision 0004.

Charges are whole micro-nats and round up; the budget rounds down. The cost of one step is kept in
whole atto-nats, so that a thousand small grants cost what one large one does.
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
from accountant_service.numerics import conversion, rounding
from accountant_service.numerics.special import Array

_ATTO: Final = 10**18
_ATTO_PER_MICRO: Final = 10**12
_UNIT_MAX: Final = 1e9  # nats of one step, beyond any budget
_ORDERS: Final = 1 + np.geomspace(0.05, 250.0, 120)
# runs that a dataset is likely to see: what the order is chosen for
_SAMPLE_RATES: Final = (0.001, 0.004, 0.01, 0.03, 0.1)
_NOISE_MULTIPLIERS: Final = (0.7, 0.9, 1.1, 1.5, 2.5, 5.0)


@dataclass(frozen=True, slots=True)
class RenyiFilter:
    """One dataset's frozen accounting policy.

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
        room = -rounding.sum_up(self._overhead(), -self.epsilon)
        return math.floor(1e6 * max(room, 0.0))

    def _overhead(self) -> float:
        """What the conversion from Rényi divergence takes of ε: it may be below 0."""
        return float(conversion.tight_epsilons(np.array([self.order]), np.zeros(1), self.delta)[0])

    def unit_cost(self, step: CanonicalForm) -> int:
        """The Rényi divergence of one step, in atto-nats, rounded up.

        Raises:
            AccountingError: no divergence is proved for a release in it.
        """
        return _unit_cost(step, self.relation, self.order)

    def epsilon_of(self, micronats: int) -> float:
        """The ε of so much divergence, at the budget's δ.

        0 for none, and at most the budget's while it is within the budget.
        """
        if micronats <= 0:
            return 0.0
        value = max(rounding.sum_up(micronats / 1e6, self._overhead()), 0.0)
        return min(value, self.epsilon) if micronats <= self.budget else value


def cost(unit: int, steps: int) -> int:
    """Micro-nats that so many steps cost, rounded up once for all of them.

    Args:
        unit: atto-nats a step.
        steps: at least 0.
    """
    return -(-unit * steps // _ATTO_PER_MICRO)


def affordable_steps(unit: int, micronats: int) -> int | None:
    """The most steps that cost at most so much; None if there is no end to them."""
    if unit == 0:
        return None
    return max(micronats, 0) * _ATTO_PER_MICRO // unit


@lru_cache(maxsize=4096)
def _unit_cost(step: CanonicalForm, relation: NeighbouringRelation, order: float) -> int:
    question = Question(step, relation)
    _require_proof(question)
    if not step.parts:
        return 0
    moment = float(log_moments(question, np.array([order]))[0])
    divergence = rounding.up(moment / (order - 1)) if math.isfinite(moment) else math.inf
    return math.ceil(_ATTO * min(divergence, _UNIT_MAX))


def _require_proof(question: Question) -> None:
    """Fail closed: only releases whose divergence is proved may be charged."""
    for part in question.parts:
        if part.atom.sampling == "shuffled":
            raise MethodNotApplicableError(
                "the ledger charges no shuffled batches: no Rényi divergence of theirs is proved "
                "here; use sampling poisson or fixed_size, or none and the epochs as steps",
                part.atom.pointer,
            )
    ACCOUNTANTS["subsampled_rdp"].assumptions(question)


def choose(
    epsilon: float,
    delta: float,
    relation: NeighbouringRelation,
    planned: CanonicalForm | None = None,
) -> RenyiFilter:
    """The order that admits the most steps of the runs a dataset is likely to see.

    The steps that each reference run may take at an order, relative to its own best order; the
    geometric mean of that over the runs is largest at the order chosen. With a planned mechanism
    it is the order best for that one.

    Args:
        epsilon: ε of the budget.
        delta: δ of the budget.
        relation: when two datasets are neighbours.
        planned: one step of what the dataset is meant for.
    """
    room = np.maximum(
        epsilon - conversion.tight_epsilons(_ORDERS, np.zeros_like(_ORDERS), delta), 1e-9
    )
    costs = _reference_costs(relation) if planned is None else _costs(planned, relation)[None, :]
    log_steps = np.log(room) - np.log(costs)
    regret = log_steps - log_steps.max(axis=1, keepdims=True)
    best = int(np.argmax(regret.mean(axis=0)))
    return RenyiFilter(float(_ORDERS[best]), epsilon, delta, relation)


def _costs(step: CanonicalForm, relation: NeighbouringRelation) -> Array:
    question = Question(step, relation)
    _require_proof(question)
    return np.maximum(log_moments(question, _ORDERS) / (_ORDERS - 1), 1e-300)


@lru_cache(maxsize=4)
def _reference_costs(relation: NeighbouringRelation) -> Array:
    return np.array(
        [
            _costs(canonical_form(DpSgd(sigma, sample_rate=rate, steps=1)), relation)
            for rate in _SAMPLE_RATES
            for sigma in _NOISE_MULTIPLIERS
        ]
    )
