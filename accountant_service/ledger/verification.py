"""Verification of a ledger from its entries alone: the chain, the balances, every charge.

A verification can go on from the state in which an earlier one left each dataset: its balance,
its open runs, and a hash of its ended runs, after a sound entry. Entries up to there are not read.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, Final

from accountant_service import mechanisms
from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.errors import AccountingError
from accountant_service.ledger import (
    access_records,
    certificate,
    filters,
    hash_chain,
    rules,
    stored_rows,
)
from accountant_service.ledger.columns import (
    Row,
    read_integers,
    take_from_entry,
    write_row,
)
from accountant_service.ledger.errors import LedgerError
from accountant_service.ledger.filters import RenyiFilter
from accountant_service.ledger.filters.base import Amounts, Charge, add, negate
from accountant_service.ledger.reading_rows import UNREADABLE, find_type_faults
from accountant_service.ledger.repository import (
    PAGE_SIZE,
    Repository,
    Transaction,
    read_dataset,
    read_reservation,
)
from accountant_service.ledger.rules import (
    Balance,
    Cap,
    CapUse,
    Change,
    Dataset,
    EntryKind,
    HolderKind,
    JointRun,
    Reservation,
    State,
)
from accountant_service.ledger.step_plan import StepPlan
from accountant_service.ledger.tables import DATASET, ENTRY, RESERVATION
from accountant_service.writing.canonical_json import canonical_json, read_json

_FOREIGN_LINES: Final = 100  # without an entry, after which a file is no export
_FINAL_STATES: Final = {
    EntryKind.COMMIT: State.COMMITTED,
    EntryKind.RELEASE: State.RELEASED,
    EntryKind.EXPIRE: State.EXPIRED,
}


Verified = dict[str, Any]  # a dataset's state after a sound entry, as JSON
States = Mapping[str, Verified]  # by the dataset's name
Watch = Callable[[int, int, Callable[[], States]], None]


@dataclass(frozen=True, slots=True)
class VerificationReport:
    """The result of verifying a ledger: counts of datasets and entries, and all faults.

    Attributes:
        datasets: their number.
        entries: the number of all entries.
        faults: every fault found.
        entries_before: how many of the entries an earlier verification read, and this one did not.
        states: from which the next verification may go on; of a dataset with a fault, the state
            that was known before, if any.
        warnings: what is no fault, and should be changed.
    """

    datasets: int
    entries: int
    faults: list[str]
    entries_before: int = 0
    states: States = field(default_factory=dict)
    warnings: Sequence[str] = ()


def _ignore_progress(_: int, __: int, ___: Callable[[], States]) -> None:
    """Do nothing with the progress: the default callback."""


def verify(
    repository: Repository,
    known: States = MappingProxyType({}),
    watch: Watch = _ignore_progress,
) -> VerificationReport:
    """Recompute every dataset's hash chain, balance and costs; report all differences.

    Args:
        repository: the ledger's.
        known: the states that an earlier verification reported. They must be authentic.
        watch: called again and again with the number of entries done and of all to do, and with a
            function that returns the states so far.
    """
    with repository.snapshot() as transaction:
        return verify_snapshot(transaction, known, watch)


def verify_snapshot(
    transaction: Transaction,
    known: States = MappingProxyType({}),
    watch: Watch = _ignore_progress,
) -> VerificationReport:
    """Verify the ledger that a transaction sees, as `verify` does."""
    states, entries, before = dict(known), 0, 0
    with stored_rows.decode_any_text(transaction):
        faults = list(stored_rows.find_stray_rows(transaction))
        faults += access_records.find_faults(transaction)
        warnings = tuple(access_records.find_ambiguous_keys(transaction))
        rows = transaction.list_dataset_rows()
        numbers = [row["version"] for row in rows if type(row["version"]) is int]
        total = sum(numbers) - sum(state["dataset"]["version"] for state in known.values())

        def report(name: str, done: int, checker: _DatasetChecker, is_sound: bool) -> None:
            """Report the progress within a dataset, after `done` entries of those before it."""
            watch(
                done + checker.number - checker.first,
                total,
                lambda: states | ({name: checker.describe(is_complete=False)} if is_sound else {}),
            )

        for row in rows:
            name = row["name"]
            watched = partial(report, name, entries - before)
            found, checker = _verify_dataset(transaction, row, known.get(name), watched)
            faults += _name_faults(name, found)
            if checker is not None:
                entries, before = entries + checker.number, before + checker.first
                if not found:
                    states[name] = checker.describe(is_complete=True)
            watch(entries - before, total, lambda: states)
        faults += _find_joint_faults(transaction, rows)
    counts = Counter(row["name"] for row in rows)
    for name, times in counts.items():
        if times > 1:
            faults.append(f"dataset {name!r}: {times} datasets have this name")
    for name in known.keys() - counts.keys():
        faults.append(f"dataset {name!r}: it was verified before, and has no row now")
    return VerificationReport(len(rows), entries, faults, before, states, warnings)


def _verify_dataset(
    transaction: Transaction,
    row: Row,
    known: Verified | None,
    report: Callable[[_DatasetChecker, bool], None],
) -> tuple[list[str], _DatasetChecker | None]:
    """Return the faults of the dataset that a row describes, and its checker if it can be read."""
    faults = list(find_type_faults(DATASET, row))
    if faults:
        return faults, None
    try:
        dataset = read_dataset(row)
    except UNREADABLE as error:
        return [f"its row cannot be read: {error!r}"], None

    def report_page(checker: _DatasetChecker) -> None:
        """Report the progress, and whether everything is sound so far."""
        report(checker, not (faults or checker.column_faults))

    checker = _DatasetChecker(transaction, dataset, row, report_page)
    if known is not None:
        try:
            faults += checker.resume(known)
        except UNREADABLE as error:
            faults.append(f"it cannot be compared with its state when it was verified: {error!r}")
        if faults:  # from the first entry on, so that what was altered is named
            checker = _DatasetChecker(transaction, dataset, row, report_page)
    try:
        for fault in checker.find_faults():
            faults.append(fault)  # those found before an error stay
    except UNREADABLE as error:
        faults.append(f"it cannot be verified after entry {checker.number}: {error!r}")
    return faults, checker


def _find_joint_faults(transaction: Transaction, datasets: Sequence[Row]) -> list[str]:
    """Return the faults of runs on several datasets, by the rows of their reservations.

    That a row is what its dataset's entries record is checked with the dataset.
    """
    owners = {row["id"]: row for row in datasets}
    parts: list[_Part] = []
    for row in transaction.list_joint_rows():
        owner = owners.get(row["dataset"])
        with suppress(*UNREADABLE):  # a fault of its dataset
            if owner is not None:
                parts.append(_Part(owner["name"], owner["size"], read_reservation(row)))
    return _compare_parts(parts, is_complete=True)


@dataclass(frozen=True, slots=True)
class _Part:
    """A reservation of a run on several datasets, with its dataset's name and size."""

    dataset: str
    records: int
    run: Reservation


def _compare_parts(parts: Iterable[_Part], *, is_complete: bool) -> list[str]:
    """Return the faults of runs on several datasets, given their reservations.

    Args:
        parts: the reservations, and no others.
        is_complete: whether these are all that exist.
    """
    groups: dict[JointRun, list[_Part]] = {}
    for part in parts:
        assert part.run.joint is not None
        groups.setdefault(part.run.joint, []).append(part)
    faults: list[str] = []
    for joint, found in groups.items():
        missing = set(joint.reservations) - {part.run.identifier for part in found}
        if missing and is_complete:
            faults.append(f"run {joint.identifier} lacks its reservations {sorted(missing)}")
        runs = {part.dataset: part.run for part in found}
        if len(runs) < len(found):
            faults.append(f"run {joint.identifier} is twice on a dataset: {sorted(runs)}")
        records = sum(part.records for part in found)
        if not missing and records != joint.records:
            faults.append(f"run {joint.identifier} is on {records} records, not {joint.records}")
        faults += rules.find_joint_faults(joint, runs)
    return faults


@dataclass(frozen=True, slots=True)
class RecordedDataset:
    """A dataset and its reservations as its entries record them.

    Attributes:
        dataset: with the balance and the time of closing that the entries add up to.
        reservations: by their identifiers.
        faults: of the entries themselves, or of fields that they cannot replace. If there are any,
            nothing must be derived from the entries.
    """

    dataset: Dataset
    reservations: dict[str, Reservation]
    faults: list[str]


def read_recorded(transaction: Transaction, row: Row) -> RecordedDataset:
    """Return what a dataset's entries record, without the columns that they determine.

    Raises:
        ValueError, TypeError, LedgerError: the dataset's row cannot be read in other columns.
    """
    policy = filters.read_columns(row)
    nothing = json.dumps(policy.nothing)
    dataset = read_dataset({**row, "spent": nothing, "held": nothing, "closed_at": None})
    checker = _DatasetChecker(transaction, dataset, row)
    rules.describe_dataset(dataset)
    faults = [*checker.check_first_policy(), *checker.check_entries()]
    faults += checker.check_end()
    return RecordedDataset(
        replace(dataset, balance=checker.balance, closed_at=checker.closed_at),
        checker.reservations,
        faults,
    )


class _ChainChecker:
    """Recomputes one dataset's hash chain, entry by entry, and finds its faults.

    Attributes:
        number: of the last entry checked.
        head: the hash of that entry.
        balance, closed_at, reservations: of the dataset, after that entry.
        ended: a hash of the rows of the runs that ended, in their order.
        size: the number of the dataset's records.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self.size = dataset.size
        self.number = 0
        self.head = self.ended = hash_chain.GENESIS
        self._policy = dataset.policy.initial
        self.balance = Balance(self._policy.nothing, self._policy.nothing)
        self.closed_at: int | None = None
        self.reservations: dict[str, Reservation] = {}
        self._taken: dict[tuple[HolderKind, str], Amounts] = {}  # by key and by team

    def check_first_policy(self) -> Iterator[str]:
        """Yield the faults of the privacy filter that the dataset was created with."""
        try:
            if not self._policy.is_sound():
                yield f"its filter admits more than the budget: {self._policy.to_json()}"
        except UNREADABLE as error:
            yield f"its filter cannot be evaluated: {error!r}"

    def check_entry(self, number: int, body: str, stored_hash: str) -> Iterator[str]:
        """Yield the faults of the next entry: its number, hash, rules and balance."""
        if number != self.number + 1:
            yield f"entry {self.number + 1} is missing"
        self.number = number
        try:
            self.head = hash_chain.hash_entry(self.head, body)
            if self.head != stored_hash:
                yield f"entry {number} or its hash was altered"
                self.head = stored_hash
            entry = json.loads(body)
            for fault in self._check_rules(entry, body):
                yield f"entry {number}: {fault}"
            change = Balance(*self._policy.read_balance(entry))
            self.balance = self.balance.plus(change)
            balance = self.balance
            if not self._policy.admits(balance.taken) or min(*balance.spent, *balance.held) < 0:
                yield f"after entry {number} the balance {balance} is outside the budget"
        except UNREADABLE as error:
            self.head = stored_hash
            yield f"entry {number} cannot be read: {error!r}"

    def _check_rules(self, entry: dict[str, Any], body: str) -> Iterator[str]:
        """Yield a fault if an entry differs from the one that the ledger's rules write."""
        kind = EntryKind(entry["kind"])
        if (kind is EntryKind.CREATE) != (self.number == 1):
            yield "the first entry of a dataset creates it, and no other entry may"
            return
        try:
            change, fields = self._replay(kind, entry)
            amounts = self._policy.balance_fields(change.spent, change.held)
            written = fields | rules.describe_entry(
                self.number, kind, _read_integer(entry, "at"), _read_text(entry, "key"), amounts,
                _read_text(entry, "accountant_version"),
            )  # fmt: skip
            charged = self._check_charge(entry["reservation"]) if kind is EntryKind.RESERVE else []
        except (LedgerError, rules.RuleError) as error:
            yield f"it breaks a rule: {error}"
            return
        except (AccountingError, mechanisms.MechanismError) as error:
            yield f"its mechanism cannot be accounted for: {error}"
            return
        yield from charged
        if hash_chain.encode_entry(written) != body:
            yield _describe_difference(entry, written)

    def _replay(self, kind: EntryKind, entry: dict[str, Any]) -> tuple[Balance, dict[str, Any]]:
        """Apply the rule for an entry's event; return the balance change and expected fields."""
        if kind is EntryKind.CREATE:
            first = replace(self._dataset, policy=self._policy)
            nothing = Balance(self._policy.nothing, self._policy.nothing)
            return nothing, rules.describe_dataset(first)
        if kind is EntryKind.CLOSE:
            return self._replay_closing(_read_integer(entry, "at")), {}
        if kind is EntryKind.REFERENCE:
            return self._replay_reference(entry)
        identifier = _read_text(entry, "reservation")
        if kind is EntryKind.RESERVE:
            if identifier in self.reservations:
                raise rules.RuleError(f"reservation {identifier} exists already")
            change = self._replay_reservation(entry)
        else:
            if identifier not in self.reservations:
                raise rules.RuleError(f"reservation {identifier} does not exist")
            change = self._replay_change(self.reservations[identifier], kind, entry)
        change = rules.number_end(change, self.number)
        self.reservations[identifier] = change.reservation
        if change.reservation.state is not State.OPEN:
            self.ended = _hash_ended(self.ended, write_row(change.reservation))
        taken = add(change.balance.spent, change.balance.held)
        self._add_taken(change.reservation.key, change.reservation.team, taken)
        return change.balance, rules.describe_change(change)

    def _replay_closing(self, at: int) -> Balance:
        """Apply the rule for closing the dataset; return the balance change, which is zero."""
        closed = rules.close_dataset(replace(self._dataset, closed_at=self.closed_at), at)
        if closed is None:
            raise rules.RuleError("the dataset was closed before")
        self.closed_at = closed.closed_at
        return Balance(self._policy.nothing, self._policy.nothing)

    def _replay_reference(self, entry: dict[str, Any]) -> tuple[Balance, dict[str, Any]]:
        """Apply the rule for the owner's choice of a reference; the balance does not change."""
        before = self._policy
        policy = filters.from_json(entry["filter"], before.epsilon, before.delta, before.relation)
        if not policy.is_sound():
            raise rules.RuleError(f"the filter admits more than the budget: {policy.to_json()}")
        current = replace(
            self._dataset, balance=self.balance, policy=before, closed_at=self.closed_at
        )
        if rules.set_reference(current, policy) is None:
            raise rules.RuleError("the owner chose this reference before")
        self._policy = policy
        return Balance(policy.nothing, policy.nothing), rules.describe_reference(policy)

    def _add_taken(self, key: str, team: str | None, taken: Amounts) -> None:
        """Add amounts of a run to the totals that its key and its team have taken."""
        for holder in ((HolderKind.KEY, key), (HolderKind.TEAM, team or "")):
            self._taken[holder] = add(self._taken.get(holder, self._policy.nothing), taken)

    def _replay_reservation(self, entry: dict[str, Any]) -> Change:
        """Apply the ledger's rule for a new reservation; return the change."""
        plan = StepPlan.of(mechanisms.from_json(entry["mechanism"]))
        before, policy = self._policy, self._policy
        if "filter" in entry:
            policy = filters.from_json(
                entry["filter"], policy.epsilon, policy.delta, policy.relation
            )
            if not before.allows_replacement(policy, plan, self.balance.taken):
                raise rules.RuleError(f"the filter must not change to {policy.to_json()} here")
        self._policy = policy
        current = replace(
            self._dataset, balance=self.balance, policy=before, closed_at=self.closed_at
        )
        charge = policy.read_charge(plan, entry)
        computed = {
            "mechanism": mechanisms.to_json(plan.mechanism),
            "mechanism_hash": plan.canonical.hash,
            "charge": charge,
            "taken": charge.reserved,
        }
        run = Reservation(
            identifier=_read_text(entry, "reservation"), dataset=self._dataset.identifier,
            state=State.OPEN, steps_reserved=plan.steps, steps_granted=0,
            key=_read_text(entry, "key"), **take_from_entry(Reservation, entry, computed),
        )  # fmt: skip
        caps = [_read_cap(fields, charge) for fields in entry.get("caps", [])]
        nothing = policy.nothing
        uses = [CapUse(cap, self._taken.get((cap.kind, cap.holder), nothing)) for cap in caps]
        return rules.reserve(current, run, policy, uses)

    def _check_charge(self, identifier: str) -> list[str]:
        """Return faults if a reservation states a lower cost than its mechanism has."""
        run = self.reservations[identifier]
        records = self._dataset.size if run.joint is None else run.joint.records
        mechanism = mechanisms.from_json(run.mechanism)
        faults = [
            f"{each.pointer} of its mechanism is {each.stated}, of {each.records} records"
            for each in mechanisms.find_dataset_size_mismatches(records, mechanism)
            if each.is_overstated  # a smaller number costs more, so the budget holds
        ]
        if not self._policy.is_charge_sufficient(StepPlan.of(mechanism), run.charge):
            faults.append(f"its charge {run.charge.entry_fields()} is less than the plan costs")
        return faults

    def _replay_change(self, run: Reservation, kind: EntryKind, entry: dict[str, Any]) -> Change:
        """Apply the rule for a grant, a renewal or a run's end; return the change."""
        if kind is EntryKind.GRANT:
            return rules.grant(run, _read_integer(entry, "steps"), run.steps_granted)
        if kind is EntryKind.RENEW:
            return rules.renew(run, _read_integer(entry, "expires_at"))
        if kind is EntryKind.EXPIRE and _read_integer(entry, "at") < run.expires_at:
            raise rules.RuleError("its lease had not ended")
        spent, held = self._policy.read_balance(entry)
        refund = negate(add(spent, held))
        plan = StepPlan.of(mechanisms.from_json(run.mechanism))
        if not self._policy.is_refund_allowed(plan, run.charge, run.steps_granted, refund):
            raise rules.RuleError(f"it must not return {refund} to the budget")
        declared = rules.Declaration(**entry.get("declared", {}))
        change = rules.close(run, _FINAL_STATES[kind], refund, declared)
        if change is None:
            raise rules.RuleError(f"the reservation is {run.state} already")
        return change


class _DatasetChecker(_ChainChecker):
    """A chain checker that also compares the dataset's database rows with its chain.

    Attributes:
        first: the number of the entry after which it began.
        column_faults: of the columns that exports search by.
    """

    def __init__(
        self,
        transaction: Transaction,
        dataset: Dataset,
        row: Row,
        on_page: Callable[[_DatasetChecker], None] = lambda _: None,
    ) -> None:
        super().__init__(dataset)
        self._transaction, self._row, self._on_page = transaction, row, on_page
        self.first = 0
        self.column_faults: list[str] = []
        self._checked_policy: Any = None  # whose table of ε was checked before

    @cached_property
    def _reservation_rows(self) -> list[Row]:
        """The rows of the dataset's reservations."""
        return self._transaction.list_reservation_rows(self._dataset)

    def describe(self, *, is_complete: bool) -> Verified:
        """Return the dataset's state after the last entry checked, all of them being sound.

        Args:
            is_complete: whether the dataset's rows were checked too, after its last entry.
        """
        recorded = replace(
            self._dataset, policy=self._dataset.policy if is_complete else self._policy,
            balance=self.balance, version=self.number, head=self.head, closed_at=self.closed_at,
        )  # fmt: skip
        runs = (run for run in self.reservations.values() if run.state is State.OPEN)
        return {
            "dataset": write_row(recorded),
            "open_runs": [write_row(run) for run in runs],
            "ended_runs": self.ended,
            "is_table_checked": is_complete,
        }

    def resume(self, known: Verified) -> list[str]:
        """Go on from a state that `describe` returned; if anything differs, return the faults.

        Raises:
            LookupError, TypeError, ValueError: the state or a row cannot be read.
        """
        stated, recorded = known["dataset"], read_dataset(known["dataset"])
        faults = [
            f"its {name} is {self._row[name]!r}, but was verified as {stated[name]!r}"
            for name in write_row(self._dataset, changes=False)
            if self._row[name] != stated[name]
        ]
        number, head = recorded.version, recorded.head
        count, found = self._transaction.find_prefix(self._dataset, number)
        if count != number or found is None:
            faults.append(
                f"{number} entries were verified, but {count} of them are there: entries were cut "
                "off, or an older copy of the ledger is in its place"
            )
        elif found != head:
            faults.append(f"entry {number} has the hash {found}, but was verified with {head}")
        rows: list[Row] = []
        others: list[Row] = []
        for row in self._reservation_rows:
            at = row["ended_entry"]
            (rows if type(at) is int and at <= number else others).append(row)
        ended = hash_chain.GENESIS
        for row in sorted(rows, key=lambda each: each["ended_entry"]):
            ended = _hash_ended(ended, row)
        if ended != known["ended_runs"]:
            faults.append(f"a run that ended up to entry {number} was altered, removed or added")
        if faults:
            return faults
        self.first = self.number = number
        self.head, self.ended, self.closed_at = head, ended, recorded.closed_at
        self._policy, self.balance = recorded.policy, recorded.balance
        self._reservation_rows = others
        self.reservations = {row["id"]: read_reservation(row) for row in known["open_runs"]}
        for row in [*rows, *known["open_runs"]]:
            self._add_taken(row["key_id"], row["team"], read_integers(row["taken"]))
        if known["is_table_checked"]:
            self._checked_policy = read_json(stated["policy"])
        return []

    def find_faults(self) -> Iterator[str]:
        """Check the dataset's whole chain; yield a description of each fault, in order."""
        try:
            rules.describe_dataset(self._dataset)
        except rules.RuleError as error:
            yield f"the dataset breaks a rule: {error}"
            return
        if self.number == 0:
            yield from self.check_first_policy()
        yield from self.check_entries()
        yield from self.column_faults
        yield from self._check_row()
        yield from self._check_reservations()
        yield from self._check_caps()

    def check_entries(self) -> Iterator[str]:
        """Yield the faults of all entries that are not checked yet, in order."""
        after: Any = self.number
        while rows := self._transaction.list_entries(self._dataset, after, PAGE_SIZE):
            for row in rows:
                stored = dict(row._mapping) | {"dataset": self._dataset.identifier}
                wrong = list(find_type_faults(ENTRY, stored))
                yield from (f"entry {row.number!r}: {fault}" for fault in wrong)
                if not wrong:
                    yield from self.check_entry(row.number, row.body, row.hash)
                    self.column_faults += find_column_faults(row)
            after = rows[-1].number
            self._on_page(self)

    def _check_table(self) -> Iterator[str]:
        """Yield a fault if the table of ε for display is too small, or cannot be computed."""
        if read_json(self._row["policy"]) == self._checked_policy:
            return
        try:
            if not self._dataset.policy.is_table_sound():
                yield "its table of ε states less than is proved: the ε that is shown is too small"
        except AccountingError as error:
            yield f"its table of ε could not be checked, so verify again: {error}"

    def check_end(self) -> Iterator[str]:
        """Yield a fault if the dataset's row names another last entry."""
        dataset = self._dataset
        if self.number != dataset.version or self.head != dataset.head:
            yield (
                f"the record ends at entry {self.number}, but the dataset is at {dataset.version}: "
                "entries were cut off or added"
            )

    def _check_row(self) -> Iterator[str]:
        """Yield a fault for each part of the dataset's row that differs from the entries."""
        dataset = self._dataset
        yield from self.check_end()
        if self.balance != dataset.balance:
            yield f"the entries add up to {self.balance}, but the balance is {dataset.balance}"
        if self._policy != dataset.policy:
            stored, recorded = dataset.policy.to_json(), self._policy.to_json()
            yield f"the filter is stored as {stored}, but recorded as {recorded}"
        else:
            yield from self._check_table()
        if self.closed_at != dataset.closed_at:
            yield f"closed_at is {dataset.closed_at}, but recorded as {self.closed_at}"
        if self._policy == dataset.policy and self.balance == dataset.balance:
            written = replace(dataset, balance=self.balance)  # equal, and of whole numbers
            yield from stored_rows.find_json_faults(self._row, written)

    def _check_reservations(self) -> Iterator[str]:
        """Yield a fault for each reservation whose database row differs from the entries."""
        missing = dict(self.reservations)
        for row in sorted(self._reservation_rows, key=lambda each: str(each["id"])):
            identifier = row["id"]
            try:
                faults = list(find_reservation_faults(row, missing.pop(identifier, None)))
            except UNREADABLE as error:
                faults = [f"its row cannot be read: {error!r}"]
            yield from (f"reservation {identifier}: {fault}" for fault in faults)
        for identifier in missing:
            yield f"reservation {identifier} is in the entries, but has no row"

    def _check_caps(self) -> Iterator[str]:
        """Yield a fault for each cap beside which another use is kept than the entries record."""
        for row in self._transaction.list_cap_rows(self._dataset):
            if row["taken"] is None:  # an earlier server set the cap
                continue
            holder = HolderKind(row["kind"]), row["holder"]
            recorded = self._taken.get(holder, self._policy.nothing)
            if read_integers(row["taken"]) != recorded:
                yield (
                    f"the cap of {holder[0]} {holder[1]!r} keeps {row['taken']} as taken, but its "
                    f"runs took {list(recorded)}"
                )


def _hash_ended(previous: str, row: Row) -> str:
    """Return the hash of the row of a run that ended, with those of the runs that ended before."""
    names = stored_rows.list_json_columns(Reservation)
    read = {name: stored_rows.read_column(row, name) for name in names}
    return hash_chain.hash_entry(previous, canonical_json(row | read))


def find_column_faults(row: Any) -> Iterator[str]:
    """Yield a fault if the columns that exports search by differ from an entry; null may be."""
    try:
        entry = json.loads(row.body)
        stated = (entry["kind"], entry["at"])
    except UNREADABLE:
        return  # the entry itself is a fault
    if row.at is None and row.kind is None:
        return  # to be derived: a server of revision 0006 wrote it
    if (row.kind, row.at) != stated:
        yield f"entry {row.number} has {(row.kind, row.at)} in its columns, but records {stated}"


def find_reservation_faults(row: Row, recorded: Reservation | None) -> Iterator[str]:
    """Yield the differences between a reservation's row and what the entries record."""
    wrong_types = list(find_type_faults(RESERVATION, row))
    if wrong_types:
        yield from wrong_types
        return
    stored = read_reservation(row)
    if recorded is None or stored != recorded:
        yield f"it is stored as {stored}, but recorded as {recorded}"
        return
    yield from stored_rows.find_json_faults(row, recorded)


class ForeignFileError(ValueError):
    """A file is no export of the ledger: it has no line that is an entry."""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The result of verifying an export without the database.

    Attributes:
        heads: the number and hash of the last entry of each dataset in the file.
        faults: every fault found.
    """

    heads: dict[str, tuple[int, str]]
    faults: list[str]


def verify_export(lines: Iterable[str]) -> ExportReport:
    """Verify the JSON lines of an export: the chain, the rules and the cost of every plan.

    Whether entries at the end are missing cannot be seen in the file alone: compare the heads with
    those that the ledger or a later certificate states.

    Args:
        lines: each an entry with its dataset and hash; a dataset's entries from the first on.

    Raises:
        ForeignFileError: there is no entry, or none in the first lines.
    """
    checkers: dict[str, _ChainChecker] = {}
    faults: list[str] = []
    owners: dict[str, str] = {}  # the dataset of each reservation
    has_entries = False
    for at, line in enumerate(lines, 1):
        try:
            entry = certificate.read(line)
            name, stored = _read_text(entry, "dataset"), _read_text(entry, "hash")
            body = {key: entry[key] for key in entry.keys() - {"dataset", "hash"}}
            number = _read_integer(body, "number")
            has_entries = True
            if name not in checkers:
                checkers[name] = _ChainChecker(_read_created_dataset(name, body))
                faults += _name_faults(name, checkers[name].check_first_policy())
        except UNREADABLE as error:
            missing = "it has no " if isinstance(error, KeyError) else ""
            faults.append(f"line {at} cannot be read: {missing}{error}")
            if at == _FOREIGN_LINES and not has_entries:
                break
            continue
        text = hash_chain.encode_entry(body)
        faults += _name_faults(name, checkers[name].check_entry(number, text, stored))
        run = body.get("reservation")
        if isinstance(run, str) and owners.setdefault(run, name) != name:
            other = owners[run]
            faults.append(f"dataset {name!r}: entry {number}: run {run} is one of {other!r} too")
    faults += _compare_parts(
        [
            _Part(name, checker.size, run)
            for name, checker in checkers.items()
            for run in checker.reservations.values()
            if run.joint is not None
        ],
        is_complete=False,
    )
    if not has_entries:
        raise ForeignFileError(faults[0] if faults else "it is empty")
    heads = {name: (checker.number, checker.head) for name, checker in checkers.items()}
    return ExportReport(heads, faults)


def _name_faults(dataset: Any, faults: Iterable[str]) -> list[str]:
    """Return faults, each preceded by the name of their dataset."""
    return [f"dataset {dataset!r}: {fault}" for fault in faults]


def _read_created_dataset(name: str, entry: dict[str, Any]) -> Dataset:
    """Return the dataset that a chain's first entry creates.

    Raises:
        ValueError: it is not a first entry, or creates a dataset of another name.
    """
    if entry.get("kind") != EntryKind.CREATE.value:
        raise ValueError(f"the entries of dataset {name!r} must begin with the one that creates it")
    if entry.get("name") != name:
        raise ValueError(f"it creates dataset {entry.get('name')!r}, not {name!r}")
    policy = filters.from_json(
        entry if "filter" in entry else {"filter": RenyiFilter.name, **entry},
        float(entry["epsilon"]),
        float(entry["delta"]),
        NeighbouringRelation(entry["neighbouring_relation"]),
    )
    computed = {"policy": policy, "balance": Balance(policy.nothing, policy.nothing)}
    dataset = Dataset(
        identifier="", version=0, head=hash_chain.GENESIS,
        **take_from_entry(Dataset, entry, computed),
    )  # fmt: skip
    rules.describe_dataset(dataset)
    return dataset


def _read_cap(fields: dict[str, Any], charge: Charge) -> Cap:
    """Return a cap that the entry of a reservation with this charge records."""
    kind = HolderKind.TEAM if "team" in fields else HolderKind.KEY
    share = fields["share"]
    if type(share) is not float:
        raise TypeError(f"share must be a number, not {share!r}")
    # without slack to limit, caps of earlier versions were no different
    limits_slack = "slack" in fields or not charge.needs_slack
    return Cap(kind, _read_text(fields, kind.value), share, limits_slack)


def _read_integer(entry: dict[str, Any], name: str) -> int:
    """Return an integer field of an entry; raise TypeError for any other type."""
    value = entry[name]
    if type(value) is not int:
        raise TypeError(f"{name} must be an integer, not {value!r}")
    return value


def _read_text(entry: dict[str, Any], name: str) -> str:
    """Return a text field of an entry; raise TypeError for any other type."""
    value = entry[name]
    if type(value) is not str:
        raise TypeError(f"{name} must be text, not {value!r}")
    return value


def _describe_difference(entry: dict[str, Any], written: dict[str, Any]) -> str:
    """Describe the fields in which an entry differs from the expected one."""
    names = [
        name
        for name in sorted(entry.keys() | written.keys())
        if hash_chain.encode_entry({name: entry.get(name)})
        != hash_chain.encode_entry({name: written.get(name)})
    ]
    if not names:
        return "it is not in the ledger's canonical form"
    differences = "; ".join(
        f"{name} is {entry.get(name)!r}, not {written.get(name)!r}" for name in names
    )
    return f"it differs from what the ledger writes: {differences}"
