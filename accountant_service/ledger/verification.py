"""Re-checking a ledger from its entries alone: the chain, the balances, every charge."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from accountant_service import mechanisms
from accountant_service.errors import AccountingError
from accountant_service.ledger import chain
from accountant_service.ledger.filter import cost
from accountant_service.ledger.model import Balance, Dataset, Kind, State
from accountant_service.ledger.repository import PAGE, Repository, Transaction
from accountant_service.ledger.service import Plan

_STATES = {
    Kind.COMMIT.value: State.COMMITTED,
    Kind.RELEASE.value: State.RELEASED,
    Kind.EXPIRE.value: State.EXPIRED,
}


@dataclass(frozen=True, slots=True)
class Report:
    """What was found: how much was checked, and every fault in words."""

    datasets: int
    entries: int
    faults: list[str]


@dataclass(slots=True)
class _Run:
    unit: int
    reserved: int
    granted: int = 0
    state: State = State.OPEN


def verify(repository: Repository) -> Report:
    """Recompute every dataset's chain, balance and charges."""
    faults: list[str] = []
    count = 0
    with repository.transaction() as transaction:  # one consistent view
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
        self._runs: dict[str, _Run] = {}

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
        """Whether an entry charges what its mechanism costs."""
        kind = entry["kind"]
        if kind == Kind.CREATE.value:
            policy = self._dataset.policy
            said = (entry["epsilon"], entry["delta"], entry["order"])
            if said != (policy.epsilon, policy.delta, policy.order):
                yield "the dataset's policy is not the one it was created with"
            return
        if kind == Kind.RESERVE.value:
            yield from self._reserve(entry)
        run = self._runs.get(entry["reservation"])
        if run is None:
            yield "it is about a reservation that was never made"
            return
        if kind == Kind.GRANT.value and run.state is not State.OPEN:
            yield f"it grants steps of a reservation that is {run.state}"
        expected = _follow(run, kind, int(entry["steps"]))
        if run.granted > run.reserved:
            yield f"{run.granted} steps are granted of {run.reserved} reserved"
        if change != expected:
            yield f"it changes the balance by {change}, and should by {expected}"

    def _reserve(self, entry: dict[str, Any]) -> Iterator[str]:
        unit = int(entry["unit_attonats"])
        self._runs[entry["reservation"]] = _Run(unit, int(entry["steps"]))
        try:
            plan = Plan.of(mechanisms.from_json(entry["mechanism"]))
            least = self._dataset.policy.unit_cost(plan.step)
        except (AccountingError, mechanisms.MechanismError) as error:
            yield f"its mechanism cannot be accounted for: {error}"
            return
        if plan.whole.hash != entry["mechanism_hash"] or plan.steps != int(entry["steps"]):
            yield "its mechanism is not the one that was charged"
        if unit < least * (1 - 1e-9):
            yield f"a step was charged {unit} atto-nats, and costs {least}"

    def _reservations(self) -> Iterator[str]:
        stored = {r.identifier: r for r in self._transaction.reservations(self._dataset)}
        for identifier in stored.keys() ^ self._runs.keys():
            yield f"reservation {identifier} is in the record or in the table, but not in both"
        for identifier, run in self._runs.items():
            row = stored.get(identifier)
            if row is None:
                continue
            seen = (row.unit, row.steps_reserved, row.steps_granted, row.state)
            if seen != (run.unit, run.reserved, run.granted, run.state):
                yield f"reservation {identifier} is stored as {seen}, recorded as {run}"


def _follow(run: _Run, kind: str, steps: int) -> Balance:
    """What an entry should change, and the run after it."""
    whole, before = cost(run.unit, run.reserved), cost(run.unit, run.granted)
    if kind == Kind.RESERVE.value:
        return Balance(held=whole)
    if kind == Kind.GRANT.value:
        run.granted += steps
        moved = cost(run.unit, run.granted) - before
        return Balance(moved, -moved)
    if kind in _STATES:
        run.state = _STATES[kind]
        return Balance(held=before - whole)
    return Balance()
