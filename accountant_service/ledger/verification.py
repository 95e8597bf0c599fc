"""Re-checking a ledger from its entries alone: the chain, the balances, every charge."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from accountant_service import mechanisms
from accountant_service.errors import AccountingError, LedgerError
from accountant_service.ledger import chain, model
from accountant_service.ledger.model import Balance, Change, Dataset, Kind, Reservation, State
from accountant_service.ledger.repository import PAGE, Repository, Transaction
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
        try:
            model.created(self._dataset)
        except model.RuleError as error:
            yield f"no dataset is created so: {error}"
            return
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
            for fault in self._rules(entry, body):
                yield f"entry {number}: {fault}"
            change = Balance(_whole(entry, "spent_micronats"), _whole(entry, "held_micronats"))
            self._balance = self._balance.plus(change)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            yield f"entry {number} cannot be read: {error!r}"
        if (
            self._balance.taken > self._dataset.policy.budget
            or min(self._balance.spent, self._balance.held) < 0
        ):
            yield f"after entry {number} the balance {self._balance} is outside of the budget"

    def _rules(self, entry: dict[str, Any], body: str) -> Iterator[str]:
        """Whether an entry is what the ledger's own rules write after those before it."""
        kind = Kind(entry["kind"])
        if (kind is Kind.CREATE) != (self.number == 1):
            yield "a dataset is created by its first entry, and by no other"
            return
        try:
            change, about = self._followed(kind, entry)
            written = about | model.entry(
                self.number, kind, _whole(entry, "at"), _words(entry, "key"), change,
                _words(entry, "accountant_version"),
            )  # fmt: skip
            charged = self._cost(entry["reservation"]) if kind is Kind.RESERVE else []
        except (LedgerError, model.RuleError) as error:
            yield f"it must not follow: {error}"
            return
        except (AccountingError, mechanisms.MechanismError) as error:
            yield f"its mechanism cannot be accounted for: {error}"
            return
        yield from charged
        if chain.body_of(written) != body:
            yield _difference(entry, written)

    def _followed(self, kind: Kind, entry: dict[str, Any]) -> tuple[Balance, dict[str, Any]]:
        """What an entry of a kind should change and say; the reservation is as it is after it."""
        if kind is Kind.CREATE:
            return Balance(), model.created(self._dataset)
        identifier = _words(entry, "reservation")
        if kind is Kind.RESERVE:
            if identifier in self._runs:
                raise model.RuleError(f"reservation {identifier} was made before")
            standing = replace(self._dataset, balance=self._balance)
            change = model.reserve(standing, self._reserved(entry))
        else:
            if identifier not in self._runs:
                raise model.RuleError(f"reservation {identifier} was never made")
            change = _follow(self._runs[identifier], kind, entry)
        self._runs[identifier] = change.reservation
        return change.balance, model.described(change)

    def _reserved(self, entry: dict[str, Any]) -> Reservation:
        plan = Plan.of(mechanisms.from_json(entry["mechanism"]))
        return Reservation(
            _words(entry, "reservation"), self._dataset.identifier, State.OPEN,
            mechanisms.to_json(plan.mechanism), plan.whole.hash, int(entry["unit_attonats"]),
            plan.steps, 0, _whole(entry, "expires_at"), _words(entry, "purpose"),
            _words(entry, "key"),
        )  # fmt: skip

    def _cost(self, identifier: str) -> list[str]:
        """Whether a reservation is charged at least what its mechanism costs this dataset."""
        run, records = self._runs[identifier], self._dataset.size
        mechanism = mechanisms.from_json(run.mechanism)
        faults = [
            f"{pointer} of its mechanism is {size}, and the dataset has {records} records"
            for pointer, size in mechanisms.sizes_other_than(records, mechanism)
            if size > records  # fewer cost more than they had to
        ]
        least = self._dataset.policy.unit_cost(Plan.of(mechanism).step)
        if run.unit < least * (1 - 1e-9):
            faults.append(f"a step was charged {run.unit} atto-nats, and costs {least}")
        return faults

    def _reservations(self) -> Iterator[str]:
        stored = {r.identifier: r for r in self._transaction.reservations(self._dataset)}
        for identifier in sorted(stored.keys() | self._runs.keys()):
            row, run = stored.get(identifier), self._runs.get(identifier)
            if row != run:
                yield f"reservation {identifier} is stored as {row}, and recorded as {run}"


def _follow(run: Reservation, kind: Kind, entry: dict[str, Any]) -> Change:
    """The change that an entry records, by the ledger's own rules."""
    if kind is Kind.GRANT:
        return model.grant(run, _whole(entry, "steps"), run.steps_granted)
    if kind is Kind.RENEW:
        return model.renew(run, _whole(entry, "expires_at"))
    if kind is Kind.EXPIRE and _whole(entry, "at") < run.expires_at:
        raise model.RuleError("its lease had not ended")
    change = model.close(run, _ENDS[kind])
    if change is None:
        raise model.RuleError(f"the reservation is {run.state} already")
    return change


def _whole(entry: dict[str, Any], name: str) -> int:
    value = entry[name]
    if type(value) is not int:
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    return value


def _words(entry: dict[str, Any], name: str) -> str:
    value = entry[name]
    if type(value) is not str:
        raise TypeError(f"{name} must be text, not {value!r}")
    return value


def _difference(entry: dict[str, Any], written: dict[str, Any]) -> str:
    """Name what an entry says otherwise than the ledger writes it."""
    names = [
        name
        for name in sorted(entry.keys() | written.keys())
        if chain.body_of({name: entry.get(name)}) != chain.body_of({name: written.get(name)})
    ]
    if not names:
        return "it is not written as the ledger writes entries"
    said = "; ".join(f"{name} is {entry.get(name)!r}, not {written.get(name)!r}" for name in names)
    return f"it is not what the ledger writes there: {said}"
