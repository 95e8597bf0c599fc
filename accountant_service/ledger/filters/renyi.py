"""The Rényi filter: every step costs its Rényi divergence at one frozen order.

The parameters of later runs may depend on the results of earlier ones. A Rényi filter of one fixed
order is sound for such runs: releases are admitted while the sum of their Rényi divergences, each a
function of the mechanism chosen, stays within a bound fixed in advance (Feldman & Zrnic, arXiv
2008.11193; for runs that overlap in time: Haney et al., arXiv 2309.05901). So the order is chosen
once, when the dataset is created, and frozen; docs/accountants/filters.md has the proof.

Charges are whole micro-nats and round up; the budget rounds down. The cost of one step is kept in
whole atto-nats, so that a thousand small grants cost the same as one large grant.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Final

import numpy as np

from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.accounting.methods import Question
from accountant_service.accounting.methods.renyi_curves import log_moments
from accountant_service.errors import MethodNotApplicableError
from accountant_service.ledger.filters.base import (
    Amounts,
    Charge,
    Json,
    PrivacyFilter,
    add,
    count_units_within,
)
from accountant_service.ledger.step_plan import StepPlan
from accountant_service.mechanisms import CanonicalForm, DpSgd, canonical_form
from accountant_service.mechanisms.canonical import Premises
from accountant_service.numerics import renyi_conversion
from accountant_service.numerics.floats import rounding
from accountant_service.numerics.floats.special_functions import Array

_ATTO: Final = 10**18
_ATTO_PER_MICRO: Final = 10**12
STEP_COST_NATS_MAX: Final = 1e9  # beyond any budget
CANDIDATE_ORDERS: Final = 1 + np.geomspace(0.05, 250.0, 120)
# reference runs, which a dataset is likely to have: the order is chosen for them
_SAMPLE_RATES: Final = (0.001, 0.004, 0.01, 0.03, 0.1)
_NOISE_MULTIPLIERS: Final = (0.7, 0.9, 1.1, 1.5, 2.5, 5.0)


@dataclass(frozen=True, slots=True)
class RenyiCharge(Charge):
    """A plan's cost: the Rényi divergence of its steps, at each order of a filter.

    Attributes:
        steps: the number of steps of the plan.
        step_costs: atto-nats of one step at each order, rounded up.
    """

    step_costs: tuple[int, ...]

    @property
    def reserved(self) -> Amounts:
        """The cost of all steps of the plan, in micro-nats (1e-6 of divergence) at each order."""
        return self.spent(self.steps)

    def spent(self, granted: int) -> Amounts:
        """Return the cost of the granted steps, in micro-nats at each order."""
        return tuple(compute_cost(each, granted) for each in self.step_costs)

    def refund(self, granted: int) -> Amounts:
        """Return the cost of the steps that were not granted, in micro-nats at each order."""
        return self.held(granted)

    def entry_fields(self) -> Json:
        """Return one step's cost as a ledger-entry field: a decimal string, or one per order."""
        texts = [str(each) for each in self.step_costs]
        return {"unit_attonats": texts[0] if len(texts) == 1 else texts}

    @classmethod
    def from_json(cls, fields: Json, steps: int) -> RenyiCharge:
        """Return the cost of a plan of `steps` steps, read from a ledger entry's fields."""
        texts = fields["unit_attonats"]
        return cls(
            steps, tuple(int(each) for each in ([texts] if isinstance(texts, str) else texts))
        )


class DivergenceFilter(PrivacyFilter):
    """Base of filters that add up Rényi divergences at fixed orders, in micro-nats (1e-6).

    Attributes:
        orders: at which divergences are added up.
    """

    __slots__ = ()
    name: ClassVar[str] = "renyi"

    orders: tuple[float, ...]

    @abstractmethod
    def count_steps(self, step_costs: tuple[int, ...], taken: Amounts) -> int | None:
        """Return how many more steps with these costs fit; None if they cost nothing."""

    @property
    def nothing(self) -> Amounts:
        """The amounts spent without releases: zero divergence at every order."""
        return (0,) * len(self.orders)

    def step_costs(self, step: CanonicalForm) -> tuple[int, ...]:
        """Return one step's Rényi divergence at each order, in atto-nats (1e-18), rounded up.

        Raises:
            AccountingError: no divergence is proved for one of its releases.
        """
        return compute_step_costs(step, self.relation, self.orders)

    def after_reserving(self, plan: StepPlan, taken: Amounts) -> PrivacyFilter:
        """Return this filter unchanged: it was fixed when the dataset was created."""
        return self

    def compute_charge(self, plan: StepPlan, taken: Amounts) -> RenyiCharge:
        """Return the cost of a plan: the Rényi divergence of its steps."""
        return RenyiCharge(plan.steps, self.step_costs(plan.step))

    def compute_refund(self, plan: StepPlan, charge: Charge, granted: int) -> Amounts:
        """Return the cost of the steps that were not granted, in micro-nats at each order."""
        return charge.held(granted)

    def count_affordable_steps(self, plan: StepPlan, taken: Amounts) -> int | None:
        """Return how many more steps of a plan fit; None if they cost nothing."""
        return self.count_steps(self.step_costs(plan.step), taken)

    def fits(self, plan: StepPlan, taken: Amounts) -> bool:
        """Return whether the remaining budget covers the whole plan."""
        return self.admits(add(taken, self.compute_charge(plan, taken).reserved))

    def is_charge_sufficient(self, plan: StepPlan, charge: Charge) -> bool:
        """Return whether the stated step costs are at least the divergence of the plan's step."""
        if not isinstance(charge, RenyiCharge) or charge.steps != plan.steps:
            return False
        least = self.step_costs(plan.step)
        return all(
            recorded >= cost * (1 - 1e-9)
            for recorded, cost in zip(charge.step_costs, least, strict=True)
        )

    def is_refund_allowed(
        self,
        plan: StepPlan,
        charge: Charge,
        granted: int,
        refund: Amounts,
    ) -> bool:
        """Return whether the amounts freed are exactly the cost of the ungranted steps."""
        return refund == charge.held(granted)

    def read_charge(self, plan: StepPlan, fields: Json) -> RenyiCharge:
        """Return a plan's cost as a ledger entry or a stored row states it."""
        charge = RenyiCharge.from_json(fields, plan.steps)
        if len(charge.step_costs) != len(self.orders):
            raise ValueError(f"a step has {len(charge.step_costs)} costs, not {len(self.orders)}")
        return charge

    def balance_fields(self, spent: Amounts, held: Amounts) -> Json:
        """Return a balance change as ledger-entry fields: integers, or lists with one per order."""
        single = len(self.orders) == 1
        return {
            "spent_micronats": spent[0] if single else list(spent),
            "held_micronats": held[0] if single else list(held),
        }

    def read_balance(self, entry: Json) -> tuple[Amounts, Amounts]:
        """Return the changes of the spent and of the held amounts that a ledger entry states."""
        spent, held = (
            read_amounts(entry, name, len(self.orders))
            for name in ("spent_micronats", "held_micronats")
        )
        return spent, held


@dataclass(frozen=True, slots=True)
class RenyiFilter(DivergenceFilter):
    """A filter that adds up the Rényi divergence of releases at a single order.

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
    def orders(self) -> tuple[float, ...]:  # type: ignore[override]  # a field of a mixture
        """The filter's one Rényi order, as a tuple."""
        return (self.order,)

    @property
    def description(self) -> str:
        """A sentence that describes the filter."""
        return f"Rényi filter of order {self.order:g}"

    @property
    def budget(self) -> int:
        """The Rényi divergence that the budget (ε, δ) allows, in micro-nats, rounded down."""
        divergence = -rounding.add_rounding_up(self._conversion_overhead(), -self.epsilon)
        return math.floor(1e6 * max(divergence, 0.0))

    @property
    def whole(self) -> Amounts:
        """The Rényi divergence of the whole budget, in micro-nats."""
        return (self.budget,)

    def _conversion_overhead(self) -> float:
        """The ε that the conversion from Rényi divergence to (ε, δ) adds; it may be negative."""
        return float(
            renyi_conversion.tight_epsilons(np.array([self.order]), np.zeros(1), self.delta)[0]
        )

    def admits(self, taken: Amounts) -> bool:
        """Return whether the Rényi divergence taken is at most the budget's."""
        return taken[0] <= self.budget

    def share_of(self, taken: Amounts) -> float:
        """Return the Rényi divergence taken over the budget's; 1 if the budget is 0."""
        return taken[0] / self.budget if self.budget else 1.0

    def apply_cap(self, taken: Amounts, share: float, holder_taken: Amounts) -> Amounts:
        """Return the divergence taken, raised until no more remains than the cap allows."""
        left = count_units_within(share, self.budget) - holder_taken[0]
        return (max(taken[0], self.budget - max(left, 0)),)

    def epsilon_of(self, taken: Amounts) -> float:
        """Convert a Rényi divergence to ε at the budget's δ, rounded up."""
        micronats = taken[0]
        if micronats <= 0:
            return 0.0
        value = max(rounding.add_rounding_up(micronats / 1e6, self._conversion_overhead()), 0.0)
        return min(value, self.epsilon) if micronats <= self.budget else value

    def count_steps(self, step_costs: tuple[int, ...], taken: Amounts) -> int | None:
        """Return how many more steps with this cost fit; None if they cost nothing."""
        return count_affordable_steps(step_costs[0], self.budget - taken[0])

    def is_sound(self) -> bool:
        """Return whether the order is one at which a divergence bounds ε."""
        return 1 < self.order < math.inf

    def entry_fields(self) -> Json:
        """Return the filter's order and budget as fields of a dataset's first ledger entry."""
        if not self.is_sound():
            raise ValueError(f"order must be above 1, not {self.order}")
        return {"order": self.order, "budget_micronats": self.budget}

    def to_json(self) -> Json:
        """Return the filter's order as JSON, for storage."""
        return {"filter": self.name, "order": self.order}


def read_amounts(entry: Json, name: str, count: int) -> Amounts:
    """Return the amounts in a ledger entry's field: an integer, or a list of `count` integers."""
    value = entry[name]
    amounts = value if isinstance(value, list) and count > 1 else [value]
    if len(amounts) != count or any(type(each) is not int for each in amounts):
        raise TypeError(f"{name} must be {count} integers, not {value!r}")
    return tuple(amounts)


def compute_cost(step_cost: int, steps: int) -> int:
    """Return the cost of `steps` steps in micro-nats, rounded up once, given that of one step.

    `step_cost` is in atto-nats.

    Args:
        step_cost: atto-nats of one step.
        steps: at least 0.
    """
    return -(-step_cost * steps // _ATTO_PER_MICRO)


def count_affordable_steps(step_cost: int, micronats: int) -> int | None:
    """Return how many steps a budget in micro-nats pays for; None if they cost nothing."""
    if step_cost == 0:
        return None
    return max(micronats, 0) * _ATTO_PER_MICRO // step_cost


def compute_step_costs(
    step: CanonicalForm,
    relation: NeighbouringRelation,
    orders: tuple[float, ...],
    *,
    allows_infinite: bool = False,
) -> tuple[int, ...]:
    """Return the Rényi divergence of one step at each order, in atto-nats, rounded up.

    Args:
        step: the step.
        relation: when two datasets are neighbours.
        orders: of the divergence.
        allows_infinite: whether outcomes with an infinite loss are left out.

    Raises:
        AccountingError: no divergence is proved for one of its releases.
    """
    return _compute_step_costs(step, step.premises, relation, orders, allows_infinite)


@lru_cache(maxsize=4096)
def _compute_step_costs(
    step: CanonicalForm,
    premises: Premises,  # noqa: ARG001  # equal steps of other premises may be refused
    relation: NeighbouringRelation,
    orders: tuple[float, ...],
    allows_infinite: bool,
) -> tuple[int, ...]:
    """Return the Rényi divergence of one step at each order, computed once."""
    question = Question(step, relation)
    if not step.atom_counts:
        return (0,) * len(orders)
    moments = log_moments(question, np.array(orders), allows_infinite=allows_infinite)
    return tuple(
        _round_up_to_attonats(moment / (order - 1))
        for moment, order in zip(moments.tolist(), orders, strict=True)
    )


def _round_up_to_attonats(divergence: float) -> int:
    """Convert a divergence from nats to whole atto-nats (1e-18), rounded up and capped."""
    nats = rounding.up(divergence) if math.isfinite(divergence) else math.inf
    return math.ceil(_ATTO * min(nats, STEP_COST_NATS_MAX))


def choose_filter(
    epsilon: float,
    delta: float,
    relation: NeighbouringRelation,
    planned: CanonicalForm | None = None,
) -> RenyiFilter:
    """Return a Rényi filter with the order that admits the most steps of typical runs.

    For each reference run, the steps admitted at an order are divided by the steps admitted at the
    run's best order. The chosen order has the largest geometric mean of these ratios. With a
    planned mechanism it is the best order for that mechanism.

    Args:
        epsilon: ε of the budget.
        delta: δ of the budget.
        relation: when two datasets are neighbours.
        planned: one step of the planned mechanism.

    Raises:
        MethodNotApplicableError: the planned mechanism has no finite divergence at any order.
    """
    allowed = np.maximum(
        epsilon
        - renyi_conversion.tight_epsilons(CANDIDATE_ORDERS, np.zeros_like(CANDIDATE_ORDERS), delta),
        1e-9,
    )
    costs = (
        compute_reference_step_costs(relation)
        if planned is None
        else _step_costs_by_order(planned, relation)[None, :]
    )
    if not np.isfinite(costs).any():
        raise MethodNotApplicableError(
            "the planned mechanism has no finite Rényi divergence at an order from "
            f"{CANDIDATE_ORDERS[0]:g} to {CANDIDATE_ORDERS[-1]:g}, so this filter could never "
            'admit it: choose "filter": "addition" or "reference"',
            "",
        )
    log_steps = np.log(allowed) - np.log(costs)
    regret = log_steps - log_steps.max(axis=1, keepdims=True)
    best = int(np.argmax(regret.mean(axis=0)))
    return RenyiFilter(float(CANDIDATE_ORDERS[best]), epsilon, delta, relation)


def _step_costs_by_order(step: CanonicalForm, relation: NeighbouringRelation) -> Array:
    """Return the Rényi divergence of one step at each candidate order, in nats."""
    question = Question(step, relation)
    moments = log_moments(question, CANDIDATE_ORDERS, allows_infinite=True)
    return np.maximum(moments / (CANDIDATE_ORDERS - 1), 1e-300)


@lru_cache(maxsize=4)
def compute_reference_step_costs(relation: NeighbouringRelation) -> Array:
    """Return one step's Rényi divergences in nats: a row per example run, a column per order."""
    return np.array(
        [
            _step_costs_by_order(canonical_form(DpSgd(sigma, sample_rate=rate, steps=1)), relation)
            for rate in _SAMPLE_RATES
            for sigma in _NOISE_MULTIPLIERS
        ]
    )
