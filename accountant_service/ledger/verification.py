"""Re-checking a ledger from its entries alone: the chain, the balances, every charge."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from accountant_service import mechanisms
from accountant_service.errors import AccountingError, LedgerError
from accountant_service.ledger import chain, model
from accountant_service.ledger.model import Balance, Change, Dataset, Kind, Reservation, State
from accountant_service.ledger.repository import PAGE, Repository, Transaction, creation
from accountant_service.ledger.service import Plan

_ENDS: Final = {
    Kind.COMMIT: State.COMMITTED,
    Kind.RELEASE: State.RELEASED,
    Kind.EXPIRE: State.EXPIRED,
}


@dataclass(frozen=True, slots=True)
class Report:
    """What was found: how much was checked, and every fault in words."""

    datasets: int
    entries: int
    faults: list[str]


def verify(repository: Repository) -> Report:
    """Recompute every dataset's chain, balance and charges."""
    faults: list[str] = []
    count = 0
    with repository.snapshot() as transaction:
        datasets = transaction.datasets()
        for dataset in datasets:
            checker = _Checker(transaction, dataset)
            faults += [f"dataset {dataset.name!r}: {fault}" for fault in checker.faults()]
            count += checker.number
    return Report(len(datasets), count, faults)


class _Checker:
    """One dataset, entry by entry."""

    def __init__(self, transaction: Transaction, dataset: Dataset) -> None:
        self._transaction, self._dataset = transaction, dataset
        self.number = 0
        self._head = chain.GENESIS
        self._balance = Balance()
        self._runs: dict[str, Reservation] = {}

    def faults(self) -> Iterator[str]:
        """What is wrong, in the order of the entries."""
        while rows := self._transaction.entries(self._dataset, self.number, PAGE):
            for row in rows:
                yield from self._entry(row.number, row.body, row.hash)
        dataset = self._dataset
        if self.number != dataset.version or self._head != dataset.head:
            yield (
                f"the record ends at entry {self.number}, but the dataset is at {dataset.version}: "
                "entries were cut off or added"
            )
        if self._balance != dataset.balance:
            yield f"the entries add up to {self._balance}, but the balance is {dataset.balance}"
        yield from self._reservations()

    def _entry(self, number: int, body: str, stored: str) -> Iterator[str]:
        if number != self.number + 1:
            yield f"entry {self.number + 1} is missing"
        self.number = number
        self._head = chain.hash_of(self._head, body)
        if self._head != stored:
            yield f"entry {number} or its hash was altered"
            self._head = stored
        try:
            entry = json.loads(body)
            change = Balance(int(entry["spent_micronats"]), int(entry["held_micronats"]))
            self._balance = self._balance.plus(change)
            for fault in self._charge(entry, change):
                yield f"entry {number}: {fault}"
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            yield f"entry {number} cannot be read: {error!r}"
        if (
            self._balance.taken > self._dataset.policy.budget
            or min(self._balance.spent, self._balance.held) < 0
        ):
            yield f"after entry {number} the balance {self._balance} is outside of the budget"

    def _charge(self, entry: dict[str, Any], change: Balance) -> Iterator[str]:
        """Whether an entry follows from those before it, and charges what its mechanism costs."""
        kind = Kind(entry["kind"])
        if kind is Kind.CREATE:
            created = creation(self._dataset)
            altered = [name for name, value in created.items() if entry[name] != value]
            if altered:
                yield f"the dataset was not created with its {', '.join(altered)}"
            return
        if kind is Kind.RESERVE:
            run, expected = self._reserved(entry), None
            yield from self._cost(run)
        else:
            if entry["reservation"] not in self._runs:
                yield "it is about a reservation that was never made"
                return
            try:
                run, expected = _follow(self._runs[entry["reservation"]], kind, entry)
            except LedgerError as error:
                yield f"it must not follow: {error.detail}"
                return
        expected = expected or Balance(held=run.held)
        self._runs[run.identifier] = run
        if change != expected:
            yield f"it changes the balance by {change}, and should by {expected}"

    def _reserved(self, entry: dict[str, Any]) -> Reservation:
        return Reservation(
            entry["reservation"], self._dataset.identifier, State.OPEN, entry["mechanism"],
            entry["mechanism_hash"], int(entry["unit_attonats"]), int(entry["steps"]), 0,
            int(entry["expires_at"]), entry["purpose"], entry["key"],
        )  # fmt: skip

    def _cost(self, run: Reservation) -> Iterator[str]:
        try:
            plan = Plan.of(mechanisms.from_json(run.mechanism))
            least = self._dataset.policy.unit_cost(plan.step)
        except (AccountingError, mechanisms.MechanismError) as error:
            yield f"its mechanism cannot be accounted for: {error}"
            return
        if plan.whole.hash != run.mechanism_hash or plan.steps != run.steps_reserved:
            yield "its mechanism is not the one that was charged"
        if run.unit < least * (1 - 1e-9):
            yield f"a step was charged {run.unit} atto-nats, and costs {least}"

    def _reservations(self) -> Iterator[str]:
        stored = {r.identifier: r for r in self._transaction.reservations(self._dataset)}
        for identifier in sorted(stored.keys() | self._runs.keys()):
            row, run = stored.get(identifier), self._runs.get(identifier)
            if row != run:
                yield f"reservation {identifier} is stored as {row}, and recorded as {run}"


def _follow(run: Reservation, kind: Kind, entry: dict[str, Any]) -> tuple[Reservation, Balance]:
    """A reservation after an entry, and what that should change: by the ledger's own rules."""
    change: Change | None
    if kind is Kind.GRANT:
        change = model.grant(run, int(entry["steps"]), run.steps_granted)
    elif kind is Kind.RENEW:
        change = model.renew(run, int(entry["expires_at"]))
    else:
        change = model.close(run, _ENDS[kind])
    return (run, Balance()) if change is None else (change.reservation, change.balance)
