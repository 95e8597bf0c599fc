"""The Rényi filter with a part of δ for releases whose loss may be infinite.

A release of probability δᵢ of an infinite loss is charged δᵢ, by addition, and the divergence of
all its other outcomes. The part of δ for such sums is frozen when the dataset is created, and the
divergences keep to the rest: a part that followed from what was released would be unsound.
docs/accountants/filters.md has the proof.

Amounts are micro-nats at each order, then units of δ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar, Final

from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.accounting.methods import Question
from accountant_service.accounting.methods.renyi_curves import infinite_mass
from accountant_service.ledger.filters import addition, renyi, renyi_mixture
from accountant_service.ledger.filters.base import Amounts, Charge, Json, PrivacyFilter
from accountant_service.ledger.filters.renyi import DivergenceFilter, RenyiCharge
from accountant_service.ledger.step_plan import StepPlan
from accountant_service.mechanisms import CanonicalForm
from accountant_service.mechanisms.kinds import COUNT_MAX
from accountant_service.numerics.floats import rounding

_PARTS: Final = 10  # of δ; one of them is for sums


@dataclass(frozen=True, slots=True)
class RenyiSumCharge(RenyiCharge):
    """A plan's cost: the Rényi divergence of its steps at each order, and their δ.

    Attributes:
        steps: the number of steps of the plan.
        step_costs: atto-nats of one step at each order, rounded up.
        step_delta: units of δ of one step, rounded up.
    """

    step_delta: int

    def spent(self, granted: int) -> Amounts:
        """Return the cost of the granted steps, in micro-nats at each order and units of δ."""
        costs = (renyi.compute_cost(each, granted) for each in self.step_costs)
        return (*costs, self.step_delta * granted)

    def entry_fields(self) -> Json:
        """Return one step's cost as ledger-entry fields."""
        texts = [str(each) for each in self.step_costs]
        return {"unit_attonats": texts, "unit_delta": addition.write_units(self.step_delta)}

    @classmethod
    def from_json(cls, fields: Json, steps: int) -> RenyiSumCharge:
        """Return the cost of a plan of `steps` steps, read from a ledger entry's fields."""
        costs = tuple(int(each) for each in fields["unit_attonats"])
        return cls(steps, costs, addition.read_units(fields["unit_delta"]))


@dataclass(frozen=True, slots=True)
class RenyiSumFilter(DivergenceFilter):
    """A filter that adds up Rényi divergences, and the δ of releases that have one.

    Attributes:
        epsilon: ε of the budget.
        delta: δ of the budget.
        relation: when two datasets are neighbours.
        summed: units of δ that releases may take by addition.
        rest: the Rényi filter of this ε and the rest of δ.
    """

    oldest_reader: ClassVar[str] = "0011"
    has_scalar_caps: ClassVar[bool] = False
    epsilon: float
    delta: float
    relation: NeighbouringRelation
    summed: int
    rest: DivergenceFilter

    @staticmethod
    def rest_of(delta: float, summed: int) -> float:
        """Return what units of δ leave of a δ, rounded down.

        Raises:
            ValueError: nothing.
        """
        left = rounding.as_written(delta) - Fraction(summed, addition.UNITS)
        if summed < 0 or left <= 0:
            raise ValueError(f"{addition.write_units(summed)} is no part of δ = {delta}")
        return rounding.fraction_down(left)

    @classmethod
    def of_budget(
        cls,
        epsilon: float,
        delta: float,
        relation: NeighbouringRelation,
        planned: CanonicalForm | None = None,
    ) -> RenyiSumFilter:
        """Return the filter of a new dataset, with the best orders for a planned step.

        Raises:
            MethodNotApplicableError: the planned step has no finite divergence.
        """
        summed = addition.units_down(delta) // _PARTS
        part = cls.rest_of(delta, summed)
        rest: DivergenceFilter = (
            renyi_mixture.choose_late_mixture(epsilon, part, relation)
            if planned is None
            else renyi.choose_filter(epsilon, part, relation, planned)
        )
        return cls(epsilon, delta, relation, summed, rest)

    @property
    def orders(self) -> tuple[float, ...]:  # type: ignore[override]  # a field of a mixture
        """The orders at which divergences are added up."""
        return self.rest.orders

    @property
    def description(self) -> str:
        """A sentence that describes the filter."""
        share = rounding.fraction_down(Fraction(self.summed, addition.UNITS))
        return f"{self.rest.description}; releases with a δ may take {share:g} of δ by addition"

    @property
    def nothing(self) -> Amounts:
        """The amounts spent without releases: zeros."""
        return (*self.rest.nothing, 0)

    def admits(self, taken: Amounts) -> bool:
        """Return whether the divergences fit the rest of δ, and the sum of δ its own part."""
        return taken[-1] <= self.summed and self.rest.admits(taken[:-1])

    def share_of(self, taken: Amounts) -> float:
        """Return the larger of the shares of the divergences and of the sum of δ."""
        share = self.rest.share_of(taken[:-1])
        if not taken[-1]:
            return share
        own = Fraction(taken[-1], self.summed) if self.summed else Fraction(2)
        return max(share, rounding.fraction_up(own))

    def epsilon_of(self, taken: Amounts) -> float:
        """Return an upper bound on ε, at the budget's δ, of releases that cost these amounts."""
        return self.rest.epsilon_of(taken[:-1])

    # --- the weights of the rest

    @property
    def initial(self) -> RenyiSumFilter:
        """The filter that the dataset was created with."""
        return self._with_rest(self.rest.initial)

    def _with_rest(self, rest: PrivacyFilter) -> RenyiSumFilter:
        """Return a copy with another filter of the rest of δ."""
        assert isinstance(rest, DivergenceFilter)
        return replace(self, rest=rest)

    def may_be_replaced(self, taken: Amounts) -> bool:
        """Return whether a run may still shift weight: nothing is spent or held."""
        return not any(taken) and self.rest.may_be_replaced(taken[:-1])

    def after_reserving(self, plan: StepPlan, taken: Amounts) -> RenyiSumFilter:
        """Return the filter with weight shifted to a first plan's best order."""
        if not self.may_be_replaced(taken):
            return self
        return self._with_rest(self.rest.after_reserving(plan, taken[:-1]))

    def allows_replacement(self, other: PrivacyFilter, plan: StepPlan, taken: Amounts) -> bool:
        """Return whether reserving a plan may replace this filter by `other`."""
        return (
            not any(taken)
            and isinstance(other, RenyiSumFilter)
            and replace(other, rest=self.rest) == self
            and self.rest.allows_replacement(other.rest, plan, taken[:-1])
        )

    def is_sound(self) -> bool:
        """Return whether both parts are at most δ, and the rest is sound for its own."""
        parts = rounding.as_written(self.rest.delta) + Fraction(self.summed, addition.UNITS)
        budget = (self.rest.epsilon, self.rest.relation)
        return (
            parts <= rounding.as_written(self.delta)
            and budget == (self.epsilon, self.relation)
            and self.rest.is_sound()
        )

    # --- charges

    def step_costs(self, step: CanonicalForm) -> tuple[int, ...]:
        """Return the divergence of one step at each order, in atto-nats, rounded up."""
        return renyi.compute_step_costs(step, self.relation, self.orders, allows_infinite=True)

    def _step_delta(self, step: CanonicalForm) -> int:
        """Return the probability of an infinite loss in one step, in units of δ, rounded up."""
        return addition.units_up(infinite_mass(Question(step, self.relation)))

    def compute_charge(self, plan: StepPlan, taken: Amounts) -> RenyiSumCharge:
        """Return the cost of a plan: the divergence of its steps, and their δ."""
        return RenyiSumCharge(plan.steps, self.step_costs(plan.step), self._step_delta(plan.step))

    def count_steps(self, step_costs: tuple[int, ...], taken: Amounts) -> int | None:
        """Return how many more steps with these costs, and without a δ, fit."""
        return self.rest.count_steps(step_costs, taken[:-1])

    def count_affordable_steps(self, plan: StepPlan, taken: Amounts) -> int | None:
        """Return how many more steps of a plan fit; None if they cost nothing."""
        each = self._step_delta(plan.step)
        by_delta = max(self.summed - taken[-1], 0) // each if each else COUNT_MAX
        found = self.count_steps(self.step_costs(plan.step), taken)
        return found if not each else min(by_delta, COUNT_MAX if found is None else found)

    def is_charge_sufficient(self, plan: StepPlan, charge: Charge) -> bool:
        """Return whether the stated costs are at least those of the plan's step."""
        return (
            isinstance(charge, RenyiSumCharge)
            and DivergenceFilter.is_charge_sufficient(self, plan, charge)
            and charge.step_delta >= self._step_delta(plan.step)
        )

    def read_charge(self, plan: StepPlan, fields: Json) -> RenyiSumCharge:
        """Return a plan's cost as a ledger entry or a stored row states it."""
        charge = RenyiSumCharge.from_json(fields, plan.steps)
        if len(charge.step_costs) != len(self.orders):
            raise ValueError(f"a step has {len(charge.step_costs)} costs, not {len(self.orders)}")
        return charge

    # --- the record

    def entry_fields(self) -> Json:
        """Return the filter of the rest, and the δ for sums, as ledger-entry fields."""
        summed = {"summed_delta": addition.write_units(self.summed)}
        return {"filter": self.name} | self.rest.entry_fields() | summed

    def to_json(self) -> Json:
        """Return the filter's own parameters as JSON, for storage."""
        return self.rest.to_json() | {"summed_delta": addition.write_units(self.summed)}

    def balance_fields(self, spent: Amounts, held: Amounts) -> Json:
        """Return a balance change as ledger-entry fields."""
        sums = {"spent_delta": spent[-1], "held_delta": held[-1]}
        return self.rest.balance_fields(spent[:-1], held[:-1]) | {
            name: addition.write_units(each) for name, each in sums.items()
        }

    def read_balance(self, entry: Json) -> tuple[Amounts, Amounts]:
        """Return the changes of the spent and of the held amounts that a ledger entry states."""
        spent, held = self.rest.read_balance(entry)
        sums = (addition.read_units(entry[name]) for name in ("spent_delta", "held_delta"))
        return (*spent, next(sums)), (*held, next(sums))
