"""The either filter: everything released satisfies one of two filters, each with half of δ.

A plan is charged in both of its sides. A side that cannot take a plan *misses* it, and the miss is
an amount like any other: held by the reservation, spent by its first grant, and given back if
nothing was granted. A plan is admitted while one side has missed nothing. So all that was ever
granted is what one of the two filters admits, and the whole is (ε, δ/2 + δ/2)-DP, whichever side
that is and whatever it depends on. docs/accountants/filters.md has the proof.

Amounts are, for each side, the number of misses and then the side's own amounts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar, TypeVar

from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.errors import CodedError
from accountant_service.ledger.errors import ReferenceFixedError
from accountant_service.ledger.filters.base import Amounts, Charge, Json, PrivacyFilter, add
from accountant_service.ledger.filters.reference import ReferenceFilter
from accountant_service.ledger.step_plan import StepPlan
from accountant_service.numerics.floats import rounding

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SideCharge(Charge):
    """A plan's cost in one side: its own charge, or a miss.

    Attributes:
        steps: the number of steps of the plan.
        width: the number of the side's own amounts.
        own: the side's charge; None if the side misses the plan.
    """

    width: int
    own: Charge | None

    @property
    def reserved(self) -> Amounts:
        """The miss, or the side's amounts, held before the first grant."""
        return self._miss() if self.own is None else (0, *self.own.reserved)

    def spent(self, granted: int) -> Amounts:
        """Return what is spent after `granted` steps: a miss by the first of them."""
        if self.own is None:
            return self._miss(1 if granted else 0)
        return (0, *self.own.spent(granted))

    def refund(self, granted: int) -> Amounts | None:
        """Return what is freed after `granted` steps: a miss, if there were none."""
        if self.own is None:
            return self.held(granted)
        found = self.own.refund(granted)
        return None if found is None else (0, *found)

    def least_refund(self, granted: int) -> Amounts:
        """Return a quick lower bound on what is freed after `granted` steps."""
        return self.held(granted) if self.own is None else (0, *self.own.least_refund(granted))

    def _miss(self, count: int = 1) -> Amounts:
        """Return a number of misses as amounts."""
        return (count, *(0,) * self.width)

    def entry_fields(self) -> Json:
        """Return the side's charge as the fields of a ledger entry."""
        return {"missed": True} if self.own is None else self.own.entry_fields()

    def to_json(self) -> Json:
        """Return the side's charge as JSON, for storage."""
        return {"missed": self.width} if self.own is None else self.own.to_json()


@dataclass(frozen=True, slots=True)
class EitherCharge(Charge):
    """A plan's cost in both sides.

    Attributes:
        steps: the number of steps of the plan.
        sides: the cost in each.
    """

    sides: tuple[SideCharge, ...]

    @property
    def reserved(self) -> Amounts:
        """The amounts of both sides that are held before the first grant."""
        return _join(each.reserved for each in self.sides)

    @property
    def needs_slack(self) -> bool:
        """True if the cost in a side includes a part of its slack."""
        return any(each.own is not None and each.own.needs_slack for each in self.sides)

    def spent(self, granted: int) -> Amounts:
        """Return the amounts of both sides that are spent after `granted` steps."""
        return _join(each.spent(granted) for each in self.sides)

    def refund(self, granted: int) -> Amounts | None:
        """Return what both sides free after `granted` steps; None if that is slow to compute."""
        found = [each.refund(granted) for each in self.sides]
        return None if None in found else _join(each for each in found if each is not None)

    def least_refund(self, granted: int) -> Amounts:
        """Return a quick lower bound on what both sides free after `granted` steps."""
        return _join(each.least_refund(granted) for each in self.sides)

    def entry_fields(self) -> Json:
        """Return the cost in each side as the fields of a ledger entry."""
        return {"charged_sides": [each.entry_fields() for each in self.sides]}

    def to_json(self) -> Json:
        """Return the cost in each side as JSON, for storage."""
        return {"charged_sides": [each.to_json() for each in self.sides]}


@dataclass(frozen=True, slots=True)
class EitherFilter(PrivacyFilter):
    """A filter that admits what one of two filters admits as a whole, each with half of δ.

    Attributes:
        epsilon: ε of the budget, and of each side.
        delta: δ of the budget.
        relation: when two datasets are neighbours.
        sides: the filters; the first counts in steps of a reference.
    """

    name: ClassVar[str] = "either"
    oldest_reader: ClassVar[str] = "0011"
    has_scalar_caps: ClassVar[bool] = False  # a share is one of a whole side
    side_names: ClassVar[tuple[str, ...]] = ("reference", "renyi")
    epsilon: float
    delta: float
    relation: NeighbouringRelation
    sides: tuple[PrivacyFilter, ...]

    @staticmethod
    def half(delta: float) -> float:
        """Return δ of each side: half, as it is written, rounded down."""
        return rounding.fraction_down(rounding.as_written(delta) / 2)

    @property
    def nothing(self) -> Amounts:
        """The amounts spent without releases: no miss, and nothing of either side."""
        return _join((0, *side.nothing) for side in self.sides)

    @property
    def description(self) -> str:
        """A sentence that describes the filter."""
        own = "; or ".join(side.description for side in self.sides)
        return f"either of two filters, each with half of δ, admits everything: {own}"

    @property
    def whole(self) -> Amounts:
        """Both sides are limited as a whole, and not amount by amount."""
        raise NotImplementedError

    def split(self, taken: Amounts) -> list[tuple[PrivacyFilter, int, Amounts]]:
        """Return each side with its misses and its own amounts."""
        found, at = [], 0
        for side in self.sides:
            end = at + 1 + len(side.nothing)
            found.append((side, taken[at], taken[at + 1 : end]))
            at = end
        if at != len(taken):
            raise ValueError(f"{len(taken)} amounts of a filter that has {at}")
        return found

    def _open(self, taken: Amounts) -> list[tuple[PrivacyFilter, Amounts]]:
        """Return each side that has missed nothing, with its amounts."""
        return [(side, amounts) for side, misses, amounts in self.split(taken) if not misses]

    def admits(self, taken: Amounts) -> bool:
        """Return whether a side has missed nothing, and no side has taken more than it admits.

        A side that was beyond its limit for a while would admit its later amounts, so no side may
        ever be: a plan that a side does not admit takes nothing of it.
        """
        return bool(self._open(taken)) and all(
            side.admits(amounts) for side, _, amounts in self.split(taken)
        )

    def share_of(self, taken: Amounts) -> float:
        """Return the least share that is taken of a side without misses; ∞ if both have some."""
        return min((side.share_of(own) for side, own in self._open(taken)), default=math.inf)

    def fits_share(self, taken: Amounts, reserved: Amounts, share: float) -> bool:
        """Return whether a holder may reserve further amounts within a share of one side."""
        more = [amounts for _, _, amounts in self.split(reserved)]
        return not any(reserved) or any(
            not (misses or missed) and side.fits_share(own, amounts, share)
            for (side, misses, own), (_, missed, _), amounts in zip(
                self.split(taken), self.split(reserved), more, strict=True
            )
        )

    def largest_share_of(self, taken: Amounts) -> float:
        """Return the share that a cap compares with its own."""
        shares = (side.largest_share_of(own) for side, own in self._open(taken))
        return min(shares, default=math.inf)

    def limit_slack(self, taken: Amounts, share: float, holder_taken: Amounts) -> Amounts:
        """Return the amounts taken, with the slack of each side raised to a cap's part of it."""
        pairs = zip(self.split(taken), self.split(holder_taken), strict=True)
        return _join(
            (misses, *side.limit_slack(amounts, share, own))
            for (side, misses, amounts), (_, _, own) in pairs
        )

    def epsilon_of(self, taken: Amounts) -> float:
        """Return an upper bound on ε of releases that cost these amounts: that of a side."""
        return min((side.epsilon_of(own) for side, own in self._open(taken)), default=math.inf)

    # --- the filter changes where a side does

    def count_reference_steps_left(self, taken: Amounts) -> int | None:
        """Return how many reference steps the first side has left; None if it missed a run."""
        side, misses, amounts = self.split(taken)[0]
        return None if misses else side.count_reference_steps_left(amounts)

    @property
    def reference_part(self) -> ReferenceFilter | None:
        """The part of the first side that counts in steps of a reference."""
        return self.sides[0].reference_part

    @property
    def initial(self) -> EitherFilter:
        """The filter that the dataset was created with."""
        return self._with_sides(side.initial for side in self.sides)

    def tabulated(self) -> EitherFilter:
        """Return a copy whose sides have what is computed once for display."""
        return self._with_sides(side.tabulated() for side in self.sides)

    def _with_sides(self, sides: Iterator[PrivacyFilter]) -> EitherFilter:
        """Return a copy with other sides."""
        return replace(self, sides=tuple(sides))

    def after_reserving(self, plan: StepPlan, taken: Amounts) -> EitherFilter:
        """Return the filter after reserving a plan, which may change a side that has no misses."""
        sides = []
        for side, misses, amounts in self.split(taken):
            try:
                sides.append(side if misses else side.after_reserving(plan, amounts))
            except CodedError:  # the side misses the plan
                sides.append(side)
        return self._with_sides(iter(sides))

    def may_be_replaced(self, taken: Amounts) -> bool:
        """Return whether a reservation may change a side."""
        return any(side.may_be_replaced(amounts) for side, amounts in self._open(taken))

    def may_become(self, other: PrivacyFilter, taken: Amounts) -> bool:
        """Return whether each side that differs from that of `other` may change."""
        return isinstance(other, EitherFilter) and all(
            side == after or (not misses and side.may_become(after, amounts))
            for (side, misses, amounts), after in zip(self.split(taken), other.sides, strict=True)
        )

    def allows_replacement(self, other: PrivacyFilter, plan: StepPlan, taken: Amounts) -> bool:
        """Return whether reserving a plan may replace each side that differs."""
        return isinstance(other, EitherFilter) and all(
            side == after or (not misses and side.allows_replacement(after, plan, amounts))
            for (side, misses, amounts), after in zip(self.split(taken), other.sides, strict=True)
        )

    def allows_owner_reference(self, taken: Amounts) -> bool:
        """Return whether the owner may still set or confirm the reference of the first side."""
        side, misses, amounts = self.split(taken)[0]
        return not misses and side.allows_owner_reference(amounts)

    def with_owner_reference(self, plan: StepPlan, taken: Amounts) -> EitherFilter:
        """Return the filter with the reference that the owner chose for the first side.

        Raises:
            ReferenceFixedError: the side has missed a run, or another reference is in use.
            UnsuitableReferenceError: the mechanism cannot be the reference.
        """
        side, misses, amounts = self.split(taken)[0]
        if misses:
            raise ReferenceFixedError(
                "a run did not fit in reference steps, and the budget is counted in Rényi "
                "divergence since; if it made no step, release it"
            )
        return replace(self, sides=(side.with_owner_reference(plan, amounts), *self.sides[1:]))

    def allows_owner_replacement(self, other: PrivacyFilter, taken: Amounts) -> bool:
        """Return whether the owner's choice of a reference may replace this filter by `other`."""
        side, misses, amounts = self.split(taken)[0]
        return (
            isinstance(other, EitherFilter)
            and other == replace(self, sides=other.sides)
            and other.sides[1:] == self.sides[1:]
            and not misses
            and side.allows_owner_replacement(other.sides[0], amounts)
        )

    def is_sound(self) -> bool:
        """Return whether both sides are sound, for this ε and for parts of this δ."""
        total = sum((rounding.as_written(side.delta) for side in self.sides), Fraction())
        return total <= rounding.as_written(self.delta) and all(
            (side.epsilon, side.relation) == (self.epsilon, self.relation) and side.is_sound()
            for side in self.sides
        )

    def is_table_sound(self) -> bool:
        """Return whether every ε that is stored for display bounds the ε of its amounts."""
        return all(side.is_table_sound() for side in self.sides)

    # --- charges

    def compute_charge(self, plan: StepPlan, taken: Amounts) -> EitherCharge:
        """Return a plan's cost: in each side, the side's own charge or a miss.

        Raises:
            CodedError: the first side without misses cannot charge the plan, nor can the other.
        """
        found: list[SideCharge] = []
        errors: list[CodedError] = []
        for side, misses, amounts in self.split(taken):
            own: Charge | None = None
            if not misses or not plan.step.atom_counts:
                try:
                    own = side.compute_charge(plan, amounts)
                except CodedError as error:
                    errors.append(error)
            if own is not None and not side.admits(add(amounts, own.reserved)):
                own = None
            found.append(SideCharge(plan.steps, len(side.nothing), own))
        if errors and not any(each.own for each in found):
            raise errors[0]
        return EitherCharge(plan.steps, tuple(found))

    def compute_refund(self, plan: StepPlan, charge: Charge, granted: int) -> Amounts:
        """Return what both sides free if a run ends after `granted` of its steps."""
        assert isinstance(charge, EitherCharge)
        return _join(
            each.held(granted)
            if each.own is None
            else (0, *side.compute_refund(plan, each.own, granted))
            for side, each in zip(self.sides, charge.sides, strict=True)
        )

    def count_affordable_steps(self, plan: StepPlan, taken: Amounts) -> int | None:
        """Return the most steps of a plan that fit a side without misses; None for any number."""
        counts = self._ask(taken, lambda side, amounts: side.count_affordable_steps(plan, amounts))
        return None if None in counts else max((each or 0 for each in counts), default=0)

    def fits(self, plan: StepPlan, taken: Amounts) -> bool:
        """Return whether a side without misses covers a whole plan."""
        if not plan.step.atom_counts:
            return True
        return any(self._ask(taken, lambda side, amounts: side.fits(plan, amounts)))

    def _ask(self, taken: Amounts, question: Callable[[PrivacyFilter, Amounts], T]) -> list[T]:
        """Return the answers of the sides without misses.

        Raises:
            CodedError: none of them can answer.
        """
        answers, errors = [], []
        for side, amounts in self._open(taken):
            try:
                answers.append(question(side, amounts))
            except CodedError as error:
                errors.append(error)
        if errors and not answers:
            raise errors[0]
        return answers

    # --- the record

    def is_charge_sufficient(self, plan: StepPlan, charge: Charge) -> bool:
        """Return whether the cost in each side is at least the plan's, computed again.

        A miss costs the side everything, so it is always enough.
        """
        assert isinstance(charge, EitherCharge)
        return all(
            each.own is None or side.is_charge_sufficient(plan, each.own)
            for side, each in zip(self.sides, charge.sides, strict=True)
        )

    def is_refund_allowed(
        self, plan: StepPlan, charge: Charge, granted: int, refund: Amounts
    ) -> bool:
        """Return whether each side may free this; a miss only if nothing was granted."""
        assert isinstance(charge, EitherCharge)
        return all(
            (misses, *amounts) == each.held(granted)
            if each.own is None
            else not misses and side.is_refund_allowed(plan, each.own, granted, amounts)
            for (side, misses, amounts), each in zip(self.split(refund), charge.sides, strict=True)
        )

    def read_charge(self, plan: StepPlan, fields: Json) -> EitherCharge:
        """Return a plan's cost as a ledger entry states it."""
        pairs = zip(self.sides, fields["charged_sides"], strict=True)
        sides = tuple(
            SideCharge(
                plan.steps,
                len(side.nothing),
                None if "missed" in own else side.read_charge(plan, own),
            )
            for side, own in pairs
        )
        return EitherCharge(plan.steps, sides)

    def entry_fields(self) -> Json:
        """Return both sides as the fields of a dataset's first ledger entry."""
        sides = [{"filter": side.name} | side.entry_fields() for side in self.sides]
        return {"filter": self.name, "sides": sides}

    def to_json(self) -> Json:
        """Return both sides as JSON, for storage."""
        return {"filter": self.name, "sides": [side.to_json() for side in self.sides]}

    def balance_fields(self, spent: Amounts, held: Amounts) -> Json:
        """Return the ledger-entry fields for changes of the spent and held amounts."""
        pairs = zip(self.split(spent), self.split(held), strict=True)
        return {
            "side_amounts": [
                {"spent_misses": misses, "held_misses": others}
                | side.balance_fields(amounts, waiting)
                for (side, misses, amounts), (_, others, waiting) in pairs
            ]
        }

    def read_balance(self, entry: Json) -> tuple[Amounts, Amounts]:
        """Return the changes of the spent and of the held amounts that a ledger entry states."""
        spent: Amounts = ()
        held: Amounts = ()
        for side, fields in zip(self.sides, entry["side_amounts"], strict=True):
            misses, others = fields["spent_misses"], fields["held_misses"]
            if type(misses) is not int or type(others) is not int:
                raise TypeError(f"misses must be integers, not {misses!r} and {others!r}")
            own = side.read_balance(fields)
            spent, held = (*spent, misses, *own[0]), (*held, others, *own[1])
        return spent, held


def _join(parts: Iterator[Amounts]) -> Amounts:
    """Return the amounts of all sides in one tuple."""
    return tuple(each for part in parts for each in part)
