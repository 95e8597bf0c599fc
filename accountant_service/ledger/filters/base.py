"""The interface of a privacy filter: a budget, charges against it, and what may be given back.

Amounts are tuples of integers, in the filter's own units. Charges round up, and what is given back
rounds down. A filter is frozen; every amount that it computes depends on mechanisms alone, never on
data.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.ledger.errors import ReferenceFixedError
from accountant_service.ledger.step_plan import StepPlan

if TYPE_CHECKING:
    from accountant_service.ledger.filters.reference import ReferenceFilter

Amounts = tuple[int, ...]
Json = dict[str, Any]


def add(one: Amounts, other: Amounts) -> Amounts:
    """Return the sum of two amounts of budget, each a tuple with one integer per unit."""
    return tuple(a + b for a, b in zip(one, other, strict=True))


def subtract(one: Amounts, other: Amounts) -> Amounts:
    """Return the difference of two amounts of budget, element by element."""
    return tuple(a - b for a, b in zip(one, other, strict=True))


def negate(amounts: Amounts) -> Amounts:
    """Return an amount of budget with the opposite sign."""
    return tuple(-each for each in amounts)


def count_units_within(share: float, whole: int) -> int:
    """Return the largest number of units that is at most `share` of the `whole`."""
    if not whole:
        return 0
    count = min(math.floor(share * whole) + 1, whole)
    return count if count / whole <= share else count - 1


@dataclass(frozen=True, slots=True)
class Charge(ABC):
    """A plan's cost, in a filter's units: held at first, and spent as steps are granted.

    Amounts are a tuple of integers in the filter's own units, such as reference steps.

    Attributes:
        steps: the number of steps that the plan has.
    """

    steps: int

    @property
    @abstractmethod
    def reserved(self) -> Amounts:
        """The amounts of budget held from the reservation on, before the first grant."""

    @abstractmethod
    def spent(self, granted: int) -> Amounts:
        """Return the amounts spent after `granted` steps, while the reservation is open."""

    @property
    def needs_slack(self) -> bool:
        """True if the cost includes a part of the slack, which only a reference filter has."""
        return False

    def held(self, granted: int) -> Amounts:
        """Return the amounts still held for steps not granted, after `granted` steps."""
        return subtract(self.reserved, self.spent(granted))

    @abstractmethod
    def refund(self, granted: int) -> Amounts | None:
        """Return the budget freed if the run ends after `granted` steps; None if slow to compute.

        Then `PrivacyFilter.compute_refund` computes them.
        """

    def least_refund(self, granted: int) -> Amounts:
        """Return a quick lower bound on the budget freed if the run ends after `granted` steps."""
        return self.held(granted)

    @abstractmethod
    def entry_fields(self) -> Json:
        """Return the fields that state this cost in a ledger entry."""

    def to_json(self) -> Json:
        """Return the cost as JSON, for storage in a reservation's row."""
        return self.entry_fields()


class PrivacyFilter(ABC):
    """The fixed rule by which a dataset's privacy budget admits or refuses releases.

    Amounts are a tuple of integers in the filter's own units. Those taken are spent or held.

    Attributes:
        name: of the kind of filter, on the wire.
        oldest_reader: the oldest revision of the database whose servers can read such a filter.
        has_scalar_caps: whether `apply_cap` can express the rest of a cap as amounts.
        epsilon: ε of the budget.
        delta: δ of the budget.
        relation: when two datasets are neighbours.
    """

    __slots__ = ()
    name: ClassVar[str]
    oldest_reader: ClassVar[str] = "0001"
    has_scalar_caps: ClassVar[bool] = True
    epsilon: float
    delta: float
    relation: NeighbouringRelation

    @property
    @abstractmethod
    def nothing(self) -> Amounts:
        """The amounts spent by a dataset without releases: zeros."""

    @property
    @abstractmethod
    def description(self) -> str:
        """A sentence that describes the filter."""

    @property
    def whole(self) -> Amounts:
        """The amounts of the whole budget, for a filter whose units are limited one by one."""
        raise NotImplementedError

    @abstractmethod
    def admits(self, taken: Amounts) -> bool:
        """Return whether the budget covers these amounts, spent or held."""

    @abstractmethod
    def share_of(self, taken: Amounts) -> float:
        """Return these amounts as a fraction of the budget; at most 1 if the filter admits them."""

    def fits_share(self, taken: Amounts, reserved: Amounts, share: float) -> bool:
        """Return whether a holder may reserve further amounts within a share of the budget.

        Amounts that are all zero always may.

        Args:
            taken: the amounts that the holder has spent or held.
            reserved: the further amounts.
            share: from 0 to 1.
        """
        return not any(reserved) or self.share_of(add(taken, reserved)) <= share

    def largest_share_of(self, taken: Amounts) -> float:
        """Return the fraction of the budget that a cap compares with its share."""
        return self.share_of(taken) if any(taken) else 0.0

    def limit_slack(self, taken: Amounts, share: float, holder_taken: Amounts) -> Amounts:
        """Return the amounts taken, with the slack raised until only a cap's part of it remains.

        Steps are not changed. The arguments are those of `apply_cap`.
        """
        return taken

    def apply_cap(
        self,
        taken: Amounts,
        share: float,
        holder_taken: Amounts,
    ) -> Amounts:
        """Return the amounts taken, raised until no more remains than the cap leaves its holder.

        The result only tells what would fit. A filter without `has_scalar_caps` returns `taken`.

        Args:
            taken: amounts of the whole budget that are spent or held.
            share: the share of the budget that the cap allows its holder.
            holder_taken: the amounts that the holder has spent or held.
        """
        return taken

    @abstractmethod
    def epsilon_of(self, taken: Amounts) -> float:
        """Return an upper bound on ε, at the budget's δ, of releases that cost these amounts.

        It is 0 for nothing, and at most the budget's ε within the budget. It informs; the budget is
        the claim.
        """

    @abstractmethod
    def after_reserving(self, plan: StepPlan, taken: Amounts) -> PrivacyFilter:
        """Return the filter after reserving a plan; a first plan may set the unit of the budget.

        A `ReferenceFilter` counts the budget in steps of a reference mechanism, which the first
        plan may set.
        """

    @abstractmethod
    def compute_charge(self, plan: StepPlan, taken: Amounts) -> Charge:
        """Return a plan's cost, given the amounts already taken (spent or held).

        A charge that does not fit is returned too: the budget does not admit its amounts.

        Raises:
            CodedError: no charge is proved for the plan.
        """

    @abstractmethod
    def compute_refund(self, plan: StepPlan, charge: Charge, granted: int) -> Amounts:
        """Return the budget that is freed if a run ends after `granted` of its steps.

        Args:
            plan: the whole plan that was reserved.
            charge: of the plan.
            granted: the number of steps granted.
        """

    @abstractmethod
    def count_affordable_steps(self, plan: StepPlan, taken: Amounts) -> int | None:
        """Return how many steps of a plan the remaining budget covers; None if steps are free."""

    @abstractmethod
    def fits(self, plan: StepPlan, taken: Amounts) -> bool:
        """Return whether the remaining budget covers a whole plan; faster than `compute_charge`."""

    @abstractmethod
    def is_charge_sufficient(self, plan: StepPlan, charge: Charge) -> bool:
        """Return whether a stated cost is at least the plan's cost, computed again."""

    @abstractmethod
    def is_refund_allowed(
        self, plan: StepPlan, charge: Charge, granted: int, refund: Amounts
    ) -> bool:
        """Return whether a run that ended after `granted` steps may free the budget `refund`."""

    @abstractmethod
    def read_charge(self, plan: StepPlan, fields: Json) -> Charge:
        """Return a plan's cost as a ledger entry or a stored row states it.

        Raises:
            KeyError, TypeError, ValueError: the fields do not record a charge of this filter.
        """

    @property
    def reference_part(self) -> ReferenceFilter | None:
        """The part of the filter that counts in steps of a reference; None if it has none."""
        return None

    def count_reference_steps_left(self, taken: Amounts) -> int | None:
        """Return how many reference steps are left; None if there is no reference."""
        part = self.reference_part
        return None if part is None or part.reference is None else max(part.steps - taken[0], 0)

    @property
    def initial(self) -> PrivacyFilter:
        """The filter that the dataset was created with: before a run set a reference."""
        return self

    def tabulated(self) -> PrivacyFilter:
        """Return a copy with what is computed once for display."""
        return self

    def may_be_replaced(self, taken: Amounts) -> bool:
        """Return whether a reservation may replace this filter, once these amounts are taken."""
        return False

    def may_become(self, other: PrivacyFilter, taken: Amounts) -> bool:
        """Return whether `other` may replace this filter, once these amounts are taken.

        It was computed by `after_reserving` when other amounts may have been taken.
        """
        return self.may_be_replaced(taken)

    def allows_replacement(self, other: PrivacyFilter, plan: StepPlan, taken: Amounts) -> bool:
        """Return whether reserving a plan may replace this filter by `other`."""
        return False

    def allows_owner_reference(self, taken: Amounts) -> bool:
        """Return whether the dataset's owner may still set or confirm the reference."""
        return False

    def with_owner_reference(self, plan: StepPlan, taken: Amounts) -> PrivacyFilter:
        """Return the filter with the reference that the owner chose, which no reservation replaces.

        Args:
            plan: whose step the reference is. If it is the reference already, that is confirmed.
            taken: the amounts that are spent or held.

        Raises:
            ReferenceFixedError: the filter has no reference, or another one is in use.
            UnsuitableReferenceError: the mechanism cannot be the reference.
        """
        raise ReferenceFixedError(
            "its filter has no reference that the owner may choose; only that of a dataset that "
            "was created without a planned_mechanism and with a δ above 0 has one"
        )

    def allows_owner_replacement(self, other: PrivacyFilter, taken: Amounts) -> bool:
        """Return whether the owner's choice of a reference may replace this filter by `other`.

        Whether `other` is sound is not checked: that takes a computation.
        """
        return False

    def is_sound(self) -> bool:
        """Return whether a filter with these parameters guarantees (ε, δ)-DP."""
        return True

    def is_table_sound(self) -> bool:
        """Return whether every ε that is stored for display bounds the ε of its amounts.

        Raises:
            AccountingError: this could not be computed.
        """
        return True

    @abstractmethod
    def entry_fields(self) -> Json:
        """Return the fields that state this filter in the first ledger entry of a dataset."""

    @abstractmethod
    def balance_fields(self, spent: Amounts, held: Amounts) -> Json:
        """Return the ledger-entry fields for changes of the spent and held amounts."""

    @abstractmethod
    def read_balance(self, entry: Json) -> tuple[Amounts, Amounts]:
        """Return the changes of the spent and of the held amounts that a ledger entry states."""

    @abstractmethod
    def to_json(self) -> Json:
        """Return the filter's own parameters as JSON, for storage; without ε, δ and relation."""
