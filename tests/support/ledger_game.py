"""The ledger's own rules, as a filter that the adversary of `privacy_filter_game` plays against.

The numerics are those of the model: they say which reference steps dominate which runs. Reserving,
granting and closing are `accountant_service.ledger.rules`.
"""

from __future__ import annotations

from typing import NamedTuple

from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.ledger import rules
from accountant_service.ledger.errors import BudgetExhaustedError
from accountant_service.ledger.filters.reference import (
    SLACK_UNITS,
    ReferenceCharge,
)
from accountant_service.ledger.filters.reference import ReferenceFilter as LedgerFilter
from accountant_service.ledger.rules import Balance, Dataset, Reservation, State
from accountant_service.mechanisms import Gaussian
from tests.support.privacy_filter_game import Hold, OpenRun, ReferenceFilter


class Run(NamedTuple):
    """An open reservation: the mechanism's index on the menu, its charge and its grants."""

    mechanism: int
    charge: ReferenceCharge
    granted: int

    @property
    def reservation(self) -> Reservation:
        """The reservation in the form that the ledger's rules take."""
        return Reservation(
            "r",
            "d",
            State.OPEN,
            {},
            "",
            self.charge,
            self.charge.steps,
            self.granted,
            0,
            "",
            "k",
            None,
            self.charge.reserved,
        )


class Book(NamedTuple):
    """A state of the ledger: the balance, and the open runs in a fixed order."""

    balance: Balance
    runs: tuple[Run, ...]


class LedgerRules(ReferenceFilter):
    """The reference filter with the ledger's rules for reserving, granting and closing."""

    @property
    def _scale(self) -> int:
        """The ledger's units of slack for one unit of the game."""
        return SLACK_UNITS // max(self.slack, 1)

    @property
    def _policy(self) -> LedgerFilter:
        """The ledger's filter with the game's number of reference steps."""
        relation = NeighbouringRelation.ADD_OR_REMOVE_ONE
        return LedgerFilter(1.0, 1e-5, relation, Gaussian(1.0), self.copies, True)

    def start(self) -> Book:  # type: ignore[override]
        """Return the ledger's state before the first reservation."""
        nothing = self._policy.nothing
        return Book(Balance(nothing, nothing), ())

    def open_runs(self, state: Book) -> list[OpenRun]:  # type: ignore[override]
        """Return the open runs as the adversary sees them."""
        return [OpenRun(run.mechanism, run.granted, run.charge.steps - run.granted)
                for run in state.runs]  # fmt: skip

    def reserve(self, state: Book, mechanism: int, steps: int) -> list[Book]:  # type: ignore[override]
        """Return the ledger's states after a reservation: one for each price that it admits."""
        if (mechanism, steps) not in self._prices:
            self._prices[mechanism, steps] = list(self.find_prices(mechanism, steps))
        dataset = Dataset("d", "d", 1, "record", self._policy, state.balance, 1, "", 0)
        found = []
        for price in self._prices[mechanism, steps]:
            charge = ReferenceCharge(
                steps, price.copies, price.slack * self._scale, price.slack_back * self._scale,
                mechanism == self.reference,
            )  # fmt: skip
            run = Run(mechanism, charge, 0)
            try:
                change = rules.reserve(dataset, run.reservation, self._policy)
            except BudgetExhaustedError:
                continue
            balance = state.balance.plus(change.balance)
            found.append(Book(balance, tuple(sorted((*state.runs, run), key=repr))))
        return found

    def grant(self, state: Book, run: int) -> Book:  # type: ignore[override]
        """Return the ledger's state after it granted one more step of a run."""
        before = state.runs[run]
        change = rules.grant(before.reservation, 1, before.granted)
        after = before._replace(granted=change.reservation.steps_granted)
        others = state.runs[:run] + state.runs[run + 1 :]
        return Book(state.balance.plus(change.balance), tuple(sorted((*others, after), key=repr)))

    def close(self, state: Book, run: int) -> Book:  # type: ignore[override]
        """Return the ledger's state after a run's end, with what the run gives back."""
        before = state.runs[run]
        returned = before.charge.refund(before.granted)
        if returned is None:
            hold = Hold(
                before.mechanism, before.charge.steps, before.granted,
                before.charge.reference_steps, before.charge.slack // self._scale,
                before.charge.return_slack // self._scale,
            )  # fmt: skip
            left = before.charge.steps - before.granted
            copies = min(self.exchange_back(hold, left), before.charge.held(before.granted)[0])
            returned = copies, 0
        change = rules.close(before.reservation, State.COMMITTED, returned)
        assert change is not None
        return Book(state.balance.plus(change.balance), state.runs[:run] + state.runs[run + 1 :])
