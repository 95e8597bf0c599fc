"""The default filter: small releases are added up, and a run that is worth it sets the reference.

The budget is one sum. Its parts are releases with an ε and a δ of their own, and at most one
reference filter, which is (ε′, δ′)-DP as a whole, whatever it admits. So everything is (ε, δ)-DP if
Σεᵢ + ε′ ≤ ε and Σδᵢ + δ′ ≤ δ (Rogers et al. 2016, arXiv 1605.08294, section 3). The reference may
be chosen late, from all that was seen before, because what was added by then is subtracted first:
ε′ and δ′ are what it leaves. docs/accountants/filters.md has the proof.

Amounts are those of the reference filter, then units of ε and of δ that were added.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar, Final

from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.accounting.methods import ACCOUNTANTS, Question
from accountant_service.errors import AccountingError, CodedError, NoFiniteEpsilonError
from accountant_service.ledger.errors import ReferenceFixedError, UnsuitableReferenceError
from accountant_service.ledger.filters import addition
from accountant_service.ledger.filters.addition import AddedCharge, AdditionFilter
from accountant_service.ledger.filters.base import (
    Amounts,
    Charge,
    Json,
    PrivacyFilter,
    add,
    subtract,
)
from accountant_service.ledger.filters.reference import ReferenceCharge, ReferenceFilter
from accountant_service.ledger.step_plan import StepPlan
from accountant_service.mechanisms.kinds import COUNT_MAX
from accountant_service.numerics.floats import rounding
from accountant_service.writing import number_format

_NOTHING_ADDED: Final = (0, 0)
_NO_REFERENCE: Final = (0, 0)
# a run of releases with known losses sets the reference only where composing gains this much
_GAIN: Final = 1.1


@dataclass(frozen=True, slots=True)
class LateCharge(Charge):
    """A plan's cost: by addition, or in steps of the reference.

    Attributes:
        steps: the number of steps of the plan.
        part: the cost in the units of the part of the sum that pays for it.
    """

    part: AddedCharge | ReferenceCharge

    @property
    def is_added(self) -> bool:
        """Return whether the plan is charged by addition."""
        return isinstance(self.part, AddedCharge)

    def _widen(self, amounts: Amounts) -> Amounts:
        """Return a part's amounts among those of the whole filter."""
        return _NO_REFERENCE + amounts if self.is_added else amounts + _NOTHING_ADDED

    @property
    def reserved(self) -> Amounts:
        """The amounts held before the first grant."""
        return self._widen(self.part.reserved)

    @property
    def needs_slack(self) -> bool:
        """True if the cost includes a part of the slack."""
        return self.part.needs_slack

    def spent(self, granted: int) -> Amounts:
        """Return the amounts spent after `granted` steps."""
        return self._widen(self.part.spent(granted))

    def refund(self, granted: int) -> Amounts | None:
        """Return the budget freed if the run ends after `granted` steps; None if unknown yet."""
        found = self.part.refund(granted)
        return None if found is None else self._widen(found)

    def least_refund(self, granted: int) -> Amounts:
        """Return a quick lower bound on the budget freed if the run ends after `granted` steps."""
        return self._widen(self.part.least_refund(granted))

    def entry_fields(self) -> Json:
        """Return the fields that state this cost in a ledger entry."""
        return self.part.entry_fields()

    def to_json(self) -> Json:
        """Return the cost as JSON, for storage in a reservation's row."""
        return self.part.to_json() | {"part": "added" if self.is_added else "reference"}


@dataclass(frozen=True, slots=True)
class LateReferenceFilter(PrivacyFilter):
    """A sum of small releases and of one reference filter on what they leave.

    Attributes:
        epsilon: ε of the whole budget.
        delta: δ of the whole budget, above 0.
        relation: when two datasets are neighbours.
        added: units of ε and of δ that were added when the reference was chosen, and that the
            reference leaves for addition; zeros without a reference.
        rest: the reference filter, whose budget is the rest. Without a reference, all
            releases are added. It is a planned one if the owner chose the reference.
    """

    name: ClassVar[str] = "reference"
    oldest_reader: ClassVar[str] = "0008"
    epsilon: float
    delta: float
    relation: NeighbouringRelation
    added: Amounts
    rest: ReferenceFilter

    @classmethod
    def of_budget(
        cls, epsilon: float, delta: float, relation: NeighbouringRelation
    ) -> LateReferenceFilter:
        """Return the filter of a new dataset, in which nothing is added and no reference chosen."""
        rest = ReferenceFilter(epsilon, delta, relation)
        return cls(epsilon, delta, relation, _NOTHING_ADDED, rest)

    @classmethod
    def from_json(
        cls, stored: Json, epsilon: float, delta: float, relation: NeighbouringRelation
    ) -> LateReferenceFilter:
        """Return the filter that a row or an entry stores.

        Raises:
            KeyError, TypeError, ValueError: it records none.
        """
        texts = stored["added_epsilon"], stored["added_delta"]
        added = tuple(addition.read_units(each) for each in texts)
        whole = cls.of_budget(epsilon, delta, relation)
        rest = ReferenceFilter.from_json(stored, *whole._left(added), relation)
        if min(added) < 0 or (rest.reference is None and (any(added) or rest.is_planned)):
            raise ValueError(f"no filter of this ledger is {stored!r}")
        return replace(whole, added=added, rest=rest)

    @property
    def nothing(self) -> Amounts:
        """The amounts spent without releases: zeros."""
        return _NO_REFERENCE + _NOTHING_ADDED

    @property
    def reference_part(self) -> ReferenceFilter:
        """The reference filter on what addition leaves."""
        return self.rest

    @property
    def _sum(self) -> AdditionFilter:
        """The filter that adds up releases, with the whole budget."""
        return AdditionFilter(self.epsilon, self.delta, self.relation)

    @property
    def _has_reference(self) -> bool:
        """Return whether a reference is chosen."""
        return self.rest.reference is not None

    @property
    def allowance(self) -> Amounts:
        """The units of ε and of δ that releases may take by addition, in all."""
        return self.added if self._has_reference else self._sum.whole

    @property
    def whole(self) -> Amounts:
        """The amounts of the whole budget: of the reference filter, and by addition."""
        return self.rest.whole + self.allowance

    def _left(self, added: Amounts) -> tuple[float, float]:
        """Return ε and δ of the budget without what was added, rounded down."""
        return tuple(
            rounding.fraction_down(
                max(rounding.as_written(whole) - Fraction(part, addition.UNITS), Fraction())
            )
            for whole, part in zip((self.epsilon, self.delta), added, strict=True)
        )  # type: ignore[return-value]  # two of them

    @property
    def description(self) -> str:
        """A sentence that describes the filter."""
        if not self._has_reference:
            return (
                "reference filter: releases are added up, and the first run that is worth it "
                "decides in which steps the rest of the budget is counted"
            )
        if not any(self.added):
            return self.rest.description
        exact = (addition.epsilon_up(each) for each in self.added)
        epsilon, delta = (number_format.exactly(each) for each in exact)
        return self.rest.describe(
            f"releases with ε = {epsilon} and δ = {delta} are added up, and the rest is"
        )

    def admits(self, taken: Amounts) -> bool:
        """Return whether both parts of the budget cover what is taken of them."""
        is_covered = all(part <= most for part, most in zip(taken[2:], self.allowance, strict=True))
        return is_covered and self.rest.admits(taken[:2])

    # --- shares

    def share_of(self, taken: Amounts) -> float:
        """Return these amounts as a share of the whole budget."""
        shared = self._sum.share_of(taken[2:])
        if not self._has_reference:
            return shared
        kept = 1 - self._sum.share_of(self.added)
        share = rounding.up(shared + kept * self.rest.share_of(taken[:2]))
        return min(share, 1.0) if self.admits(taken) else share

    def _count_in_sum(self, taken: Amounts) -> Amounts:
        """Return units of ε and of δ: those that were added, and those that steps stand for."""
        return tuple(
            part - (-taken[0] * (whole - added) // max(self.rest.steps, 1))
            for part, whole, added in zip(taken[2:], self._sum.whole, self.added, strict=True)
        )

    def fits_share(self, taken: Amounts, reserved: Amounts, share: float) -> bool:
        """Return whether a holder may reserve further amounts within a share of each.

        Steps and releases that are added up are together within a share of ε and of δ too.
        """
        fits = self._sum.fits_share(taken[2:], reserved[2:], share) and self.rest.fits_share(
            taken[:2], reserved[:2], share
        )
        after = add(taken, reserved)
        if not (fits and after[0] and any(after[2:])):
            return fits
        before, whole = self._count_in_sum(taken), self._count_in_sum(after)
        return self._sum.fits_share(before, subtract(whole, before), share)

    def largest_share_of(self, taken: Amounts) -> float:
        """Return the largest of the shares that a cap compares."""
        added = self._count_in_sum(taken) if any(taken[2:]) else taken[2:]
        return max(self._sum.share_of(added), self.rest.largest_share_of(taken[:2]))

    def limit_slack(self, taken: Amounts, share: float, holder_taken: Amounts) -> Amounts:
        """Return the amounts taken, with the slack raised until only a cap's part of it remains."""
        limited = self.rest.limit_slack(taken[:2], share, holder_taken[:2])
        return limited + taken[2:]

    def apply_cap(self, taken: Amounts, share: float, holder_taken: Amounts) -> Amounts:
        """Return the amounts taken, raised until no more remains than the cap allows."""
        steps, slack = self.rest.apply_cap(taken[:2], share, holder_taken[:2])
        wholes, count = self._sum.whole, self.rest.steps
        own = self._count_in_sum(holder_taken)
        left = [
            max(addition.share_down(share, whole) - part, 0)
            for part, whole in zip(own, wholes, strict=True)
        ]
        if any(holder_taken[2:]):
            each = zip(left, wholes, self.added, strict=True)
            fit = min(
                (part * count // (whole - added) for part, whole, added in each if whole > added),
                default=count,
            )
            steps = max(steps, count - fit)
        most = zip(taken[2:], self.allowance, left, strict=True)
        return (steps, slack, *(max(part, whole - free) for part, whole, free in most))

    def epsilon_of(self, taken: Amounts) -> float:
        """Return an upper bound on ε at the budget's δ: what was added, and the steps'."""
        added = self._sum.epsilon_of(taken[2:])
        steps = self.rest.epsilon_of(taken[:2])
        if not added or not steps:
            return added or steps
        return min(rounding.up(added + steps), self.epsilon)

    # --- the choice of the reference

    def may_be_replaced(self, taken: Amounts) -> bool:
        """Return whether a reservation may choose the reference anew.

        The owner has chosen none, and no step of one is spent or held.
        """
        return not self.rest.is_planned and not any(taken[:2])

    def after_reserving(self, plan: StepPlan, taken: Amounts) -> LateReferenceFilter:
        """Return the filter with the reference that a plan sets, if it sets one.

        Nothing was released in steps of an earlier reference then.

        Raises:
            UnsuitableReferenceError: the plan can neither be added nor set the reference.
        """
        if not self.may_be_replaced(taken) or not plan.step.atom_counts:
            return self
        whole = LateReferenceFilter.of_budget(self.epsilon, self.delta, self.relation)
        if min(self._left(taken[2:])) <= 0 or whole._is_added(plan):
            return whole
        try:
            return whole._with_reference(plan, taken[2:])
        except UnsuitableReferenceError:
            if not whole._fits_by_addition(plan, taken):
                raise
            return whole

    def _is_added(self, plan: StepPlan) -> bool:
        """Return whether a plan is small, or costs by addition as much as by composition.

        It depends on the plan and the budget alone.
        """
        if self._sum.is_small(plan):
            return True
        try:
            amounts = addition.simple_amounts(plan.step, self.relation)
        except CodedError:
            return False
        if amounts is None:
            return False
        charge = AddedCharge(plan.steps, amounts[0], amounts[1])
        return plan.steps == 1 or not self._gains_by_composition(plan, charge)

    def _gains_by_composition(self, plan: StepPlan, charge: AddedCharge) -> bool:
        """Return whether the ε of a whole run, at the budget's δ, is far below the sum of its ε."""
        question = Question(plan.canonical, self.relation, adds_curves=False)
        try:
            composed = ACCOUNTANTS["pld"].epsilon_bound(question, self.delta).value
        except (AccountingError, NoFiniteEpsilonError):
            return False
        return addition.epsilon_up(charge.reserved[0]) > _GAIN * composed

    def _fits_by_addition(self, plan: StepPlan, taken: Amounts) -> bool:
        """Return whether a plan fits what addition leaves."""
        try:
            return self._sum.fits(plan, taken[2:])
        except CodedError:
            return False

    def _with_reference(self, plan: StepPlan, added: Amounts) -> LateReferenceFilter:
        """Return a copy whose reference is derived from a plan, on what `added` leaves.

        Raises:
            UnsuitableReferenceError: the mechanism cannot be a reference.
        """
        epsilon, delta = self._left(added)
        if epsilon <= 0 or delta <= 0:
            raise UnsuitableReferenceError("releases that were added up have used up ε or δ")
        rest = ReferenceFilter(epsilon, delta, self.relation).with_reference(plan, is_planned=False)
        if rest.steps >= COUNT_MAX:
            raise UnsuitableReferenceError(
                f"this mechanism cannot be the reference of a budget: {COUNT_MAX} of its steps "
                "would not use it up. Reserve them as one run, or create the dataset with a "
                "planned_mechanism"
            )
        return replace(self, added=added, rest=rest)

    def allows_replacement(self, other: PrivacyFilter, plan: StepPlan, taken: Amounts) -> bool:
        """Return whether this filter may still change to `other`, with another reference."""
        return (
            self.may_be_replaced(taken)
            and isinstance(other, LateReferenceFilter)
            and other.initial == self.initial
            and not other.rest.is_planned
            and other.is_sound()
        )

    def allows_owner_reference(self, taken: Amounts) -> bool:
        """Return whether the owner may still set or confirm the reference."""
        return not (self.rest.is_planned and any(taken[:2]))

    def with_owner_reference(self, plan: StepPlan, taken: Amounts) -> LateReferenceFilter:
        """Return the filter with the reference that the owner chose, which no reservation replaces.

        It is on what addition leaves. Once steps of a reference are spent or held, it can only be
        confirmed.

        Raises:
            ReferenceFixedError: steps of another reference are spent or held.
            UnsuitableReferenceError: the mechanism cannot be the reference.
        """
        if not any(taken[:2]):
            return self.initial._with_reference(plan, taken[2:])._confirmed()
        if self.rest.has_step_of(plan):
            return self._confirmed()
        raise ReferenceFixedError(
            "steps of another reference are spent or held: release the runs that hold them, if "
            "none was granted, or create another dataset"
        )

    def _confirmed(self) -> LateReferenceFilter:
        """Return a copy whose reference the owner chose."""
        return replace(self, rest=replace(self.rest, is_planned=True))

    def allows_owner_replacement(self, other: PrivacyFilter, taken: Amounts) -> bool:
        """Return whether the owner's choice of a reference may replace this filter by `other`."""
        return (
            isinstance(other, LateReferenceFilter)
            and other.initial == self.initial
            and other.rest.is_planned
            and (not any(taken[:2]) or other == self._confirmed())
        )

    @property
    def initial(self) -> LateReferenceFilter:
        """The filter that the dataset was created with."""
        return LateReferenceFilter.of_budget(self.epsilon, self.delta, self.relation)

    def is_sound(self) -> bool:
        """Return whether the reference filter guarantees what addition leaves."""
        return (self.rest.epsilon, self.rest.delta) == self._left(
            self.added
        ) and self.rest.is_sound()

    def is_table_sound(self) -> bool:
        """Return whether every ε that is stored for display bounds the ε of its amounts."""
        return self.rest.is_table_sound()

    def tabulated(self) -> LateReferenceFilter:
        """Return a copy with a table of ε by number of reference steps, for display."""
        return replace(self, rest=self.rest.tabulated())

    # --- charges

    def compute_charge(self, plan: StepPlan, taken: Amounts) -> LateCharge:
        """Return a plan's cost: by addition as long as it fits, or in steps of the reference."""
        if not plan.step.atom_counts:
            return LateCharge(plan.steps, AddedCharge(plan.steps, 0, 0))
        if not self._has_reference:
            return LateCharge(plan.steps, self._sum.compute_charge(plan, taken[2:]))
        added = self._room_charge(plan, taken)
        if added is not None:
            return LateCharge(plan.steps, added)
        return LateCharge(plan.steps, self.rest.compute_charge(plan, taken[:2]))

    def _room_charge(self, plan: StepPlan, taken: Amounts) -> AddedCharge | None:
        """Return a plan's cost by addition, if what was set aside for addition covers it."""
        room = [most - part for most, part in zip(self.allowance, taken[2:], strict=True)]
        if max(room) <= 0:
            return None
        try:
            charge = self._sum.compute_charge(plan, taken[2:])
        except CodedError:
            return None
        fits = all(cost <= part for cost, part in zip(charge.reserved, room, strict=True))
        return charge if fits else None

    def compute_refund(self, plan: StepPlan, charge: Charge, granted: int) -> Amounts:
        """Return the budget that is freed if a run ends after `granted` of its steps."""
        assert isinstance(charge, LateCharge)
        if isinstance(charge.part, AddedCharge):
            return charge.held(granted)
        return self.rest.compute_refund(plan, charge.part, granted) + _NOTHING_ADDED

    def count_affordable_steps(self, plan: StepPlan, taken: Amounts) -> int | None:
        """Return the most steps of a plan that fit, by addition or in reference steps."""
        if not plan.step.atom_counts:
            return None
        if self._has_reference:
            return self.rest.count_affordable_steps(plan, taken[:2])
        try:
            other = self._with_reference(plan, taken[2:])
        except CodedError:
            return self._sum.count_affordable_steps(plan, taken[2:])
        steps = other.rest.count_affordable_steps(plan, _NO_REFERENCE)
        if steps is None or addition.simple_amounts(plan.step, self.relation) is None:
            return steps  # a whole run fits hardly more steps by addition, and they take seconds
        found = self._sum.count_affordable_steps(plan, taken[2:])
        return None if found is None else max(found, steps)

    def fits(self, plan: StepPlan, taken: Amounts) -> bool:
        """Return whether the remaining budget covers a whole plan."""
        if not plan.step.atom_counts:
            return True
        if not self.may_be_replaced(taken):
            room = self._room_charge(plan, taken)
            return room is not None or self.rest.fits(plan, taken[:2])
        epsilon, delta = self._left(taken[2:])
        if epsilon > 0 and delta > 0:  # first: a solver asks often, and addition takes seconds
            rest = ReferenceFilter(epsilon, delta, self.relation)
            if rest.fits(plan, _NO_REFERENCE):
                return True
        return self._is_added(plan) and self._fits_by_addition(plan, taken)

    # --- the record

    def is_charge_sufficient(self, plan: StepPlan, charge: Charge) -> bool:
        """Return whether a stated cost is at least the plan's cost, computed again."""
        assert isinstance(charge, LateCharge)
        if isinstance(charge.part, AddedCharge):
            return addition.is_added_charge_sufficient(plan, charge.part, self.relation)
        return self.rest.is_charge_sufficient(plan, charge.part)

    def is_refund_allowed(
        self, plan: StepPlan, charge: Charge, granted: int, refund: Amounts
    ) -> bool:
        """Return whether a run that ended after `granted` steps may free the budget `refund`."""
        assert isinstance(charge, LateCharge)
        if isinstance(charge.part, AddedCharge):
            return refund == charge.held(granted)
        return refund[2:] == _NOTHING_ADDED and self.rest.is_refund_allowed(
            plan, charge.part, granted, refund[:2]
        )

    def read_charge(self, plan: StepPlan, fields: Json) -> LateCharge:
        """Return a plan's cost as a ledger entry or a stored row states it."""
        if "charged_per" in fields:
            return LateCharge(plan.steps, AddedCharge.from_json(fields, plan.steps))
        return LateCharge(plan.steps, self.rest.read_charge(plan, fields))

    def entry_fields(self) -> Json:
        """Return the fields that state this filter in a ledger entry."""
        return self.rest.entry_fields() | {
            "added_epsilon": addition.write_units(self.added[0]),
            "added_delta": addition.write_units(self.added[1]),
        }

    def to_json(self) -> Json:
        """Return the filter's own parameters as JSON, for storage."""
        return self.entry_fields() | {"epsilons": list(self.rest.epsilons)}

    def balance_fields(self, spent: Amounts, held: Amounts) -> Json:
        """Return the ledger-entry fields for changes of the spent and held amounts."""
        return self.rest.balance_fields(spent[:2], held[:2]) | addition.added_balance_fields(
            spent[2:], held[2:]
        )

    def read_balance(self, entry: Json) -> tuple[Amounts, Amounts]:
        """Return the changes of the spent and of the held amounts that a ledger entry states."""
        steps, sums = self.rest.read_balance(entry), addition.read_added_balance(entry)
        return steps[0] + sums[0], steps[1] + sums[1]
